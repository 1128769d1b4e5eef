//! A TCP proxy between one replica and one NATS server, which can be cut.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Open,
    /// Connections are closed, and new ones too.
    Cut,
    /// Connections stay, and nothing passes until the mode changes.
    Silent,
}

struct State {
    mode: Mode,
    /// Both ends of each connection.
    streams: Vec<TcpStream>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    pub(super) fn start(to: u16) -> io::Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let state = Mutex::new(State { mode: Mode::Open, streams: Vec::new() });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                // If it cannot be connected, the client sees that its connection is closed.
                let _ = accepting.connect(&client, to);
            }
        });
        Ok(Proxy { port, shared })
    }

    pub(super) fn set(&self, mode: Mode) {
        let mut state = self.shared.state.lock().expect("no thread panics while it holds this");
        state.mode = mode;
        if mode == Mode::Cut {
            for stream in state.streams.drain(..) {
                // It may be closed already.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn connect(self: &Arc<Shared>, client: &TcpStream, to: u16) -> io::Result<()> {
        let server = TcpStream::connect(("127.0.0.1", to))?;
        let mut state = self.state.lock().expect("no thread panics while it holds this");
        if state.mode == Mode::Cut {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        for (from, to) in [(client, &server), (&server, client)] {
            from.set_nodelay(true)?;
            state.streams.push(from.try_clone()?);
            let (from, to, shared) = (from.try_clone()?, to.try_clone()?, Arc::clone(self));
            thread::spawn(move || {
                // Either end may close at any time.
                let _ = shared.copy(&from, &to);
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        // Closed connections are forgotten.
        state.streams.retain(|stream| stream.peer_addr().is_ok());
        Ok(())
    }

    fn copy(&self, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let length = from.read(&mut buffer)?;
            if length == 0 {
                return Ok(());
            }
            let mut state = self.state.lock().expect("no thread panics while it holds this");
            while state.mode == Mode::Silent {
                state = self.changed.wait(state).expect("no thread panics while it holds this");
            }
            drop(state);
            to.write_all(&buffer[..length])?;
        }
    }
}
