//! A server in a sandbox: what the kernel permits a real process, and what is refused if it cannot be enforced.

use std::{
    collections::BTreeMap,
    env, fs,
    net::{TcpListener, UdpSocket},
    os::unix::net::UnixListener,
    process::{Command, Output, Stdio},
    thread,
};

use outlast_core::sandbox::Support;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use serde_json::json;

use crate::{
    gateway::world::{Gate, backend},
    mcp::client::{Client, OUTLAST, PUPPET, Place, Setup, until},
    support::copy_program,
};

/// A home directory, a project in use, and files elsewhere.
struct World {
    home: Place,
    project: Place,
    elsewhere: Place,
}

impl World {
    fn new() -> World {
        let world = World { home: Place::new(), project: Place::new(), elsewhere: Place::new() };
        for dir in ["shared", "out"] {
            fs::create_dir(world.elsewhere.path().join(dir)).unwrap();
        }
        for file in ["secret", "shared/file", "out/file"] {
            world.elsewhere.write(file, "text");
        }
        world.project.write("file", "text");
        world
    }

    fn setup(&self, config: &str) -> Setup {
        self.project.write("outlast.toml", config);
        Setup::new(&self.project).home(self.home.path()).options(["--config", "outlast.toml"]).hasty()
    }

    fn outlast(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(OUTLAST);
        command.args(args).current_dir(self.project.path()).env("HOME", self.home.path());
        command.env_remove("OUTLAST_CHILD").stdin(Stdio::null());
        command
    }
}

/// True where this kernel can enforce a sandbox.
fn is_enforced(test: &str) -> bool {
    let support = outlast_os::sandbox_support();
    let is_enforced = matches!(support, Support::Landlock(4..));
    if !is_enforced {
        eprintln!("{test}: skipped, as this kernel cannot enforce it: {support:?}");
    }
    is_enforced
}

fn read(client: &mut Client, tool: &str, path: &str) -> String {
    client.call(tool, json!({"how": "read", "path": path}))
}

#[test]
fn a_sandboxed_server_can_use_only_listed_files_and_ports() {
    if !is_enforced("a_sandboxed_server_can_use_only_listed_files_and_ports") {
        return;
    }
    let world = World::new();
    let [first, second, free] = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
    let (allowed, other, unused) = (port(&first), port(&second), port(&free));
    drop(free);
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    let datagram_port = datagrams.local_addr().unwrap().port();
    let _listener = UnixListener::bind(world.elsewhere.path().join("socket")).unwrap();
    let [shared, out] = ["shared", "out"].map(|name| world.elsewhere.join(name));
    let at = |name: &str| world.elsewhere.join(name);
    let config = format!(
        "[mcp]\nsandbox = {{ read = [{shared:?}], write = [{out:?}], tcp_connect = [{allowed}], tcp_bind = [0] }}\n"
    );
    #[rustfmt::skip]
    let table = [
        // use       path                         port     in the sandbox
        ("read",     at("shared/file"),           0,       "ok"),
        ("list",     at("shared"),                0,       "ok"),
        ("write",    at("shared/file"),           0,       "denied"),
        ("truncate", at("shared/file"),           0,       "denied"),
        ("read",     at("secret"),                0,       "denied"),
        ("list",     at(""),                      0,       "denied"),
        ("write",    at("secret"),                0,       "denied"),
        ("write",    at("new"),                   0,       "denied"),
        ("truncate", at("secret"),                0,       "denied"),
        ("read",     at("out/file"),              0,       "ok"),
        ("write",    at("out/file"),              0,       "ok"),
        ("write",    at("out/new"),               0,       "ok"),
        ("truncate", at("out/new"),               0,       "ok"),
        ("read",     world.project.join("file"),  0,       "ok"),
        ("write",    world.project.join("file"),  0,       "denied"),
        ("list",     world.home.join(""),         0,       "denied"),
        ("read",     "/etc/passwd".into(),        0,       "ok"),
        ("list",     "/etc".into(),               0,       "denied"),
        ("list",     "/".into(),                  0,       "denied"),
        ("read",     "/proc/self/status".into(),  0,       "ok"),
        ("read",     "/proc/1/status".into(),     0,       "denied"),
        ("read",     "/dev/urandom".into(),       0,       "ok"),
        ("write",    "/dev/null".into(),          0,       "ok"),
        ("run",      at("shared/file"),           0,       "ok"),
        ("connect",  String::new(),               allowed, "ok"),
        ("connect",  String::new(),               other,   "denied"),
        ("bind",     String::new(),               0,       "ok"),
        ("bind",     String::new(),               unused,  "denied"),
        // Not restricted by Landlock, as the book says.
        ("udp",      String::new(),               datagram_port, "ok"),
        ("unix",     at("socket"),                0,       "ok"),
        ("stat",     at("secret"),                0,       "ok"),
    ];
    let check = |client: &mut Client, is_free: bool| {
        for (how, path, port, expected) in &table {
            let said = client.call("use", json!({"how": how, "path": path, "port": port}));
            let expected = if is_free { "ok" } else { expected };
            assert_eq!(said, expected, "{how} {path} {port}");
        }
        // A process that the server starts is in the same sandbox.
        let said = client.call("use", json!({"how": "run", "path": at("secret")}));
        assert_eq!(said == "ok", is_free, "{said}");
        let said = client.call("use", json!({"how": "signal", "pid": client.pid()}));
        let is_scoped = matches!(outlast_os::sandbox_support(), Support::Landlock(6..));
        assert_eq!(said, if is_free || !is_scoped { "ok" } else { "denied" });
    };

    let mut client = world.setup(&config).ready();
    check(&mut client, false);
    // The server that replaces it is in the sandbox, too.
    client.restart();
    check(&mut client, false);
    client.end();

    let mut client = world.setup(&config).options(["--inherit"]).ready();
    check(&mut client, false);
    client.end();

    // Without the sandbox all of this is permitted.
    let mut client = world.setup("").ready();
    check(&mut client, true);
    client.end();
}

#[test]
fn ports_are_not_restricted_where_the_file_says_any() {
    if !is_enforced("ports_are_not_restricted_where_the_file_says_any") {
        return;
    }
    let world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut client = world.setup("[mcp]\nsandbox = { tcp_connect = \"any\" }\n").ready();
    assert_eq!(client.call("use", json!({"how": "connect", "port": port})), "ok");
    assert_eq!(client.call("use", json!({"how": "bind", "port": 0})), "denied");
    assert_eq!(read(&mut client, "use", &world.elsewhere.join("secret")), "denied");
    client.end();
}

#[test]
fn the_home_directory_is_not_readable_as_the_working_directory() {
    if !is_enforced("the_home_directory_is_not_readable_as_the_working_directory") {
        return;
    }
    let world = World::new();
    let config = world.project.write("outlast.toml", "[mcp]\nsandbox = {}\n");
    world.home.write("private", "text");
    let mut client = Setup::new(&world.home).options(["--config", &config]).hasty().ready();
    assert_eq!(read(&mut client, "use", &world.home.join("private")), "denied");
    client.end();
}

#[test]
fn an_interpreter_outside_of_the_sandbox_is_named() {
    if !is_enforced("an_interpreter_outside_of_the_sandbox_is_named") {
        return;
    }
    let world = World::new();
    let shell = world.elsewhere.join("sh");
    copy_program("/bin/sh", &shell);
    let script = world.project.script("server", &format!("#!{shell}\nexec {PUPPET}\n"));
    let mut client = world.setup("[mcp]\nsandbox = {}\n").command([script.as_str()]).start();
    client.close_stdin();
    assert_eq!(client.wait().code(), Some(126));
    let words = client.last_words();
    let because =
        format!("\n  because: `{script}` or its interpreter is not executable, or not in `read` of its sandbox\n");
    assert!(words.contains(&because) && !words.contains("chmod"), "{words}");
}

#[test]
fn a_sandboxed_backend_is_replaced_when_its_sandbox_changes() {
    if !is_enforced("a_sandboxed_backend_is_replaced_when_its_sandbox_changes") {
        return;
    }
    let world = World::new();
    let secret = world.elsewhere.join("secret");
    let config = |sandbox: &str| backend("one", &[], sandbox) + &backend("two", &[], "");
    let mut gate = Gate::stdio(Place::new(), &config("sandbox = {}"));
    gate.is("two", "ready");
    gate.is("one", "ready");
    assert_eq!(read(&mut gate.client, "one__use", &secret), "denied");
    assert_eq!(read(&mut gate.client, "two__use", &secret), "ok");

    gate.place.write("outlast.toml", &config(&format!("sandbox = {{ read = {secret:?} }}")));
    until("the new sandbox", || (read(&mut gate.client, "one__use", &secret) == "ok").then_some(()));
    gate.end();
}

#[test]
fn a_file_that_is_not_trusted_can_only_restrict() {
    if !is_enforced("a_file_that_is_not_trusted_can_only_restrict") {
        return;
    }
    let world = World::new();
    let out = world.elsewhere.join("out");
    fs::create_dir(world.project.path().join("inside")).unwrap();
    world.project.write(
        "outlast.toml",
        &format!(
            "[mcp]\nname = \"x\"\nsandbox = {{ read = [{out:?}], write = [\"inside\"], tcp_connect = \"any\" }}\n"
        ),
    );
    let mut client = Setup::new(&world.project).home(world.home.path()).hasty().ready();
    // The path outside of the directory is ignored, and the sandbox is in force without it.
    let warning = client.says("warning: `outlast.toml` is not trusted");
    assert!(warning.contains("`mcp.sandbox.read` in it is ignored"), "{warning}");
    assert_eq!(read(&mut client, "use", &world.elsewhere.join("out/file")), "denied");
    assert_eq!(client.call("use", json!({"how": "write", "path": world.project.join("inside/new")})), "ok");
    client.end();

    assert!(world.outlast(&["trust"]).status.success());
    let mut client = Setup::new(&world.project).home(world.home.path()).hasty().ready();
    assert_eq!(read(&mut client, "use", &world.elsewhere.join("out/file")), "ok");
    client.end();
}

/// The error of a configuration that cannot be used, and the exit code.
fn refusal(output: &Output) -> (i32, String) {
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_server_is_not_started_without_the_sandbox_of_a_broken_file() {
    let world = World::new();
    world.project.write("outlast.toml", "[mcp]\nsandbox = {}\n<<<<<<< HEAD\n");
    let (code, words) = refusal(&world.outlast(&["mcp", "--", PUPPET]));
    assert_eq!(code, 2, "{words}");
    assert!(words.starts_with("error: outlast.toml:3:"), "{words}");
}

#[test]
fn errors_in_a_sandbox_are_reported_with_position_and_fix() {
    if !is_enforced("errors_in_a_sandbox_are_reported_with_position_and_fix") {
        return;
    }
    let world = World::new();
    let many = vec!["1"; 257].join(", ");
    #[rustfmt::skip]
    let table = [
        ("sandbox = { read = [\"missing\"] }",
         "error: outlast.toml:2:21: `mcp.sandbox.read`: `missing` cannot be used: no such file or directory\n  hint: \
          create it or remove it; a relative path counts from the directory of the file\n"),
        ("sandbox = { write = [\"\"] }",
         "error: outlast.toml:2:22: `mcp.sandbox.write`: a path is empty\n  hint: create it or remove it; a relative \
          path counts from the directory of the file\n"),
        ("sandbox = { tcp_connect = [0] }",
         "error: outlast.toml:2:28: `mcp.sandbox.tcp_connect`: `0` is not a port\n  hint: write a list of numbers from 1 \
          to 65535, such as [443], or \"any\"\n"),
        ("sandbox = { tcp_bind = [65536] }",
         "error: outlast.toml:2:25: `mcp.sandbox.tcp_bind`: `65536` is not a port\n  hint: write a list of numbers from 0 \
          to 65535, such as [443], or \"any\"\n"),
        ("sandbox = { tcp_bind = \"all\" }",
         "error: outlast.toml:2:24: `mcp.sandbox.tcp_bind`: expected a list of ports, not `all`\n  hint: write a list \
          of numbers from 0 to 65535, such as [443], or \"any\"\n"),
        (&format!("sandbox = {{ tcp_bind = [{many}] }}"),
         "error: outlast.toml:2:13: `mcp.sandbox.tcp_bind`: 257 entries are too many\n  hint: at most 256 are allowed; a \
          directory includes everything in it\n"),
        ("sandbox = { reads = [] }",
         "error: outlast.toml:2:13: `mcp.sandbox.reads`: there is no such key in `mcp.sandbox`\n  hint: did you mean \
          `read`?\n"),
        ("sandbox = true",
         "error: outlast.toml:2:11: `mcp.sandbox`: expected a table, not true or false\n"),
    ];
    for (line, expected) in table {
        world.project.write("outlast.toml", &format!("[mcp]\n{line}\n"));
        let output = world.outlast(&["mcp", "--config", "outlast.toml", "--", PUPPET]);
        assert_eq!(refusal(&output), (2, expected.to_owned()), "{line}");
    }
    world.project.write("outlast.toml", "[[backend]]\nname = \"a\"\nurl = \"http://x\"\nsandbox = {}\n");
    let output = world.outlast(&["gateway", "--config", "outlast.toml"]);
    let expected = "error: outlast.toml:4:1: `backend.a.sandbox`: it needs a backend with a `command`\n  hint: \
                    remove it\n";
    assert_eq!(refusal(&output), (2, expected.to_owned()));
}

#[test]
fn the_effective_sandbox_is_shown() {
    let world = World::new();
    world
        .project
        .write("outlast.toml", "[mcp]\nsandbox = { read = \"file\", tcp_connect = [443], tcp_bind = \"any\" }\n");
    let output = world.outlast(&["config", "show", "--json"]);
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let value = |key: &str| {
        let values = shown["values"].as_array().unwrap();
        values.iter().find(|value| value["key"] == key).unwrap_or_else(|| panic!("no {key}"))["value"].clone()
    };
    assert_eq!(value("mcp.sandbox.read"), json!(["file"]));
    assert_eq!(value("mcp.sandbox.write"), json!(null));
    assert_eq!(value("mcp.sandbox.tcp_connect"), json!([443]));
    assert_eq!(value("mcp.sandbox.tcp_bind"), json!("any"));
}

/// Runs the program under a filter of system calls, so that the kernel answers as one without Landlock does. The
/// thread that starts the program carries the filter, and the program inherits it.
fn without_landlock(command: &mut Command, errno: i32) -> Output {
    let refuse = SeccompAction::Errno(errno.try_into().unwrap());
    let rules = BTreeMap::from([(nix::libc::SYS_landlock_create_ruleset, Vec::new())]);
    let arch = env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    let run = || {
        seccompiler::apply_filter(&filter).unwrap();
        command.output().unwrap()
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

#[test]
fn a_sandbox_that_cannot_be_enforced_is_refused() {
    use nix::libc::{ENOSYS, EOPNOTSUPP};
    let world = World::new();
    let missing = "this kernel cannot enforce a sandbox: it has no Landlock";
    let disabled = "this kernel cannot enforce a sandbox: Landlock is disabled";
    let table = [
        (ENOSYS, missing, "use Linux 6.7 or later with CONFIG_SECURITY_LANDLOCK, or remove it"),
        (EOPNOTSUPP, disabled, "add `landlock` to `lsm=` on the kernel's command line, or remove it"),
    ];
    for (errno, why, hint) in table {
        world.project.write("outlast.toml", "[mcp]\nsandbox = {}\n");
        // Also for a found file: a sandbox is not dropped because the user does not trust the file.
        for args in [&["mcp", "--config", "outlast.toml", "--", PUPPET][..], &["mcp", "--", PUPPET]] {
            let output = without_landlock(&mut world.command(args), errno);
            let expected = format!("error: outlast.toml:2:1: `mcp.sandbox`: {why}\n  hint: {hint}\n");
            assert_eq!(refusal(&output), (2, expected));
        }
        world.project.write("outlast.toml", &backend("one", &[], "sandbox = {}"));
        let output = without_landlock(&mut world.command(&["gateway", "--config", "outlast.toml"]), errno);
        let expected = format!("error: outlast.toml:5:1: `backend.one.sandbox`: {why}\n  hint: {hint}\n");
        assert_eq!(refusal(&output), (2, expected));

        let output = without_landlock(&mut world.command(&["doctor", "--no-start"]), errno);
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(words.lines().any(|line| line.contains("! sandbox") && line.ends_with(why)), "{words}");
    }
    // A file without a sandbox needs no Landlock.
    world.project.write("outlast.toml", "[mcp]\n");
    let output = without_landlock(&mut world.command(&["mcp", "--", PUPPET]), ENOSYS);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[test]
fn doctor_reports_the_sandbox_features_of_this_kernel() {
    let Support::Landlock(abi @ 4..) = outlast_os::sandbox_support() else {
        return eprintln!(
            "doctor_reports_the_sandbox_features_of_this_kernel: skipped, as this kernel has no Landlock"
        );
    };
    let world = World::new();
    let output = world.outlast(&["doctor", "--no-start"]);
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = format!("Landlock ABI {abi}: files and TCP ports can be restricted");
    assert!(words.lines().any(|line| line.contains("✓ sandbox") && line.ends_with(&expected)), "{words}");
}
