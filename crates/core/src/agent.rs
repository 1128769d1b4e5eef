//! Facts about the agents: how a conversation is resumed, how readiness is detected, and their quit words.

use serde::{Deserialize, Serialize};

use crate::{
    agent_line::{CommandLine, is_uuid},
    session::Mode,
    stance::{self, Sight, Stance, View},
};

mod saved;

pub use saved::{Saved, SavedPrompt};

/// The end of the output that is searched.
pub const TAIL_MAX: usize = 4 << 10;

/// Most agents send `ESC [ ? 2004 h` when they accept input.
const PASTE_ON: &[u8] = b"\x1b[?2004h";
/// claude shows both, in this order: the same letter in an earlier greeting does not count.
const CLAUDE_SIGNS: [&[u8]; 2] = [PASTE_ON, "❯".as_bytes()];
const CODEX_SIGNS: [&[u8]; 2] = [PASTE_ON, "›".as_bytes()];
/// In the arguments of a described agent, this stands for the id of its conversation.
pub const ID_MARK: &str = "{id}";
/// Lines at the end of the screen in which a described agent shows that it is busy.
const DESCRIBED_LINES: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Claude,
    Codex,
    /// `[agent.NAME]` in `outlast.toml` describes it.
    Described,
    /// It has no conversation: it is restarted with the same arguments.
    Shell,
    /// Not known by name.
    Other,
    /// A program of a known name with a command that is no conversation.
    NotInteractive,
}

impl Kind {
    /// The profiles that are built in.
    pub const NAMED: [(&str, Kind); 3] = [("claude", Kind::Claude), ("codex", Kind::Codex), ("shell", Kind::Shell)];

    pub fn word(self) -> &'static str {
        match self {
            Kind::Claude => "claude",
            Kind::Codex => "codex",
            Kind::Described => "described",
            Kind::Shell => "shell",
            Kind::Other => "other",
            Kind::NotInteractive => "not_interactive",
        }
    }
}

/// Which profile an agent has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// By the name of its program.
    #[default]
    ByName,
    /// One that is built in, named by the user.
    Named(Kind),
    /// From `outlast.toml`.
    Described(Description),
}

/// `[agent.NAME]`: how to drive an agent without a built-in profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// Added to its command line when it continues a conversation.
    pub resume: Vec<String>,
    /// Added to its command line when it begins a conversation.
    pub fresh: Vec<String>,
    /// The beginning of its input line. Without it the first output counts as ready.
    pub prompt: Option<String>,
    /// In one of the last lines of its screen while it works.
    pub busy: Option<String>,
    /// The bytes that submit what was typed; Enter if there are none.
    pub submit: Option<String>,
    /// The beginning of the line in which it says that its usage limit is reached.
    pub limit: Option<String>,
}

impl Description {
    /// Whether its conversation has an id that outlast chooses.
    fn takes_id(&self) -> bool {
        self.fresh.iter().any(|word| word.contains(ID_MARK))
    }

    /// An error message if it cannot work.
    pub fn complaint(&self) -> Option<&'static str> {
        let wants_id = self.resume.iter().any(|word| word.contains(ID_MARK));
        (wants_id && !self.takes_id())
            .then_some("`resume` contains `{id}` and `fresh` does not, so the id is never known")
    }
}

/// One agent and its conversation.
#[derive(Clone, Debug)]
pub struct Agent {
    line: CommandLine,
    description: Description,
    /// The conversation that the agent is in, by its id, once it is known.
    conversation: Option<String>,
    /// How often the process was started: the initial prompt and the user's own choice of a conversation are for the first
    /// start only.
    starts: u32,
    kept: Kept,
}

/// What an agent has stored of its conversation, as far as it can be resumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// Nothing yet: there is nothing to resume, and the id is still free.
    Nothing,
    /// Its id, and no turn: there is nothing to resume, and the id is used.
    NoTurn,
    /// At least one turn; also assumed where it cannot be looked up.
    #[default]
    Turns,
}

/// How the next agent is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    pub args: Vec<String>,
    /// The actual mode, which may differ from the requested one.
    pub mode: Mode,
}

impl Agent {
    pub fn new(program: &str, args: &[String], profile: Profile) -> Agent {
        let (chosen, description) = match profile {
            Profile::ByName => (None, Description::default()),
            Profile::Named(kind) => (Some(kind), Description::default()),
            Profile::Described(description) => (Some(Kind::Described), description),
        };
        let line = CommandLine::read(program, args, chosen);
        let conversation = line.chosen_id().map(str::to_owned);
        Agent { line, description, conversation, starts: 0, kept: Kept::Turns }
    }

    /// Continues a conversation of an earlier session. `is_prompt_sent`: the command line is the same as then, so its
    /// initial prompt was sent.
    pub fn go_on(&mut self, conversation: Option<String>, is_prompt_sent: bool) {
        self.starts = u32::from(is_prompt_sent);
        if !self.line.has_choice() || is_prompt_sent {
            self.conversation = conversation;
        }
    }

    /// `new_id` is for an agent that accepts an id for its conversation; `settings` is a file that makes it report
    /// through hooks, and already contains the user's own `--settings`.
    pub fn start(&mut self, mode: Mode, new_id: &str, settings: Option<&str>) -> Start {
        let has_begun = self.starts > 0;
        self.starts = self.starts.saturating_add(1);
        let kept = std::mem::take(&mut self.kept);
        let settings = settings.filter(|_| self.takes_hooks());
        let is_ours = settings.is_some();
        let with_settings = |words: &[&str]| -> Vec<String> {
            let settings = settings.iter().flat_map(|file| ["--settings", file]);
            words.iter().copied().chain(settings).map(str::to_owned).collect()
        };
        // The initial prompt and the user's own choice are passed at the first start only.
        let line = &self.line;
        let build = |words: &[&str]| match has_begun {
            true => line.again(&with_settings(words), is_ours),
            false => line.first_in(&with_settings(words), is_ours),
        };
        let fresh = |args| Start { args, mode: Mode::Fresh };
        let is_own_choice = line.has_choice() && !has_begun;
        // While no conversation of the agent is known yet, the user's choice still applies.
        let is_choice_open = line.has_choice() && self.conversation.is_none() && mode == Mode::Continue;
        match (line.kind, mode, &self.conversation) {
            (Kind::NotInteractive | Kind::Shell, ..) => fresh(line.as_given(&[], false)),
            (Kind::Claude | Kind::Codex, ..) if is_own_choice => fresh(line.as_given(&with_settings(&[]), is_ours)),
            (Kind::Claude | Kind::Codex, ..) if is_choice_open => {
                fresh(line.without_prompt(&with_settings(&[]), is_ours))
            }
            // Resuming a conversation that was never stored fails; beginning it under its id does not.
            (Kind::Claude, Mode::Continue, Some(id)) if kept == Kept::Nothing => fresh(build(&["--session-id", id])),
            (Kind::Claude, Mode::Continue, Some(id)) if kept == Kept::Turns => {
                Start { args: build(&["--resume", id]), mode }
            }
            (Kind::Claude, ..) => {
                let args = build(&["--session-id", new_id]);
                self.conversation = Some(new_id.to_owned());
                fresh(args)
            }
            (Kind::Codex, Mode::Continue, Some(id)) if kept == Kept::Turns => {
                Start { args: build(&["resume", id]), mode }
            }
            (Kind::Codex, ..) => {
                let args = build(&[]);
                self.conversation = None;
                fresh(args)
            }
            (Kind::Described, Mode::Continue, id) if !self.description.resume.is_empty() => {
                let id = id.clone().unwrap_or_default();
                Start { args: line.with_last(&filled(&self.description.resume, &id)), mode }
            }
            (Kind::Described, ..) => {
                let args = line.with_last(&filled(&self.description.fresh, new_id));
                self.conversation = self.description.takes_id().then(|| new_id.to_owned());
                fresh(args)
            }
            (Kind::Other, Mode::Continue, _) => Start { args: line.with_last(&["--continue".to_owned()]), mode },
            (Kind::Other, Mode::Fresh, _) => fresh(line.as_given(&[], false)),
        }
    }

    /// The process could not be started at all: what is for the first start is still to be passed.
    pub fn never_ran(&mut self) {
        self.starts = self.starts.saturating_sub(1);
    }

    pub fn kind(&self) -> Kind {
        self.line.kind
    }

    /// Whether it reports through hooks that a settings file on its command line can add.
    pub fn takes_hooks(&self) -> bool {
        self.line.kind == Kind::Claude
    }

    /// What the user wrote as `--settings`.
    pub fn own_settings(&self) -> Option<&str> {
        self.line.settings()
    }

    /// What its command line sets in its environment.
    pub fn assigned(&self, variable: &str) -> Option<&str> {
        self.line.assigned(variable)
    }

    /// The bytes that submit what was typed, if they are not Enter.
    pub fn submit(&self) -> Option<&str> {
        self.description.submit.as_deref()
    }

    /// The beginning of its notice of a usage limit, for an agent that the user described.
    pub fn limit(&self) -> Option<&str> {
        self.description.limit.as_deref()
    }

    /// Whether outlast recognises that it has reached its usage limit.
    pub fn shows_limits(&self) -> bool {
        matches!(self.line.kind, Kind::Claude | Kind::Codex) || self.description.limit.is_some()
    }

    pub fn conversation(&self) -> Option<&str> {
        self.conversation.as_deref()
    }

    /// The conversation, if its agent stores it in a file of this name from the first turn on.
    pub fn kept_as(&self) -> Option<&str> {
        let is_kept = matches!(self.line.kind, Kind::Claude | Kind::Codex);
        self.conversation.as_deref().filter(|id| is_kept && is_uuid(id.as_bytes()))
    }

    /// What was found there. It applies to the next start.
    pub fn has_kept(&mut self, kept: Kept) {
        self.kept = kept;
    }

    /// Whether the files of the agent tell which conversation it is in.
    pub fn has_files(&self) -> bool {
        matches!(self.line.kind, Kind::Claude | Kind::Codex)
    }

    /// Whether its last output tells the id of its conversation, so that the output is worth keeping.
    pub fn tells_its_conversation(&self) -> bool {
        self.line.kind == Kind::Codex
    }

    /// The end of its output, after it exited.
    pub fn said_last(&mut self, tail: &[u8]) {
        if self.tells_its_conversation()
            && let Some(id) = conversation_in(tail)
        {
            self.conversation = Some(id);
        }
    }

    /// It exited, and its conversation is not known.
    pub fn is_without_conversation(&self) -> bool {
        self.line.kind == Kind::Codex && self.conversation.is_none()
    }

    /// The agent is in this conversation, as its hooks or its files say.
    pub fn learned(&mut self, id: String) {
        self.conversation = Some(id);
    }

    /// The agent recorded a turn with this text.
    pub fn took_turn(&mut self, text: &str) {
        self.line.took_turn(text);
    }

    /// Its quit words.
    pub fn quit_words(&self) -> &'static [&'static str] {
        match self.line.kind {
            Kind::Claude | Kind::Codex => &["/exit", "/quit", "exit", "quit"],
            Kind::Described | Kind::Shell | Kind::Other | Kind::NotInteractive => {
                &["/exit", "/quit", "exit", "quit", "logout"]
            }
        }
    }

    /// Whether its window shows what it is doing.
    pub fn is_readable(&self) -> bool {
        matches!(self.line.kind, Kind::Claude | Kind::Codex) || self.description.busy.is_some()
    }

    /// What its window shows.
    pub fn stance(&self, view: &View) -> Sight {
        match self.line.kind {
            Kind::Described => Sight { stance: self.description.stance(&view.lines), is_sure: true },
            kind => stance::of(kind, view),
        }
    }

    /// Finds its prompt in its output, from its start on.
    pub fn prompt(&self) -> Prompt {
        let signs = match self.line.kind {
            Kind::Claude => CLAUDE_SIGNS.map(<[u8]>::to_vec).to_vec(),
            Kind::Codex => CODEX_SIGNS.map(<[u8]>::to_vec).to_vec(),
            Kind::Described => self.description.prompt.iter().map(|sign| sign.trim_end().as_bytes().to_vec()).collect(),
            Kind::Shell | Kind::Other | Kind::NotInteractive => Vec::new(),
        };
        Prompt { signs, seen: 0, tail: Vec::new() }
    }
}

impl Description {
    fn stance(&self, lines: &[String]) -> Stance {
        let last = lines.iter().rev().map(|line| line.trim()).filter(|line| !line.is_empty());
        let last: Vec<&str> = last.take(DESCRIBED_LINES).collect();
        let is_busy = |busy: &String| last.iter().any(|line| line.contains(busy.as_str()));
        let is_prompt = |prompt: &String| last.iter().any(|line| line.starts_with(prompt.trim()));
        match () {
            () if self.busy.as_ref().is_some_and(is_busy) => Stance::Busy,
            () if self.prompt.as_ref().is_some_and(is_prompt) => Stance::Prompt,
            () => Stance::Unclear,
        }
    }
}

fn filled(words: &[String], id: &str) -> Vec<String> {
    words.iter().map(|word| word.replace(ID_MARK, id)).collect()
}

/// Searches output until all signs of a prompt were found. Without any sign the first output counts.
#[derive(Clone, Debug)]
pub struct Prompt {
    signs: Vec<Vec<u8>>,
    seen: usize,
    /// The end of earlier output: a sign may be cut between two reads.
    tail: Vec<u8>,
}

impl Prompt {
    /// True as soon as the prompt is found. Not called again after that.
    pub fn is_in(&mut self, output: &[u8]) -> bool {
        self.tail.extend_from_slice(output);
        let mut from = 0;
        while let Some(sign) = self.signs.get(self.seen) {
            let Some(at) = memchr::memmem::find(&self.tail[from..], sign) else { break };
            from += at + sign.len();
            self.seen += 1;
        }
        if self.seen == self.signs.len() {
            return !self.tail.is_empty();
        }
        let keep = self.signs[self.seen].len() - 1;
        let cut = self.tail.len().saturating_sub(keep).max(from);
        self.tail.drain(..cut);
        false
    }
}

/// The last id in the place where codex prints its conversation.
fn conversation_in(tail: &[u8]) -> Option<String> {
    const BEFORE: [&[u8]; 2] = [b"Session ID: ", b"codex resume "];
    let found = BEFORE.iter().flat_map(|before| {
        memchr::memmem::find_iter(tail, before).filter_map(|at| {
            let id = tail.get(at + before.len()..at + before.len() + UUID_LENGTH)?;
            is_uuid(id).then(|| (at, String::from_utf8_lossy(id).into_owned()))
        })
    });
    found.max().map(|(_, id)| id)
}

const UUID_LENGTH: usize = 36;

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(program: &str, args: &str) -> Agent {
        Agent::new(program, &words(args), Profile::ByName)
    }

    const OLD: &str = "11111111-1111-4111-8111-111111111111";
    const NEW: &str = "22222222-2222-4222-8222-222222222222";

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(|word| word.replace("OLD", OLD).replace("NEW", NEW)).collect()
    }

    fn shown(start: &Start) -> String {
        format!("{}: {}", start.mode, start.args.join(" ").replace(OLD, "OLD").replace(NEW, "NEW"))
    }

    #[test]
    fn an_agent_is_started_with_its_own_conversation() {
        use Mode::*;
        #[rustfmt::skip]
        let table = [
            // command                       starts                      the last of them
            ("claude",                       &[Fresh][..],               "fresh: --session-id NEW"),
            ("/usr/bin/claude --model x",    &[Fresh, Continue],         "continue: --resume NEW --model x"),
            ("claude",                       &[Fresh, Continue, Fresh],  "fresh: --session-id NEW"),
            ("claude --session-id OLD",      &[Fresh],                   "fresh: --session-id OLD"),
            ("claude --session-id OLD -x",   &[Fresh, Continue],         "continue: --resume OLD -x"),
            ("claude --session-id=OLD -x",   &[Fresh, Fresh],            "fresh: --session-id NEW -x"),
            ("claude -x --resume OLD",       &[Fresh],                   "fresh: -x --resume OLD"),
            ("claude -x --resume OLD",       &[Fresh, Continue],         "continue: --resume OLD -x"),
            // That conversation is learned later; until then the choice still applies.
            ("claude --continue",            &[Fresh, Continue],         "fresh: --continue"),
            ("claude --continue",            &[Fresh, Fresh],            "fresh: --session-id NEW"),
            ("claude now --model x",         &[Fresh],                   "fresh: --session-id NEW now --model x"),
            ("claude now --model x",         &[Fresh, Continue],         "continue: --resume NEW --model x"),
            ("claude now --model x",         &[Fresh, Fresh],            "fresh: --session-id NEW --model x"),
            ("claude -c now",                &[Fresh, Continue],         "fresh: -c"),
            ("env A=1 claude now",           &[Fresh, Continue],         "continue: A=1 claude --resume NEW"),
            ("codex now",                    &[Fresh],                   "fresh: now"),
            ("codex now",                    &[Fresh, Continue],         "fresh: "),
            ("codex -c a=b resume OLD now",  &[Fresh, Continue],         "continue: resume OLD -c a=b"),
            ("bash -l",                      &[Fresh, Continue],         "fresh: -l"),
            ("/bin/zsh",                     &[Fresh, Continue],         "fresh: "),
            ("env A=1 fish",                 &[Fresh, Continue],         "fresh: A=1 fish"),
            ("claude mcp list",              &[Fresh, Continue],         "fresh: mcp list"),
            ("claude -p hello",              &[Fresh, Continue],         "fresh: -p hello"),
            ("codex --model x",              &[Fresh],                   "fresh: --model x"),
            // Its id was never learned, and the newest one in this directory may belong to another session.
            ("codex --model x",              &[Fresh, Continue],         "fresh: --model x"),
            ("codex resume OLD --model x",   &[Fresh],                   "fresh: resume OLD --model x"),
            ("codex resume OLD --model x",   &[Fresh, Continue],         "continue: resume OLD --model x"),
            ("codex resume OLD --model x",   &[Fresh, Fresh],            "fresh: --model x"),
            ("codex exec hello",             &[Fresh, Continue],         "fresh: exec hello"),
            ("aider --x",                    &[Fresh],                   "fresh: --x"),
            ("aider --x",                    &[Fresh, Continue],         "continue: --x --continue"),
            ("claude.sh",                    &[Fresh, Continue],         "continue: --continue"),
        ];
        for (command, starts, expected) in table {
            let mut command = words(command);
            let program = command.remove(0);
            let mut agent = Agent::new(&program, &command, Profile::ByName);
            let mut last = None;
            for mode in starts {
                last = Some(agent.start(*mode, NEW, None));
            }
            assert_eq!(shown(&last.unwrap()), expected, "{program} {starts:?}");
        }
    }

    #[test]
    fn a_conversation_that_was_never_stored_begins_under_its_own_id() {
        let mut claude = agent("claude", "--model x");
        claude.start(Mode::Fresh, NEW, None);
        assert_eq!(claude.kept_as(), Some(NEW));
        #[rustfmt::skip]
        let table = [
            (Kept::Nothing, Mode::Continue, "fresh: --session-id NEW --model x"),
            // It was reported once.
            (Kept::Turns,   Mode::Continue, "continue: --resume NEW --model x"),
            (Kept::NoTurn,  Mode::Continue, "fresh: --session-id OLD --model x"),
            (Kept::Nothing, Mode::Fresh,    "fresh: --session-id OLD --model x"),
        ];
        for (kept, mode, expected) in table {
            if kept != Kept::Turns {
                claude.has_kept(kept);
            }
            assert_eq!(shown(&claude.start(mode, OLD, None)), expected, "{kept:?}");
        }
        // A conversation with a name may well be stored, and codex reports what it has.
        let mut named = agent("claude", "--resume parser");
        named.start(Mode::Fresh, NEW, None);
        assert_eq!(named.kept_as(), None);
    }

    #[test]
    fn codex_prints_its_conversation_when_it_exits() {
        let mut codex = agent("codex", "--model x");
        codex.start(Mode::Fresh, NEW, None);
        codex.said_last(format!("bye\r\nSession ID: {OLD}\r\n").as_bytes());
        assert_eq!(shown(&codex.start(Mode::Continue, NEW, None)), "continue: resume OLD --model x");
        codex.said_last(format!("To continue, run codex resume {NEW}\r\nSession ID: nonsense").as_bytes());
        assert_eq!(shown(&codex.start(Mode::Continue, OLD, None)), "continue: resume NEW --model x");
        let mut other = agent("other", "");
        other.said_last(format!("Session ID: {OLD}").as_bytes());
        assert_eq!(other.conversation(), None);
    }

    #[test]
    fn a_prompt_is_found_in_reads_of_any_size() {
        let output = "welcome ❯ \x1b[?25l\x1b[?2004h\r\n╭─\r\n ❯ \r\n".as_bytes();
        for size in 1..output.len() {
            let mut prompt = agent("claude", "").prompt();
            let mut seen = 0;
            for piece in output.chunks(size) {
                seen += piece.len();
                if prompt.is_in(piece) {
                    break;
                }
            }
            assert!(output[..seen].ends_with("❯".as_bytes()) || size > 1, "cut by {size}");
            assert!(prompt.seen == 2, "cut by {size}");
        }
        let mut codex = agent("codex", "").prompt();
        assert!(!codex.is_in("\x1b[?2004h ❯ ".as_bytes()));
        assert!(codex.is_in("› Ask".as_bytes()));
        let mut other = agent("other", "").prompt();
        assert!(!other.is_in(b""));
        assert!(other.is_in(b"x"));
    }

    #[test]
    fn the_conversation_follows_the_agent() {
        let mut claude = agent("claude", "-c now");
        claude.start(Mode::Fresh, NEW, None);
        claude.learned(OLD.to_owned());
        assert_eq!(shown(&claude.start(Mode::Continue, NEW, None)), "continue: --resume OLD");
        let mut codex = agent("codex", "now --oss");
        codex.start(Mode::Fresh, NEW, None);
        codex.learned(OLD.to_owned());
        codex.learned(NEW.to_owned());
        assert_eq!(shown(&codex.start(Mode::Continue, OLD, None)), "continue: resume NEW --oss");
        // After `/new` nothing is stored until the first turn: there is nothing to resume, and the old conversation
        // is not meant.
        codex.has_kept(Kept::Nothing);
        assert_eq!(shown(&codex.start(Mode::Continue, OLD, None)), "fresh: --oss");
    }

    #[test]
    fn hooks_come_with_the_settings_of_the_user() {
        let mut claude = agent("claude", "--settings own.json --model x");
        assert_eq!(claude.own_settings(), Some("own.json"));
        let start = claude.start(Mode::Fresh, NEW, Some("ours.json"));
        assert_eq!(shown(&start), "fresh: --session-id NEW --settings ours.json --model x");
        let without = claude.start(Mode::Continue, NEW, None);
        assert_eq!(shown(&without), "continue: --resume NEW --settings own.json --model x");
        let mut codex = agent("codex", "");
        assert_eq!(shown(&codex.start(Mode::Fresh, NEW, Some("ours.json"))), "fresh: ");
    }

    #[test]
    fn a_described_agent_is_driven_as_described() {
        let list = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let description = Description {
            resume: list("--load {id}"),
            fresh: list("--save {id}"),
            prompt: Some("ask> ".into()),
            busy: Some("thinking".into()),
            submit: None,
            limit: None,
        };
        assert_eq!(description.complaint(), None);
        assert!(Description { fresh: Vec::new(), ..description.clone() }.complaint().is_some());
        let mut agent = Agent::new("./mine", &list("-x"), Profile::Described(description));
        assert_eq!(shown(&agent.start(Mode::Fresh, NEW, None)), "fresh: -x --save NEW");
        assert_eq!(shown(&agent.start(Mode::Continue, OLD, None)), "continue: -x --load NEW");
        assert_eq!(shown(&agent.start(Mode::Fresh, OLD, None)), "fresh: -x --save OLD");
        let view = |screen: &str| View { lines: screen.lines().map(str::to_owned).collect(), ..View::default() };
        let stance = |screen: &str| agent.stance(&view(screen)).stance;
        assert_eq!(stance("hello\nask> x"), Stance::Prompt);
        assert_eq!(stance("thinking\nask> "), Stance::Busy);
        assert_eq!(stance("hello"), Stance::Unclear);
        let mut prompt = agent.prompt();
        assert!(!prompt.is_in(b"hello as"));
        assert!(prompt.is_in(b"k> "));
        let mut plain = Agent::new("./mine", &list("-x"), Profile::Described(Description::default()));
        plain.start(Mode::Fresh, NEW, None);
        assert_eq!(shown(&plain.start(Mode::Continue, NEW, None)), "fresh: -x");
    }

    #[test]
    fn a_later_session_continues_the_conversation() {
        let mut same = agent("claude", "now -x");
        same.go_on(Some(OLD.to_owned()), true);
        assert_eq!(shown(&same.start(Mode::Continue, NEW, None)), "continue: --resume OLD -x");
        let mut other = agent("claude", "then -x");
        other.go_on(Some(OLD.to_owned()), false);
        assert_eq!(shown(&other.start(Mode::Continue, NEW, None)), "continue: --resume OLD then -x");
        let mut chosen = agent("claude", "--resume NEW");
        chosen.go_on(Some(OLD.to_owned()), false);
        assert_eq!(shown(&chosen.start(Mode::Continue, OLD, None)), "fresh: --resume NEW");
        let mut chosen = agent("claude", "--resume NEW");
        chosen.go_on(Some(OLD.to_owned()), true);
        assert_eq!(shown(&chosen.start(Mode::Continue, NEW, None)), "continue: --resume OLD");
    }

    #[test]
    fn a_prompt_is_kept_for_a_program_that_never_ran() {
        let mut claude = agent("claude", "now");
        claude.start(Mode::Fresh, NEW, None);
        claude.never_ran();
        assert_eq!(shown(&claude.start(Mode::Fresh, NEW, None)), "fresh: --session-id NEW now");
    }
}
