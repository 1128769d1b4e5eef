//! `outlast agent-event`: the command that an agent's hook runs. It sends one event from stdin to the session's control
//! socket and waits a bounded time until the session has it, so that events arrive in the order in which they happened.

use std::{
    io::{self, Read},
    process::ExitCode,
    time::{Duration, Instant},
};

use outlast_control::{
    client::Client,
    method::{AgentEvent, Method},
};
use outlast_core::agent_event;
use serde_json::Value;

use crate::cli;

/// An event can hold whole tool results; one that is longer is dropped.
const EVENT_MAX: u64 = 16 << 20;
/// A prompt is cut here, so that it fits into a frame even if each character is escaped.
const PROMPT_MAX: usize = 128 << 10;
/// The agent waits for its hook: after this time the event is dropped instead.
const DELIVERY_MAX: Duration = Duration::from_secs(5);

/// Whatever goes wrong, the agent is not disturbed: a hook that fails is shown to the user as an error of the agent.
pub(crate) fn deliver(arguments: &cli::AgentEvent) -> ExitCode {
    let mut event = Vec::new();
    let read = io::stdin().lock().take(EVENT_MAX).read_to_end(&mut event);
    if let (Ok(_), Ok(event)) = (read, serde_json::from_slice::<Value>(&event)) {
        let event = agent_event::trimmed(&event, PROMPT_MAX);
        let event = Method::AgentEvent(AgentEvent { generation: Some(arguments.generation), event });
        let deadline = Instant::now() + DELIVERY_MAX;
        if let Ok(mut client) = Client::connect(&arguments.socket, DELIVERY_MAX) {
            let _ = client.ask(&event, Some(deadline));
        }
    }
    ExitCode::SUCCESS
}
