//! A project with a gateway in it, and ways to inspect it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use super::web::Session;
use crate::mcp::client::{Client, OUTLAST, PUPPET, Place, Setup, until};

/// One `[[backend]]` with a puppet, and these further lines.
pub(crate) fn backend(name: &str, flags: &[&str], more: &str) -> String {
    let args: Vec<String> = flags.iter().map(|flag| format!("{flag:?}")).collect();
    format!("[[backend]]\nname = {name:?}\ncommand = {PUPPET:?}\nargs = [{}]\n{more}\n\n", args.join(", "))
}

/// The cached catalogue of the gateway that ran in this directory, which was its HOME too.
#[cfg(unix)]
pub(crate) fn cached_catalogue(home: &Path) -> PathBuf {
    let files = |dir: &Path| -> Vec<PathBuf> {
        fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path()).collect()
    };
    let all = files(&home.join(".local/state/outlast/projects")).iter().flat_map(|dir| files(dir)).collect::<Vec<_>>();
    let is_catalogue = |path: &&PathBuf| path.to_string_lossy().contains("/catalogue.");
    all.iter().find(is_catalogue).unwrap_or_else(|| panic!("no catalogue in {all:?}")).clone()
}

/// Short delays, for tests that do not wait for a backoff.
pub(crate) const HASTY: &str = "delay_first = \"10ms\"\ndelay_max = \"50ms\"\nmax_restarts = 0";

pub(crate) struct Gate {
    pub place: Place,
    /// Its stdin and stdout; with `--listen` they are not used.
    pub client: Client,
    pub address: String,
}

impl Gate {
    /// Over HTTP, on a free port.
    pub(crate) fn listen(place: Place, config: &str) -> Gate {
        Gate::listen_with(place, config, |setup| setup)
    }

    pub(crate) fn listen_with(place: Place, config: &str, more: impl FnOnce(Setup) -> Setup) -> Gate {
        Gate::configured(place, config, |setup| more(setup.options(["--listen", "127.0.0.1:0"])))
    }

    /// Over HTTP, at the address of the configuration.
    pub(crate) fn configured(place: Place, config: &str, more: impl FnOnce(Setup) -> Setup) -> Gate {
        place.write("outlast.toml", config);
        let client = more(Setup::gateway(&place).options(["--name", "gateway"]).hasty()).start();
        let line = client.says("listening on http://");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address");
        Gate { address: address.to_owned(), place, client }
    }

    /// Over stdio: the only client does its handshake.
    pub(crate) fn stdio(place: Place, config: &str) -> Gate {
        place.write("outlast.toml", config);
        let client = Setup::gateway(&place).options(["--stdio"]).hasty().ready();
        Gate { place, client, address: String::new() }
    }

    pub(crate) fn session(&self) -> Session {
        Session::open(&self.address)
    }

    /// A command about it, from another terminal.
    pub(crate) fn outlast(&self, args: &[&str]) -> Output {
        outlast(&self.place, args)
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let output = self.outlast(&[args, &["--json"]].concat());
        let text = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(&text)
            .unwrap_or_else(|_| panic!("{args:?} said {text:?} and {:?}", String::from_utf8_lossy(&output.stderr)))
    }

    pub(crate) fn state(&self) -> Value {
        self.json(&["state"])
    }

    /// The status of one backend.
    pub(crate) fn backend(&self, name: &str) -> Value {
        let state = self.state();
        let backends = state["backends"].as_array().unwrap_or_else(|| panic!("no backends in {state}"));
        backends.iter().find(|backend| backend["name"] == name).unwrap_or_else(|| panic!("no {name}: {state}")).clone()
    }

    /// Waits until a backend is in this state; returns its status.
    pub(crate) fn is(&self, name: &str, state: &str) -> Value {
        until(&format!("{name} to be {state}"), || {
            let backend = self.backend(name);
            (backend["state"] == state).then_some(backend)
        })
    }

    pub(crate) fn child(&self, name: &str) -> u32 {
        let backend = self.is(name, "ready");
        backend["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or_else(|| panic!("no pid: {backend}"))
    }

    /// Ends it, and checks that no process is left.
    pub(crate) fn end(mut self) {
        if self.address.is_empty() {
            self.client.end();
        } else {
            crate::mcp::client::signal(self.client.pid(), nix::sys::signal::Signal::SIGTERM);
            let status = self.client.wait();
            assert_eq!(status.code(), Some(0), "{}", self.client.stderr_text());
        }
        self.place.is_swept();
    }
}

pub(crate) fn outlast(place: &Place, args: &[&str]) -> Output {
    outlast_in(place.path(), args)
}

/// In a directory that is also the home directory.
pub(crate) fn outlast_in(path: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(OUTLAST);
    // A gateway is started with `--config`, so that it trusts the file.
    let is_start =
        args.first() == Some(&"gateway") && !["check", "hash-key", "--config"].iter().any(|arg| args.contains(arg));
    let is_named = is_start && path.join("outlast.toml").exists();
    let (verb, rest) = args.split_at(args.len().min(1));
    command.args(verb).args(is_named.then_some(["--config", "outlast.toml"]).into_iter().flatten()).args(rest);
    command.current_dir(path).env("HOME", path).env_remove("OUTLAST_PUPPET");
    command.stdin(Stdio::null()).output().expect("the program runs")
}
