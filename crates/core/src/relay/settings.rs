//! What is fixed when a conversation begins: options and limits. Where they come from is not known here.

use std::{collections::BTreeMap, time::Duration};

use crate::restarts::Policy;

/// Settings that do not change while the relay runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The instance, as in the marker and the audit log.
    pub id: String,
    /// The server, as people call it.
    pub name: String,
    /// Whether our tools are added to the server's.
    pub tools: bool,
    pub retry: Retry,
    pub reload: Reload,
    /// Whether a build runs before each restart that is asked for.
    pub build: bool,
    pub on_clean_exit: OnCleanExit,
    /// How long the first server may take for an opening before it is answered without it; `None` is the limits'
    /// default, which depends on the cache.
    pub answer_after: Option<Duration>,
    /// Whether the driver keeps a cache of what a run told its client.
    pub cache: bool,
    /// How often a call without progress of its server's gets a heartbeat.
    pub heartbeat: Option<Duration>,
    /// The server's own tool that makes it exit with 42: only a call of this one is answered as a success then.
    pub restart_tool: String,
    /// How long a tool call may take without progress; then it is cancelled and fails.
    pub call_timeout: Option<Duration>,
    /// The same for single tools, by name; zero is no limit.
    pub call_timeouts: BTreeMap<String, Duration>,
    /// How many bytes of memory the server may use; then it is replaced.
    pub memory_max: Option<u64>,
    pub policy: Policy,
    /// For the jitter of the policy.
    pub seed: u64,
    /// The random part of our ids, `outlast-<random>-<k>`, so that no client or server uses the same.
    pub random: String,
    pub limits: Limits,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    Never,
    /// Tool calls that the server's annotations call read-only or idempotent may be asked twice.
    Annotated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// The new child starts beside the old one and takes over when it is ready.
    BlueGreen,
    /// The old child is stopped first.
    Replace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCleanExit {
    /// A server that leaves on purpose ends outlast too.
    End,
    /// It is started again by the next request.
    Restart,
}

/// Every bound of the conversation.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    pub holding: HoldingLimits,
    pub handshake: HandshakeLimits,
    pub draining: DrainingLimits,
    pub lists: ListsLimits,
    pub early: EarlyAnswersLimits,
    pub cache: CacheLimits,
    pub queue: QueueLimits,
    pub restart: RestartWaitsLimits,
    pub hang: HangLimits,
    pub messages: MessageLimits,
}

/// Requests that wait for a server.
#[derive(Debug, Clone, Copy)]
pub struct HoldingLimits {
    /// How long a request waits for a server; then it is answered from memory or with an error.
    pub hold_max: Duration,
    /// How many messages wait; the newest is refused.
    pub held_max: usize,
    /// How many bytes wait, and how many are kept of requests in flight that may be asked again.
    pub held_bytes_max: usize,
    /// How far ahead the next start may lie before an opening is answered without a server.
    pub opening_wait: Duration,
    /// How often a request is asked again after the server's end; then it fails.
    pub resend_max: u32,
}

impl Default for HoldingLimits {
    fn default() -> Self {
        HoldingLimits {
            hold_max: Duration::from_secs(30),
            held_max: 256,
            held_bytes_max: 8 << 20,
            opening_wait: Duration::from_secs(8),
            resend_max: 1,
        }
    }
}

/// The handshake of a new server.
#[derive(Debug, Clone, Copy)]
pub struct HandshakeLimits {
    /// How long the first child may take for its handshake; then it is stopped.
    pub first_handshake_max: Duration,
    /// How long a later child may take; then it is stopped.
    pub handshake_max: Duration,
    /// How many requests a child may send before it serves; one more fails its handshake.
    pub early_max: usize,
}

impl Default for HandshakeLimits {
    fn default() -> Self {
        HandshakeLimits {
            first_handshake_max: Duration::from_secs(120),
            handshake_max: Duration::from_secs(30),
            early_max: 64,
        }
    }
}

/// Servers that were replaced and finish their calls.
#[derive(Debug, Clone, Copy)]
pub struct DrainingLimits {
    /// How long a replaced child may finish its calls; then they fail.
    pub drain_max: Duration,
    /// How many replaced children may do so; a reload that makes it one more waits, then ends the oldest.
    pub draining_max: usize,
    /// How long such a reload waits for calls to finish.
    pub room_wait: Duration,
}

impl Default for DrainingLimits {
    fn default() -> Self {
        DrainingLimits { drain_max: Duration::from_secs(60), draining_max: 2, room_wait: Duration::from_secs(5) }
    }
}

/// Lists that are compared, kept and cached.
#[derive(Debug, Clone, Copy)]
pub struct ListsLimits {
    /// How long fetching a list for comparison may take; then it counts as changed.
    pub list_max: Duration,
    /// How many pages are fetched; beyond, the list counts as changed.
    pub list_pages_max: usize,
    /// How large a list is kept; a larger one is compared by hash and not served from memory.
    pub list_bytes_max: usize,
    /// The longest that a client may cache what a restart can change.
    pub ttl_max: Duration,
}

impl Default for ListsLimits {
    fn default() -> Self {
        ListsLimits {
            list_max: Duration::from_secs(5),
            list_pages_max: 100,
            list_bytes_max: 4 << 20,
            ttl_max: Duration::from_secs(5),
        }
    }
}

/// Openings that are answered without the first server.
#[derive(Debug, Clone, Copy)]
pub struct EarlyAnswersLimits {
    /// How long an opening waits for a slow first server if its lists are cached; then the cache answers.
    pub answer_after_cached: Duration,
    /// The same without a cache: some clients list tools only once.
    pub answer_after_uncached: Duration,
    /// How long an opening waits after the first end of a server that was never ready; then it is answered without one.
    pub broken_after: Duration,
}

impl Default for EarlyAnswersLimits {
    fn default() -> Self {
        EarlyAnswersLimits {
            answer_after_cached: Duration::from_secs(3),
            answer_after_uncached: Duration::from_secs(20),
            broken_after: Duration::from_secs(1),
        }
    }
}

/// The cache of what a run told its client.
#[derive(Debug, Clone, Copy)]
pub struct CacheLimits {
    /// How long an opening waits before the cache is read.
    pub cache_read_after: Duration,
    /// How long reading the cache may take; then the opening is answered as if there were none.
    pub cache_read_max: Duration,
    /// How long the cache is not written after a change, so that one write holds several.
    pub cache_write_after: Duration,
    /// How large an entry of the cache may be; a larger one is not kept.
    pub cache_bytes_max: usize,
}

impl Default for CacheLimits {
    fn default() -> Self {
        CacheLimits {
            cache_read_after: Duration::from_millis(250),
            cache_read_max: Duration::from_secs(1),
            cache_write_after: Duration::from_secs(2),
            cache_bytes_max: 1 << 20,
        }
    }
}

/// Bytes in front of a child's pipe.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    /// How many bytes may wait for a child's pipe before the client is read only as fast as the child reads.
    pub queued_bytes_max: usize,
    /// How long a child may take nothing of such a queue; then the client is read again, and requests are refused.
    pub unread_max: Duration,
    /// How many bytes may wait for a child that takes nothing; then the client is not read any more.
    pub queued_bytes_stop: usize,
}

impl Default for QueueLimits {
    fn default() -> Self {
        QueueLimits { queued_bytes_max: 8 << 20, unread_max: Duration::from_secs(1), queued_bytes_stop: 32 << 20 }
    }
}

/// Restarts that were asked for, by outlast's tool or the server's own.
#[derive(Debug, Clone, Copy)]
pub struct RestartWaitsLimits {
    /// How long `restart_server` waits; then it says that the restart is still running.
    pub restart_wait: Duration,
    /// How long the server may take to exit after it answered a call of its own restart tool; then it gets a ping.
    pub restart_answered_wait: Duration,
    /// The same after the call, without an answer.
    pub restart_called_wait: Duration,
    /// How long it may take to exit or to answer that ping; then its stdin is closed and it is replaced.
    pub restart_ping_max: Duration,
}

impl Default for RestartWaitsLimits {
    fn default() -> Self {
        RestartWaitsLimits {
            restart_wait: Duration::from_secs(55),
            restart_answered_wait: Duration::from_millis(700),
            restart_called_wait: Duration::from_secs(1),
            restart_ping_max: Duration::from_secs(1),
        }
    }
}

/// Servers that hang or use too much memory.
#[derive(Debug, Clone, Copy)]
pub struct HangLimits {
    /// How long a suspected server may leave a ping unanswered; then it counts as hung and is replaced.
    pub ping_max: Duration,
    /// How long a request that needs no work may be unanswered while no other is open; then the server gets a ping.
    pub quiet_max: Duration,
    /// A server that uses too much memory is not replaced again within this time.
    pub memory_gap: Duration,
}

impl Default for HangLimits {
    fn default() -> Self {
        HangLimits {
            ping_max: Duration::from_secs(5),
            quiet_max: Duration::from_secs(30),
            memory_gap: Duration::from_secs(60),
        }
    }
}

/// Single messages and streams.
#[derive(Debug, Clone, Copy)]
pub struct MessageLimits {
    /// How many messages one batch may hold; a longer one is refused.
    pub batch_max: usize,
    /// How much is kept of each child's stderr.
    pub stderr_max: usize,
    /// How long the end of a subscription is kept back, as the child may be leaving.
    pub teardown_wait: Duration,
}

impl Default for MessageLimits {
    fn default() -> Self {
        MessageLimits { batch_max: 256, stderr_max: 64 << 10, teardown_wait: Duration::from_millis(500) }
    }
}
