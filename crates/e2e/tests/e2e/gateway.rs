//! `outlast gateway`, as its clients and its operators see it: with puppets and real servers behind it that crash,
//! hang or write garbage.

mod broken;
#[cfg(target_os = "linux")]
mod checker;
mod cluster;
mod control;
mod crash;
mod ending;
mod endpoint;
mod guards;
mod limits;
mod members;
mod page;
mod peers;
mod questions;
mod refusals;
mod reload;
mod remote;
mod replicas;
mod restarts;
mod secrets;
#[cfg(target_os = "linux")]
mod secure;
mod serve;
#[cfg(target_os = "linux")]
mod tls;
#[cfg(unix)]
mod upgrade;
pub(crate) mod web;
pub(crate) mod world;
