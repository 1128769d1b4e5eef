//! The gateway's behaviour, told as stories: clients and backends say things, and the teller looks at what came of it.

mod asks;
mod calls;
mod catalogue;
mod change;
mod children;
mod crash;
mod eras;
mod guards;
mod names;
mod remote;
mod story;
mod trials;
