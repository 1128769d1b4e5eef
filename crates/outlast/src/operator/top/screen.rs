//! Renders the state of `outlast top` as lines. It reads no keys and sends no requests.

use std::time::Instant;

use outlast_core::count::count;
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph},
};

use super::board::{Board, Log, Mode, OfCluster, Row};
use crate::operator::instances::in_short;

/// The strip of exits: twelve cells of five minutes, the last hour. Older exits are not shown.
const STRIP_CELLS: usize = 12;
const STRIP_CELL_S: f64 = 300.0;
/// Rows of the detail pane, its border included. On a screen with fewer rows than `DETAIL_NEEDS` it is left out.
const DETAIL_ROWS: u16 = 8;
const DETAIL_NEEDS: u16 = 16;

/// Whether there are colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    pub has_colours: bool,
}

impl Look {
    fn colour(self, colour: Color) -> Style {
        if self.has_colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    fn bold(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }
}

pub(crate) fn draw(board: &Board, look: Look, frame: &mut Frame<'_>, now: Instant) {
    let area = frame.area();
    let has_detail = area.height >= DETAIL_NEEDS && board.chosen_row().is_some();
    let detail = if has_detail { DETAIL_ROWS } else { 0 };
    let [head, body, about, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(detail),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(header(board, look, usize::from(head.width))), head);
    match &board.mode {
        Mode::Log(log) => {
            let whole = Rect { height: body.height + about.height, ..body };
            frame.render_widget(Paragraph::new(log_lines(log, look, whole)), whole);
        }
        _ => {
            frame.render_widget(Paragraph::new(table(board, look, body, now)), body);
            if let Some(row) = board.chosen_row().filter(|_| has_detail) {
                let block = Block::bordered().border_style(look.dim()).title(Line::from(vec![
                    " ".into(),
                    Span::styled(one_line(&row.id), look.bold()),
                    " ".into(),
                ]));
                let inside = block.inner(about);
                frame.render_widget(block, about);
                frame.render_widget(Paragraph::new(about_one(row, look, inside)), inside);
            }
        }
    }
    frame.render_widget(Paragraph::new(footer(board, look, usize::from(foot.width))), foot);
    if board.mode == Mode::Help {
        help(board, look, frame, area);
    }
}

// ---- the first and the last line -----------------------------------------------------------------------------

fn header(board: &Board, look: Look, width: usize) -> Line<'static> {
    let mut spans = vec![Span::styled("outlast top", look.bold())];
    if let Some(name) = &board.cluster {
        spans.push(format!("  cluster {}", one_line(name)).into());
    }
    if board.asked.is_none() {
        spans.push("  asking…".into());
        return Line::from(spans);
    }
    let replicas = board.rows.iter().filter(|row| row.kind == "gateway").count();
    spans.push("  ".into());
    spans.push(match board.cluster {
        Some(_) => count(replicas, "replica", "replicas").into(),
        None => count(board.rows.len(), "instance", "instances").into(),
    });
    let mut states: Vec<&str> = board.rows.iter().map(|row| row.state.as_str()).collect();
    states.sort_by_key(|state| (rank(state), *state));
    states.dedup();
    for state in states {
        let count = board.rows.iter().filter(|row| row.state == state).count();
        spans.push("  ".into());
        spans.push(Span::styled(mark(state), state_style(state, look)));
        spans.push(format!(" {count} {}", state.replace('_', " ")).into());
    }
    // The calls of a backend are counted with its gateway.
    let whole = board.rows.iter().filter(|row| row.kind != "backend");
    let rate: f64 = whole.filter_map(|row| row.calls_per_s).sum();
    let right = match board.cluster {
        Some(_) => String::new(),
        None => format!("{} calls/s", rate_in_words(rate)),
    };
    let left: usize = spans.iter().map(Span::width).sum();
    if left + right.len() + 2 <= width {
        spans.push(" ".repeat(width - left - right.len()).into());
        spans.push(Span::styled(right, look.bold()));
    }
    Line::from(spans)
}

fn footer(board: &Board, look: Look, width: usize) -> Line<'static> {
    if let Mode::Sure { id, force } = &board.mode {
        let how = if *force { " at once, without answering calls" } else { "" };
        return Line::from(Span::styled(
            format!("Stop {id}{how}? y / n"),
            look.colour(Color::Yellow).add_modifier(Modifier::BOLD),
        ));
    }
    if board.mode == Mode::Filter {
        return Line::from(vec![
            Span::styled("/", look.colour(Color::Cyan)),
            Span::raw(board.filter.clone()),
            Span::styled("█", look.dim()),
            Span::styled("   Enter keeps the filter, Esc shows all", look.dim()),
        ]);
    }
    if let Some(news) = &board.news {
        let style = if news.is_bad { look.colour(Color::Red) } else { look.colour(Color::Green) };
        return Line::from(Span::styled(one_line(&news.words), style));
    }
    // Each hint with its priority: on a narrow screen the highest numbers are left out first. Help lists all keys.
    let mut keys: Vec<(&str, &str, u8)> = match &board.mode {
        _ if board.cluster.is_some() => vec![
            ("↑↓", "choose", 3),
            ("r", "restart a backend", 1),
            ("/", "filter", 2),
            ("?", "help", 0),
            ("q", "quit", 0),
        ],
        Mode::Log(_) => vec![("↑↓", "scroll", 1), ("g", "oldest", 3), ("G", "follow", 2), ("q", "back", 0)],
        _ => vec![
            ("↑↓", "choose", 5),
            ("r", "restart", 1),
            ("s", "stop", 2),
            ("u", "resume", 6),
            ("l", "log", 3),
            ("a", "attach", 7),
            ("/", "filter", 4),
            ("?", "help", 0),
            ("q", "quit", 0),
        ],
    };
    let mut spans = Vec::new();
    if !board.filter.is_empty() && board.mode == Mode::List {
        spans.push(Span::styled(format!("/{}  ", board.filter), look.colour(Color::Cyan)));
    }
    let filter: usize = spans.iter().map(Span::width).sum();
    let taken = |keys: &[(&str, &str, u8)]| {
        keys.iter().map(|(key, what, _)| Span::raw(*key).width() + what.len() + 3).sum::<usize>()
    };
    while filter + taken(&keys) > width + 2 {
        let Some(goes) = keys.iter().map(|key| key.2).max().filter(|goes| *goes > 0) else { break };
        keys.retain(|key| key.2 != goes);
    }
    for (key, what, _) in keys {
        spans.push(Span::styled(key.to_owned(), look.bold()));
        spans.push(Span::styled(format!(" {what}  "), look.dim()));
    }
    Line::from(spans)
}

// ---- the table -----------------------------------------------------------------------------------------------

/// A column: its title, its width, and its priority: on a narrow screen the highest numbers are left out first.
struct Column {
    title: &'static str,
    width: usize,
    is_number: bool,
    goes: u8,
    cell: fn(&Board, &Row, Look, Instant) -> Vec<Span<'static>>,
}

fn columns(board: &Board) -> Vec<Column> {
    if board.cluster.is_some() {
        return columns_of_cluster(board);
    }
    let longest = |text: fn(&Row) -> usize, least: usize, most: usize| {
        board.rows.iter().map(text).max().unwrap_or_default().clamp(least, most)
    };
    let number = |title, width, goes, cell| Column { title, width, is_number: true, goes, cell };
    vec![
        Column {
            title: "",
            width: 1,
            is_number: false,
            goes: 0,
            cell: |_, row, look, _| vec![Span::styled(mark(&row.state), state_style(&row.state, look))],
        },
        Column {
            title: "INSTANCE",
            width: longest(|row| row.id.chars().count(), 8, 28),
            is_number: false,
            goes: 0,
            cell: |_, row, look, _| vec![Span::styled(one_line(&row.id), look.bold())],
        },
        Column {
            title: "STATE",
            width: longest(|row| row.short_state().len(), 7, 12),
            is_number: false,
            goes: 0,
            cell: |board, row, look, _| match board.busy.get(&row.id) {
                Some(busy) => vec![Span::styled(format!("{busy}…"), look.colour(Color::Cyan))],
                None if row.stalled => vec![Span::styled(row.short_state().to_owned(), look.colour(Color::Yellow))],
                None => vec![Span::styled(row.state.replace('_', " "), state_style(&row.state, look))],
            },
        },
        number("UP", 6, 6, |_, row, _, _| text(row.uptime_s.map(in_short))),
        number("GEN", 4, 8, |_, row, _, _| text(row.generation.map(|generation| generation.to_string()))),
        number("RESTARTS", 8, 4, |_, row, look, _| {
            let style = if row.restarts.unwrap_or_default() > 0 { look.colour(Color::Yellow) } else { look.dim() };
            styled(row.restarts.map(|restarts| restarts.to_string()), style)
        }),
        Column {
            title: "LAST HOUR",
            width: STRIP_CELLS,
            is_number: false,
            goes: 5,
            cell: |board, row, look, now| {
                let since = board.asked.map_or(0.0, |asked| now.saturating_duration_since(asked).as_secs_f64());
                strip(&row.ends, since, look)
            },
        },
        number("CALLS/S", 7, 2, |_, row, look, _| match row.calls_per_s {
            Some(rate) if rate > 0.0 => text(Some(rate_in_words(rate))),
            rate => styled(rate.map(rate_in_words), look.dim()),
        }),
        number("P50", 7, 3, |_, row, _, _| text(row.p50_ms.map(ms_in_words))),
        number("FLIGHT", 6, 7, |_, row, look, _| match row.in_flight {
            Some(0) => styled(Some("0".to_owned()), look.dim()),
            count => text(count.map(|count| count.to_string())),
        }),
        number("NEXT", 5, 1, |board, row, look, now| {
            let left = board.left(row, now).map(|left| format!("{left:.1}s"));
            styled(left, look.colour(Color::Yellow))
        }),
    ]
}

fn columns_of_cluster(board: &Board) -> Vec<Column> {
    let id = board.rows.iter().map(|row| row.id.chars().count()).max().unwrap_or_default().clamp(8, 32);
    let column = |title, width, goes, cell| Column { title, width, is_number: false, goes, cell };
    let number = |title, width, goes, cell| Column { title, width, is_number: true, goes, cell };
    fn of(row: &Row, text: fn(&OfCluster) -> String) -> Option<String> {
        row.of_cluster.as_ref().map(text).filter(|text| !text.is_empty())
    }
    vec![
        column("", 1, 0, |_, row, look, _| vec![Span::styled(mark(&row.state), state_style(&row.state, look))]),
        column("REPLICA", id, 0, |_, row, look, _| vec![Span::styled(one_line(&row.id), look.bold())]),
        column("STATE", 12, 0, |board, row, look, _| match board.busy.get(&row.id) {
            Some(busy) => vec![Span::styled(format!("{busy}…"), look.colour(Color::Cyan))],
            None => vec![Span::styled(row.state.replace('_', " "), state_style(&row.state, look))],
        }),
        number("UP", 6, 2, |_, row, _, _| text(row.uptime_s.map(in_short))),
        column("PLACEMENT", 9, 5, |_, row, _, _| text(of(row, |one| one.placement.clone()))),
        number("LEASE", 5, 1, |_, row, _, _| text(of(row, |one| one.lease_s.map(in_short).unwrap_or_default()))),
        number("PID", 7, 7, |_, row, _, _| text(row.pid.map(|pid| pid.to_string()))),
        number("RESTARTS", 8, 6, |_, row, _, _| text(row.restarts.map(|restarts| restarts.to_string()))),
        number("SESSIONS", 14, 3, |_, row, _, _| text(of(row, |one| one.sessions.clone()))),
        number("SHARE", 6, 8, |_, row, _, _| text(of(row, |one| one.share.clone()))),
        number("BACKLOG", 7, 4, |_, row, look, _| match row.of_cluster.as_ref().and_then(|one| one.backlog) {
            Some(0) => styled(Some("0".to_owned()), look.dim()),
            backlog => styled(backlog.map(|backlog| backlog.to_string()), look.colour(Color::Yellow)),
        }),
    ]
}

fn text(text: Option<String>) -> Vec<Span<'static>> {
    vec![text.map_or_else(|| Span::styled("-", Style::new().add_modifier(Modifier::DIM)), Span::raw)]
}

fn styled(words: Option<String>, style: Style) -> Vec<Span<'static>> {
    match words {
        Some(words) => vec![Span::styled(words, style)],
        None => text(None),
    }
}

fn table(board: &Board, look: Look, area: Rect, now: Instant) -> Vec<Line<'static>> {
    let width = usize::from(area.width);
    if board.asked.is_some() && board.rows.is_empty() && board.cluster.is_some() {
        return vec![Line::default(), Line::from("  No replica is registered.")];
    }
    if board.asked.is_some() && board.rows.is_empty() {
        return vec![
            Line::default(),
            Line::from("  Nothing runs under outlast."),
            Line::from(Span::styled("  `outlast wrap` puts outlast in front of your clients' servers.", look.dim())),
        ];
    }
    let shown = board.shown();
    if shown.is_empty() && board.asked.is_some() {
        return vec![Line::default(), Line::from(format!("  Nothing matches `{}`.", board.filter))];
    }
    let mut columns = columns(board);
    let taken = |columns: &[Column]| columns.iter().map(|column| column.width + 1).sum::<usize>();
    while taken(&columns) > width + 1 {
        let Some(goes) = columns.iter().map(|column| column.goes).max().filter(|goes| *goes > 0) else { break };
        columns.retain(|column| column.goes != goes);
    }
    // The remaining width shows the last stderr line of each instance, if it is wide enough.
    let rest = width.saturating_sub(taken(&columns) + 1);
    let words = if rest >= 16 && board.cluster.is_none() { rest } else { 0 };

    let mut title = String::new();
    for column in &columns {
        title.push_str(&pad(column.title, column.width, column.is_number));
        title.push(' ');
    }
    if words > 0 {
        title.push_str(" LAST WORDS");
    }
    let mut lines = vec![Line::from(Span::styled(title, look.dim()))];

    // The selected row is in the middle, or as near to it as the list allows.
    let height = usize::from(area.height).saturating_sub(1).max(1);
    let chosen = shown.iter().position(|row| Some(&row.id) == board.chosen.as_ref()).unwrap_or(0);
    let first = chosen.saturating_sub(height / 2).min(shown.len().saturating_sub(height));
    for row in shown.iter().skip(first).take(height) {
        let mut spans: Vec<Span<'static>> = Vec::new();
        for column in &columns {
            let cell = (column.cell)(board, row, look, now);
            spans.extend(fitted(cell, column.width, column.is_number));
            spans.push(" ".into());
        }
        if words > 0 {
            spans.push(" ".into());
            spans.extend(fitted(last_words(row, look), words, false));
        }
        let mut line = Line::from(spans);
        if Some(&row.id) == board.chosen.as_ref() {
            let filled: usize = line.spans.iter().map(Span::width).sum();
            line.push_span(" ".repeat(width.saturating_sub(filled)));
            line = line.style(Style::new().add_modifier(Modifier::REVERSED));
        }
        lines.push(line);
    }
    lines
}

fn last_words(row: &Row, look: Look) -> Vec<Span<'static>> {
    if let Some(why) = &row.reload_failure {
        return vec![Span::styled(one_line(&format!("reload failed: {why}")), look.colour(Color::Yellow))];
    }
    let words = row.words.iter().rev().find(|line| !line.trim().is_empty());
    match (words, &row.last_exit) {
        (Some(words), _) => vec![Span::styled(one_line(words), look.dim())],
        (None, Some(exit)) => vec![Span::styled(format!("ended: {exit}"), look.dim())],
        (None, None) => Vec::new(),
    }
}

/// The exits of the last hour, the newest on the right: how many, and whether any of them was a crash.
fn strip(ends: &[(f64, bool)], since: f64, look: Look) -> Vec<Span<'static>> {
    const HEIGHTS: [&str; 4] = ["▂", "▄", "▆", "█"];
    let cell = |from_right: usize| {
        let here = ends.iter().filter(|(ago, _)| ((ago + since) / STRIP_CELL_S) as usize == from_right);
        let (mut count, mut crashes) = (0, 0);
        for (_, crashed) in here {
            count += 1;
            crashes += usize::from(*crashed);
        }
        match (count, crashes) {
            (0, _) => Span::styled("·", look.dim()),
            // A requested restart is no crash.
            (_, 0) => Span::styled("○", look.colour(Color::Cyan)),
            _ => Span::styled(HEIGHTS[crashes.min(HEIGHTS.len()) - 1], look.colour(Color::Red)),
        }
    };
    (0..STRIP_CELLS).rev().map(cell).collect()
}

// ---- the detail pane -----------------------------------------------------------------------------------------

fn about_one(row: &Row, look: Look, area: Rect) -> Vec<Line<'static>> {
    let width = usize::from(area.width);
    let line = |title: &str, words: String| {
        Line::from(vec![
            Span::styled(format!("{title:8}"), look.dim()),
            Span::raw(cut(&one_line(&words), width.saturating_sub(8))),
        ])
    };
    if let Some(of_cluster) = &row.of_cluster {
        return of_cluster.facts.iter().map(|(title, words)| line(title, words.clone())).collect();
    }
    let known = [
        Some(row.kind.clone()),
        row.health.clone(),
        row.pid.map(|pid| format!("pid {pid}")),
        row.generation.map(|generation| format!("generation {generation}")),
        row.uptime_s.map(|uptime| format!("up {}", in_short(uptime))),
        row.in_flight.filter(|count| *count > 0).map(|count| format!("{count} in flight")),
        row.oldest_request_s.map(|age| format!("oldest request {}", in_short(age))),
        row.stalled.then(|| "stalled".to_owned()),
        row.last_exit.as_ref().map(|exit| format!("last exit: {exit}")),
    ];
    let known: Vec<String> = known.into_iter().flatten().collect();
    let mut lines =
        vec![line("command", row.command.clone()), line("cwd", row.cwd.clone()), line("is", known.join(", "))];
    lines.extend(row.reload_failure.as_ref().map(|why| line("reload", format!("failed: {why}"))));
    if !row.muted.is_empty() {
        lines.push(line("muted", row.muted.join(", ")));
    }
    let room = usize::from(area.height).saturating_sub(lines.len());
    let words: Vec<&String> = row.words.iter().filter(|line| !line.trim().is_empty()).collect();
    for (at, words) in words[words.len().saturating_sub(room)..].iter().enumerate() {
        lines.push(line(if at == 0 { "stderr" } else { "" }, (*words).clone()));
    }
    lines
}

fn log_lines(log: &Log, look: Look, area: Rect) -> Vec<Line<'static>> {
    let (width, height) = (usize::from(area.width), usize::from(area.height).saturating_sub(1));
    let end = log.lines.len().saturating_sub(log.up);
    let begin = end.saturating_sub(height);
    let place =
        if log.up == 0 { "following".to_owned() } else { format!("{} further up", count(log.up, "line", "lines")) };
    let mut lines = vec![Line::from(vec![
        Span::styled(format!("log of {}", log.id), look.bold()),
        Span::styled(format!("  {place}"), look.dim()),
    ])];
    lines.extend(log.lines[begin..end].iter().map(|line| Line::from(cut(&one_line(line), width))));
    lines
}

fn help(board: &Board, look: Look, frame: &mut Frame<'_>, area: Rect) {
    const OF_CLUSTER: [(&str, &str); 5] = [
        ("↑ ↓  j k", "select a row; also PgUp, PgDn, g and G"),
        ("r", "restart a backend: at its owner, or on every replica"),
        ("/", "show only rows that contain a text; Esc shows all"),
        ("Ctrl-Z", "suspend; `fg` continues"),
        ("q  Ctrl-C", "quit; the replicas continue"),
    ];
    const KEYS: [(&str, &str); 12] = [
        ("↑ ↓  j k", "select an instance; also PgUp, PgDn, g and G"),
        ("r", "restart it; a server is reloaded without a pause"),
        ("s", "stop it, its server and outlast; asks first"),
        ("K", "stop it at once, without answering calls; asks first"),
        ("u", "start an instance that was given up"),
        ("l  Enter", "its log"),
        ("a", "attach to an agent's terminal"),
        ("/", "show only rows that contain a text; Esc shows all"),
        ("Ctrl-Z", "suspend; `fg` continues"),
        ("q  Ctrl-C", "quit; the instances continue"),
        ("", ""),
        ("last hour", "5 minutes per character: ▂▄▆█ crashes, ○ other exits  "),
    ];
    let keys: &[(&str, &str)] = if board.cluster.is_some() { &OF_CLUSTER } else { &KEYS };
    let (width, height) = (66, keys.len() as u16 + 2);
    let place = Rect {
        x: area.x + area.width.saturating_sub(width) / 2,
        y: area.y + area.height.saturating_sub(height) / 2,
        width: width.min(area.width),
        height: height.min(area.height),
    };
    let lines: Vec<Line<'_>> = keys
        .iter()
        .map(|(key, what)| Line::from(vec![Span::styled(format!(" {key:10}"), look.bold()), Span::raw(*what)]))
        .collect();
    frame.render_widget(Clear, place);
    let block = Block::bordered().title(" Keys ").title_alignment(Alignment::Center);
    frame.render_widget(Paragraph::new(lines).block(block), place);
}

// ---- texts ---------------------------------------------------------------------------------------------------

fn mark(state: &str) -> &'static str {
    match rank(state) {
        0 => "✖",
        1 => "?",
        2 => "◔",
        3 => "◌",
        5 => "○",
        _ => "●",
    }
}

/// Sort order of states: the worst first.
fn rank(state: &str) -> u8 {
    match state {
        "given_up" | "halted" | "lost" | "no owner" => 0,
        "unresponsive" => 1,
        "backoff" | "limited" => 2,
        "starting" | "started" | "reloading" | "stopping" => 3,
        "stopped" => 5,
        _ => 4,
    }
}

fn state_style(state: &str, look: Look) -> Style {
    match rank(state) {
        0 => look.colour(Color::Red).add_modifier(Modifier::BOLD),
        1 => look.colour(Color::Magenta),
        2 => look.colour(Color::Yellow),
        3 => look.colour(Color::Cyan),
        5 => look.dim(),
        _ => look.colour(Color::Green),
    }
}

pub(crate) fn rate_in_words(rate: f64) -> String {
    match rate {
        rate if rate < 0.05 => "0".to_owned(),
        rate if rate < 9.95 => format!("{rate:.1}"),
        rate if rate < 9_999.5 => format!("{rate:.0}"),
        rate => format!("{:.0}k", rate / 1e3),
    }
}

pub(crate) fn ms_in_words(ms: f64) -> String {
    match ms {
        ms if ms < 0.995 => format!("{:.0}µs", ms * 1e3),
        ms if ms < 9.95 => format!("{ms:.1}ms"),
        ms if ms < 999.5 => format!("{ms:.0}ms"),
        ms => in_short(ms / 1e3),
    }
}

/// Replaces characters that would move the cursor.
fn one_line(text: &str) -> String {
    outlast_core::visible::cell(text.trim_end())
}

/// Counts columns: some characters are two columns wide.
fn cut(text: &str, width: usize) -> String {
    if Span::raw(text).width() <= width {
        return text.to_owned();
    }
    let mut left = width.saturating_sub(1);
    let fits = |letter: &char| {
        let wide = Span::raw(letter.to_string()).width();
        let fits = wide <= left;
        left = left.saturating_sub(wide);
        fits
    };
    let kept: String = text.chars().take_while(fits).collect();
    format!("{kept}…")
}

fn pad(text: &str, width: usize, is_number: bool) -> String {
    if is_number { format!("{text:>width$}") } else { format!("{text:width$}") }
}

/// Pads or cuts a cell to its width.
fn fitted(mut cell: Vec<Span<'static>>, width: usize, is_number: bool) -> Vec<Span<'static>> {
    let length = |cell: &[Span<'_>]| cell.iter().map(Span::width).sum::<usize>();
    if length(&cell) > width {
        let style = cell.first().map(|span| span.style).unwrap_or_default();
        let text: String = cell.iter().map(|span| span.content.as_ref()).collect();
        cell = vec![Span::styled(cut(&text, width), style)];
    }
    let blank = Span::raw(" ".repeat(width.saturating_sub(length(&cell))));
    if is_number { [vec![blank], cell].concat() } else { [cell, vec![blank]].concat() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::operator::top::board::{Event, StatusLine};

    fn rows() -> Vec<Row> {
        let row = |id: &str, state: &str| Row {
            id: id.into(),
            kind: "mcp".into(),
            state: state.into(),
            cwd: "/home/me/projects/weather".into(),
            command: "python -m weather_server".into(),
            log: Some("/x.log".into()),
            ..Row::default()
        };
        vec![
            Row {
                pid: Some(4242),
                uptime_s: Some(7384.0),
                generation: Some(3),
                restarts: Some(2),
                calls_per_s: Some(12.34),
                p50_ms: Some(0.42),
                in_flight: Some(2),
                ends: vec![(400.0, true), (410.0, true), (1500.0, false)],
                words: vec!["INFO  serving".into(), "WARN  the cache is cold".into(), String::new()],
                ..row("weather-1abcd", "ready")
            },
            Row {
                restarts: Some(12),
                generation: Some(13),
                next_try_s: Some(4.2),
                calls_per_s: Some(0.0),
                in_flight: Some(0),
                last_exit: Some("signal 9 (SIGKILL)".into()),
                ends: (0..10).map(|n| (f64::from(n) * 20.0, true)).collect(),
                words: vec![
                    "Traceback (most recent call last):".into(),
                    "ValueError: 日本語 no such key in the settings".into(),
                ],
                ..row("github-mcp-7k2mq", "backoff")
            },
            Row { restarts: Some(5), last_exit: Some("exit code 1".into()), ..row("py-zz9yx", "given_up") },
            row("hangs-0qwer", "unresponsive"),
            Row {
                kind: "session".into(),
                health: Some("degraded".into()),
                pid: Some(99),
                uptime_s: Some(12.0),
                generation: Some(1),
                restarts: Some(0),
                command: "claude".into(),
                ..row("night", "running")
            },
        ]
    }

    fn board() -> (Board, Instant) {
        let now = Instant::now();
        let mut board = Board::default();
        board.handle(Event::Surveyed(rows()), now);
        (board, now)
    }

    fn shown(board: &Board, now: Instant, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let look = Look { has_colours: true };
        terminal.draw(|frame| draw(board, look, frame, now)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_wide_screen_shows_every_column() {
        let (board, now) = board();
        insta::assert_snapshot!(shown(&board, now + Duration::from_millis(1500), 140, 20));
    }

    #[test]
    fn a_call_through_a_gateway_counts_once() {
        let row = |id: &str, kind: &str, rate| Row {
            id: id.into(),
            kind: kind.into(),
            calls_per_s: Some(rate),
            ..Row::default()
        };
        let mut board = Board::default();
        let rows = vec![
            row("g", "gateway", 5.0),
            row("g/a", "backend", 2.0),
            row("g/b", "backend", 3.0),
            row("m", "mcp", 1.0),
        ];
        let now = Instant::now();
        board.handle(Event::Surveyed(rows), now);
        let header = header(&board, Look { has_colours: false }, 80).to_string();
        assert!(header.ends_with(" 6.0 calls/s"), "{header}");
    }

    #[test]
    fn a_cluster_shows_replicas_with_their_backends() {
        let mut board = Board { cluster: Some("prod".into()), ..Board::default() };
        let now = Instant::now();
        let mut all = shown(&board, now, 60, 3);
        board.handle(Event::Surveyed(crate::operator::cluster::board_rows(&crate::operator::cluster::example())), now);
        all.push_str(&shown(&board, now, 120, 18));
        board.chosen = Some("east-2/ledger".into());
        all.push_str(&shown(&board, now, 60, 18));
        board.mode = Mode::Help;
        all.push_str(&shown(&board, now, 72, 9));
        insta::assert_snapshot!(all);
    }

    #[test]
    fn a_usual_screen_leaves_out_the_least_important_columns() {
        let (mut board, now) = board();
        board.chosen = Some("github-mcp-7k2mq".into());
        insta::assert_snapshot!(shown(&board, now, 80, 24));
    }

    #[test]
    fn a_small_screen_shows_names_and_states() {
        let (board, now) = board();
        insta::assert_snapshot!(shown(&board, now, 40, 6));
        // It is drawn at every size.
        for (width, height) in [(1, 1), (3, 2), (10, 3), (200, 1), (1, 60)] {
            shown(&board, now, width, height);
        }
    }

    #[test]
    fn every_mode_shows_its_keys() {
        let (mut board, now) = board();
        let mut all = String::new();
        let modes = [
            Mode::Help,
            Mode::Filter,
            Mode::Sure { id: "weather-1abcd".into(), force: false },
            Mode::Sure { id: "weather-1abcd".into(), force: true },
            Mode::Log(Log {
                id: "weather-1abcd".into(),
                lines: (1..40).map(|n| format!("line {n}\t\x1b[31mred")).collect(),
                up: 3,
            }),
        ];
        board.filter = "e".into();
        for mode in modes {
            board.mode = mode;
            all.push_str(&format!("{:?}\n{}\n", board.mode, shown(&board, now, 72, 16)));
        }
        board.mode = Mode::List;
        board.news = None::<StatusLine>;
        board.handle(Event::Done { id: "x".into(), result: Err("the restart failed:\nno".into()) }, now);
        all.push_str(&shown(&board, now, 72, 4));
        insta::assert_snapshot!(
            all.replace(&format!("{:?}", (1..40).map(|n| format!("line {n}\t\x1b[31mred")).collect::<Vec<_>>()), "…")
        );
    }

    #[test]
    fn empty_lists_are_explained() {
        let now = Instant::now();
        let mut board = Board::default();
        let mut all = shown(&board, now, 70, 4);
        board.handle(Event::Surveyed(vec![]), now);
        all.push_str(&shown(&board, now, 70, 5));
        board.handle(Event::Surveyed(rows()), now);
        board.filter = "zzz".into();
        all.push_str(&shown(&board, now, 70, 5));
        insta::assert_snapshot!(all);
    }

    #[test]
    fn a_long_list_is_scrolled_to_the_selection() {
        let now = Instant::now();
        let mut board = Board::default();
        let rows: Vec<Row> =
            (0..200).map(|n| Row { id: format!("server-{n}"), state: "ready".into(), ..Row::default() }).collect();
        board.handle(Event::Surveyed(rows), now);
        for chosen in [0, 3, 100, 199] {
            board.chosen = Some(format!("server-{chosen}"));
            let screen = shown(&board, now, 60, 12);
            assert!(screen.contains(&format!("server-{chosen} ")), "{screen}");
        }
    }

    #[test]
    fn figures_are_short() {
        let table = [(0.0, "0"), (0.06, "0.1"), (12.34, "12"), (1234.0, "1234"), (123_456.0, "123k")];
        for (rate, words) in table {
            assert_eq!(rate_in_words(rate), words);
        }
        let table =
            [(0.042, "42µs"), (0.999, "1.0ms"), (4.25, "4.2ms"), (42.0, "42ms"), (1500.0, "1.5s"), (90_000.0, "1m")];
        for (ms, words) in table {
            assert_eq!(ms_in_words(ms), words);
        }
    }
}
