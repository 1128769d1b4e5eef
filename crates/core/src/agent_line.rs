//! The command line of an agent: where its own arguments begin after `env`, `npx` or a wrapper, which of them choose a
//! conversation, and which one is the initial prompt. It reads words; it starts nothing.

use crate::agent::Kind;

/// Shells are restarted with the same arguments: they have no `--continue`.
const SHELLS: [&str; 19] = [
    "sh",
    "bash",
    "zsh",
    "fish",
    "dash",
    "ash",
    "ksh",
    "ksh93",
    "mksh",
    "oksh",
    "yash",
    "tcsh",
    "csh",
    "nu",
    "elvish",
    "xonsh",
    "pwsh",
    "powershell",
    "cmd",
];

/// claude: subcommands that do not start a conversation.
const CLAUDE_ERRANDS: [&str; 22] = [
    "mcp",
    "doctor",
    "update",
    "config",
    "install",
    "setup-token",
    "agents",
    "plugin",
    "plugins",
    "attach",
    "logs",
    "respawn",
    "stop",
    "rm",
    "auth",
    "upgrade",
    "project",
    "kill",
    "auto-mode",
    "gateway",
    "import",
    "ultrareview",
];
/// claude: options that make it something else than an interactive conversation on this terminal.
const CLAUDE_NOT_INTERACTIVE: [&str; 12] = [
    "-p",
    "--print",
    "--version",
    "-v",
    "--help",
    "-h",
    "--bg",
    "--background",
    "--desktop",
    "--cloud",
    "--environment",
    "--teleport",
];
/// claude: options that take the next word, with or without a `-`.
const CLAUDE_ONE: [&str; 24] = [
    "--agent",
    "--agents",
    "--append-system-prompt",
    "--append-system-prompt-file",
    "--autocompact",
    "--debug-file",
    "--effort",
    "--fallback-model",
    "--input-format",
    "--json-schema",
    "--max-budget-usd",
    "--model",
    "-n",
    "--name",
    "--output-format",
    "--permission-mode",
    "--permission-prompts",
    "--permission-prompt-tool",
    "--plugin-dir",
    "--plugin-url",
    "--remote-control-session-name-prefix",
    "--setting-sources",
    "--settings",
    "--session-id",
];
const CLAUDE_ONE_MORE: [&str; 4] =
    ["--system-prompt", "--system-prompt-file", "--system-prompt-snapshot", "--max-turns"];
/// claude: options that take the next word unless that begins with `-`.
const CLAUDE_OPTIONAL: [&str; 9] =
    ["-d", "--debug", "--from-pr", "--prompt-suggestions", "--remote-control", "-r", "--resume", "-w", "--worktree"];
/// claude: options that take all words up to the next one that begins with `-`.
const CLAUDE_MANY: [&str; 9] = [
    "--add-dir",
    "--allowedTools",
    "--allowed-tools",
    "--betas",
    "--disallowedTools",
    "--disallowed-tools",
    "--file",
    "--mcp-config",
    "--tools",
];
/// claude: flags, so that the word after one is not taken for its value.
const CLAUDE_FLAGS: [&str; 24] = [
    "--allow-dangerously-skip-permissions",
    "--ax-screen-reader",
    "--bare",
    "--brief",
    "--chrome",
    "-c",
    "--continue",
    "--dangerously-skip-permissions",
    "--disable-slash-commands",
    "--exclude-dynamic-system-prompt-sections",
    "--fork-session",
    "--forward-subagent-text",
    "--ide",
    "--include-hook-events",
    "--include-partial-messages",
    "--no-chrome",
    "--no-session-persistence",
    "--replay-user-messages",
    "--restricted",
    "--safe-mode",
    "--strict-mcp-config",
    "--tmux",
    "--verbose",
    "--enable-auto-mode",
];
/// claude: options that choose a conversation.
const CLAUDE_CHOICE: [&str; 7] = ["--session-id", "--resume", "-r", "--continue", "-c", "--fork-session", "--from-pr"];

/// codex: subcommands that do not start a conversation.
const CODEX_ERRANDS: [&str; 26] = [
    "exec",
    "e",
    "login",
    "logout",
    "mcp",
    "mcp-server",
    "app-server",
    "completion",
    "sandbox",
    "debug",
    "apply",
    "a",
    "queue",
    "agents",
    "cloud",
    "features",
    "review",
    "plugin",
    "remote-control",
    "update",
    "doctor",
    "archive",
    "delete",
    "unarchive",
    "exec-server",
    "help",
];
const CODEX_ONE: [&str; 18] = [
    "-c",
    "--config",
    "--enable",
    "--disable",
    "--remote",
    "--remote-auth-token-env",
    "-m",
    "--model",
    "--local-provider",
    "-p",
    "--profile",
    "-s",
    "--sandbox",
    "-C",
    "--cd",
    "--add-dir",
    "-a",
    "--ask-for-approval",
];
const CODEX_MANY: [&str; 2] = ["-i", "--image"];
const CODEX_FLAGS: [&str; 16] = [
    "--strict-config",
    "--oss",
    "--approve-for-me",
    "--dangerously-bypass-approvals-and-sandbox",
    "--yolo",
    "--full-auto",
    "--dangerously-bypass-hook-trust",
    "--worktree",
    "--search",
    "--no-alt-screen",
    "--no-daemon",
    "--last",
    "--all",
    "--include-non-interactive",
    "-h",
    "-V",
];
/// codex: only for the choice of a conversation.
const CODEX_CHOICE: [&str; 3] = ["--last", "--all", "--include-non-interactive"];

/// A parsed command line of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    pub kind: Kind,
    /// Words before the agent's own arguments: those of `env` and `npx`, and the agent's name after them.
    before: Vec<String>,
    /// The agent's own arguments.
    args: Vec<Arg>,
    /// The command is a wrapper with unknown arguments of its own: additions go to the end.
    is_wrapper: bool,
}

/// Some words of the command line that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Arg {
    words: Vec<String>,
    role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Other,
    /// It chooses a conversation.
    Choice,
    /// claude's `--settings`.
    Settings,
    /// It is submitted at the start.
    Prompt,
    /// A word of a wrapper that may be an argument of the wrapper or the prompt.
    MayBePrompt,
}

impl CommandLine {
    /// `chosen` is the profile that the user named; without it the program's name decides.
    pub fn read(program: &str, args: &[String], chosen: Option<Kind>) -> CommandLine {
        let words: Vec<&str> = [program].into_iter().chain(args.iter().map(String::as_str)).collect();
        let at = program_at(&words);
        let known = words.get(at).map_or(Kind::Other, |word| kind_of(word));
        let named = match chosen {
            // In a wrapper's command line that names the agent, the agent's arguments begin after that name.
            Some(kind) if known != kind => words.iter().skip(1).position(|word| kind_of(word) == kind).map(|at| at + 1),
            _ => Some(at),
        };
        let kind = chosen.unwrap_or(known);
        let is_wrapper = named.is_none();
        let named = named.unwrap_or(0).min(args.len());
        let mut line = CommandLine { kind, before: args[..named].to_vec(), args: Vec::new(), is_wrapper };
        let own = &args[named..];
        let read = match kind {
            Kind::Claude => claude(own),
            Kind::Codex => codex(own),
            Kind::Other | Kind::Shell | Kind::Described | Kind::NotInteractive => Some(vec![Arg::other(own)]),
        };
        match read {
            Some(args) => line.args = args,
            None => {
                line.kind = Kind::NotInteractive;
                line.args = vec![Arg::other(own)];
            }
        }
        if is_wrapper {
            for arg in line.args.iter_mut().filter(|arg| arg.role == Role::Prompt) {
                // An argument of the wrapper itself is seldom a sentence.
                let is_sentence = arg.words.iter().any(|word| word.contains(char::is_whitespace));
                arg.role = if is_sentence { Role::Prompt } else { Role::MayBePrompt };
            }
        }
        line
    }

    /// Whether the user chose a conversation.
    pub fn has_choice(&self) -> bool {
        self.args.iter().any(|arg| arg.role == Role::Choice)
    }

    /// The id of the conversation that the user chose, if the command line has it.
    pub fn chosen_id(&self) -> Option<&str> {
        let is_fork = self.words_of(Role::Choice).any(|word| word == "--fork-session" || word == "fork");
        let ids = self.words_of(Role::Choice).map(|word| word.split_once('=').map_or(word, |(_, value)| value));
        ids.filter(|word| is_uuid(word.as_bytes())).last().filter(|_| !is_fork)
    }

    /// The user's value of `--settings`.
    pub fn settings(&self) -> Option<&str> {
        let last = self.words_of(Role::Settings).last()?;
        Some(last.strip_prefix("--settings=").unwrap_or(last))
    }

    /// The agent recorded this turn: an equal word of a wrapper was the initial prompt.
    pub fn took_turn(&mut self, text: &str) {
        for arg in self.args.iter_mut().filter(|arg| arg.role == Role::MayBePrompt) {
            if arg.words.last().is_some_and(|word| word.trim() == text.trim()) {
                arg.role = Role::Prompt;
            }
        }
    }

    /// The places of the arguments that are the initial prompt.
    pub fn prompts(&self) -> Vec<usize> {
        let args = self.args.iter().enumerate();
        args.filter(|(_, arg)| arg.role == Role::Prompt).map(|(place, _)| place).collect()
    }

    /// These arguments are the initial prompt, if they can be.
    pub fn set_prompts(&mut self, places: &[usize]) {
        for (place, arg) in self.args.iter_mut().enumerate() {
            if arg.role == Role::MayBePrompt && places.contains(&place) {
                arg.role = Role::Prompt;
            }
        }
    }

    /// The value that `env` assigns to a variable on the command line.
    pub fn assigned(&self, name: &str) -> Option<&str> {
        self.before.iter().rev().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }

    /// All words as the user wrote them, with these before the agent's own arguments. The user's `--settings` are
    /// left out if our settings replace them.
    pub fn as_given(&self, added: &[String], is_settings_ours: bool) -> Vec<String> {
        self.build(added, &[], |role| role != Role::Settings || !is_settings_ours)
    }

    /// For a restart: without the choice of a conversation, and without the initial prompt.
    pub fn again(&self, added: &[String], is_settings_ours: bool) -> Vec<String> {
        self.build(added, &[], |role| match role {
            Role::Other | Role::MayBePrompt => true,
            Role::Choice | Role::Prompt => false,
            Role::Settings => !is_settings_ours,
        })
    }

    /// For the first start, with this conversation instead of the user's choice.
    pub fn first_in(&self, added: &[String], is_settings_ours: bool) -> Vec<String> {
        self.build(added, &[], |role| role != Role::Choice && (role != Role::Settings || !is_settings_ours))
    }

    /// As the user wrote it, without the initial prompt.
    pub fn without_prompt(&self, added: &[String], is_settings_ours: bool) -> Vec<String> {
        self.build(added, &[], |role| role != Role::Prompt && (role != Role::Settings || !is_settings_ours))
    }

    /// With these words at the end.
    pub fn with_last(&self, last: &[String]) -> Vec<String> {
        self.build(&[], last, |_| true)
    }

    fn build(&self, added: &[String], last: &[String], keeps: impl Fn(Role) -> bool) -> Vec<String> {
        let own = self.args.iter().filter(|arg| keeps(arg.role)).flat_map(|arg| arg.words.clone());
        let before = self.before.iter().cloned();
        let (front, back) = if self.is_wrapper { (&[][..], added) } else { (added, &[][..]) };
        let all = before.chain(front.iter().cloned()).chain(own);
        all.chain(back.iter().cloned()).chain(last.iter().cloned()).collect()
    }

    fn words_of(&self, role: Role) -> impl Iterator<Item = &str> {
        self.args.iter().filter(move |arg| arg.role == role).flat_map(|arg| arg.words.iter().map(String::as_str))
    }
}

impl Arg {
    fn other(words: &[String]) -> Arg {
        Arg { words: words.to_vec(), role: Role::Other }
    }
}

/// The position of the actual program: after `env` and package runners such as `npx`.
fn program_at(words: &[&str]) -> usize {
    let behind = match name_of(words.first().copied().unwrap_or_default()) {
        "env" => env_at(words),
        "npx" | "pnpx" | "bunx" => package_at(words, 1),
        "npm" if matches!(words.get(1), Some(&("exec" | "x"))) => package_at(words, 2),
        "pnpm" | "yarn" if words.get(1) == Some(&"dlx") => package_at(words, 2),
        "bun" if words.get(1) == Some(&"x") => package_at(words, 2),
        _ => return 0,
    };
    match behind {
        Some(at) if at < words.len() => at + program_at(&words[at..]),
        _ => 0,
    }
}

fn env_at(words: &[&str]) -> Option<usize> {
    let mut at = 1;
    while let Some(word) = words.get(at) {
        match *word {
            "-u" | "--unset" | "-C" | "--chdir" => at += 2,
            "--" => return Some(at + 1),
            // The option contains a command line of its own.
            word if word.starts_with("-S") || word.starts_with("--split-string") => return None,
            word if word.starts_with('-') || word.contains('=') => at += 1,
            _ => return Some(at),
        }
    }
    None
}

/// `npx -y PACKAGE`, `npx -p PACKAGE NAME`.
fn package_at(words: &[&str], first: usize) -> Option<usize> {
    let mut at = first;
    while let Some(word) = words.get(at) {
        match *word {
            "-p" | "--package" | "-w" | "--workspace" => at += 2,
            "-c" | "--call" => return None,
            "--" => return Some(at + 1),
            word if word.starts_with('-') => at += 1,
            _ => return Some(at),
        }
    }
    None
}

fn name_of(program: &str) -> &str {
    let name = program.rsplit(['/', '\\']).next().unwrap_or(program);
    [".exe", ".cmd", ".ps1"].iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name)
}

fn kind_of(word: &str) -> Kind {
    let package = word.rfind('@').filter(|at| *at > 0).map_or(word, |at| &word[..at]);
    match (package, name_of(word)) {
        ("@anthropic-ai/claude-code", _) | (_, "claude") => Kind::Claude,
        ("@openai/codex", _) | (_, "codex") => Kind::Codex,
        (_, name) if SHELLS.contains(&name.strip_prefix('-').unwrap_or(name)) => Kind::Shell,
        _ => Kind::Other,
    }
}

/// How many words after an option belong to it.
enum Takes {
    Nothing,
    One,
    /// One, unless it begins with `-`.
    Optional,
    Many,
    /// An option of a newer version: a single word after it is its value, a sentence is not.
    Unknown,
}

impl Takes {
    fn count(&self, behind: &[String]) -> usize {
        let is_word = |word: &&String| !word.starts_with('-') || word.as_str() == "-";
        match self {
            Takes::Nothing => 0,
            Takes::One => behind.len().min(1),
            Takes::Optional => behind.iter().take(1).filter(is_word).count(),
            Takes::Many => behind.iter().take_while(is_word).count(),
            Takes::Unknown => {
                behind.iter().take(1).filter(is_word).filter(|word| !word.contains(char::is_whitespace)).count()
            }
        }
    }
}

/// None if the arguments do not start an interactive conversation.
fn claude(args: &[String]) -> Option<Vec<Arg>> {
    let mut read = Vec::new();
    let mut at = 0;
    let mut has_prompt = false;
    while let Some(word) = args.get(at) {
        if word == "--" {
            read.push(Arg::other(&args[at..=at]));
            read.extend(args[at + 1..].iter().map(|word| Arg { words: vec![word.clone()], role: Role::Prompt }));
            break;
        }
        if !word.starts_with('-') || word == "-" {
            if !has_prompt && CLAUDE_ERRANDS.contains(&word.as_str()) {
                return None;
            }
            has_prompt = true;
            read.push(Arg { words: vec![word.clone()], role: Role::Prompt });
            at += 1;
            continue;
        }
        let (name, has_value) = match word.split_once('=') {
            Some((name, _)) if name.starts_with("--") => (name, true),
            _ => (word.as_str(), false),
        };
        if CLAUDE_NOT_INTERACTIVE.contains(&name) {
            return None;
        }
        let is_in = |list: &[&str]| list.contains(&name);
        let takes = match () {
            () if has_value || is_in(&CLAUDE_FLAGS) => Takes::Nothing,
            () if is_in(&CLAUDE_ONE) || is_in(&CLAUDE_ONE_MORE) => Takes::One,
            () if is_in(&CLAUDE_OPTIONAL) => Takes::Optional,
            () if is_in(&CLAUDE_MANY) => Takes::Many,
            () => Takes::Unknown,
        };
        let end = at + 1 + takes.count(&args[at + 1..]);
        let role = match name {
            "--settings" => Role::Settings,
            name if CLAUDE_CHOICE.contains(&name) => Role::Choice,
            _ => Role::Other,
        };
        read.push(Arg { words: args[at..end].to_vec(), role });
        at = end;
    }
    Some(read)
}

/// None if the arguments do not start an interactive conversation.
fn codex(args: &[String]) -> Option<Vec<Arg>> {
    let mut read = Vec::new();
    let mut at = 0;
    // None until the first word that is not an option: `resume` and `fork` are followed by a conversation.
    let mut behind_choice: Option<bool> = None;
    while let Some(word) = args.get(at) {
        if word == "--" {
            read.push(Arg::other(&args[at..=at]));
            read.extend(args[at + 1..].iter().map(|word| Arg { words: vec![word.clone()], role: Role::Prompt }));
            break;
        }
        if !word.starts_with('-') || word == "-" {
            let role = match behind_choice {
                None if CODEX_ERRANDS.contains(&word.as_str()) => return None,
                None if word == "resume" || word == "fork" => {
                    behind_choice = Some(true);
                    Role::Choice
                }
                Some(true) => {
                    behind_choice = Some(false);
                    // With `--last` there is no id, and this word is the prompt.
                    let is_last = args.iter().any(|arg| arg == "--last");
                    if is_last && !is_uuid(word.as_bytes()) { Role::Prompt } else { Role::Choice }
                }
                _ => {
                    behind_choice = Some(false);
                    Role::Prompt
                }
            };
            read.push(Arg { words: vec![word.clone()], role });
            at += 1;
            continue;
        }
        let (name, has_value) = match word.split_once('=') {
            Some((name, _)) if name.starts_with("--") => (name, true),
            _ => (word.as_str(), false),
        };
        if ["--version", "-V", "--help", "-h"].contains(&name) {
            return None;
        }
        let is_in = |list: &[&str]| list.contains(&name);
        // `-mMODEL`
        let is_joined = !word.starts_with("--") && word.len() > 2;
        let takes = match () {
            () if has_value || is_joined || is_in(&CODEX_FLAGS) => Takes::Nothing,
            () if is_in(&CODEX_ONE) => Takes::One,
            () if is_in(&CODEX_MANY) => Takes::Many,
            () => Takes::Unknown,
        };
        let end = at + 1 + takes.count(&args[at + 1..]);
        let role = match name {
            // An image belongs to the initial prompt.
            "-i" | "--image" => Role::Prompt,
            name if CODEX_CHOICE.contains(&name) => Role::Choice,
            _ => Role::Other,
        };
        read.push(Arg { words: args[at..end].to_vec(), role });
        at = end;
    }
    Some(read)
}

/// Length of an id in characters.
const UUID_LENGTH: usize = 36;

pub(crate) fn is_uuid(bytes: &[u8]) -> bool {
    bytes.len() == UUID_LENGTH
        && bytes.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "11111111-1111-4111-8111-111111111111";

    /// Words are separated by blanks; `_` in a word stands for a blank.
    fn line(text: &str, chosen: Option<Kind>) -> CommandLine {
        let mut words: Vec<String> =
            text.split_whitespace().map(|word| word.replace('_', " ").replace("ID", ID)).collect();
        let program = words.remove(0);
        CommandLine::read(&program, &words, chosen)
    }

    fn shown(words: &[String]) -> String {
        words.iter().map(|word| word.replace(' ', "_").replace(ID, "ID")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn an_agent_is_found_behind_env_npx_and_wrappers() {
        use Kind::*;
        #[rustfmt::skip]
        let table = [
            // command                                     chosen        kind    with `+` added, for a restart
            ("claude -x",                                  None,         Claude, "+ -x"),
            ("/opt/claude.exe",                            None,         Claude, "+"),
            ("env A=1 -u B claude --verbose",              None,         Claude, "A=1 -u B claude + --verbose"),
            ("env -i A=1 -- codex --oss",                  None,         Codex,  "-i A=1 -- codex + --oss"),
            ("env A=1",                                    None,         Other,  "+ A=1"),
            ("env -S claude_-x",                           None,         Other,  "+ -S claude_-x"),
            ("npx -y @anthropic-ai/claude-code@2.1 -x",    None,         Claude, "-y @anthropic-ai/claude-code@2.1 + -x"),
            ("npx -p @openai/codex codex --oss",           None,         Codex,  "-p @openai/codex codex + --oss"),
            ("bunx @openai/codex",                         None,         Codex,  "@openai/codex +"),
            ("pnpm dlx @anthropic-ai/claude-code",         None,         Claude, "dlx @anthropic-ai/claude-code +"),
            ("npx -y create-thing",                        None,         Other,  "-y create-thing +"),
            ("env A=1 npx claude -x",                      None,         Claude, "A=1 npx claude + -x"),
            ("docker run -it box claude -x",               Some(Claude), Claude, "run -it box claude + -x"),
            ("./wrap.sh --fast one",                       Some(Claude), Claude, "--fast one +"),
            ("./wrap.sh deploy_now",                       Some(Claude), Claude, "+"),
            ("./claude.sh",                                None,         Other,  "+"),
            ("env A=1 zsh -l",                             None,         Shell,  "A=1 zsh + -l"),
            ("-bash",                                      None,         Shell,  "+"),
            ("aider --x",                                  None,         Other,  "+ --x"),
        ];
        for (command, chosen, kind, expected) in table {
            let line = line(command, chosen);
            assert_eq!(line.kind, kind, "{command}");
            assert_eq!(shown(&line.again(&["+".to_owned()], false)), expected, "{command}");
        }
        assert_eq!(line("env A=1 A=2 claude", None).assigned("A"), Some("2"));
        assert_eq!(line("env AB=1 claude", None).assigned("A"), None);
    }

    #[test]
    fn choice_and_prompt_are_left_out_of_a_restart() {
        #[rustfmt::skip]
        let table = [
            // command                                         for a restart                  chosen id
            ("claude deploy_now",                              "",                            None),
            ("claude --model m deploy",                        "--model m",                   None),
            ("claude deploy --model m",                        "--model m",                   None),
            ("claude --model=m deploy",                        "--model=m",                   None),
            ("claude --verbose deploy",                        "--verbose",                   None),
            ("claude --add-dir a b --verbose deploy",          "--add-dir a b --verbose",     None),
            ("claude --add-dir a b",                           "--add-dir a b",               None),
            ("claude --brand-new value deploy_now",            "--brand-new value",           None),
            ("claude --brand-new deploy_now",                  "--brand-new",                 None),
            ("claude -- deploy",                               "--",                          None),
            ("claude --settings s.json deploy",                "--settings s.json",           None),
            ("claude -c --verbose",                            "--verbose",                   None),
            ("claude --resume ID deploy",                      "",                            Some(ID)),
            ("claude -r ID --fork-session -x",                 "-x",                          None),
            ("claude --resume a_name -x",                      "-x",                          None),
            ("claude --resume",                                "",                            None),
            ("claude --session-id=ID -x",                      "-x",                          Some(ID)),
            ("claude --append-system-prompt be_brief deploy",  "--append-system-prompt be_brief", None),
            ("codex deploy",                                   "",                            None),
            ("codex -c a=b --oss deploy",                      "-c a=b --oss",                None),
            ("codex -mfast deploy",                            "-mfast",                      None),
            ("codex -i one.png -- look",                       "--",                          None),
            ("codex -c a=b resume ID --oss deploy",            "-c a=b --oss",                Some(ID)),
            ("codex resume --last go_on",                      "",                            None),
            ("codex fork ID go_on",                            "",                            None),
        ];
        for (command, expected, id) in table {
            let line = line(command, None);
            assert_eq!(shown(&line.again(&[], false)), expected, "{command}");
            assert_eq!(line.chosen_id(), id, "{command}");
            assert_eq!(shown(&line.as_given(&[], false)), command.split_once(' ').unwrap().1, "{command}");
        }
        for command in [
            "claude mcp list",
            "claude -p hello",
            "claude --verbose --print x",
            "codex exec hello",
            "codex -c a=b exec hello",
            "claude --bg x",
            "codex --version",
        ] {
            assert_eq!(line(command, None).kind, Kind::NotInteractive, "{command}");
        }
    }

    #[test]
    fn a_word_of_a_wrapper_is_the_prompt_once_the_agent_recorded_it() {
        let mut wrapped = line("./wrap.sh fast deploy", Some(Kind::Claude));
        assert_eq!(shown(&wrapped.again(&[], false)), "fast deploy");
        wrapped.took_turn("deploy\n");
        assert_eq!(shown(&wrapped.again(&[], false)), "fast");
    }
}
