//! The format of a packet: a header of fixed length, then frames until its end. It is read strictly, and nothing is
//! allocated for what a packet only announces.

use bytes::{BufMut, BytesMut};

use super::Instance;

/// The first bytes of each packet: a mark, and the version of the format.
const MARK: [u8; 3] = *b"os\x01";
pub(super) const HEADER_LEN: usize = MARK.len() + 1 + 6 * 8;
/// The length of the longest head of a frame: a kind and three numbers.
pub(super) const FRAME_HEAD_MAX: usize = 1 + 3 * VARINT_MAX;
const VARINT_MAX: usize = 10;

const IS_GAP: u8 = 1;
const ASKS: u8 = 2;

const OPEN: u8 = 1;
const BEGIN: u8 = 2;
const PART: u8 = 3;
const CREDIT: u8 = 4;
const CLOSE: u8 = 5;
const ABORT: u8 = 6;
/// The stream was opened by the sender of the frame.
const IS_OPENER: u8 = 0x80;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) from: Instance,
    pub(super) to: Instance,
    /// The number of the channel on the sender's side.
    pub(super) source: u64,
    /// The number of the channel on the receiver's side, or 0 if the sender does not know it.
    pub(super) target: u64,
    /// The number of this packet. Of a packet without frames: the number of the next one with frames.
    pub(super) number: u64,
    /// The number of the next packet that the sender expects.
    pub(super) ack: u64,
    /// The sender misses the packet `ack`, although a later one was sent.
    pub(super) is_gap: bool,
    /// The sender wants an acknowledgement at once.
    pub(super) asks: bool,
}

impl Header {
    pub(super) fn bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut rest = &mut bytes[..];
        rest.put_slice(&MARK);
        rest.put_u8(if self.is_gap { IS_GAP } else { 0 } | if self.asks { ASKS } else { 0 });
        for number in [self.from, self.to, self.source, self.target, self.number, self.ack] {
            rest.put_u64(number);
        }
        bytes
    }

    pub(super) fn read(packet: &[u8]) -> Option<Header> {
        let (head, _) = packet.split_at_checked(HEADER_LEN)?;
        let (flags, numbers) = head.strip_prefix(&MARK)?.split_first()?;
        if flags & !(IS_GAP | ASKS) != 0 {
            return None;
        }
        let mut numbers = numbers.chunks_exact(8).map(|bytes| u64::from_be_bytes(bytes.try_into().unwrap_or_default()));
        let mut next = || numbers.next();
        let (from, to, source, target, number, ack) = (next()?, next()?, next()?, next()?, next()?, next()?);
        let (is_gap, asks) = (flags & IS_GAP != 0, flags & ASKS != 0);
        (source != 0).then_some(Header { from, to, source, target, number, ack, is_gap, asks })
    }
}

/// The name of a stream in the packets of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wire {
    /// The handle of the stream at the side that opened it.
    pub(super) id: u64,
    /// In a frame: the sender of the frame opened the stream. Elsewhere: this side did.
    pub(super) is_opener: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame<'a> {
    /// Opens a stream: the hello begins, of `total` bytes.
    Open { wire: Wire, total: u64, part: &'a [u8] },
    /// A message of `total` bytes begins.
    Begin { wire: Wire, total: u64, part: &'a [u8] },
    /// The hello or message continues.
    Part { wire: Wire, part: &'a [u8] },
    /// So much of what was sent is consumed.
    Credit { wire: Wire, amount: u64 },
    /// The sender has sent everything, and has finished with the stream.
    Close { wire: Wire },
    /// The sender has finished with the stream, for this reason.
    Abort { wire: Wire, why: &'a str },
}

impl Frame<'_> {
    pub(super) fn wire(&self) -> Wire {
        match self {
            Frame::Open { wire, .. } | Frame::Begin { wire, .. } | Frame::Part { wire, .. } => *wire,
            Frame::Credit { wire, .. } | Frame::Close { wire } | Frame::Abort { wire, .. } => *wire,
        }
    }

    pub(super) fn write(&self, packet: &mut BytesMut) {
        match self {
            Frame::Open { wire, total, part } => {
                begin(packet, OPEN, *wire);
                put_varint(packet, *total);
                put_bytes(packet, part);
            }
            Frame::Begin { wire, total, part } => {
                begin(packet, BEGIN, *wire);
                put_varint(packet, *total);
                put_bytes(packet, part);
            }
            Frame::Part { wire, part } => {
                begin(packet, PART, *wire);
                put_bytes(packet, part);
            }
            Frame::Credit { wire, amount } => {
                begin(packet, CREDIT, *wire);
                put_varint(packet, *amount);
            }
            Frame::Close { wire } => begin(packet, CLOSE, *wire),
            Frame::Abort { wire, why } => {
                begin(packet, ABORT, *wire);
                put_bytes(packet, why.as_bytes());
            }
        }
    }
}

fn begin(packet: &mut BytesMut, kind: u8, wire: Wire) {
    packet.put_u8(if wire.is_opener { kind | IS_OPENER } else { kind });
    put_varint(packet, wire.id);
}

fn put_bytes(packet: &mut BytesMut, bytes: &[u8]) {
    put_varint(packet, bytes.len() as u64);
    packet.put_slice(bytes);
}

/// Seven bits in each byte, the lowest first; the last byte is below 128.
fn put_varint(packet: &mut BytesMut, mut number: u64) {
    while number >= 0x80 {
        packet.put_u8(number as u8 | 0x80);
        number >>= 7;
    }
    packet.put_u8(number as u8);
}

/// The frames of a packet do not follow the format.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unreadable;

/// Reads the frames of a packet one by one.
#[derive(Debug)]
pub(super) struct Frames<'a> {
    rest: &'a [u8],
}

impl<'a> Frames<'a> {
    pub(super) fn of(packet: &'a [u8]) -> Frames<'a> {
        Frames { rest: packet.get(HEADER_LEN..).unwrap_or_default() }
    }

    pub(super) fn next(&mut self) -> Result<Option<Frame<'a>>, Unreadable> {
        let Some((kind, rest)) = self.rest.split_first() else { return Ok(None) };
        self.rest = rest;
        let wire = Wire { is_opener: kind & IS_OPENER != 0, id: self.varint()? };
        let frame = match kind & !IS_OPENER {
            OPEN if wire.is_opener => Frame::Open { wire, total: self.varint()?, part: self.bytes()? },
            BEGIN => Frame::Begin { wire, total: self.varint()?, part: self.bytes()? },
            PART => Frame::Part { wire, part: self.bytes()? },
            CREDIT => Frame::Credit { wire, amount: self.varint()? },
            CLOSE => Frame::Close { wire },
            ABORT => Frame::Abort { wire, why: str::from_utf8(self.bytes()?).map_err(|_| Unreadable)? },
            _ => return Err(Unreadable),
        };
        Ok(Some(frame))
    }

    fn varint(&mut self) -> Result<u64, Unreadable> {
        let mut number = 0u64;
        for index in 0..VARINT_MAX {
            let (byte, rest) = self.rest.split_first().ok_or(Unreadable)?;
            self.rest = rest;
            let bits = u64::from(byte & 0x7f);
            let shift = 7 * index as u32;
            if bits << shift >> shift != bits {
                return Err(Unreadable);
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Unreadable)
    }

    fn bytes(&mut self) -> Result<&'a [u8], Unreadable> {
        let len = usize::try_from(self.varint()?).map_err(|_| Unreadable)?;
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Unreadable)?;
        self.rest = rest;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(id: u64, is_opener: bool) -> Wire {
        Wire { id, is_opener }
    }

    #[test]
    fn what_is_written_is_read() {
        let header =
            Header { from: u64::MAX, to: 1, source: 7, target: 0, number: 1 << 40, ack: 3, is_gap: true, asks: false };
        let frames = [
            Frame::Open { wire: wire(1, true), total: 300, part: b"hello" },
            Frame::Begin { wire: wire(u64::MAX, false), total: 0, part: b"" },
            Frame::Part { wire: wire(128, true), part: &[0xff; 200] },
            Frame::Credit { wire: wire(0, false), amount: u64::MAX },
            Frame::Close { wire: wire(127, true) },
            Frame::Abort { wire: wire(16_384, false), why: "é" },
        ];
        let mut packet = BytesMut::from(&header.bytes()[..]);
        for frame in &frames {
            let before = packet.len();
            frame.write(&mut packet);
            let part = match frame {
                Frame::Open { part, .. } | Frame::Begin { part, .. } | Frame::Part { part, .. } => part.len(),
                Frame::Abort { why, .. } => why.len(),
                Frame::Credit { .. } | Frame::Close { .. } => 0,
            };
            assert!(packet.len() - before <= FRAME_HEAD_MAX + part, "{frame:?}");
        }

        assert_eq!(Header::read(&packet), Some(header));
        let mut reader = Frames::of(&packet);
        for frame in frames {
            assert_eq!(reader.next(), Ok(Some(frame)));
        }
        assert_eq!(reader.next(), Ok(None));
        // A frame that is cut off anywhere is noticed, unless the cut is between two frames.
        for len in HEADER_LEN..packet.len() {
            let mut reader = Frames::of(&packet[..len]);
            let read = std::iter::from_fn(|| reader.next().transpose()).take_while(Result::is_ok).count();
            assert!(read < frames.len(), "{len}");
        }
        assert!((0..HEADER_LEN).all(|len| Header::read(&packet[..len]).is_none()));
    }

    #[test]
    fn what_is_not_in_the_format_is_refused() {
        let table: &[&[u8]] = &[
            &[0],                                                          // no kind
            &[7, 1],                                                       // an unknown kind
            &[OPEN, 1, 0, 0],                                              // opened by the side that does not open it
            &[CLOSE],                                                      // no stream
            &[CLOSE, 0x80],                                                // a number without its end
            &[CLOSE, 255, 255, 255, 255, 255, 255, 255, 255, 255, 2],      // a number above 64 bits
            &[CLOSE, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1], // a number that is too long
            &[PART, 1, 2, 0],                                              // bytes that are missing
            &[PART, 1, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1],    // more bytes than memory
            &[ABORT, 1, 1, 0xff],                                          // no text
        ];
        for body in table {
            let packet = [&[0; HEADER_LEN], *body].concat();
            assert_eq!(Frames::of(&packet).next(), Err(Unreadable), "{body:?}");
        }
    }
}
