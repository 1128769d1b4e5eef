//! The client's requests that are not answered yet: by number, id and progress token, with what waits for a server and
//! the batches they came in. What becomes of a request is decided by the other modules of the relay.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    ops::Index,
    time::Instant,
};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use serde::{Deserialize, Serialize};

use super::{
    listens::Listen,
    saved::{SavedBatch, SavedHeld, SavedRequest, SavedRequests},
    settings::HoldingLimits,
};
use crate::{
    mcp::{Family, List},
    message::Id,
    saved::{Moment, Octets},
};

/// What kind of request it is: the row of the tables that holds for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Class {
    Initialize,
    Discover,
    /// A list, asked without a cursor.
    List(List),
    /// A list, asked with a cursor.
    Page(List, Option<String>),
    /// Reading only; `once` if it carries something that is good for one use.
    Read {
        once: bool,
    },
    Complete {
        once: bool,
    },
    Ping,
    Call {
        repeatable: bool,
        task: bool,
    },
    Listen,
    SetLevel,
    Subscribe(String),
    Unsubscribe(String),
    Other,
}

impl Class {
    /// A request that a server answers without work, whatever its tools do.
    pub(super) fn needs_no_work(&self) -> bool {
        matches!(self, Class::List(_) | Class::Page(..) | Class::Ping | Class::SetLevel | Class::Discover)
    }
}

/// What an open request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Waits {
    /// The answer of this generation.
    OnServer(u32),
    /// A server that serves.
    Held,
    /// The restart that its call of outlast's tool asked for.
    Restarting,
    /// The restart marker, to compare it with this moment (Unix time in seconds).
    Verifying { since: f64 },
    /// The next server: the call made the last one exit 42, and is answered when another is ready.
    Replacement,
    /// A subscription that no server has at present.
    Detached,
}

/// When a request that may be answered early came, and first met the end of a server.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) at: Option<Instant>,
    /// The first end of a child that was never ready.
    pub(super) met_end: Option<Instant>,
}

/// A request of the client's that is not answered yet.
#[derive(Debug)]
pub(super) struct OpenRequest {
    seq: u64,
    id: Id,
    token: Option<Id>,
    /// The tool, or else the method.
    pub(super) what: String,
    pub(super) class: Class,
    pub(super) waits: Waits,
    /// Its bytes, if it may be asked again.
    kept: Option<Bytes>,
    /// Some pipe took it.
    pub(super) taken: bool,
    pub(super) resent: u32,
    pub(super) cancelled: bool,
    /// When it began to wait for a server; later ends do not renew it.
    pub(super) waiting_since: Option<Instant>,
    /// The last progress forwarded.
    pub(super) progress: f64,
    batch: Option<u64>,
    pub(super) listen: Option<Listen>,
    deadline: Option<Instant>,
    /// When a child was first asked.
    pub(super) asked: Option<Instant>,
    pub(super) arrival: Arrival,
}

impl OpenRequest {
    pub(super) fn seq(&self) -> u64 {
        self.seq
    }

    pub(super) fn id(&self) -> &Id {
        &self.id
    }

    pub(super) fn token(&self) -> Option<&Id> {
        self.token.as_ref()
    }

    pub(super) fn batch(&self) -> Option<u64> {
        self.batch
    }

    pub(super) fn kept(&self) -> Option<&Bytes> {
        self.kept.as_ref()
    }

    /// Keeps a copy of its bytes: a slice would keep the whole read buffer alive. Only before it is inserted.
    pub(super) fn keep(&mut self, line: &[u8]) {
        self.kept = Some(Bytes::copy_from_slice(line));
    }

    pub(super) fn is_on(&self, generation: u32) -> bool {
        self.waits == Waits::OnServer(generation)
    }

    /// An `initialize` or a `server/discover`.
    pub(super) fn is_opening(&self) -> bool {
        matches!(self.class, Class::Initialize | Class::Discover)
    }
}

impl OpenRequest {
    fn save(&self, now: Instant) -> SavedRequest {
        let moment = |at: Instant| Moment::of(at, now);
        SavedRequest {
            seq: self.seq,
            id: self.id.clone(),
            token: self.token.clone(),
            what: self.what.clone(),
            class: self.class.clone(),
            waits: self.waits,
            kept: self.kept.as_ref().map(|line| Octets::of(line)),
            taken: self.taken,
            resent: self.resent,
            cancelled: self.cancelled,
            waiting_since: self.waiting_since.map(moment),
            progress: Some(self.progress).filter(|progress| progress.is_finite()),
            batch: self.batch,
            listen: self.listen.as_ref().map(Listen::save),
            deadline: self.deadline.map(moment),
            asked: self.asked.map(moment),
            arrived: self.arrival.at.map(moment),
            met_end: self.arrival.met_end.map(moment),
        }
    }

    fn restore(saved: SavedRequest, now: Instant) -> OpenRequest {
        let at = |moment: Moment| moment.at(now);
        OpenRequest {
            seq: saved.seq,
            id: saved.id,
            token: saved.token,
            what: saved.what,
            class: saved.class,
            waits: saved.waits,
            kept: saved.kept.map(Octets::bytes),
            taken: saved.taken,
            resent: saved.resent,
            cancelled: saved.cancelled,
            waiting_since: saved.waiting_since.map(at),
            progress: saved.progress.unwrap_or(f64::NEG_INFINITY),
            batch: saved.batch,
            listen: saved.listen.map(Listen::restore),
            deadline: saved.deadline.map(at),
            asked: saved.asked.map(at),
            arrival: Arrival { at: saved.arrived.map(at), met_end: saved.met_end.map(at) },
        }
    }
}

/// The parts of a request that are known when it arrives.
pub(super) struct NewRequest {
    pub(super) id: Id,
    pub(super) token: Option<Id>,
    pub(super) what: String,
    pub(super) class: Class,
    pub(super) batch: Option<u64>,
    pub(super) listen: Option<Listen>,
}

/// The open requests of one id, oldest first: one, unless the client uses an id twice.
#[derive(Debug)]
struct SameId {
    oldest: u64,
    later: Vec<u64>,
}

impl SameId {
    fn iter(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.oldest).chain(self.later.iter().copied())
    }

    /// False if that was the last one.
    fn remove(&mut self, seq: u64) -> bool {
        if self.oldest != seq {
            self.later.retain(|later| *later != seq);
        } else if self.later.is_empty() {
            return false;
        } else {
            self.oldest = self.later.remove(0);
        }
        true
    }
}

/// A message that waits for a server.
#[derive(Debug)]
pub(super) struct HeldLine {
    pub(super) line: Bytes,
    pub(super) is_request: bool,
}

/// The answers to a batch, until each is there.
#[derive(Debug, Default)]
struct Batch {
    left: usize,
    answers: Vec<Bytes>,
    /// Lists among the answers, and those that are known by now to be outdated.
    lists: BTreeSet<Family>,
    outdated: BTreeSet<Family>,
}

/// A batch whose members are all answered or cancelled.
pub(super) struct FinishedBatch {
    /// The answers as one array; none if no member gets an answer.
    pub(super) line: Option<Bytes>,
    /// Lists in it that changed after they were answered.
    pub(super) outdated: BTreeSet<Family>,
}

#[derive(Debug)]
pub(super) struct Requests {
    next_seq: u64,
    open: BTreeMap<u64, Box<OpenRequest>>,
    by_id: FxHashMap<Id, SameId>,
    by_token: FxHashMap<Id, u64>,
    /// Those with a deadline of their own.
    timed: BTreeSet<u64>,
    kept_bytes: usize,
    /// In client order. A request in here is in `open` too.
    held: BTreeMap<u64, HeldLine>,
    held_bytes: usize,
    batches: HashMap<u64, Batch>,
}

impl Index<u64> for Requests {
    type Output = OpenRequest;

    fn index(&self, seq: u64) -> &OpenRequest {
        &self.open[&seq]
    }
}

impl Default for Requests {
    fn default() -> Self {
        Requests {
            next_seq: 1,
            open: BTreeMap::new(),
            by_id: FxHashMap::default(),
            by_token: FxHashMap::default(),
            timed: BTreeSet::new(),
            kept_bytes: 0,
            held: BTreeMap::new(),
            held_bytes: 0,
            batches: HashMap::new(),
        }
    }
}

impl Requests {
    pub(super) fn save(&self, now: Instant) -> SavedRequests {
        let octets = |line: &Bytes| Octets::of(line);
        SavedRequests {
            next_seq: self.next_seq,
            open: self.open.values().map(|request| request.save(now)).collect(),
            held: self
                .held
                .iter()
                .map(|(seq, held)| SavedHeld { seq: *seq, line: octets(&held.line), is_request: held.is_request })
                .collect(),
            batches: self
                .batches
                .iter()
                .map(|(key, batch)| {
                    let answers = batch.answers.iter().map(octets).collect();
                    let (lists, outdated) = (batch.lists.clone(), batch.outdated.clone());
                    (*key, SavedBatch { left: batch.left, answers, lists, outdated })
                })
                .collect(),
        }
    }

    /// The indexes follow from the requests. Of requests with the same progress token the newest has it.
    pub(super) fn restore(saved: SavedRequests, now: Instant) -> Requests {
        let mut requests = Requests { next_seq: saved.next_seq, ..Requests::default() };
        for request in saved.open {
            let request = OpenRequest::restore(request, now);
            if request.deadline.is_some() {
                requests.timed.insert(request.seq);
            }
            requests.insert(Box::new(request));
        }
        for held in saved.held {
            requests.hold(held.seq, &held.line.bytes(), held.is_request);
        }
        for (key, batch) in saved.batches {
            let answers = batch.answers.into_iter().map(Octets::bytes).collect();
            let (left, lists, outdated) = (batch.left, batch.lists, batch.outdated);
            requests.batches.insert(key, Batch { left, answers, lists, outdated });
        }
        requests
    }

    /// The place of a message in the order of all that the client said.
    pub(super) fn next_seq(&mut self) -> u64 {
        self.next_seq += 1;
        self.next_seq - 1
    }

    /// Numbers a request; it is not in the table before it is inserted.
    pub(super) fn number(&mut self, new: NewRequest) -> Box<OpenRequest> {
        let NewRequest { id, token, what, class, batch, listen } = new;
        Box::new(OpenRequest {
            seq: self.next_seq(),
            id,
            token,
            what,
            class,
            waits: Waits::Held,
            kept: None,
            taken: false,
            resent: 0,
            cancelled: false,
            waiting_since: None,
            progress: f64::NEG_INFINITY,
            batch,
            listen,
            deadline: None,
            asked: None,
            arrival: Arrival::default(),
        })
    }

    pub(super) fn insert(&mut self, request: Box<OpenRequest>) {
        match self.by_id.entry(request.id.clone()) {
            Entry::Vacant(entry) => drop(entry.insert(SameId { oldest: request.seq, later: Vec::new() })),
            Entry::Occupied(mut entry) => entry.get_mut().later.push(request.seq),
        }
        if let Some(token) = &request.token {
            self.by_token.insert(token.clone(), request.seq);
        }
        self.kept_bytes += request.kept.as_ref().map_or(0, Bytes::len);
        self.open.insert(request.seq, request);
    }

    /// Takes a request out of every table. The caller answers it, or knows why it gets no answer.
    pub(super) fn close(&mut self, seq: u64) -> Box<OpenRequest> {
        let mut request = self.open.remove(&seq).expect("only open requests are closed");
        if let Entry::Occupied(mut entry) = self.by_id.entry(request.id.clone())
            && !entry.get_mut().remove(seq)
        {
            entry.remove();
        }
        if let Some(token) = &request.token
            && self.by_token.get(token) == Some(&seq)
        {
            self.by_token.remove(token);
        }
        self.kept_bytes -= request.kept.as_ref().map_or(0, Bytes::len);
        if request.deadline.take().is_some() {
            self.timed.remove(&seq);
        }
        self.take_held(seq);
        request
    }

    pub(super) fn get(&self, seq: u64) -> Option<&OpenRequest> {
        self.open.get(&seq).map(|request| &**request)
    }

    pub(super) fn get_mut(&mut self, seq: u64) -> Option<&mut OpenRequest> {
        self.open.get_mut(&seq).map(|request| &mut **request)
    }

    /// All of them, in client order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &OpenRequest> {
        self.open.values().map(|request| &**request)
    }

    /// The numbers of those for which something holds, in client order.
    pub(super) fn seqs(&self, holds: impl Fn(&OpenRequest) -> bool) -> Vec<u64> {
        self.iter().filter(|request| holds(request)).map(|request| request.seq).collect()
    }

    /// The oldest open request of that id for which something holds.
    pub(super) fn oldest(&self, id: &Id, holds: impl Fn(&OpenRequest) -> bool) -> Option<u64> {
        self.by_id.get(id)?.iter().find(|seq| holds(&self.open[seq]))
    }

    /// The newest open request with that progress token.
    pub(super) fn with_token(&self, token: &Id) -> Option<u64> {
        self.by_token.get(token).copied()
    }

    /// Open requests on a generation, in client order.
    pub(super) fn on(&self, generation: u32) -> Vec<u64> {
        self.seqs(|request| request.is_on(generation))
    }

    pub(super) fn has_calls_on(&self, generation: u32) -> bool {
        self.iter().any(|request| request.is_on(generation) && request.class != Class::Listen)
    }

    /// The client waits for an answer of this child.
    pub(super) fn is_awaited(&self, generation: u32) -> bool {
        self.awaited().any(|(on, _)| on == generation)
    }

    /// Requests that the client waits for and a child holds: the child, and when it was first asked.
    pub(super) fn awaited(&self) -> impl Iterator<Item = (u32, Option<Instant>)> {
        self.iter().filter_map(|request| match request.waits {
            Waits::OnServer(generation) if request.class != Class::Listen && !request.cancelled => {
                Some((generation, request.asked))
            }
            _ => None,
        })
    }

    /// How many bytes may still be kept of requests in flight.
    pub(super) fn room_to_keep(&self, limits: &HoldingLimits) -> usize {
        limits.held_bytes_max.saturating_sub(self.kept_bytes)
    }

    // ---- deadlines ------------------------------------------------------------------------------

    /// A request that does not wait for a server and yet ends with time.
    pub(super) fn set_deadline(&mut self, seq: u64, deadline: Option<Instant>) {
        let Some(request) = self.open.get_mut(&seq) else { return };
        request.deadline = deadline;
        match deadline {
            Some(_) => self.timed.insert(seq),
            None => self.timed.remove(&seq),
        };
    }

    /// Requests with a deadline of their own, in client order.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = (u64, Instant)> {
        self.timed.iter().filter_map(|seq| Some((*seq, self.open.get(seq)?.deadline?)))
    }

    /// A child that was never ready ended: held requests remember the first such end.
    pub(super) fn meet_end(&mut self, now: Instant) {
        for request in self.open.values_mut().filter(|request| request.waits == Waits::Held) {
            request.arrival.met_end.get_or_insert(now);
        }
    }

    // ---- what waits for a server ----------------------------------------------------------------

    /// Whether one more message can wait.
    pub(super) fn has_room(&self, line: &[u8], limits: &HoldingLimits) -> bool {
        self.held.len() < limits.held_max && self.held_bytes + line.len() <= limits.held_bytes_max
    }

    pub(super) fn hold(&mut self, seq: u64, line: &[u8], is_request: bool) {
        self.held_bytes += line.len();
        self.held.insert(seq, HeldLine { line: Bytes::copy_from_slice(line), is_request });
    }

    pub(super) fn held_len(&self) -> usize {
        self.held.len()
    }

    pub(super) fn take_held(&mut self, seq: u64) -> Option<HeldLine> {
        // Most calls are never held.
        if self.held.is_empty() {
            return None;
        }
        let held = self.held.remove(&seq)?;
        self.held_bytes -= held.line.len();
        Some(held)
    }

    /// Everything that waits, in client order. The requests among it stay open.
    pub(super) fn take_all_held(&mut self) -> BTreeMap<u64, HeldLine> {
        self.held_bytes = 0;
        std::mem::take(&mut self.held)
    }

    pub(super) fn held_requests(&self) -> impl Iterator<Item = &OpenRequest> {
        let held = self.held.iter().filter(|(_, held)| held.is_request);
        held.filter_map(|(seq, _)| self.get(*seq))
    }

    pub(super) fn held_seqs(&self) -> Vec<u64> {
        self.held_requests().map(OpenRequest::seq).collect()
    }

    pub(super) fn held_line(&self, seq: u64) -> Option<&Bytes> {
        self.held.get(&seq).map(|held| &held.line)
    }

    /// Drops waiting messages that need no answer, and returns how many.
    pub(super) fn drop_held_notifications(&mut self) -> u64 {
        let notifications: Vec<u64> =
            self.held.iter().filter(|(_, held)| !held.is_request).map(|(seq, _)| *seq).collect();
        notifications.iter().filter_map(|seq| self.take_held(*seq)).count() as u64
    }

    // ---- batches --------------------------------------------------------------------------------

    pub(super) fn begin_batch(&mut self, key: u64, answers: usize) {
        self.batches.insert(key, Batch { left: answers, ..Batch::default() });
    }

    /// The client is cancelling a member: the rest of its batch waits no longer for it.
    pub(super) fn leave_batch(&mut self, seq: u64) -> Option<u64> {
        self.open.get_mut(&seq)?.batch.take()
    }

    /// A member of a batch was answered with a list.
    pub(super) fn batch_lists(&mut self, key: u64, family: Family) {
        if let Some(batch) = self.batches.get_mut(&key) {
            batch.lists.insert(family);
        }
    }

    /// One member is answered, or gets no answer. Returns the batch if it was the last one.
    pub(super) fn batch_answered(&mut self, key: u64, line: Option<Bytes>) -> Option<FinishedBatch> {
        let batch = self.batches.get_mut(&key)?;
        batch.answers.extend(line);
        batch.left -= 1;
        if batch.left > 0 {
            return None;
        }
        let batch = self.batches.remove(&key)?;
        let line = (!batch.answers.is_empty()).then(|| {
            let parts: Vec<&[u8]> = batch.answers.iter().map(|line| line.trim_ascii_end()).collect();
            [b"[" as &[u8], &parts.join(&b","[..]), b"]\n"].concat().into()
        });
        Some(FinishedBatch { line, outdated: batch.outdated })
    }

    /// A list that waits in a batch has changed.
    pub(super) fn outdate(&mut self, family: Family) {
        for batch in self.batches.values_mut().filter(|batch| batch.lists.contains(&family)) {
            batch.outdated.insert(family);
        }
    }
}
