//! The settings of `outlast gateway`: those of the machine, and those of its driver.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fmt, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::ValueEnum;
use hyper::{
    Uri,
    header::{HeaderName, HeaderValue},
};
use outlast_core::{
    gateway::{
        Backend, Children, EraChoice, Kind, Limits, Pattern, Placement, Profile, Rate, Rates, Role, Settings, Start,
        Switch,
    },
    restarts::{Delays, First, Policy},
    secret::Resolved,
};

use super::{
    Config, Surroundings, Texts, Want, cluster, flags,
    keys::{self, Algorithm, Era, OF_COMMANDS, Root, Transport},
    mistake::{Mistakes, Spot, did_you_mean},
    sandbox,
    table::{Head, Set, Table},
    tree::Position,
    values::{Count, Pairs, Plain, Text},
};
use crate::{
    child::lines::LINE_MAX,
    cli::{
        self,
        report::{self, Report},
    },
    cluster::NatsSettings,
    gateway::listen::Certificate,
};

/// The longest name of a backend: with `__` and a tool of two letters it fits into the limit of 64 letters for names.
pub(crate) const NAME_MAX: usize = 60;
const PREFIX_MAX: usize = 62;
/// RFC 7518 requires a secret as long as the hash.
const SECRET_MIN: usize = 32;

#[derive(Debug)]
pub(crate) struct Gateway {
    pub settings: Settings,
    pub name: Option<String>,
    pub front: Front,
    /// `None` if clients are not authenticated.
    pub auth: Option<AuthSettings>,
    /// `None` if the gateway is alone.
    pub cluster: Option<NatsSettings>,
    /// All files that were read: a change of one is a change of the configuration.
    pub watched: Vec<PathBuf>,
    /// Files that are empty, which an unfinished save may have left.
    pub blank: Vec<PathBuf>,
    /// The texts of the configuration files.
    pub texts: Texts,
    /// Notes for people: what was left out, and why.
    pub notes: Vec<String>,
}

/// The HTTP endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Front {
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
pub(crate) struct AuthSettings {
    pub jwt: Option<JwtSettings>,
    pub keys: Vec<ApiKey>,
    pub default_role: Option<String>,
    /// Whether roles are configured: then a client must have one.
    pub wants_role: bool,
    pub roles: BTreeSet<String>,
    pub profiles: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JwtSettings {
    pub secret: Option<Secret>,
    pub jwks: Option<PathBuf>,
    /// The names in a token.
    pub algorithms: Vec<String>,
    pub issuer: Option<String>,
    pub audience: Vec<String>,
    pub role_claim: String,
    pub name_claim: String,
    pub profile_claim: Option<String>,
    pub leeway: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiKey {
    pub name: String,
    pub sha256: [u8; 32],
    pub role: Option<String>,
    pub profile: Option<String>,
}

/// Never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Gateway {
    /// The files that were named, or else the nearest `outlast.toml`, in the environment of this process.
    pub(crate) fn read(named: &[PathBuf], cwd: &Path) -> Result<Gateway, Report> {
        Gateway::read_with(named, cwd, None)
    }

    /// The configuration that is in force, whatever is on disk now.
    #[cfg(unix)]
    pub(crate) fn read_again(named: &[PathBuf], cwd: &Path, texts: &Texts) -> Result<Gateway, Report> {
        Gateway::read_with(named, cwd, Some(texts))
    }

    fn read_with(named: &[PathBuf], cwd: &Path, texts: Option<&Texts>) -> Result<Gateway, Report> {
        Surroundings::with(cwd, |around| {
            let around = &Surroundings { texts, ..*around };
            let config = Config::look_at(named, Want::Everything, around);
            let is_unusable = config.files.is_empty() || !config.ignored.is_empty();
            match config.untrusted.first().filter(|_| is_unusable) {
                Some(file) => Err(Report::new(report::FAILURE, file.why.clone()).hint(file.hint.clone())),
                None => Ok(Gateway::of(config, around)?.0),
            }
        })
    }

    /// The same in any environment.
    pub(crate) fn load(named: &[PathBuf], around: &Surroundings<'_>) -> Result<(Gateway, Config), Mistakes> {
        Gateway::of(Config::look_at(named, Want::Everything, around), around)
    }

    /// Checks values that depend on each other, and reports every error.
    fn of(mut config: Config, around: &Surroundings<'_>) -> Result<(Gateway, Config), Mistakes> {
        let mut check = Check { around, mistakes: std::mem::take(&mut config.mistakes) };
        let root = &config.root;
        flags::check_mcp(&root.mcp, &mut check.mistakes);
        flags::agents(root, &mut check.mistakes);
        let backends = check.backends(root);
        let names: Vec<&str> = backends.iter().map(|backend| backend.name.as_str()).collect();
        let profiles = check.profiles(root, &names);
        let role = |role: &keys::Role| Role { allow: role.allow.to_vec(), deny: role.deny.to_vec() };
        let roles = root.role.0.iter().map(|(name, table)| (name.clone(), role(table))).collect();
        let auth = check.auth(&root.auth, &roles, &profiles);
        let limits = &root.limits;
        let settings = Settings {
            default_profile: check.known(&root.gateway.profile, "profile", profiles.keys()),
            rates: check.rates(&root.rates),
            switched_off: check.switches(&root.switch, &names),
            forward_unknown: *root.gateway.forward_unknown,
            is_host: false,
            limits: Limits {
                hold: *limits.hold,
                held_max: count(&limits.held_max),
                in_flight_max: count(&limits.in_flight_max),
                page: count(&limits.page),
                retry_given_up: *limits.retry_given_up,
            },
            backends,
            profiles,
            roles,
        };
        let front = check.front(&root.gateway, auth.is_some());
        let cluster = cluster::read(&root.cluster, front.session_idle, &mut check.mistakes);
        if cluster.is_some() && front.body_max > LINE_MAX {
            let what = format!("replicas of a cluster send each other at most {} MiB", LINE_MAX >> 20);
            check.wrong(&root.gateway.body_max.spot, what, "lower it, or remove `[cluster]`");
        }
        let jwks = auth.iter().filter_map(|auth| auth.jwt.as_ref()?.jwks.clone());
        let certificate = front.tls_files.iter().cloned();
        let watched = config.files.iter().map(|file| file.path.clone()).chain(jwks).chain(certificate).collect();
        let name = root.gateway.name.plain();
        check.mistakes.check()?;
        let notes = config.notes.iter().cloned().chain(config.warnings()).collect();
        let (blank, texts) = (config.blank.clone(), config.texts.clone());
        Ok((Gateway { settings, name, front, auth, cluster, watched, blank, texts, notes }, config))
    }
}

fn count(count: &Count<1>) -> usize {
    count.0 as usize
}

struct Check<'a> {
    around: &'a Surroundings<'a>,
    mistakes: Mistakes,
}

impl Check<'_> {
    fn wrong(&mut self, spot: &Spot, what: impl Into<String>, hint: impl Into<String>) {
        self.mistakes.wrong(spot, what, hint);
    }

    /// A value is missing, unless one is there that could not be read and has been reported.
    fn missing(&mut self, table: &Head, what: &str, hint: &str) {
        if !table.is_broken {
            self.wrong(&table.spot, what, hint);
        }
    }

    fn backends(&mut self, root: &Root) -> Vec<Backend> {
        let mut known: BTreeMap<&str, &Text> = BTreeMap::new();
        let mut backends = Vec::new();
        let mut prefixes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (_, table) in &root.backend.0 {
            let Some(name) = table.name.as_ref() else {
                self.missing(&table.head, "it has no name", "name = \"…\"");
                continue;
            };
            let is_ours = |at: &Position| at.file.path.extension().is_some_and(|extension| extension == "toml");
            let is_ours = name.spot.at.as_ref().is_some_and(is_ours);
            if is_ours && !is_plain(name, NAME_MAX) || name.is_empty() {
                let what = format!("`{}` is not a valid name of a backend", name.written);
                self.wrong(&name.spot, what, format!("use 1 to {NAME_MAX} letters, digits, `_` and `-`"));
            } else if let Some(first) = known.insert(name, name) {
                let first = first.spot.at.as_ref().map(Position::to_string).unwrap_or_default();
                let what = format!("another backend has this name, at {first}");
                self.wrong(&name.spot, what, "give one of them another name");
            } else if !*table.disabled
                && let Some(backend) = self.backend(table, name)
            {
                if backend.placement == Placement::One && !root.cluster.is_set {
                    let hint = "add `[cluster]`, or remove it";
                    self.wrong(&table.placement.spot, "it needs a cluster", hint);
                }
                let same = prefixes.entry(backend.prefix.clone()).or_default();
                if let Some(other) = same.iter().find_map(|at| collision(&backends[*at], &backend)) {
                    self.wrong(&table.prefix.spot, other, "give one of them another `prefix`");
                }
                same.push(backends.len());
                backends.push(backend);
            }
        }
        backends
    }

    fn backend(&mut self, table: &keys::Backend, name: &str) -> Option<Backend> {
        let kind = self.kind(table);
        let prefix = match table.prefix.as_ref() {
            None => format!("{name}__"),
            Some(prefix) => {
                if !prefix.is_empty() && !is_plain(prefix, PREFIX_MAX) {
                    let what = format!("`{}` is not a valid prefix", prefix.written);
                    let hint = format!("use up to {PREFIX_MAX} letters, digits, `_` and `-`, or \"\" for no prefix");
                    self.wrong(&prefix.spot, what, hint);
                }
                prefix.plain()
            }
        };
        for span in [&table.call_timeout, &table.start_timeout] {
            if span.is_zero() {
                self.wrong(&span.spot, "the time is 0", "use a time above 0");
            }
        }
        if *table.call_max < *table.call_timeout {
            let set = if table.call_max.is_set { &table.call_max } else { &table.call_timeout };
            let spot = Spot { at: set.spot.at.clone(), ..table.call_max.spot.clone() };
            self.wrong(&spot, "it is shorter than `call_timeout`", "make it at least as long");
        }
        if table.children_max.is_set && *table.children != Children::PerSession {
            self.wrong(&table.children_max.spot, "it needs `children = \"per_session\"`", "remove it");
        }
        let policy = self.policy(table);
        Some(Backend {
            name: name.to_owned(),
            kind: kind?,
            prefix,
            allow: table.allow.to_vec(),
            deny: table.deny.to_vec(),
            children: *table.children,
            children_max: count(&table.children_max),
            start: match **table.start {
                keys::Start::Eager => Start::Eager,
                keys::Start::Lazy => Start::Lazy,
            },
            placement: match **table.placement {
                keys::Placement::Every => Placement::Every,
                keys::Placement::One => Placement::One,
            },
            inherit_env: *table.inherit_env,
            era: match **table.era {
                Era::Auto => EraChoice::Auto,
                Era::Handshake => EraChoice::Handshake,
                Era::Stateless => EraChoice::Stateless,
            },
            policy,
            call_timeout: *table.call_timeout,
            call_max: *table.call_max,
            start_timeout: *table.start_timeout,
            idle_stop: *table.idle_stop,
            memory_max: table.memory_max.plain(),
            breaker_failures: table.breaker.failures.0,
            breaker_open: *table.breaker.open,
            retry_annotated: matches!(**table.retry, cli::Retry::Annotated),
        })
    }

    /// A command or an address, with its keys and without those of the other kind.
    fn kind(&mut self, table: &keys::Backend) -> Option<Kind> {
        let transport = table.transport.as_ref();
        match (table.command.as_ref(), table.url.as_ref()) {
            (None, None) => {
                let hint = "give a `command` to start, or the `url` of a running server";
                self.missing(&table.head, "it has neither `command` nor `url`", hint);
                None
            }
            (Some(_), Some(url)) => {
                self.wrong(&url.spot, "the backend also has a `command`", "remove one of them");
                None
            }
            (Some(command), None) => {
                if let Some(said) = transport.filter(|said| ***said != Transport::Stdio) {
                    let what = format!("a command uses the transport `stdio`, not `{}`", said.text.written);
                    self.wrong(&said.text.spot, what, "remove it");
                }
                if table.headers.is_set {
                    self.wrong(&table.headers.spot, "a command has no headers", "remove them, or give a `url`");
                }
                if command.is_empty() {
                    self.wrong(&command.spot, "it is empty", "name a program");
                }
                Some(Kind::Stdio {
                    command: command.value.clone(),
                    args: table.args.iter().map(|text| text.value.clone()).collect(),
                    env: self.variables(&table.env),
                    cwd: self.cwd(table),
                    sandbox: sandbox::read(&table.sandbox, &mut self.mistakes),
                })
            }
            (None, Some(url)) => {
                for (key, field) in table.fields() {
                    if field.is_set() && OF_COMMANDS.split(' ').any(|name| name == key.name) {
                        self.wrong(field.spot(), "it needs a backend with a `command`", "remove it");
                    }
                }
                if **table.placement == keys::Placement::One {
                    let hint = "remove it: each gateway connects to the address itself";
                    self.wrong(&table.placement.spot, "it needs a backend with a `command`", hint);
                }
                if let Some(said) = transport.filter(|said| ***said == Transport::Stdio) {
                    let what = "an address cannot use the transport `stdio`";
                    self.wrong(&said.text.spot, what, "use `http` or `sse`");
                }
                self.url(url);
                let is_sse = transport.is_some_and(|said| **said == Transport::Sse);
                Some(Kind::Http { url: url.value.clone(), headers: self.headers(&table.headers), is_sse })
            }
        }
    }

    fn variables(&mut self, env: &Pairs) -> BTreeMap<String, Resolved> {
        for (name, text) in &env.0 {
            if name.is_empty() || name.contains(['=', '\0']) {
                let what = format!("`{name}` is not a valid name of a variable");
                self.wrong(&text.spot, what, "a name contains no `=`");
            }
        }
        env.0.iter().map(|(name, text)| (name.clone(), text.value.clone())).collect()
    }

    fn cwd(&mut self, table: &keys::Backend) -> Option<Resolved> {
        let (dir, spot) = match table.cwd.is_set {
            true => (table.cwd.plain(), &table.cwd.text.spot),
            false => (table.cwd.spot.at.as_ref()?.file.path.parent()?.to_owned(), &table.cwd.spot),
        };
        let problem = match fs::metadata(&dir) {
            Ok(about) if about.is_dir() => None,
            Ok(_) => Some("is not a directory".to_owned()),
            Err(error) => Some(format!("cannot be used: {}", report::plain(&error.to_string()))),
        };
        let whole = dir.display().to_string();
        let text = &table.cwd.text;
        let dir = match whole.strip_suffix(&**text).filter(|_| table.cwd.is_set) {
            Some(before) => text.value.clone().after(before),
            None => whole.into(),
        };
        if let Some(problem) = problem {
            let hint = "a relative path counts from the directory of the file";
            self.wrong(spot, format!("`{dir}` {problem}"), hint);
        }
        Some(dir)
    }

    fn url(&mut self, url: &Text) {
        let parsed: Option<Uri> = url.parse().ok();
        let scheme = parsed.as_ref().and_then(Uri::scheme_str);
        let has_host = parsed.as_ref().and_then(Uri::host).is_some_and(|host| !host.is_empty());
        if !matches!(scheme, Some("http" | "https")) || !has_host {
            let what = format!("`{}` is not the address of a server", url.written);
            self.wrong(&url.spot, what, "it begins with `http://` or `https://` and a host");
        } else if url.split(['/', '?']).nth(2).is_some_and(|authority| authority.contains('@')) {
            let what = "the address contains a user name or a password";
            self.wrong(&url.spot, what, "put it into `headers`, as a reference such as `${TOKEN}`");
        }
    }

    fn headers(&mut self, table: &Pairs) -> BTreeMap<String, Resolved> {
        // Headers that the transport itself sets.
        const OURS: &str = "accept content-type content-length host connection transfer-encoding mcp-session-id \
            mcp-protocol-version last-event-id";
        let mut headers = BTreeMap::new();
        for (name, text) in &table.0 {
            let (what, hint) = match HeaderName::try_from(name.as_str()) {
                Err(_) => ("this is not a valid name of a header", ""),
                Ok(known) if OURS.split(' ').any(|ours| ours == known) => {
                    ("outlast sets this header itself", "remove it")
                }
                Ok(_) if HeaderValue::from_str(text).is_err() => {
                    let hint = "it must not contain a line break or a control character";
                    ("its value is not valid in a header", hint)
                }
                Ok(known) => {
                    headers.insert(known.as_str().to_owned(), text.value.clone());
                    continue;
                }
            };
            self.wrong(&text.spot, what, hint);
        }
        headers
    }

    fn policy(&mut self, table: &keys::Backend) -> Policy {
        let mut policy = match **table.policy {
            // A backend is restarted also after a clean exit.
            cli::Policy::Watchdog => Policy { clean_leaves: false, ..Policy::watchdog() },
            cli::Policy::Exponential => Policy::exponential(),
        };
        if let Delays::Doubling { first, max } = &mut policy.delays {
            (*first, *max) = (*table.delay_first, *table.delay_max);
            if max < first {
                let what = "it is shorter than `delay_first`";
                self.wrong(&table.delay_max.spot, what, "make it at least as long");
            }
        } else {
            for set in [&table.delay_first, &table.delay_max].into_iter().filter(|set| set.is_set) {
                let hint = "remove it, or use policy = \"exponential\"";
                self.wrong(&set.spot, "the delays of `watchdog` are fixed", hint);
            }
        }
        if let Some(max) = table.max_restarts.plain() {
            policy.restarts_max = (max > 0).then_some(max);
        }
        if let cli::First::Delay = **table.first_restart {
            policy.first = First::Delay;
        }
        policy
    }

    fn profiles(&mut self, root: &Root, backends: &[&str]) -> BTreeMap<String, Profile> {
        let mut profiles = BTreeMap::new();
        for (name, table) in &root.profile.0 {
            for pattern in table.backends.iter() {
                self.some_backend(pattern, &table.backends.spot, backends);
            }
            let (allow, deny) = (table.allow.to_vec(), table.deny.to_vec());
            let profile = Profile { backends: table.backends.to_vec(), allow, deny, search: *table.search };
            profiles.insert(name.clone(), profile);
        }
        profiles
    }

    fn some_backend(&mut self, pattern: &Pattern, spot: &Spot, backends: &[&str]) {
        if !backends.iter().any(|backend| pattern.fits(backend)) {
            let hint = did_you_mean(&pattern.0, backends.iter().copied());
            self.wrong(spot, format!("no backend is named `{}`", pattern.0), hint);
        }
    }

    /// A name that must be among others; unknown names are errors.
    fn known<'n>(
        &mut self,
        text: &Option<Text>,
        what: &str,
        known: impl Iterator<Item = &'n String> + Clone,
    ) -> Option<String> {
        let text = text.as_ref()?;
        if !known.clone().any(|name| **name == **text) {
            let hint = did_you_mean(text, known.map(String::as_str));
            self.wrong(&text.spot, format!("no {what} is named `{}`", text.written), hint);
        }
        Some(text.plain())
    }

    fn rates(&mut self, table: &keys::Rates) -> Rates {
        let hint = "set `per_minute` to the number of calls per minute";
        let rate = |per_minute: &Option<Count<1>>, burst: &Option<Count<1>>| {
            let per_minute = per_minute.plain()?;
            Some(Rate { per_minute, burst: burst.plain().unwrap_or(per_minute) })
        };
        let default = rate(&table.per_minute, &table.burst);
        if default.is_none() && !table.head.is_broken && table.burst.is_set {
            self.wrong(&table.burst.spot, "it needs `per_minute`", hint);
        }
        let mut tools = Vec::new();
        for (name, table) in &table.tool.0 {
            match rate(&table.per_minute, &table.burst) {
                Some(rate) => tools.push((Pattern(name.clone()), rate)),
                None => self.missing(&table.head, "it has no `per_minute`", hint),
            }
        }
        Rates { default, tools }
    }

    fn switches(&mut self, table: &keys::Switch, backends: &[&str]) -> Vec<Switch> {
        for text in table.backends.iter() {
            self.some_backend(&Pattern(text.plain()), &text.spot, backends);
        }
        let off = table.backends.plain().into_iter().map(Switch::Backend);
        off.chain(table.tools.plain().into_iter().map(Switch::Tool)).collect()
    }

    fn front(&mut self, table: &keys::Gateway, has_auth: bool) -> Front {
        let listen = table.listen.plain();
        let (tls, tls_files) = self.tls(&table.tls);
        if let Some(address) = listen.filter(|address| !address.ip().is_loopback() && !has_auth) {
            let what = format!("{address} can be reached from other machines, and there is no authentication");
            self.wrong(&table.listen.spot, what, "add `[auth]`, or listen on 127.0.0.1");
        }
        for text in table.origins.iter() {
            let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            if rest.is_none_or(|rest| rest.is_empty() || rest.contains(['/', '?', '#', '@', '*'])) {
                let hint = "write scheme and host without a path, such as \"https://app.example.com\"";
                self.wrong(&text.spot, format!("`{}` is not an origin", text.written), hint);
            }
        }
        for text in table.hosts.iter() {
            if text.is_empty() || text.contains(['/', '@', '*', ' ']) {
                let hint = "write only the name, such as \"gateway.example.com\"";
                self.wrong(&text.spot, format!("`{}` is not a host name", text.written), hint);
            }
        }
        Front {
            listen,
            tls,
            tls_files,
            hosts: table.hosts.plain(),
            origins: table.origins.plain(),
            sessions_max: count(&table.sessions_max),
            sessions_per_client: count(&table.sessions_per_client),
            session_idle: *table.session_idle,
            connections_max: count(&table.connections_max),
            body_max: usize::try_from(table.body_max.0).unwrap_or(usize::MAX),
        }
    }

    fn tls(&mut self, table: &Set<keys::Tls>) -> (Option<Certificate>, Vec<PathBuf>) {
        let (Some(cert), Some(key)) = (table.cert.plain(), table.key.plain()) else {
            if table.is_set {
                let hint = "tls = { cert = \"cert.pem\", key = \"key.pem\" }";
                self.missing(&table.head, "it needs both `cert` and `key`", hint);
            }
            return (None, Vec::new());
        };
        let certificate = Certificate::load(&cert, &key).map_err(|why| {
            self.wrong(&table.spot, why, "give a certificate and its private key, both in PEM");
        });
        (certificate.ok(), vec![cert, key])
    }

    fn auth(
        &mut self,
        table: &Set<keys::Auth>,
        roles: &BTreeMap<String, Role>,
        profiles: &BTreeMap<String, Profile>,
    ) -> Option<AuthSettings> {
        if !table.is_set {
            return None;
        }
        if !table.jwt.is_set && table.key.0.is_empty() && !table.head.is_broken {
            let what = "there is neither `[auth.jwt]` nor `[[auth.key]]`, so no client could connect";
            self.wrong(&table.spot, what, "`outlast gateway hash-key` creates a key");
        }
        let default_role = self.known(&table.default_role, "role", roles.keys());
        let jwt = self.jwt(&table.jwt);
        let mut keys: Vec<ApiKey> = Vec::new();
        for (_, table) in &table.key.0 {
            let Some(name) = table.name.as_ref().filter(|name| !name.is_empty()) else {
                self.missing(&table.head, "it has no name", "name the client: name = \"…\"");
                continue;
            };
            let role = self.known(&table.role, "role", roles.keys());
            let profile = self.known(&table.profile, "profile", profiles.keys());
            match table.sha256.as_ref().and_then(|text| hexadecimal(text)) {
                None if table.head.is_broken => {}
                None => {
                    let what = "expected a SHA-256 in 64 hexadecimal digits";
                    self.wrong(&table.sha256.spot, what, "`outlast gateway hash-key` creates one");
                }
                Some(sha256) => match keys.iter().find(|key| key.sha256 == sha256) {
                    Some(other) => {
                        let what = format!("`{}` has the same key", other.name);
                        self.wrong(&table.sha256.spot, what, "give each client its own key");
                    }
                    None => keys.push(ApiKey { name: name.plain(), sha256, role, profile }),
                },
            }
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

    fn jwt(&mut self, table: &Set<keys::Jwt>) -> Option<JwtSettings> {
        let secret = table.secret_env.as_ref().and_then(|text| self.secret(text));
        let jwks = table.jwks.plain();
        let (wants_secret, wants_keys) = (table.secret_env.is_set, jwks.is_some());
        if !wants_secret && !wants_keys {
            if table.is_set {
                let hint = "give `secret_env` for HS256, or `jwks` for RS256 and ES256";
                self.missing(&table.head, "there is no key to verify a token with", hint);
            }
            return None;
        }
        let is_usable = |algorithm: Algorithm| if algorithm == Algorithm::Hs256 { wants_secret } else { wants_keys };
        let mut algorithms = table.algorithms.plain();
        if !table.algorithms.is_set {
            algorithms = Algorithm::value_variants().to_vec();
            algorithms.retain(|algorithm| is_usable(*algorithm));
        } else if algorithms.is_empty() {
            self.wrong(&table.algorithms.spot, "without an algorithm no token is valid", "");
        }
        for algorithm in algorithms.iter().filter(|algorithm| !is_usable(**algorithm)) {
            let needs = if *algorithm == Algorithm::Hs256 { "secret_env" } else { "jwks" };
            let what = format!("{} needs `{needs}`", algorithm.name());
            self.wrong(&table.algorithms.spot, what, "add it, or remove the algorithm");
        }
        if let Some(path) = &jwks
            && let Err(why) = crate::gateway::auth::read_keys(path)
        {
            let what = format!("the key set `{}` cannot be used: {why}", path.display());
            self.wrong(&table.jwks.spot, what, "a file with a JWK set: { \"keys\": [ … ] }");
        }
        Some(JwtSettings {
            secret,
            jwks,
            algorithms: algorithms.into_iter().map(Algorithm::name).collect(),
            issuer: table.issuer.plain(),
            audience: table.audience.plain(),
            role_claim: table.role_claim.plain(),
            name_claim: table.name_claim.plain(),
            profile_claim: table.profile_claim.plain(),
            leeway: *table.leeway,
        })
    }

    fn secret(&mut self, text: &Text) -> Option<Secret> {
        let name = &**text;
        let (what, hint) = match (self.around.environment)(name) {
            Some(secret) if secret.len() >= SECRET_MIN => return Some(Secret(secret.into_bytes())),
            Some(secret) if secret.is_empty() => {
                (format!("the variable `{name}` is empty"), "set a secret, for example with `openssl rand -hex 32`")
            }
            Some(_) => {
                let what = format!("the secret in `{name}` is shorter than {SECRET_MIN} bytes");
                (what, "set a longer one, for example with `openssl rand -hex 32`")
            }
            None => {
                let hint = "set it before outlast starts; this key holds the name of the variable, not the secret";
                (format!("the environment variable `{name}` is not set"), hint)
            }
        };
        self.wrong(&text.spot, what, hint);
        None
    }
}

/// Names that two backends with the same prefix both offer, as far as the configuration shows. Without a prefix only
/// names that both list under `allow` are certain; the rest is known from their catalogues.
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
        Some(name) => format!("the backend `{other}` also offers the tool `{prefix}{name}`"),
        None => format!("the backend `{other}` has the same prefix `{prefix}`, so both would offer the same names"),
    })
}

pub(super) fn is_plain(text: &str, max: usize) -> bool {
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
pub(crate) fn on_path(command: &str, cwd: Option<&str>) -> bool {
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
