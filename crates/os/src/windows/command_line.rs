//! Encodes a program with its arguments as one command line, and an environment as one block, as Windows expects
//! them. Nothing is started here.

use std::{
    ffi::{OsStr, OsString},
    io::{self, ErrorKind},
    os::windows::ffi::{OsStrExt, OsStringExt},
    path::Path,
};

const QUOTE: u16 = b'"' as u16;
const BACKSLASH: u16 = b'\\' as u16;
const PERCENT: u16 = b'%' as u16;

/// Replaces a percent sign where `cmd` would expand a variable: it expands to the sign, and to an empty part of the
/// current directory.
const PERCENT_TO_CMD: &str = "%%cd:~,%";

/// The program file to start, and its command line.
#[derive(Debug)]
pub(super) struct CommandLine {
    /// Ends in a zero, as `line` does.
    pub program: Vec<u16>,
    pub line: Vec<u16>,
}

impl CommandLine {
    /// `cmd` runs scripts: they are no executables, and parse their line by other rules.
    pub(super) fn new(program: &Path, args: &[OsString], cmd: &Path) -> io::Result<CommandLine> {
        let is_script = program
            .extension()
            .is_some_and(|ending| ["bat", "cmd"].iter().any(|script| ending.eq_ignore_ascii_case(script)));
        let mut line = Vec::new();
        if is_script {
            line.extend(quoted(cmd.as_os_str()));
            // No delayed expansion, no AutoRun commands, and all text between the outermost quotes is the command.
            line.extend(" /e:ON /v:OFF /d /c \"".encode_utf16());
            line.extend(quoted(program.as_os_str()));
            for arg in args {
                line.push(b' '.into());
                push_to_script(&mut line, arg)?;
            }
            line.push(QUOTE);
        } else {
            line.extend(quoted(program.as_os_str()));
            for arg in args {
                line.push(b' '.into());
                push(&mut line, arg);
            }
        }
        let program = if is_script { cmd } else { program };
        Ok(CommandLine { program: wide(program.as_os_str())?, line: ended(line)? })
    }
}

/// Adds a final zero. A zero inside the text is an error: it would hide the rest.
pub(super) fn wide(text: &OsStr) -> io::Result<Vec<u16>> {
    ended(text.encode_wide().collect())
}

/// A whole environment block. Names that differ only in case are one name, with its last value.
pub(super) fn environment<'a>(all: impl IntoIterator<Item = (&'a OsStr, &'a OsStr)>) -> io::Result<Vec<u16>> {
    // The system expects this order.
    let mut sorted = std::collections::BTreeMap::new();
    for (name, value) in all {
        sorted.insert(name.to_ascii_uppercase(), (name, value));
    }
    let mut block = Vec::new();
    for (name, value) in sorted.into_values() {
        let entry: Vec<u16> = name.encode_wide().chain([b'='.into()]).chain(value.encode_wide()).collect();
        block.extend(ended(entry)?);
    }
    if block.is_empty() {
        block.push(0);
    }
    block.push(0);
    Ok(block)
}

fn ended(mut text: Vec<u16>) -> io::Result<Vec<u16>> {
    if text.contains(&0) {
        let shown = OsString::from_wide(&text).to_string_lossy().replace('\0', "\\0");
        return Err(io::Error::new(ErrorKind::InvalidInput, format!("`{shown}` contains a zero byte")));
    }
    text.push(0);
    Ok(text)
}

/// Quotes a path, which contains no quotes.
fn quoted(path: &OsStr) -> impl Iterator<Item = u16> {
    [QUOTE].into_iter().chain(path.encode_wide()).chain([QUOTE])
}

/// Quotes an argument as programs parse it: a backslash is literal except before a quote.
fn push(line: &mut Vec<u16>, arg: &OsStr) {
    let text: Vec<u16> = arg.encode_wide().collect();
    let needs_quotes = text.is_empty() || text.iter().any(|unit| [b' ', b'\t', b'"'].map(u16::from).contains(unit));
    if needs_quotes {
        line.push(QUOTE);
    }
    let mut backslashes = 0;
    for &unit in &text {
        if unit == QUOTE {
            // The backslashes before the quote are doubled, and one is added for the quote.
            line.extend(std::iter::repeat_n(BACKSLASH, backslashes + 1));
        }
        backslashes = if unit == BACKSLASH { backslashes + 1 } else { 0 };
        line.push(unit);
    }
    if needs_quotes {
        line.extend(std::iter::repeat_n(BACKSLASH, backslashes));
        line.push(QUOTE);
    }
}

/// Quotes an argument as `cmd` and then the program behind the script parse it. Nothing in it may end the command or
/// begin another.
fn push_to_script(line: &mut Vec<u16>, arg: &OsStr) -> io::Result<()> {
    let text: Vec<u16> = arg.encode_wide().collect();
    if text.iter().any(|unit| [b'\n', b'\r'].map(u16::from).contains(unit)) {
        let why = "an argument of a script cannot contain a line break: use the program that the script starts";
        return Err(io::Error::new(ErrorKind::InvalidInput, why));
    }
    line.push(QUOTE);
    let mut backslashes = 0;
    for &unit in &text {
        match unit {
            QUOTE => {
                line.extend(std::iter::repeat_n(BACKSLASH, backslashes));
                line.extend([QUOTE, QUOTE]);
            }
            PERCENT => line.extend(PERCENT_TO_CMD.encode_utf16()),
            unit => line.push(unit),
        }
        backslashes = if unit == BACKSLASH { backslashes + 1 } else { 0 };
    }
    line.extend(std::iter::repeat_n(BACKSLASH, backslashes));
    line.push(QUOTE);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(program: &str, args: &[&str]) -> io::Result<String> {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let whole = CommandLine::new(Path::new(program), &args, Path::new(r"C:\cmd.exe"))?;
        Ok(String::from_utf16(whole.line.strip_suffix(&[0]).unwrap()).unwrap())
    }

    #[test]
    fn arguments_arrive_unchanged() {
        let table = [
            (&["plain"][..], r#""C:\a b\x.exe" plain"#),
            (&[""], r#""C:\a b\x.exe" """#),
            (&["a b", "c"], r#""C:\a b\x.exe" "a b" c"#),
            (&[r#"say "hi""#], r#""C:\a b\x.exe" "say \"hi\"""#),
            (&[r"C:\dir\"], r#""C:\a b\x.exe" C:\dir\"#),
            (&[r"C:\my dir\"], r#""C:\a b\x.exe" "C:\my dir\\""#),
            (&[r#"a\\"b"#], r#""C:\a b\x.exe" "a\\\\\"b""#),
            (&["100%", "a&b"], r#""C:\a b\x.exe" 100% a&b"#),
        ];
        for (args, expected) in table {
            assert_eq!(line(r"C:\a b\x.exe", args).unwrap(), expected);
        }
    }

    #[test]
    fn an_argument_of_a_script_is_never_run_as_a_command() {
        let table = [
            (&["-y", "a b"][..], r#""C:\cmd.exe" /e:ON /v:OFF /d /c ""C:\npx.CMD" "-y" "a b"""#),
            (&["a&calc", "<|>^"], r#""C:\cmd.exe" /e:ON /v:OFF /d /c ""C:\npx.CMD" "a&calc" "<|>^"""#),
            (&["%PATH%"], r#""C:\cmd.exe" /e:ON /v:OFF /d /c ""C:\npx.CMD" "%%cd:~,%PATH%%cd:~,%"""#),
            (&[r#"\"&calc"#], r#""C:\cmd.exe" /e:ON /v:OFF /d /c ""C:\npx.CMD" "\\""&calc"""#),
        ];
        for (args, expected) in table {
            assert_eq!(line(r"C:\npx.CMD", args).unwrap(), expected);
        }
        assert_eq!(line(r"C:\npx.cmd", &["a\nb"]).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(line(r"C:\x.exe", &["a\0b"]).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn an_environment_is_in_order_and_each_name_is_in_it_once() {
        let block = |all: &[(&str, &str)]| {
            let all = all.iter().map(|(name, value)| (OsStr::new(*name), OsStr::new(*value)));
            String::from_utf16(&environment(all).unwrap()).unwrap()
        };
        assert_eq!(block(&[("b", "2"), ("Path", "x"), ("A", "1"), ("PATH", "y")]), "A=1\0b=2\0PATH=y\0\0");
        assert_eq!(block(&[]), "\0\0");
    }
}
