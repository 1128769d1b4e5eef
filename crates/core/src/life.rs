//! life
