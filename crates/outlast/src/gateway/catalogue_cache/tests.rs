use std::future::poll_fn;

use outlast_core::{
    gateway::{Children, EraChoice, Placement, Start},
    restarts::Policy,
};

use super::*;

fn backend(name: &str, command: &str) -> Backend {
    let env = [("TOKEN".to_owned(), "s3cret".into())].into();
    Backend {
        name: name.to_owned(),
        kind: Kind::Stdio { command: command.into(), args: vec![], env, cwd: None, sandbox: None },
        prefix: String::new(),
        allow: vec![],
        deny: vec![],
        children: Children::Shared,
        children_max: 64,
        start: Start::Eager,
        placement: Placement::Every,
        inherit_env: false,
        era: EraChoice::Auto,
        policy: Policy::exponential(),
        call_timeout: Duration::ZERO,
        call_max: Duration::ZERO,
        start_timeout: Duration::ZERO,
        idle_stop: None,
        memory_max: None,
        breaker_failures: 0,
        breaker_open: Duration::ZERO,
        retry_annotated: false,
    }
}

fn offer(tool: &str) -> Offer {
    Offer {
        tools: vec![Bytes::from(format!("{{\"name\" : \"{tool}\", \"big\": 12345678901234567890123}}"))],
        prompts: vec![],
        resources: vec![Bytes::from_static(b"{\"uri\":\"x:\\u00fc\"}")],
        templates: vec![],
        capabilities: Bytes::from_static(b"{\"tools\": {}}"),
        instructions: Some("read \"this\"".to_owned()),
    }
}

fn home() -> (tempfile::TempDir, Home) {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::of_user(dir.path(), Some(dir.path()));
    (dir, home)
}

fn files(home: &Home) -> Vec<PathBuf> {
    let entries = fs::read_dir(home.dir().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension != "gitignore")).collect()
}

/// Advances the time until the changes are written.
async fn write_all(cache: &mut CatalogueCache) {
    let due = cache.deadline().expect("something is due");
    cache.time_passed(due - Duration::from_millis(1));
    assert!(cache.writing.is_none(), "it waits for more to come");
    cache.time_passed(due);
    while cache.writing.is_some() {
        poll_fn(|cx| {
            let _ = cache.poll(cx);
            if cache.writing.is_some() { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }
}

#[tokio::test]
async fn a_cached_catalogue_is_read_back_byte_for_byte() {
    let (_dir, home) = home();
    let backends = [backend("files", "a"), backend("docs", "b")];
    let (mut cache, kept, note) = CatalogueCache::open(&home, "one", &backends);
    assert!(kept.is_empty() && note.is_none());
    assert_eq!(cache.deadline(), None);
    cache.keep("files", offer("read"), Instant::now());
    cache.keep("docs", offer("search"), Instant::now());
    cache.keep("stranger", offer("x"), Instant::now());
    write_all(&mut cache).await;
    assert_eq!(cache.deadline(), None);
    cache.keep("docs", offer("search"), Instant::now());
    assert_eq!(cache.deadline(), None, "the same again is nothing new");

    let (_, kept, note) = CatalogueCache::open(&home, "one", &backends);
    assert_eq!(note, None);
    assert_eq!(kept, [("files".to_owned(), offer("read")), ("docs".to_owned(), offer("search"))].into());
    let (_, kept, _) = CatalogueCache::open(&home, "two", &backends);
    assert!(kept.is_empty(), "another gateway has another catalogue");
    let text = fs::read_to_string(&files(&home)[0]).unwrap();
    assert!(!text.contains("s3cret"));
    assert_eq!(files(&home).len(), 1, "nothing else is left");
}

#[tokio::test]
async fn a_catalogue_of_another_gateway_is_found() {
    let (_dir, home) = home();
    let backends = [backend("files", "a"), backend("docs", "b")];
    let (mut cache, ..) = CatalogueCache::open(&home, "a name of its own", &backends);
    cache.keep("files", offer("read"), Instant::now());
    cache.keep("docs", offer("search"), Instant::now());
    write_all(&mut cache).await;
    let (mut cache, ..) = CatalogueCache::open(&home, "outlast.toml", &backends);
    cache.keep("files", offer("newer"), Instant::now());
    write_all(&mut cache).await;
    let found = CatalogueCache::peek(home.dir(), "outlast.toml", &[backend("files", "a"), backend("docs", "b")]);
    assert_eq!(found, [("files".to_owned(), offer("newer")), ("docs".to_owned(), offer("search"))].into());
    let found = CatalogueCache::peek(home.dir(), "outlast.toml", &[backend("docs", "another command")]);
    assert!(found.is_empty());
}

#[tokio::test]
async fn an_entry_is_dropped_when_the_command_of_its_backend_changes() {
    let (_dir, home) = home();
    let (mut cache, ..) = CatalogueCache::open(&home, "one", &[backend("files", "a"), backend("docs", "b")]);
    cache.keep("files", offer("read"), Instant::now());
    cache.keep("docs", offer("search"), Instant::now());
    write_all(&mut cache).await;
    let (mut cache, kept, _) = CatalogueCache::open(&home, "one", &[backend("files", "other"), backend("docs", "b")]);
    assert_eq!(kept.keys().collect::<Vec<_>>(), ["docs"]);

    cache.configure(&[backend("files", "other")], Instant::now());
    write_all(&mut cache).await;
    let (_, kept, _) = CatalogueCache::open(&home, "one", &[backend("docs", "b")]);
    assert!(kept.is_empty(), "what is no longer configured is no longer kept");
}

#[tokio::test]
async fn an_unusable_file_is_reported_and_replaced() {
    let (_dir, home) = home();
    let backends = [backend("files", "a")];
    let (mut cache, ..) = CatalogueCache::open(&home, "one", &backends);
    cache.keep("files", offer("read"), Instant::now());
    write_all(&mut cache).await;
    let path = files(&home).remove(0);
    let whole = fs::read_to_string(&path).unwrap();
    let table = [
        (String::new(), "it is damaged (EOF while parsing a value at line 1 column 0)"),
        (whole[..whole.len() / 2].to_owned(), "it is damaged"),
        (whole.replace("\"version\":1", "\"version\":2"), "it is of version 2"),
        (whole.replace("\"tools\":[", "\"tools\":5,\"x\":["), "it is damaged"),
    ];
    for (text, why) in table {
        fs::write(&path, text).unwrap();
        let (mut cache, kept, note) = CatalogueCache::open(&home, "one", &backends);
        assert!(kept.is_empty());
        let note = note.unwrap();
        assert!(
            note.starts_with(&format!(
                "the cached catalogue cannot be used and is read again from the backends: {why}"
            )),
            "{note}"
        );
        cache.keep("files", offer("read"), Instant::now());
        write_all(&mut cache).await;
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
    }
}

#[tokio::test]
async fn a_failed_write_is_reported_once_and_pending_changes_are_written_at_the_end() {
    let (_dir, home) = home();
    let (mut cache, ..) = CatalogueCache::open(&home, "one", &[backend("files", "a")]);
    let path = cache.path.clone().unwrap();
    fs::create_dir(&path).unwrap();
    let now = Instant::now();
    cache.keep("files", offer("read"), now);
    cache.time_passed(now + WAIT);
    let said = poll_fn(|cx| cache.poll(cx)).await;
    assert!(said.starts_with("the catalogue cannot be cached for the next start: "), "{said}");
    assert_eq!(files(&home), std::slice::from_ref(&path), "no litter");

    cache.keep("files", offer("write"), now);
    write_all(&mut cache).await;
    fs::remove_dir(&path).unwrap();
    cache.keep("files", offer("read"), now);
    cache.finish().await;
    let (_, kept, _) = CatalogueCache::open(&home, "one", &[backend("files", "a")]);
    assert_eq!(kept["files"], offer("read"));

    let (mut nowhere, kept, note) = CatalogueCache::open(&Home::nowhere("x"), "one", &[backend("files", "a")]);
    assert!(kept.is_empty() && note.is_none());
    nowhere.keep("files", offer("read"), now);
    nowhere.time_passed(now + WAIT);
    nowhere.finish().await;
}
