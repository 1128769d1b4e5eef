//! Guards: roles, rates, profiles, switches, schemas and ambiguous messages.

use crate::story::*;

fn pattern(text: &str) -> Pattern {
    Pattern(text.into())
}

fn as_role(role: &str) -> Who {
    Who { name: role.into(), role: Some(role.into()), profile: None }
}

fn code(story: &mut Story, client: u64) -> i64 {
    story.heard(client).json()["error"]["code"].as_i64().expect("an error")
}

fn tools(story: &mut Story, client: u64) -> Vec<String> {
    story.ask(client, json!("list"), "tools/list", json!({}));
    let list = story.heard(client).json();
    let tools = list["result"]["tools"].as_array().expect("tools");
    tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn a_tool_or_backend_that_is_off_is_neither_listed_nor_called() {
    let mut story = Story::simple(&[("a", maker(&["x", "y"])), ("b", maker(&["z"]))]);
    story.event(Event::SwitchAsked { ticket: 1, what: Switch::Tool("a__x".into()), off: true });
    assert_eq!(story.answers, [(1, Ok(json!({"changed": true, "off": true})))]);
    story.hears(1, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
    assert_eq!(tools(&mut story, 1), ["a__y", "b__z"]);
    story.call(1, 1, "a__x");
    assert_eq!(code(&mut story, 1), 7013);
    story.event(Event::SwitchAsked { ticket: 2, what: Switch::Backend("b".into()), off: true }).heard(1);
    story.call(1, 2, "b__z");
    assert_eq!(code(&mut story, 1), 7013);
    assert_eq!(story.status("b")["state"], "off");
    assert!(story.called.iter().all(|called| called.outcome == Outcome::SwitchedOff));
    story.event(Event::SwitchAsked { ticket: 3, what: Switch::Tool("a__x".into()), off: false }).heard(1);
    story.call(1, 3, "a__x").told("a");
    story.event(Event::SwitchAsked { ticket: 4, what: Switch::Backend("zzz".into()), off: true });
    assert!(story.answers.last().is_some_and(|(_, result)| result.is_err()));
}

/// A client that knows an unkeyed hash can choose names of members that share it. To compare these with each other would
/// take a minute, and stop all other clients.
#[test]
fn arguments_whose_names_share_an_unkeyed_hash_are_checked_as_any_others() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let members: Vec<String> = names_of_one_hash(14_000).iter().map(|name| format!(r#""{name}":1"#)).collect();
    let call = |id: u64, arguments: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"a__x","arguments":{{{arguments}}}}}}}"#
        )
    };
    let all = members.join(",");
    assert!(all.len() < ARGUMENTS_READ_MAX, "larger arguments are not read");
    story.say(1, &call(1, &all)).told("a");
    // The check was made: the last name once more is found.
    story.say(1, &call(2, &format!("{all},{}", members[13_999]))).told_nothing("a");
    assert!(story.heard(1).json().to_string().contains("is there twice"));
}

/// Ids are compared with all ids in flight: a thousand long ones would take seconds.
#[test]
fn a_request_with_a_long_id_is_refused_under_that_id() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let (longest, longer) = ("i".repeat(REQUEST_ID_MAX), "i".repeat(REQUEST_ID_MAX + 1));
    story.ask(1, json!(longer), "tools/call", json!({"name": "a__x"})).told_nothing("a");
    let refused = story.heard(1).json();
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(longer), &json!(-32600)));
    story.ask(1, json!(longest), "tools/call", json!({"name": "a__x"}));
    let (link, told) = story.told("a");
    story.answer(link, &told["id"], json!({}));
    assert_eq!(story.heard(1).json()["id"], json!(longest));
}

#[test]
fn a_tool_called_too_often_is_refused_with_the_time_to_wait() {
    let mut configured = settings(vec![stdio("a")]);
    configured.rates.tools = vec![(pattern("a__x"), Rate { per_minute: 6, burst: 2 })];
    let mut story = Story::new(configured, &[("a", maker(&["x", "y"]))]);
    story.shake(1).call(1, 1, "a__x").call(1, 2, "a__x").call(1, 3, "a__x");
    let refused = story.heard(1).json();
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(3), &json!(7012)));
    assert_eq!(refused["error"]["data"]["retryAfter"], 10.0);
    story.call(1, 4, "a__y").hears_nothing(1);
    story
        .shake_as(2, Who { name: "other".into(), role: None, profile: None }, json!({}))
        .call(2, 1, "a__x")
        .hears_nothing(2);
    story.pass(secs(10)).call(1, 5, "a__x").hears_nothing(1);
    assert_eq!(story.called.iter().map(|called| called.outcome).collect::<Vec<_>>(), [Outcome::RateLimited]);
}

#[test]
fn a_role_sees_and_calls_only_allowed_tools() {
    let mut a = maker(&["read", "write"]);
    a.prompts = vec![json!({"name": "p"})];
    a.resources = vec![json!({"uri": "a://1", "name": "r"})];
    let mut b = maker(&["secret"]);
    b.resources = vec![json!({"uri": "b://1", "name": "r"})];
    let mut configured = settings(vec![stdio("a"), stdio("b")]);
    configured.roles.insert("reader".into(), Role { allow: vec![pattern("a__read")], deny: vec![] });
    configured.roles.insert("admin".into(), Role { allow: vec![pattern("*")], deny: vec![pattern("b__*")] });
    let mut story = Story::new(configured, &[("a", a), ("b", b)]);
    story.shake_as(1, as_role("reader"), json!({})).shake_as(2, as_role("admin"), json!({})).shake_as(
        3,
        as_role("unknown"),
        json!({}),
    );
    assert_eq!(tools(&mut story, 1), ["a__read"]);
    assert_eq!(tools(&mut story, 2), ["a__read", "a__write"]);
    assert!(tools(&mut story, 3).is_empty());
    story.call(1, 1, "a__write").call(1, 2, "b__secret");
    assert_eq!((code(&mut story, 1), code(&mut story, 1)), (7014, 7014));
    story.ask(1, json!(3), "prompts/get", json!({"name": "a__p"}));
    assert_eq!(code(&mut story, 1), 7014);
    story.ask(1, json!(4), "resources/read", json!({"uri": "b://1"}));
    assert_eq!(code(&mut story, 1), 7014);
    story.told_nothing("b");
    story.ask(1, json!(5), "resources/read", json!({"uri": "a://1"})).told("a");
    story.call(1, 6, "a__read").told("a");
    assert!(
        story
            .called
            .iter()
            .all(|called| called.outcome == Outcome::Denied && called.who.role.as_deref() == Some("reader"))
    );
}

#[test]
fn guards_are_checked_in_order() {
    let mut configured = settings(vec![Backend { breaker_failures: 1, ..stdio("a") }]);
    configured.roles.insert("r".into(), Role { allow: vec![pattern("a__ok")], deny: vec![] });
    configured.rates.tools = vec![
        (pattern("a__slow"), Rate { per_minute: 1, burst: 1 }),
        (pattern("a__off"), Rate { per_minute: 1, burst: 1 }),
    ];
    configured.switched_off = vec![Switch::Tool("a__off".into())];
    let mut story = Story::new(configured, &[("a", maker(&["ok", "off", "slow"]))]);
    story.shake_as(1, as_role("r"), json!({}));
    // The switch comes before the rate and the role, which would both refuse.
    story.call(1, 1, "a__off").call(1, 2, "a__off");
    assert_eq!((code(&mut story, 1), code(&mut story, 1)), (7013, 7013));
    // The rate comes before the role.
    story.call(1, 3, "a__slow").call(1, 4, "a__slow");
    assert_eq!((code(&mut story, 1), code(&mut story, 1)), (7014, 7012));
    // The arguments come before the circuit.
    story.call(1, 5, "a__ok").call(1, 55, "a__ok");
    let (link, _) = story.told("a");
    let (_, quick) = story.told("a");
    story.answer(link, &quick["id"], json!({})).heard(1);
    story.pass(secs(61)).heard(1);
    story.ask(1, json!(6), "tools/call", json!({"name": "a__ok", "arguments": {"x": "bad"}}));
    let bad = story.heard(1).json();
    assert_eq!(bad["result"]["isError"], true);
    assert!(bad["result"]["content"][0]["text"].as_str().is_some_and(|words| words.contains("`/x` is bad")), "{bad}");
    story.call(1, 7, "a__ok");
    let open = story.heard(1).json();
    assert_eq!(open["result"]["_meta"]["outlast/failure"]["reason"], "circuit_open", "{open}");
    let outcomes: Vec<Outcome> = story.called.iter().map(|called| called.outcome).collect();
    use Outcome::*;
    assert_eq!(
        outcomes,
        [SwitchedOff, SwitchedOff, Denied, RateLimited, Answered, TimedOut, BadArguments, CircuitOpen]
    );
    // A half-open circuit lets one call through.
    story.links.clear();
    story.answer(link, &json!(0), json!({})).pass(secs(31)).call(1, 8, "a__ok");
    let (link, probe) = story.told("a");
    story.call(1, 9, "a__ok");
    assert_eq!(story.heard(1).json()["id"], 9);
    story.answer(link, &probe["id"], json!({})).heard(1);
    story.call(1, 10, "a__ok").told("a");
}

#[test]
fn allow_and_deny_of_a_backend_match_its_own_names() {
    let backend = Backend { allow: vec![pattern("get_*")], deny: vec![pattern("*_all")], ..stdio("a") };
    let mut story = Story::new(settings(vec![backend]), &[("a", maker(&["get_one", "get_all", "set_one"]))]);
    story.shake(1);
    assert_eq!(tools(&mut story, 1), ["a__get_one"]);
    story.call(1, 1, "a__set_one");
    assert_eq!(code(&mut story, 1), -32602);
}

#[test]
fn a_profile_restricts_the_view_and_an_unknown_profile_shows_nothing() {
    let mut configured = settings(vec![stdio("a"), stdio("b")]);
    configured.profiles.insert(
        "small".into(),
        Profile { backends: vec![pattern("a")], deny: vec![pattern("*__y")], ..Profile::default() },
    );
    configured.default_profile = Some("small".into());
    let mut story = Story::new(configured, &[("a", maker(&["x", "y"])), ("b", maker(&["z"]))]);
    story.shake(1);
    assert_eq!(tools(&mut story, 1), ["a__x"]);
    for (id, name) in [(1, "a__y"), (2, "b__z")] {
        story.call(1, id, name);
        assert_eq!(code(&mut story, 1), -32602);
    }
    story.shake_as(2, Who { profile: Some("none".into()), ..local() }, json!({}));
    assert!(tools(&mut story, 2).is_empty());
}

#[test]
fn a_search_client_finds_reads_and_calls() {
    let mut configured = settings(vec![stdio("a"), stdio("b")]);
    configured
        .profiles
        .insert("s".into(), Profile { search: true, deny: vec![pattern("b__hidden")], ..Profile::default() });
    let mut story =
        Story::new(configured, &[("a", maker(&["weather", "time"])), ("b", maker(&["weather_map", "hidden"]))]);
    story.shake_as(1, Who { profile: Some("s".into()), ..local() }, json!({}));
    assert_eq!(tools(&mut story, 1), ["search_tools", "describe_tool", "call_tool"]);
    let use_tool = |story: &mut Story, name: &str, arguments: serde_json::Value| {
        story.ask(1, json!(1), "tools/call", json!({"name": name, "arguments": arguments}));
    };
    use_tool(&mut story, "search_tools", json!({"query": "Weather map"}));
    let found = story.heard(1).json()["result"]["structuredContent"].clone();
    assert_eq!(found["tools"][0]["name"], "b__weather_map");
    assert_eq!(found["tools"][1]["name"], "a__weather");
    assert_eq!(found["tools"].as_array().map(Vec::len), Some(2));
    use_tool(&mut story, "describe_tool", json!({"name": "a__time"}));
    assert_eq!(story.heard(1).json()["result"]["structuredContent"]["inputSchema"], json!({"type": "object"}));
    use_tool(&mut story, "describe_tool", json!({"name": "b__hidden"}));
    assert_eq!(story.heard(1).json()["result"]["isError"], true);
    use_tool(&mut story, "call_tool", json!({"name": "a__time", "arguments": {"zone": 1.0}}));
    let (link, text) = story.links.pop().expect("it was told");
    assert!(text.contains(r#""arguments":{"zone":1.0}"#) && text.contains(r#""name":"time""#), "{text}");
    story
        .answer(link, &parsed(&text)["id"], json!({"content": []}))
        .hears(1, json!({"jsonrpc": "2.0", "id": 1, "result": {"content": []}}));
    use_tool(&mut story, "call_tool", json!({"name": "b__hidden"}));
    assert_eq!(code(&mut story, 1), -32602);
    use_tool(&mut story, "call_tool", json!({"name": "call_tool"}));
    assert_eq!(code(&mut story, 1), -32602);
    use_tool(&mut story, "call_tool", json!({"name": "a__time", "Name": "b__hidden"}));
    assert_eq!(code(&mut story, 1), -32602);
}

#[test]
fn a_search_with_many_results_has_pages() {
    let mut configured = settings(vec![stdio("a")]);
    configured.profiles.insert("s".into(), Profile { search: true, ..Profile::default() });
    let all: Vec<String> = (0..45).map(|n| format!("tool{n:02}")).collect();
    let mut story = Story::new(configured, &[("a", maker(&all.iter().map(String::as_str).collect::<Vec<_>>()))]);
    story.shake_as(1, Who { profile: Some("s".into()), ..local() }, json!({}));
    let mut search = |arguments: serde_json::Value| {
        story.ask(1, json!(1), "tools/call", json!({"name": "search_tools", "arguments": arguments}));
        story.heard(1).json()["result"].clone()
    };
    let (mut seen, mut pages, mut cursor) = (Vec::new(), 0, json!(null));
    loop {
        let found = search(json!({"query": "tool", "cursor": cursor}))["structuredContent"].clone();
        let tools = found["tools"].as_array().expect("tools");
        seen.extend(tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()));
        pages += 1;
        assert_eq!(found["more"], 45 - seen.len());
        match found.get("nextCursor") {
            Some(next) => cursor = next.clone(),
            None => break,
        }
    }
    assert_eq!(pages, 3);
    assert_eq!(seen, (0..45).map(|n| format!("a__tool{n:02}")).collect::<Vec<_>>());
    for wrong in [json!("x"), json!(7), json!("-1")] {
        assert_eq!(search(json!({"query": "tool", "cursor": wrong}))["isError"], true, "{wrong}");
    }
    assert_eq!(search(json!({"query": "tool", "cursor": "9999"}))["structuredContent"]["tools"], json!([]));
}

/// Some backends use the first of two equal members, or ignore case: they would run a call that no guard has checked.
#[test]
fn ambiguous_messages_do_not_reach_a_backend() {
    let mut configured = settings(vec![stdio("a")]);
    configured.roles.insert("reader".into(), Role { allow: vec![pattern("a__read")], deny: vec![] });
    let mut story = Story::new(configured, &[("a", maker(&["read", "write"]))]);
    story.shake_as(1, as_role("reader"), json!({}));
    story.ask(1, json!(1), "tools/call", json!({"name": "a__read", "Name": "write"}));
    assert_eq!(code(&mut story, 1), -32602);
    story.ask(1, json!(2), "tools/call", json!({"name": "a__read", "Arguments": {"x": 1}}));
    assert_eq!(code(&mut story, 1), -32602);
    let raw = [
        ("tools/call", r#"{"name":"a__read","arguments":{"path":"ok","path":"evil"}}"#),
        ("tools/call", r#"{"name":"a__read","arguments":{"path":"ok","Path":"evil"}}"#),
        ("tools/call", r#"{"name":"a__read","arguments":{"x":{"type":1,"Type":2}}}"#),
        ("tools/call", r#"{"name":"a__read","_meta":{"progressToken":1,"progressToken":2}}"#),
        (
            "completion/complete",
            r#"{"ref":{"type":"ref/prompt","name":"a","Name":"b"},"argument":{"name":"x","value":""}}"#,
        ),
        ("tasks/get", r#"{"taskId":"a","taskid":"b"}"#),
        ("tools/list", r#"{"cursor":"a","cursor":"b"}"#),
    ];
    for (method, params) in raw {
        story.say(1, &format!(r#"{{"jsonrpc":"2.0","id":9,"method":"{method}","params":{params}}}"#)).told_nothing("a");
        let answer = story.heard(1).json();
        assert!(answer["error"]["code"] == -32602 || answer["result"]["isError"] == true, "{params}: {answer}");
        assert!(answer.to_string().contains("is there twice, or with other capitalisation"), "{params}: {answer}");
    }
    story.call(1, 3, "a__read").told("a");
    // Names that no guard reads are data.
    story
        .ask(1, json!(4), "tools/call", json!({"name": "a__read", "arguments": {"env": {"path": 1, "PATH": 2}}}))
        .told("a");
}

#[test]
fn a_schema_that_cannot_be_used_is_reported_once_and_its_tool_works() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let call = |story: &mut Story, word: &str| {
        story.ask(1, json!(1), "tools/call", json!({"name": "a__x", "arguments": {"x": word}}));
    };
    call(&mut story, "costly");
    let refused = story.heard(1).json();
    assert_eq!(refused["result"]["isError"], true);
    assert!(
        refused["result"]["content"][0]["text"].as_str().is_some_and(|words| words.contains("too long")),
        "{refused}"
    );
    assert_eq!(story.called.pop().map(|called| called.outcome), Some(Outcome::BadArguments));
    assert_eq!(story.status("a")["unchecked"], json!([]));
    for _ in 0..2 {
        call(&mut story, "unchecked");
        story.told("a");
    }
    assert_eq!(story.status("a")["unchecked"], json!([{"tool": "a__x", "reason": "it is too large"}]));
    let records: Vec<&Record> =
        story.records.iter().filter(|record| record.event == RecordEvent::SchemaUnchecked).collect();
    let [record] = records[..] else { panic!("one record: {records:?}") };
    assert_eq!((record.backend(), record.reason.as_deref()), (Some("a"), Some("it is too large")));
    // Another definition is another schema.
    story.maker("a").tools = vec![json!({"name": "x", "inputSchema": {"type": "object", "title": "new"}})];
    story.link_says(story.link("a"), json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})).heard(1);
    assert_eq!(story.status("a")["unchecked"], json!([]));
}

#[test]
fn the_elements_kept_of_a_list_are_bounded() {
    let mut story = Story::simple(&[("a", Maker { mute: true, ..maker(&["x"]) })]);
    let link = story.link("a");
    let (_, hello) = story.told("a");
    story.answer(link, &hello["id"], json!({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": "1"}}));
    let (_, list) = story.told("a");
    let page = format!(
        r#"{{"jsonrpc":"2.0","id":{},"result":{{"tools":[{}{{"name":"last"}}]}}}}"#,
        list["id"],
        "0,".repeat(200_000)
    );
    story.event(Event::LinkSaid { link, message: page.into() });
    assert_eq!(story.status("a")["offers"]["tools"], 5_000);
    assert!(story.notes.iter().any(|note| note.contains("too many")), "{:?}", story.notes);
}

#[test]
fn held_bytes_of_one_client_are_limited() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", maker(&["y"]))]);
    story.shake(2).shake_as(3, Who { name: "other".into(), role: None, profile: None }, json!({}));
    story.auto = false;
    for backend in ["a", "b"] {
        let link = story.link(backend);
        story.dies(link);
    }
    let large = "x".repeat(20 << 20);
    let call = |story: &mut Story, client: u64, id: u64, tool: &str| {
        story.ask(client, json!(id), "tools/call", json!({"name": tool, "arguments": {"text": large}}));
    };
    // Two sessions of one client, and two backends: they share one quota.
    call(&mut story, 1, 1, "a__x");
    call(&mut story, 2, 1, "b__y");
    call(&mut story, 1, 2, "b__y");
    story.hears_nothing(1).hears_nothing(2);
    call(&mut story, 2, 2, "a__x");
    let refused = story.heard(2).json();
    assert_eq!(refused["result"]["_meta"]["outlast/failure"]["reason"], "hold_full", "{refused}");
    call(&mut story, 3, 1, "a__x");
    story.hears_nothing(3);
}

fn turn_off(story: &mut Story, what: Switch) {
    story.event(Event::SwitchAsked { ticket: 1, what, off: true });
}

/// A call of `a__x` whose arguments are checked beside the loop; returns the ticket.
fn call_later(story: &mut Story, client: u64, id: u64) -> u64 {
    let arguments = json!({"x": "later"});
    story.ask(client, json!(id), "tools/call", json!({"name": "a__x", "arguments": arguments}));
    let job = story.checks.pop().expect("arguments to be checked");
    assert_eq!(job.arguments, arguments.to_string());
    job.ticket
}

#[test]
fn a_call_waits_for_its_check_and_others_do_not() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.shake(2);
    let table = [
        // fit                               reaches the backend
        (Fit::Fits, true),
        (Fit::Unchecked("no process".into()), true),
        (Fit::Misfit("`/x` is bad".into()), false),
        (Fit::TooCostly, false),
    ];
    for (fit, reaches) in table {
        let ticket = call_later(&mut story, 1, 1);
        story.hears_nothing(1).told_nothing("a");
        story.call(2, 1, "a__x").told("a");
        story.event(Event::Checked { ticket, fit: fit.clone() });
        match reaches {
            true => assert_eq!(story.told("a").1["params"]["arguments"]["x"], "later"),
            false => assert_eq!(story.heard(1).json()["result"]["isError"], true, "{fit:?}"),
        }
        // A repeated result has no effect.
        story.event(Event::Checked { ticket, fit }).hears_nothing(1).told_nothing("a");
    }
    // A check that works again withdraws the report.
    let ticket = call_later(&mut story, 1, 2);
    story.event(Event::Checked { ticket, fit: Fit::Unchecked("no process".into()) }).told("a");
    assert_eq!(story.status("a")["unchecked"][0]["reason"], "no process");
    let ticket = call_later(&mut story, 1, 3);
    story.event(Event::Checked { ticket, fit: Fit::Fits }).told("a");
    assert_eq!(story.status("a")["unchecked"], json!([]));
}

#[test]
fn a_call_that_waits_for_its_check_can_be_cancelled_and_does_not_wait_for_ever() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    let waiting = |story: &Story| story.gateway.status(story.now).under_way.waiting_for_checks;
    let params = json!({"name": "a__x", "arguments": {"x": "later"}});
    story.ask(1, json!(1), "tools/call", params.clone());
    assert_eq!((story.checks.len(), waiting(&story)), (1, 1));
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#);
    assert!(story.checks.is_empty(), "it need not be checked any more");
    story.ask(1, json!(2), "tools/call", params.clone()).pass(secs(30));
    assert_eq!((story.heard(1).json()["result"]["isError"].clone(), story.checks.len()), (json!(true), 0));
    story.ask(1, json!(3), "tools/call", params.clone()).event(Event::ClientLeft { client: 1 });
    assert_eq!((story.checks.len(), waiting(&story)), (0, 0));
    story.shake(2).ask(2, json!(4), "tools/call", params).event(Event::StopAsked);
    let failed = story.heard(2).json();
    assert!(
        failed["result"]["content"][0]["text"].as_str().is_some_and(|words| words.contains("stopping")),
        "{failed}"
    );
    story.told_nothing("a");
    assert_eq!(waiting(&story), 0);
}

/// The guards keep their order after the check, and the rate token is not taken twice.
#[test]
fn a_call_is_judged_again_after_its_check() {
    let configured = |allow: &str, x: serde_json::Value| {
        let mut configured = settings(vec![stdio("a")]);
        configured.roles.insert("reader".into(), Role { allow: vec![pattern(allow)], deny: vec![] });
        configured.rates.default = Some(Rate { per_minute: 1, burst: 1 });
        let maker = Maker { tools: vec![json!({"name": "x", "inputSchema": x})], ..maker(&[]) };
        (configured, maker)
    };
    type Change = fn(&mut Story, Settings);
    let table: [(&str, Change, Option<i64>); 4] = [
        ("nothing", |_, _| {}, None),
        ("the tool is off", |story, _| turn_off(story, Switch::Tool("a__x".into())), Some(7013)),
        (
            "the role may less",
            |story, less| {
                story.event(Event::Configured(Box::new(less)));
            },
            Some(7014),
        ),
        (
            "the key was revoked",
            |story, _| {
                let until = Some(story.now);
                story.event(Event::ClientAllowed { client: 1, until });
            },
            Some(7014),
        ),
    ];
    for (name, change, refused) in table {
        for fit in [Fit::Fits, Fit::Misfit("bad".into())] {
            let (settings, maker) = configured("*", json!({"type": "object"}));
            let mut story = Story::new(settings, &[("a", maker)]);
            story.event(Event::TimePassed);
            story.shake_as(1, as_role("reader"), json!({}));
            let ticket = call_later(&mut story, 1, 1);
            change(&mut story, configured("none", json!({})).0);
            story.event(Event::Checked { ticket, fit: fit.clone() });
            story.clients.retain(|heard| heard.text.contains(r#""id":1"#));
            match (refused, fit) {
                (None, Fit::Fits) => assert_eq!(story.told("a").1["method"], "tools/call", "{name}"),
                (None, _) => assert_eq!(story.heard(1).json()["result"]["isError"], true, "{name}"),
                (Some(expected), _) => {
                    story.told_nothing("a");
                    assert_eq!(code(&mut story, 1), expected, "{name}");
                }
            }
        }
    }
    // The schema changed in the meantime: the result belongs to the old one.
    let (settings, maker) = configured("*", json!({"type": "object"}));
    let mut story = Story::new(settings, &[("a", maker)]);
    story.event(Event::TimePassed);
    story.shake_as(1, as_role("reader"), json!({}));
    let ticket = call_later(&mut story, 1, 1);
    story.maker("a").tools = vec![json!({"name": "x", "inputSchema": {"type": "object", "title": "new"}})];
    story.link_says(story.link("a"), json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})).heard(1);
    story.event(Event::Checked { ticket, fit: Fit::Fits }).told_nothing("a");
    let job = story.checks.pop().expect("it is checked against the new one");
    assert!(job.schema.ends_with(br#""title":"new"}"#) || job.schema.starts_with(br#"{"title":"new""#), "{job:?}");
    story.event(Event::Checked { ticket: job.ticket, fit: Fit::Fits });
    assert_eq!(story.told("a").1["method"], "tools/call");
}

/// A decision from the arrival of a call may be outdated when the call is sent.
#[test]
fn a_held_call_is_checked_again_when_it_is_sent() {
    let with_roles = |allow: &str| {
        let mut configured = settings(vec![stdio("a"), stdio("b")]);
        configured.roles.insert("reader".into(), Role { allow: vec![pattern(allow)], deny: vec![] });
        configured.rates.default = Some(Rate { per_minute: 1, burst: 1 });
        configured
    };
    type Change = fn(&mut Story, Settings);
    let table: [(&str, Change, Option<i64>); 8] = [
        ("nothing", |_, _| {}, None),
        (
            "the backend no longer offers the tool",
            |story, mut less| {
                less.roles.insert("reader".into(), Role { allow: vec![pattern("*__x")], deny: vec![] });
                less.backends[0].deny = vec![pattern("x")];
                story.event(Event::Configured(Box::new(less)));
            },
            Some(-32602),
        ),
        ("the tool is off", |story, _| turn_off(story, Switch::Tool("a__x".into())), Some(7013)),
        ("the backend is off", |story, _| turn_off(story, Switch::Backend("a".into())), Some(7013)),
        (
            "the role may less",
            |story, less| {
                story.event(Event::Configured(Box::new(less)));
            },
            Some(7014),
        ),
        (
            "the key was revoked",
            |story, _| {
                let until = Some(story.now);
                story.event(Event::ClientAllowed { client: 1, until });
            },
            Some(7014),
        ),
        (
            "the token expires",
            |story, _| {
                let until = Some(story.now + ms(500));
                story.event(Event::ClientAllowed { client: 1, until });
            },
            Some(7014),
        ),
        (
            "the token was renewed",
            |story, _| {
                let until = Some(story.now + ms(500));
                story.event(Event::ClientAllowed { client: 1, until });
                story.event(Event::ClientAllowed { client: 1, until: Some(story.now + secs(60)) });
            },
            None,
        ),
    ];
    for (name, change, refused) in table {
        let mut story = Story::new(with_roles("*__x"), &[("a", maker(&["x"])), ("b", maker(&["x"]))]);
        story.shake_as(1, as_role("reader"), json!({}));
        let link = story.link("a");
        story.auto = false;
        story.dies(link).call(1, 1, "a__x").hears_nothing(1);
        change(&mut story, with_roles("b__*"));
        story.clients.retain(|heard| heard.text.contains(r#""id":1"#));
        story.auto = true;
        story.pass(secs(5));
        if let Some(next) = story.connected.last().copied().filter(|next| next.backend == link.backend && *next != link)
        {
            story.up.insert(next.serial, next);
            story.event(Event::LinkUp { link: next, pid: Some(1) });
        }
        story.clients.retain(|heard| heard.text.contains(r#""id":1"#));
        match refused {
            None => assert_eq!(story.told("a").1["method"], "tools/call", "{name}"),
            Some(expected) => {
                story.told_nothing("a");
                assert_eq!(code(&mut story, 1), expected, "{name}");
                let outcomes: Vec<Outcome> = story.called.iter().map(|called| called.outcome).collect();
                let outcome = match expected {
                    7013 => Outcome::SwitchedOff,
                    7014 => Outcome::Denied,
                    _ => Outcome::Unknown,
                };
                assert_eq!(outcomes, [outcome], "{name}");
            }
        }
        story.hears_nothing(1);
    }
}

/// A lenient backend may read a notification as a request, or one method as another.
#[test]
fn only_notifications_of_mcp_reach_a_backend() {
    let mut configured = settings(vec![Backend { children: Children::PerSession, ..stdio("a") }]);
    configured.roles.insert("reader".into(), Role { allow: vec![pattern("a__read")], deny: vec![] });
    configured.rates.default = Some(Rate { per_minute: 60, burst: 9 });
    let mut story = Story::new(configured, &[("a", maker(&["read", "write"]))]);
    story.shake_as(1, as_role("reader"), json!({}));
    story.call(1, 1, "a__read").told("a");
    let table = [
        r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"write","arguments":{}}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/strange"}"#,
        r#"{"jsonrpc":"2.0","method":"Notifications/roots/list_changed"}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"error","data":"d"}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed","Method":"tools/call","params":{"name":"write"}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed","params":{"name":"a","name":"b"}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/progress","Id":7,"params":{"progressToken":1}}"#,
    ];
    for note in table {
        story.say(1, note).told_nothing("a").hears_nothing(1);
        let refused = story.refused_notes.pop().unwrap_or_else(|| panic!("counted: {note}"));
        assert!(note.contains(&refused.method), "{note}");
        assert!(matches!(refused.from, Sender::Client { client: 1, .. }), "{refused:?}");
    }
    story.say(1, r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#);
    assert_eq!(story.told("a").1["method"], "notifications/roots/list_changed");
    assert!(story.refused_notes.is_empty());
}

#[test]
fn only_notifications_of_mcp_reach_a_client() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.call(1, 1, "a__x");
    let (link, _) = story.told("a");
    for method in ["notifications/strange", "sampling/createMessage", "notifications/initialized"] {
        story.link_says(link, json!({"jsonrpc": "2.0", "method": method, "params": {}})).hears_nothing(1);
        let refused = story.refused_notes.pop().expect("counted");
        assert_eq!((refused.from, refused.method.as_str()), (Sender::Backend("a".into()), method));
    }
    story.link_says(link, json!({"jsonrpc": "2.0", "method": "notifications/strange".repeat(100)}));
    assert!(story.refused_notes.pop().is_some_and(|refused| refused.method.chars().count() <= 101));
    let complete =
        json!({"jsonrpc": "2.0", "method": "notifications/elicitation/complete", "params": {"elicitationId": "e"}});
    story.link_says(link, complete.clone()).hears(1, complete);
}

#[test]
fn methods_that_mcp_does_not_have_need_all_rights_or_the_configuration() {
    let roles = |configured: &mut Settings| {
        configured.roles.insert("reader".into(), Role { allow: vec![pattern("a__x")], deny: vec![] });
        configured.roles.insert("admin".into(), Role { allow: vec![pattern("*")], deny: vec![] });
        configured.roles.insert("almost".into(), Role { allow: vec![pattern("*")], deny: vec![pattern("z")] });
    };
    for (role, configured, passes) in [
        (Some("reader"), false, false),
        (Some("almost"), false, false),
        (Some("admin"), false, true),
        (Some("reader"), true, true),
        (None, false, true),
    ] {
        let mut given = Settings { forward_unknown: configured, ..settings(vec![stdio("a")]) };
        if role.is_some() {
            roles(&mut given);
        }
        let mut story = Story::new(given, &[("a", maker(&["x"]))]);
        story.shake_as(1, role.map_or_else(local, as_role), json!({}));
        story.ask(1, json!(1), "my/method", json!({}));
        match passes {
            true => assert_eq!(story.told("a").1["method"], "my/method"),
            false => {
                assert_eq!(code(&mut story, 1), 7014, "{role:?}");
                assert_eq!(story.called.pop().map(|called| called.outcome), Some(Outcome::Denied));
            }
        }
        // A method that a lenient backend may read as a tool call is always refused.
        for method in ["Tools/Call", "tools/call ", "tools/call\u{0}", "TOOLS/CALL/"] {
            story.ask(1, json!(2), method, json!({"name": "x"})).told_nothing("a");
            assert_eq!(code(&mut story, 1), -32601, "{method:?}");
        }
        // The same for requests of the backend.
        story.call(1, 3, "a__x");
        let (link, _) = story.told("a");
        story.link_says(link, json!({"jsonrpc": "2.0", "id": "q", "method": "my/question"}));
        match passes {
            true => assert_eq!(story.heard(1).json()["method"], "my/question"),
            false => assert_eq!(story.told("a").1["error"]["code"], -32601),
        }
    }
}

#[test]
fn an_answer_of_a_client_reaches_its_backend_without_other_members() {
    let mut story = Story::simple(&[("a", maker(&["x"]))]);
    story.call(1, 1, "a__x");
    let (link, _) = story.told("a");
    story.link_says(link, json!({"jsonrpc": "2.0", "id": "q", "method": "roots/list"}));
    let asked = story.heard(1).json()["id"].clone();
    story.say(
        1,
        &format!(
            r#"{{"jsonrpc":"2.0","id":{asked},"result":{{"roots":[]}},"Method":"tools/call","params":{{"name":"x"}}}}"#
        ),
    );
    assert_eq!(story.told("a").1, json!({"jsonrpc": "2.0", "id": "q", "result": {"roots": []}}));
}

#[test]
fn only_known_or_possible_names_can_be_switched() {
    let mut story = Story::simple(&[("a", maker(&["x"])), ("b", Maker { mute: true, ..maker(&["y"]) })]);
    let turn = |story: &mut Story, what: Switch, off: bool| {
        story.event(Event::SwitchAsked { ticket: 1, what, off });
        story.answers.pop().expect("an answer").1
    };
    let tool = |name: &str| Switch::Tool(name.into());
    assert_eq!(turn(&mut story, tool("a__y"), true), Err("no tool is named `a__y`".into()));
    assert_eq!(turn(&mut story, Switch::Backend("c".into()), true), Err("no backend is named `c`".into()));
    // The tools of that backend are not known yet.
    assert!(turn(&mut story, tool("b__y"), true).is_ok());
    // A backend that is down keeps its tools, and a tool that is off can be turned on although it is not listed.
    let link = story.link("a");
    story.auto = false;
    story.dies(link);
    assert!(turn(&mut story, tool("a__x"), true).is_ok());
    assert!(turn(&mut story, Switch::Backend("a".into()), true).is_ok());
    assert!(turn(&mut story, tool("a__x"), false).is_ok());
    let names: Vec<String> = story.gateway.names_to_switch().collect();
    assert_eq!(names, ["a", "b", "a__x"]);
}
