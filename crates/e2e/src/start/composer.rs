//! A stand-in agent with an input field.

#[cfg(unix)]
#[path = "../composer.rs"]
mod composer;

#[cfg(unix)]
fn main() {
    composer::run(&std::env::args().skip(1).collect::<Vec<_>>());
}

#[cfg(not(unix))]
fn main() {
    eprintln!("the composer needs a Unix");
}
