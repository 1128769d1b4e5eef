//! The options of `outlast mcp` and `outlast run` that the file sets: those that stand on the command line win.

use std::{env, path::PathBuf, time::Duration};

use clap::{ArgMatches, ValueEnum, parser::ValueSource};
use outlast_core::{
    agent::{Description, Kind, Profile},
    keys::DetachKey,
};

use super::{
    Config, Surroundings, Want,
    mistake::Mistakes,
    read::{Got, Section, Text, beside},
    tree::Place,
};
use crate::{
    cli, duration,
    report::{self, Report},
};

/// Options that have no key, and why.
pub const WITHOUT_KEY: &[(&str, &str)] = &[
    ("config", "it says where the file is"),
    ("command", "each server and each agent has its own"),
    ("document", "each session has its own"),
    ("session", "each session has its own"),
    ("stdio", "whoever starts the gateway speaks to it, or does not"),
    ("cwd", "each session has its own"),
];

/// The arguments of `outlast mcp`, with what the file sets.
pub fn mcp(mut arguments: cli::Mcp, given: Option<&ArgMatches>) -> Result<cli::Mcp, Report> {
    if let Some(given) = given {
        here(|around| fill_mcp(&mut arguments, given, around))?;
    }
    Ok(arguments)
}

/// The arguments of `outlast run`, with what the file sets.
pub fn run(mut arguments: cli::Run, given: Option<&ArgMatches>) -> Result<cli::Run, Report> {
    if let Some(given) = given {
        here(|around| fill_run(&mut arguments, given, around))?;
    }
    Ok(arguments)
}

/// The arguments of `outlast gateway`, with what the file sets. Of its address and its name the driver takes care, as they
/// may change with the file; and of mistakes, of which it finds more than stand in this one table.
pub fn gateway(mut arguments: cli::Gateway, given: Option<&ArgMatches>) -> cli::Gateway {
    if let Some(given) = given {
        let _ = here(|around| fill_gateway(&mut arguments, given, around));
    }
    arguments
}

fn here(fill: impl FnOnce(&Surroundings<'_>) -> Result<(), Mistakes>) -> Result<(), Report> {
    let cwd = env::current_dir()
        .map_err(|error| Report::new(report::FAILURE, "the working directory is gone").because(error))?;
    Ok(Surroundings::with(&cwd, fill)?)
}

/// Of `outlast mcp`.
pub fn fill_mcp(arguments: &mut cli::Mcp, given: &ArgMatches, around: &Surroundings<'_>) -> Result<(), Mistakes> {
    let config = Config::load(named(arguments.config.as_ref()).as_slice(), Want::Only("mcp"), around)?;
    arguments.warnings = config.warnings();
    let filler = Filler { file: config.table("mcp"), given };
    check_mcp(&filler.file)?;
    // What is about messages means nothing to a server that has our own stdin and stdout.
    arguments.sandbox = super::sandbox::read(&filler.file, &mut Mistakes::default());
    filler.truth("inherit", &mut arguments.inherit);
    filler.optional_text("name", &mut arguments.name);
    filler.choice("policy", &mut arguments.policy);
    filler.choice("first_restart", &mut arguments.first_restart);
    filler.optional_count("max_restarts", &mut arguments.max_restarts);
    filler.span("stdin_grace", &mut arguments.stdin_grace);
    filler.span("term_grace", &mut arguments.term_grace);
    if arguments.inherit {
        return Ok(());
    }
    filler.paths("watch", &mut arguments.watch);
    filler.optional_text("build", &mut arguments.build);
    filler.choice("reload", &mut arguments.reload);
    filler.span("drain", &mut arguments.drain);
    filler.choice("retry", &mut arguments.retry);
    filler.choice("on_clean_exit", &mut arguments.on_clean_exit);
    if let Some(span) = filler.is_new("start_timeout").then(|| filler.file.span("start_timeout")).flatten() {
        arguments.start_timeout = Some(span);
    }
    let spans = [
        ("answer_after", &mut arguments.answer_after),
        ("heartbeat", &mut arguments.heartbeat),
        ("call_timeout", &mut arguments.call_timeout),
    ];
    for (name, argument) in spans {
        if let Some(span) = filler.is_new(name).then(|| filler.file.span(name)).flatten() {
            *argument = Some(span);
        }
    }
    for (tool, _, section) in filler.file.named("tool") {
        if let Some(limit) = section.span("call_timeout") {
            arguments.call_timeouts.insert(tool.clone(), limit);
        }
    }
    if let Some(size) = filler.is_new("memory_max").then(|| filler.file.size("memory_max")).flatten() {
        arguments.memory_max = Some(size);
    }
    if let Some(name) = filler.is_new("restart_tool").then(|| filler.file.text("restart_tool")).flatten() {
        arguments.restart_tool = name;
    }
    filler.span("hold", &mut arguments.hold);
    filler.truth("no_tools", &mut arguments.no_tools);
    if let Some(path) = filler.is_new("marker").then(|| filler.file.path("marker")).flatten() {
        arguments.marker = Some(path);
    }
    Ok(())
}

/// Of `outlast run`.
pub fn fill_run(arguments: &mut cli::Run, given: &ArgMatches, around: &Surroundings<'_>) -> Result<(), Mistakes> {
    let config = Config::load(named(arguments.config.as_ref()).as_slice(), Want::Only("run"), around)?;
    arguments.warnings = config.warnings();
    let filler = Filler { file: config.table("run"), given };
    if filler.is_new("env_pass") {
        arguments.env_pass = filler.file.values("env_pass");
    }
    filler.choice("env", &mut arguments.env);
    filler.truth("detach", &mut arguments.detach);
    if let Some(key) = check_run(&filler.file)?.filter(|_| filler.is_new("detach_key")) {
        arguments.detach_key = key;
    }
    filler.optional_text("agent", &mut arguments.agent);
    let agents = check_agents(&config)?;
    let program = arguments.command.first().map(|program| program.to_string_lossy().into_owned());
    arguments.profile = profile(arguments.agent.as_deref(), program.as_deref(), &agents, &filler)?;
    filler.choice("on_hangup", &mut arguments.on_hangup);
    filler.truth("no_screen", &mut arguments.no_screen);
    filler.optional_text("notify", &mut arguments.notify);
    if let Some(span) = filler.is_new("hang_timeout").then(|| filler.file.span("hang_timeout")).flatten() {
        arguments.hang_timeout = Some(span);
    }
    Ok(())
}

/// Of `outlast gateway`.
pub fn fill_gateway(
    arguments: &mut cli::Gateway,
    given: &ArgMatches,
    around: &Surroundings<'_>,
) -> Result<(), Mistakes> {
    let config = Config::load(&arguments.config, Want::Only("gateway"), around)?;
    let filler = Filler { file: config.table("gateway"), given };
    filler.truth("no_watch", &mut arguments.no_watch);
    filler.span("stdin_grace", &mut arguments.stdin_grace);
    filler.span("term_grace", &mut arguments.term_grace);
    Ok(())
}

fn named(config: Option<&PathBuf>) -> Vec<PathBuf> {
    config.into_iter().cloned().collect()
}

/// What the command line refuses by itself.
pub fn check_mcp(file: &Section) -> Result<(), Mistakes> {
    const ABOUT_MESSAGES: [&str; 16] = [
        "watch",
        "build",
        "reload",
        "drain",
        "retry",
        "hold",
        "start_timeout",
        "no_tools",
        "marker",
        "on_clean_exit",
        "answer_after",
        "heartbeat",
        "call_timeout",
        "tool",
        "memory_max",
        "restart_tool",
    ];
    let mut mistakes = Mistakes::default();
    if file.span("heartbeat").is_some_and(|every| every < cli::HEARTBEAT_MIN)
        && let Some(set) = file.set("heartbeat")
    {
        let what = "that is too often for a heartbeat";
        let mistake = super::mistake::Mistake::new(set.at.clone(), "mcp.heartbeat", what);
        mistakes.add(mistake.hint("at least 100ms"));
    }
    super::sandbox::read(file, &mut mistakes);
    if file.truth("inherit") {
        for name in ABOUT_MESSAGES {
            if let Some(set) = file.set(name) {
                let what = "it is about messages, and with `inherit` none is read";
                let mistake = super::mistake::Mistake::new(set.at.clone(), format!("mcp.{name}"), what);
                mistakes.add(mistake.hint("leave out one of them"));
            }
        }
    }
    mistakes.check()
}

/// The agents that the file describes.
pub fn check_agents(config: &Config) -> Result<Vec<(String, Description)>, Mistakes> {
    let mut mistakes = Mistakes::default();
    let mut agents = Vec::new();
    for (name, at, section) in config.root.named("agent") {
        let description = Description {
            resume: section.values("resume"),
            fresh: section.values("fresh"),
            prompt: section.text("prompt").filter(|text| !text.is_empty()),
            busy: section.text("busy").filter(|text| !text.is_empty()),
            submit: section.text("submit").filter(|text| !text.is_empty()),
        };
        let wrong = |what: &str| super::mistake::Mistake::new(at.clone(), format!("agent.{name}"), what);
        if Kind::NAMED.iter().any(|(known, _)| known == name) {
            mistakes.add(wrong("this profile is built in").hint("give yours another name, and choose it by `--agent`"));
        }
        if let Some(complaint) = description.complaint() {
            mistakes.add(wrong(complaint).hint("put `{id}` into `fresh`, too, or leave it out of `resume`"));
        }
        agents.push((name.clone(), description));
    }
    mistakes.check().map(|()| agents)
}

/// The profile that is named, or the one described for a program of this name.
fn profile(
    named: Option<&str>,
    program: Option<&str>,
    agents: &[(String, Description)],
    filler: &Filler<'_>,
) -> Result<Profile, Mistakes> {
    let described = |name: &str| agents.iter().find(|(known, _)| known == name).map(|(_, agent)| agent.clone());
    let Some(name) = named else {
        let name = program.and_then(|program| program.rsplit(['/', '\\']).next());
        return Ok(name.and_then(described).map_or(Profile::ByName, Profile::Described));
    };
    let built_in = Kind::NAMED.iter().find(|(known, _)| *known == name).map(|(_, kind)| Profile::Named(*kind));
    built_in.or_else(|| described(name).map(Profile::Described)).ok_or_else(|| {
        let at =
            filler.file.place("agent").filter(|_| filler.is_new("agent")).unwrap_or_else(|| Place::option("agent"));
        let what = format!("there is no profile `{name}`");
        let known = Kind::NAMED.iter().map(|(known, _)| *known).chain(agents.iter().map(|(known, _)| known.as_str()));
        let hint = format!("there are {}; `[agent.{name}]` describes another", known.collect::<Vec<_>>().join(", "));
        super::mistake::Mistake::new(at, "run.agent", what).hint(hint).into()
    })
}

/// The key that the file names.
pub fn check_run(file: &Section) -> Result<Option<DetachKey>, Mistakes> {
    let Some(text) = file.the_text("detach_key") else { return Ok(None) };
    DetachKey::parse(&text.value).map(Some).map_err(|why| {
        let what = format!("`{}` cannot be that key", text.written);
        super::mistake::Mistake::new(text.at.clone(), "run.detach_key", what).hint(why).into()
    })
}

struct Filler<'a> {
    file: Section,
    given: &'a ArgMatches,
}

impl Filler<'_> {
    /// The file sets it, and the command line does not.
    fn is_new(&self, name: &str) -> bool {
        self.file.set(name).is_some() && !is_given(self.given, name)
    }

    fn truth(&self, name: &str, into: &mut bool) {
        if self.is_new(name) {
            *into = self.file.truth(name);
        }
    }

    fn span(&self, name: &str, into: &mut Duration) {
        if let Some(span) = self.is_new(name).then(|| self.file.span(name)).flatten() {
            *into = span;
        }
    }

    fn optional_text(&self, name: &str, into: &mut Option<String>) {
        if let Some(text) = self.is_new(name).then(|| self.file.text(name)).flatten() {
            *into = Some(text);
        }
    }

    fn optional_count(&self, name: &str, into: &mut Option<u32>) {
        if let Some(count) = self.is_new(name).then(|| self.file.count(name)).flatten() {
            *into = Some(count);
        }
    }

    fn choice<T: ValueEnum>(&self, name: &str, into: &mut T) {
        let text = self.is_new(name).then(|| self.file.text(name)).flatten();
        if let Some(choice) = text.and_then(|text| T::from_str(&text, false).ok()) {
            *into = choice;
        }
    }

    fn paths(&self, name: &str, into: &mut Vec<PathBuf>) {
        if self.is_new(name) {
            *into = self.file.texts(name).iter().map(beside).collect();
        }
    }
}

fn is_given(given: &ArgMatches, name: &str) -> bool {
    given.try_contains_id(name).unwrap_or(false) && given.value_source(name) == Some(ValueSource::CommandLine)
}

/// Lays the options of a command line over its table, for `config show`.
pub fn lay_over(section: &mut Section, given: &ArgMatches) {
    for key in section.keys() {
        if !is_given(given, key.name) {
            continue;
        }
        let at = Place::option(key.name);
        let raw = given.get_raw(key.name).map(|values| values.map(|value| value.to_string_lossy().into_owned()));
        let texts: Vec<Text> = raw.into_iter().flatten().map(|value| text(&at, value)).collect();
        let got = match (key.shape, texts.as_slice()) {
            (super::keys::Shape::Truth, _) => Got::Truth(true),
            (super::keys::Shape::Span, [only]) => match duration::parse(&only.value) {
                Some(span) => Got::Span(span),
                None => Got::Text(only.clone()),
            },
            (super::keys::Shape::Size, [only]) => match super::read::size(&only.value) {
                Some(size) => Got::Size(size),
                None => Got::Text(only.clone()),
            },
            (super::keys::Shape::Texts | super::keys::Shape::Paths, _) => Got::Texts(texts),
            (_, [only]) => Got::Text(only.clone()),
            _ => Got::Texts(texts),
        };
        section.put(key.name, at, got);
    }
}

fn text(at: &Place, value: String) -> Text {
    Text { at: at.clone(), written: value.clone(), value, variables: vec![], parts: vec![] }
}
