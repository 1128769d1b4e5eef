//! What a server offers, or what a client was told that it does. Only what the relay and the gateway have to know of it.

use serde::{Deserialize, Serialize};

use crate::{
    mcp::Family,
    message::{Raw, pick},
};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capabilities {
    pub(crate) tools: bool,
    pub(crate) prompts: bool,
    pub(crate) resources: bool,
    pub(crate) subscribe: bool,
    pub(crate) logging: bool,
    pub(crate) completions: bool,
}

impl Capabilities {
    pub(crate) const ALL: Capabilities =
        Capabilities { tools: true, prompts: true, resources: true, subscribe: true, logging: true, completions: true };

    /// From the `capabilities` of a handshake or a discover result. `counts`: whether the value of a member declares it.
    pub(crate) fn parse(raw: Option<Raw<'_>>, counts: impl Fn(Raw<'_>) -> bool) -> Capabilities {
        let names = ["tools", "prompts", "resources", "logging", "completions"];
        let found = raw.and_then(|raw| pick(raw, names)).unwrap_or_default();
        let subscribe = found[2].and_then(|resources| pick(resources, ["subscribe"])).and_then(|[flag]| flag);
        let [tools, prompts, resources, logging, completions] = found.map(|found| found.is_some_and(&counts));
        let subscribe = subscribe.is_some_and(|flag| flag.get() == "true");
        Capabilities { tools, prompts, resources, subscribe, logging, completions }
    }

    /// What the client is told of a server that has these: outlast's tools are there, too, if they are on.
    pub(crate) fn with_tools(self, are_on: bool) -> Capabilities {
        Capabilities { tools: self.tools || are_on, ..self }
    }

    pub(crate) fn has(&self, family: Family) -> bool {
        match family {
            Family::Tools => self.tools,
            Family::Prompts => self.prompts,
            Family::Resources => self.resources,
        }
    }
}
