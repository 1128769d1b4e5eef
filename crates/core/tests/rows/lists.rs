//! The client's lists stay correct (l1-l6).

use crate::story::*;

const CHANGED: &str = r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#;
const A: &str = r#"{"tools":[{"name":"a"}]}"#;
const B: &str = r#"{"tools":[{"name":"b"}]}"#;

/// The client has listed the tools of child 1.
fn listed(tools: &str) -> Story {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &result(1, tools));
    story.forget();
    story
}

fn next_child(story: &mut Story, generation: u32) {
    story.exits(generation - 1, code(1));
    story.passes(secs(10));
    story.forget();
    story.comes_up(generation);
}

fn fetches(story: &mut Story, generation: u32) -> Vec<String> {
    let told = story.told_server(generation);
    told.into_iter().filter(|line| line.contains("/list\"")).collect()
}

#[test]
fn l1_a_list_that_the_client_never_saw_is_not_asked_for() {
    let mut story = Story::legacy();
    story.child_hears_nothing(1);
    next_child(&mut story, 2);
    assert_eq!(fetches(&mut story, 2), [""; 0]);
    story.client_hears_nothing();
}

#[test]
fn l1_an_empty_list_of_our_making_is_a_baseline_too() {
    // A child without tools.
    let mut story = Story::legacy_with("{}", |_| {});
    story.client(&ask(1, "tools/list"));
    assert_eq!(tool_names(&story.answer()), OURS);
    next_child(&mut story, 2);
    story.answers_private(2, "tools/list", A);
    story.client_hears(&[CHANGED]);

    // A child that does not know the method.
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list")).child(1, &error(1, -32601, "no"));
    next_child(&mut story, 2);
    story.answers_private(2, "tools/list", A);
    story.client_hears(&[CHANGED]);

    // A hold that timed out.
    let mut story = Story::legacy();
    story.exits(1, code(1));
    story.client(&ask(1, "tools/list"));
    story.passes(secs(1));
    story.started(2);
    story.passes(ms(29_500));
    assert_eq!(tool_names(&story.answer()), OURS);
    story.shakes_hands(2, ALL);
    story.answers_private(2, "tools/list", A);
    story.client_hears(&[CHANGED]);
}

#[test]
fn l2_all_pages_are_fetched_beside_the_traffic() {
    let mut story = listed(r#"{"tools":[{"name":"a"},{"name":"b"}]}"#);
    story.client(&ask(2, "prompts/list")).child(1, &result(2, r#"{"prompts":[]}"#));
    next_child(&mut story, 2);
    assert_eq!(
        fetches(&mut story, 2),
        [ask_with(private(2), "tools/list", "{}"), ask_with(private(3), "prompts/list", "{}")]
    );
    story.client(&call(9, "t"));
    story.child_hears(2, &[&call(9, "t")]);
    story.child(2, &result(private(2), r#"{"tools":[{"name":"b"}],"nextCursor":"é\n"}"#));
    story.child_hears(2, &[&ask_with(private(4), "tools/list", r#"{"cursor":"é\n"}"#)]);
    story.child(2, &result(private(4), r#"{"tools":[{"name":"a"}]}"#));
    story.child(2, &result(private(3), r#"{"prompts":[]}"#));
    story.client_hears_nothing();
}

#[test]
fn l3_equal_lists_are_not_announced_and_changed_lists_once_for_each_family() {
    for (new, differs) in [
        (r#"{"tools":[{"inputSchema":{"x":1,"y":2},"name":"a"},{"name":"b"}]}"#, false),
        (r#"{"tools":[{"name":"b"},{"name":"a","inputSchema":{"y":2,"x":1}}],"_meta":{}}"#, false),
        (r#"{"tools":[{"name":"b"},{"name":"a","inputSchema":{"y":2,"x":3}}]}"#, true),
        (r#"{"tools":[{"name":"b"}]}"#, true),
        (r#"{"tools":[{"name":"a","inputSchema":{"x":1,"y":2}},{"name":"b"},{"name":"c"}]}"#, true),
    ] {
        let mut story = listed(r#"{"tools":[{"name":"a","inputSchema":{"x":1,"y":2}},{"name":"b"}]}"#);
        next_child(&mut story, 2);
        story.answers_private(2, "tools/list", new);
        assert_eq!(story.told_client(), if differs { vec![CHANGED] } else { vec![] }, "{new}");
    }
    let mut story = Story::legacy();
    story.client(&ask(1, "resources/list")).child(1, &result(1, r#"{"resources":[]}"#));
    story.client(&ask(2, "resources/templates/list")).child(1, &result(2, r#"{"resourceTemplates":[]}"#));
    next_child(&mut story, 2);
    story.answers_private(2, "resources/list", r#"{"resources":[{"uri":"u:1"}]}"#);
    story.answers_private(2, "resources/templates/list", r#"{"resourceTemplates":[{"uriTemplate":"u:{x}"}]}"#);
    story.client_hears(&[&note("notifications/resources/list_changed")]);
}

#[test]
fn l3_of_a_list_with_pages_missing_only_its_items_count() {
    let mut story = listed(r#"{"tools":[{"name":"a"}],"nextCursor":"2"}"#);
    next_child(&mut story, 2);
    story.answers_private(2, "tools/list", r#"{"tools":[{"name":"a"},{"name":"z"}]}"#);
    story.client_hears_nothing();
}

#[test]
fn l4_list_changed_of_a_child_is_withheld_until_its_list_is_compared() {
    let mut story = listed(A);
    next_child(&mut story, 2);
    story.child(2, CHANGED);
    story.client_hears_nothing();
    story.answers_private(2, "tools/list", B);
    story.client_hears_nothing();
    assert_eq!(story.private_request(2).1, "tools/list", "fetched once more");
    story.answers_private(2, "tools/list", B);
    story.client_hears(&[CHANGED]);
    story.child(2, CHANGED).child(2, CHANGED);
    story.client_hears(&[CHANGED, CHANGED]);

    let mut story = Story::legacy();
    story.child(1, CHANGED);
    story.client_hears(&[CHANGED]);
}

/// Resources and templates are two lists with one notification.
#[test]
fn l4_a_list_changed_is_withheld_only_if_every_list_of_its_family_is_compared() {
    let changed = note("notifications/resources/list_changed");
    for is_listed in [true, false] {
        let mut story = Story::legacy();
        story.client(&ask(1, "resources/list")).child(1, &result(1, r#"{"resources":[]}"#));
        if is_listed {
            story.client(&ask(2, "resources/templates/list")).child(1, &result(2, r#"{"resourceTemplates":[]}"#));
        }
        next_child(&mut story, 2);
        if is_listed {
            story.answers_private(2, "resources/templates/list", r#"{"resourceTemplates":[]}"#);
        }
        story.child(2, &changed);
        assert_eq!(story.told_client(), if is_listed { vec![changed.clone()] } else { vec![] });
    }
}

#[test]
fn l4_repeated_list_changes_do_not_postpone_the_comparison_for_ever() {
    let mut story = listed(A);
    next_child(&mut story, 2);
    for _ in 0..6 {
        story.child(2, CHANGED);
        story.answers_private(2, "tools/list", A);
        story.passes(secs(1));
    }
    assert_eq!(story.told_client().first().map(String::as_str), Some(CHANGED));
}

#[test]
fn l5_a_list_from_a_draining_child_is_compared_too() {
    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list"));
    story.reloads();
    story.comes_up(2);
    story.forget();
    story.child(1, &result(1, A));
    assert_eq!(tool_names(&story.answer())[0], "a");
    story.answers_private(2, "tools/list", B);
    story.client_hears(&[CHANGED]);

    let mut story = Story::legacy();
    story.client(&ask(1, "tools/list"));
    story.reloads();
    story.comes_up_with(2, "{}");
    story.forget();
    story.child(1, &result(1, A));
    assert_eq!(story.told_client()[1..], [CHANGED], "a child without tools is not asked for them");
    story.child_hears_nothing(2);
}

#[test]
fn l5_a_change_is_not_announced_again_before_the_client_lists() {
    let mut story = listed(A);
    next_child(&mut story, 2);
    story.answers_private(2, "tools/list", B);
    story.client_hears(&[CHANGED]);
    next_child(&mut story, 3);
    story.answers_private(3, "tools/list", r#"{"tools":[{"name":"c"}]}"#);
    story.client_hears_nothing();
    story.client(&ask(2, "tools/list")).child(3, &result(2, r#"{"tools":[{"name":"c"}]}"#));
    next_child(&mut story, 4);
    story.answers_private(4, "tools/list", B);
    story.client_hears(&[CHANGED]);
}

#[test]
fn l5_a_list_served_from_memory_counts_as_shown() {
    let mut story = listed(A);
    next_child(&mut story, 2);
    story.answers_private(2, "tools/list", B);
    story.client_hears(&[CHANGED]);
    story.exits(2, code(1));
    story.client(&ask(2, "tools/list"));
    assert_eq!(tool_names(&story.answer())[0], "a");
    story.passes(secs(10));
    story.comes_up(3);
    story.answers_private(3, "tools/list", B);
    story.client_hears(&[CHANGED]);
}

#[test]
fn l6_a_list_that_cannot_be_fetched_counts_as_changed() {
    let mut story = listed(A);
    next_child(&mut story, 2);
    story.child(2, &error(private(2), -32603, "no"));
    story.client_hears(&[CHANGED]);

    let mut story = listed(A);
    next_child(&mut story, 2);
    story.passes(ms(4999));
    story.client_hears_nothing();
    story.passes(ms(1));
    story.client_hears(&[CHANGED]);
    story.child(2, &result(private(2), A));
    story.client_hears_nothing();
}

#[test]
fn l6_a_capability_that_is_gone_is_an_empty_list() {
    let mut story = listed(A);
    story.exits(1, code(1));
    story.passes(secs(1));
    story.forget();
    story.comes_up_with(2, "{}");
    story.client_hears(&[CHANGED]);
    let mut story = listed(r#"{"tools":[]}"#);
    story.exits(1, code(1));
    story.passes(secs(1));
    story.forget();
    story.comes_up_with(2, "{}");
    story.client_hears_nothing();
}

#[test]
fn l6_a_child_that_ends_leaves_the_comparison_to_the_next() {
    let mut story = listed(A);
    next_child(&mut story, 2);
    next_child(&mut story, 3);
    story.client_hears_nothing();
    story.answers_private(3, "tools/list", B);
    story.client_hears(&[CHANGED]);
}

#[test]
fn l5_pages_of_two_children_are_no_list_of_either() {
    let mut story = listed(r#"{"tools":[{"name":"a"}],"nextCursor":"2"}"#);
    next_child(&mut story, 2);
    let all = r#"{"tools":[{"name":"a"},{"name":"new"},{"name":"z"}]}"#;
    story.answers_private(2, "tools/list", all);
    story.client_hears_nothing();
    story.client(&ask_with(2, "tools/list", r#"{"cursor":"2"}"#));
    story.told_server(2);
    story.child(2, &result(2, r#"{"tools":[{"name":"z"}]}"#));
    story.told_client();
    story.answers_private(2, "tools/list", all);
    story.client_hears(&[CHANGED]);
}

#[test]
fn l6_a_list_without_end_counts_as_changed() {
    let mut story = Story::legacy_with(ALL, |settings| settings.limits.lists.list_pages_max = 3);
    story.client(&ask(1, "tools/list")).child(1, &result(1, A));
    next_child(&mut story, 2);
    for _ in 0..4 {
        story.client_hears_nothing();
        story.answers_private(2, "tools/list", r#"{"tools":[],"nextCursor":"more"}"#);
    }
    story.client_hears(&[CHANGED]);
}

#[test]
fn l6_an_oversized_list_is_compared_and_not_served() {
    let mut story = Story::legacy_with(ALL, |settings| settings.limits.lists.list_bytes_max = 10);
    story.client(&ask(1, "tools/list")).child(1, &result(1, A));
    story.exits(1, code(1));
    story.forget();
    story.client(&ask(2, "tools/list"));
    story.client_hears_nothing();
    story.passes(secs(1));
    story.comes_up(2);
    story.client(&cancel(2));
    story.answers_private(2, "tools/list", A);
    story.client_hears_nothing();
}
