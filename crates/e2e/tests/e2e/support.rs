//! What the stories share.

pub mod peers;
