//! What is known of the agents people use: how a conversation is taken up again, how one sees that they are ready, and
//! the words that send them away.

use crate::{
    session::Mode,
    stance::{self, Signs, Stance},
};

/// The newest output that is looked through for what it says.
pub const TAIL_MAX: usize = 4 << 10;

/// Most agents take `ESC [ ? 2004 h` to say that they can be typed to.
const PASTE_ON: &[u8] = b"\x1b[?2004h";
/// And these show where one types, in this order: the same letter in a greeting before is none.
const CLAUDE_SIGNS: [&[u8]; 2] = [PASTE_ON, "❯".as_bytes()];
const CODEX_SIGNS: [&[u8]; 2] = [PASTE_ON, "›".as_bytes()];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Claude,
    Codex,
    /// Not known by name.
    Other,
    /// A program of a known name, told to do something that is no conversation.
    Errand,
}

/// One agent and its conversation.
#[derive(Clone, Debug)]
pub struct Agent {
    kind: Kind,
    args: Vec<String>,
    /// The conversation by its id, once it is known.
    conversation: Option<String>,
    /// It was the person's own choice, and has not begun yet.
    is_given: bool,
    has_begun: bool,
    kept: Kept,
}

/// What an agent has written of its conversation, as far as it can be taken up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kept {
    /// Nothing yet: there is nothing to take up, and the id is still free.
    Nothing,
    /// Its id, and no turn: there is nothing to take up, and the id is gone.
    NoTurn,
    /// A turn or more; or so it is hoped where it cannot be looked up.
    #[default]
    Turns,
}

/// How the next agent is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    pub args: Vec<String>,
    /// As it is, which may be less than was wished for.
    pub mode: Mode,
}

impl Agent {
    pub fn new(program: &str, args: Vec<String>) -> Agent {
        let name = program.rsplit(['/', '\\']).next().unwrap_or(program);
        let name = name.strip_suffix(".exe").unwrap_or(name);
        let (kind, given) = match name {
            "claude" => claude(&args),
            "codex" => codex(&args),
            _ => (Kind::Other, None),
        };
        Agent { kind, args, is_given: given.is_some(), conversation: given, has_begun: false, kept: Kept::Turns }
    }

    /// `new_id` is for an agent that takes the id of its conversation from us.
    pub fn start(&mut self, mode: Mode, new_id: &str) -> Start {
        let has_begun = std::mem::replace(&mut self.has_begun, true);
        let kept = std::mem::take(&mut self.kept);
        match (self.kind, mode, &self.conversation) {
            (Kind::Errand, ..) => self.as_given(Mode::Fresh),
            // As the person wrote it, the first time.
            (_, _, Some(_)) if self.is_given && !has_begun => self.as_given(Mode::Fresh),
            // To resume what was never written fails; to begin it under its id does not.
            (Kind::Claude, Mode::Continue, Some(id)) if kept == Kept::Nothing => {
                let args = [vec!["--session-id".to_owned(), id.clone()], self.without_given()].concat();
                Start { args, mode: Mode::Fresh }
            }
            (Kind::Claude, Mode::Continue, Some(id)) if kept == Kept::Turns => {
                let args = [vec!["--resume".to_owned(), id.clone()], self.without_given()].concat();
                Start { args, mode }
            }
            (Kind::Claude, ..) => {
                let args = [vec!["--session-id".to_owned(), new_id.to_owned()], self.without_given()].concat();
                self.conversation = Some(new_id.to_owned());
                Start { args, mode: Mode::Fresh }
            }
            (Kind::Codex, Mode::Continue, Some(id)) => {
                let args = [vec!["resume".to_owned(), id.clone()], self.without_given()].concat();
                Start { args, mode }
            }
            (Kind::Codex, ..) => {
                self.conversation = None;
                Start { args: self.without_given(), mode: Mode::Fresh }
            }
            (Kind::Other, Mode::Continue, _) => {
                let args = [self.args.clone(), vec!["--continue".to_owned()]].concat();
                Start { args, mode }
            }
            (Kind::Other, Mode::Fresh, _) => self.as_given(Mode::Fresh),
        }
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn conversation(&self) -> Option<&str> {
        self.conversation.as_deref()
    }

    /// The conversation, if it is kept in a file under this name from the first turn on.
    pub fn kept_as(&self) -> Option<&str> {
        self.conversation.as_deref().filter(|id| self.kind == Kind::Claude && is_uuid(id.as_bytes()))
    }

    /// What was found there. It holds for the next start.
    pub fn has_kept(&mut self, kept: Kept) {
        self.kept = kept;
    }

    /// Whether its last output tells the id of its conversation, so that the output is worth keeping.
    pub fn tells_its_conversation(&self) -> bool {
        self.kind == Kind::Codex
    }

    /// The end of what it wrote, when it is gone.
    pub fn said_last(&mut self, tail: &[u8]) {
        if self.tells_its_conversation()
            && let Some(id) = conversation_in(tail)
        {
            self.conversation = Some(id);
        }
    }

    /// It is gone, and which conversation it had is not known.
    pub fn is_without_conversation(&self) -> bool {
        self.kind == Kind::Codex && self.conversation.is_none()
    }

    /// Its conversation was found out by other means.
    pub fn learned(&mut self, id: String) {
        self.conversation = Some(id);
    }

    /// The words that send it away when Enter follows.
    pub fn farewells(&self) -> &'static [&'static str] {
        match self.kind {
            Kind::Claude | Kind::Codex => &["/exit", "/quit", "exit", "quit"],
            Kind::Other | Kind::Errand => &["/exit", "/quit", "exit", "quit", "logout"],
        }
    }

    /// Whether one can see on its screen what it is doing.
    pub fn is_readable(&self) -> bool {
        self.signs().is_some()
    }

    /// What its screen says it is doing.
    pub fn stance(&self, lines: &[String]) -> Stance {
        self.signs().map_or(Stance::Unclear, |signs| stance::of(&signs, lines))
    }

    fn signs(&self) -> Option<Signs> {
        match self.kind {
            Kind::Claude => Some(stance::CLAUDE),
            Kind::Codex => Some(stance::CODEX),
            Kind::Other | Kind::Errand => None,
        }
    }

    /// Looks for its prompt in what it writes from its start on.
    pub fn prompt(&self) -> Prompt {
        let signs: &'static [&'static [u8]] = match self.kind {
            Kind::Claude => &CLAUDE_SIGNS,
            Kind::Codex => &CODEX_SIGNS,
            Kind::Other | Kind::Errand => &[],
        };
        Prompt { signs, seen: 0, tail: Vec::new() }
    }

    fn as_given(&self, mode: Mode) -> Start {
        Start { args: self.args.clone(), mode }
    }

    /// The arguments without those by which the person chose a conversation.
    fn without_given(&self) -> Vec<String> {
        let mut kept = Vec::new();
        let mut args = self.args.iter().peekable();
        if self.kind == Kind::Codex && self.is_given {
            // `resume ID`
            args.next();
            args.next();
        }
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--session-id" | "--resume" | "-r" if self.kind == Kind::Claude && self.is_given => _ = args.next(),
                arg if self.kind == Kind::Claude && self.is_given && given_by(arg).is_some() => {}
                _ => kept.push(arg.clone()),
            }
        }
        kept
    }
}

/// Output on its way past, until it has shown all signs of a prompt. Without any sign the first output is it.
#[derive(Clone, Debug)]
pub struct Prompt {
    signs: &'static [&'static [u8]],
    seen: usize,
    /// The end of what came before: a sign may be cut in two.
    tail: Vec<u8>,
}

impl Prompt {
    /// True as soon as it is there. Not to be asked again after that.
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

fn claude(args: &[String]) -> (Kind, Option<String>) {
    const ERRANDS: [&str; 16] = [
        "mcp",
        "doctor",
        "update",
        "config",
        "install",
        "setup-token",
        "agents",
        "plugin",
        "attach",
        "logs",
        "respawn",
        "stop",
        "rm",
        "auth",
        "upgrade",
        "project",
    ];
    if args.first().is_some_and(|first| ERRANDS.contains(&first.as_str())) {
        return (Kind::Errand, None);
    }
    let mut given = None;
    for (at, arg) in args.iter().enumerate() {
        match arg.as_str() {
            "--session-id" | "--resume" | "-r" => {
                let id = args.get(at + 1).filter(|next| !next.starts_with('-'));
                // Without an id it asks the person, and which one it was we never learn.
                let Some(id) = id else { return (Kind::Errand, None) };
                given = Some(id.clone());
            }
            "--continue" | "-c" | "--fork-session" | "-p" | "--print" | "--version" | "-v" | "--help" | "-h" => {
                return (Kind::Errand, None);
            }
            arg => given = given_by(arg).or(given),
        }
    }
    (Kind::Claude, given)
}

fn given_by(arg: &str) -> Option<String> {
    arg.strip_prefix("--session-id=").or_else(|| arg.strip_prefix("--resume=")).map(str::to_owned)
}

fn codex(args: &[String]) -> (Kind, Option<String>) {
    const ERRANDS: [&str; 17] = [
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
        "fork",
        "queue",
        "agents",
        "cloud",
        "features",
        "review",
    ];
    match args.first().map(String::as_str) {
        Some("resume") => match args.get(1).filter(|id| is_uuid(id.as_bytes())) {
            Some(id) => (Kind::Codex, Some(id.clone())),
            None => (Kind::Errand, None),
        },
        Some(first) if ERRANDS.contains(&first) => (Kind::Errand, None),
        _ if args.iter().any(|arg| ["--version", "-V", "--help", "-h"].contains(&arg.as_str())) => (Kind::Errand, None),
        _ => (Kind::Codex, None),
    }
}

/// The last id that stands where codex names its conversation.
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

fn is_uuid(bytes: &[u8]) -> bool {
    bytes.len() == UUID_LENGTH
        && bytes.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("claude --continue",            &[Fresh, Continue],         "fresh: --continue"),
            ("claude mcp list",              &[Fresh, Continue],         "fresh: mcp list"),
            ("claude -p hello",              &[Fresh, Continue],         "fresh: -p hello"),
            ("codex --model x",              &[Fresh],                   "fresh: --model x"),
            // Its id was never learned, and the newest in this directory may be anybody's.
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
            let mut agent = Agent::new(&program, command);
            let mut last = None;
            for mode in starts {
                last = Some(agent.start(*mode, NEW));
            }
            assert_eq!(shown(&last.unwrap()), expected, "{program} {starts:?}");
        }
    }

    #[test]
    fn what_was_never_written_is_begun_under_its_own_id() {
        let mut claude = Agent::new("claude", words("--model x"));
        claude.start(Mode::Fresh, NEW);
        assert_eq!(claude.kept_as(), Some(NEW));
        #[rustfmt::skip]
        let table = [
            (Kept::Nothing, Mode::Continue, "fresh: --session-id NEW --model x"),
            // It was said once.
            (Kept::Turns,   Mode::Continue, "continue: --resume NEW --model x"),
            (Kept::NoTurn,  Mode::Continue, "fresh: --session-id OLD --model x"),
            (Kept::Nothing, Mode::Fresh,    "fresh: --session-id OLD --model x"),
        ];
        for (kept, mode, expected) in table {
            if kept != Kept::Turns {
                claude.has_kept(kept);
            }
            assert_eq!(shown(&claude.start(mode, OLD)), expected, "{kept:?}");
        }
        // What a person calls by a name may well be written, and codex tells what it has.
        let mut named = Agent::new("claude", words("--resume parser"));
        named.start(Mode::Fresh, NEW);
        assert_eq!(named.kept_as(), None);
        assert_eq!(Agent::new("codex", words("resume OLD")).kept_as(), None);
    }

    #[test]
    fn codex_tells_its_conversation_when_it_leaves() {
        let mut codex = Agent::new("codex", words("--model x"));
        codex.start(Mode::Fresh, NEW);
        codex.said_last(format!("bye\r\nSession ID: {OLD}\r\n").as_bytes());
        assert_eq!(shown(&codex.start(Mode::Continue, NEW)), "continue: resume OLD --model x");
        codex.said_last(format!("To continue, run codex resume {NEW}\r\nSession ID: nonsense").as_bytes());
        assert_eq!(shown(&codex.start(Mode::Continue, OLD)), "continue: resume NEW --model x");
        let mut other = Agent::new("other", Vec::new());
        other.said_last(format!("Session ID: {OLD}").as_bytes());
        assert_eq!(other.conversation(), None);
    }

    #[test]
    fn a_prompt_is_seen_however_it_is_cut() {
        let output = "welcome ❯ \x1b[?25l\x1b[?2004h\r\n╭─\r\n ❯ \r\n".as_bytes();
        for size in 1..output.len() {
            let mut prompt = Agent::new("claude", Vec::new()).prompt();
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
        let mut codex = Agent::new("codex", Vec::new()).prompt();
        assert!(!codex.is_in("\x1b[?2004h ❯ ".as_bytes()));
        assert!(codex.is_in("› Ask".as_bytes()));
        let mut other = Agent::new("other", Vec::new()).prompt();
        assert!(!other.is_in(b""));
        assert!(other.is_in(b"x"));
    }
}
