//! How `outlast mcp` and `outlast run` use `outlast.toml`, and what users see of it.

use std::{
    fs,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::mcp::client::{OUTLAST, Place, Setup, until};

fn outlast(place: &Place, directory: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(OUTLAST);
    command.args(arguments).current_dir(place.path().join(directory)).env("HOME", place.path());
    command.env("GITHUB_TOKEN", "gh-s3cret").stdin(Stdio::null()).output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("words")
}

fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr.clone()).expect("words")
}

fn names(place: &Place) -> Vec<String> {
    let all: Value = serde_json::from_str(&stdout(&outlast(place, "", &["ps", "--json"]))).expect("JSON");
    all.as_array().expect("a list").iter().filter_map(|one| Some(one["name"].as_str()?.to_owned())).collect()
}

#[test]
fn a_server_runs_with_the_settings_of_the_file() {
    let place = Place::new();
    // Errors in other tables do not matter to it.
    place.write("outlast.toml", "[mcp]\nname = \"weather\"\nno_tools = true\n[[backend]]\nhalf = \"written\"\n");
    let mut client = Setup::new(&place).ready();
    assert!(!client.tool_names().contains(&"restart_server".to_owned()));
    until("its name", || names(&place).contains(&"weather".to_owned()).then_some(()));
    client.end();

    let mut client = Setup::new(&place).options(["--name", "other"]).ready();
    assert!(!client.tool_names().contains(&"restart_server".to_owned()), "the rest is still the file's");
    until("its name", || names(&place).contains(&"other".to_owned()).then_some(()));
    client.end();

    place.write("elsewhere.toml", "[mcp]\nname = \"third\"\n");
    let mut client = Setup::new(&place).options(["--config", "elsewhere.toml"]).ready();
    assert!(client.tool_names().contains(&"restart_server".to_owned()), "a file that is named stands alone");
    until("its name", || names(&place).contains(&"third".to_owned()).then_some(()));
    client.end();
}

#[test]
fn a_mistake_in_a_named_file_keeps_a_server_from_starting() {
    let place = Place::new();
    place.write("outlast.toml", "[mcp]\ndrian = 5\nhold = \"soon\"\n");
    let named = ["mcp", "--config", "outlast.toml", "--", "cat"];
    insta::assert_snapshot!(complaint(&outlast(&place, "", &named)), @r#"
    error: the configuration has 2 mistakes
      because: outlast.toml:2:1: `mcp.drian`: there is no such key in `mcp`
                 did you mean `drain`?
               outlast.toml:3:8: `mcp.hold`: `soon` is not a time
                 write "30s", "5m", "1h30m" or "250ms", or a number of seconds
      hint: nothing was started; `outlast gateway check` reads it again
    "#);
    assert!(!place.path().join(".outlast").exists(), "nothing was begun");
    insta::assert_snapshot!(complaint(&outlast(&place, "", &["mcp", "--config", "none.toml", "--", "cat"])), @r"
    error: cannot read `none.toml`: no such file or directory
      hint: name the file with `--config`; a relative path counts from the current directory
    ");
}

#[test]
fn an_agent_runs_in_the_background_if_the_file_sets_it() {
    let place = Place::new();
    place.write("outlast.toml", "[run]\ndetach = true\n");
    let id = stdout(&outlast(&place, "", &["run", "--session", "quiet", "--", "sleep", "1000"]));
    assert_eq!(id, "quiet\n");
    stdout(&outlast(&place, "", &["stop", "quiet"]));
    place.is_swept();
}

#[test]
fn effective_settings_are_shown_in_every_subdirectory() {
    let place = Place::new();
    place
        .write("outlast.toml", "[mcp]\nhold = \"9s\"\n[[backend]]\nname = \"x\"\nurl = \"http://x/${GITHUB_TOKEN}\"\n");
    fs::create_dir_all(place.path().join("deep/down")).expect("a directory");
    stdout(&outlast(&place, "deep/down", &["trust"]));
    let shown = stdout(&outlast(&place, "deep/down", &["config", "show", "--", "mcp", "--drain", "5", "--", "cat"]));
    let line = |key: &str| shown.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("{shown}"));
    assert!(line("mcp.hold ").ends_with("outlast.toml:2"), "{shown}");
    assert!(line("mcp.drain ").ends_with("--drain"), "{shown}");
    assert!(line("mcp.retry ").ends_with("default"), "{shown}");

    let shown = stdout(&outlast(&place, "deep/down", &["config", "show", "--json"]));
    assert!(!shown.contains("s3cret"), "{shown}");
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let url = shown["values"].as_array().expect("a list").iter().find(|value| value["key"] == "backend.x.url");
    assert_eq!(url.expect("its address")["from"], "environment");
    assert_eq!(url.expect("its address")["variables"][0], "GITHUB_TOKEN");

    let schema: Value = serde_json::from_str(&stdout(&outlast(&place, "", &["config", "schema"]))).expect("JSON");
    assert_eq!(schema["properties"]["mcp"]["properties"]["hold"]["default"], "30s");
    let said = outlast(&place, "", &["config", "show", "--", "ps"]);
    insta::assert_snapshot!(complaint(&said), @r"
    error: `outlast ps` reads no configuration
      hint: use `mcp`, `run` or `gateway`
    ");
}
