//! Errors as people read them: a sentence, the cause, a hint, and the exit code that goes with it.

use crate::child::watch::WatchError;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use outlast_core::{count::one_of, visible};
pub(crate) use outlast_os::cause::plain;
use serde_json::{Value, json};
use std::{
    env,
    error::Error,
    ffi::OsString,
    fmt,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Something failed while it ran.
pub(crate) const FAILURE: u8 = 1;
/// What was asked for makes no sense.
pub(crate) const USAGE: u8 = 2;
/// The agent reached its usage limit: try again later, as sysexits.h says it.
pub(crate) const LIMITED: u8 = 75;
/// A wait that took too long, as `timeout` says it.
pub(crate) const TIMED_OUT: u8 = 124;
/// The program is there and cannot be run, as a shell says it.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// There is no such program, as a shell says it.
pub(crate) const NOT_FOUND: u8 = 127;

/// The working directory.
pub(crate) fn cwd() -> Result<PathBuf, Report> {
    env::current_dir()
        .map_err(|error| Report::new(FAILURE, "the working directory does not exist any more").because(error))
}

/// Why the program ends, for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub sentence: String,
    pub because: Option<String>,
    pub hint: Option<String>,
    /// With 0 nothing is wrong: the sentence is what was asked for (`--help`), and is printed as it stands.
    pub code: u8,
}

impl Report {
    pub fn new(code: u8, sentence: impl Into<String>) -> Report {
        Report { sentence: sentence.into(), because: None, hint: None, code }
    }

    /// The text of an error, and the texts of its causes.
    pub fn of(error: &dyn Error, hint: Option<String>, code: u8) -> Report {
        let mut causes = Vec::new();
        let mut source = error.source();
        while let Some(cause) = source {
            causes.push(plain(&cause.to_string()));
            source = cause.source();
        }
        let because = (!causes.is_empty()).then(|| causes.join(": "));
        Report { sentence: error.to_string(), because, hint, code }
    }

    /// Like `From`, with the commands there are, as a swapped letter in a short name is found only by looking at them; and
    /// with what was typed, as clap does not always say which command it was about.
    pub fn of_arguments(error: clap::Error, cli: &clap::Command, typed: &[OsString]) -> Report {
        let commands = cli.get_subcommands().filter(|command| !command.is_hide_set());
        let commands =
            commands.flat_map(|command| [command.get_name()].into_iter().chain(command.get_visible_aliases()));
        Mistake { error: &error, commands: commands.collect(), typed: command_in(typed, cli) }.report()
    }

    pub fn because(self, cause: impl fmt::Display) -> Report {
        Report { because: Some(plain(&cause.to_string())), ..self }
    }

    pub fn hint(self, hint: impl Into<String>) -> Report {
        Report { hint: Some(hint.into()), ..self }
    }

    /// As an object, for programs.
    pub fn to_json(&self) -> Value {
        json!({"message": self.sentence, "because": self.because, "hint": self.hint, "exit_code": self.code})
    }

    /// The same as `print`, for programs that wait for JSON on stdout; the words for people stay where they belong.
    pub fn print_in_json(&self) -> ExitCode {
        if self.code != 0 {
            let text = format!("{:#}", json!({"error": self.to_json()}));
            let _ = writeln!(io::stdout().lock(), "{}", visible::json(&text));
        }
        self.print()
    }

    /// Says it where it belongs, and returns what the program ends with.
    pub fn print(&self) -> ExitCode {
        let text = self.to_string();
        // The reader may have gone away; there is no better place to say so.
        let _ = match self.code {
            0 => write!(io::stdout().lock(), "{text}"),
            _ => write!(io::stderr().lock(), "{}", visible::text(&text)),
        };
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.code == 0 {
            return f.write_str(&self.sentence);
        }
        for (label, text) in
            [("error", Some(&self.sentence)), ("  because", self.because.as_ref()), ("  hint", self.hint.as_ref())]
        {
            if let Some(text) = text {
                // What continues in further lines stands under its first.
                let margin = format!("\n{}", " ".repeat(label.len() + 2));
                writeln!(f, "{label}: {}", text.trim_end().replace('\n', &margin))?;
            }
        }
        Ok(())
    }
}

impl From<WatchError> for Report {
    fn from(error: WatchError) -> Report {
        let code = match error {
            WatchError::NotFound { .. } => USAGE,
            _ => FAILURE,
        };
        Report::of(&error, error.hint(), code)
    }
}

impl From<clap::Error> for Report {
    fn from(error: clap::Error) -> Report {
        Mistake { error: &error, commands: vec![], typed: None }.report()
    }
}

/// A server's command that could not be started, with the exit code a shell would give it.
pub(crate) fn cannot_start(program: &str, error: &io::Error) -> Report {
    let path = Path::new(program);
    let report = match error.kind() {
        io::ErrorKind::NotFound if program.contains('/') && path.exists() => {
            Report::new(NOT_FOUND, format!("cannot start `{program}`"))
                .hint("install the interpreter, or fix the first line of the file")
        }
        io::ErrorKind::NotFound if program.contains('/') => Report::new(NOT_FOUND, format!("cannot start `{program}`"))
            .hint("a relative path counts from the working directory"),
        io::ErrorKind::NotFound => Report::new(NOT_FOUND, format!("cannot start `{program}`"))
            .hint("the command is searched on PATH; clients often start servers with a shorter PATH than your shell"),
        io::ErrorKind::PermissionDenied if path.is_dir() => {
            Report::new(NOT_EXECUTABLE, format!("cannot start `{program}`")).hint("name the program inside it")
        }
        io::ErrorKind::PermissionDenied => Report::new(NOT_EXECUTABLE, format!("cannot start `{program}`"))
            .hint(format!("make it executable: chmod +x {program}")),
        _ => Report::new(NOT_EXECUTABLE, format!("cannot start `{program}`")),
    };
    report.because(error)
}

/// A command as a person could type it. It is for showing: nothing is ever run through a shell.
pub(crate) fn shell_quote<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = words.into_iter().map(quote).collect();
    quoted.join(" ")
}

fn quote(word: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "-_./=:,@%+".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    if word.chars().any(char::is_control) {
        // As `$'…'`, which bash and zsh read: the command stays one line.
        let escaped = word.chars().map(|letter| match letter {
            '\n' => r"\n".to_owned(),
            '\t' => r"\t".to_owned(),
            '\r' => r"\r".to_owned(),
            '\\' | '\'' => format!("\\{letter}"),
            letter if letter.is_ascii_control() => format!("\\x{:02x}", u32::from(letter)),
            letter if letter.is_control() => format!("\\u{:04x}", u32::from(letter)),
            letter => letter.to_string(),
        });
        return format!("$'{}'", escaped.collect::<String>());
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A command line that was not understood.
struct Mistake<'a> {
    error: &'a clap::Error,
    commands: Vec<&'a str>,
    /// The command that was typed, if there is such a one: `outlast mcp`.
    typed: Option<String>,
}

impl Mistake<'_> {
    fn report(&self) -> Report {
        let argument = || self.context(ContextKind::InvalidArg).unwrap_or_else(|| "an argument".to_owned());
        let value = || self.context(ContextKind::InvalidValue).unwrap_or_default();
        let sentence = match self.error.kind() {
            // `outlast` without arguments is a question of a new user, and the help answers it.
            ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                return Report::new(0, self.error.render().to_string());
            }
            ErrorKind::MissingSubcommand => "no command is given".to_owned(),
            ErrorKind::UnknownArgument if argument().starts_with('-') => format!("unknown option `{}`", argument()),
            ErrorKind::UnknownArgument => format!("unexpected argument `{}`", argument()),
            ErrorKind::InvalidSubcommand => {
                format!("unknown command `{}`", self.context(ContextKind::InvalidSubcommand).unwrap_or_default())
            }
            ErrorKind::InvalidValue if value().is_empty() => format!("`{}` needs a value", argument()),
            ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
                format!("`{}` is not a valid value of `{}`", value(), argument())
            }
            ErrorKind::MissingRequiredArgument if argument().contains("<CMD>") => {
                "no command is given for the server".to_owned()
            }
            ErrorKind::MissingRequiredArgument => format!("`{}` is missing", argument()),
            ErrorKind::ArgumentConflict => match self.context(ContextKind::PriorArg) {
                Some(other) if other == argument() => format!("`{other}` is given more than once"),
                Some(other) => format!("`{}` and `{other}` cannot be used together", argument()),
                None => format!("`{}` cannot be used with the other options", argument()),
            },
            ErrorKind::NoEquals => format!("`{}` needs its value after an equals sign", argument()),
            ErrorKind::TooManyValues | ErrorKind::TooFewValues | ErrorKind::WrongNumberOfValues => {
                format!("`{}` has the wrong number of values", argument())
            }
            ErrorKind::InvalidUtf8 => "an argument is not valid UTF-8".to_owned(),
            _ => self.first_line(),
        };
        let because = self.error.source().map(|cause| plain(&cause.to_string()));
        Report { sentence, because, hint: Some(self.hint()), code: USAGE }
    }

    fn hint(&self) -> String {
        let argument = self.context(ContextKind::InvalidArg).unwrap_or_default();
        let usage = self.context(ContextKind::Usage).unwrap_or_default();
        let lacks_dashes = match self.error.kind() {
            ErrorKind::MissingRequiredArgument => argument.contains("<CMD>"),
            ErrorKind::UnknownArgument => usage.contains("<CMD>") && !argument.starts_with('-'),
            _ => false,
        };
        if lacks_dashes {
            return format!("write the server's command after `--`: {} -- python -m my_server", self.command());
        }
        // Ours first: clap's measure of likeness finds a short name in a long one.
        let suggested = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
        let closest = self.closest_command().or_else(|| suggested.into_iter().find_map(|kind| self.context(kind)));
        if let Some(closest) = closest {
            return format!("did you mean `{closest}`?");
        }
        match self.list(ContextKind::ValidValue) {
            values if !values.is_empty() && self.error.kind() == ErrorKind::InvalidValue => {
                format!("use {}", one_of(&values, "or"))
            }
            _ => format!("`{} --help` lists the options", self.command()),
        }
    }

    fn closest_command(&self) -> Option<String> {
        let given = self.context(ContextKind::InvalidSubcommand)?;
        let near = self.commands.iter().map(|command| (strsim::osa_distance(&given, command), *command));
        // In a word of three letters a second slip makes it another word.
        near.filter(|(slips, command)| *slips <= command.len() / 3).min().map(|(_, command)| command.to_owned())
    }

    /// The command that was being understood: the words of the usage line up to the first placeholder.
    fn command(&self) -> String {
        let usage = self.context(ContextKind::Usage).unwrap_or_default();
        let words = usage.trim_start_matches("Usage:").split_whitespace();
        let words: Vec<&str> = words.take_while(|word| !word.starts_with(['[', '<', '-'])).collect();
        match &self.typed {
            Some(typed) if words.len() < 2 => typed.clone(),
            _ if words.is_empty() => "outlast".to_owned(),
            _ => words.join(" "),
        }
    }

    fn context(&self, kind: ContextKind) -> Option<String> {
        self.list(kind).into_iter().next()
    }

    fn list(&self, kind: ContextKind) -> Vec<String> {
        match self.error.get(kind) {
            Some(ContextValue::String(text)) => vec![text.clone()],
            Some(ContextValue::Strings(texts)) => texts.clone(),
            Some(ContextValue::StyledStr(text)) => vec![text.to_string()],
            Some(ContextValue::StyledStrs(texts)) => texts.iter().map(ToString::to_string).collect(),
            Some(ContextValue::Number(number)) => vec![number.to_string()],
            _ => vec![],
        }
    }

    fn first_line(&self) -> String {
        let text = self.error.render().to_string();
        let line = text.lines().next().unwrap_or("the arguments are not valid");
        line.trim_start_matches("error: ").to_owned()
    }
}

/// The command that the first words name, as far as there is one.
fn command_in(typed: &[OsString], cli: &clap::Command) -> Option<String> {
    let (mut command, mut path) = (cli, vec![cli.get_name()]);
    for word in typed.iter().skip(1) {
        let Some(inner) = word.to_str().and_then(|word| command.find_subcommand(word)) else { break };
        path.push(inner.get_name());
        command = inner;
    }
    (path.len() > 1).then(|| path.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Arg, ArgAction, Command, value_parser};

    #[derive(Debug, thiserror::Error)]
    #[error("cannot start `github-mcp`")]
    struct CannotStart {
        source: io::Error,
    }

    #[test]
    fn an_error_is_a_sentence_a_cause_and_a_hint() {
        let error = CannotStart { source: io::Error::from_raw_os_error(13) };
        let hint = "the file exists but is not executable: chmod +x".to_owned();
        let report = Report::of(&error, Some(hint), NOT_EXECUTABLE);
        #[cfg(unix)]
        insta::assert_snapshot!(report, @r"
        error: cannot start `github-mcp`
          because: permission denied
          hint: the file exists but is not executable: chmod +x
        ");
        assert_eq!(report.code, 126);
    }

    #[test]
    fn a_report_without_cause_or_hint_leaves_them_out() {
        insta::assert_snapshot!(Report::new(FAILURE, "nothing runs here"), @"error: nothing runs here");
        insta::assert_snapshot!(Report::new(FAILURE, "the build failed").because("line 1\nline 2\n"), @r"
        error: the build failed
          because: line 1
                   line 2
        ");
        insta::assert_snapshot!(Report::new(FAILURE, "no").hint("try again"), @r"
        error: no
          hint: try again
        ");
    }

    #[test]
    fn a_path_that_cannot_be_watched_is_an_error() {
        let report = Report::from(WatchError::NotFound { path: "scr".into() });
        assert_eq!(report.code, USAGE);
        insta::assert_snapshot!(report, @r"
        error: cannot watch `scr`: there is no such file or directory
          hint: a relative path counts from the working directory
        ");
        let source = io::Error::new(io::ErrorKind::PermissionDenied, "Permission denied (os error 13)");
        let report = Report::from(WatchError::Unreadable { path: "src".into(), source });
        assert_eq!(report.code, FAILURE);
        insta::assert_snapshot!(report, @r"
        error: cannot watch `src`
          because: permission denied
          hint: it must be readable by the user outlast runs as
        ");
    }

    #[test]
    fn causes_are_in_plain_words() {
        let table = [
            ("Permission denied (os error 13)", "permission denied"),
            ("I/O error (os error 5)", "I/O error"),
            ("EOF while parsing", "EOF while parsing"),
            ("Ünlucky", "Ünlucky"),
            ("A", "A"),
            ("", ""),
        ];
        for (cause, words) in table {
            assert_eq!(plain(cause), words);
        }
    }

    #[test]
    fn commands_are_shown_as_they_could_be_typed() {
        let table: [(&[&str], &str); 4] = [
            (&["python", "-m", "server"], "python -m server"),
            (&["sh", "-c", "exit 42"], "sh -c 'exit 42'"),
            (&["echo", "it's", ""], r"echo 'it'\''s' ''"),
            (&["a;b", "$HOME"], "'a;b' '$HOME'"),
        ];
        for (words, shown) in table {
            assert_eq!(shell_quote(words.iter().copied()), shown);
        }
    }

    fn cli() -> Command {
        let watch = Arg::new("watch").long("watch").value_name("PATH").action(ArgAction::Append);
        let retry = Arg::new("retry").long("retry").value_parser(["never", "annotated"]);
        let drain = Arg::new("drain").long("drain").value_parser(value_parser!(u32));
        let inherit = Arg::new("inherit").long("inherit").action(ArgAction::SetTrue).conflicts_with("watch");
        let command = Arg::new("command").value_name("CMD").required(true).num_args(1..).last(true);
        let mcp = Command::new("mcp").args([watch, retry, drain, inherit, command]);
        Command::new("outlast")
            .version("1.2.3")
            .subcommand_required(true)
            .subcommand(mcp)
            .subcommand(Command::new("ps"))
    }

    fn ask(line: &str) -> Report {
        let typed: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        Report::of_arguments(cli().try_get_matches_from(&typed).expect_err("a mistake"), &cli(), &typed)
    }

    #[test]
    fn a_command_is_quoted_as_one_line() {
        let words = ["python", "-c", "print('a')\nprint(\"b\")\u{7}", "it's", "", "a b"];
        assert_eq!(shell_quote(words), r#"python -c $'print(\'a\')\nprint("b")\x07' 'it'\''s' '' 'a b'"#);
    }

    #[test]
    fn without_arguments_the_help_is_printed() {
        let command = <crate::cli::Cli as clap::CommandFactory>::command();
        let error = command.clone().try_get_matches_from(["outlast"]).expect_err("there is no command");
        let report = Report::of_arguments(error, &command, &["outlast".into()]);
        assert_eq!(report.code, 0);
        let said = report.to_string();
        for title in ["Run and supervise:", "Set up:", "Control what runs:", "Learn more:"] {
            assert!(said.contains(title), "{title}\n{said}");
        }
    }

    #[test]
    fn every_mistake_on_the_command_line_has_the_same_shape() {
        let lines = [
            "outlast",
            "outlast mpc",
            "outlast frobnicate",
            "outlast ps extra",
            "outlast mcp --wach src -- cat",
            "outlast mcp --zzz -- cat",
            "outlast mcp --retry sometimes -- cat",
            "outlast mcp --retry anotated -- cat",
            "outlast mcp --drain soon -- cat",
            "outlast mcp --drain",
            "outlast mcp --inherit --watch src -- cat",
            "outlast mcp --retry never --retry never -- cat",
            "outlast mcp",
        ];
        let mut words = String::new();
        for line in lines {
            let report = ask(line);
            assert_eq!(report.code, USAGE, "{line}");
            words.push_str(&format!("$ {line}\n{report}"));
        }
        insta::assert_snapshot!(words, @"
        $ outlast
        error: no command is given
          hint: `outlast --help` lists the options
        $ outlast mpc
        error: unknown command `mpc`
          hint: did you mean `mcp`?
        $ outlast frobnicate
        error: unknown command `frobnicate`
          hint: `outlast --help` lists the options
        $ outlast ps extra
        error: unexpected argument `extra`
          hint: `outlast ps --help` lists the options
        $ outlast mcp --wach src -- cat
        error: unknown option `--wach`
          hint: did you mean `--watch`?
        $ outlast mcp --zzz -- cat
        error: unknown option `--zzz`
          hint: `outlast mcp --help` lists the options
        $ outlast mcp --retry sometimes -- cat
        error: `sometimes` is not a valid value of `--retry <retry>`
          hint: use `never` or `annotated`
        $ outlast mcp --retry anotated -- cat
        error: `anotated` is not a valid value of `--retry <retry>`
          hint: did you mean `annotated`?
        $ outlast mcp --drain soon -- cat
        error: `soon` is not a valid value of `--drain <drain>`
          because: invalid digit found in string
          hint: `outlast mcp --help` lists the options
        $ outlast mcp --drain
        error: `--drain <drain>` needs a value
          hint: `outlast mcp --help` lists the options
        $ outlast mcp --inherit --watch src -- cat
        error: `--inherit` and `--watch <PATH>` cannot be used together
          hint: `outlast mcp --help` lists the options
        $ outlast mcp --retry never --retry never -- cat
        error: `--retry <retry>` is given more than once
          hint: `outlast mcp --help` lists the options
        $ outlast mcp
        error: no command is given for the server
          hint: write the server's command after `--`: outlast mcp -- python -m my_server
        ");
    }

    /// Every option of every command that takes a value, with a value that none takes and with none at all: where that
    /// is a mistake, it is told as one.
    #[test]
    fn every_wrong_value_of_every_option_is_explained() {
        use clap::CommandFactory;
        let cli = crate::cli::Cli::command();
        let mut words = String::new();
        for command in cli.get_subcommands().filter(|command| !command.is_hide_set()) {
            for argument in command.get_arguments().filter(|argument| argument.get_action().takes_values()) {
                let Some(long) = argument.get_long() else { continue };
                for given in [vec![format!("--{long}"), "@".to_owned()], vec![format!("--{long}")]] {
                    let typed: Vec<OsString> = ["outlast", command.get_name()]
                        .into_iter()
                        .map(str::to_owned)
                        .chain(given)
                        .map(Into::into)
                        .collect();
                    let Err(error) = cli.clone().try_get_matches_from(&typed) else { continue };
                    let is_about_it = matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation);
                    if is_about_it {
                        let typed_text: Vec<_> = typed.iter().map(|word| word.to_string_lossy()).collect();
                        let report = Report::of_arguments(error, &cli, &typed);
                        assert_eq!(report.code, USAGE);
                        words.push_str(&format!("$ {}\n{report}", typed_text.join(" ")));
                    }
                }
            }
        }
        insta::assert_snapshot!(words);
    }

    #[test]
    fn the_nearest_command_is_offered() {
        use clap::CommandFactory;
        let cli = crate::cli::Cli::command();
        for (given, meant) in
            [("restat", "restart"), ("stat", "state"), ("tpo", "top"), ("warp", "wrap"), ("docter", "doctor")]
        {
            let typed: Vec<OsString> = vec!["outlast".into(), given.into()];
            let error = cli.clone().try_get_matches_from(&typed).unwrap_err();
            let hint = Report::of_arguments(error, &cli, &typed).hint;
            assert_eq!(hint, Some(format!("did you mean `{meant}`?")), "{given}");
        }
    }

    #[test]
    fn without_the_list_of_commands_there_is_still_a_report() {
        let report = Report::from(cli().try_get_matches_from(["outlast", "mpc"]).unwrap_err());
        insta::assert_snapshot!(report, @r"
        error: unknown command `mpc`
          hint: `outlast --help` lists the options
        ");
    }

    #[test]
    fn help_and_version_are_answers_not_errors() {
        for (line, beginning) in
            [("outlast --version", "outlast 1.2.3\n"), ("outlast mcp --help", "Usage: outlast mcp")]
        {
            let report = ask(line);
            assert_eq!(report.code, 0);
            assert!(report.to_string().starts_with(beginning), "{report}");
        }
    }
}
