//! A replica whose NATS server has lost its peers, while others that have a majority can be reached.

use serde_json::{Value, json};

use super::super::world::{Gate, HASTY, backend};
use crate::{
    mcp::client::{Place, until},
    support::nats::NatsPrograms,
};

/// Its connection to NATS, as `outlast state --cluster` shows it.
fn nats(gate: &Gate) -> Value {
    gate.json(&["state", "--cluster"])["nats"].clone()
}

#[test]
fn a_replica_leaves_a_nats_server_that_has_lost_its_peers() {
    let Some(programs) = NatsPrograms::find("gateway::replicas::minority::a_replica_leaves_a_nats_server") else {
        return;
    };
    let mut servers = programs.three();
    let urls: Vec<String> = servers.urls();
    let config = |replica: &str| {
        format!("[cluster]\nnats = {urls:?}\nname = \"team\"\nreplica = {replica:?}\nreplicas = 3\n\n")
            + &backend("each", &["--era", "legacy"], HASTY)
    };
    let gates = ["a", "b"].map(|name| Gate::listen(Place::new(), &config(name)));
    for gate in &gates {
        until("NATS", || (nats(gate)["connected"] == true).then_some(()));
        gate.is("each", "ready");
    }
    let [a, b] = &gates;
    let used = nats(a)["server"].as_str().expect("it is connected").to_owned();
    let alone = urls.iter().position(|url| *url == used).expect("one of the three");
    servers.isolate(alone);
    // The server alone keeps the connections of its clients. The replica uses another one, and NATS stores its sessions.
    a.client.says("the connection to NATS is lost: JetStream does not answer there, and answers at nats://");
    until("another server", || {
        let now = nats(a);
        (now["connected"] == true && now["server"] != used.as_str()).then_some(())
    });
    let mut session = until("a session that both replicas serve", || {
        let mut session = a.session();
        session.reconnect(&b.address);
        let reply = session.post(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}));
        (reply.status == 200).then_some(session)
    });
    assert_eq!(session.call("each__echo", json!({"text": "forwarded"})), "forwarded");
    assert!(servers.nodes[alone].is_running());
    gates.into_iter().for_each(Gate::end);
}
