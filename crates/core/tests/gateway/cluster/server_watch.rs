use std::time::Instant;

use outlast_core::cluster::server_watch::{PAUSE_MAX, SILENT_AFTER, ServerWatch};

use super::ms;

#[test]
#[expect(clippy::disallowed_methods, reason = "a story needs some instant to count from")]
fn other_servers_are_tried_when_jetstream_is_silent_and_less_often_while_none_can_be_used() {
    let begin = Instant::now();
    let mut watch = ServerWatch::new(begin);
    // An answer every 2 s.
    for second in [2, 4, 6] {
        let now = begin + ms(second * 1_000);
        assert!(!watch.is_silent(now) && now < watch.deadline());
        watch.answered(now);
    }
    let silent = begin + ms(6_000) + SILENT_AFTER;
    assert_eq!(watch.deadline(), silent);
    assert!(!watch.is_silent(silent - ms(1)) && watch.is_silent(silent));
    // Each round takes 100 ms.
    let (mut now, mut pauses) = (silent, Vec::new());
    for _ in 0..6 {
        now += ms(100);
        watch.tried(now);
        pauses.push((watch.deadline() - now).as_secs());
        now = watch.deadline();
        assert!(watch.is_silent(now));
    }
    assert_eq!(pauses, [2, 4, 8, 16, 30, 30]);
    assert_eq!(PAUSE_MAX.as_secs(), 30);
    // It answers again, while the others are being tried: the next silence is noticed as soon as the first.
    watch.answered(now);
    assert!(!watch.is_silent(now));
    watch.tried(now + ms(100));
    assert_eq!(watch.deadline(), now + SILENT_AFTER);
}
