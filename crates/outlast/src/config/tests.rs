use std::{collections::BTreeMap, fs, time::Duration};

use clap::{CommandFactory, FromArgMatches};
use outlast_core::{
    gateway::{Children, EraChoice, Kind, Pattern, Placement, Rate, Start, Switch},
    restarts::{Delays, First},
};

use super::{
    gateway::{Gateway, Secret},
    table::{Key, Shape},
    values::Plain,
    *,
};
use crate::{
    cli::{self, report::Report},
    cluster::Credentials,
};

/// A directory with a few files, in an environment of its own.
struct World {
    dir: tempfile::TempDir,
    environment: BTreeMap<&'static str, &'static str>,
}

const SECRET: &str = "0123456789abcdef0123456789abcdef";

impl World {
    fn new(files: &[(&str, &str)]) -> World {
        let dir = tempfile::tempdir().unwrap();
        let world = World {
            dir,
            environment: [("GITHUB_TOKEN", "gh-s3cret"), ("SIGNING", SECRET), ("SHORT", "abc"), ("EMPTY", "")].into(),
        };
        for (name, text) in files {
            world.write(name, text.as_bytes());
        }
        world
    }

    fn base(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap()
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.base().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn around<T>(&self, then: impl FnOnce(&Surroundings<'_>) -> T) -> T {
        let base = self.base();
        let environment = |name: &str| self.environment.get(name).map(|value| (*value).to_owned());
        let home = Some(Path::new("/home/ann"));
        then(&Surroundings { cwd: &base, home, environment: &environment, trust: Trust::All, texts: None })
    }

    fn config(&self, named: &[&str]) -> Result<Config, Mistakes> {
        let named: Vec<PathBuf> = named.iter().map(PathBuf::from).collect();
        self.around(|around| Config::load(&named, Want::Everything, around))
    }

    fn gateway(&self, named: &[&str]) -> Result<Gateway, Mistakes> {
        let named: Vec<PathBuf> = named.iter().map(PathBuf::from).collect();
        self.around(|around| Gateway::load(&named, around)).map(|(gateway, _)| gateway)
    }

    /// The errors, as people read them.
    fn words(&self, named: &[&str]) -> String {
        let report = Report::from(self.gateway(named).expect_err("a mistake"));
        assert_eq!(report.code, report::USAGE);
        let words = report.to_string();
        for secret in ["gh-s3cret", SECRET] {
            assert!(!words.contains(secret), "{words}");
        }
        words.replace(&self.base().display().to_string(), "HERE")
    }
}

fn gateway(text: &str) -> Gateway {
    let world = World::new(&[(NAME, text), ("keys.json", include_str!("fixtures/jwks.json"))]);
    world.gateway(&[]).unwrap_or_else(|mistakes| panic!("{}", Report::from(mistakes)))
}

/// One file and its errors.
fn words(text: &str) -> String {
    let said = World::new(&[(NAME, text)]).words(&[]);
    format!("{}\n{said}\n", text.trim_end().lines().map(|line| format!("> {line}\n")).collect::<String>())
}

/// A file that sets every key with a default to that default.
fn defaults(keys: &[Key], path: &str, file: &mut String, count: &mut usize) {
    for key in keys {
        assert!(key.about.ends_with('.'), "{}: {}", key.name, key.about);
        if key.shape.is_leaf() && !key.default.is_empty() {
            file.push_str(&format!("{} = {}\n", key.name, key.default));
            *count += 1;
        }
    }
    for key in keys.iter().filter(|key| !key.shape.is_leaf()) {
        let path = table::join(path, key.name);
        let (header, path) = match key.shape {
            Shape::Named(_) => (format!("[{path}.x]"), format!("{path}.x")),
            Shape::Many(_) => (format!("[[{path}]]"), path),
            _ => (format!("[{path}]"), path),
        };
        file.push_str(&format!("{header}\n"));
        defaults(key.shape.keys(), &path, file, count);
    }
}

#[test]
fn every_default_can_be_read() {
    let (mut file, mut count) = (String::new(), 0);
    defaults(Root::KEYS, "", &mut file, &mut count);
    assert!(count > 30, "{count}");
    let config =
        World::new(&[(NAME, &file)]).config(&[]).unwrap_or_else(|mistakes| panic!("{}", Report::from(mistakes)));
    let all = show::json(&show::all(&config, None), &config);
    let set = all["values"].as_array().unwrap().iter().filter(|value| value["from"] == "file").count();
    // An empty table of texts is shown as the default.
    let empty =
        all["values"].as_array().unwrap().iter().filter(|value| value["value"] == serde_json::json!({})).count();
    assert_eq!(set + empty, count);
}

#[test]
fn every_key_can_be_set() {
    let gateway = gateway(
        r#"
        [gateway]
        name = "team"
        listen = "0.0.0.0:7332"
        hosts = ["gateway.example.com"]
        origins = "https://app.example.com"
        profile = "small"
        sessions_max = 5
        sessions_per_client = 4
        forward_unknown = true
        session_idle = 90
        connections_max = 6
        body_max = "1MiB"

        [[backend]]
        name = "files"
        command = "npx"
        args = ["-y", "${HOME_DIR:-/data}"]
        env = { TOKEN = "${GITHUB_TOKEN}" }
        inherit_env = true
        prefix = "fs_"
        allow = ["read*"]
        deny = "read_secret"
        children = { pool = 3 }
        era = "handshake"
        max_restarts = 0
        first_restart = "delay"
        delay_first = "100ms"
        delay_max = "2s"
        call_timeout = 1.5
        call_max = "3s"
        start_timeout = "4s"
        idle_stop = "5m"
        memory_max = "512MB"
        breaker = { failures = 2, open = "7s" }
        retry = "annotated"

        [[backend]]
        name = "docs"
        url = "https://docs.example.com/mcp?x=1"
        headers = { Authorization = "Bearer ${GITHUB_TOKEN}" }
        type = "sse"

        [[backend]]
        name = "bare"
        command = "server"
        policy = "watchdog"
        children = "per_session"
        children_max = 3
        start = "lazy"
        placement = "one"

        [[backend]]
        name = "off"
        disabled = true

        [profile.small]
        backends = ["f*"]
        deny = ["*write*"]
        search = true

        [role.reader]
        allow = ["fs_read*"]
        [role.admin]
        deny = ["docs__*"]

        [auth]
        default_role = "reader"
        [auth.jwt]
        secret_env = "SIGNING"
        jwks = "keys.json"
        issuer = "https://issuer.example.com"
        audience = ["outlast"]
        role_claim = "realm.roles"
        leeway = "5s"
        [[auth.key]]
        name = "ci"
        sha256 = "00000000000000000000000000000000000000000000000000000000000000ff"
        role = "admin"
        profile = "small"

        [rates]
        per_minute = 60
        [rates.tool."fs_*"]
        per_minute = 6
        burst = 2
        [rates.tool."*"]
        per_minute = 600

        [switch]
        tools = ["fs_read_file"]
        backends = ["docs"]

        [limits]
        hold = "1s"
        held_max = 2
        in_flight_max = 3
        page = 4
        retry_given_up = "10s"

        [cluster]
        nats = ["nats://10.0.0.5", "tls://nats.example.com:4333", "10.0.0.6:4224"]
        name = "team"
        replica = "west-1"
        prefix = "our"
        replicas = 3
        required = true
        user = "ann"
        password = "${GITHUB_TOKEN}"
        tls_ca = "keys.json"
        tls_cert = "keys.json"
        tls_key = "keys.json"
        "#,
    );
    let secs = Duration::from_secs;
    let settings = &gateway.settings;
    assert_eq!(gateway.name.as_deref(), Some("team"));
    let front = &gateway.front;
    assert_eq!(front.listen, Some("0.0.0.0:7332".parse().unwrap()));
    assert_eq!(
        (&front.hosts[..], &front.origins[..]),
        (&["gateway.example.com".into()][..], &["https://app.example.com".into()][..])
    );
    assert_eq!((front.sessions_max, front.sessions_per_client), (5, 4));
    assert_eq!((front.connections_max, front.body_max), (6, 1 << 20));
    assert_eq!(front.session_idle, secs(90));

    let [files, docs, bare] = settings.backends.as_slice() else { panic!("{:?}", settings.backends.len()) };
    let Kind::Stdio { command, args, env, cwd, .. } = &files.kind else { panic!() };
    assert_eq!((command.expose(), args[1].expose(), env["TOKEN"].expose()), ("npx", "/data", "gh-s3cret"));
    assert_eq!(env["TOKEN"].to_string(), "${GITHUB_TOKEN}");
    assert!(Path::new(cwd.as_ref().unwrap().expose()).is_absolute());
    assert_eq!(files.prefix, "fs_");
    assert_eq!(
        (&files.allow[..], &files.deny[..]),
        (&[Pattern("read*".into())][..], &[Pattern("read_secret".into())][..])
    );
    assert_eq!((files.children, files.era, files.retry_annotated), (Children::Pool(3), EraChoice::Handshake, true));
    assert_eq!((files.policy.restarts_max, files.policy.first), (None, First::Delay));
    assert_eq!(files.policy.delays, Delays::Doubling { first: Duration::from_millis(100), max: secs(2) });
    assert_eq!(
        (files.call_timeout, files.call_max, files.start_timeout),
        (Duration::from_millis(1_500), secs(3), secs(4))
    );
    assert_eq!((files.idle_stop, files.memory_max), (Some(secs(300)), Some(512_000_000)));
    assert_eq!((files.breaker_failures, files.breaker_open), (2, secs(7)));

    let Kind::Http { url, headers, is_sse } = &docs.kind else { panic!() };
    assert_eq!((url.expose(), *is_sse, headers.len()), ("https://docs.example.com/mcp?x=1", true, 1));
    let authorization = &headers["authorization"];
    assert_eq!(
        (authorization.expose(), authorization.to_string().as_str()),
        ("Bearer gh-s3cret", "Bearer ${GITHUB_TOKEN}")
    );
    assert_eq!(docs.prefix, "docs__");
    assert_eq!((bare.children, bare.policy.restarts_max), (Children::PerSession, None));
    assert_eq!((bare.children_max, bare.start), (3, Start::Lazy));
    assert_eq!((files.children_max, files.start), (64, Start::Eager));
    assert_eq!((files.placement, bare.placement), (Placement::Every, Placement::One));
    assert!(!bare.policy.clean_leaves, "a backend that leaves in peace is missed all the same");
    assert_eq!((bare.call_timeout, bare.call_max, bare.idle_stop), (secs(60), secs(600), None));

    assert_eq!(settings.default_profile.as_deref(), Some("small"));
    assert!(settings.profiles["small"].search);
    assert_eq!(settings.roles["admin"].allow, [Pattern("*".into())], "a role that only denies allows the rest");
    let auth = gateway.auth.as_ref().unwrap();
    assert_eq!(auth.default_role.as_deref(), Some("reader"));
    let jwt = auth.jwt.as_ref().unwrap();
    assert_eq!(jwt.algorithms, ["HS256", "RS256", "ES256"]);
    assert_eq!((jwt.role_claim.as_str(), jwt.name_claim.as_str(), jwt.leeway), ("realm.roles", "sub", secs(5)));
    assert_eq!((auth.keys[0].sha256[31], auth.keys[0].profile.as_deref()), (255, Some("small")));
    assert_eq!(settings.rates.default, Some(Rate { per_minute: 60, burst: 60 }));
    assert_eq!(settings.rates.of("fs_read"), Some(Rate { per_minute: 6, burst: 2 }), "in the order of the file");
    assert_eq!(settings.switched_off, [Switch::Backend("docs".into()), Switch::Tool("fs_read_file".into())]);
    assert!(settings.backends[0].inherit_env);
    assert!(settings.forward_unknown);
    assert_eq!((settings.limits.hold, settings.limits.held_max), (secs(1), 2));
    assert_eq!((settings.limits.in_flight_max, settings.limits.page, settings.limits.retry_given_up), (3, 4, secs(10)));
    let cluster = gateway.cluster.as_ref().unwrap();
    assert_eq!(
        cluster.servers,
        ["nats://10.0.0.5:4222", "tls://nats.example.com:4333", "nats://10.0.0.6:4224"],
        "with scheme and port"
    );
    let names = [&cluster.cluster, &cluster.replica, &cluster.prefix].map(String::as_str);
    assert_eq!((names, cluster.replicas, cluster.required), (["team", "west-1", "our"], 3, true));
    let password = Secret(b"gh-s3cret".to_vec());
    assert_eq!(cluster.credentials, Credentials::UserAndPassword { user: "ann".to_owned(), password });
    assert!(cluster.tls.ca.is_some() && cluster.tls.own.is_some());
    assert_eq!(cluster.session_ttl, secs(90));
    assert!(!format!("{cluster:?}").contains("gh-s3cret"));
    let watched: Vec<_> = gateway.watched.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(watched, [NAME, "keys.json"]);
    assert!(!format!("{auth:?}").contains(SECRET));
}

#[test]
fn an_error_names_its_position_its_key_and_the_fix() {
    let texts = [
        "[[backend]]\nname = \"a\"\ncomand = \"x\"\n",
        "[gatway]\n",
        "[[backends]]\n",
        "[backend]\nname = \"a\"\n",
        "[[backend]]\ncommand = \"x\"\n",
        "[[backend]]\nname = \"a\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nurl = \"http://x\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\n\n[[backend]]\nname = \"a\"\ncommand = \"y\"\n",
        "[[backend]]\nname = \"a b\"\ncommand = \"x\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nprefix = \"a.b/\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nenv = { T = \"${NOPE}\" }\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nallow = [\"^read$\"]\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ndeny = [\"\"]\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ncwd = \"nowhere\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ncwd = \"outlast.toml\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nchildren = \"many\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nchildren_max = 3\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nchildren = \"per_session\"\nchildren_max = 0\n",
        "[[backend]]\nname = \"a\"\nurl = \"http://x\"\nstart = \"lazy\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ncall_timeout = \"soon\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ncall_timeout = true\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ncall_timeout = \"20m\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nstart_timeout = 0\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nidle_stop = \"400d\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nmemory_max = \"lots\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nmax_restarts = -1\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nera = \"handshaek\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ntype = \"http\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\npolicy = \"watchdog\"\ndelay_max = 5\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ndelay_first = \"2m\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nheaders = { A = \"b\" }\n",
        "[[backend]]\nname = \"a\"\nurl = \"docs.example.com\"\n",
        "[[backend]]\nname = \"a\"\nurl = \"https://ann:pass@docs.example.com/mcp\"\n",
        "[[backend]]\nname = \"a\"\nurl = \"http://x/\"\nmemory_max = \"1GB\"\n",
        "[[backend]]\nname = \"a\"\nurl = \"http://x/\"\nheaders = { \"a b\" = \"c\" }\n",
        "[[backend]]\nname = \"a\"\nurl = \"http://x/\"\nheaders = { X = \"a\\nb\" }\n",
        "[[backend]]\nname = \"a\"\nurl = \"http://x/\"\nheaders = { Host = \"b\" }\n",
        "[[backend]]\nname = \"a\"\ncommand = [\"x\"]\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\ntimeout = 5\n",
        "[gateway]\nlisten = \"localhost\"\n",
        "[gateway]\nlisten = \"0.0.0.0:7332\"\n",
        "[gateway]\nprofile = \"smal\"\n[profile.small]\n",
        "[gateway]\norigins = [\"*\"]\n",
        "[gateway]\nhosts = [\"http://x\"]\n",
        "[profile.small]\nbackends = [\"file\"]\n[[backend]]\nname = \"files\"\ncommand = \"x\"\n",
        "[switch]\nbackends = [\"git\"]\n",
        "[rates]\nburst = 5\n",
        "[rates.tool.x]\nburst = 5\n",
        "[rates]\nper_minute = 0\n",
        "[auth]\n",
        "[auth]\nsecret = \"x\"\n",
        "[auth.jwt]\nissuer = \"x\"\n",
        "[auth.jwt]\nsecret_env = \"NOPE\"\n",
        "[auth.jwt]\nsecret_env = \"EMPTY\"\n",
        "[auth.jwt]\nsecret_env = \"SHORT\"\n",
        "[auth.jwt]\nsecret_env = \"SIGNING\"\nalgorithms = [\"none\"]\n",
        "[auth.jwt]\nsecret_env = \"SIGNING\"\nalgorithms = [\"RS256\"]\n",
        "[auth.jwt]\njwks = \"nowhere.json\"\n",
        "[auth.jwt]\njwks = \"outlast.toml\"\n",
        "[[auth.key]]\nsha256 = \"00\"\n",
        "[[auth.key]]\nname = \"ci\"\nsha256 = \"00\"\n",
        "[[auth.key]]\nname = \"ci\"\nkey = \"00\"\n",
        "[[auth.key]]\nname = \"ci\"\nrole = \"admin\"\nsha256 = \"00000000000000000000000000000000000000000000000000000000000000ff\"\n",
        "[cluster]\n",
        "[cluster]\nnats = \"nats://x\"\nname = \"a.b\"\nreplica = \"\"\nprefix = \"a*\"\n",
        "[cluster]\nnats = \"nats://ann:pass@x\"\nname = \"a\"\n",
        "[cluster]\nnats = [\"http://x\", \"ws://x\", \"nats://x/y\"]\nname = \"a\"\n",
        "[cluster]\nnats = \"x\"\nname = \"a\"\nreplicas = 2\n",
        "[gateway]\nbody_max = \"65MiB\"\n[cluster]\nnats = [\"nats://a\"]\nname = \"x\"\n",
        "[cluster]\nnats = \"x\"\nname = \"a\"\nuser = \"ann\"\ntoken = \"${GITHUB_TOKEN}\"\n",
        "[cluster]\nnats = \"x\"\nname = \"a\"\ncredentials = \"nowhere\"\ntls_cert = \"nowhere\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nplacement = \"one\"\n",
        "[cluster]\nnats = \"x\"\nname = \"a\"\n[[backend]]\nname = \"a\"\nurl = \"http://x/\"\nplacement = \"one\"\n",
        "[[backend]]\nname = \"a\"\ncommand = \"x\"\nplacement = \"two\"\n",
        "a = \n",
        "[mcp]\nwatch = 5\n",
        "[run]\ndetach_key = \"d\"\n",
    ];
    insta::assert_snapshot!(texts.map(words).concat());
}

#[test]
fn all_errors_of_a_file_are_reported_at_once_up_to_a_limit() {
    let text = "[gateway]\nlisten = 5\nx = 1\n[limits]\nhold = \"soon\"\n[[backend]]\nname = \"a\"\n";
    insta::assert_snapshot!(World::new(&[(NAME, text)]).words(&[]));
    let many: String = (0..25).map(|n| format!("unknown_{n} = 1\n")).collect();
    let said = World::new(&[(NAME, &many)]).words(&[]);
    assert!(said.starts_with("error: the configuration has 25 mistakes\n"), "{said}");
    assert!(said.contains("and 5 more"), "{said}");
    assert_eq!(said.matches("there is no such key").count(), mistake::MISTAKES_MAX);
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let world =
        World::new(&[("dir/x", ""), ("empty.json", "{}"), ("list.json", "{\"mcpServers\": []}"), ("outlast.toml", "")]);
    world.write("latin.toml", b"a = 1\nb = \"\xfc\"\n");
    let files = [&["nowhere.toml"][..], &["dir"], &["latin.toml"], &["empty.json"], &["list.json"]];
    insta::assert_snapshot!(files.map(|named| world.words(named)).concat());
}

#[test]
fn the_nearest_file_is_found_and_named_files_are_joined() {
    let world = World::new(&[
        (NAME, "[gateway]\nname = \"outer\"\n"),
        (
            "a.toml",
            "[gateway]\nname = \"a\"\nsessions_max = 5\n[limits]\nhold = 1\n[[backend]]\nname = \"one\"\ncommand = \"x\"\n",
        ),
        ("b.toml", "[gateway]\nname = \"b\"\n[limits]\npage = 7\n[[backend]]\nname = \"two\"\ncommand = \"y\"\n"),
        ("c.toml", "[[backend]]\nname = \"one\"\ncommand = \"z\"\n"),
        ("deep/down/x", ""),
    ]);
    let deep = world.base().join("deep/down");
    let environment = |_: &str| None;
    let around = Surroundings { cwd: &deep, home: None, environment: &environment, trust: Trust::All, texts: None };
    let config = Config::load(&[], Want::Everything, &around).unwrap();
    assert_eq!(config.root.gateway.name.plain().as_deref(), Some("outer"));

    let gateway = world.gateway(&["a.toml", "b.toml"]).unwrap();
    assert_eq!(gateway.name.as_deref(), Some("b"), "the later file has the last word");
    assert_eq!(gateway.front.sessions_max, 5);
    assert_eq!((gateway.settings.limits.hold, gateway.settings.limits.page), (Duration::from_secs(1), 7));
    let names: Vec<_> = gateway.settings.backends.iter().map(|backend| backend.name.as_str()).collect();
    assert_eq!(names, ["one", "two"]);
    insta::assert_snapshot!(world.words(&["a.toml", "c.toml"]), @r"
    error: c.toml:2:8: `backend.one.name`: another backend has this name, at a.toml:7
      hint: give one of them another name
    ");
}

#[test]
fn certain_name_collisions_are_errors() {
    let words = |first: &str, second: &str| {
        let backend = |name: &str, more: &str| format!("[[backend]]\nname = \"{name}\"\ncommand = \"x\"\n{more}\n");
        let world = World::new(&[(NAME, &(backend("one", first) + &backend("two", second)))]);
        match world.gateway(&[NAME]) {
            Ok(_) => "fine".to_owned(),
            Err(_) => world.words(&[NAME]),
        }
    };
    insta::assert_snapshot!(words("prefix = \"fs_\"", "prefix = \"fs_\""), @r"
    error: outlast.toml:8:1: `backend.two.prefix`: the backend `one` has the same prefix `fs_`, so both would offer the same names
      hint: give one of them another `prefix`
    ");
    insta::assert_snapshot!(words("prefix = \"two__\"", ""), @r"
    error: outlast.toml:5:1: `backend.two.prefix`: the backend `one` has the same prefix `two__`, so both would offer the same names
      hint: give one of them another `prefix`
    ");
    let named = |names: &str| format!("prefix = \"\"\nallow = [{names}]");
    insta::assert_snapshot!(words(&named("\"a\", \"b\""), &named("\"b\"")), @"
    error: outlast.toml:9:1: `backend.two.prefix`: the backend `one` also offers the tool `b`
      hint: give one of them another `prefix`
    ");
    // Collisions that only the catalogues show.
    for (first, second) in [
        ("prefix = \"\"", "prefix = \"\""),
        ("prefix = \"\"\nallow = [\"a*\"]", "prefix = \"\"\nallow = [\"a\"]"),
        ("prefix = \"x_\"\nallow = [\"a\"]", "prefix = \"x_\"\nallow = [\"b\"]"),
        ("prefix = \"x_\"\nallow = [\"a\"]", "prefix = \"x_\"\nallow = [\"a\", \"b\"]\ndeny = [\"a\"]"),
        ("prefix = \"x_\"\ndisabled = true", "prefix = \"x_\""),
    ] {
        assert_eq!(words(first, second), "fine", "{first} and {second}");
    }
}

#[cfg(unix)]
#[test]
fn a_file_of_another_user_is_not_used() {
    let world = World::new(&[(NAME, "[gateway]\nname = \"x\"\n")]);
    let path = world.base().join(NAME);
    assert!(os::is_trusted(&fs::metadata(&path).unwrap()), "our own");
    assert!(os::is_trusted(&fs::metadata("/").unwrap()), "the administrator's");
    // Only the administrator can change the owner of a file.
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    nix::unistd::chown(&path, Some(nix::unistd::Uid::from_raw(12_345)), None).unwrap();
    let config = world.config(&[]).unwrap();
    assert!(config.files.is_empty());
    let warning = config.warnings().concat().replace(&world.base().display().to_string(), "HERE");
    insta::assert_snapshot!(
        warning,
        @"warning: `HERE/outlast.toml` belongs to another user and is not used; if you trust it, name it with `--config`"
    );
    assert_eq!(world.gateway(&[NAME]).unwrap().name.as_deref(), Some("x"));
}

#[test]
fn files_of_clients_are_read() {
    for (name, text, wanted) in [
        (".mcp.json", include_str!("fixtures/mcp.json"), 3),
        (".vscode/mcp.json", include_str!("fixtures/vscode.json"), 2),
        ("Claude/claude_desktop_config.json", include_str!("fixtures/claude_desktop_config.json"), 2),
    ] {
        // As an editor on Windows saves it.
        let windows = format!("\u{feff}{}", text.replace('\n', "\r\n"));
        let mut seen = vec![];
        for text in [text, &windows] {
            let world = World::new(&[(name, text), ("web/x", "")]);
            let gateway = world.gateway(&[name]).unwrap_or_else(|mistakes| panic!("{}", Report::from(mistakes)));
            assert_eq!(gateway.settings.backends.len(), wanted, "{name}");
            let mut words = String::new();
            for backend in &gateway.settings.backends {
                words.push_str(&format!("{} {}* {:?}\n", backend.name, backend.prefix, backend.kind));
            }
            words.push_str(&gateway.notes.join("\n"));
            seen.push(words.replace(&world.base().display().to_string(), "HERE"));
        }
        assert_eq!(seen[0], seen[1]);
        insta::assert_snapshot!(format!("client_{}", name.replace(['/', '.'], "_")), seen[0]);
    }
}

#[test]
fn unusable_parts_of_a_clients_file_are_reported() {
    let texts = [
        r#"{ "servers": { "a": { "command": "x", "env": { "K": "${input:api-key}" } } }, "inputs": [{ "id": "api-key" }] }"#,
        r#"{ "mcpServers": { "a": { "type": "ws", "url": "ws://x" } } }"#,
        r#"{ "mcpServers": { "a": { "command": "x" }, "a": { "command": "y" } } }"#,
        r#"{ "mcpServers": { "a": { "args": [] } } }"#,
        r#"{ "mcpServers": { "a": "x" } }"#,
        r#"{ "mcpServers": { "a": { "command": "x", "envFile": ".env" } } }"#,
        r#"{ "mcpServers": { "a": { "command": "x", "args": "y" "z" } } }"#,
        r#"{ "mcpServers": { "a": { "command": "x", "env": { "T": "${NOPE}" } } } }"#,
        r#"{ "mcpServers": { "a": { "command": 5 } } }"#,
    ];
    let words = texts.map(|text| format!("> {text}\n{}\n", World::new(&[(".mcp.json", text)]).words(&[".mcp.json"])));
    insta::assert_snapshot!(words.concat());
}

#[test]
fn every_option_has_a_key() {
    for (command, keys) in [("mcp", keys::Mcp::KEYS), ("run", keys::Run::KEYS)] {
        let cli = cli::Cli::command();
        let command_line = cli.find_subcommand(command).unwrap();
        let options = command_line.get_arguments().map(|argument| argument.get_id().as_str());
        let options: Vec<&str> = options.filter(|id| !["help", "version"].contains(id)).collect();
        for option in &options {
            let has_key = keys.iter().any(|key| key.name == *option);
            let has_reason = flags::WITHOUT_KEY.iter().any(|(name, _)| name == option);
            assert!(has_key != has_reason, "{command} --{option}: a key, or a reason why there is none");
        }
        // A table cannot be given on a command line.
        for key in keys.iter().filter(|key| key.shape.is_leaf()) {
            assert!(options.contains(&key.name), "[{command}] {} has no option", key.name);
            assert!(key.marks.contains(&"option"), "[{command}] {} does not set its option", key.name);
            let option = command_line.get_arguments().find(|argument| argument.get_id() == key.name).unwrap();
            let default = option.get_default_values().first().map(|default| default.to_str().unwrap());
            let of_key = key.default.starts_with('"').then(|| tree::default(key.default).json());
            let of_key = of_key.as_ref().and_then(serde_json::Value::as_str);
            assert_eq!(of_key, default, "the defaults of [{command}] {} and of its option", key.name);
        }
    }
    let cli = cli::Cli::command();
    for option in cli.find_subcommand("gateway").unwrap().get_arguments().map(|argument| argument.get_id().as_str()) {
        let has_key = keys::Gateway::KEYS.iter().any(|key| key.name == option);
        let has_reason = flags::WITHOUT_KEY.iter().any(|(name, _)| *name == option);
        assert!(has_key != has_reason, "gateway --{option}: a key, or a reason why there is none");
    }
}

#[test]
fn the_file_sets_the_grace_periods_of_a_gateway() {
    let world = World::new(&[(NAME, "[gateway]\nno_watch = true\nstdin_grace = 7\nterm_grace = \"9s\"\n")]);
    let given = cli::Cli::command().get_matches_from(["outlast", "gateway", "--term-grace", "3"]);
    let cli::Command::Gateway(mut got) = cli::Cli::from_arg_matches(&given).unwrap().command else { panic!() };
    world.around(|around| flags::fill_gateway(&mut got, given.subcommand().unwrap().1, around)).unwrap();
    assert!(got.no_watch);
    assert_eq!((got.stdin_grace, got.term_grace), (Duration::from_secs(7), Duration::from_secs(3)));
}

fn mcp(world: &World, line: &str) -> Result<cli::Mcp, Mistakes> {
    let given = cli::Cli::command().get_matches_from(line.split(' '));
    let cli::Command::Mcp(mut arguments) = cli::Cli::from_arg_matches(&given).unwrap().command else { panic!() };
    world.around(|around| flags::fill_mcp(&mut arguments, given.subcommand().unwrap().1, around)).map(|()| arguments)
}

#[test]
fn the_file_sets_options_that_the_command_line_does_not() {
    let text = r#"
        [mcp]
        name = "weather"
        watch = ["src", "lib"]
        build = "make"
        reload = "replace"
        drain = "5s"
        retry = "annotated"
        policy = "exponential"
        max_restarts = 3
        first_restart = "delay"
        on_clean_exit = "restart"
        start_timeout = "7s"
        hold = "8s"
        stdin_grace = 0.5
        term_grace = "3s"
        no_tools = true
        marker = "state/marker"
        call_timeout = "2m"
        memory_max = "512MB"
        restart_tool = "reboot"

        [mcp.tool.render]
        call_timeout = "30m"

        [[backend]]
        half = "written"

        [run]
        env_pass = ["A", "B*"]
        detach = true
        detach_key = "ctrl-a d"
        on_hangup = "detach"
        no_screen = true
        notify = "say so"
        hang_timeout = "10m"
    "#;
    let world = World::new(&[(NAME, text)]);
    let got = mcp(&world, "outlast mcp -- cat").unwrap();
    let shown = format!("{got:#?}").replace(&world.base().display().to_string(), "HERE");
    insta::assert_snapshot!(shown);

    let line = "outlast mcp --name b --watch web --drain 1 --retry never --policy watchdog --hold 2 --marker m -- cat";
    let got = mcp(&world, line).unwrap();
    assert_eq!((got.name.as_deref(), got.watch.as_slice()), (Some("b"), &[PathBuf::from("web")][..]));
    assert_eq!((got.drain, got.hold), (Duration::from_secs(1), Duration::from_secs(2)));
    assert!(matches!((got.retry, got.policy), (cli::Retry::Never, cli::Policy::Watchdog)));
    assert_eq!(got.marker, Some("m".into()));
    assert_eq!(got.max_restarts, Some(3), "the rest is still the file's");

    let got = mcp(&world, "outlast mcp --inherit -- cat").unwrap();
    assert!(got.watch.is_empty() && !got.no_tools, "what is about messages means nothing then");

    let given = cli::Cli::command().get_matches_from(["outlast", "run", "--", "claude"]);
    let cli::Command::Run(mut run) = cli::Cli::from_arg_matches(&given).unwrap().command else { panic!() };
    world.around(|around| flags::fill_run(&mut run, given.subcommand().unwrap().1, around)).unwrap();
    assert_eq!((run.env_pass, run.detach), (vec!["A".to_owned(), "B*".to_owned()], true));
    assert_eq!((run.detach_key.to_string().as_str(), run.no_screen), ("ctrl-a d", true));
    assert!(matches!(run.on_hangup, cli::OnHangup::Detach));
    assert_eq!((run.notify, run.hang_timeout), (vec!["say so".to_owned()], Some(Duration::from_secs(600))));

    let line = ["outlast", "run", "--detach-key", "none", "--on-hangup", "end", "--notify", "x", "--", "claude"];
    let given = cli::Cli::command().get_matches_from(line);
    let cli::Command::Run(mut run) = cli::Cli::from_arg_matches(&given).unwrap().command else { panic!() };
    world.around(|around| flags::fill_run(&mut run, given.subcommand().unwrap().1, around)).unwrap();
    assert_eq!((run.detach_key.to_string().as_str(), run.notify), ("none", vec!["x".to_owned()]));
    assert!(matches!(run.on_hangup, cli::OnHangup::End));
}

#[test]
fn a_server_reports_errors_of_its_own_table_only() {
    let named = "outlast mcp --config outlast.toml -- cat";
    let said = mcp(&World::new(&[(NAME, "[mcp]\ndrian = 5\n")]), named).unwrap_err();
    insta::assert_snapshot!(Report::from(said), @r"
    error: outlast.toml:2:1: `mcp.drian`: there is no such key in `mcp`
      hint: did you mean `drain`?
    ");
    let found = mcp(&World::new(&[(NAME, "[mcp]\ndrian = 5\n")]), "outlast mcp -- cat").unwrap();
    insta::assert_snapshot!(found.warnings.join("\n"), @"warning: outlast.toml:2:1: `mcp.drian`: there is no such key in `mcp`; nothing in this file is used; did you mean `drain`?");
    let said = mcp(&World::new(&[(NAME, "[mcp]\ninherit = true\nhold = 5\n")]), named).unwrap_err();
    insta::assert_snapshot!(Report::from(said), @r"
    error: outlast.toml:3:1: `mcp.hold`: it concerns messages, and with `inherit` outlast reads none
      hint: remove one of them
    ");
}

#[test]
fn all_errors_of_the_table_of_a_command_are_reported_at_once() {
    let text = "[mcp]\ninherit = true\nhold = 5\ndrian = 5\nheartbeat = \"1ms\"\n";
    let said = mcp(&World::new(&[(NAME, text)]), "outlast mcp --config outlast.toml -- cat").unwrap_err();
    insta::assert_snapshot!(Report::from(said), @r"
    error: the configuration has 3 mistakes
      because: outlast.toml:3:1: `mcp.hold`: it concerns messages, and with `inherit` outlast reads none
                 remove one of them
               outlast.toml:4:1: `mcp.drian`: there is no such key in `mcp`
                 did you mean `drain`?
               outlast.toml:5:1: `mcp.heartbeat`: this time is too short for a heartbeat
                 at least 100ms
      hint: nothing was started; `outlast gateway check` reads it again
    ");
}

#[test]
fn effective_values_are_shown_with_their_origin() {
    let text = r#"
[[backend]]
name = "docs"
url = "https://${HOST:-docs}.example.com/mcp"
headers = { Authorization = "Bearer ${GITHUB_TOKEN}", X-Plain = "literal" }
allow = ["read*"]
call_timeout = "90s"

[auth.jwt]
secret_env = "SIGNING"

[mcp]
watch = ["src"]
"#;
    let world = World::new(&[(NAME, text)]);
    let config = world.config(&[]).unwrap();
    insta::assert_snapshot!(show::table(&show::all(&config, None)));
    let shown = show::json(&show::all(&config, Some("backend")), &config);
    let values = shown["values"].as_array().unwrap();
    let of = |key: &str| values.iter().find(|value| value["key"] == key).unwrap().clone();
    assert_eq!(
        of("backend.docs.headers.Authorization"),
        serde_json::json!({
            "key": "backend.docs.headers.Authorization", "value": "Bearer ${GITHUB_TOKEN}", "from": "environment",
            "place": "outlast.toml:5", "variables": ["GITHUB_TOKEN"],
        })
    );
    assert_eq!(of("backend.docs.headers.X-Plain")["hidden"], true);
    assert_eq!(of("backend.docs.headers.X-Plain")["value"], serde_json::Value::Null);
    assert_eq!(of("backend.docs.call_max")["from"], "default");
    assert!(!shown.to_string().contains("s3cret") && !shown.to_string().contains("literal"));
}

#[test]
fn a_secret_is_shown_only_as_a_reference() {
    let shown = |password: &str| {
        let text = format!("[cluster]\nnats = \"x\"\nname = \"a\"\nuser = \"ann\"\npassword = {password:?}\n");
        let config = World::new(&[(NAME, &text)]).config(&[]).unwrap();
        let all = show::json(&show::all(&config, None), &config);
        assert!(!all.to_string().contains("gh-s3cret"), "{all}");
        let values = all["values"].as_array().unwrap();
        let password = values.iter().find(|value| value["key"] == "cluster.password").unwrap();
        (password["value"].clone(), password["hidden"] == true)
    };
    assert_eq!(shown("${GITHUB_TOKEN}"), ("${GITHUB_TOKEN}".into(), false));
    assert_eq!(shown("gh-s3cret"), (serde_json::Value::Null, true));
}

#[test]
fn options_are_shown_as_options() {
    let world = World::new(&[(NAME, "[mcp]\ndrain = 9\nhold = 8\n")]);
    let mut config = world.config(&[]).unwrap();
    let line = "outlast mcp --drain 5 --watch a b --no-tools --retry annotated -- cat";
    let given = cli::Cli::command().get_matches_from(line.split(' '));
    flags::lay_over(&mut *config.root.mcp, given.subcommand().unwrap().1);
    let shown = show::table(&show::all(&config, Some("mcp")));
    insta::assert_snapshot!(shown);

    // Numbers are numbers, and nothing is replaced: the shell has done that.
    let line = "outlast mcp --max-restarts 3 --memory-max 1KB --call-timeout 60 --name ${HOME} -- cat";
    let given = cli::Cli::command().get_matches_from(line.split(' '));
    flags::lay_over(&mut *config.root.mcp, given.subcommand().unwrap().1);
    let lines = show::all(&config, Some("mcp"));
    let of = |key: &str| lines.iter().find(|line| line.key == key).and_then(|line| line.value.clone());
    assert_eq!(of("mcp.max_restarts"), Some(serde_json::json!(3)));
    assert_eq!(of("mcp.memory_max"), Some(serde_json::json!(1_000)));
    assert_eq!(of("mcp.call_timeout"), Some(serde_json::json!("1m")));
    assert_eq!(of("mcp.name"), Some(serde_json::json!("${HOME}")));
}

/// With `OUTLAST_BLESS` set the file is written, otherwise compared.
fn held_to(name: &str, wanted: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    if env::var_os("OUTLAST_BLESS").is_some() {
        fs::write(&path, wanted).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default().replace("\r\n", "\n");
    assert!(
        found == wanted,
        "docs/{name} is stale: OUTLAST_BLESS=1 cargo test -p outlast config::tests::the_reference_page"
    );
}

#[test]
fn the_reference_page_is_up_to_date() {
    held_to("configuration.md", &pages::page());
    held_to("outlast.schema.json", &format!("{:#}\n", schema::schema()));
}

#[test]
fn the_example_of_the_book_is_valid() {
    let page = pages::page();
    let example = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let world =
        World { environment: [("GITHUB_TOKEN", "x"), ("DOCS_TOKEN", "y")].into(), ..World::new(&[(NAME, example)]) };
    assert_eq!(world.gateway(&[]).unwrap().settings.backends.len(), 2);
}

#[test]
fn the_sandboxes_of_the_book_can_be_read() {
    let page = include_str!("../../../../docs/sandbox.md");
    let examples = page.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut count = 0;
    for example in examples {
        let mut world = World::new(&[(NAME, example)]);
        world.environment.insert("HOME", "/home/ann");
        let config = world.around(|around| Config::load(&[], Want::Everything, around));
        let config = config.unwrap_or_else(|mistakes| panic!("{}", Report::from(mistakes)));
        assert!(config.root.mcp.sandbox.is_set, "{example}");
        count += 1;
    }
    assert_eq!(count, 3);
}

#[test]
fn the_metrics_and_guards_of_the_book_are_valid() {
    let page = include_str!("../../../../docs/guards.md");
    let examples = page.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut count = 0;
    for example in examples {
        let mut world = World::new(&[(NAME, example), ("keys.json", include_str!("fixtures/jwks.json"))]);
        world.environment.insert("OUTLAST_SIGNING", SECRET);
        world.gateway(&[]).unwrap_or_else(|mistakes| panic!("{}", Report::from(mistakes)));
        count += 1;
    }
    assert_eq!(count, 2);
}

#[test]
fn the_schema_agrees_with_the_reader() {
    let validator = jsonschema::validator_for(&schema::schema()).unwrap();
    let table = [
        (
            "[[backend]]\nname = \"a\"\ncommand = \"x\"\nchildren = { pool = 2 }\ncall_timeout = \"5m\"\nmemory_max = \"1GB\"\n",
            true,
        ),
        ("[gateway]\nlisten = \"127.0.0.1:1\"\nsession_idle = 5.5\n[rates.tool.x]\nper_minute = 5\n", true),
        ("[mcp]\nwatch = \"src\"\n", true),
        ("[[backend]]\nname = \"a\"\ncommand = \"x\"\nallow = [\"read_*\"]\n", true),
        ("[[backend]]\ncomand = \"x\"\n", false),
        ("[[backend]]\nname = \"a\"\ncommand = \"x\"\nchildren = \"many\"\n", false),
        ("[[backend]]\nname = \"a\"\ncommand = \"x\"\nallow = [\"^x\"]\n", false),
        ("[gateway]\nsession_idle = \"soon\"\n", false),
        ("[rates]\nper_minute = 0\n", false),
    ];
    for (text, is_right) in table {
        let value: serde_json::Value = toml_edit::de::from_str(text).unwrap();
        assert_eq!(validator.is_valid(&value), is_right, "schema: {text}");
        let world = World::new(&[(NAME, text)]);
        assert_eq!(world.gateway(&[]).is_ok(), is_right, "reader: {text}");
    }
}
