//! A profile that a client chooses by its path or by a header.

use outlast_core::gateway::Who;
use serde_json::json;

use crate::support::{Front, initialize, limits, request, two_people};

const VERSION: &str = "2025-11-25";

#[test]
fn a_profile_is_chosen_by_the_path_or_by_a_header() {
    let front = Front::new();
    // path, headers, status, client
    type Case = (&'static str, &'static [(&'static str, &'static str)], u16, &'static str);
    const SMALL: (&str, &str) = ("x-outlast-profile", "small");
    const SPACE: (&str, &str) = ("x-outlast-profile", "with space");
    const NONE: (&str, &str) = ("x-outlast-profile", "none");
    let table: &[Case] = &[
        ("/mcp", &[], 200, "local"),
        ("/mcp/", &[], 200, "local"),
        ("/mcp/small", &[], 200, "local as small"),
        ("/mcp/with%20space", &[], 200, "local as with space"),
        ("/mcp", &[SMALL], 200, "local as small"),
        ("/mcp/small", &[SMALL], 200, "local as small"),
        ("/mcp/small", &[SPACE], 400, ""),
        ("/mcp/none", &[], 404, ""),
        ("/mcp", &[NONE], 404, ""),
        ("/mcp", &[SMALL, SMALL], 400, ""),
        ("/mcp/small/more", &[], 404, ""),
        ("/mcpsmall", &[], 404, ""),
    ];
    for (path, headers, status, came) in table {
        let answer = front.connect().post_to(path, headers, &initialize(VERSION));
        assert_eq!(answer.status, *status, "{path} {headers:?}: {answer:?}");
        let heard: Vec<String> = front.heard().into_iter().filter(|heard| heard.starts_with("came")).collect();
        match *status {
            200 => assert!(heard[0].ends_with(&format!("Session {came}")), "{path} {headers:?}: {heard:?}"),
            _ => assert!(heard.is_empty(), "{path} {headers:?}: {heard:?}"),
        }
    }
}

#[test]
fn a_session_stays_with_its_profile() {
    let front = Front::new();
    let mut wire = front.connect();
    let answer = wire.post_to("/mcp/small", &[], &initialize(VERSION));
    let session = [("mcp-session-id", answer.header("mcp-session-id").expect("a session"))];
    let ask = request(1, "echo", json!({"arguments": 1}));
    assert_eq!(wire.post_to("/mcp/small", &session, &ask).status, 200);
    assert_eq!(wire.post_to("/mcp", &session, &ask).status, 404, "the session is another profile's");
    assert_eq!(wire.post_to("/mcp/small", &session, &ask).status, 200);
}

#[test]
fn credentials_fix_the_profile_and_others_stay_connected() {
    let front = Front::with(limits(), || {
        let two = two_people();
        Some(Box::new(move |headers| {
            let who = two(headers)?;
            let profile = (who.who.name == "bert").then(|| "small".to_owned());
            Ok(Who { profile, ..who.who }.into())
        }))
    });
    let (anna, bert) = (("authorization", "Bearer anna"), ("authorization", "Bearer bert"));
    let status = |path: &str, who| front.connect().post_to(path, &[who], &initialize(VERSION)).status;
    assert_eq!(status("/mcp/with%20space", anna), 200);
    assert_eq!(status("/mcp/small", bert), 200);
    assert_eq!(status("/mcp/with%20space", bert), 403);
    assert_eq!(status("/mcp/none", ("authorization", "Bearer unknown")), 401, "a refusal contains no names");
}
