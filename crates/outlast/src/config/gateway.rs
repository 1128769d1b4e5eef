//! What `outlast gateway` is to do: the machine's settings, and what its driver needs besides.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fmt, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use hyper::{
    Uri,
    header::{HeaderName, HeaderValue},
};
use outlast_core::{
    gateway::{
        Backend, Children, EraChoice, Kind, Limits, Pattern, Profile, Rate, Rates, Role, Settings, Start, Switch,
    },
    restarts::{Delays, First, Policy},
    secret::Resolved,
};

use super::{
    Config, Surroundings, Want,
    keys::OF_COMMANDS,
    mistake::{Mistake, Mistakes, did_you_mean},
    read::{Section, Text, beside},
    tree::Place,
};
use crate::{
    gateway::listen::{Certificate, address},
    report::{self, Report},
};

/// The longest name of a backend: with `__` and a tool of two letters it still fits what names may be, 64 letters.
pub const NAME_MAX: usize = 60;
const PREFIX_MAX: usize = 62;
/// RFC 7518 wants a secret as long as the hash.
const SECRET_MIN: usize = 32;

#[derive(Debug)]
pub struct Gateway {
    pub settings: Settings,
    pub name: Option<String>,
    pub front: Front,
    /// Nothing: nobody is asked who they are.
    pub auth: Option<AuthSettings>,
    /// All that was read: a change of one is a change of the configuration.
    pub watched: Vec<PathBuf>,
    /// For people: what was left out, and why.
    pub notes: Vec<String>,
}

/// The HTTP endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Front {
    pub listen: Option<SocketAddr>,
    pub tls: Option<Certificate>,
    /// The files of the certificate.
    pub tls_files: Vec<PathBuf>,
    pub hosts: Vec<String>,
    pub origins: Vec<String>,
    pub sessions_max: usize,
    pub sessions_per_client: usize,
    pub session_idle: Duration,
    pub connections_max: usize,
    pub body_max: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthSettings {
    pub jwt: Option<JwtSettings>,
    pub keys: Vec<ApiKey>,
    pub default_role: Option<String>,
    /// Whether there are roles at all: then a client must have one.
    pub wants_role: bool,
    pub roles: BTreeSet<String>,
    pub profiles: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtSettings {
    pub secret: Option<Secret>,
    pub jwks: Option<PathBuf>,
    /// Of [`super::keys::ALGORITHMS`].
    pub algorithms: Vec<String>,
    pub issuer: Option<String>,
    pub audience: Vec<String>,
    pub role_claim: String,
    pub name_claim: String,
    pub profile_claim: Option<String>,
    pub leeway: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    pub name: String,
    pub sha256: [u8; 32],
    pub role: Option<String>,
    pub profile: Option<String>,
}

/// Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Gateway {
    /// The files that were named, or else the nearest `outlast.toml`, in the real environment.
    pub fn read(named: &[PathBuf], cwd: &Path) -> Result<Gateway, Report> {
        Surroundings::with(cwd, |around| {
            let config = Config::look_at(named, Want::Everything, around)?;
            let is_unusable = config.files.is_empty() || !config.ignored.is_empty();
            match config.untrusted.first().filter(|_| is_unusable) {
                Some(file) => Err(Report::new(report::FAILURE, file.why.clone()).hint(file.hint.clone())),
                None => Ok(Gateway::of(config, around)?.0),
            }
        })
    }

    /// The same in any environment.
    pub fn load(named: &[PathBuf], around: &Surroundings<'_>) -> Result<(Gateway, Config), Mistakes> {
        Gateway::of(Config::look_at(named, Want::Everything, around)?, around)
    }

    /// What makes sense only together is checked here, and every mistake told.
    fn of(mut config: Config, around: &Surroundings<'_>) -> Result<(Gateway, Config), Mistakes> {
        let mut check = Check { around, mistakes: std::mem::take(&mut config.mistakes) };
        if let Err(mistakes) = super::flags::check_mcp(&config.table("mcp")) {
            check.mistakes.add_all(mistakes);
        }
        if let Err(mistakes) = super::flags::check_run(&config.table("run")) {
            check.mistakes.add_all(mistakes);
        }
        if let Err(mistakes) = super::flags::check_agents(&config) {
            check.mistakes.add_all(mistakes);
        }
        let root = &config.root;
        let backends = check.backends(root.many("backend"));
        let names: Vec<&str> = backends.iter().map(|backend| backend.name.as_str()).collect();
        let profiles = check.profiles(root, &names);
        let roles = roles(root);
        let front = root.section("gateway");
        let auth = check.auth(root, &roles, &profiles);
        let limits = root.section("limits");
        let settings = Settings {
            default_profile: check.known("gateway.profile", front.the_text("profile"), "profile", profiles.keys()),
            rates: check.rates(&root.section("rates")),
            switched_off: check.switches(&root.section("switch"), &names),
            forward_unknown: front.truth("forward_unknown"),
            limits: Limits {
                hold: limits.span("hold").unwrap_or_default(),
                held_max: count(&limits, "held_max"),
                in_flight_max: count(&limits, "in_flight_max"),
                page: count(&limits, "page"),
                retry_given_up: limits.span("retry_given_up").unwrap_or_default(),
            },
            backends,
            profiles,
            roles,
        };
        let front = check.front(&front, auth.is_some());
        let jwks = auth.iter().filter_map(|auth| auth.jwt.as_ref()?.jwks.clone());
        let certificate = front.tls_files.iter().cloned();
        let watched = config.files.iter().map(|file| file.path.clone()).chain(jwks).chain(certificate).collect();
        let name = root.section("gateway").text("name");
        check.mistakes.check()?;
        let notes = config.notes.iter().cloned().chain(config.warnings()).collect();
        Ok((Gateway { settings, name, front, auth, watched, notes }, config))
    }
}

fn count(section: &Section, name: &str) -> usize {
    section.count(name).map_or(usize::MAX, |count| count as usize)
}

fn roles(root: &Section) -> BTreeMap<String, Role> {
    let roles = root.named("role").iter();
    roles
        .map(|(name, _, role)| (name.clone(), Role { allow: role.patterns("allow"), deny: role.patterns("deny") }))
        .collect()
}

struct Check<'a> {
    around: &'a Surroundings<'a>,
    mistakes: Mistakes,
}

impl Check<'_> {
    fn wrong(&mut self, at: Option<Place>, key: &str, what: impl Into<String>, hint: &str) {
        let mistake = match at {
            Some(at) => Mistake::new(at, key, what),
            None => Mistake { key: key.to_owned(), ..Mistake::nowhere(what) },
        };
        self.mistakes.add(if hint.is_empty() { mistake } else { mistake.hint(hint) });
    }

    /// Something is missing; unless what is there could not be read, and has been told of.
    fn missing(&mut self, section: &Section, what: &str, hint: &str) {
        if !section.is_broken {
            self.wrong(section.at.clone(), &section.path, what, hint);
        }
    }

    fn backends(&mut self, sections: &[Section]) -> Vec<Backend> {
        let mut known: BTreeMap<String, Option<Place>> = BTreeMap::new();
        let mut backends = Vec::new();
        let mut prefixes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for section in sections {
            let path = section.path.clone();
            let Some(name) = section.the_text("name") else {
                self.missing(section, "it has no name", "name = \"…\"");
                continue;
            };
            let is_ours = name.at.file.path.extension().is_some_and(|extension| extension == "toml");
            if is_ours && !is_plain(&name.value, NAME_MAX) || name.value.is_empty() {
                let what = format!("`{}` cannot be the name of a backend", name.written);
                let hint = format!("1 to {NAME_MAX} letters, digits, `_` and `-`");
                self.wrong(Some(name.at.clone()), &format!("{path}.name"), what, &hint);
                continue;
            }
            if let Some(first) = known.insert(name.value.clone(), Some(name.at.clone())) {
                let first = first.map(|at| at.to_string()).unwrap_or_default();
                let what = format!("there is a backend of this name already, at {first}");
                self.wrong(Some(name.at.clone()), &format!("{path}.name"), what, "give one of them another name");
                continue;
            }
            if section.truth("disabled") {
                continue;
            }
            if let Some(backend) = self.backend(section, &name.value, &path) {
                let same = prefixes.entry(backend.prefix.clone()).or_default();
                if let Some(other) = same.iter().find_map(|at| collision(&backends[*at], &backend)) {
                    let at = section.place("prefix").or_else(|| section.at.clone());
                    let hint = "give one of them another `prefix`";
                    self.wrong(at, &format!("{path}.prefix"), other, hint);
                }
                same.push(backends.len());
                backends.push(backend);
            }
        }
        backends
    }

    fn backend(&mut self, section: &Section, name: &str, path: &str) -> Option<Backend> {
        let kind = self.kind(section, path);
        let prefix = match section.the_text("prefix") {
            None => format!("{name}__"),
            Some(prefix) if prefix.value.is_empty() || is_plain(&prefix.value, PREFIX_MAX) => prefix.value.clone(),
            Some(prefix) => {
                let what = format!("`{}` cannot begin the name of a tool", prefix.written);
                let hint = format!("up to {PREFIX_MAX} letters, digits, `_` and `-`, or \"\" for nothing");
                self.wrong(Some(prefix.at.clone()), &format!("{path}.prefix"), what, &hint);
                String::new()
            }
        };
        let breaker = section.section("breaker");
        let (call_timeout, call_max) = (section.span("call_timeout")?, section.span("call_max")?);
        for name in ["call_timeout", "start_timeout"] {
            if section.span(name).is_some_and(|span| span.is_zero()) {
                let what = "in no time nothing can be done";
                self.wrong(section.place(name), &format!("{path}.{name}"), what, "a span of time above 0");
            }
        }
        if call_max < call_timeout {
            let what = "it is shorter than `call_timeout`, which would never be reached";
            let at = section.set("call_max").or_else(|| section.set("call_timeout")).map(|set| set.at.clone());
            self.wrong(at, &format!("{path}.call_max"), what, "make it as long at least");
        }
        let policy = self.policy(section, path);
        Some(Backend {
            name: name.to_owned(),
            kind: kind?,
            prefix,
            allow: section.patterns("allow"),
            deny: section.patterns("deny"),
            children: section.children("children"),
            children_max: self.children_max(section, path),
            start: match section.text("start").as_deref() {
                Some("lazy") => Start::Lazy,
                _ => Start::Eager,
            },
            inherit_env: section.truth("inherit_env"),
            era: match section.text("era").as_deref() {
                Some("handshake") => EraChoice::Handshake,
                Some("stateless") => EraChoice::Stateless,
                _ => EraChoice::Auto,
            },
            policy,
            call_timeout,
            call_max,
            start_timeout: section.span("start_timeout")?,
            idle_stop: section.span("idle_stop"),
            memory_max: section.size("memory_max"),
            breaker_failures: breaker.count("failures")?,
            breaker_open: breaker.span("open")?,
            retry_annotated: section.text("retry").as_deref() == Some("annotated"),
        })
    }

    fn children_max(&mut self, section: &Section, path: &str) -> usize {
        let max = count(section, "children_max");
        if let Some(set) = section.set("children_max").filter(|_| section.children("children") != Children::PerSession)
        {
            let what = "this is only for `children = \"per_session\"`";
            self.wrong(Some(set.at.clone()), &format!("{path}.children_max"), what, "leave it out");
        }
        max
    }

    /// A command or an address, with what goes with it and nothing that goes with the other.
    fn kind(&mut self, section: &Section, path: &str) -> Option<Kind> {
        let (command, url) = (section.the_text("command"), section.the_text("url"));
        let said = section.the_text("type");
        match (command, url) {
            (None, None) => {
                let hint = "a command to start, or the address of a server that runs already";
                self.missing(section, "it has neither `command` nor `url`", hint);
                None
            }
            (Some(_), Some(url)) => {
                let what = "it has a `command` too, and only one of them can be meant";
                self.wrong(Some(url.at.clone()), &format!("{path}.url"), what, "leave one of them out");
                None
            }
            (Some(command), None) => {
                if let Some(said) = said.filter(|said| said.value != "stdio") {
                    let what = format!("a command is spoken to over stdio, not `{}`", said.written);
                    self.wrong(Some(said.at.clone()), &format!("{path}.type"), what, "leave it out");
                }
                if let Some(set) = section.set("headers") {
                    let what = "a command has no headers";
                    self.wrong(
                        Some(set.at.clone()),
                        &format!("{path}.headers"),
                        what,
                        "leave them out, or give a `url`",
                    );
                }
                if command.value.is_empty() {
                    self.wrong(Some(command.at.clone()), &format!("{path}.command"), "it is empty", "name a program");
                }
                Some(Kind::Stdio {
                    command: command.resolved(),
                    args: section.texts("args").iter().map(Text::resolved).collect(),
                    env: self.variables(section, path),
                    cwd: self.cwd(section, path),
                    sandbox: super::sandbox::read(section, &mut self.mistakes),
                })
            }
            (None, Some(url)) => {
                for name in OF_COMMANDS {
                    if let Some(set) = section.set(name) {
                        let what = "this is only for a backend with a `command`";
                        self.wrong(Some(set.at.clone()), &format!("{path}.{name}"), what, "leave it out");
                    }
                }
                if let Some(said) = said.filter(|said| said.value == "stdio") {
                    let what = "an address is not spoken to over stdio";
                    self.wrong(Some(said.at.clone()), &format!("{path}.type"), what, "it may be `http` or `sse`");
                }
                self.url(url, path);
                let headers = self.headers(section, path);
                let is_sse = said.is_some_and(|said| said.value == "sse");
                Some(Kind::Http { url: url.resolved(), headers, is_sse })
            }
        }
    }

    fn variables(&mut self, section: &Section, path: &str) -> BTreeMap<String, Resolved> {
        let mut variables = BTreeMap::new();
        for (name, text) in section.pairs("env") {
            if name.is_empty() || name.contains(['=', '\0']) {
                let what = format!("`{name}` cannot be the name of a variable");
                self.wrong(Some(text.at.clone()), &format!("{path}.env"), what, "a name has no `=` in it");
            }
            variables.insert(name.clone(), text.resolved());
        }
        variables
    }

    fn cwd(&mut self, section: &Section, path: &str) -> Option<Resolved> {
        let (dir, at) = match section.the_text("cwd") {
            Some(text) => (beside(text), Some(text.at.clone())),
            None => (section.at.as_ref()?.file.path.parent()?.to_owned(), section.at.clone()),
        };
        let problem = match fs::metadata(&dir) {
            Ok(about) if about.is_dir() => None,
            Ok(_) => Some("is not a directory".to_owned()),
            Err(error) => Some(format!("cannot be used: {}", report::plain(&error.to_string()))),
        };
        let whole = dir.display().to_string();
        let dir = match section.the_text("cwd") {
            Some(text) => match whole.strip_suffix(&text.value) {
                Some(before) => text.resolved().after(before),
                None => whole.into(),
            },
            None => whole.into(),
        };
        if let Some(problem) = problem {
            let what = format!("`{dir}` {problem}");
            self.wrong(at, &format!("{path}.cwd"), what, "a relative path counts from the directory of the file");
        }
        Some(dir)
    }

    fn url(&mut self, url: &Text, path: &str) {
        let key = format!("{path}.url");
        let at = Some(url.at.clone());
        let parsed: Option<Uri> = url.value.parse().ok();
        let scheme = parsed.as_ref().and_then(Uri::scheme_str);
        let has_host = parsed.as_ref().and_then(Uri::host).is_some_and(|host| !host.is_empty());
        if !matches!(scheme, Some("http" | "https")) || !has_host {
            let what = format!("`{}` is no address of a server", url.written);
            self.wrong(at, &key, what, "it begins with `http://` or `https://` and a host");
        } else if url.value.split(['/', '?']).nth(2).is_some_and(|authority| authority.contains('@')) {
            let what = "a name or a password in an address would end up in logs";
            self.wrong(at, &key, what, "put it into `headers`, by reference");
        }
    }

    fn headers(&mut self, section: &Section, path: &str) -> BTreeMap<String, Resolved> {
        // Those that the transport itself sets.
        const OURS: [&str; 9] = [
            "accept",
            "content-type",
            "content-length",
            "host",
            "connection",
            "transfer-encoding",
            "mcp-session-id",
            "mcp-protocol-version",
            "last-event-id",
        ];
        let mut headers = BTreeMap::new();
        for (name, text) in section.pairs("headers") {
            let key = format!("{path}.headers.{name}");
            match HeaderName::try_from(name.as_str()) {
                Err(_) => self.wrong(Some(text.at.clone()), &key, "this cannot be the name of a header", ""),
                Ok(known) if OURS.contains(&known.as_str()) => {
                    self.wrong(Some(text.at.clone()), &key, "outlast sets this header itself", "leave it out");
                }
                Ok(_) if HeaderValue::from_str(&text.value).is_err() => {
                    let what = "its value cannot stand in a header";
                    self.wrong(
                        Some(text.at.clone()),
                        &key,
                        what,
                        "there must be no line end and no control letter in it",
                    );
                }
                Ok(known) => {
                    headers.insert(known.as_str().to_owned(), text.resolved());
                }
            }
        }
        headers
    }

    fn policy(&mut self, section: &Section, path: &str) -> Policy {
        let mut policy = match section.text("policy").as_deref() {
            // A backend that leaves in peace is missed all the same.
            Some("watchdog") => Policy { clean_leaves: false, ..Policy::watchdog() },
            _ => Policy::exponential(),
        };
        let delays = (section.span("delay_first"), section.span("delay_max"));
        if let (Delays::Doubling { first, max }, (Some(wanted_first), Some(wanted_max))) = (&mut policy.delays, delays)
        {
            (*first, *max) = (wanted_first, wanted_max);
            if wanted_max < wanted_first {
                let what = "it is shorter than `delay_first`";
                self.wrong(section.place("delay_max"), &format!("{path}.delay_max"), what, "make it as long at least");
            }
        } else {
            for name in ["delay_first", "delay_max"] {
                if let Some(set) = section.set(name) {
                    let what = "the delays of `watchdog` are fixed";
                    let hint = "leave it out, or choose policy = \"exponential\"";
                    self.wrong(Some(set.at.clone()), &format!("{path}.{name}"), what, hint);
                }
            }
        }
        if let Some(max) = section.count("max_restarts") {
            policy.restarts_max = (max > 0).then_some(max);
        }
        if section.text("first_restart").as_deref() == Some("delay") {
            policy.first = First::Delay;
        }
        policy
    }

    fn profiles(&mut self, root: &Section, backends: &[&str]) -> BTreeMap<String, Profile> {
        let mut profiles = BTreeMap::new();
        for (name, _, section) in root.named("profile") {
            for pattern in section.patterns("backends") {
                self.some_backend(&pattern, section.place("backends"), &format!("profile.{name}.backends"), backends);
            }
            let profile = Profile {
                backends: section.patterns("backends"),
                allow: section.patterns("allow"),
                deny: section.patterns("deny"),
                search: section.truth("search"),
            };
            profiles.insert(name.clone(), profile);
        }
        profiles
    }

    fn some_backend(&mut self, pattern: &Pattern, at: Option<Place>, key: &str, backends: &[&str]) {
        if !backends.iter().any(|backend| pattern.fits(backend)) {
            let what = format!("there is no backend `{}`", pattern.0);
            self.wrong(at, key, what, &did_you_mean(&pattern.0, backends.iter().copied()));
        }
    }

    /// A name that must be among others; wrong ones are told of.
    fn known<'n>(
        &mut self,
        key: &str,
        text: Option<&Text>,
        what: &str,
        known: impl IntoIterator<Item = &'n String> + Clone,
    ) -> Option<String> {
        let text = text?;
        if !known.clone().into_iter().any(|name| *name == text.value) {
            let hint = did_you_mean(&text.value, known.into_iter().map(String::as_str).collect::<Vec<_>>());
            self.wrong(Some(text.at.clone()), key, format!("there is no {what} `{}`", text.written), &hint);
        }
        Some(text.value.clone())
    }

    fn rates(&mut self, section: &Section) -> Rates {
        let rate = |section: &Section| {
            let per_minute = section.count("per_minute")?;
            Some(Rate { per_minute, burst: section.count("burst").unwrap_or(per_minute) })
        };
        let default = rate(section);
        if default.is_none()
            && !section.is_broken
            && let Some(set) = section.set("burst")
        {
            let what = "without `per_minute` it has no meaning";
            self.wrong(Some(set.at.clone()), "rates.burst", what, "say how many calls a minute there may be");
        }
        let mut tools = Vec::new();
        for (name, _, section) in section.named("tool") {
            match rate(section) {
                Some(rate) => tools.push((Pattern(name.clone()), rate)),
                None => self.missing(section, "it has no `per_minute`", "say how many calls a minute there may be"),
            }
        }
        Rates { default, tools }
    }

    fn switches(&mut self, section: &Section, backends: &[&str]) -> Vec<Switch> {
        let mut off = Vec::new();
        for text in section.texts("backends") {
            self.some_backend(&Pattern(text.value.clone()), Some(text.at.clone()), "switch.backends", backends);
            off.push(Switch::Backend(text.value));
        }
        off.extend(section.texts("tools").into_iter().map(|text| Switch::Tool(text.value)));
        off
    }

    fn front(&mut self, section: &Section, has_auth: bool) -> Front {
        let listen: Option<SocketAddr> = section.text("listen").and_then(|text| address::parse(&text));
        let (tls, tls_files) = self.tls(section);
        if let Some(address) = listen.filter(|address| !address.ip().is_loopback() && !has_auth) {
            let what = format!("{address} can be reached from other machines, and nobody would be asked who they are");
            let hint = "add `[auth]`, or listen on 127.0.0.1";
            self.wrong(section.place("listen"), "gateway.listen", what, hint);
        }
        for text in section.texts("origins") {
            let rest = text.value.strip_prefix("https://").or_else(|| text.value.strip_prefix("http://"));
            let is_origin = rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(['/', '?', '#', '@', '*']));
            if !is_origin {
                let what = format!("`{}` is no origin", text.written);
                let hint =
                    "write the scheme and the host of the page, such as \"https://app.example.com\", and no path";
                self.wrong(Some(text.at), "gateway.origins", what, hint);
            }
        }
        for text in section.texts("hosts") {
            if text.value.is_empty() || text.value.contains(['/', '@', '*', ' ']) {
                let what = format!("`{}` is no name of a host", text.written);
                self.wrong(
                    Some(text.at),
                    "gateway.hosts",
                    what,
                    "write the name alone, such as \"gateway.example.com\"",
                );
            }
        }
        Front {
            listen,
            tls,
            tls_files,
            hosts: section.values("hosts"),
            origins: section.values("origins"),
            sessions_max: count(section, "sessions_max"),
            sessions_per_client: count(section, "sessions_per_client"),
            session_idle: section.span("session_idle").unwrap_or_default(),
            connections_max: count(section, "connections_max"),
            body_max: section.size("body_max").and_then(|size| usize::try_from(size).ok()).unwrap_or(usize::MAX),
        }
    }

    fn tls(&mut self, section: &Section) -> (Option<Certificate>, Vec<PathBuf>) {
        if section.set("tls").is_none() {
            return (None, Vec::new());
        }
        let tls = section.section("tls");
        let (Some(cert), Some(key)) = (tls.path("cert"), tls.path("key")) else {
            self.missing(&tls, "it needs both `cert` and `key`", "tls = { cert = \"cert.pem\", key = \"key.pem\" }");
            return (None, Vec::new());
        };
        let files = vec![cert.clone(), key.clone()];
        match Certificate::load(&cert, &key) {
            Ok(certificate) => (Some(certificate), files),
            Err(why) => {
                self.wrong(
                    section.place("tls"),
                    "gateway.tls",
                    why,
                    "give a certificate and its private key, both in PEM",
                );
                (None, files)
            }
        }
    }

    fn auth(
        &mut self,
        root: &Section,
        roles: &BTreeMap<String, Role>,
        profiles: &BTreeMap<String, Profile>,
    ) -> Option<AuthSettings> {
        let at = root.set("auth")?.at.clone();
        let section = root.section("auth");
        if section.set("jwt").is_none() && section.many("key").is_empty() && !section.is_broken {
            let what = "there is neither a `[auth.jwt]` nor a `[[auth.key]]`, so nobody could connect";
            self.wrong(Some(at), "auth", what, "`outlast gateway hash-key` makes a key");
        }
        let default_role = self.known("auth.default_role", section.the_text("default_role"), "role", roles.keys());
        let jwt = section.set("jwt").and_then(|_| self.jwt(&section.section("jwt")));
        let mut keys: Vec<ApiKey> = Vec::new();
        for section in section.many("key") {
            let path = section.path.clone();
            let Some(name) = section.the_text("name").filter(|name| !name.value.is_empty()) else {
                self.missing(section, "it has no name", "say whose it is: name = \"…\"");
                continue;
            };
            let role = self.known(&format!("{path}.role"), section.the_text("role"), "role", roles.keys());
            let profile =
                self.known(&format!("{path}.profile"), section.the_text("profile"), "profile", profiles.keys());
            let Some(sha256) = section.the_text("sha256").and_then(|text| hexadecimal(&text.value)) else {
                if section.is_broken {
                    continue;
                }
                let what = "a SHA-256 in 64 hexadecimal digits is wanted";
                self.wrong(
                    section.place("sha256"),
                    &format!("{path}.sha256"),
                    what,
                    "`outlast gateway hash-key` makes one",
                );
                continue;
            };
            if let Some(other) = keys.iter().find(|key| key.sha256 == sha256) {
                let what = format!("this is the key of `{}` too", other.name);
                self.wrong(
                    section.place("sha256"),
                    &format!("{path}.sha256"),
                    what,
                    "each client has a key of its own",
                );
                continue;
            }
            keys.push(ApiKey { name: name.value.clone(), sha256, role, profile });
        }
        Some(AuthSettings {
            jwt,
            keys,
            default_role,
            wants_role: !roles.is_empty(),
            roles: roles.keys().cloned().collect(),
            profiles: profiles.keys().cloned().collect(),
        })
    }

    fn jwt(&mut self, section: &Section) -> Option<JwtSettings> {
        let secret = section.the_text("secret_env").and_then(|text| self.secret(text));
        let jwks = section.path("jwks");
        let (wants_secret, wants_keys) = (section.set("secret_env").is_some(), jwks.is_some());
        if !wants_secret && !wants_keys {
            let hint = "give `secret_env` for HS256, or `jwks` for RS256 and ES256";
            self.missing(section, "there is nothing to check a token by", hint);
            return None;
        }
        let mut algorithms = section.values("algorithms");
        if section.set("algorithms").is_none() {
            algorithms.extend(wants_secret.then(|| "HS256".to_owned()));
            algorithms.extend(["RS256", "ES256"].into_iter().filter(|_| wants_keys).map(str::to_owned));
        } else if algorithms.is_empty() {
            self.wrong(section.place("algorithms"), "auth.jwt.algorithms", "with none no token is good", "");
        }
        for algorithm in &algorithms {
            let (has_it, needs) = match algorithm.as_str() {
                "HS256" => (wants_secret, "secret_env"),
                _ => (wants_keys, "jwks"),
            };
            if !has_it {
                let what = format!("{algorithm} needs `{needs}`");
                self.wrong(
                    section.place("algorithms"),
                    "auth.jwt.algorithms",
                    what,
                    "give it, or leave the algorithm out",
                );
            }
        }
        if let Some(path) = &jwks
            && let Err(why) = crate::gateway::auth::read_keys(path)
        {
            let what = format!("the key set `{}` cannot be used: {why}", path.display());
            self.wrong(section.place("jwks"), "auth.jwt.jwks", what, "a file with a JWK set: { \"keys\": [ … ] }");
        }
        Some(JwtSettings {
            secret,
            jwks,
            algorithms,
            issuer: section.text("issuer"),
            audience: section.values("audience"),
            role_claim: section.text("role_claim")?,
            name_claim: section.text("name_claim")?,
            profile_claim: section.text("profile_claim"),
            leeway: section.span("leeway")?,
        })
    }

    fn secret(&mut self, text: &Text) -> Option<Secret> {
        let key = "auth.jwt.secret_env";
        let at = Some(text.at.clone());
        match (self.around.environment)(&text.value) {
            Some(secret) if secret.len() >= SECRET_MIN => return Some(Secret(secret.into_bytes())),
            Some(secret) if secret.is_empty() => {
                let what = format!("the variable `{}` is empty", text.value);
                self.wrong(
                    at,
                    key,
                    what,
                    "anybody could sign with an empty secret: set one, such as by `openssl rand -hex 32`",
                );
            }
            Some(_) => {
                let what = format!("the secret in `{}` is shorter than {SECRET_MIN} bytes", text.value);
                self.wrong(at, key, what, "set a longer one, such as by `openssl rand -hex 32`");
            }
            None => {
                let what = format!("the environment has no variable `{}`", text.value);
                self.wrong(at, key, what, "set it before outlast starts; here stands its name, not the secret");
            }
        }
        None
    }
}

/// What two backends with the same prefix would both offer, if the configuration alone says so. Without a prefix only names
/// that both list under `allow` are certain; the rest is seen in their catalogues.
fn collision(first: &Backend, second: &Backend) -> Option<String> {
    let named = |backend: &Backend| -> Option<BTreeSet<String>> {
        let is_name = |pattern: &&Pattern| !pattern.0.contains('*');
        let allowed = (!backend.allow.is_empty() && backend.allow.iter().all(|pattern| is_name(&pattern)))
            .then(|| backend.allow.iter().map(|pattern| pattern.0.clone()));
        Some(allowed?.filter(|name| !backend.deny.iter().any(|pattern| pattern.fits(name))).collect())
    };
    let common = match (named(first), named(second)) {
        (Some(first), Some(second)) => first.intersection(&second).next().cloned().map(Some)?,
        _ if second.prefix.is_empty() => return None,
        _ => None,
    };
    let (prefix, other) = (&second.prefix, &first.name);
    Some(match common {
        Some(name) => format!("the backend `{other}` offers the tool `{prefix}{name}` too"),
        None => format!("the backend `{other}` has the prefix `{prefix}` too, so both would offer the same names"),
    })
}

fn is_plain(text: &str, max: usize) -> bool {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
    (1..=max).contains(&text.len()) && text.chars().all(plain)
}

fn hexadecimal(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * n..2 * n + 2], 16).ok()?;
    }
    Some(bytes)
}

/// Where a command would be found, for `gateway check`.
pub fn on_path(command: &str, cwd: Option<&str>) -> bool {
    if command.contains(std::path::is_separator) {
        return PathBuf::from(cwd.unwrap_or(".")).join(command).is_file();
    }
    env::var_os("PATH").is_some_and(|path| {
        env::split_paths(&path).any(|dir| {
            dir.join(command).is_file()
                || cfg!(windows) && ["exe", "cmd", "bat"].iter().any(|e| dir.join(command).with_extension(e).is_file())
        })
    })
}
