//! `outlast wrap` on the configurations of real clients, and `unwrap`, which restores every byte.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use nix::pty::openpty;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{OUTLAST, PUPPET};

/// Each client's file, relative to the home directory or the project, and its content.
const FILES: [(&str, &str); 12] = [
    ("project/.mcp.json", include_str!("../../fixtures/clients/claude-code-project.json")),
    ("home/.claude.json", include_str!("../../fixtures/clients/claude-code-user.json")),
    (DESKTOP, include_str!("../../fixtures/clients/claude-desktop.json")),
    ("project/.vscode/mcp.json", include_str!("../../fixtures/clients/vscode.jsonc")),
    ("home/.cursor/mcp.json", include_str!("../../fixtures/clients/cursor.json")),
    ("project/.cursor/mcp.json", include_str!("../../fixtures/clients/cursor.json")),
    ("home/.codex/config.toml", include_str!("../../fixtures/clients/codex.toml")),
    ("home/.gemini/settings.json", include_str!("../../fixtures/clients/gemini.json")),
    ("home/.codeium/windsurf/mcp_config.json", include_str!("../../fixtures/clients/windsurf.json")),
    ("home/.config/zed/settings.json", include_str!("../../fixtures/clients/zed.jsonc")),
    (CLINE, include_str!("../../fixtures/clients/cline.json")),
    ("project/opencode.jsonc", include_str!("../../fixtures/clients/opencode.jsonc")),
];

const CLINE: &str = "home/.cline/data/settings/cline_mcp_settings.json";

const DESKTOP: &str = if cfg!(target_os = "macos") {
    "home/Library/Application Support/Claude/claude_desktop_config.json"
} else {
    "home/.config/Claude/claude_desktop_config.json"
};

/// A user with a home directory, a project, and outlast on the PATH.
struct World(TempDir);

impl World {
    fn new() -> World {
        let world = World(tempfile::tempdir().unwrap());
        for dir in ["home", "project/.git", "bin"] {
            fs::create_dir_all(world.at(dir)).unwrap();
        }
        symlink(OUTLAST, world.at("bin/outlast")).unwrap();
        world
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn put(&self, path: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.at("bin/outlast"));
        command.current_dir(self.at("project")).env_clear().env("HOME", self.at("home")).env("PATH", self.at("bin"));
        command.stdin(Stdio::null());
        command
    }

    fn outlast(&self, args: &[&str]) -> Output {
        self.command().args(args).output().unwrap()
    }

    /// Its output, with the paths of this run replaced by names.
    fn said(&self, args: &[&str]) -> String {
        let output = self.outlast(args);
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap().replace(self.0.path().to_str().unwrap(), "/WORLD");
        format!("{said}[{}]", output.status.code().unwrap())
    }
}

#[test]
fn every_client_is_wrapped_and_restored_to_the_last_byte() {
    let as_it_is = |text: &str| text.to_owned();
    let crlf = |text: &str| text.replace('\n', "\r\n");
    let bom = |text: &str| format!("\u{feff}{}", crlf(text));
    let variants: [&dyn Fn(&str) -> String; 3] = [&as_it_is, &crlf, &bom];
    for vary in variants {
        let world = World::new();
        let files: Vec<(PathBuf, String)> =
            FILES.iter().map(|(path, text)| (world.put(path, vary(text)), vary(text))).collect();
        let wrapped = world.outlast(&["wrap", "--yes"]);
        assert!(wrapped.status.success(), "{wrapped:?}");
        let said = String::from_utf8(wrapped.stdout).unwrap();
        assert!(said.contains("Wrapped 22 servers in 12 files"), "{said}");
        for (path, before) in &files {
            let after = fs::read_to_string(path).unwrap();
            assert_ne!(&after, before, "{path:?}");
            assert_eq!(after.starts_with('\u{feff}'), before.starts_with('\u{feff}'));
            if before.contains("\r\n") {
                assert_eq!(after.matches('\n').count(), after.matches("\r\n").count(), "{path:?}: line ends");
            }
        }
        let again = world.said(&["wrap", "--yes"]);
        assert!(again.ends_with("Nothing to wrap.\n[0]"), "{again}");
        let unwrapped = world.outlast(&["unwrap", "--yes"]);
        assert!(unwrapped.status.success(), "{unwrapped:?}");
        for (path, before) in &files {
            assert_eq!(fs::read(path).unwrap(), before.as_bytes(), "{path:?}");
        }
        let again = world.said(&["unwrap", "--yes"]);
        assert!(again.ends_with("Nothing to unwrap.\n[0]"), "{again}");
        let kept = fs::read_dir(world.at("home/.local/state/outlast/wrapped")).unwrap().count();
        assert_eq!(kept, 0, "no copy of a configuration is kept for nothing");
    }
}

/// From the start, and for servers that are wrapped already.
#[test]
fn sharing_is_written_and_reverted_to_the_last_byte() {
    for is_wrapped_before in [false, true] {
        let world = World::new();
        let files: Vec<(PathBuf, &str)> = FILES.iter().map(|(path, text)| (world.put(path, text), *text)).collect();
        if is_wrapped_before {
            assert!(world.outlast(&["wrap", "--yes"]).status.success());
        }
        assert!(world.outlast(&["wrap", "--share", "--yes"]).status.success());
        for (path, text) in &files {
            let wrapped = fs::read_to_string(path).unwrap();
            assert_ne!(&wrapped, text);
            let (on_clean_exit, share) =
                (wrapped.matches("\"--on-clean-exit\"").count(), wrapped.matches("\"--share\"").count());
            assert!(on_clean_exit > 0 && on_clean_exit == share, "{path:?}: {wrapped}");
        }
        let again = world.said(&["wrap", "--share", "--yes"]);
        assert!(again.contains("othing to wrap"), "{again}");
        assert!(world.outlast(&["unwrap", "--yes"]).status.success());
        for (path, text) in &files {
            assert_eq!(&fs::read_to_string(path).unwrap(), text, "{path:?}");
        }
    }
}

#[test]
fn the_output_of_wrap_is_stable() {
    let world = World::new();
    for (path, text) in FILES {
        world.put(path, text);
    }
    insta::assert_snapshot!("wrap_dry_run", world.said(&["wrap", "--dry-run", "--command", "/opt/outlast"]));
    for (path, text) in FILES {
        assert_eq!(fs::read_to_string(world.at(path)).unwrap(), text, "only shown");
    }
    world.outlast(&["wrap", "--yes"]);
    insta::assert_snapshot!("unwrap_one_client", world.said(&["unwrap", "--client", "codex", "--yes"]));
}

#[test]
fn later_changes_of_a_file_are_kept() {
    let world = World::new();
    for (path, text) in FILES {
        let path = world.put(path, text);
        assert!(world.outlast(&["wrap", "--yes", path.to_str().unwrap()]).status.success());
        let mut wrapped = fs::read_to_string(&path).unwrap();
        let note = if path.extension().unwrap() == "toml" { "# mine\n" } else { "// mine\n" };
        wrapped.insert_str(0, note);
        fs::write(&path, wrapped).unwrap();
        assert!(world.outlast(&["unwrap", "--yes", path.to_str().unwrap()]).status.success());
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{note}{text}"), "{path:?}");
    }
}

#[test]
fn a_server_added_later_is_wrapped_later_and_all_are_unwrapped_together() {
    let world = World::new();
    let one = "{\"mcpServers\": {\"a\": {\"command\": \"a\"}\n}}";
    let two = "{\"mcpServers\": {\"a\": {\"command\": \"a\"}\n, \"b\": {\"command\": \"b\", \"args\": [\"c\"]}}}";
    let path = world.put("project/.mcp.json", one);
    world.outlast(&["wrap", "--yes"]);
    let wrapped = fs::read_to_string(&path).unwrap();
    let (first, second) = (one.trim_end_matches("}}"), two.trim_end_matches("}"));
    assert!(wrapped.ends_with("}}"));
    fs::write(&path, wrapped.trim_end_matches("}}").to_owned() + &second[first.len()..] + "}}}").unwrap();
    assert!(world.said(&["wrap", "--yes"]).contains("Wrapped 1 server in 1 file"));
    world.outlast(&["unwrap", "--yes"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), two);
}

#[test]
fn nothing_is_written_without_consent() {
    let world = World::new();
    let (path, text) = FILES[0];
    let path = world.put(path, text);
    let said = world.said(&["wrap"]);
    assert!(
        said.contains("error: stdin is not a terminal, so outlast cannot ask\n  hint: add `--yes` to write"),
        "{said}"
    );
    assert!(said.ends_with("[2]"), "{said}");
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

/// With a terminal as its stdin, it asks.
#[test]
fn the_answer_of_the_user_is_obeyed() {
    let world = World::new();
    let (path, text) = FILES[0];
    let path = world.put(path, text);
    for (answer, code, is_written) in [("\n", 1, false), ("no\n", 1, false), ("y\n", 0, true)] {
        let terminal = openpty(None, None).unwrap();
        // Typed ahead, before the question is asked.
        File::from(terminal.master.try_clone().unwrap()).write_all(answer.as_bytes()).unwrap();
        let output = world.command().arg("wrap").stdin(terminal.slave).output().unwrap();
        let asked = String::from_utf8(output.stderr).unwrap();
        assert_eq!(asked, "\nWrap 2 servers in 1 file? [y/N, s to choose each server] ");
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(".mcp.json is a file of the project and is shared with all its users"), "{said}");
        assert_eq!(output.status.code(), Some(code), "{answer:?}");
        assert_eq!(fs::read_to_string(&path).unwrap() != text, is_written, "{answer:?}");
    }
}

#[test]
fn each_server_can_be_chosen_and_the_rest_is_wrapped_later() {
    let world = World::new();
    let text =
        "{\"mcpServers\": {\n\"a\": {\"command\": \"a\"},\n\"b\": {\"command\": \"b\"},\n\"c\": {\"command\": \"c\"}}}";
    let path = world.put("home/.cursor/mcp.json", text);
    let answer = |command: &str, typed: &str| {
        let terminal = openpty(None, None).unwrap();
        File::from(terminal.master.try_clone().unwrap()).write_all(typed.as_bytes()).unwrap();
        let output = world.command().arg(command).stdin(terminal.slave).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let wrapped = || {
        let servers = read(&path)["mcpServers"].clone();
        ["a", "b", "c"].into_iter().filter(|name| servers[name]["args"][0] == "mcp").collect::<Vec<_>>()
    };
    let (code, asked) = answer("wrap", "s\ny\n\ny\n");
    assert_eq!(code, Some(0), "{asked}");
    assert!(asked.ends_with("  Wrap `c` (~/.cursor/mcp.json)? [y/N] "), "{asked}");
    assert_eq!(wrapped(), ["a", "c"]);
    assert_eq!(answer("wrap", "s\n").0, Some(1), "one server is left, and `s` is no answer to one question");
    assert!(world.said(&["wrap", "--server", "b", "--yes"]).contains("Wrapped 1 server in 1 file"));
    assert_eq!(wrapped(), ["a", "b", "c"]);
    // Unwrapped one after the other, to the last byte.
    assert_eq!(answer("unwrap", "s\nn\ny\nn\n").0, Some(0));
    assert_eq!(wrapped(), ["a", "c"]);
    assert!(world.outlast(&["unwrap", "--yes"]).status.success());
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    assert_eq!(answer("wrap", "s\nn\nn\nn\n").0, Some(1), "none was chosen");
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[test]
fn a_project_file_is_reported_as_shared() {
    let world = World::new();
    world.put("project/.mcp.json", FILES[0].1);
    world.put("home/.gemini/settings.json", FILES[7].1);
    let output = world.outlast(&["wrap", "--dry-run", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let shared: Vec<bool> =
        report["files"].as_array().unwrap().iter().map(|file| file["shared"].as_bool().unwrap()).collect();
    assert_eq!(shared, [true, false]);
    let said = world.said(&["wrap", "--yes"]);
    assert_eq!(said.matches("is shared with all its users").count(), 1, "{said}");
    let said = world.said(&["unwrap", "--yes"]);
    assert!(!said.contains("shared"), "back to what the others have: {said}");
}

#[test]
fn a_link_stays_a_link_and_a_mode_stays_a_mode() {
    let world = World::new();
    let real = world.put("home/dotfiles/claude.json", FILES[1].1);
    fs::set_permissions(&real, fs::Permissions::from_mode(0o600)).unwrap();
    let link = world.at("home/.claude.json");
    symlink("dotfiles/claude.json", &link).unwrap();
    assert!(world.said(&["wrap", "--yes"]).contains("Wrapped 2 servers in 1 file"));
    assert!(link.is_symlink());
    assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o600);
    world.outlast(&["unwrap", "--yes"]);
    assert_eq!(fs::read_to_string(&real).unwrap(), FILES[1].1);
}

#[test]
fn a_project_names_outlast_and_a_user_its_path() {
    let world = World::new();
    let server = |command: &str, args: &[&str]| json!({"mcpServers": {"x": {"command": command, "args": args}}});
    let shared = world.put("project/.mcp.json", server("a", &["b"]).to_string());
    let own = world.put("home/.cursor/mcp.json", server("a", &["b"]).to_string());
    world.outlast(&["wrap", "--yes"]);
    let args = ["mcp", "--name", "x", "--on-clean-exit", "restart", "--", "a", "b"];
    assert_eq!(read(&shared), server("outlast", &args));
    assert_eq!(read(&own), server(world.at("bin/outlast").to_str().unwrap(), &args));

    // If outlast is not on PATH, a shared file gets a path too, and the user is told.
    world.outlast(&["unwrap", "--yes"]);
    let output = world.command().env("PATH", "/nowhere").args(["wrap", "--yes"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("This outlast is not the first on PATH, so .mcp.json gets its full path"), "{said}");
    assert_ne!(read(&shared), server("outlast", &args));
    world.outlast(&["unwrap", "--yes"]);
    world.outlast(&["wrap", "--yes"]);

    // The program moves, and is called by its new path.
    fs::create_dir(world.at("new")).unwrap();
    fs::rename(world.at("bin/outlast"), world.at("new/outlast")).unwrap();
    let moved = Command::new(world.at("new/outlast"))
        .args(["wrap", "--yes"])
        .current_dir(world.at("project"))
        .env("HOME", world.at("home"))
        .env("PATH", world.at("new"))
        .output()
        .unwrap();
    assert!(moved.status.success(), "{moved:?}");
    assert_eq!(read(&shared), server("outlast", &args), "found by its name as before");
    assert_eq!(read(&own), server(world.at("new/outlast").to_str().unwrap(), &args));
}

#[test]
fn a_wrapped_server_works() {
    let world = World::new();
    let path = world.put(
        "project/.mcp.json",
        json!({"mcpServers": {"puppet": {"command": PUPPET, "args": ["--resources"]}}}).to_string(),
    );
    world.outlast(&["wrap", "--yes"]);
    let server = &read(&path)["mcpServers"]["puppet"];
    let words = server["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
    let mut child = Command::new(server["command"].as_str().unwrap())
        .args(words)
        .current_dir(world.at("project"))
        .env("HOME", world.at("home"))
        .env("PATH", world.at("bin"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(format!("{hello}\n").as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let answer: Value = serde_json::from_str(&line).unwrap();
    assert!(answer["result"]["capabilities"]["resources"].is_object(), "{answer}");
    drop(stdin);
    assert!(child.wait().unwrap().success());
}

#[test]
fn errors_of_wrap_are_reported() {
    let world = World::new();
    world.put("project/broken.json", "{\n  \"mcpServers\": {\n");
    world.put("project/empty.json", "{}");
    world.put("project/latin.json", b"{\"a\": \"\xe9\"}");
    world.put("project/continue.yaml", "name: mine\nmcpServers:\n  - name: a\n    command: b\n");
    world.put("project/goose", "# goose\nextensions:\n  a:\n    cmd: b\n");
    world.put("project/mcp.xml", "<servers/>");
    let mut words = format!("$ outlast wrap\n{}\n", world.said(&["wrap"]));
    world.put("project/.mcp.json", "{\"mcpServers\": {\"github\": {\"command\": \"a\"}}}");
    for args in [
        &["unwrap", "--client", "cursor"][..],
        &["wrap", "missing.json"],
        &["wrap", "broken.json"],
        &["wrap", "empty.json"],
        &["wrap", "latin.json"],
        &["wrap", "continue.yaml"],
        &["wrap", "goose"],
        &["wrap", "mcp.xml"],
        &["wrap", "--server", "githbu", ".mcp.json"],
        &["wrap", "."],
        &["wrap", "--client", "claud-code"],
        &["wrap", "--client", "emacs"],
        &["wrap", "--yes", "--dry-run"],
        &["wrap", "empty.json", "--client", "codex"],
    ] {
        words.push_str(&format!("$ outlast {}\n{}\n", args.join(" "), world.said(args)));
    }
    insta::assert_snapshot!("wrap_mistakes", words);
    // One broken file does not prevent the others from being wrapped.
    world.put("home/.cursor/mcp.json", "{");
    let fine = world.put("project/.mcp.json", FILES[0].1);
    let said = world.said(&["wrap", "--yes"]);
    assert!(said.contains("Wrapped 2 servers in 1 file") && said.ends_with("[1]"), "{said}");
    assert!(said.contains("error: cannot read `/WORLD/home/.cursor/mcp.json`"), "{said}");
    assert_ne!(fs::read_to_string(fine).unwrap(), FILES[0].1);
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}
