//! The pages for operators and monitoring: which clients may read them, and which requests may change something.
//!
//! The status page is one file in the program. It holds no data, so it needs no authentication; it requests its data
//! with the credentials that its user enters. Requests that change something also need a token, which only clients
//! with read access receive. A page of another origin cannot read the token, so it can make a browser send such a
//! request, but the request is refused (CSRF protection).

use std::{rc::Rc, sync::LazyLock};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use hyper::{
    HeaderMap, Method, StatusCode,
    body::Incoming,
    header,
    http::{request::Parts, uri::Authority},
};
use outlast_os::PeerUser;
use sha2::{Digest, Sha256};

use super::{
    HttpEndpoint, Page, answers,
    headers::{Head, single},
    request::{Told, identify, take, wait},
    socket::Connection,
    stream::{Answer, Content},
};

const STATUS: &str = include_str!("status.html");
/// The header with the token. A form cannot set it, and a script of another origin would need a preflight.
const TOKEN: &str = "x-outlast-token";

pub(super) async fn turn(
    endpoint: &Rc<HttpEndpoint>,
    connection: &Rc<Connection>,
    head: Parts,
    body: &mut Option<Incoming>,
) -> Told {
    let told = answer(endpoint, connection, &head, body).await;
    let is_html = matches!(&told, Ok(answer) if answer.kind == HTML);
    let protect = |mut answer: Box<Answer>| {
        answer.headers.push(("x-content-type-options", "nosniff".into()));
        answer.headers.push(("cross-origin-resource-policy", "same-origin".into()));
        answer.headers.push(("referrer-policy", "no-referrer".into()));
        if is_html {
            answer.headers.push(("content-security-policy", POLICY.clone()));
            answer.headers.push(("cross-origin-opener-policy", "same-origin".into()));
        }
        // Pages must not be cached. A stream carries its own header.
        if !matches!(answer.content, Content::Events(..)) {
            answer.headers.push(("cache-control", "no-store".into()));
        }
        answer
    };
    told.map(protect).map_err(protect)
}

const HTML: &str = "text/html; charset=utf-8";

async fn answer(
    endpoint: &Rc<HttpEndpoint>,
    connection: &Rc<Connection>,
    head: &Parts,
    body: &mut Option<Incoming>,
) -> Told {
    let path = head.uri.path();
    let is_open = matches!(path, "/health" | "/ready" | "/");
    if !is_open && path != "/metrics" && !path.starts_with("/api/") {
        return Err(Answer::refusal(StatusCode::NOT_FOUND, "there is no such page; the MCP endpoint is /mcp"));
    }
    let is_order = head.method == Method::POST && path.starts_with("/api/");
    if !is_order && !matches!(head.method, Method::GET | Method::HEAD) {
        return Err(answers::method_not_allowed("GET", "only GET and HEAD are allowed"));
    }
    let who = if is_open { endpoint.anonymous.clone() } else { identify(endpoint, connection, &head.headers)? };
    // Without authentication, `/api/` shows more than the tools do, so it is only for the user that runs the gateway.
    if path.starts_with("/api/") && endpoint.auth.borrow().is_none() {
        let has_token = matches!(single(&head.headers, TOKEN), Ok(Some(given)) if is_same(given, &endpoint.token));
        if !has_token && connection.peer_user() != PeerUser::Same {
            let message = "only the user that runs the gateway may read this; others need the token of its status page, which \
                           `outlast state` shows";
            return Err(Answer::refusal(StatusCode::FORBIDDEN, message).because("other_user"));
        }
    }
    match path {
        "/" => return Ok(whole(HTML, Bytes::from_static(STATUS.as_bytes()))),
        "/api/token" if !is_order => {
            let token = serde_json::json!({"token": endpoint.token}).to_string();
            return Ok(whole(answers::JSON, token.into()));
        }
        _ => {}
    }
    if is_order {
        check_order(&endpoint.token, &head.headers, head.uri.authority())?;
    }
    let body = if is_order { take(endpoint, connection, body).await?.bytes } else { Bytes::new() };
    if !is_open {
        connection.show_pass(Head::of(&head.headers).credentials(&head.headers), who.clone());
    }
    let page = Page {
        peer: connection.peer().clone(),
        ticket: 0,
        // HEAD is handled as GET; hyper omits the body.
        method: if is_order { Method::POST } else { Method::GET },
        path: path.to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        body,
        who: (*who).clone(),
    };
    let exchange = endpoint.driver.borrow_mut().ask_page(page, connection);
    Ok(wait(endpoint, exchange).await)
}

fn whole(kind: &'static str, body: Bytes) -> Box<Answer> {
    let content = Content::Whole(body);
    Box::new(Answer { status: StatusCode::OK, session: None, kind, headers: Vec::new(), content, refused: None })
}

/// Whether a changing request comes from the gateway's own page, or from no browser. Three independent checks.
fn check_order(token: &str, headers: &HeaderMap, authority: Option<&Authority>) -> Result<(), Box<Answer>> {
    let forbid = |message: &str| Err(Answer::refusal(StatusCode::FORBIDDEN, message).because("bad_order"));
    if !Head::of(headers).is_json() {
        return Err(Answer::refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json"));
    }
    let host = authority.map(Authority::as_str).or_else(|| single(headers, header::HOST).ok().flatten());
    match single(headers, header::ORIGIN) {
        Ok(None) => {}
        Ok(Some(origin)) if origin.split_once("://").map(|(_, rest)| rest) == host => {}
        _ => return forbid("only this gateway's own status page may send this request"),
    }
    match single(headers, "sec-fetch-site") {
        Ok(None | Some("same-origin" | "none")) => {}
        _ => return forbid("only this gateway's own status page may send this request"),
    }
    match single(headers, TOKEN) {
        Ok(Some(given)) if is_same(given, token) => Ok(()),
        _ => forbid("the X-Outlast-Token header must be the token of /api/token"),
    }
}

/// Compares in constant time.
fn is_same(given: &str, token: &str) -> bool {
    given.len() == token.len() && given.bytes().zip(token.bytes()).fold(0, |wrong, (a, b)| wrong | (a ^ b)) == 0
}

/// Content security policy: only the page's own style and script, by their hashes, and connections only to this
/// gateway.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        hash_of("script"),
        hash_of("style")
    )
});

fn hash_of(element: &str) -> String {
    let start = STATUS.find(&format!("<{element}>")).expect("the page has one") + element.len() + 2;
    let end = start + STATUS[start..].find(&format!("</{element}>")).expect("and it ends");
    format!("sha256-{}", BASE64.encode(Sha256::digest(&STATUS.as_bytes()[start..end])))
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn an_operator_request_comes_from_our_own_page_or_from_no_page() {
        const TOKEN_OK: (&str, &str) = ("x-outlast-token", "secret");
        const JSON: (&str, &str) = ("content-type", "application/json");
        const HOST: (&str, &str) = ("host", "localhost:80");
        type Lines = &'static [(&'static str, &'static str)];
        let table: &[(Lines, Option<u16>)] = &[
            (&[HOST, JSON, TOKEN_OK], None),
            (&[HOST, JSON, TOKEN_OK, ("origin", "http://localhost:80"), ("sec-fetch-site", "same-origin")], None),
            (&[HOST, JSON, TOKEN_OK, ("sec-fetch-site", "none")], None),
            (&[HOST, JSON], Some(403)),
            (&[HOST, JSON, ("x-outlast-token", "secre")], Some(403)),
            (&[HOST, JSON, ("x-outlast-token", "Secret")], Some(403)),
            (&[HOST, JSON, TOKEN_OK, TOKEN_OK], Some(403)),
            (&[HOST, JSON, TOKEN_OK, ("origin", "http://localhost:81")], Some(403)),
            (&[HOST, JSON, TOKEN_OK, ("origin", "http://127.0.0.1:80")], Some(403)),
            (&[HOST, JSON, TOKEN_OK, ("origin", "null")], Some(403)),
            (&[HOST, JSON, TOKEN_OK, ("sec-fetch-site", "same-site")], Some(403)),
            (&[HOST, JSON, TOKEN_OK, ("sec-fetch-site", "cross-site")], Some(403)),
            (&[HOST, TOKEN_OK], Some(415)),
            (&[HOST, TOKEN_OK, ("content-type", "text/plain")], Some(415)),
        ];
        for (lines, status) in table {
            let mut headers = HeaderMap::new();
            for (name, value) in *lines {
                headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
            }
            let refused = check_order("secret", &headers, None).err().map(|answer| answer.status.as_u16());
            assert_eq!(refused, *status, "{lines:?}");
        }
    }

    #[test]
    fn the_page_loads_nothing_from_elsewhere() {
        assert_eq!(STATUS.matches("<script").count(), 1);
        assert_eq!(STATUS.matches("<style").count(), 1);
        for outside in ["http://", "https://", "//cdn", "@import", "innerHTML", "eval(", " style=", " onclick="] {
            let allowed = if outside == "http://" { STATUS.matches("http://www.w3.org/2000/svg").count() } else { 0 };
            assert_eq!(STATUS.matches(outside).count(), allowed, "{outside}");
        }
        assert!(POLICY.starts_with("default-src 'none'; script-src 'sha256-"), "{}", *POLICY);
    }
}
