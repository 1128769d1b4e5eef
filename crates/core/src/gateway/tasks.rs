//! Tasks: whoever made one is told how it goes, by the backend that works on it.

use super::*;
use crate::{
    json::Raw,
    message::{Params, patch, pick},
};

use dispatch::Asked;
use opening::Private;
use words::Failure;

/// How many tasks are remembered. Beyond it the oldest of the same client is forgotten, or else the oldest of all; it is then
/// unknown to its client.
const TASKS_MAX: usize = 4096;
/// The same of one client, whose oldest is forgotten then.
const TASKS_OF_CLIENT_MAX: usize = 256;

/// What our own cursors begin with.
const CURSOR_MARK: &str = "outlast.tasks.";

#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_id: FxHashMap<(Maker, String), Task>,
    /// The same by the link that works on each.
    by_link: FxHashMap<(u64, String), Maker>,
    order: VecDeque<(Maker, String)>,
}

/// Who had a task made, and alone may ask for it: ids of one client mean nothing to another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Maker {
    Session(Client),
    /// Of the stateless era, by name.
    Caller(String),
}

#[derive(Debug)]
struct Task {
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
    /// A call made a task, if its result says so. False: its id is that of another task, of the same client on another link or
    /// of another client on the same link, and nothing could tell the two apart.
    pub(super) fn note_task(&mut self, call: &Call, serial: u64, result: Raw<'_>) -> bool {
        let Some(whom) = &call.whom else { return true };
        if memchr::memmem::find(result.get().as_bytes(), b"\"taskId\"").is_none() {
            return true;
        }
        let Some([task, own]) = pick(result, ["task", "taskId"]) else { return true };
        let inner = task.and_then(|task| pick(task, ["taskId"])).and_then(|[id]| id);
        let Some(id) = inner.or(own).and_then(Raw::text) else { return true };
        let Some(maker) = self.maker(whom.client, whom.era) else { return true };
        let by_maker = self.tasks.by_id.get(&(maker.clone(), id.clone()));
        let by_link = self.tasks.by_link.get(&(serial, id.clone()));
        if by_maker.is_some_and(|task| task.serial != serial) || by_link.is_some_and(|known| *known != maker) {
            return false;
        }
        let task = Task { place: call.place, serial, number: self.number() };
        self.tasks.insert(maker, id, task);
        true
    }

    fn maker(&self, client: Client, era: Era) -> Option<Maker> {
        Some(match era {
            Era::Handshake => Maker::Session(client),
            Era::Stateless => Maker::Caller(self.guests.get(&client)?.who.name.clone()),
        })
    }

    fn task_of(&self, whom: &Whom, id: &str) -> Option<&Task> {
        self.tasks.by_id.get(&(self.maker(whom.client, whom.era)?, id.to_owned()))
    }

    pub(super) fn task_asked(&mut self, asked: Asked<'_>, now: Instant) {
        let id = asked.params.task_id().and_then(Raw::text).unwrap_or_default();
        match self.task_of(&asked.whom, &id).map(|task| (task.place, task.serial)) {
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
        let maker = Maker::Session(asked.whom.client);
        let own = self.tasks.by_id.iter().filter(|((of, _), task)| *of == maker && task.number > after);
        let mut own: Vec<(u64, u64, String)> =
            own.map(|((_, id), task)| (task.number, task.serial, id.clone())).collect();
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
        if let Some(Maker::Session(client)) = self.tasks.by_link.get(&(serial, id)) {
            let client = *client;
            self.out.push(Action::TellClient { client, message: patch(said, &mut []), about: None, said: Said::Other });
        }
    }

    /// The client whose task a backend's request names.
    pub(super) fn task_named_in(&self, serial: u64, params: &Params<'_>) -> Option<Client> {
        let [related] = pick(params.meta()?, ["io.modelcontextprotocol/related-task"])?;
        let [id] = pick(related?, ["taskId"])?;
        match self.tasks.by_link.get(&(serial, id?.text()?))? {
            Maker::Session(client) => Some(*client),
            Maker::Caller(_) => None,
        }
    }

    pub(super) fn lose_tasks(&mut self, serial: u64) {
        self.tasks.forget_where(|_, task| task.serial == serial);
    }

    pub(super) fn forget_tasks(&mut self, client: Client) {
        let maker = Maker::Session(client);
        self.tasks.forget_where(|of, _| *of == maker);
    }
}

impl Tasks {
    fn insert(&mut self, maker: Maker, id: String, task: Task) {
        self.by_link.insert((task.serial, id.clone()), maker.clone());
        if self.by_id.insert((maker.clone(), id.clone()), task).is_some() {
            return;
        }
        self.order.push_back((maker.clone(), id));
        let own = self.order.iter().filter(|(of, _)| *of == maker).count();
        if own > TASKS_OF_CLIENT_MAX || self.order.len() > TASKS_MAX {
            let oldest = self.order.iter().position(|(of, _)| *of == maker).filter(|_| own > 1).unwrap_or(0);
            if let Some(key) = self.order.remove(oldest)
                && let Some(task) = self.by_id.remove(&key)
            {
                self.by_link.remove(&(task.serial, key.1));
            }
        }
    }

    fn forget_where(&mut self, gone: impl Fn(&Maker, &Task) -> bool) {
        if self.by_id.is_empty() {
            return;
        }
        self.by_id.retain(|(maker, _), task| !gone(maker, task));
        let by_id = &self.by_id;
        self.order.retain(|key| by_id.contains_key(key));
        self.by_link.retain(|(serial, id), maker| {
            by_id.get(&(maker.clone(), id.clone())).is_some_and(|task| task.serial == *serial)
        });
    }
}
