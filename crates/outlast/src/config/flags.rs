//! The options of `outlast mcp`, `outlast run` and `outlast gateway` that the file sets. Options on the command line
//! override the file.

use clap::{ArgMatches, parser::ValueSource};
use outlast_core::agent::{Description, Kind, Profile};

use super::{
    Config, Surroundings, Want,
    keys::{Mcp, Root},
    mistake::{Mistakes, Spot},
    sandbox,
    table::{Reader, Table},
    tree::{Node, Position, Value},
    values::{Plain, Text},
};
use crate::cli::{
    self,
    report::{self, Report},
};

/// Options without a key, and why.
#[cfg(test)]
pub(crate) const WITHOUT_KEY: &[(&str, &str)] = &[
    ("config", "it names the file itself"),
    ("command", "each server and each agent has its own"),
    ("document", "each session has its own"),
    ("session", "each session has its own"),
    ("restored", "only `outlast restore` gives it"),
    ("stdio", "the program that starts the gateway decides this"),
    ("cwd", "each session has its own"),
    ("share", "each server has its own; `outlast wrap --share` writes it"),
    ("linger", "it belongs to `share`"),
    ("hub", "outlast itself sets it"),
    ("hub_why", "outlast itself sets it"),
];

/// The arguments of a command, completed from the file.
pub(crate) fn filled<A>(
    mut arguments: A,
    given: Option<&ArgMatches>,
    fill: impl FnOnce(&mut A, &ArgMatches, &Surroundings<'_>) -> Result<(), Mistakes>,
) -> Result<A, Report> {
    if let Some(given) = given {
        Surroundings::with(&report::cwd()?, |around| fill(&mut arguments, given, around))?;
    }
    Ok(arguments)
}

/// Of `outlast mcp`.
pub(crate) fn fill_mcp(
    arguments: &mut cli::Mcp,
    given: &ArgMatches,
    around: &Surroundings<'_>,
) -> Result<(), Mistakes> {
    let config = Config::load(arguments.config.as_slice(), Want::Only("mcp"), around)?;
    let file = &config.root.mcp;
    arguments.warnings = config.warnings();
    arguments.sandbox = sandbox::read(&file.sandbox, &mut Mistakes::default());
    // Options about messages have no effect on a server that has outlast's own stdin and stdout.
    let is_inherited = arguments.inherit || *file.inherit;
    file.fill(arguments, given, |name| is_inherited && is_about_messages(name));
    let tools = file.tool.0.iter().filter(|_| !is_inherited);
    arguments.call_timeouts = tools.filter_map(|(name, tool)| Some((name.clone(), (*tool.call_timeout)?))).collect();
    Ok(())
}

/// Of `outlast run`.
pub(crate) fn fill_run(
    arguments: &mut cli::Run,
    given: &ArgMatches,
    around: &Surroundings<'_>,
) -> Result<(), Mistakes> {
    let config = Config::load(arguments.config.as_slice(), Want::Only("run"), around)?;
    let file = &config.root.run;
    arguments.warnings = config.warnings();
    file.fill(arguments, given, |_| false);
    let mut mistakes = Mistakes::default();
    let agents = agents(&config.root, &mut mistakes);
    let program = arguments.command.first().map(|program| program.to_string_lossy().into_owned());
    arguments.profile = match &arguments.agent {
        Some(name) => {
            let option = is_given(given, "agent").then(|| Position::option("agent"));
            let at = option.or_else(|| file.agent.spot.at.clone());
            named_profile(name, at, &agents, &mut mistakes)
        }
        // The one for a program of this name.
        None => {
            let name = program.as_deref().and_then(|program| program.rsplit(['/', '\\']).next());
            let described = agents.into_iter().find(|(known, _)| Some(known.as_str()) == name);
            described.map_or(Profile::ByName, |(_, agent)| Profile::Described(agent))
        }
    };
    mistakes.check()
}

/// Of `outlast gateway`. The driver handles its address and its name, which may change with the file, and the errors,
/// of which it finds more than those of this table.
pub(crate) fn fill_gateway(
    arguments: &mut cli::Gateway,
    given: &ArgMatches,
    around: &Surroundings<'_>,
) -> Result<(), Mistakes> {
    if let Ok(config) = Config::load(&arguments.config, Want::Only("gateway"), around) {
        config.root.gateway.fill(arguments, given, |_| false);
    }
    Ok(())
}

/// The errors of the tables of `mcp` and `run` beyond single values.
pub(super) fn check(root: &Root, table: &str, is_found: bool, mistakes: &mut Mistakes) {
    if table == "mcp" {
        return check_mcp(&root.mcp, mistakes);
    }
    let agents = agents(root, mistakes);
    // In a file that was named, only the profile that is in force must exist.
    if let Some(name) = root.run.agent.as_ref().filter(|_| is_found) {
        named_profile(name, name.spot.at.clone(), &agents, mistakes);
    }
}

/// Combinations that the command line refuses by itself.
pub(crate) fn check_mcp(file: &Mcp, mistakes: &mut Mistakes) {
    if file.heartbeat.is_some_and(|every| every < cli::HEARTBEAT_MIN) {
        mistakes.wrong(&file.heartbeat.spot, "this time is too short for a heartbeat", "at least 100ms");
    }
    sandbox::read(&file.sandbox, mistakes);
    for (key, field) in file.fields() {
        if *file.inherit && field.is_set() && is_about_messages(key.name) {
            let what = "it concerns messages, and with `inherit` outlast reads none";
            mistakes.wrong(field.spot(), what, "remove one of them");
        }
    }
}

/// Keys of `[mcp]` that have no effect with `inherit`: all but those of the process.
fn is_about_messages(name: &str) -> bool {
    const OF_PROCESS: &str = "inherit name policy first_restart max_restarts stdin_grace term_grace sandbox";
    !OF_PROCESS.split(' ').any(|known| known == name)
}

/// The agents that the file describes.
pub(crate) fn agents(root: &Root, mistakes: &mut Mistakes) -> Vec<(String, Description)> {
    let mut agents = Vec::new();
    for (name, agent) in &root.agent.0 {
        let text = |text: &Option<Text>| text.plain().filter(|text| !text.is_empty());
        let description = Description {
            resume: agent.resume.plain(),
            fresh: agent.fresh.plain(),
            prompt: text(&agent.prompt),
            busy: text(&agent.busy),
            submit: text(&agent.submit),
            limit: agent.limit.plain().filter(|text| !text.trim().is_empty()),
        };
        if Kind::NAMED.iter().any(|(known, _)| known == name) {
            let hint = "use another name, and select it with `--agent`";
            mistakes.wrong(&agent.spot, "this profile is built in", hint);
            continue;
        }
        if let Some(complaint) = description.complaint() {
            mistakes.wrong(&agent.spot, complaint, "put `{id}` into `fresh` too, or remove it from `resume`");
        }
        agents.push((name.clone(), description));
    }
    agents
}

fn named_profile(
    name: &str,
    at: Option<Position>,
    agents: &[(String, Description)],
    mistakes: &mut Mistakes,
) -> Profile {
    let described = agents.iter().find(|(known, _)| known == name).map(|(_, agent)| agent.clone());
    let built_in = Kind::NAMED.iter().find(|(known, _)| *known == name).map(|(_, kind)| Profile::Named(*kind));
    built_in.or_else(|| described.map(Profile::Described)).unwrap_or_else(|| {
        let known = Kind::NAMED.iter().map(|(known, _)| *known).chain(agents.iter().map(|(known, _)| known.as_str()));
        let hint = format!("known profiles: {}; `[agent.{name}]` adds another", known.collect::<Vec<_>>().join(", "));
        mistakes.wrong(&Spot { key: "run.agent".to_owned(), at }, format!("no profile is named `{name}`"), hint);
        Profile::ByName
    })
}

pub(super) fn is_given(given: &ArgMatches, name: &str) -> bool {
    given.try_contains_id(name).unwrap_or(false) && given.value_source(name) == Some(ValueSource::CommandLine)
}

/// Overlays the options of a command line on its table, for `config show`.
pub(crate) fn lay_over(table: &mut dyn Table, given: &ArgMatches) {
    let mut reader = Reader { references: None, mistakes: &mut Mistakes::default(), variables: vec![] };
    for (key, field) in table.fields_mut().into_iter().filter(|(key, _)| is_given(given, key.name)) {
        let at = Position::option(key.name);
        let node = |value| Node { at: at.clone(), value };
        let raw = given.get_raw(key.name).into_iter().flatten();
        let texts: Vec<Node> = raw.map(|text| node(Value::Text(text.to_string_lossy().into_owned()))).collect();
        let value = match (given.try_get_one::<bool>(key.name), texts.as_slice()) {
            (Ok(Some(truth)), _) => node(Value::Truth(*truth)),
            (_, [only]) => only.clone(),
            _ => node(Value::List(texts)),
        };
        field.put(&mut reader, Spot { key: key.name.to_owned(), at: Some(at) }, &value);
    }
}
