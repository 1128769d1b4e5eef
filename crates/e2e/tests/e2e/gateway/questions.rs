//! Requests of a real server to a real client that has several open calls.

use std::process::Command;

use super::world::Gate;
use crate::{
    mcp::client::{Place, until},
    support::peers::{Peers, Project, Server, text},
};

/// The client answers only after its other calls have ended: they must not cancel the server request.
#[test]
fn a_question_outlives_other_calls_of_the_same_client() {
    let test = "gateway::questions::a_question_outlives_other_calls_of_the_same_client";
    let Some(peers) = Peers::find(test) else { return };
    let (python, server) = (text(&peers.python("python-1")), text(&Peers::script("servers/python_asks.py")));
    let config = format!("[[backend]]\nname = \"s\"\ncommand = {python:?}\nargs = [{server:?}]\n");
    let gate = Gate::listen(Place::new(), &config);
    until("what it offers", || (gate.backend("s")["catalogue"] == "confirmed").then_some(()));
    // Node looks for packages beside the script.
    let project = Project::new(&peers, Server::PythonMcp1);
    let script = project.path().join("ts_asked.mjs");
    std::fs::copy(Peers::script("clients/ts_asked.mjs"), &script).expect("the project is ours");
    let client = Command::new(peers.node())
        .arg(script)
        .arg(format!("http://{}/mcp", gate.address))
        .output()
        .expect("the client starts");
    let said = String::from_utf8_lossy(&client.stdout);
    let expected = "ask: false: accept: Ann\nother: false: other is over\n";
    assert_eq!(said, expected, "{}", String::from_utf8_lossy(&client.stderr));
    gate.end();
}
