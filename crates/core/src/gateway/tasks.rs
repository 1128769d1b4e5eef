//! Tasks: a client asks for a task under a handle, and the backend that works on it knows it by its own id.
//!
//! A handle names the backend, the connection and the backend's own id, so handles of different backends and connections
//! never collide. It gives no right to anything: each task belongs to the client that had it made.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    rc::Rc,
    time::Instant,
};

use bytes::Bytes;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::{
    Action, Client, Era, Gateway, Said,
    calls::{CallKind, ReplyTo},
    dispatch::ClientRequest,
    messages,
    messages::Failure,
    opening::OwnRequest,
    saved::{SavedTask, SavedTasks},
    slots::SlotKey,
};
use crate::{
    json::Raw,
    mcp::{TASKS_PREFIX, meta, method},
    message,
    message::{Message, Params, patch, pick},
};

/// How many tasks are remembered. One more makes the gateway forget the oldest of the same client, or else the oldest
/// of all.
const TASKS_MAX: usize = 4096;
/// How many tasks of one client are remembered; one more makes the gateway forget its oldest.
const TASKS_OF_CLIENT_MAX: usize = 256;
/// The longest id that a backend may give. A task with a longer one cannot be asked for.
const OWN_ID_MAX: usize = 1 << 10;

/// The beginning of every cursor of the gateway.
const CURSOR_MARK: &str = "outlast.tasks.";
/// The beginning of every handle, with the number of its format.
const HANDLE_MARK: &str = "outlast.task1.";

#[derive(Debug, Default)]
pub(super) struct Tasks {
    /// Distinguishes the handles of this run from those of earlier runs.
    run: u32,
    by_handle: FxHashMap<String, Task>,
    /// The oldest first.
    order: VecDeque<String>,
    /// Task lists that are not complete, by a number of their own.
    lists: FxHashMap<u64, Listing>,
}

/// The client that had a task made, and alone may ask for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TaskOwner {
    Session(Client),
    /// Of the stateless era, by name.
    Caller(String),
}

#[derive(Debug)]
struct Task {
    task_owner: TaskOwner,
    /// The backend's own id, as JSON.
    own: Rc<str>,
    /// The tool that made it, as clients see it.
    shown: Option<Rc<str>>,
    slot: SlotKey,
    serial: u64,
    /// Rises with each task. A page of a list continues after the last number of the page before.
    number: u64,
}

/// A task list, until each backend has answered.
#[derive(Debug)]
struct Listing {
    reply_to: ReplyTo,
    /// Requests that are not answered, and the number of the task of each.
    open: FxHashMap<u64, u64>,
    /// The answers, in the order in which the tasks were made.
    found: BTreeMap<u64, String>,
    /// The number after which the next page begins.
    next: Option<u64>,
}

impl Gateway {
    /// The handle of a task of this link.
    fn task_handle(&self, serial: u64, own: &str) -> String {
        let name = self.links.get(&serial).map_or("", |link_state| self.backends.name(link_state.id().backend));
        // The backend's id may contain dots, so the name before it must not.
        let name = name.replace('%', "%25").replace('.', "%2e");
        format!("{HANDLE_MARK}{:x}.{serial}.{name}.{own}", self.tasks.run)
    }

    /// The answer to a call of a client, with handles instead of the backend's ids; nothing if it names no task. A task that
    /// the call made belongs to its client from here on. The failure is why its client could not ask for it.
    pub(super) fn with_handles(
        &mut self,
        serial: u64,
        key: u64,
        said: &[u8],
        result: Raw<'_>,
    ) -> Result<Option<Bytes>, Box<Failure>> {
        let call = &self.calls[&key];
        let Some(reply_to) = &call.reply_to else { return Ok(None) };
        let is_made = call.task || reply_to.era == Era::Stateless && call.kind == CallKind::Tool;
        let is_about = call.method.starts_with(TASKS_PREFIX);
        if !(is_made || is_about || !self.tasks.by_handle.is_empty())
            || memchr::memmem::find(result.get().as_bytes(), b"\"taskId\"").is_none()
        {
            return Ok(None);
        }
        let [task, own, meta] = pick(result, ["task", "taskId", "_meta"]).unwrap_or_default();
        let inner = task.and_then(|task| pick(task, ["taskId"])).and_then(|[id]| id);
        let mut edits = Vec::new();
        for id in [inner, own].into_iter().flatten().filter(|_| is_made || is_about) {
            let Some(text) = id.text() else { continue };
            let handle = self.task_handle(serial, &text);
            edits.push((message::place(said, id), message::quote(&handle)));
        }
        if let Some(made) = inner.or(own).filter(|_| is_made)
            && let Some(id) = made.text()
        {
            let (slot, client, era) = (call.slot, reply_to.client, reply_to.era);
            let backend = self.backends.name(slot.backend).to_owned();
            let handle = self.task_handle(serial, &id);
            if let Some(task_owner) = self.task_owner(client, era) {
                if id.len() > OWN_ID_MAX {
                    return Err(Box::new(Failure::long_task(&backend, OWN_ID_MAX)));
                }
                if self.tasks.by_handle.get(&handle).is_some_and(|task| task.task_owner != task_owner) {
                    return Err(Box::new(Failure::same_task(&backend)));
                }
                let own = message::quote(&id).into();
                let shown = self.calls[&key].shown.clone();
                let task = Task { task_owner, own, shown, slot, serial, number: self.ids.number() };
                self.tasks.insert(handle, task);
            }
        }
        edits.extend(self.related_handle(serial, said, meta));
        Ok(patched(said, &edits))
    }

    /// A request or a notification of a backend, with handles instead of its own ids; nothing if it names no task that is
    /// known here. Ids that its client made are left alone.
    pub(super) fn said_with_handles(&self, serial: u64, said: &[u8], message: &Message<'_>) -> Option<Bytes> {
        if self.tasks.by_handle.is_empty() {
            return None;
        }
        let (Message::Request { params, .. } | Message::Notification { params, .. }) = message else { return None };
        let mut edits = Vec::new();
        if let Message::Notification { .. } = message
            && let Some(id) = params.task_id()
            && let Some(text) = id.text()
        {
            edits.push((message::place(said, id), message::quote(&self.task_handle(serial, &text))));
        }
        edits.extend(self.related_handle(serial, said, params.meta()));
        patched(said, &edits)
    }

    fn related_handle(&self, serial: u64, said: &[u8], meta: Option<Raw<'_>>) -> Option<(Range<usize>, String)> {
        let id = related(meta)?;
        let handle = self.task_handle(serial, &id.text()?);
        let is_known = self.tasks.by_handle.contains_key(&handle);
        is_known.then(|| (message::place(said, id), message::quote(&handle)))
    }

    /// A message of a client with the backend's own id of the task that it names; nothing if it names none. The error
    /// is a handle of no task of this client on this link.
    pub(super) fn with_own_id(
        &self,
        client: Client,
        era: Era,
        serial: u64,
        said: &[u8],
        meta: Option<Raw<'_>>,
    ) -> Result<Option<Bytes>, String> {
        let Some(id) = related(meta) else { return Ok(None) };
        let handle = id.text().unwrap_or_default();
        let is_its =
            |task: &&Task| task.serial == serial && self.task_owner(client, era).as_ref() == Some(&task.task_owner);
        match self.tasks.by_handle.get(&handle).filter(is_its) {
            Some(task) => Ok(Some(patch(said, &mut [(message::place(said, id), &*task.own)]))),
            None => Err(handle),
        }
    }

    fn task_owner(&self, client: Client, era: Era) -> Option<TaskOwner> {
        Some(match era {
            Era::Handshake => TaskOwner::Session(client),
            Era::Stateless => TaskOwner::Caller(self.clients.get(&client)?.who().name.clone()),
        })
    }

    pub(super) fn task_requested(&mut self, request: ClientRequest<'_>, now: Instant) {
        let handle = request.params.task_id().and_then(Raw::text).unwrap_or_default();
        let task_owner = self.task_owner(request.reply_to.client, request.reply_to.era);
        let task = self.tasks.by_handle.get(&handle).filter(|task| Some(&task.task_owner) == task_owner.as_ref());
        // Tasks end with the process that made them.
        let task = task.filter(|task| self.links.get(&task.serial).is_some_and(|link| link.is_ready()));
        let Some(task) = task else { return self.unknown(&request, no_task(&handle), None) };
        let (slot, own) = (task.slot, task.own.clone());
        // A task may always be cancelled.
        let shown = task.shown.clone().filter(|_| request.method != method::TASKS_CANCEL);
        let role = self.clients.get(&request.reply_to.client).and_then(|client_state| client_state.role());
        let backend = self.backends.name(slot.backend);
        match shown.as_ref().and_then(|shown| self.task_refused(role, backend, shown)) {
            Some(failure) => self.refused_of(&request, slot.backend, &failure),
            None => self.send_to(request, slot, own, shown, now),
        }
    }

    /// A client asks for its tasks. Backends do not know which client had a task made, so each of its tasks is asked for by
    /// its id. The stateless era has no such list.
    pub(super) fn task_list_requested(&mut self, request: ClientRequest<'_>, now: Instant) {
        if request.reply_to.era == Era::Stateless {
            let failure = Failure::method_unknown("the stateless era has no list of tasks".into());
            return self.refuse(&request.reply_to, false, &failure);
        }
        let after = match request.params.cursor().filter(|cursor| cursor.get() != "null") {
            None => 0,
            Some(cursor) => {
                let text = cursor.text().unwrap_or_default();
                let Some(after) = text.strip_prefix(CURSOR_MARK).and_then(|number| number.parse().ok()) else {
                    let words = "This cursor is not valid: list again without a cursor.";
                    return self.answer_error(&request.reply_to, -32602, words, None);
                };
                after
            }
        };
        let task_owner = TaskOwner::Session(request.reply_to.client);
        let own = self.tasks.by_handle.values().filter(|task| task.task_owner == task_owner && task.number > after);
        let mut own: Vec<(u64, u64, Rc<str>)> = own.map(|task| (task.number, task.serial, task.own.clone())).collect();
        own.sort_unstable();
        let page = self.settings.limits.page.max(1);
        let next = own.get(page).map(|_| own[page - 1].0);
        own.truncate(page);
        let list = self.ids.number();
        let mut asked_for = FxHashMap::default();
        for (number, serial, id) in own {
            let params = format!(r#""taskId":{id}"#);
            if let Some(key) =
                self.send_own_request(serial, OwnRequest::Task(list), method::TASKS_GET, &params, Era::Handshake, now)
            {
                asked_for.insert(key, number);
            }
        }
        let listing = Listing { reply_to: request.reply_to, open: asked_for, found: BTreeMap::new(), next };
        self.tasks.lists.insert(list, listing);
        self.task_list_done(list);
    }

    /// A backend answered the request about one task. A task that it no longer knows is left out.
    pub(super) fn task_listed(&mut self, list: u64, key: u64, result: Option<Raw<'_>>, _now: Instant) {
        let Some(number) = self.tasks.lists.get_mut(&list).and_then(|listing| listing.open.remove(&key)) else {
            return;
        };
        let handle = self.tasks.by_handle.iter().find(|(_, task)| task.number == number).map(|(handle, _)| handle);
        if let (Some(task), Some(handle)) = (result, handle) {
            let [own] = pick(task, ["taskId"]).unwrap_or_default();
            let handle = message::quote(handle);
            let text = task.get().as_bytes();
            let mut edits: Vec<_> = own.map(|own| (message::place(text, own), handle.as_str())).into_iter().collect();
            let shown = patch(text, &mut edits);
            let shown = String::from_utf8_lossy(shown.trim_ascii_end()).into_owned();
            self.tasks.lists.get_mut(&list).expect("found above").found.insert(number, shown);
        }
        self.task_list_done(list);
    }

    fn task_list_done(&mut self, list: u64) {
        if self.tasks.lists.get(&list).is_none_or(|listing| !listing.open.is_empty()) {
            return;
        }
        let listing = self.tasks.lists.remove(&list).expect("seen above");
        let tasks: Vec<String> = listing.found.into_values().collect();
        let next = listing.next.map_or_else(String::new, |next| format!(r#","nextCursor":"{CURSOR_MARK}{next}""#));
        let result = format!(r#"{{"tasks":[{}]{next}}}"#, tasks.join(","));
        let result = if result.contains('\n') { result.replace(['\n', '\r'], " ") } else { result };
        self.answer_result(&listing.reply_to, &result);
    }

    /// Drops the lists of these requests. True if there was one.
    pub(super) fn drop_task_lists(&mut self, is_it: impl Fn(&ReplyTo) -> bool) -> bool {
        let gone: Vec<u64> =
            self.tasks.lists.iter().filter(|(_, list)| is_it(&list.reply_to)).map(|(key, _)| *key).collect();
        for key in &gone {
            let listing = self.tasks.lists.remove(key).expect("listed above");
            self.forget(&listing.reply_to);
        }
        !gone.is_empty()
    }

    /// Forwards the status of a task to the client that had it made.
    pub(super) fn task_noted(&mut self, serial: u64, said: &[u8], params: &Params<'_>) {
        if let Some(client) = self.session_of(serial, params.task_id()) {
            self.out.push(Action::TellClient { client, message: patch(said, &mut []), about: None, said: Said::Other });
        }
    }

    /// The client whose task a backend's request names.
    pub(super) fn task_named_in(&self, serial: u64, params: &Params<'_>) -> Option<Client> {
        self.session_of(serial, related(params.meta()))
    }

    /// The session that had a task of this link made.
    fn session_of(&self, serial: u64, handle: Option<Raw<'_>>) -> Option<Client> {
        match self.tasks.by_handle.get(&handle?.text()?).filter(|task| task.serial == serial)?.task_owner {
            TaskOwner::Session(client) => Some(client),
            TaskOwner::Caller(_) => None,
        }
    }
}

impl Tasks {
    pub(super) fn new(random: u64) -> Tasks {
        // Half of it, so that a handle reveals little of the random numbers that follow.
        Tasks { run: (random >> 32) as u32, ..Tasks::default() }
    }

    /// Without lists: those are waited for.
    pub(super) fn save(&self) -> SavedTasks {
        let known = self.order.iter().filter_map(|handle| Some((handle, self.by_handle.get(handle)?)));
        let save = |(handle, task): (&String, &Task)| SavedTask {
            handle: handle.clone(),
            owner: task.task_owner.clone(),
            own: task.own.to_string(),
            shown: task.shown.as_deref().map(str::to_owned),
            slot: task.slot,
            serial: task.serial,
            number: task.number,
        };
        SavedTasks { run: self.run, tasks: known.map(save).collect() }
    }

    pub(super) fn restore(saved: SavedTasks) -> Tasks {
        let mut tasks = Tasks { run: saved.run, ..Tasks::default() };
        for SavedTask { handle, owner: task_owner, own, shown, slot, serial, number } in saved.tasks {
            let shown = shown.map(Into::into);
            tasks.insert(handle, Task { task_owner, own: own.into(), shown, slot, serial, number });
        }
        tasks
    }

    fn insert(&mut self, handle: String, task: Task) {
        let task_owner = task.task_owner.clone();
        if self.by_handle.insert(handle.clone(), task).is_some() {
            return;
        }
        self.order.push_back(handle);
        let is_own = |handle: &&String| self.by_handle[*handle].task_owner == task_owner;
        let own = self.order.iter().filter(is_own).count();
        if own > TASKS_OF_CLIENT_MAX || self.order.len() > TASKS_MAX {
            let oldest = self.order.iter().position(|handle| is_own(&handle)).filter(|_| own > 1).unwrap_or(0);
            if let Some(handle) = self.order.remove(oldest) {
                self.by_handle.remove(&handle);
            }
        }
    }

    pub(super) fn lists(&self) -> usize {
        self.lists.len()
    }

    pub(super) fn replies(&self) -> impl Iterator<Item = &ReplyTo> {
        self.lists.values().map(|listing| &listing.reply_to)
    }

    /// Tasks end with the process that works on them.
    pub(super) fn forget_link(&mut self, serial: u64) {
        self.forget_where(|task| task.serial == serial);
    }

    pub(super) fn forget_client(&mut self, client: Client) {
        let task_owner = TaskOwner::Session(client);
        self.forget_where(|task| task.task_owner == task_owner);
    }

    fn forget_where(&mut self, is_gone: impl Fn(&Task) -> bool) {
        if self.by_handle.is_empty() {
            return;
        }
        self.by_handle.retain(|_, task| !is_gone(task));
        let by_handle = &self.by_handle;
        self.order.retain(|handle| by_handle.contains_key(handle));
    }
}

/// The id of the task that a message says it belongs to.
fn related(meta: Option<Raw<'_>>) -> Option<Raw<'_>> {
    let [task] = pick(meta?, [meta::RELATED_TASK])?;
    let [id] = pick(task?, ["taskId"])?;
    id
}

fn patched(said: &[u8], edits: &[(Range<usize>, String)]) -> Option<Bytes> {
    let mut edits: Vec<(Range<usize>, &str)> = edits.iter().map(|(at, with)| (at.clone(), with.as_str())).collect();
    (!edits.is_empty()).then(|| patch(said, &mut edits))
}

pub(super) fn no_task(handle: &str) -> String {
    format!("there is no task `{}`", messages::cut(handle, 200))
}
