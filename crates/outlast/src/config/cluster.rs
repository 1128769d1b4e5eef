//! Reads `[cluster]` into checked [`NatsSettings`]. Whether NATS can be reached is not part of the check.

use std::{fs, path::PathBuf, time::Duration};

use hyper::Uri;

use super::{
    gateway::{Secret, is_plain},
    keys,
    mistake::Mistakes,
    table::Set,
    values::{FilePath, Hidden, Plain, Text},
};
use crate::{
    cli::report,
    cluster::{Credentials, NatsSettings, Tls},
};

/// The longest name of a cluster, replica or prefix: together they fit into a subject of NATS.
const NAME_MAX: usize = 60;
const NAME_HINT: &str = "use 1 to 60 letters, digits, `_` and `-`";
const PORT: u16 = 4222;

/// `None` if the gateway is alone. An error is collected, and then nothing may be started.
pub(crate) fn read(table: &Set<keys::Cluster>, session_ttl: Duration, mistakes: &mut Mistakes) -> Option<NatsSettings> {
    if !table.is_set {
        return None;
    }
    if cfg!(not(feature = "cluster")) {
        let hint = "install outlast with its feature `cluster`, or remove the table";
        mistakes.wrong(&table.spot, "this outlast was built without support for clusters", hint);
        return None;
    }
    let mut missing = |what: &str, hint: &str| {
        if !table.head.is_broken {
            mistakes.wrong(&table.head.spot, what, hint);
        }
    };
    if table.nats.is_empty() {
        missing("it has no `nats`", "give the addresses of the NATS servers: nats = [\"nats://127.0.0.1:4222\"]");
    }
    if table.name.is_none() {
        missing("it has no `name`", "name the cluster, the same for all its gateways: name = \"…\"");
    }
    for text in table.name.iter().chain(table.replica.iter()).chain([&*table.prefix]) {
        if !is_plain(text, NAME_MAX) {
            mistakes.wrong(&text.spot, format!("`{}` is not a valid name", text.written), NAME_HINT);
        }
    }
    if !matches!(table.replicas.0, 1 | 3) {
        let what = format!("NATS keeps 1 or 3 copies, not {}", table.replicas.0);
        mistakes.wrong(&table.replicas.spot, what, "use 3 with a NATS cluster of three servers, else 1");
    }
    Some(NatsSettings {
        servers: table.nats.iter().filter_map(|text| server(text, mistakes)).collect(),
        cluster: table.name.plain().unwrap_or_default(),
        prefix: table.prefix.plain(),
        replica: table.replica.plain().unwrap_or_else(host_name),
        credentials: credentials(table, mistakes),
        tls: tls(table, mistakes),
        replicas: table.replicas.0,
        required: *table.required,
        session_ttl,
    })
}

/// An address with its scheme and port.
fn server(text: &Text, mistakes: &mut Mistakes) -> Option<String> {
    let mut wrong = |what: String, hint: &str| {
        mistakes.wrong(&text.spot, what, hint);
        None
    };
    if text.contains('@') {
        let what = "the address contains a user name or a password".to_owned();
        return wrong(what, "use `user` and `password`, as references such as `${NATS_PASSWORD}`");
    }
    let form = "write \"nats://host:4222\", or \"tls://host:4222\" for TLS";
    let Ok(uri) = text.parse::<Uri>() else {
        return wrong(format!("`{}` is not the address of a NATS server", text.written), form);
    };
    let host = uri.host().filter(|host| !host.is_empty());
    let is_bare = uri.path_and_query().is_none_or(|path| matches!(path.as_str(), "" | "/"));
    match (uri.scheme_str().unwrap_or("nats"), host) {
        (scheme @ ("nats" | "tls"), Some(host)) if is_bare => {
            Some(format!("{scheme}://{host}:{}", uri.port_u16().unwrap_or(PORT)))
        }
        ("ws" | "wss", _) => wrong("NATS over WebSocket is not supported".to_owned(), form),
        _ => wrong(format!("`{}` is not the address of a NATS server", text.written), form),
    }
}

fn credentials(table: &keys::Cluster, mistakes: &mut Mistakes) -> Credentials {
    let ways = [
        ("credentials", table.credentials.is_set, &table.credentials.spot),
        ("nkey", table.nkey.is_set, &table.nkey.spot),
        ("user", table.user.is_set, &table.user.spot),
        ("token", table.token.is_set, &table.token.spot),
    ];
    let mut given = ways.iter().filter(|(_, is_given, _)| *is_given);
    if let (Some((first, ..)), Some((_, _, second))) = (given.next(), given.next()) {
        mistakes.wrong(second, format!("`{first}` is also given"), "keep one of them");
    }
    if table.user.is_set != table.password.is_set {
        let (spot, other) = match table.user.is_set {
            true => (&table.user.spot, "password"),
            false => (&table.password.spot, "user"),
        };
        mistakes.wrong(spot, format!("it needs `{other}`"), "give both, or none of them");
    }
    let secret = |hidden: &Hidden| Secret(hidden.0.as_bytes().to_vec());
    if let Some(path) = readable(&table.credentials, mistakes) {
        Credentials::File(path)
    } else if let Some(path) = readable(&table.nkey, mistakes) {
        Credentials::NkeyFile(path)
    } else if let (Some(user), Some(password)) = (table.user.plain(), table.password.as_ref()) {
        Credentials::UserAndPassword { user, password: secret(password) }
    } else if let Some(token) = table.token.as_ref() {
        Credentials::Token(secret(token))
    } else {
        Credentials::None
    }
}

fn tls(table: &keys::Cluster, mistakes: &mut Mistakes) -> Tls {
    if table.tls_cert.is_set != table.tls_key.is_set {
        let (spot, other) = match table.tls_cert.is_set {
            true => (&table.tls_cert.spot, "tls_key"),
            false => (&table.tls_key.spot, "tls_cert"),
        };
        mistakes.wrong(spot, format!("it needs `{other}`"), "give both, or none of them");
    }
    let ca = readable(&table.tls_ca, mistakes);
    let own = readable(&table.tls_cert, mistakes).zip(readable(&table.tls_key, mistakes));
    Tls { ca, own }
}

/// A file that can be read now; it is read again at each connection.
fn readable(set: &Set<Option<FilePath>>, mistakes: &mut Mistakes) -> Option<PathBuf> {
    let path = set.plain()?;
    if let Err(error) = fs::File::open(&path) {
        let what = format!("`{}` cannot be read: {}", path.display(), report::plain(&error.to_string()));
        mistakes.wrong(&set.spot, what, "a relative path counts from the directory of the file");
    }
    Some(path)
}

/// The host name, as a name of a replica.
fn host_name() -> String {
    #[cfg(unix)]
    let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    #[cfg(windows)]
    let name = std::env::var("COMPUTERNAME").ok();
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || letter == '_' { letter } else { '-' };
    let name: String = name.unwrap_or_default().chars().map(plain).take(NAME_MAX).collect();
    if name.is_empty() { "gateway".to_owned() } else { name }
}
