//! The cost of a schema, computed before it is compiled, and the cost of a check, computed before it is done.
//!
//! Schemas come from backends and arguments from clients, and the validator cannot be interrupted. Where its work can
//! be counted, it is limited in advance: by a walk over the schema with every reference replaced by its target, and by
//! counting each pair of a subschema and a value. Both walks have a budget and stop when it is used up.

use std::collections::BTreeMap;

use percent_encoding::percent_decode_str;
use rustc_hash::FxHashMap;
use serde_json::{Map, Value};

/// Bounds of one schema, with every reference replaced by its target.
struct Limits {
    /// Subschemas. A recursive reference counts once.
    expanded: usize,
    /// Subschemas within one another.
    nested: usize,
    /// The keywords it may have; all, if nothing.
    keywords: Option<&'static [&'static str]>,
}

impl Limits {
    /// Where keywords are restricted, references are paths: a name must be searched for in all of the schema.
    fn allow(&self, keyword: &str, value: &Value) -> bool {
        let is_path = || value.as_str().is_some_and(|reference| reference.starts_with("#/"));
        self.keywords.is_none_or(|known| known.contains(&keyword) && (keyword != "$ref" || is_path()))
    }
}

const EXPANDED_MAX: usize = 5_000;
const NESTED_MAX: usize = 100;
const ANY: Limits = Limits { expanded: EXPANDED_MAX, nested: NESTED_MAX, keywords: None };
/// The same for a schema that is compiled at once.
const SIMPLE_EXPANDED_MAX: usize = 500;
const SIMPLE_NESTED_MAX: usize = 20;
const SIMPLE: Limits =
    Limits { expanded: SIMPLE_EXPANDED_MAX, nested: SIMPLE_NESTED_MAX, keywords: Some(&SIMPLE_KEYWORDS) };
/// Keywords whose evaluation is linear in the value. Those that have no effect are here too.
const SIMPLE_KEYWORDS: [&str; 37] = [
    "$comment",
    "$defs",
    "$ref",
    "$schema",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "enum",
    "examples",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "not",
    "oneOf",
    "prefixItems",
    "properties",
    "propertyNames",
    "readOnly",
    "required",
    "title",
    "type",
    "writeOnly",
];
/// Regular expressions in one schema, and the length of each.
const PATTERNS_MAX: usize = 64;
const PATTERN_BYTES_MAX: usize = 1_000;
/// The length of an expression times the number of its repetitions (`{n,m}`).
const PATTERN_REPEATED_MAX: u64 = 100_000;
/// Steps of one evaluation: a keyword that is applied to a value is one, and so are 16 bytes that an expression reads.
const STEPS_MAX: u64 = 300_000;
/// Pairs of a subschema and a value that are visited to count the steps.
const PAIRS_MAX: usize = 100_000;
/// Depth of subschemas and values in one evaluation.
const EVALUATION_DEPTH_MAX: usize = 300;
/// Steps of an evaluation that is done at once. Here a keyword has a step for each value within its value, and for each 16 bytes
/// of text: a branch that does not fit makes an error with a copy of its value.
const SMALL_STEPS_MAX: u64 = 60_000;
/// An evaluation that cannot have more steps than this is not counted exactly.
const STEPS_FEW: u64 = 20_000;

/// The subschemas of a schema, reduced to what determines the cost of an evaluation.
pub(super) struct Cost {
    nodes: Vec<Node>,
    /// `None` if a reference is recursive.
    steps_at_most: Option<u64>,
    /// The targets of its references are known only during the evaluation.
    is_dynamic: bool,
}

/// Keywords that change the target of references.
const DYNAMIC: [&str; 5] = ["$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$id"];

#[derive(Default)]
struct Node {
    /// Keywords that are applied to the value itself.
    own: u64,
    /// Applied to the same value.
    in_place: Vec<u32>,
    properties: BTreeMap<Box<str>, u32>,
    /// Applied to each member of an object.
    members: Vec<u32>,
    /// Applied to the element at the same index of an array.
    prefix: Vec<u32>,
    /// Applied to each element of an array.
    elements: Vec<u32>,
    /// Regular expressions that are applied to a text, or to each name of an object.
    patterns: u64,
    is_unique: bool,
    /// `unevaluatedProperties` and `unevaluatedItems` evaluate the rest a second time.
    is_repeated: bool,
}

impl Node {
    /// It applies no subschema, and its cost hardly depends on the value.
    fn is_leaf(&self) -> bool {
        let lists = [&self.in_place, &self.members, &self.prefix, &self.elements];
        lists.into_iter().all(Vec::is_empty) && self.properties.is_empty() && !self.is_unique
    }
}

impl Cost {
    /// The error says why the schema is not compiled.
    pub(super) fn of(schema: &Value) -> Result<Cost, String> {
        if is_dynamic(schema) {
            return Ok(Cost { nodes: Vec::new(), steps_at_most: None, is_dynamic: true });
        }
        Cost::within(schema, &ANY)
    }

    /// The cost of a schema that can be compiled at once, and whose evaluation is linear in the value. Nothing if it is not
    /// known to be one.
    pub(super) fn of_simple(schema: &Value) -> Option<Cost> {
        let cost = Cost::within(schema, &SIMPLE).ok()?;
        (cost.steps_at_most.is_some() && !is_dynamic(schema)).then_some(cost)
    }

    fn within(schema: &Value, limits: &'static Limits) -> Result<Cost, String> {
        let numbers = FxHashMap::default();
        let mut survey = Survey { root: schema, limits, nodes: Vec::new(), numbers, todo: Vec::new(), patterns: 0 };
        survey.number(schema)?;
        while let Some((number, schema)) = survey.todo.pop() {
            let node = survey.node(schema)?;
            survey.nodes[number as usize] = node;
        }
        let nodes = survey.nodes;
        let steps_at_most = expand(&nodes, limits)?;
        Ok(Cost { nodes, steps_at_most, is_dynamic: false })
    }

    /// Whether an evaluation stays within its budget. A dynamic schema is limited by time instead.
    pub(super) fn is_affordable(&self, value: &Value) -> bool {
        self.is_dynamic || self.has_at_most(STEPS_MAX, value, false)
    }

    /// Whether an evaluation is so short that it may be done at once.
    pub(super) fn is_small(&self, value: &Value) -> bool {
        !self.is_dynamic && self.has_at_most(SMALL_STEPS_MAX, value, true)
    }

    fn has_at_most(&self, max: u64, value: &Value, is_by_size: bool) -> bool {
        if let Some(steps) = self.steps_at_most
            && steps.saturating_mul(size(value, STEPS_FEW)) <= STEPS_FEW
        {
            return true;
        }
        let mut count = Count { nodes: &self.nodes, max, is_by_size, known: FxHashMap::default(), pairs: 0 };
        count.steps(0, value, 0).is_some()
    }
}

/// Whether a part of it has one of these keywords. An `$id` at its top does not count.
fn is_dynamic(schema: &Value) -> bool {
    let mut todo = vec![schema];
    while let Some(value) = todo.pop() {
        match value {
            Value::Object(members) => {
                let is_top = std::ptr::eq(value, schema);
                if members.keys().any(|name| DYNAMIC.contains(&name.as_str()) && !(is_top && name == "$id")) {
                    return true;
                }
                todo.extend(members.values());
            }
            Value::Array(elements) => todo.extend(elements),
            _ => {}
        }
    }
    false
}

struct Survey<'a> {
    root: &'a Value,
    limits: &'static Limits,
    nodes: Vec<Node>,
    numbers: FxHashMap<*const Value, u32>,
    todo: Vec<(u32, &'a Value)>,
    patterns: usize,
}

impl<'a> Survey<'a> {
    fn number(&mut self, schema: &'a Value) -> Result<u32, String> {
        if let Some(known) = self.numbers.get(&std::ptr::from_ref(schema)) {
            return Ok(*known);
        }
        if self.nodes.len() >= self.limits.expanded {
            return Err(format!("it has more than {} parts", self.limits.expanded));
        }
        let number = self.nodes.len() as u32;
        self.nodes.push(Node::default());
        self.numbers.insert(schema, number);
        self.todo.push((number, schema));
        Ok(number)
    }

    fn numbers(&mut self, schemas: impl Iterator<Item = &'a Value>) -> Result<Vec<u32>, String> {
        schemas.map(|schema| self.number(schema)).collect()
    }

    fn node(&mut self, schema: &'a Value) -> Result<Node, String> {
        let mut node = Node { own: 1, ..Node::default() };
        let Value::Object(schema) = schema else { return Ok(node) };
        for (keyword, value) in schema {
            if !self.limits.allow(keyword, value) {
                return Err(format!("it has the keyword `{keyword}`"));
            }
            node.own += 1;
            let map = || value.as_object().into_iter().flat_map(Map::values);
            let list = || value.as_array().into_iter().flatten();
            let is_schema = value.is_object() || value.is_boolean();
            match keyword.as_str() {
                "allOf" | "anyOf" | "oneOf" => node.in_place.extend(self.numbers(list())?),
                "not" | "if" | "then" | "else" if is_schema => node.in_place.push(self.number(value)?),
                "dependentSchemas" | "dependencies" => node.in_place.extend(self.numbers(map())?),
                "$ref" => {
                    let target = value.as_str().and_then(|reference| self.target(reference));
                    let target = target.ok_or("a reference points outside of it, or to nothing")?;
                    node.in_place.push(self.number(target)?);
                }
                "properties" => {
                    for (name, value) in value.as_object().into_iter().flatten() {
                        node.properties.insert(name.as_str().into(), self.number(value)?);
                    }
                }
                "patternProperties" => {
                    for (pattern, value) in value.as_object().into_iter().flatten() {
                        self.pattern(pattern)?;
                        node.patterns += 1;
                        node.members.push(self.number(value)?);
                    }
                }
                "additionalProperties" | "propertyNames" if is_schema => node.members.push(self.number(value)?),
                "unevaluatedProperties" if is_schema => {
                    node.members.push(self.number(value)?);
                    node.is_repeated = true;
                }
                "prefixItems" => node.prefix = self.numbers(list())?,
                "items" if value.is_array() => node.prefix = self.numbers(list())?,
                "items" | "additionalItems" | "contains" if is_schema => node.elements.push(self.number(value)?),
                "unevaluatedItems" if is_schema => {
                    node.elements.push(self.number(value)?);
                    node.is_repeated = true;
                }
                "pattern" => {
                    self.pattern(value.as_str().unwrap_or_default())?;
                    node.patterns += 1;
                }
                "uniqueItems" => node.is_unique |= value == &Value::Bool(true),
                "enum" | "const" | "required" => node.own += size(value, STEPS_MAX),
                _ => {}
            }
        }
        Ok(node)
    }

    fn pattern(&mut self, pattern: &str) -> Result<(), String> {
        self.patterns += 1;
        if self.patterns > PATTERNS_MAX {
            return Err(format!("it has more than {PATTERNS_MAX} regular expressions"));
        }
        if pattern.len() > PATTERN_BYTES_MAX {
            return Err(format!("a regular expression is longer than {PATTERN_BYTES_MAX} bytes"));
        }
        if repetitions(pattern).saturating_mul(pattern.len() as u64) > PATTERN_REPEATED_MAX {
            return Err("a regular expression repeats too much".to_owned());
        }
        Ok(())
    }

    /// The target of a reference within this schema: by its path, or by an anchor that occurs once.
    fn target(&self, reference: &str) -> Option<&'a Value> {
        let fragment = reference.strip_prefix('#')?;
        let target = match fragment.is_empty() || fragment.starts_with('/') {
            true => self.root.pointer(&percent_decode_str(fragment).decode_utf8().ok()?)?,
            false => anchored(self.root, fragment)?,
        };
        (target.is_object() || target.is_boolean()).then_some(target)
    }
}

/// Every path through the schema, references followed: its steps for one value if no path is recursive.
fn expand(nodes: &[Node], limits: &Limits) -> Result<Option<u64>, String> {
    let below = |number: u32| {
        let node = &nodes[number as usize];
        let lists = [&node.in_place, &node.members, &node.prefix, &node.elements];
        let mut below: Vec<u32> = lists.into_iter().flatten().chain(node.properties.values()).copied().collect();
        if node.is_repeated {
            below.extend_from_slice(&node.in_place);
        }
        below
    };
    let (mut count, mut steps, mut is_recursive) = (0, 0_u64, false);
    let mut is_open = vec![false; nodes.len()];
    let mut path = vec![(0, below(0))];
    is_open[0] = true;
    while let Some((number, rest)) = path.last_mut() {
        let Some(next) = rest.pop() else {
            is_open[*number as usize] = false;
            path.pop();
            continue;
        };
        count += 1;
        if count > limits.expanded {
            return Err(format!("with its references it has more than {} parts", limits.expanded));
        }
        if is_open[next as usize] {
            is_recursive = true;
            continue;
        }
        if path.len() >= limits.nested {
            return Err(format!("with its references it is nested deeper than {} levels", limits.nested));
        }
        let node = &nodes[next as usize];
        steps = steps.saturating_add(node.own + node.patterns + u64::from(node.is_unique));
        is_open[next as usize] = true;
        path.push((next, below(next)));
    }
    let top = &nodes[0];
    Ok((!is_recursive).then_some(steps + top.own + top.patterns + u64::from(top.is_unique)))
}

struct Count<'a> {
    nodes: &'a [Node],
    /// Steps.
    max: u64,
    /// A keyword counts as often as its value is large.
    is_by_size: bool,
    pairs: usize,
    /// `None` while it is being counted.
    known: FxHashMap<(u32, *const Value), Option<u64>>,
}

impl Count<'_> {
    fn own(&self, node: &Node, value: &Value) -> u64 {
        match self.is_by_size {
            true => node.own.saturating_mul(size(value, self.max)),
            false => node.own,
        }
    }

    /// The number of steps of an evaluation; `None` if there are too many.
    fn steps(&mut self, number: u32, value: &Value, depth: usize) -> Option<u64> {
        let nodes = self.nodes;
        let node = &nodes[number as usize];
        self.pairs += 1;
        if depth >= EVALUATION_DEPTH_MAX || self.pairs > PAIRS_MAX || self.pairs as u64 > self.max {
            return None;
        }
        if node.is_leaf() {
            let steps = self.own(node, value) + node.patterns * (1 + value.as_str().map_or(0, str::len) as u64 / 16);
            return within(steps, self.max);
        }
        let pair = (number, std::ptr::from_ref(value));
        // `None` within: a subschema that applies itself to the same value never ends.
        if let Some(known) = self.known.get(&pair) {
            return *known;
        }
        self.known.insert(pair, None);
        let mut steps = within(self.own(node, value), self.max)?;
        let times = 1 + u64::from(node.is_repeated);
        for next in &node.in_place {
            steps = within(steps.saturating_add(self.steps(*next, value, depth + 1)?.saturating_mul(times)), self.max)?;
        }
        match value {
            Value::String(text) => steps += node.patterns * (1 + text.len() as u64 / 16),
            Value::Array(elements) => {
                if node.is_unique {
                    steps += 16 * size(value, STEPS_MAX);
                }
                for (index, element) in elements.iter().enumerate() {
                    for next in node.prefix.get(index).into_iter().chain(&node.elements) {
                        steps = within(steps.saturating_add(self.steps(*next, element, depth + 1)?), self.max)?;
                    }
                }
            }
            Value::Object(members) => {
                for (name, member) in members {
                    steps += node.patterns * (1 + name.len() as u64 / 16);
                    for next in node.properties.get(name.as_str()).into_iter().chain(&node.members) {
                        steps = within(steps.saturating_add(self.steps(*next, member, depth + 1)?), self.max)?;
                    }
                }
            }
            _ => {}
        }
        let steps = within(steps, self.max)?;
        self.known.insert(pair, Some(steps));
        Some(steps)
    }
}

fn within(steps: u64, max: u64) -> Option<u64> {
    (steps <= max).then_some(steps)
}

/// Values within a value, and one more for each 16 bytes of text. It is not counted beyond the limit.
fn size(value: &Value, max: u64) -> u64 {
    let (mut size, mut todo) = (0_u64, vec![value]);
    while let Some(value) = todo.pop() {
        size += 1;
        match value {
            Value::String(text) => size += text.len() as u64 / 16,
            Value::Array(elements) => todo.extend(elements),
            Value::Object(members) => {
                size += members.keys().map(|name| 1 + name.len() as u64 / 16).sum::<u64>();
                todo.extend(members.values());
            }
            _ => {}
        }
        if size > max {
            return size;
        }
    }
    size
}

/// The factor by which counted repetitions (`{n}`, `{n,m}`) enlarge an expression, at most.
fn repetitions(pattern: &str) -> u64 {
    let counted = pattern.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(inner, _)| inner);
    counted.fold(1, |product, inner| {
        let most = inner.split(',').filter_map(|number| number.trim().parse::<u64>().ok()).max();
        product.saturating_mul(most.unwrap_or(1).max(1))
    })
}

/// The only part of a schema with this `$anchor`.
fn anchored<'a>(root: &'a Value, name: &str) -> Option<&'a Value> {
    let (mut found, mut todo) = (None, vec![root]);
    while let Some(value) = todo.pop() {
        match value {
            Value::Object(members) => {
                if members.get("$anchor").and_then(Value::as_str) == Some(name) && found.replace(value).is_some() {
                    return None;
                }
                todo.extend(members.values());
            }
            Value::Array(elements) => todo.extend(elements),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// `count` definitions, each of which refers to the next one twice.
    fn doubling(count: usize, keyword: &str) -> Value {
        let mut definitions = Map::new();
        for n in 0..count {
            let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            definitions.insert(format!("d{n}"), json!({keyword: [next, next]}));
        }
        definitions.insert(format!("d{count}"), json!({"type": "object"}));
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    }

    fn nested(depth: usize) -> Value {
        (0..depth).fold(json!(1), |inner, _| json!({"a": inner}))
    }

    #[test]
    fn a_schema_that_would_grow_too_large_is_not_compiled() {
        let everywhere: Map<String, Value> = (0..12)
            .map(|n| {
                (
                    format!("d{n}"),
                    json!({"anyOf": (0..12).map(|m| json!({"$ref": format!("#/$defs/d{m}")})).collect::<Vec<_>>()}),
                )
            })
            .collect();
        let chain: Map<String, Value> = (0..200)
            .map(|n| (format!("d{n}"), json!({"not": {"$ref": format!("#/$defs/d{}", (n + 1) % 300)}})))
            .collect();
        let table = [
            (doubling(14, "allOf"), "more than 5000 parts"),
            (doubling(30, "anyOf"), "more than 5000 parts"),
            (json!({"$ref": "#/$defs/d0", "$defs": everywhere}), "more than 5000 parts"),
            (json!({"$ref": "#/$defs/d0", "$defs": chain}), "points outside of it, or to nothing"),
            (json!({"$ref": "https://example.com/x"}), "points outside of it"),
            (json!({"pattern": "x".repeat(1001)}), "longer than 1000 bytes"),
            (json!({"pattern": "((a{1,100}){1,100}){1,100}"}), "repeats too much"),
            (json!({"allOf": vec![json!({"pattern": "a"}); 65]}), "more than 64 regular expressions"),
        ];
        for (schema, why) in table {
            let found = Cost::of(&schema).err().unwrap_or_else(|| panic!("affordable: {schema}"));
            assert!(found.contains(why), "{found}");
        }
        let deep: Map<String, Value> = (0..150)
            .map(|n| (format!("d{n}"), json!({"not": {"$ref": format!("#/$defs/d{}", (n + 1).min(149))}})))
            .collect();
        assert!(
            Cost::of(&json!({"$ref": "#/$defs/d0", "$defs": deep})).is_err_and(|why| why.contains("deeper than 100"))
        );
    }

    #[test]
    fn usual_schemas_are_within_the_budget() {
        let tree = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,64}$"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}}});
        let leaf = json!({"name": "leaf"});
        let branch = json!({"name": "branch", "children": vec![leaf; 20]});
        let all = json!({"name": "root", "children": vec![branch; 20]});
        assert!(Cost::of(&tree).is_ok_and(|cost| cost.is_affordable(&all)));
        let named = json!({"$defs": {"a": {"$anchor": "name", "type": "string"}, "b%c": true}, "anyOf": [{"$ref": "#name"}, {"$ref": "#/$defs/b%25c"}]});
        assert!(Cost::of(&named).is_ok_and(|cost| cost.is_affordable(&json!("x"))));
        let numbers = Value::Array((0..20_000).map(Value::from).collect());
        assert!(Cost::of(&json!({"items": {"type": "number"}})).is_ok_and(|cost| cost.is_affordable(&numbers)));
    }

    #[test]
    fn an_evaluation_that_would_take_too_long_is_refused() {
        let twice = json!({"properties": {"a": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}});
        let wide = json!({"items": {"allOf": vec![json!({"type": "integer"}); 2_000]}});
        let numbers = Value::Array((0..5_000).map(Value::from).collect());
        let table = [
            (&twice, nested(5), true),
            (&twice, nested(60), false),
            (&wide, json!([1, 2, 3]), true),
            (&wide, numbers.clone(), false),
            (&doubling(10, "allOf"), nested(3), true),
            (
                &json!({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": [{"$ref": "#/$defs/y"}]}, "y": {"$ref": "#/$defs/x"}}}),
                json!(1),
                false,
            ),
        ];
        for (schema, value, affordable) in table {
            let cost = Cost::of(schema).unwrap_or_else(|why| panic!("{why}: {schema}"));
            assert_eq!(cost.is_affordable(&value), affordable, "{schema}");
        }
    }
}
