//! Drives agents: their terminals, the commands that look at them, and what they leave on disk. What happens to an agent is
//! decided in `outlast_core::session` and `outlast_core::terminal`.

pub(crate) mod agent_event;
pub(crate) mod attach;
pub(crate) mod cwd;
pub(crate) mod frontmatter;
pub(crate) mod restore;
pub(crate) mod rollout;
pub(crate) mod session_record;
pub(crate) mod sessions;
pub(crate) mod terminal;
pub(crate) mod transcript;
