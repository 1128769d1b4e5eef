//! Drives one MCP server: `mcp` relays its messages, `inherit` leaves it outlast's own stdin and stdout. What happens to
//! the conversation is decided in `outlast_core::relay`.

pub(crate) mod files;
pub(crate) mod inherit;
pub(crate) mod mcp;
pub(crate) mod start_cache;
