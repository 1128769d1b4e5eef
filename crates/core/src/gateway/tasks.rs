//! Tasks: whoever made one is told how it goes, by the backend that works on it.

use super::*;
use crate::{
    json::Raw,
    message::{Params, patch, pick},
};

use dispatch::Asked;
use opening::Private;
use words::Failure;

/// How many tasks are remembered; the oldest is forgotten first, and is then unknown to its client.
const TASKS_MAX: usize = 1024;

/// What our own cursors begin with.
const CURSOR_MARK: &str = "outlast.tasks.";

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
    /// Rises with each task, so that a list can go on after the one it ended with.
    number: u64,
}

/// A list of tasks, until each backend has said how its own are.
#[derive(Debug)]
pub(super) struct Listing {
    pub whom: Whom,
    /// The tasks asked for, by the number of our request.
    asked: FxHashMap<u64, u64>,
    /// What was said of them, in the order they were made.
    found: BTreeMap<u64, String>,
    /// After which the next page begins.
    next: Option<u64>,
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
        let task = Task { who, client, era, place: call.place, serial, number: self.number() };
        if self.tasks.by_id.insert(id.clone(), task).is_none() {
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

    /// A client asks for its tasks. Whose tasks are whose, backends do not know, so each that this client had made is asked
    /// for by its name. The stateless era has no such list.
    pub(super) fn tasks_asked(&mut self, asked: Asked<'_>, now: Instant) {
        if asked.whom.era == Era::Stateless {
            let failure = Failure::method_unknown("the stateless era has no list of tasks".into());
            return self.refuse(&asked.whom, false, &failure);
        }
        let after = match asked.params.cursor().filter(|cursor| cursor.get() != "null") {
            None => 0,
            Some(cursor) => {
                let text = cursor.text().unwrap_or_default();
                let Some(after) = text.strip_prefix(CURSOR_MARK).and_then(|number| number.parse().ok()) else {
                    let words = "This cursor is not one of ours: begin the list anew.";
                    return self.answer_error(&asked.whom, -32602, words, None);
                };
                after
            }
        };
        let client = asked.whom.client;
        let is_own = |task: &Task| task.era == Era::Handshake && task.client == client && task.number > after;
        let own = self.tasks.by_id.iter().filter(|(_, task)| is_own(task));
        let mut own: Vec<(u64, u64, String)> = own.map(|(id, task)| (task.number, task.serial, id.clone())).collect();
        own.sort_unstable();
        let page = self.settings.limits.page.max(1);
        let next = own.get(page).map(|_| own[page - 1].0);
        own.truncate(page);
        let list = self.number();
        let mut asked_for = FxHashMap::default();
        for (number, serial, id) in own {
            let params = words::member("taskId", &id);
            if let Some(key) = self.ask_link(serial, Private::Task(list), "tasks/get", &params, Era::Handshake, now) {
                asked_for.insert(key, number);
            }
        }
        let listing = Listing { whom: asked.whom, asked: asked_for, found: BTreeMap::new(), next };
        self.task_lists.insert(list, listing);
        self.task_list_done(list);
    }

    /// A backend says how one of the tasks is. One that it knows no more is left out.
    pub(super) fn task_listed(&mut self, list: u64, key: u64, result: Option<Raw<'_>>, _now: Instant) {
        let Some(listing) = self.task_lists.get_mut(&list) else { return };
        let Some(number) = listing.asked.remove(&key) else { return };
        if let Some(task) = result {
            listing.found.insert(number, task.get().to_owned());
        }
        self.task_list_done(list);
    }

    fn task_list_done(&mut self, list: u64) {
        if self.task_lists.get(&list).is_none_or(|listing| !listing.asked.is_empty()) {
            return;
        }
        let listing = self.task_lists.remove(&list).expect("seen above");
        let tasks: Vec<String> = listing.found.into_values().collect();
        let next = listing.next.map_or_else(String::new, |next| format!(r#","nextCursor":"{CURSOR_MARK}{next}""#));
        let result = format!(r#"{{"tasks":[{}]{next}}}"#, tasks.join(","));
        let result = if result.contains('\n') { result.replace(['\n', '\r'], " ") } else { result };
        self.answer_result(&listing.whom, &result);
    }

    /// Nobody waits for these lists any more. True if there was one.
    pub(super) fn drop_task_lists(&mut self, is_it: impl Fn(&Whom) -> bool) -> bool {
        let gone: Vec<u64> =
            self.task_lists.iter().filter(|(_, list)| is_it(&list.whom)).map(|(key, _)| *key).collect();
        for key in &gone {
            let listing = self.task_lists.remove(key).expect("listed above");
            self.forget(&listing.whom);
        }
        !gone.is_empty()
    }

    /// News of a task, for the one who made it.
    pub(super) fn task_noted(&mut self, serial: u64, said: &[u8], params: &Params<'_>) {
        let Some(id) = params.task_id().and_then(Raw::text) else { return };
        if let Some(task) = self.tasks.by_id.get(&id).filter(|task| task.serial == serial && task.era == Era::Handshake)
        {
            let client = task.client;
            self.out.push(Action::TellClient { client, message: patch(said, &mut []), about: None, said: Said::Other });
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
