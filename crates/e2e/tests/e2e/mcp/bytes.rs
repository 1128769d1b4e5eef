//! W4, C3: bytes are forwarded unchanged; lines that are not messages are not forwarded.

use std::thread;

use serde_json::{Value, json};

use super::client::{INITIALIZED, Place, Setup, initialize_params, text, until};

#[test]
fn simultaneous_and_short_clients_are_served() {
    let place = Place::new();
    thread::scope(|scope| {
        for name in ["one", "two"] {
            let place = &place;
            scope.spawn(move || {
                let mut client = Setup::new(place).ready();
                assert_eq!(client.call("echo", json!({"text": name})), name);
                client.restart();
                assert_eq!(client.call("echo", json!({"text": name})), name);
                client.end();
            });
        }
        scope.spawn(|| Setup::new(&place).start().end());
    });
    assert_eq!(place.audit_of("instance_ended").len(), 3);
    place.is_swept();
}

#[test]
fn garbage_is_refused_and_the_connection_stays_open() {
    let place = Place::new();
    let log = place.join("log");
    let mut client = Setup::new(&place).puppet(["--log", &log]).ready();
    let garbage: [&[u8]; 6] =
        [b"not json", b"{\"jsonrpc\":\"2.0\",", b"\xff\xfe\x00", b"{} {}", b"{\"id\":1,}", b"\"\xff\""];
    for line in garbage {
        client.raw(&[line, b"\n"].concat());
        let answer = client.answer_to("null");
        assert_eq!(answer["error"]["code"], -32700, "{:?}: {answer}", String::from_utf8_lossy(line));
        assert_eq!(answer["id"], Value::Null);
    }
    client.raw(b"\n   \n\r\n");
    assert_eq!(client.call("echo", json!({"text": "still here"})), "still here");
    assert_eq!(place.log("log").len(), 3, "the handshake and one call");
    client.end();
}

#[test]
fn a_line_of_32_mb_passes_byte_for_byte() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    // The words differ, so that a lost or repeated piece is noticed.
    let words: String = (0..4_000_000).map(|n| format!("{n:07} ")).collect();
    assert_eq!(words.len(), 32_000_000);
    let id = client.send_call("echo", json!({"text": words}));
    let answer = client.answer(id);
    assert!(answer["result"]["content"][0]["text"] == words.as_str(), "32 MB came back changed");
    client.end();
}

#[test]
fn a_line_over_64_mib_fails_under_its_own_id() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    client.raw(br#"{"jsonrpc":"2.0","id":"too long","method":"tools/call","params":{"name":"echo","text":""#);
    let block = vec![b'x'; 1 << 20];
    for _ in 0..65 {
        client.raw(&block);
    }
    client.raw(b"\"}}\n");
    client.owed(r#""too long""#);
    let answer = client.answer_to(r#""too long""#);
    assert_eq!(answer["error"]["code"], -32600, "{answer}");
    assert_eq!(client.call("echo", json!({"text": "next"})), "next");
    client.end();
}

#[test]
fn ids_come_back_as_they_went() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    client.keep_raw();
    let ids = [
        r#""plain""#,
        r#""""#,
        "-5",
        "0",
        "12345678901234567890",
        "-99999999999999999999999999",
        r#""with \"quotes\" and \\ and é""#,
        r#""\u00e9\ud83e\udd80\/""#,
        r#"" 1""#,
        r#""1""#,
    ];
    for id in ids {
        let known = serde_json::from_str::<Value>(id).expect("JSON").to_string();
        client.owed(&known);
        client.line(&format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"echo","arguments":{{"text":"x"}}}}}}"#
        ));
        assert_eq!(text(&client.answer_to(&known)["result"]), "x");
        let line = String::from_utf8(client.raw.pop().expect("kept")).expect("text");
        assert!(line.contains(&format!(r#""id":{id},"#)), "{id} in {line}");
    }
    // Open when the server exits, each still gets its answer, under an id of the same type and value.
    for id in ids {
        client.owed(&serde_json::from_str::<Value>(id).expect("JSON").to_string());
        client.line(&format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"sleep","arguments":{{"ms":600000}}}}}}"#
        ));
    }
    client.raw.clear();
    client.kill_server();
    until("all answers", || {
        client.count("none");
        (client.owes() == 0).then_some(())
    });
    let values: Vec<Value> =
        client.raw.iter().map(|line| serde_json::from_slice::<Value>(line).expect("JSON")["id"].take()).collect();
    for id in ids {
        assert!(values.contains(&serde_json::from_str(id).expect("JSON")), "{id} in {values:#?}");
    }
    client.end();
}

#[test]
fn an_id_used_twice_is_answered_twice() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    for ms in [50, 1] {
        client.owed("7777");
        client.line(&format!(
            r#"{{"jsonrpc":"2.0","id":7777,"method":"tools/call","params":{{"name":"sleep","arguments":{{"ms":{ms}}}}}}}"#
        ));
    }
    for _ in 0..2 {
        assert_eq!(text(&client.answer_to("7777")["result"]), "slept");
    }
    for _ in 0..2 {
        client.owed("7777");
        client.line(
            r#"{"jsonrpc":"2.0","id":7777,"method":"tools/call","params":{"name":"sleep","arguments":{"ms":600000}}}"#,
        );
    }
    client.kill_server();
    for _ in 0..2 {
        let answer = client.answer_to("7777");
        super::client::failure(&answer["result"]);
    }
    client.end();
}

#[test]
fn odd_bytes_pass_both_ways_untouched() {
    let place = Place::new();
    let log = place.join("log");
    let mut client = Setup::new(&place).puppet(["--log", &log]).ready();
    client.keep_raw();
    let odd = [
        "{\"jsonrpc\":\"2.0\" , \"method\" :\t\"notifications/odd\", \"params\":{ \"n\":1.0, \"m\":1e5,\"big\":12345678901234567890, \"neg\":-0.0 }, \"unknown\":[ ]}",
        r#"{"method":"notifications/odd","params":{"text":"\u00e9 é \ud83e\udd80 🦀 \/","n":1E+2},"jsonrpc":"2.0","jsonrpc2":null}"#,
        r#"   {"jsonrpc":"2.0","method":"notifications/odd"}  "#,
    ];
    for line in odd {
        client.line(line);
    }
    for line in odd {
        client.call("garbage", json!({"text": line}));
        client.next("notifications/odd");
    }
    let sent: Vec<String> = place.log("log").into_iter().map(|(_, line)| line).collect();
    assert_eq!(sent[2..5], odd, "from the client");
    let came: Vec<String> = client
        .raw
        .iter()
        .map(|line| String::from_utf8_lossy(line).into_owned())
        .filter(|line| line.contains("notifications/odd"))
        .collect();
    assert_eq!(came, odd, "from the server");

    // The same for requests of the server, and their answers.
    let asking = client.send_call("ask", json!({"method": "roots/list", "params": {"odd": 1}}));
    let question = client.next("roots/list");
    let answer = format!(r#"{{"jsonrpc":"2.0", "id":{}, "result":{{"roots":[ ],"n":1.0,"m":1e5}}}}"#, question["id"]);
    client.line(&answer);
    assert_eq!(text(&client.answer(asking)["result"]), answer);
    client.end();
}

#[test]
fn output_that_is_no_json_goes_to_stderr_with_a_tag() {
    let place = Place::new();
    let mut client = Setup::new(&place).options(["--name", "noisy"]).ready();
    for babble in ["Listening on port 8080", "{\"half\":", "12:00 INFO ready"] {
        client.call("garbage", json!({"text": babble}));
        let line = client.says(babble);
        assert_eq!(line, format!("[noisy stdout, not JSON] {babble}"));
    }
    for babble in [r#"{"level":"info","msg":"up"}"#, r#"{"method":"GET","path":"/"}"#, "[1,2,3]", "4711"] {
        client.call("garbage", json!({"text": babble}));
        let line = client.says(babble);
        assert_eq!(line, format!("[noisy stdout, not JSON-RPC] {babble}"));
    }
    assert_eq!(client.status()["stdout_not_json"], 7);
    assert!(client.heard.is_empty(), "{:?}", client.heard);
    client.end();
}

#[test]
fn batches_are_taken_apart_and_answered_together() {
    let place = Place::new();
    let mut client = Setup::new(&place).start();
    client.ask("initialize", initialize_params("2025-03-26"));
    client.line(INITIALIZED);
    client.keep_raw();
    let call = |id: u32, words: &str| json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": "echo", "arguments": {"text": words}}});
    let note = json!({"jsonrpc": "2.0", "method": "notifications/odd"});
    client.owed("501");
    client.owed("502");
    client.line(&json!([call(501, "a"), note, call(502, "b")]).to_string());
    assert_eq!(text(&client.answer_to("501")["result"]), "a");
    assert_eq!(text(&client.answer_to("502")["result"]), "b");
    assert_eq!(client.raw.len(), 1, "one line for both: {:?}", client.raw);
    client.line("[]");
    assert_eq!(client.answer_to("null")["error"]["code"], -32600);

    // Half answered when the server exits: the other half fails, and both are sent together.
    client.raw.clear();
    let stuck = json!({"jsonrpc": "2.0", "id": 504, "method": "tools/call", "params": {"name": "sleep", "arguments": {"ms": 600_000}}});
    client.owed("503");
    client.owed("504");
    client.line(&json!([call(503, "c"), stuck]).to_string());
    client.kill_server();
    assert_eq!(text(&client.answer_to("503")["result"]), "c");
    let answer = client.answer_to("504");
    assert_eq!(super::client::failure(&answer["result"])["exit"]["signal"], 9);
    client.call("garbage", json!({"text": json!([note, note]).to_string()}));
    client.next("notifications/odd");
    client.next("notifications/odd");
    client.end();
}
