//! `outlast gateway`, as its clients and its operators meet it: puppets and real servers behind it that crash, hang or
//! babble as told.

mod broken;
mod control;
mod crash;
mod ending;
mod endpoint;
mod guards;
mod limits;
mod page;
mod peers;
mod questions;
mod refusals;
mod reload;
mod remote;
mod secrets;
#[cfg(target_os = "linux")]
mod secure;
mod serve;
#[cfg(target_os = "linux")]
mod tls;
mod web;
pub mod world;
