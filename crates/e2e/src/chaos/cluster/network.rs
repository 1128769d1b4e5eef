//! The network of a cluster: a network namespace for each NATS server and each replica where that is permitted, so that any
//! of them can be separated; otherwise loopback, with a proxy between each replica and each server.
//!
//! The namespaces are in a network and a mount namespace of this program ([`machine`]), with addresses that exist only there:
//! they end with its last process, however it ends.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
};

use super::super::machine;

/// Which side of a partition a node is on. Nodes on different sides do not reach each other.
pub(super) type Sides = BTreeMap<usize, usize>;

/// The NATS servers are nodes 0 to 2, the replicas 3 to 5.
pub(super) const SERVERS: usize = 3;
const NODES: [&str; 6] = ["n1", "n2", "n3", "a", "b", "c"];
/// Sides of a partition.
pub(super) const SIDES_MAX: usize = 4;
/// The network of the NATS servers and the replicas, which can be partitioned.
const INNER: &str = "10.77.1";
/// The network on which clients reach all of them at any time.
const OUTER: &str = "10.77.2";

pub(super) enum Network {
    Namespaces,
    Loopback { why: String },
}

impl Network {
    /// Makes the namespaces, or says why there are none.
    pub(super) fn new() -> Network {
        let made = match machine::has_network() {
            Err(why) => Err(why),
            Ok(()) => make(),
        };
        match made {
            Ok(()) => Network::Namespaces,
            Err(why) => Network::Loopback { why },
        }
    }

    pub(super) fn has_namespaces(&self) -> bool {
        matches!(self, Network::Namespaces)
    }

    pub(super) fn name(&self) -> String {
        match self {
            Network::Namespaces => "a network namespace for each NATS server and each replica".to_owned(),
            Network::Loopback { why } => {
                format!("SKIPPED network namespaces: {why}; proxies separate replicas from NATS servers instead")
            }
        }
    }

    /// Where the NATS servers and the replicas reach a node.
    pub(super) fn inner(&self, node: usize) -> String {
        self.address(INNER, node)
    }

    /// Where this program reaches a node.
    pub(super) fn outer(&self, node: usize) -> String {
        self.address(OUTER, node)
    }

    fn address(&self, network: &str, node: usize) -> String {
        match self {
            Network::Namespaces => format!("{network}.{}", node + 11),
            Network::Loopback { .. } => "127.0.0.1".to_owned(),
        }
    }

    /// A command that runs on a node. It becomes the program itself, with the same process id.
    pub(super) fn command(&self, node: usize, program: &std::path::Path) -> Command {
        match self {
            Network::Loopback { .. } => Command::new(program),
            Network::Namespaces => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net=/run/netns/{}", NODES[node])).arg("--").arg(program);
                command
            }
        }
    }

    /// Separates nodes; those that are not listed are on side 0, where all of them are without a partition.
    pub(super) fn separate(&self, sides: &Sides) -> Result<(), String> {
        if !self.has_namespaces() {
            return Ok(());
        }
        for (node, name) in NODES.into_iter().enumerate() {
            let side = sides.get(&node).copied().unwrap_or(0);
            ip(&["link", "set", &format!("in-{name}"), "master", &format!("side{side}")])?;
        }
        Ok(())
    }

    /// Takes the link of a node down, or up: its own programs notice that.
    pub(super) fn link(&self, node: usize, is_up: bool) -> Result<(), String> {
        match self {
            Network::Loopback { .. } => Ok(()),
            Network::Namespaces => ip(&["-n", NODES[node], "link", "set", "inner", if is_up { "up" } else { "down" }]),
        }
    }
}

fn make() -> Result<(), String> {
    ip(&["link", "set", "lo", "up"])?;
    let sides: Vec<String> = (0..SIDES_MAX).map(|side| format!("side{side}")).collect();
    for bridge in sides.iter().map(String::as_str).chain(["outside"]) {
        ip(&["link", "add", bridge, "type", "bridge"])?;
        ip(&["link", "set", bridge, "up"])?;
    }
    ip(&["address", "add", &format!("{OUTER}.1/24"), "dev", "outside"])?;
    for (node, name) in NODES.into_iter().enumerate() {
        ip(&["netns", "add", name])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        for (end, link, network, bridge) in [("inner", "in", INNER, "side0"), ("outer", "out", OUTER, "outside")] {
            let outside = format!("{link}-{name}");
            ip(&["link", "add", &outside, "type", "veth", "peer", "name", end, "netns", name])?;
            ip(&["link", "set", &outside, "master", bridge, "up"])?;
            ip(&["-n", name, "address", "add", &format!("{network}.{}/24", node + 11), "dev", end])?;
            ip(&["-n", name, "link", "set", end, "up"])?;
        }
    }
    Ok(())
}

fn ip(args: &[&str]) -> Result<(), String> {
    let mut command = Command::new("ip");
    let output = command.args(args).stdin(Stdio::null()).output().map_err(|error| format!("cannot run ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim())),
    }
}
