//! `outlast audit --cluster`: the records of all replicas, merged by time.
//!
//! Of each replica one page is held at a time, so the memory does not depend on the length of the stream.

use std::{collections::VecDeque, process::ExitCode, time::SystemTime};

use outlast_control::{
    cluster::{AuditPage, AuditRecord},
    find::ANSWER_MAX,
    method::{ClusterAudit, Method},
};
use outlast_core::{count::count, visible};
use outlast_os as os;
use serde_json::json;

use super::find_gateway;
use crate::{
    cli::{
        self,
        report::Report,
        table::{self, Column, Yield},
    },
    operator::{
        history::{AuditLine, Rows, known_event, print_or_end, row},
        instances::{self, print},
    },
};

/// The most replicas whose records are merged, by name; records of others are left out, with a warning.
const REPLICAS_MAX: usize = 100;
/// Bytes of JSON that are written at once.
const PIECE: usize = 64 << 10;

pub(crate) fn audit(arguments: &cli::Audit) -> Result<ExitCode, Report> {
    let event = arguments.event.as_deref().map(known_event).transpose()?;
    let wanted = ClusterAudit {
        since: arguments.since.map(|since| since.from(SystemTime::now())),
        event: event.map(|event| event.name().to_owned()),
        ..ClusterAudit::default()
    };
    let entry = find_gateway(arguments.id.as_deref())?;
    let mut ask = |request: ClusterAudit| {
        let page = instances::ask(&entry, &Method::ClusterAudit(request), Some(ANSWER_MAX))?;
        Ok(AuditPage::read(&page))
    };
    let mut replicas = ask(ClusterAudit::default())?.replicas;
    if replicas.len() > REPLICAS_MAX {
        let others = count(replicas.len() - REPLICAS_MAX, "replica", "replicas");
        os::say(&format!("[outlast] the records of {others} are left out"));
        replicas.truncate(REPLICAS_MAX);
    }
    let mut merge = Merge::new(replicas, wanted);
    let (mut text, mut rows) = (String::new(), Rows::default());
    while let Some(record) = merge.next(&mut ask)? {
        if !arguments.json {
            rows.push(cells(record));
            continue;
        }
        text.push_str(&line_of(&record));
        text.push('\n');
        if text.len() >= PIECE {
            print_or_end(&visible::json(&std::mem::take(&mut text)))?;
        }
    }
    if arguments.json {
        print_or_end(&visible::json(&text))?;
        return Ok(ExitCode::SUCCESS);
    }
    rows.say_left_out();
    if rows.is_empty() { Ok(ExitCode::SUCCESS) } else { print(&in_words(rows.all(), table::room())) }
}

/// The pages of each replica, of which the oldest record is taken each time.
struct Merge {
    wanted: ClusterAudit,
    sources: Vec<Source>,
}

struct Source {
    replica: String,
    /// The rest of the last page, with the time of each record.
    records: VecDeque<(String, AuditRecord)>,
    /// The cursor of the next page; an inner `None` is the first one.
    next: Option<Option<String>>,
}

impl Merge {
    fn new(replicas: Vec<String>, wanted: ClusterAudit) -> Merge {
        let source = |replica| Source { replica, records: VecDeque::new(), next: Some(None) };
        Merge { wanted, sources: replicas.into_iter().map(source).collect() }
    }

    fn next(
        &mut self,
        ask: &mut impl FnMut(ClusterAudit) -> Result<AuditPage, Report>,
    ) -> Result<Option<AuditRecord>, Report> {
        for source in &mut self.sources {
            source.fill(&self.wanted, ask)?;
        }
        let with_time = self.sources.iter_mut().filter_map(|source| {
            let time = source.records.front()?.0.clone();
            Some((time, source))
        });
        let oldest = with_time.min_by(|(one, _), (other, _)| one.cmp(other));
        Ok(oldest.and_then(|(_, source)| source.records.pop_front()).map(|(_, record)| record))
    }
}

impl Source {
    /// Asks for pages until there is a record, or no more page.
    fn fill(
        &mut self,
        wanted: &ClusterAudit,
        ask: &mut impl FnMut(ClusterAudit) -> Result<AuditPage, Report>,
    ) -> Result<(), Report> {
        while self.records.is_empty()
            && let Some(cursor) = self.next.take()
        {
            let replica = Some(self.replica.clone());
            let page = ask(ClusterAudit { replica, cursor: cursor.clone(), ..wanted.clone() })?;
            // A cursor that does not move on would be asked for again and again.
            self.next = page.next.filter(|next| Some(next) != cursor.as_ref()).map(Some);
            self.records = page.records.into_iter().map(|record| (time_of(&record), record)).collect();
        }
        Ok(())
    }
}

fn time_of(record: &AuditRecord) -> String {
    serde_json::from_str::<AuditLine>(&record.line).map(|line| line.timestamp).unwrap_or_default()
}

/// Unchanged, unless it was too long for a page.
fn line_of(record: &AuditRecord) -> String {
    match record.line.is_empty() {
        true => json!({"id": record.id, "too_long": true}).to_string(),
        false => record.line.clone(),
    }
}

fn cells(record: AuditRecord) -> Vec<String> {
    let mut cells = match serde_json::from_str::<AuditLine>(&record.line) {
        Ok(line) => row(line),
        Err(_) => vec![String::new(), String::new(), String::new(), format!("{} is too long to be shown", record.id)],
    };
    cells.insert(1, record.replica);
    cells
}

fn in_words(rows: &[Vec<String>], width: Option<usize>) -> String {
    let column = |title, yields| Column { title, is_number: false, yields };
    let columns = [
        column("TIME (UTC)", Yield::Last(19)),
        column("REPLICA", Yield::Last(8)),
        column("ID", Yield::Soon(1)),
        column("EVENT", Yield::Last(12)),
        column("DETAIL", Yield::End(40, 14)),
    ];
    table::lines(&columns, rows, width).into_iter().map(|line| line + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(replica: &str, number: u32, second: u32) -> AuditRecord {
        let id = format!("{replica}-{number}");
        let line = json!({"id": id, "timestamp": format!("2026-01-13T14:32:{second:02}Z"),
            "props": {"event_type": "server_started", "id": "tools-1", "pid": 7}});
        AuditRecord { id, replica: replica.into(), line: line.to_string() }
    }

    /// Pages of two records.
    fn ask(all: &[AuditRecord], asked: &mut Vec<String>, request: &ClusterAudit) -> AuditPage {
        let replica = request.replica.clone().unwrap();
        let from: usize = request.cursor.as_ref().map_or(0, |cursor| cursor.parse().unwrap());
        asked.push(format!("{replica} {from}"));
        let of_replica: Vec<&AuditRecord> = all.iter().filter(|record| record.replica == replica).collect();
        let records: Vec<AuditRecord> = of_replica.iter().skip(from).take(2).map(|record| (*record).clone()).collect();
        let next = (from + 2 < of_replica.len()).then(|| (from + 2).to_string());
        AuditPage { replicas: Vec::new(), records, next }
    }

    #[test]
    fn records_are_merged_by_time_and_pages_are_asked_for_when_needed() {
        let all = [
            record("east", 1, 1),
            record("east", 2, 4),
            record("east", 3, 5),
            // The clock was set back.
            record("east", 4, 3),
            record("west", 9, 2),
            record("west", 10, 4),
            record("west", 11, 9),
        ];
        let mut asked = Vec::new();
        let replicas = ["east", "none", "west"].map(str::to_owned).to_vec();
        let mut merge = Merge::new(replicas, ClusterAudit::default());
        let mut order = Vec::new();
        let mut first = None;
        while let Some(record) = merge.next(&mut |request| Ok(ask(&all, &mut asked, &request))).unwrap() {
            order.push(record.id);
            first.get_or_insert_with(|| asked.clone());
        }
        assert_eq!(order, ["east-1", "west-9", "east-2", "west-10", "east-3", "east-4", "west-11"]);
        assert_eq!(first.unwrap(), ["east 0", "none 0", "west 0"], "one page of each");
        assert_eq!(asked, ["east 0", "none 0", "west 0", "east 2", "west 2"]);
    }

    #[test]
    fn an_empty_page_with_a_next_one_is_skipped_and_a_cursor_that_stays_ends() {
        let mut pages = 0;
        let mut merge = Merge::new(vec!["east".to_owned()], ClusterAudit::default());
        let mut ask = |request: ClusterAudit| {
            pages += 1;
            Ok(match request.cursor.as_deref() {
                None => AuditPage { next: Some("5".into()), ..AuditPage::default() },
                Some(_) => {
                    AuditPage { next: Some("5".into()), records: vec![record("east", 1, 1)], ..AuditPage::default() }
                }
            })
        };
        assert_eq!(merge.next(&mut ask).unwrap().map(|record| record.id).as_deref(), Some("east-1"));
        assert_eq!(merge.next(&mut ask), Ok(None));
        assert_eq!(pages, 2);
    }

    #[test]
    fn a_record_is_shown_with_its_replica() {
        let long = AuditRecord { id: "west-3".into(), replica: "west".into(), line: String::new() };
        assert_eq!(line_of(&long), r#"{"id":"west-3","too_long":true}"#);
        let one = record("east", 1, 1);
        assert_eq!(line_of(&one), one.line);
        insta::assert_snapshot!(in_words(&[cells(one), cells(long)], Some(100)), @"
        TIME (UTC)           REPLICA  ID       EVENT           DETAIL
        2026-01-13 14:32:01  east     tools-1  server_started  pid 7
                             west                              west-3 is too long to be shown
        ");
    }
}
