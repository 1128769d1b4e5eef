//! Tasks: whoever made one is told how it goes, by the backend that works on it.

use super::*;
use crate::{
    json::Raw,
    message::{Params, patch, pick},
};

use dispatch::Asked;
use words::Failure;

/// How many tasks are remembered; the oldest is forgotten first, and is then unknown to its client.
const TASKS_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_id: FxHashMap<String, Task>,
    order: VecDeque<String>,
}

#[derive(Debug)]
struct Task {
    /// Nobody but who made it may ask for it.
    who: String,
    client: Client,
    era: Era,
    place: PlaceKey,
    serial: u64,
}

impl Gateway {
    /// A call made a task, if its result says so.
    pub(super) fn note_task(&mut self, call: &Call, serial: u64, result: Raw<'_>) {
        let Some(whom) = &call.whom else { return };
        if memchr::memmem::find(result.get().as_bytes(), b"\"taskId\"").is_none() {
            return;
        }
        let Some([task, own]) = pick(result, ["task", "taskId"]) else { return };
        let inner = task.and_then(|task| pick(task, ["taskId"])).and_then(|[id]| id);
        let Some(id) = inner.or(own).and_then(Raw::text) else { return };
        let Some(guest) = self.guests.get(&whom.client) else { return };
        let (who, client, era) = (guest.who.name.clone(), whom.client, whom.era);
        if self.tasks.by_id.insert(id.clone(), Task { who, client, era, place: call.place, serial }).is_none() {
            self.tasks.order.push_back(id);
        }
        if self.tasks.order.len() > TASKS_MAX
            && let Some(oldest) = self.tasks.order.pop_front()
        {
            self.tasks.by_id.remove(&oldest);
        }
    }

    fn task_of(&self, client: Client, id: &str) -> Option<&Task> {
        let guest = self.guests.get(&client)?;
        self.tasks.by_id.get(id).filter(|task| match task.era {
            Era::Handshake => task.client == client,
            Era::Stateless => task.who == guest.who.name,
        })
    }

    pub(super) fn task_asked(&mut self, asked: Asked<'_>, now: Instant) {
        let id = asked.params.task_id().and_then(Raw::text).unwrap_or_default();
        match self.task_of(asked.whom.client, &id).map(|task| (task.place, task.serial)) {
            // Tasks live in the process that made them.
            Some((place, serial)) if self.links.get(&serial).is_some_and(|link| link.is_ready()) => {
                self.send_to(asked, place, now);
            }
            _ => {
                let words = format!("there is no task `{}`", words::cut(&id, 100));
                self.unknown(&asked, words, None);
            }
        }
    }

    /// Whose tasks a backend would list, it does not know.
    pub(super) fn tasks_asked(&mut self, asked: &Asked<'_>) {
        let failure =
            Failure::method_unknown("the gateway lists no tasks: backends cannot tell its clients apart".into());
        self.refuse(&asked.whom, false, &failure);
    }

    /// News of a task, for the one who made it.
    pub(super) fn task_noted(&mut self, serial: u64, said: &[u8], params: &Params<'_>) {
        let Some(id) = params.task_id().and_then(Raw::text) else { return };
        if let Some(task) = self.tasks.by_id.get(&id).filter(|task| task.serial == serial && task.era == Era::Handshake)
        {
            let client = task.client;
            self.out.push(Action::TellClient { client, message: patch(said, &mut []), about: None });
        }
    }

    /// The client whose task a backend's request names.
    pub(super) fn task_named_in(&self, serial: u64, params: &Params<'_>) -> Option<Client> {
        let [related] = pick(params.meta()?, ["io.modelcontextprotocol/related-task"])?;
        let [id] = pick(related?, ["taskId"])?;
        let task = self.tasks.by_id.get(&id?.text()?)?;
        (task.serial == serial && task.era == Era::Handshake).then_some(task.client)
    }

    pub(super) fn lose_tasks(&mut self, serial: u64) {
        self.forget_tasks_where(|task| task.serial == serial);
    }

    pub(super) fn forget_tasks(&mut self, client: Client) {
        self.forget_tasks_where(|task| task.era == Era::Handshake && task.client == client);
    }

    fn forget_tasks_where(&mut self, gone: impl Fn(&Task) -> bool) {
        if self.tasks.by_id.is_empty() {
            return;
        }
        self.tasks.by_id.retain(|_, task| !gone(task));
        let by_id = &self.tasks.by_id;
        self.tasks.order.retain(|id| by_id.contains_key(id));
    }
}
