//! What one stream receives: parts that are joined, and messages that the driver has not consumed. It does not know
//! channels.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use super::{
    Limits,
    outgoing::{cost, too_long},
};

/// A message that is shorter than its packet divided by this is copied: a short message that is kept does not keep a long
/// packet in memory.
const SLICE_MAX: usize = 16;
/// How much room a message gets at its first part: so many times the part, at most the whole.
const JOIN_AHEAD: usize = 4;
/// So many windows may be received and not consumed before the stream is aborted. A peer with the same limits stays within
/// one, and a message.
const WINDOWS_MAX: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Incoming {
    joining: Option<Joining>,
    /// The lengths of messages that the driver has not consumed.
    delivered: VecDeque<usize>,
    /// Their cost.
    unconsumed: usize,
    /// Bytes that the driver has consumed of the first of them.
    consumed: usize,
    /// The cost of consumed messages that the peer was not told of.
    freed: usize,
}

#[derive(Debug)]
struct Joining {
    total: usize,
    bytes: BytesMut,
    is_hello: bool,
}

/// A complete hello or message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Joined {
    Hello(Bytes),
    Message(Bytes),
}

/// Why a stream cannot continue.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// A limit is exceeded: this stream ends.
    Limit(String),
    /// The frames make no sense: the peer is given up.
    Broken,
}

impl Incoming {
    /// A hello or message of `total` bytes begins with this part of the packet.
    pub(super) fn begin(
        &mut self,
        total: u64,
        part: &[u8],
        is_hello: bool,
        packet: &Bytes,
        limits: &Limits,
    ) -> Result<Option<Joined>, Refusal> {
        if self.joining.is_some() || part.len() as u64 > total {
            return Err(Refusal::Broken);
        }
        let total = usize::try_from(total)
            .ok()
            .filter(|total| *total <= limits.message_max)
            .ok_or_else(|| Refusal::Limit(too_long(total, limits)))?;
        if !is_hello && self.unconsumed >= WINDOWS_MAX * limits.window {
            return Err(Refusal::Limit(format!("more than {} bytes are not consumed", self.unconsumed)));
        }
        if part.len() == total {
            let whole = match total * SLICE_MAX < packet.len() {
                true => Bytes::copy_from_slice(part),
                false => packet.slice_ref(part),
            };
            return Ok(Some(self.joined(whole, is_hello)));
        }
        let mut bytes = BytesMut::with_capacity(total.min(part.len().saturating_mul(JOIN_AHEAD)));
        bytes.extend_from_slice(part);
        self.joining = Some(Joining { total, bytes, is_hello });
        Ok(None)
    }

    pub(super) fn part(&mut self, part: &[u8]) -> Result<Option<Joined>, Refusal> {
        let joining = self.joining.as_mut().ok_or(Refusal::Broken)?;
        if part.is_empty() || joining.total - joining.bytes.len() < part.len() {
            return Err(Refusal::Broken);
        }
        joining.bytes.extend_from_slice(part);
        let joined = self.joining.take_if(|joining| joining.bytes.len() == joining.total);
        Ok(joined.map(|joined| self.joined(joined.bytes.freeze(), joined.is_hello)))
    }

    fn joined(&mut self, whole: Bytes, is_hello: bool) -> Joined {
        if is_hello {
            return Joined::Hello(whole);
        }
        self.deliver(whole.len());
        Joined::Message(whole)
    }

    /// A message of this length is delivered.
    pub(super) fn deliver(&mut self, len: usize) {
        self.delivered.push_back(len);
        self.unconsumed += cost(len);
    }

    /// The driver has consumed so many bytes.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.consumed += bytes;
        while let Some(&len) = self.delivered.front()
            && len <= self.consumed
        {
            self.delivered.pop_front();
            self.consumed -= len;
            self.unconsumed -= cost(len);
            self.freed += cost(len);
        }
        if self.delivered.is_empty() {
            self.consumed = 0;
        }
    }

    /// The driver takes no more: what was delivered or has begun counts as consumed.
    pub(super) fn release(&mut self) {
        let begun = self.joining.take().filter(|joining| !joining.is_hello);
        self.freed += std::mem::take(&mut self.unconsumed) + begun.map_or(0, |begun| cost(begun.total));
        (self.delivered, self.consumed) = (VecDeque::new(), 0);
    }

    /// A message that is dropped begins: it counts as consumed.
    pub(super) fn drop_message(&mut self, total: u64, limits: &Limits) {
        self.freed += cost(usize::try_from(total).unwrap_or(0).min(limits.message_max));
    }

    /// The cost of consumed messages that the peer was not told of.
    pub(super) fn freed(&self) -> usize {
        self.freed
    }

    pub(super) fn take_freed(&mut self) -> usize {
        std::mem::take(&mut self.freed)
    }
}
