//! The gateway's behaviour as stories: clients and backends send messages, and the test checks what the gateway sends.

mod calls;
mod catalogue;
mod change;
mod children;
mod cluster;
mod crash;
mod eras;
mod guards;
mod long_messages;
mod names;
mod remote;
mod server_requests;
mod shared_server;
mod story;
mod trials;
mod withdrawals;
