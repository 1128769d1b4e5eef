//! The real programs, started as a client would start them.

mod puppet;
