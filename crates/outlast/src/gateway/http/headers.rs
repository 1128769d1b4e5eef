//! Headers that repeat parts of a message, so that proxies need not read its body.

use std::mem;

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use hyper::{
    HeaderMap,
    header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue},
};
use outlast_core::{
    json::Raw,
    mcp::{self, PAGE_ITEMS_MAX, header, meta, method},
    message::{self, Message, Params, Walk},
};
use serde_json::Value;

use crate::gateway::mirrored::{self, Budget, Mirror, Mirrors};

pub(super) const SESSION: HeaderName = HeaderName::from_static(header::SESSION_ID);
pub(super) const VERSION: HeaderName = HeaderName::from_static(header::PROTOCOL_VERSION);
pub(super) const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");
const METHOD: HeaderName = HeaderName::from_static(header::METHOD);
const NAME: HeaderName = HeaderName::from_static(header::NAME);

/// For every POST.
pub(super) fn of_post() -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
    headers
}

/// The revision of a request of the stateless era.
pub(super) fn stated_version(params: &Params<'_>) -> Option<HeaderValue> {
    let version = message::pick_text(params.meta()?, meta::PROTOCOL_VERSION)?;
    HeaderValue::try_from(version).ok()
}

/// The headers that the stateless era requires for a request or notification, besides its version.
pub(super) fn describe(headers: &mut HeaderMap, method: &str, params: &Params<'_>, tools: &ToolHeaders) {
    insert(headers, METHOD, method);
    let Some(name) = mcp::repeated_name(method, params).and_then(Raw::text) else { return };
    insert(headers, NAME, &name);
    if method == method::TOOLS_CALL {
        tools.describe(headers, &name, params.arguments());
    }
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::try_from(sentinel(value)) {
        headers.insert(name, value);
    }
}

/// The value itself if a header can hold it, otherwise base64 between marks.
fn sentinel(value: &str) -> String {
    let is_holdable = value.bytes().all(|byte| matches!(byte, b' '..=b'~')) && value.trim_matches(' ') == value;
    let is_marked = value.starts_with("=?base64?") && value.ends_with("?=");
    if is_holdable && !is_marked {
        return value.to_owned();
    }
    format!("=?base64?{}?=", BASE64.encode(value.as_bytes()))
}

/// Arguments of tools that their schemas require in headers, learned from the lists in the answers.
#[derive(Debug, Default)]
pub(super) struct ToolHeaders {
    by_tool: Mirrors,
    /// The list that is being read. It replaces the former one when its last page has arrived.
    next: Mirrors,
    budget: Budget,
}

/// A page of the list of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Page {
    First,
    Later,
}

impl ToolHeaders {
    /// The list of tools that a backend is known to have.
    #[cfg(unix)]
    pub(super) fn of_list<'a>(tools: impl IntoIterator<Item = &'a [u8]>) -> ToolHeaders {
        let mut budget = Budget::default();
        let by_tool = tools.into_iter().filter_map(|tool| budget.mirrors_of(tool)).collect();
        ToolHeaders { by_tool, ..ToolHeaders::default() }
    }

    /// A whole answer. After an error the former list stays valid.
    pub(super) fn learn_answer(&mut self, page: Page, answer: &[u8], walk: Option<&Walk>) {
        let parsed = walk.map_or_else(|| message::parse(answer), |walk| walk.read(answer));
        let Ok(Message::Response { result: Some(result), .. }) = parsed else { return };
        let Some([tools, cursor]) = message::pick(result, ["tools", "nextCursor"]) else { return };
        if page == Page::First {
            self.next.clear();
            self.budget = Budget::default();
        }
        // Most lists mention no header, and their tools are not read.
        if mirrored::may_have_any(answer) {
            let tools = tools.and_then(|tools| tools.first_elements(PAGE_ITEMS_MAX)).unwrap_or_default().0;
            for (name, mirrors) in tools.into_iter().filter_map(|tool| self.budget.mirrors_of(tool.get().as_bytes())) {
                // A call of a new tool may be sent before the last page arrives.
                self.by_tool.insert(name.clone(), mirrors.clone());
                self.next.insert(name, mirrors);
            }
        }
        if cursor.and_then(Raw::text).is_none() {
            self.by_tool = mem::take(&mut self.next);
        }
    }

    fn describe(&self, headers: &mut HeaderMap, tool: &str, arguments: Option<Raw<'_>>) {
        let (Some(mirrors), Some(arguments)) = (self.by_tool.get(tool), arguments) else { return };
        for (Mirror { header, .. }, value) in mirrors.iter().zip(mirrored::values(arguments, mirrors)) {
            let text = match value {
                Value::String(text) => text,
                Value::Bool(_) | Value::Number(_) => value.to_string(),
                _ => continue,
            };
            insert(headers, header.clone(), &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(line: &str, tools: &ToolHeaders) -> Vec<(String, String)> {
        let Ok(Message::Request { method, params, .. }) = message::parse(line.as_bytes()) else { panic!("{line}") };
        let mut headers = HeaderMap::new();
        describe(&mut headers, &method, &params, tools);
        headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
    }

    #[test]
    fn headers_contain_the_method_and_the_name() {
        let table = [
            (r#"{"id":1,"method":"tools/list"}"#, vec![(header::METHOD, "tools/list")]),
            (
                r#"{"id":1,"method":"tools/call","params":{"name":"echo"}}"#,
                vec![(header::METHOD, "tools/call"), (header::NAME, "echo")],
            ),
            (
                r#"{"id":1,"method":"resources/read","params":{"uri":"file:///é"}}"#,
                vec![(header::METHOD, "resources/read"), (header::NAME, "=?base64?ZmlsZTovLy/DqQ==?=")],
            ),
            (
                r#"{"id":1,"method":"tasks/get","params":{"taskId":"t 1"}}"#,
                vec![(header::METHOD, "tasks/get"), (header::NAME, "t 1")],
            ),
        ];
        for (line, expected) in table {
            let expected: Vec<_> = expected.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
            assert_eq!(described(line, &ToolHeaders::default()), expected, "{line}");
        }
    }

    #[test]
    fn only_values_that_a_header_cannot_hold_are_encoded() {
        let table = [
            ("plain text", "plain text"),
            ("", ""),
            (" led", "=?base64?IGxlZA==?="),
            ("a\nb", "=?base64?YQpi?="),
            ("=?base64?YQ==?=", "=?base64?PT9iYXNlNjQ/WVE9PT89?="),
        ];
        for (value, expected) in table {
            assert_eq!(sentinel(value), expected);
        }
    }

    #[test]
    fn arguments_are_mirrored_as_the_schema_requires() {
        let mut tools = ToolHeaders::default();
        let learn = |tools: &mut ToolHeaders, answer: &[u8]| tools.learn_answer(Page::First, answer, None);
        learn(
            &mut tools,
            br#"{"id":1,"result":{"tools":[{"name":"t","inputSchema":{"properties":{
                "region":{"type":"string","x-mcp-header":"Region"},"deep":{"properties":{"n":{"x-mcp-header":"N"}}},
                "list":{"items":{"x-mcp-header":"Never"}},"bad":{"x-mcp-header":"no token"},"plain":{}}}}]}}"#,
        );
        let call = r#"{"id":1,"method":"tools/call","params":{"name":"t",
            "arguments":{"region":"eu","deep":{"n":7},"plain":"x","list":["y"],"bad":"z"}}}"#;
        let mut headers = described(call, &tools);
        headers.retain(|(name, _)| name.starts_with("mcp-param"));
        assert_eq!(headers, [("mcp-param-n".into(), "7".into()), ("mcp-param-region".into(), "eu".into())]);

        // The list stays as it was until all pages of the next one have arrived.
        let has_any =
            |tools: &ToolHeaders| described(call, tools).iter().any(|(name, _)| name.starts_with("mcp-param"));
        learn(&mut tools, br#"{"id":2,"error":{"code":-32603,"message":"x"}}"#);
        assert!(has_any(&tools));
        learn(&mut tools, br#"{"id":3,"result":{"tools":[{"name":"u","inputSchema":{}}],"nextCursor":"2"}}"#);
        assert!(has_any(&tools));
        tools.learn_answer(Page::Later, br#"{"id":4,"result":{"tools":[{"name":"t","inputSchema":{}}]}}"#, None);
        assert!(!has_any(&tools));
    }
}
