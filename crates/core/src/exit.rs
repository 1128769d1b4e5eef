//! exit
