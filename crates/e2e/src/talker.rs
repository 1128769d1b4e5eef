//! A terminal program for any system: prints the terminal size, repeats every line, and exits on request.

use std::{io, process::ExitCode};

fn main() -> ExitCode {
    let size = || match terminal_size::terminal_size() {
        Some((terminal_size::Width(columns), terminal_size::Height(rows))) => format!("{columns}x{rows}"),
        None => "none".to_owned(),
    };
    println!("ready in {} at {}", std::env::current_dir().unwrap_or_default().display(), size());
    for line in io::stdin().lines() {
        let Ok(line) = line else { break };
        match line.trim().split_once(' ') {
            Some(("exit", code)) => {
                println!("bye");
                return ExitCode::from(code.parse().unwrap_or(1));
            }
            _ => println!("heard <{}> at {}", line.trim(), size()),
        }
    }
    println!("hung up");
    ExitCode::from(9)
}
