//! Arguments of tool calls that headers repeat for proxies, as the tool's schema requests (`x-mcp-header`): what clients of
//! the stateless era must send, and what HTTP backends of that era get. It does not check the headers.
//!
//! Backends decide what is in their schemas, and clients what is in the arguments, so the work for both is limited.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

use hyper::header::HeaderName;
use outlast_core::{
    gateway::{Backend, Gateway, Offer},
    json::Raw,
    mcp::header::PARAM_PREFIX,
};
use serde_json::Value;

const ANNOTATION: &str = "x-mcp-header";
/// Parameters of one tool that headers repeat; the rest is ignored.
const MIRRORS_MAX: usize = 32;
/// How deep such a parameter may be in the arguments; a deeper one is ignored.
const PATH_MAX: usize = 4;
/// Bytes of definitions of one list that are searched for such parameters; later tools have none.
const DEFINITIONS_MAX: usize = 1 << 20;
/// Longer arguments of such a tool are refused.
pub(super) const ARGUMENTS_MAX: usize = 4 << 20;

/// A parameter of a tool that a header repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirror {
    /// `mcp-param-…`
    pub(crate) header: HeaderName,
    /// Its path in the arguments.
    path: Vec<String>,
    /// Its schema says that it is a string, an integer or a boolean.
    pub(crate) is_plain: bool,
}

/// By the tool name that clients see.
pub type Mirrors = HashMap<String, Vec<Mirror>>;

/// Bytes of a list that may still be searched.
#[derive(Debug)]
pub struct Budget(usize);

impl Default for Budget {
    fn default() -> Budget {
        Budget(DEFINITIONS_MAX)
    }
}

impl Budget {
    /// A tool's name and its mirrored parameters, if it has any. An invalid annotation is ignored.
    pub fn mirrors_of(&mut self, tool: &[u8]) -> Option<(String, Vec<Mirror>)> {
        // Very few tools have one, so most definitions are not parsed.
        if !may_have_any(tool) {
            return None;
        }
        self.0 = self.0.checked_sub(tool.len())?;
        let tool = serde_json::from_slice::<Value>(tool).ok()?;
        let mut mirrors = Vec::new();
        collect(&tool["inputSchema"], &mut Vec::new(), &mut mirrors);
        let name = tool["name"].as_str()?.to_owned();
        (!mirrors.is_empty()).then_some((name, mirrors))
    }
}

/// Whether a definition, or a list of them, may have a mirrored parameter.
pub(crate) fn may_have_any(text: &[u8]) -> bool {
    memchr::memmem::find(text, ANNOTATION.as_bytes()).is_some()
}

/// Only nested `properties` count: a parameter in a conditional schema or in an array has no fixed path.
fn collect(schema: &Value, path: &mut Vec<String>, mirrors: &mut Vec<Mirror>) {
    let Some(properties) = schema["properties"].as_object().filter(|_| path.len() < PATH_MAX) else { return };
    for (name, property) in properties {
        path.push(name.clone());
        let header = property[ANNOTATION].as_str().filter(|header| !header.is_empty());
        if let Some(Ok(header)) = header.map(|header| HeaderName::try_from(format!("{PARAM_PREFIX}{header}")))
            && mirrors.len() < MIRRORS_MAX
        {
            let is_plain = matches!(property["type"].as_str(), Some("string" | "integer" | "boolean"));
            mirrors.push(Mirror { header, path: path.clone(), is_plain });
        }
        collect(property, path, mirrors);
        path.pop();
    }
}

/// The values of mirrored parameters in the arguments of a call, null if they are absent. Each level of the arguments is
/// read once.
pub(crate) fn values(arguments: Raw<'_>, mirrors: &[Mirror]) -> Vec<Value> {
    let mut values = vec![Value::Null; mirrors.len()];
    if arguments.get().len() > ARGUMENTS_MAX {
        return values;
    }
    let mut levels = vec![(arguments, 0, (0..mirrors.len()).collect::<Vec<usize>>())];
    while let Some((object, depth, wanted)) = levels.pop() {
        let mut by_name: BTreeMap<&str, (Vec<usize>, Option<Raw<'_>>)> = BTreeMap::new();
        for index in wanted {
            by_name.entry(&mirrors[index].path[depth]).or_default().0.push(index);
        }
        // The last of several members with one name counts.
        let _ = object.for_each_member(|name, value| {
            let name = name.plain().map(Cow::Borrowed).or_else(|| name.text().map(Cow::Owned));
            if let Some((_, found)) = name.and_then(|name| by_name.get_mut(&*name)) {
                *found = Some(value);
            }
        });
        for (indexes, found) in by_name.into_values() {
            let Some(found) = found else { continue };
            let (ends, goes_on): (Vec<usize>, Vec<usize>) =
                indexes.into_iter().partition(|index| mirrors[*index].path.len() == depth + 1);
            for index in ends {
                values[index] = value_of(found);
            }
            if !goes_on.is_empty() {
                levels.push((found, depth + 1, goes_on));
            }
        }
    }
    values
}

/// Only a value that a header can repeat is read as a whole.
fn value_of(found: Raw<'_>) -> Value {
    match found.get().as_bytes().first() {
        Some(b'{' | b'[') => Value::Array(Vec::new()),
        _ => serde_json::from_str(found.get()).unwrap_or_default(),
    }
}

/// The name of a header as the protocol writes it.
pub(crate) fn shown(header: &HeaderName) -> String {
    let word = |word: &str| {
        let (first, rest) = word.split_at(word.len().min(1));
        first.to_uppercase() + rest
    };
    header.as_str().split('-').map(word).collect::<Vec<_>>().join("-")
}

/// By backend and by the backend's own name of the tool. Usually empty.
#[derive(Debug, Default)]
pub(crate) struct MirrorsByBackend(BTreeMap<String, BTreeMap<String, Vec<Mirror>>>);

impl MirrorsByBackend {
    /// From the cached catalogues.
    pub(crate) fn of(kept: &BTreeMap<String, Offer>, backends: &[Backend]) -> MirrorsByBackend {
        let mut all = MirrorsByBackend::default();
        for (name, offer) in kept.iter().filter(|(name, _)| backends.iter().any(|backend| backend.name == **name)) {
            all.learn(name, offer);
        }
        all
    }

    /// Takes the new list of a backend. True if a mirrored argument changed.
    pub(crate) fn learn(&mut self, backend: &str, offer: &Offer) -> bool {
        let mut budget = Budget::default();
        let found: BTreeMap<String, Vec<Mirror>> =
            offer.tools.iter().filter_map(|tool| budget.mirrors_of(tool)).collect();
        if self.0.get(backend).map_or(found.is_empty(), |known| *known == found) {
            return false;
        }
        self.0.insert(backend.to_owned(), found);
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.values().all(BTreeMap::is_empty)
    }

    /// By the names that clients see.
    pub(crate) fn shown(&self, gateway: &Gateway) -> Mirrors {
        let mut shown = HashMap::new();
        if self.is_empty() {
            return shown;
        }
        for (name, backend, own) in gateway.tools() {
            if let Some(mirrors) = self.0.get(backend).and_then(|tools| tools.get(own)) {
                shown.insert(name.to_owned(), mirrors.clone());
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use outlast_core::json::Raw;
    use serde_json::json;

    use super::*;

    fn tool(schema: &Value) -> Vec<u8> {
        json!({"name": "t", "inputSchema": schema}).to_string().into_bytes()
    }

    #[test]
    fn the_work_for_one_list_is_limited() {
        let marked = |name: &str| json!({"type": "string", ANNOTATION: name});
        let many: serde_json::Map<_, _> = (0..40).map(|at| (format!("a{at}"), marked(&format!("A{at}")))).collect();
        let mut budget = Budget::default();
        let (_, mirrors) = budget.mirrors_of(&tool(&json!({"properties": many}))).expect("the first of them");
        assert_eq!(mirrors.len(), MIRRORS_MAX);

        let nested = |levels: usize| {
            let wrap = |schema: Value, _| json!({"properties": {"in": schema}});
            tool(&(0..levels).fold(marked("Deep"), wrap))
        };
        assert_eq!(budget.mirrors_of(&nested(PATH_MAX)).expect("deep enough").1[0].path.len(), PATH_MAX);
        assert_eq!(budget.mirrors_of(&nested(PATH_MAX + 1)), None);

        let long = json!({"properties": {"a": marked("A")}, "description": "x".repeat(DEFINITIONS_MAX * 2 / 3)});
        assert!(budget.mirrors_of(&tool(&long)).is_some());
        assert_eq!(budget.mirrors_of(&tool(&long)), None, "the second one is beyond the limit of its list");
    }

    #[test]
    fn values_are_found_by_their_paths() {
        let schema = json!({"properties": {
            "a": {"type": "string", ANNOTATION: "A"},
            "in": {"properties": {"b": {"type": "integer", ANNOTATION: "B"}, "c": {"type": "boolean", ANNOTATION: "C"}}},
        }});
        let (_, mirrors) = Budget::default().mirrors_of(&tool(&schema)).expect("three");
        let found = |arguments: &str| values(Raw::parse(arguments).expect("JSON"), &mirrors);
        assert_eq!(found(r#"{"a":"x","in":{"b":1,"c":true}}"#), [json!("x"), json!(1), json!(true)]);
        assert_eq!(found(r#"{"a":"x","\u0061":"y","in":[1]}"#), [json!("y"), Value::Null, Value::Null]);
        assert_eq!(found(r#"{"a":{"big":[1,2,3]}}"#)[0], json!([]), "a header cannot repeat it");
        let long = format!(r#"{{"a":"{}"}}"#, "x".repeat(ARGUMENTS_MAX));
        assert_eq!(found(&long), [Value::Null, Value::Null, Value::Null]);
    }
}
