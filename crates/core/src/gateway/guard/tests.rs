use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
fn birth() -> Instant {
    Instant::now()
}

fn patterns(texts: &[&str]) -> Vec<Pattern> {
    texts.iter().map(|text| Pattern((*text).to_owned())).collect()
}

#[test]
fn a_star_matches_any_text() {
    #[rustfmt::skip]
    let table = [
        // pattern          name               fits
        ("read_file",       "read_file",       true),
        ("read_file",       "read_files",      false),
        ("read_file",       "Read_file",       false),
        ("*",               "",                true),
        ("*",               "anything",        true),
        ("",                "",                true),
        ("",                "a",               false),
        ("fs__*",           "fs__read",        true),
        ("fs__*",           "fs__",            true),
        ("fs__*",           "gfs__read",       false),
        ("*_delete",        "a_delete",        true),
        ("*_delete",        "a_delete_b",      false),
        ("*_delete",        "a_delete_delete", true),
        ("*delete*",        "undeleted",       true),
        ("a*b*c",           "a-b-b-c",         true),
        ("a*b*c",           "a-c-b",           false),
        ("a**c",            "ac",              true),
        ("*a*a*a*a*b",      "aaaaaaaaaaaaaaaa", false),
        ("w*t.r",           "water",           false),
        ("*ü",              "menü",            true),
    ];
    for (pattern, name, fits) in table {
        assert_eq!(Pattern(pattern.to_owned()).fits(name), fits, "{pattern} {name}");
    }
}

#[test]
fn allow_and_deny_lists_are_applied() {
    #[rustfmt::skip]
    let table = [
        // allow       deny        name     a list  a role
        (&[][..],      &[][..],    "read",  true,   false),
        (&["*"],       &[],        "read",  true,   true),
        (&["read"],    &[],        "read",  true,   true),
        (&["read"],    &[],        "write", false,  false),
        (&["w*", "r*"], &["*e*"],  "read",  false,  false),
        (&[],          &["write"], "read",  true,   false),
        (&["*"],       &["write"], "write", false,  false),
    ];
    for (allow, deny, name, list, role) in table {
        let (allow, deny) = (patterns(allow), patterns(deny));
        assert_eq!(passes(&allow, &deny, name), list, "{allow:?} {deny:?} {name}");
        assert_eq!(Role { allow, deny }.allows(name), role);
    }
}

#[test]
fn an_empty_allow_of_a_role_allows_nothing() {
    let reader = Role { allow: patterns(&["*read*"]), deny: patterns(&["secrets__*"]) };
    let roles = Roles::new([("reader".to_owned(), reader)].into());
    #[rustfmt::skip]
    let table = [
        (Some("reader"), "fs__read",      true),
        (Some("reader"), "fs__write",     false),
        (Some("reader"), "secrets__read", false),
        (Some("writer"), "fs__read",      false),
        (Some(""),       "fs__read",      false),
        (None,           "fs__write",     true),
    ];
    for (role, tool, allowed) in table {
        assert_eq!(roles.allow(role, tool), allowed, "{role:?} {tool}");
    }
    assert!(Roles::default().allow(Some("writer"), "fs__write"), "no role is configured");
}

#[test]
fn only_unlimited_roles_may_send_operator_requests() {
    #[rustfmt::skip]
    let table: [(&[&str], &[&str], bool); 5] = [
        (&["*"],          &[],    true),
        (&["fs__*", "*"], &[],    true),
        (&["*"],          &["x"], false),
        (&["*read*"],     &[],    false),
        (&[],             &[],    false),
    ];
    for (allow, deny, expected) in table {
        let role = Role { allow: patterns(allow), deny: patterns(deny) };
        let roles = Roles::new([("some".to_owned(), role)].into());
        assert_eq!(roles.has_all(Some("some")), expected, "{allow:?} {deny:?}");
        assert!(!roles.has_all(Some("other")));
        assert!(roles.has_all(None), "without authentication");
    }
    assert!(Roles::default().has_all(Some("some")));
}

#[test]
fn a_bucket_allows_its_burst_and_then_its_rate() {
    let rate = Rate { per_minute: 60, burst: 3 };
    let mut buckets = Buckets::new(Rates { default: Some(rate), tools: vec![] });
    let start = birth();
    #[rustfmt::skip]
    let table = [
        // at, ms   wait, ms
        (0,         None),
        (0,         None),
        (0,         None),
        (0,         Some(1_000)),
        (400,       Some(600)),
        (1_000,     None),
        (1_000,     Some(1_000)),
        (3_500,     None),
        (3_500,     None),
        (3_500,     Some(500)),
        (60_000,    None),
        (60_000,    None),
        (60_000,    None),
        (60_000,    Some(1_000)),
    ];
    for (index, (at, wait)) in table.into_iter().enumerate() {
        let said = buckets.take("ann", "t", start + Duration::from_millis(at));
        assert_eq!(said.err().map(|wait| wait.retry_after.as_millis()), wait, "line {index}");
    }
    assert_eq!(buckets.take("bob", "t", start + SECOND), Ok(()), "each client has its own");
    assert_eq!(buckets.take("ann", "u", start + SECOND), Ok(()), "each tool has its own");
}

#[test]
fn the_first_pattern_that_fits_sets_the_rate() {
    let rate = |per_minute| Rate { per_minute, burst: 1 };
    let tools = vec![(Pattern("fs__read".into()), rate(600)), (Pattern("fs__*".into()), rate(6))];
    let rates = Rates { default: None, tools };
    assert_eq!(rates.of("fs__read"), Some(rate(600)));
    assert_eq!(rates.of("fs__write"), Some(rate(6)));
    assert_eq!(rates.of("git__log"), None);
    let mut buckets = Buckets::new(rates);
    for _ in 0..1_000 {
        assert_eq!(buckets.take("ann", "git__log", birth()), Ok(()));
    }
    assert!(buckets.is_empty(), "what has no rate needs no bucket");
}

#[test]
fn at_the_limit_a_new_pair_waits_for_a_free_bucket() {
    let rates = Rates { default: Some(Rate { per_minute: 60, burst: 2 }), tools: vec![] };
    let mut buckets = Buckets::with_max(rates, 2);
    let start = birth();
    for who in ["ann", "bob"] {
        assert_eq!(buckets.take(who, "t", start), Ok(()));
    }
    assert_eq!(buckets.take("eve", "t", start), Err(Wait { retry_after: SECOND }));
    assert_eq!(buckets.take("ann", "t", start), Ok(()), "those that are known go on");
    assert_eq!(buckets.take("eve", "t", start + SECOND), Ok(()), "bob's is full, and so forgotten");
    assert_eq!(buckets.len(), 2);
    assert_eq!(buckets.take("bob", "t", start + SECOND), Err(Wait { retry_after: SECOND }));
}

#[test]
fn changed_rates_keep_the_used_tokens() {
    let rates = |per_minute, burst| Rates { default: Some(Rate { per_minute, burst }), tools: vec![] };
    let mut buckets = Buckets::new(rates(1, 1));
    let start = birth();
    assert_eq!(buckets.take("ann", "t", start), Ok(()));
    buckets.configure(rates(60, 1));
    assert_eq!(buckets.take("ann", "t", start), Err(Wait { retry_after: SECOND }));
}

#[test]
fn a_circuit_opens_after_failures_in_a_row_and_lets_one_probe_through() {
    let mut breaker = Breaker::new(2, 10 * SECOND);
    let start = birth();
    let fail = |breaker: &mut Breaker, now| {
        let pass = breaker.ask(now).unwrap();
        breaker.heard(pass, Health::Ill, now)
    };
    assert!(!fail(&mut breaker, start));
    let pass = breaker.ask(start).unwrap();
    breaker.heard(pass, Health::Well, start);
    assert!(!fail(&mut breaker, start), "a success between them clears the count");
    let late = breaker.ask(start).unwrap();
    assert!(fail(&mut breaker, start));

    assert_eq!(breaker.ask(start + 4 * SECOND), Err(Wait { retry_after: 6 * SECOND }));
    breaker.heard(late, Health::Well, start + 5 * SECOND);
    assert!(matches!(breaker.state(), Circuit::Open { .. }), "a late answer is old news");

    let probe = breaker.ask(start + 10 * SECOND).unwrap();
    assert_eq!(breaker.ask(start + 10 * SECOND), Err(Wait { retry_after: Breaker::PROBE_WAIT }));
    breaker.heard(late, Health::Ill, start + 10 * SECOND);
    assert_eq!(breaker.state(), Circuit::HalfOpen, "nor does it speak for the probe");
    assert!(breaker.heard(probe, Health::Ill, start + 11 * SECOND));
    assert_eq!(breaker.ask(start + 12 * SECOND), Err(Wait { retry_after: 9 * SECOND }));

    let taken_back = breaker.ask(start + 21 * SECOND).unwrap();
    breaker.heard(taken_back, Health::Unknown, start + 22 * SECOND);
    let probe = breaker.ask(start + 22 * SECOND).expect("the next one is the probe");
    breaker.heard(probe, Health::Well, start + 23 * SECOND);
    assert_eq!(breaker.state(), Circuit::Closed { failures: 0 });
}

#[test]
fn a_circuit_with_no_limit_never_opens_and_a_reset_one_is_closed() {
    let start = birth();
    let mut breaker = Breaker::new(0, SECOND);
    for _ in 0..100 {
        let pass = breaker.ask(start).unwrap();
        assert!(!breaker.heard(pass, Health::Ill, start));
    }
    let mut breaker = Breaker::new(1, SECOND);
    let pass = breaker.ask(start).unwrap();
    breaker.heard(pass, Health::Ill, start);
    breaker.reset();
    assert!(breaker.ask(start).is_ok());
    breaker.heard(pass, Health::Ill, start);
    assert_eq!(breaker.state(), Circuit::Closed { failures: 0 });
}

#[test]
fn a_switch_of_an_operator_holds_until_the_configuration_changes_it() {
    let tool = |name: &str| Switch::Tool(name.to_owned());
    let backend = |name: &str| Switch::Backend(name.to_owned());
    let mut switches = Switches::new(&[tool("fs__write"), backend("git")]);
    assert!(switches.is_tool_off("fs__write") && switches.is_backend_off("git"));
    assert!(!switches.is_backend_off("fs__write") && !switches.is_tool_off("git"));

    assert!(switches.turn(&tool("fs__write"), false));
    assert!(switches.turn(&tool("fs__read"), true));
    assert!(!switches.turn(&tool("fs__read"), true), "it was off already");
    switches.configure(&[tool("fs__write"), backend("git")]);
    assert!(!switches.is_tool_off("fs__write"), "the same words again are nothing new");
    assert!(switches.is_tool_off("fs__read"));

    switches.configure(&[tool("time__now")]);
    assert!(!switches.is_backend_off("git"), "what is no longer configured is on");
    assert_eq!(switches.all_off().collect::<Vec<_>>(), [tool("fs__read"), tool("time__now")]);
}

#[test]
fn buckets_and_breakers_go_on_in_another_program() {
    let now = birth();
    let later = now + Duration::from_secs(2);
    let rates = Rates { default: Some(Rate { per_minute: 6, burst: 2 }), tools: Vec::new() };
    let mut buckets = Buckets::new(rates.clone());
    assert!(buckets.take("ann", "echo", now).is_ok() && buckets.take("ann", "echo", now).is_ok());
    let wait = buckets.take("ann", "echo", later).unwrap_err();
    let mut next = Buckets::new(rates);
    next.restore(buckets.save(later), later);
    assert_eq!((next.len(), next.take("ann", "echo", later)), (1, Err(wait)));
    assert_eq!(next.take("ben", "echo", later), Ok(()));
    // Full ones are not kept.
    assert!(buckets.save(now + Duration::from_secs(60)).is_empty());

    let open_for = Duration::from_secs(10);
    let mut breaker = Breaker::new(1, open_for);
    let pass = breaker.ask(now).unwrap();
    assert!(breaker.heard(pass, Health::Ill, now));
    let mut next = Breaker::new(1, open_for);
    next.restore(breaker.save(later), later);
    assert_eq!(next.state(), breaker.state());
    // A probe that was under way is over: the next call is one.
    let _ = breaker.ask(now + open_for).unwrap();
    next.restore(breaker.save(later), later);
    assert!(next.ask(later).is_ok());
}
