//! Search mode: three tools to search, describe and call, instead of the whole list.
//! A tool that is called this way passes the same guards under its own name.

use std::time::Instant;

use serde_json::{Value, json};

use super::{Client, Era, Gateway, Outcome, dispatch::ClientRequest, messages};
use crate::{
    json::Raw,
    mcp::List,
    message,
    message::{Message, pick},
};

const SEARCH: &str = "search_tools";
const DESCRIBE: &str = "describe_tool";
const CALL: &str = "call_tool";

/// How many words of a query are used; further ones are ignored.
const QUERY_WORDS_MAX: usize = 32;
/// How many tools one page of a search names; `nextCursor` asks for the next page.
const FOUND_MAX: usize = 20;
/// How much of a description a search result shows.
const DESCRIPTION_MAX: usize = 200;

pub(super) const INSTRUCTIONS: &str = "Many tools are behind this server. Find some with `search_tools`, read how one is \
    used with `describe_tool`, and call it with `call_tool`.";

/// The definitions of the three tools, as elements of a list.
pub(super) const DEFINITIONS: &str = concat!(
    r#"{"name":"search_tools","description":"Find tools by words of what they do or how they are called. Returns names and short descriptions, best first, a page at a time: pass `nextCursor` as `cursor` for the next page.","inputSchema":{"type":"object","properties":{"query":{"type":"string","description":"Some words; none lists everything"},"cursor":{"type":"string","description":"The nextCursor of the page before"}}},"annotations":{"readOnlyHint":true,"openWorldHint":false}},"#,
    r#"{"name":"describe_tool","description":"Read the whole definition of a tool that a search found: its description and the schema of its arguments.","inputSchema":{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]},"annotations":{"readOnlyHint":true,"openWorldHint":false}},"#,
    r#"{"name":"call_tool","description":"Call a tool that a search found. Read its definition first: the arguments must fit its schema.","inputSchema":{"type":"object","properties":{"name":{"type":"string"},"arguments":{"type":"object"}},"required":["name"]}}"#,
);

pub(super) fn is_ours(name: &str) -> bool {
    [SEARCH, DESCRIBE, CALL].contains(&name)
}

/// The offset of a page of search results.
fn offset(cursor: Option<Raw<'_>>) -> Result<usize, String> {
    let Some(cursor) = cursor.filter(|cursor| cursor.get() != "null") else { return Ok(0) };
    let offset = cursor.text().and_then(|text| text.parse().ok());
    offset.ok_or_else(|| "This cursor is not valid: search again without a cursor.".to_owned())
}

impl Gateway {
    pub(super) fn search_requested(&mut self, request: ClientRequest<'_>, name: &str, now: Instant) {
        let arguments = request.params.arguments();
        // The arguments name the tool that is called, so guards must read them the same way as the backend.
        if let Some(member) = arguments.and_then(|arguments| message::doubled(arguments, |_| false)) {
            let words = format!("`{}` is there twice, or with other capitalisation", messages::cut(&member, 50));
            return self.unknown(&request, words, Some(name));
        }
        if name == CALL {
            return self.call_through(request, now);
        }
        let member = if name == SEARCH { "query" } else { "name" };
        let word = arguments.and_then(|raw| pick(raw, [member])).and_then(|[word]| word?.text()).unwrap_or_default();
        let cursor = arguments.and_then(|raw| pick(raw, ["cursor"])).and_then(|[cursor]| cursor);
        let answer = match name {
            SEARCH => offset(cursor).map(|offset| self.search(request.reply_to.client, &word, offset)),
            _ => self.describe(request.reply_to.client, &word),
        };
        let era = request.reply_to.era;
        let result = match answer {
            Ok(found) => {
                let text = found.to_string();
                let mut result: Value =
                    json!({"content": [{"type": "text", "text": text}], "structuredContent": found});
                if era == Era::Stateless {
                    result["resultType"] = json!("complete");
                }
                result.to_string()
            }
            Err(words) => messages::tool_result(&words, true, era, None),
        };
        self.answer_result(&request.reply_to, &result);
        self.report_refused(request.reply_to.client, request.method, Some(name.to_owned()), None, Outcome::Answered);
    }

    /// Best first: a word in the name counts more than one in the description. The order is the same for each page
    /// unless the catalogue changes.
    fn search(&self, client: Client, query: &str, offset: usize) -> Value {
        self.catalogue.see(List::Tools);
        let view = self.catalogue.view(self.clients[&client].view());
        let words: Vec<String> = query.split_whitespace().take(QUERY_WORDS_MAX).map(str::to_lowercase).collect();
        let mut found: Vec<(usize, u32, String)> = Vec::new();
        for index in view.shows(List::Tools) {
            let entry = self.catalogue.entry(List::Tools, *index);
            let picked = entry.own_definition().and_then(|raw| pick(raw, ["description"]));
            let description = picked.and_then(|[text]| text?.text()).unwrap_or_default();
            let (name, lower) = (entry.shown.to_lowercase(), description.to_lowercase());
            let score: usize = words
                .iter()
                .map(|word| 3 * usize::from(name.contains(word.as_str())) + usize::from(lower.contains(word.as_str())))
                .sum();
            if score > 0 || words.is_empty() {
                found.push((score, *index, messages::cut(description.trim(), DESCRIPTION_MAX)));
            }
        }
        found.sort_by_key(|(score, index, _)| (std::cmp::Reverse(*score), *index));
        let end = offset.saturating_add(FOUND_MAX);
        let more = found.len().saturating_sub(end);
        let tools: Vec<Value> = found
            .into_iter()
            .skip(offset)
            .take(FOUND_MAX)
            .map(|(_, index, description)| {
                json!({"name": &*self.catalogue.entry(List::Tools, index).shown, "description": description})
            })
            .collect();
        let mut found = json!({"tools": tools, "more": more});
        if more > 0 {
            found["nextCursor"] = json!(end.to_string());
        }
        found
    }

    fn describe(&self, client: Client, name: &str) -> Result<Value, String> {
        let view = self.catalogue.view(self.clients[&client].view());
        let found = self.catalogue.find(List::Tools, name).filter(|(index, _)| view.sees(List::Tools, *index));
        match found.and_then(|(_, entry)| serde_json::from_slice(&entry.definition()).ok()) {
            Some(definition) => Ok(definition),
            None => Err(format!("No tool is named `{}`: search again.", messages::cut(name, 100))),
        }
    }

    /// Routes the call that is inside.
    fn call_through(&mut self, request: ClientRequest<'_>, now: Instant) {
        let inner = request.params.arguments().and_then(|raw| pick(raw, ["name", "arguments"]));
        let (Some([Some(name), arguments]), Some(outer)) = (inner, request.params.arguments()) else {
            return self.unknown(&request, "`arguments` lacks `name`".into(), Some(CALL));
        };
        if name.text().is_none_or(|name| is_ours(&name)) {
            return self.unknown(&request, "this tool cannot be called through itself".into(), Some(CALL));
        }
        let outer_name = request.params.name().expect("it was found by it");
        let arguments = arguments.map_or("{}", Raw::get);
        let mut edits =
            [(message::place(request.said, outer_name), name.get()), (message::place(request.said, outer), arguments)];
        let said = message::patch(request.said, &mut edits);
        if let Ok(Message::Request { id, method, params }) = message::parse_again(&said) {
            let ClientRequest { reply_to, declared, checked, .. } = request;
            let (said, method, params) = (&said[..], &*method, &params);
            self.route(ClientRequest { reply_to, said, id, method, params, declared, checked }, now);
        }
    }
}
