//! Work that waits for a disk or a name server, or that takes long, on a few threads beside the loop. If the system refuses a
//! thread, only that task fails; `spawn_blocking` of tokio would panic, and is not used.

use std::{
    collections::VecDeque,
    fmt,
    future::Future,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    thread,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

/// The number of threads for one queue.
const THREADS_MAX: usize = 2;
/// The length of the queue. Further work fails at once.
const WAITING_MAX: usize = 1024;

/// Reads and writes files and `/proc`.
static FILES: Pool = Pool::new(|pool| start_thread("outlast-files", pool));
/// Looks up host names. A slow name server does not delay file operations.
static NAMES: Pool = Pool::new(|pool| start_thread("outlast-names", pool));

/// Parses long messages of clients, and those of servers: neither waits for the other.
static OF_CLIENTS: Pool = Pool::new(|pool| start_thread("outlast-parse", pool));
static OF_SERVERS: Pool = Pool::new(|pool| start_thread("outlast-parse", pool));

/// Begins work that waits for a disk. If no thread can be started, the task is ready with that error.
pub fn offload<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
    FILES.begin(work)
}

/// Begins a lookup of a host name.
pub fn look_up<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
    NAMES.begin(work)
}

/// Begins work that a client causes and that needs a core for longer than a turn of the loop may take. File operations and
/// the work for servers do not wait for it. It is left out if the task is dropped before.
pub fn compute_for_client<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
    OF_CLIENTS.begin_while_wanted(work)
}

/// The same for work that a server causes.
pub fn compute_for_server<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
    OF_SERVERS.begin_while_wanted(work)
}

/// For the exit of the program: waits for pending file operations, for a bounded time.
pub fn finish(patience: Duration) {
    FILES.finish(patience);
}

/// Work that was begun. File operations and lookups run to their end even if this is dropped.
pub struct Task<T>(State<T>);

enum State<T> {
    Begun(oneshot::Receiver<T>),
    Failed(Option<io::Error>),
}

impl<T> Future for Task<T> {
    type Output = io::Result<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        match &mut self.get_mut().0 {
            State::Begun(result) => {
                Pin::new(result).poll(cx).map(|result| result.map_err(|_| io::Error::other("the work panicked")))
            }
            State::Failed(error) => Poll::Ready(Err(error.take().unwrap_or_else(|| io::ErrorKind::Other.into()))),
        }
    }
}

impl<T> Unpin for Task<T> {}

impl<T> fmt::Debug for Task<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.0 {
            State::Begun(_) => "begun",
            State::Failed(_) => "failed",
        };
        f.debug_tuple("Task").field(&state).finish()
    }
}

/// A queue and the threads that serve it. A thread exits when the queue is empty, which frees its memory.
struct Pool {
    queue: Mutex<Queue>,
    thread_ended: Condvar,
    start: fn(&'static Pool) -> io::Result<()>,
}

struct Queue {
    waiting: VecDeque<Box<dyn FnOnce() + Send>>,
    threads: usize,
}

impl Pool {
    const fn new(start: fn(&'static Pool) -> io::Result<()>) -> Pool {
        let queue = Queue { waiting: VecDeque::new(), threads: 0 };
        Pool { queue: Mutex::new(queue), thread_ended: Condvar::new(), start }
    }

    fn begin<T: Send + 'static>(&'static self, work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
        let (tell, result) = oneshot::channel();
        self.task(Box::new(move || drop(tell.send(work()))), result)
    }

    /// The work is dropped if the task was dropped before a thread comes to it.
    fn begin_while_wanted<T: Send + 'static>(&'static self, work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
        let (tell, result) = oneshot::channel();
        let work = move || {
            if !tell.is_closed() {
                let _ = tell.send(work());
            }
        };
        self.task(Box::new(work), result)
    }

    fn task<T>(&'static self, work: Box<dyn FnOnce() + Send>, result: oneshot::Receiver<T>) -> Task<T> {
        match self.push(work) {
            Ok(()) => Task(State::Begun(result)),
            Err(error) => Task(State::Failed(Some(error))),
        }
    }

    fn push(&'static self, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        let mut queue = self.queue();
        if WAITING_MAX <= queue.waiting.len() {
            return Err(io::Error::other(format!("{WAITING_MAX} operations are already waiting")));
        }
        queue.waiting.push_back(work);
        if queue.threads < THREADS_MAX {
            match (self.start)(self) {
                Ok(()) => queue.threads += 1,
                // A running thread takes this work later.
                Err(_) if 0 < queue.threads => {}
                Err(error) => {
                    queue.waiting.pop_back();
                    return Err(io::Error::new(
                        error.kind(),
                        format!("no thread can be started: {}", crate::cause::plain(&error.to_string())),
                    ));
                }
            }
        }
        Ok(())
    }

    /// The main function of a thread.
    fn serve(&self) {
        loop {
            let work = {
                let mut queue = self.queue();
                let Some(work) = queue.waiting.pop_front() else {
                    queue.threads -= 1;
                    self.thread_ended.notify_all();
                    return;
                };
                work
            };
            // The panic message is already printed; the receiver of the result gets an error.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }

    fn finish(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut queue = self.queue();
        while 0 < queue.threads {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = self.thread_ended.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start_thread(name: &str, pool: &'static Pool) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(|| pool.serve()).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn wait_for<T>(task: Task<T>) -> io::Result<T> {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(task)
    }

    #[test]
    fn work_without_a_thread_fails_with_the_reason() {
        static NONE: Pool = Pool::new(|_| Err(io::ErrorKind::WouldBlock.into()));
        let error = wait_for(NONE.begin(|| 1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(error.to_string().starts_with("no thread can be started"), "{error}");
        assert!(NONE.queue().waiting.is_empty(), "nothing is left that no thread comes to");
    }

    #[test]
    fn work_waits_for_the_thread_that_is_there_if_a_second_cannot_be_started() {
        static ONE: Pool = Pool::new(|pool| match pool.queue.try_lock() {
            Ok(_) => unreachable!("the caller holds the lock"),
            Err(_) if HAS_ONE.swap(true, std::sync::atomic::Ordering::SeqCst) => Err(io::ErrorKind::WouldBlock.into()),
            Err(_) => start_thread("one", pool),
        });
        static HAS_ONE: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
        let (go, wait) = mpsc::channel::<()>();
        let first = ONE.begin(move || wait.recv().is_ok());
        let second = ONE.begin(|| 2);
        go.send(()).unwrap();
        assert!(wait_for(first).unwrap());
        assert_eq!(wait_for(second).unwrap(), 2);
    }

    #[test]
    fn the_queue_is_bounded_and_threads_end_with_it() {
        static POOL: Pool = Pool::new(|pool| start_thread("bounded", pool));
        let (go, wait) = mpsc::channel::<()>();
        let wait = std::sync::Arc::new(Mutex::new(wait));
        let blocked: Vec<Task<bool>> = (0..THREADS_MAX)
            .map(|_| {
                let wait = wait.clone();
                POOL.begin(move || wait.lock().unwrap().recv().is_ok())
            })
            .collect();
        // The threads may or may not have taken their work yet.
        let tasks: Vec<Task<()>> = (0..WAITING_MAX + THREADS_MAX).map(|_| POOL.begin(|| ())).collect();
        let refused = tasks.iter().filter(|task| matches!(task.0, State::Failed(_))).count();
        assert!((THREADS_MAX..=2 * THREADS_MAX).contains(&refused), "{refused}");
        for _ in 0..THREADS_MAX {
            go.send(()).unwrap();
        }
        assert!(blocked.into_iter().all(|task| wait_for(task).unwrap()));
        POOL.finish(Duration::from_secs(60));
        assert_eq!(POOL.queue().threads, 0);
    }

    #[test]
    fn work_that_is_not_wanted_any_more_is_left_out() {
        static POOL: Pool = Pool::new(|pool| start_thread("wanted", pool));
        let (go, wait) = mpsc::channel::<()>();
        let wait = std::sync::Arc::new(Mutex::new(wait));
        let blocked: Vec<Task<bool>> = (0..THREADS_MAX)
            .map(|_| {
                let wait = wait.clone();
                POOL.begin_while_wanted(move || wait.lock().unwrap().recv().is_ok())
            })
            .collect();
        let (ran, runs) = mpsc::channel();
        let also_ran = ran.clone();
        let dropped = POOL.begin_while_wanted(move || ran.send("dropped"));
        let kept = POOL.begin_while_wanted(move || also_ran.send("kept"));
        drop(dropped);
        for _ in 0..THREADS_MAX {
            go.send(()).unwrap();
        }
        assert!(blocked.into_iter().all(|task| wait_for(task).unwrap()));
        wait_for(kept).unwrap().unwrap();
        assert_eq!(runs.iter().collect::<Vec<_>>(), ["kept"]);
    }

    #[test]
    fn work_that_panics_is_an_error_and_ends_no_thread() {
        static POOL: Pool = Pool::new(|pool| start_thread("panics", pool));
        assert!(wait_for(POOL.begin(|| -> u8 { panic!("on purpose") })).is_err());
        assert_eq!(wait_for(POOL.begin(|| 3)).unwrap(), 3);
    }
}
