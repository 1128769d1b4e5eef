//! The status page, in a real browser.

use serde_json::{Value, json};

use super::{
    web::Web,
    world::{Gate, backend},
};
use crate::{mcp::client::Place, support::browser::Browser};

/// Exits before its handshake, with output that would be an HTML element if the page did not escape it.
const BROKEN: &str = r#"
[[backend]]
name = "broken"
command = "/bin/sh"
args = ["-c", "echo '<b id=evil>no token</b>' >&2; exit 3"]
delay_first = "30s"
delay_max = "30s"
first_restart = "delay"
"#;

const NARROW: u32 = 390;

fn pill(backend: &str) -> String {
    format!("return document.querySelector('[data-backend={backend}] .pill')?.textContent")
}

fn shows(backend: &str, state: &str) -> String {
    format!("return document.querySelector('[data-backend={backend}] .pill')?.textContent === '{state}'")
}

#[test]
fn the_page_shows_state_and_events() {
    let Some(browser) = Browser::find("the_page_shows_state_and_events") else { return };
    let gate = Gate::listen(Place::new(), &[&backend("one", &[], ""), BROKEN].concat());
    let url = format!("http://{}/", gate.address);
    browser.look(1360, 900, "light");
    browser.open(&url);
    browser.until("one to be ready", &shows("one", "ready"));
    browser.until("the page to be live", "return document.getElementById('live').textContent === 'live'");
    browser.until("broken to wait", &shows("broken", "waiting"));
    // Failed backends come first, with their cause.
    let first = "return document.querySelector('#cards [data-backend]').dataset.backend";
    assert_eq!(browser.until("a card", first), "broken");
    browser.until(
        "its cause",
        "return /exit/i.test(document.querySelector('[data-backend=broken] .trouble').textContent)",
    );
    browser.until("events from before", "return document.querySelectorAll('#events li').length > 0");

    // The time to its next start counts down.
    let seconds = "return Number(/Next try in (\\d+) s/.exec(document.querySelector('[data-backend=broken] .trouble')\
                   .textContent)?.[1]) || null";
    let first = browser.until("a countdown", seconds).as_u64().expect("a number");
    assert!(first <= 45, "with its jitter: {first}");
    browser.until("it to go down", &format!("const left = (() => {{ {seconds} }})(); return left < {first}"));
    // Output of a server is shown as text, whatever it contains.
    let stderr = "return document.querySelector('[data-backend=broken] pre').textContent";
    assert_eq!(browser.until("its last words", stderr).as_str().map(str::trim), Some("<b id=evil>no token</b>"));
    assert!(browser.run("return document.getElementById('evil')").is_null());

    // Changes are shown as they happen.
    let pid = gate.child("one");
    let mut session = gate.session();
    session.call("one__echo", json!({"text": "hello"}));
    let calls = "return [...document.querySelectorAll('#events li')].some(li => li.textContent.includes('one__echo'))";
    browser.until("the call", calls);
    crate::mcp::client::signal(pid, nix::sys::signal::Signal::SIGKILL);
    let crash = "return [...document.querySelectorAll('#events .ERROR')].some(li => li.textContent.includes('one'))";
    browser.until("the crash", crash);
    browser.until(
        "another process",
        &format!(
            "const facts = document.querySelector('[data-backend=one] .facts').textContent;\
             return facts.includes('pid ') && !facts.includes('pid {pid}')"
        ),
    );

    // It fits in every window size and in both colour schemes, and the schemes differ.
    let mut colours = Vec::new();
    for (width, scheme) in [(1360, "light"), (1360, "dark"), (NARROW, "light"), (NARROW, "dark")] {
        browser.look(width, 844, scheme);
        let sizes = browser.run("return [document.documentElement.scrollWidth, innerWidth]");
        assert_eq!(sizes[0], sizes[1], "nothing sticks out at {width}");
        colours.push(browser.run("return getComputedStyle(document.body).backgroundColor"));
        assert!(browser.picture().len() > 10_000);
    }
    assert_eq!((&colours[0], &colours[1]), (&colours[2], &colours[3]));
    assert_ne!(colours[0], colours[1]);
    assert_eq!(browser.complaints(), [""; 0], "nothing is broken, and nothing was held back by the policy");
    gate.end();
}

#[test]
fn buttons_and_switches_of_the_page_work() {
    let Some(browser) = Browser::find("buttons_and_switches_of_the_page_work") else { return };
    let gate = Gate::listen(Place::new(), &[backend("one", &[], ""), backend("two", &[], "")].concat());
    browser.look(1360, 1800, "dark");
    browser.open(&format!("http://{}/", gate.address));
    browser.until("one to be ready", &shows("one", "ready"));
    browser.until("two to be ready", &shows("two", "ready"));

    let old = gate.child("one");
    browser.click("[data-backend=one] [data-do=restart]");
    browser.until(
        "another process",
        &format!(
            "const facts = document.querySelector('[data-backend=one] .facts').textContent;\
             return facts.includes('pid ') && !facts.includes('pid {old}')"
        ),
    );
    assert_ne!(gate.child("one"), old);

    // A tool is switched off for all clients, and on again.
    let mut session = gate.session();
    browser.click("[data-backend=one] details summary");
    let lever = "[data-tool=one__echo] button";
    let is_off = |browser: &Browser, off: bool| {
        let script = format!("return document.querySelector('{lever}')?.getAttribute('aria-checked') === '{}'", !off);
        browser.until("the switch to turn", &script);
    };
    browser.click(lever);
    is_off(&browser, true);
    assert!(!session.tools().iter().any(|tool| tool == "one__echo"));
    // It is still listed and can be turned on again, also on a page that was opened later.
    browser.open(&format!("http://{}/", gate.address));
    browser.until("one to be ready", &shows("one", "ready"));
    browser.click("[data-backend=one] details summary");
    is_off(&browser, true);
    browser.click(lever);
    is_off(&browser, false);
    assert!(session.tools().iter().any(|tool| tool == "one__echo"));

    browser.click("[data-backend=two] [data-do=switch]");
    browser.until("two to be off", &shows("two", "switched off"));
    assert!(!session.tools().iter().any(|tool| tool.starts_with("two__")));
    browser.click("[data-backend=two] [data-do=switch]");
    browser.until("two to be back", &shows("two", "ready"));

    // The filter shows only matching entries.
    browser.type_into("#filter", "two__");
    browser.until("one to be hidden", "return document.querySelector('[data-backend=one]').hidden");
    assert_eq!(browser.until("two", &pill("two")), "ready");
    assert_eq!(browser.complaints(), [""; 0]);
    gate.end();
}

#[test]
fn with_auth_the_status_page_needs_credentials() {
    let Some(browser) = Browser::find("with_auth_the_status_page_needs_credentials") else { return };
    // The hash of `open sesame`.
    let key = "[[auth.key]]\nname = \"anna\"\n\
               sha256 = \"41ef4bb0b23661e66301aac36066912dac037827b4ae63a7b1165a5aa93ed4eb\"\n\n";
    let gate = Gate::listen(Place::new(), &[key, &backend("one", &[], "")].concat());
    browser.open(&format!("http://{}/", gate.address));
    let asks = "return !document.getElementById('gate').hidden && document.getElementById('status').hidden";
    browser.until("the question", asks);
    browser.type_into("#key", "open barley");
    browser.click("#ask button");
    browser.until("the refusal", "return document.getElementById('why').textContent.startsWith('Not accepted')");
    browser.type_into("#key", "open sesame");
    browser.click("#ask button");
    browser.until("one to be ready", &shows("one", "ready"));
    browser.click("[data-backend=one] [data-do=restart]");
    let restarted =
        "return [...document.querySelectorAll('#events li')].some(li => li.textContent.includes('restart requested'))";
    browser.until("the restart", restarted);
    browser.click("#leave");
    browser.until("the question again", asks);
    assert!(browser.run("return sessionStorage.getItem('outlast.key')").is_null());
    gate.end();
}

#[test]
fn only_unlimited_roles_may_send_operator_requests() {
    // The hashes of `admin` and `reader`.
    let config = r#"
        [role.admin]
        allow = ["*"]
        [role.reader]
        allow = ["one__echo"]
        [[auth.key]]
        name = "anna"
        role = "admin"
        sha256 = "8c6976e5b5410415bde908bd4dee15dfb167a9c873fc4bb8a81f6f2ab448a918"
        [[auth.key]]
        name = "bert"
        role = "reader"
        sha256 = "3d0941964aa3ebdcb00ccef58b1bb399f9f898465e9886d5aec7f31090a0fb30"
    "#;
    let gate = Gate::listen(Place::new(), &[config, &backend("one", &[], "")].concat());
    let mut web = Web::connect(&gate.address);
    let mut ask = |method: &str, path: &str, key: &str, token: &str| {
        let key = format!("Bearer {key}");
        let headers =
            [("authorization", key.as_str()), ("content-type", "application/json"), ("x-outlast-token", token)];
        web.ask(method, path, &headers, if method == "POST" { br#"{"backend":"one"}"# } else { b"" })
    };
    let mut token = |key: &str| {
        let said: Value = serde_json::from_slice(&ask("GET", "/api/token", key, "").body).expect("JSON");
        said["token"].as_str().expect("a token").to_owned()
    };
    let (admins, readers) = (token("admin"), token("reader"));
    assert_eq!(ask("GET", "/api/state", "admin", "").status, 200);
    assert_eq!(ask("GET", "/api/state", "reader", "").status, 403);
    assert_eq!(ask("GET", "/api/events", "reader", "").status, 403);
    assert_eq!(ask("GET", "/api/state", "stranger", "").status, 401);
    assert_eq!(ask("POST", "/api/restart", "reader", &readers).status, 403);
    assert_eq!(ask("POST", "/api/restart", "admin", "").status, 403, "without the token");
    assert_eq!(ask("POST", "/api/restart", "admin", &admins).status, 200);
    assert_eq!(ask("GET", "/metrics", "reader", "").status, 200);
    gate.end();
}
