//! Messages between outlast and a monitor: frames of a u32 length and a body, over a stream socket, because macOS has
//! no sockets that keep the boundaries of large messages.
//!
//! After an upgrade in place the keeper and its monitors are still of the old program, so the protocol has a version.
//! Each version only adds kinds of frames to the one before, and a frame that a process may not know is never sent to it.
//! So a program can use processes of all older versions. A malformed frame is a bug.

use std::{
    ffi::{OsStr, OsString},
    io::{self, ErrorKind},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::PathBuf,
    time::Duration,
};

use outlast_core::sandbox::{Ports, RULES_MAX};

use crate::{BootTime, Exit, News, Order, Sandbox, Signal, Size, Stdio};

/// The version of these messages. It is raised with every change of them; a program that does not know the version of a
/// running keeper refuses to take over from the last one.
///
/// | version | adds |
/// |---|---|
/// | 2 | children with a lease: frames `l`, `e` and `L` |
pub(super) const PROTOCOL: u32 = 2;

/// The first version with leases.
pub(super) const WITH_LEASES: u32 = 2;

/// The sender refuses a longer order; no kernel would start it anyway.
pub(super) const FRAME_MAX: usize = 32 * 1024 * 1024;

const HEAD: usize = size_of::<u32>();

/// Stands for all ports, in place of their number.
const ANY_PORTS: u32 = u32::MAX;

/// From outlast to a monitor.
#[derive(Debug)]
pub(super) enum Request {
    /// The child's stdin, stdout and stderr are sent with the first byte of the frame.
    Spawn {
        key: u64,
        order: Box<Order>,
    },
    Signal {
        key: u64,
        signal: Signal,
    },
    Sweep {
        key: u64,
    },
    /// The lease of the child now ends at this moment, unless it has ended already.
    Extend {
        key: u64,
        until: BootTime,
    },
}

/// A child with a lease has a frame of another kind, which begins with the end of the lease.
pub(super) fn encode_spawn(key: u64, order: &Order) -> io::Result<Vec<u8>> {
    let mut frame = match order.live_until {
        None => Frame::new(b'+', key),
        Some(until) => Frame::new(b'l', key).with_moment(until),
    };
    frame.put_bytes(order.program.as_bytes());
    frame.put_bytes(std::path::absolute(&order.cwd)?.as_os_str().as_bytes());
    frame.put_bytes(order.tag.as_bytes());
    let has_terminal = matches!(order.stdio, Stdio::Terminal(_));
    let mut frame = frame.with_u32(u32::from(has_terminal) | u32::from(order.env_is_all) << 1);
    frame.put_length(order.args.len());
    for arg in &order.args {
        frame.put_bytes(arg.as_bytes());
    }
    frame.put_length(order.env.len());
    for (name, value) in &order.env {
        frame.put_bytes(name.as_bytes());
        frame.put_bytes(value.as_bytes());
    }
    put_sandbox(&mut frame, order.sandbox.as_ref())?;
    frame.finish()
}

/// At most [`RULES_MAX`] entries in each list; the configuration refuses more.
fn put_sandbox(frame: &mut Frame, sandbox: Option<&Sandbox>) -> io::Result<()> {
    frame.put_length(sandbox.is_some().into());
    let Some(sandbox) = sandbox else { return Ok(()) };
    let too_many = || io::Error::new(ErrorKind::InvalidInput, "the sandbox has too many entries");
    for paths in [&sandbox.read, &sandbox.write] {
        if RULES_MAX < paths.len() {
            return Err(too_many());
        }
        frame.put_length(paths.len());
        for path in paths {
            frame.put_bytes(std::path::absolute(path)?.as_os_str().as_bytes());
        }
    }
    for ports in [&sandbox.tcp_connect, &sandbox.tcp_bind] {
        let Ports::Only(ports) = ports else {
            frame.put_length(ANY_PORTS as usize);
            continue;
        };
        if RULES_MAX < ports.len() {
            return Err(too_many());
        }
        frame.put_length(ports.len());
        ports.iter().for_each(|port| frame.put_length((*port).into()));
    }
    Ok(())
}

/// An outer `None` is a malformed frame.
fn take_sandbox(body: &mut Body<'_>) -> Option<Option<Sandbox>> {
    if body.take_u32()? == 0 {
        return Some(None);
    }
    let count = |body: &mut Body<'_>| body.take_u32().filter(|count| *count as usize <= RULES_MAX);
    let paths = |body: &mut Body<'_>| -> Option<Vec<PathBuf>> {
        (0..count(body)?).map(|_| body.take_os_string().map(PathBuf::from)).collect()
    };
    let ports = |body: &mut Body<'_>| -> Option<Ports> {
        match body.take_u32()? {
            ANY_PORTS => Some(Ports::Any),
            count if count as usize <= RULES_MAX => {
                let ports = (0..count).map(|_| u16::try_from(body.take_u32()?).ok());
                ports.collect::<Option<_>>().map(Ports::Only)
            }
            _ => None,
        }
    };
    let (read, write) = (paths(body)?, paths(body)?);
    let (tcp_connect, tcp_bind) = (ports(body)?, ports(body)?);
    Some(Some(Sandbox { read, write, tcp_connect, tcp_bind }))
}

pub(super) fn encode_signal(key: u64, signal: Signal) -> Vec<u8> {
    let kind = match signal {
        Signal::HangUp => b'H',
        Signal::Terminate => b'T',
        Signal::Kill => b'K',
        Signal::Continue => b'C',
    };
    Frame::new(kind, key).finish_small()
}

pub(super) fn encode_sweep(key: u64) -> Vec<u8> {
    Frame::new(b's', key).finish_small()
}

pub(super) fn encode_extend(key: u64, until: BootTime) -> Vec<u8> {
    Frame::new(b'e', key).with_moment(until).finish_small()
}

/// Removes the first complete request from the inbox, if there is one.
pub(super) fn take_request(inbox: &mut Vec<u8>) -> io::Result<Option<Request>> {
    take(inbox, |kind, key, body| {
        Some(match kind {
            b'+' | b'l' => {
                let live_until = if kind == b'l' { Some(body.take_moment()?) } else { None };
                let program = body.take_os_string()?;
                let cwd = PathBuf::from(body.take_os_string()?);
                let tag = body.take_string()?;
                let flags = body.take_u32()?;
                let (has_terminal, env_is_all) = (flags & 1 != 0, flags & 2 != 0);
                let args = (0..body.take_u32()?).map(|_| body.take_os_string()).collect::<Option<_>>()?;
                let env = (0..body.take_u32()?)
                    .map(|_| Some((body.take_os_string()?, body.take_os_string()?)))
                    .collect::<Option<_>>()?;
                let sandbox = take_sandbox(body)?;
                // The monitor receives the descriptors themselves, and only needs to know whether they are a
                // terminal.
                let stdio = if has_terminal { Stdio::Terminal(Size::default()) } else { Stdio::Piped };
                Request::Spawn {
                    key,
                    order: Box::new(Order { program, args, cwd, env, env_is_all, tag, stdio, sandbox, live_until }),
                }
            }
            b'H' => Request::Signal { key, signal: Signal::HangUp },
            b'T' => Request::Signal { key, signal: Signal::Terminate },
            b'K' => Request::Signal { key, signal: Signal::Kill },
            b'C' => Request::Signal { key, signal: Signal::Continue },
            b's' => Request::Sweep { key },
            b'e' => Request::Extend { key, until: body.take_moment()? },
            _ => return None,
        })
    })
}

pub(super) fn encode_news(news: &News) -> Vec<u8> {
    match news {
        News::Started { key, pid } => Frame::new(b'S', *key).with_u32(*pid).finish_small(),
        News::StartFailed { key, error } => {
            let mut frame = Frame::new(b'F', *key).with_u32(code_of(error.kind()));
            let words = error.to_string();
            frame.put_bytes(words.as_bytes());
            frame.finish_small()
        }
        News::Exited { key, exit: Exit::Code(code) } => Frame::new(b'X', *key).with_u32(*code as u32).finish_small(),
        News::Exited { key, exit: Exit::Signal(number) } => {
            Frame::new(b'Y', *key).with_u32(*number as u32).finish_small()
        }
        News::LeaseEnded { key } => Frame::new(b'L', *key).finish_small(),
        News::Swept { key } => Frame::new(b'W', *key).finish_small(),
        News::Stopped { key } => Frame::new(b'P', *key).finish_small(),
        News::Noticed(_) => unreachable!("only outlast notices that"),
    }
}

/// From a monitor to outlast.
#[derive(Debug)]
pub(super) enum Word {
    /// The process id of the monitor. Sent before any report.
    Monitor(i32),
    News(News),
}

pub(super) fn encode_monitor(pid: u32) -> Vec<u8> {
    Frame::new(b'M', 0).with_u32(pid).finish_small()
}

/// Removes the first complete message from the inbox, if there is one.
pub(super) fn take_word(inbox: &mut Vec<u8>) -> io::Result<Option<Word>> {
    take(inbox, |kind, key, body| {
        Some(Word::News(match kind {
            b'M' => return Some(Word::Monitor(body.take_u32()? as i32)),
            b'S' => News::Started { key, pid: body.take_u32()? },
            b'F' => {
                let kind = kind_of(body.take_u32()?);
                News::StartFailed { key, error: io::Error::new(kind, body.take_string()?) }
            }
            b'X' => News::Exited { key, exit: Exit::Code(body.take_u32()? as i32) },
            b'Y' => News::Exited { key, exit: Exit::Signal(body.take_u32()? as i32) },
            b'L' => News::LeaseEnded { key },
            b'W' => News::Swept { key },
            b'P' => News::Stopped { key },
            _ => return None,
        }))
    })
}

/// The kinds of error that callers distinguish; the text of the error has the details.
const KINDS: [ErrorKind; 6] = [
    ErrorKind::Other,
    ErrorKind::NotFound,
    ErrorKind::NotADirectory,
    ErrorKind::PermissionDenied,
    ErrorKind::ArgumentListTooLong,
    ErrorKind::OutOfMemory,
];

fn code_of(kind: ErrorKind) -> u32 {
    KINDS.iter().position(|&known| known == kind).map_or(0, |at| at as u32)
}

fn kind_of(code: u32) -> ErrorKind {
    KINDS.get(code as usize).copied().unwrap_or(ErrorKind::Other)
}

fn take<T>(inbox: &mut Vec<u8>, read: impl FnOnce(u8, u64, &mut Body<'_>) -> Option<T>) -> io::Result<Option<T>> {
    let malformed = || io::Error::new(ErrorKind::InvalidData, "a malformed frame between outlast and its keeper");
    let Some(head) = inbox.first_chunk::<HEAD>() else { return Ok(None) };
    let length = u32::from_ne_bytes(*head) as usize;
    if FRAME_MAX < length {
        return Err(malformed());
    }
    let Some(bytes) = inbox.get(HEAD..HEAD + length) else { return Ok(None) };
    let mut body = Body(bytes);
    let value = (|| {
        let kind = body.take_array::<1>()?[0];
        let key = u64::from_ne_bytes(body.take_array()?);
        read(kind, key, &mut body)
    })()
    .ok_or_else(malformed)?;
    inbox.drain(..HEAD + length);
    if inbox.is_empty() {
        // The memory of a large order is freed: the monitor may run for long.
        *inbox = Vec::new();
    }
    Ok(Some(value))
}

struct Frame(Vec<u8>);

impl Frame {
    fn new(kind: u8, key: u64) -> Frame {
        let mut bytes = vec![0; HEAD];
        bytes.push(kind);
        bytes.extend_from_slice(&key.to_ne_bytes());
        Frame(bytes)
    }

    fn with_u32(mut self, number: u32) -> Frame {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    /// In nanoseconds, which reach 584 years.
    fn with_moment(mut self, moment: BootTime) -> Frame {
        let nanoseconds = u64::try_from(moment.0.as_nanos()).unwrap_or(u64::MAX);
        self.0.extend_from_slice(&nanoseconds.to_ne_bytes());
        self
    }

    /// A length that does not fit also makes the frame too long, which `finish` refuses.
    fn put_length(&mut self, length: usize) {
        self.0.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    }

    fn put_bytes(&mut self, bytes: &[u8]) {
        self.put_length(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    fn finish(mut self) -> io::Result<Vec<u8>> {
        let length = self.0.len() - HEAD;
        if FRAME_MAX < length {
            return Err(io::Error::new(ErrorKind::ArgumentListTooLong, "the arguments and environment are too long"));
        }
        self.0[..HEAD].copy_from_slice(&(length as u32).to_ne_bytes());
        Ok(self.0)
    }

    fn finish_small(self) -> Vec<u8> {
        self.finish().expect("a frame without an order is short")
    }
}

struct Body<'a>(&'a [u8]);

impl<'a> Body<'a> {
    fn take_slice(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn take_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take_slice(N)?.try_into().ok()
    }

    fn take_u32(&mut self) -> Option<u32> {
        self.take_array().map(u32::from_ne_bytes)
    }

    fn take_moment(&mut self) -> Option<BootTime> {
        self.take_array().map(|bytes| BootTime(Duration::from_nanos(u64::from_ne_bytes(bytes))))
    }

    fn take_bytes(&mut self) -> Option<Vec<u8>> {
        let length = self.take_u32()? as usize;
        self.take_slice(length).map(<[u8]>::to_vec)
    }

    fn take_os_string(&mut self) -> Option<OsString> {
        self.take_bytes().map(OsString::from_vec)
    }

    fn take_string(&mut self) -> Option<String> {
        self.take_bytes().map(|bytes| OsStr::from_bytes(&bytes).to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_back_wherever_reads_are_split() {
        let order = Order {
            program: OsString::from_vec(vec![b'p', 0xff]),
            args: vec!["a".into(), "".into(), "x".repeat(100_000).into()],
            cwd: "/somewhere".into(),
            env: vec![("NAME".into(), "value".into())],
            env_is_all: true,
            tag: "id.7".into(),
            stdio: Stdio::Piped,
            sandbox: Some(Sandbox {
                read: vec!["/a".into(), "/b c".into()],
                write: vec![],
                tcp_connect: Ports::Only(vec![443, 65535]),
                tcp_bind: Ports::Any,
            }),
            live_until: None,
        };
        let leased = Order { live_until: Some(BootTime(Duration::new(7, 9))), ..order.clone() };
        let mut stream = encode_spawn(7, &order).unwrap();
        stream.extend(encode_signal(8, Signal::Kill));
        stream.extend(encode_sweep(u64::MAX));
        stream.extend(encode_spawn(9, &leased).unwrap());
        stream.extend(encode_extend(9, BootTime(Duration::MAX)));

        let mut inbox = Vec::new();
        let mut seen = Vec::new();
        for piece in stream.chunks(9_999) {
            inbox.extend_from_slice(piece);
            while let Some(request) = take_request(&mut inbox).unwrap() {
                seen.push(request);
            }
        }
        let [
            Request::Spawn { key: 7, order: arrived },
            Request::Signal { key: 8, signal: Signal::Kill },
            Request::Sweep { key: u64::MAX },
            Request::Spawn { key: 9, order: with_lease },
            Request::Extend { key: 9, until },
        ] = &seen[..]
        else {
            panic!("{seen:?}")
        };
        assert_eq!(format!("{arrived:?}"), format!("{order:?}"));
        assert_eq!(format!("{with_lease:?}"), format!("{leased:?}"));
        assert_eq!(*until, BootTime(Duration::from_nanos(u64::MAX)));
        assert!(inbox.is_empty());
    }

    #[test]
    fn a_sandbox_with_too_many_entries_is_not_sent() {
        let order = |entries: usize| Order {
            program: "p".into(),
            args: vec![],
            cwd: "/".into(),
            env: vec![],
            env_is_all: false,
            tag: String::new(),
            stdio: Stdio::Piped,
            sandbox: Some(Sandbox {
                read: vec!["/a".into(); entries],
                tcp_bind: Ports::Only(vec![1; entries]),
                ..Sandbox::default()
            }),
            live_until: None,
        };
        let mut stream = encode_spawn(1, &order(RULES_MAX)).unwrap();
        assert!(matches!(take_request(&mut stream), Ok(Some(Request::Spawn { .. }))));
        assert_eq!(encode_spawn(1, &order(RULES_MAX + 1)).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn reports_are_read_back_as_they_were_written() {
        let table = [
            News::Started { key: 1, pid: u32::MAX },
            News::StartFailed { key: 2, error: io::Error::new(ErrorKind::NotFound, "no program named `x`") },
            News::Exited { key: 3, exit: Exit::Code(255) },
            News::Exited { key: 4, exit: Exit::Signal(9) },
            News::Swept { key: 5 },
            News::Stopped { key: 6 },
            News::LeaseEnded { key: 7 },
        ];
        let mut inbox: Vec<u8> = table.iter().flat_map(encode_news).collect();
        for news in &table {
            let Some(Word::News(arrived)) = take_word(&mut inbox).unwrap() else { panic!("no news") };
            assert_eq!(format!("{arrived:?}"), format!("{news:?}"));
        }
        assert!(take_word(&mut inbox).unwrap().is_none());
        assert!(matches!(take_word(&mut encode_monitor(7)).unwrap(), Some(Word::Monitor(7))));
    }

    #[test]
    fn invalid_bytes_are_refused_at_once() {
        for mut nonsense in [vec![0xff; 8], Frame::new(b'?', 1).finish_small()] {
            assert_eq!(take_request(&mut nonsense).unwrap_err().kind(), ErrorKind::InvalidData);
        }
    }
}
