//! Checks that the headers of a request of the stateless era agree with its body, whose parts they repeat for proxies.

use hyper::HeaderMap;
use outlast_core::{
    mcp::{self, meta, method, revision},
    message::{self, Params, Raw},
};
use serde_json::Value;

use super::{
    answers,
    headers::{single, unpack},
    stream::Answer,
};
use crate::gateway::mirrored::{self, ARGUMENTS_MAX, Mirror, Mirrors};

/// Whether the `_meta` of a request says that it belongs to the stateless era.
pub(super) fn claims(params: &Params<'_>) -> bool {
    envelope(params).is_some_and(|(version, capabilities)| version.is_some() || capabilities.is_some())
}

/// The client's description of itself in a request of the stateless era, as JSON.
pub(super) fn client_info<'a>(params: &Params<'a>) -> Option<Raw<'a>> {
    let [info] = message::pick(params.meta()?, [meta::CLIENT_INFO])?;
    info
}

type Envelope<'a> = (Option<Raw<'a>>, Option<Raw<'a>>);

fn envelope<'a>(params: &Params<'a>) -> Option<Envelope<'a>> {
    let [version, capabilities] = message::pick(params.meta()?, [meta::PROTOCOL_VERSION, meta::CLIENT_CAPABILITIES])?;
    Some((version, capabilities))
}

/// Checks a request of the stateless era. `id` is JSON. The error answer says what is wrong.
pub(super) fn check(
    headers: &HeaderMap,
    id: &str,
    method: &str,
    params: &Params<'_>,
    mirrors: &Mirrors,
) -> Result<(), Box<Answer>> {
    let version = check_envelope(headers, id, params)?;
    if version != revision::STATELESS {
        return Err(answers::unsupported(id, &version, &[revision::STATELESS]));
    }
    let said = header(headers, id, "Mcp-Method")?;
    if said != Some(method) {
        return Err(disagrees(id, "Mcp-Method", said, method));
    }
    // The state machine reports members that are missing in the body.
    let Some(name) = mcp::repeated_name(method, params).and_then(Raw::text) else { return Ok(()) };
    let said = header(headers, id, "Mcp-Name")?;
    if said.is_none() || said.and_then(unpack).as_deref() != Some(&name) {
        return Err(disagrees(id, "Mcp-Name", said, &name));
    }
    match mirrors.get(&name).filter(|_| method == method::TOOLS_CALL) {
        Some(mirrors) => check_mirrors(headers, id, params, mirrors),
        None => Ok(()),
    }
}

fn check_envelope(headers: &HeaderMap, id: &str, params: &Params<'_>) -> Result<String, Box<Answer>> {
    let missing = |what: &str| {
        let message = format!("params._meta must carry {what}");
        Answer::error(hyper::StatusCode::BAD_REQUEST, id, answers::INVALID_PARAMS, &message, None)
    };
    let (version, capabilities) = envelope(params).unwrap_or_default();
    let version =
        version.and_then(Raw::text).ok_or_else(|| missing(&format!("{}, a string", meta::PROTOCOL_VERSION)))?;
    if !capabilities.is_some_and(|raw| raw.get().starts_with('{')) {
        return Err(missing(&format!("{}, an object", meta::CLIENT_CAPABILITIES)));
    }
    let said = header(headers, id, "MCP-Protocol-Version")?;
    if said != Some(&version) {
        return Err(disagrees(id, "MCP-Protocol-Version", said, &version));
    }
    Ok(version)
}

fn header<'a>(headers: &'a HeaderMap, id: &str, name: &str) -> Result<Option<&'a str>, Box<Answer>> {
    single(headers, name)
        .map_err(|_| answers::mismatch(id, &format!("the {name} header is there twice, or is not plain text")))
}

fn disagrees(id: &str, header: &str, said: Option<&str>, body: &str) -> Box<Answer> {
    answers::mismatch(
        id,
        &match said {
            Some(said) => format!("the {header} header says `{said}`, and the body `{body}`"),
            None => format!("the {header} header is missing; the body says `{body}`"),
        },
    )
}

fn check_mirrors(headers: &HeaderMap, id: &str, params: &Params<'_>, mirrors: &[Mirror]) -> Result<(), Box<Answer>> {
    let arguments = params.arguments();
    if arguments.is_some_and(|arguments| arguments.get().len() > ARGUMENTS_MAX) {
        let max = ARGUMENTS_MAX >> 20;
        let message = format!("headers repeat arguments of this tool, so its arguments may have at most {max} MiB");
        return Err(Answer::error(hyper::StatusCode::BAD_REQUEST, id, answers::INVALID_PARAMS, &message, None));
    }
    let values = arguments.map_or_else(|| vec![Value::Null; mirrors.len()], |given| mirrored::values(given, mirrors));
    for (Mirror { header: name, is_plain, .. }, body) in mirrors.iter().zip(values) {
        // Clients need not mirror other types.
        if !is_plain {
            continue;
        }
        let said = header(headers, id, name.as_str())?;
        let agrees = match (&body, said) {
            (Value::Null, None) => true,
            (Value::Null, Some(_)) | (_, None) => false,
            (body, Some(said)) => unpack(said).is_some_and(|said| is_same(body, &said)),
        };
        if !agrees {
            return Err(disagrees(id, &mirrored::shown(name), said, &body.to_string()));
        }
    }
    Ok(())
}

fn is_same(body: &Value, said: &str) -> bool {
    match body {
        Value::String(text) => text == said,
        Value::Bool(yes) => said == if *yes { "true" } else { "false" },
        // 42 and 42.0 are the same number; beyond the precision of a double, the digits are compared.
        Value::Number(number) => {
            number.to_string() == said
                || matches!((number.as_f64(), said.parse::<f64>()), (Some(a), Ok(b)) if a == b && a.abs() < 9e15)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};
    use outlast_core::message::Message;

    use super::*;
    use crate::gateway::{listen::stream::Content, mirrored::Budget};

    type Lines<'a> = &'a [(&'a str, &'a str)];

    const META: &str = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}"#;

    /// The error code of the refusal, or `None`.
    fn refused(lines: Lines<'_>, body: &str, mirrors: &Mirrors) -> Option<i64> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
            headers.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value);
        }
        let Ok(Message::Request { method, params, .. }) = message::parse(body.as_bytes()) else { panic!("{body}") };
        let answer = check(&headers, "1", &method, &params, mirrors).err()?;
        assert_eq!(answer.status, 400);
        let Content::Whole(body) = answer.content else { panic!("an error has words") };
        serde_json::from_slice::<Value>(&body).unwrap()["error"]["code"].as_i64()
    }

    #[test]
    fn a_request_whose_headers_and_body_differ_is_refused() {
        const V: (&str, &str) = ("mcp-protocol-version", "2026-07-28");
        let call = format!(r#"{{"id":1,"method":"tools/call","params":{{"name":"a","arguments":{{}},{META}}}}}"#);
        let read = format!(r#"{{"id":1,"method":"resources/read","params":{{"uri":"file:///ü",{META}}}}}"#);
        let list = format!(r#"{{"id":1,"method":"tools/list","params":{{{META}}}}}"#);
        let task = format!(r#"{{"id":1,"method":"tasks/get","params":{{"taskId":"t1",{META}}}}}"#);
        let future = list.replace("2026-07-28", "2027-01-01");
        let (call_method, list_method) = (("mcp-method", "tools/call"), ("mcp-method", "tools/list"));
        let table: &[(Lines<'_>, &str, Option<i64>)] = &[
            (&[V, list_method], &list, None),
            (&[V, call_method, ("mcp-name", "a")], &call, None),
            (&[V, call_method, ("mcp-name", "=?base64?YQ==?=")], &call, None),
            (&[V, call_method, ("mcp-name", " a\t")], &call, None),
            (&[V, ("mcp-method", "resources/read"), ("mcp-name", "=?base64?ZmlsZTovLy/DvA==?=")], &read, None),
            (&[V, ("mcp-method", "tasks/get"), ("mcp-name", "t1")], &task, None),
            (&[V, ("mcp-method", "tasks/get"), ("mcp-name", "t2")], &task, Some(-32020)),
            (&[V, ("mcp-method", "resources/read"), ("mcp-name", "file:///ü")], &read, Some(-32020)),
            (&[V, call_method], &call, Some(-32020)),
            (&[V, call_method, ("mcp-name", "b")], &call, Some(-32020)),
            (&[V, call_method, ("mcp-name", "A")], &call, Some(-32020)),
            (&[V, call_method, ("mcp-name", "=?base64?*?=")], &call, Some(-32020)),
            (&[V, call_method, ("mcp-name", "a"), ("mcp-name", "b")], &call, Some(-32020)),
            (&[V, list_method, ("mcp-name", "a")], &call, Some(-32020)),
            (&[V], &list, Some(-32020)),
            (&[V, ("mcp-method", "TOOLS/LIST")], &list, Some(-32020)),
            (&[list_method], &list, Some(-32020)),
            (&[("mcp-protocol-version", "2025-11-25"), list_method], &list, Some(-32020)),
            (&[("mcp-protocol-version", "2027-01-01"), list_method], &future, Some(-32022)),
            (&[V, list_method], r#"{"id":1,"method":"tools/list"}"#, Some(-32602)),
            (&[V, list_method], r#"{"id":1,"method":"tools/list","params":{"_meta":{}}}"#, Some(-32602)),
            (
                &[V, list_method],
                r#"{"id":1,"method":"tools/list","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}"#,
                Some(-32602),
            ),
            (
                &[V, list_method],
                r#"{"id":1,"method":"tools/list","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":7,"io.modelcontextprotocol/clientCapabilities":{}}}}"#,
                Some(-32602),
            ),
        ];
        for (lines, body, code) in table {
            assert_eq!(refused(lines, body, &Mirrors::new()), *code, "{lines:?} {body}");
        }
    }

    #[test]
    fn mirrored_parameters_must_agree() {
        let tool = br#"{"name":"a","inputSchema":{"type":"object","properties":{
            "region":{"type":"string","x-mcp-header":"Region"},
            "deep":{"type":"object","properties":{"count":{"type":"integer","x-mcp-header":"Count"}}},
            "flag":{"type":"boolean","x-mcp-header":"Flag"},
            "ratio":{"type":"number","x-mcp-header":"Ratio"},
            "bad":{"type":"string","x-mcp-header":"no spaces"},
            "list":{"type":"array","items":{"type":"string","x-mcp-header":"Item"}}}}}"#;
        let (name, mirrors) = Budget::default().mirrors_of(tool).expect("it has some");
        let mirrors = Mirrors::from([(name, mirrors)]);

        let table: &[(&str, Lines<'_>, Option<i64>)] = &[
            ("{}", &[], None),
            (r#"{"region":null}"#, &[], None),
            (r#"{"region":"eu"}"#, &[("mcp-param-region", "eu")], None),
            (r#"{"region":"ü"}"#, &[("mcp-param-region", "=?base64?w7w=?=")], None),
            (r#"{"region":"eu"}"#, &[], Some(-32020)),
            (r#"{"region":"eu"}"#, &[("mcp-param-region", "us")], Some(-32020)),
            ("{}", &[("mcp-param-region", "us")], Some(-32020)),
            (r#"{"deep":{"count":42}}"#, &[("mcp-param-count", "42")], None),
            (r#"{"deep":{"count":42.0}}"#, &[("mcp-param-count", "42")], None),
            (r#"{"deep":{"count":42}}"#, &[("mcp-param-count", "43")], Some(-32020)),
            (r#"{"deep":{"count":9007199254740993}}"#, &[("mcp-param-count", "9007199254740992")], Some(-32020)),
            (r#"{"flag":true}"#, &[("mcp-param-flag", "true")], None),
            (r#"{"flag":true}"#, &[("mcp-param-flag", "True")], Some(-32020)),
            (r#"{"region":["eu"]}"#, &[("mcp-param-region", "eu")], Some(-32020)),
            ("{}", &[("mcp-param-unknown", "x")], None),
        ];
        for (arguments, lines, code) in table {
            let body =
                format!(r#"{{"id":1,"method":"tools/call","params":{{"name":"a","arguments":{arguments},{META}}}}}"#);
            let mut all = vec![("mcp-protocol-version", "2026-07-28"), ("mcp-method", "tools/call"), ("mcp-name", "a")];
            all.extend(*lines);
            assert_eq!(refused(&all, &body, &mirrors), *code, "{arguments} {lines:?}");
        }
    }
}
