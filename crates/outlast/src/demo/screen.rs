//! Draws the story on a terminal, or prints it as plain lines.

use std::{
    fmt::Write as _,
    io::{self, Write},
    time::{Duration, Instant},
};

use ratatui::{
    Terminal,
    backend::{CrosstermBackend, IntoCrossterm},
    crossterm::{
        queue,
        style::{Print, PrintStyledContent},
    },
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::Paragraph,
};

use super::story::{Call, Fate, Mood, Outcome, Story, millis};
use crate::{adopt::on_path, cli::full_screen::FullScreen};

/// On a narrower terminal the three boxes do not fit.
const WIDE: usize = 72;
/// The width of the table's columns; on a narrower terminal it is a list.
const TABLE: usize = 79;
/// Longer lines are hard to read.
const WIDTH_MAX: usize = 96;
const WIDTH_MIN: usize = 24;
/// From these durations on, a call's dot is larger.
const SHORT: Duration = Duration::from_millis(5);
const NOTICED: Duration = Duration::from_millis(20);
/// The longest note on the screen; plain lines have it whole.
const NOTE_LINES_MAX: usize = 3;

const TITLE: &str = "outlast demo";

const PLAIN: Style = Style::new();
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const GOOD: Style = Style::new().fg(Color::Green);
const WARN: Style = Style::new().fg(Color::Yellow);
const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);

/// The colour of the server with this index.
fn server_style(place: usize) -> Style {
    const SERVERS: [Color; 4] = [Color::Cyan, Color::Green, Color::Yellow, Color::Magenta];
    Style::new().fg(SERVERS[place % SERVERS.len()])
}

fn span(style: Style, text: impl Into<String>) -> Span<'static> {
    Span::styled(text.into(), style)
}

/// Spaces up to a column.
fn pad(line: Line<'static>, column: usize) -> Line<'static> {
    let blanks = column.saturating_sub(line.width());
    line + Span::raw(" ".repeat(blanks))
}

/// The alternate screen of a terminal, on which each frame replaces the last one.
pub(super) struct Screen {
    full_screen: FullScreen,
    terminal: Terminal<CrosstermBackend<io::Stdout>>,
    colour: bool,
}

impl Screen {
    pub(super) fn begin(colour: bool) -> io::Result<Screen> {
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        Ok(Screen { full_screen: FullScreen::enter(false)?, terminal, colour })
    }

    /// Draws the current frame, as far as the terminal has room: old notes are dropped first.
    pub(super) fn draw(&mut self, story: &Story, now: Instant, (columns, rows): (usize, usize)) -> io::Result<()> {
        let mut airy = true;
        let mut quiet = 0;
        let mut lines = picture(story, now, columns, airy, quiet);
        while rows < lines.len() && quiet < story.scenes.len() {
            quiet += usize::from(!airy);
            airy = false;
            lines = picture(story, now, columns, airy, quiet);
        }
        lines.drain(..lines.len().saturating_sub(rows));
        let frame = Paragraph::new(with_colours(lines, self.colour));
        self.terminal.draw(|screen| screen.render_widget(frame, screen.area()))?;
        Ok(())
    }

    /// The whole frame and the sums on the normal screen, where they stay.
    pub(super) fn finish(&self, story: &Story, now: Instant, (columns, rows): (usize, usize)) -> io::Result<()> {
        let table = table(story, columns, on_path("outlast").is_some());
        let mut lines = picture(story, now, columns, true, 0);
        if rows < lines.len() + table.len() + 2 {
            lines = picture(story, now, columns, false, 0);
        }
        lines.push(Line::default());
        lines.extend(table);
        self.leave()?;
        print(&with_colours(lines, self.colour))
    }

    pub(super) fn leave(&self) -> io::Result<()> {
        self.full_screen.hide()
    }
}

fn with_colours(lines: Vec<Line<'static>>, colour: bool) -> Vec<Line<'static>> {
    let plain = |line: Line<'static>| Line::raw(line.to_string());
    if colour { lines } else { lines.into_iter().map(plain).collect() }
}

fn print(lines: &[Line<'_>]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for line in lines {
        for span in &line.spans {
            match span.style == PLAIN {
                true => queue!(out, Print(&span.content))?,
                false => queue!(out, PrintStyledContent(span.style.into_crossterm().apply(&span.content)))?,
            }
        }
        queue!(out, Print("\n"))?;
    }
    out.flush()
}

/// The story as lines that are printed once.
#[derive(Debug, Default)]
pub(super) struct Lines {
    scenes: usize,
    notes: usize,
}

impl Lines {
    /// What happened since the last call.
    pub(super) fn next(&mut self, story: &Story) -> String {
        let mut text = String::new();
        loop {
            if let Some(scene) = self.scenes.checked_sub(1).and_then(|at| story.scenes.get(at)) {
                for note in &scene.notes[self.notes..] {
                    let _ = writeln!(text, "{:>6.2} s    {}", note.at.as_secs_f64(), note.text);
                }
                self.notes = scene.notes.len();
            }
            let Some(scene) = story.scenes.get(self.scenes) else { return text };
            let _ = writeln!(text, "{:>6.2} s  {}", scene.at.as_secs_f64(), scene.title);
            self.scenes += 1;
            self.notes = 0;
        }
    }

    /// The sums, without a style.
    pub(super) fn finish(&mut self, story: &Story) -> String {
        let lines = table(story, WIDTH_MAX, on_path("outlast").is_some());
        lines.iter().map(|line| format!("{line}\n")).collect()
    }
}

/// The client, outlast and the server, and each scene with its calls. With `airy` there are blank lines; the first
/// `quiet` scenes have no notes.
fn picture(story: &Story, now: Instant, columns: usize, airy: bool, quiet: usize) -> Vec<Line<'static>> {
    let width = columns.clamp(WIDTH_MIN, WIDTH_MAX);
    let time = format!("{:.1} s", story.elapsed(now).as_secs_f64());
    let mut lines = vec![
        pad(
            Line::raw(" ")
                + span(BOLD, TITLE)
                + span(DIM, if width < WIDE { "" } else { "  the connection outlasts the process" }),
            width - 1 - time.len(),
        ) + span(DIM, time),
    ];
    lines.extend(if width < WIDE { ends_in_a_line(story) } else { ends(story, now, width) });
    lines.push(lives(story, width));
    for (at, scene) in story.scenes.iter().enumerate() {
        let is_last = at + 1 == story.scenes.len();
        let (mark, style) = match is_last && !story.is_over() {
            true => ("▶ ", BOLD),
            false if scene.sum().waiting > 0 && story.is_over() => ("✗ ", BAD),
            false => ("✓ ", GOOD),
        };
        let title = Line::raw(" ") + span(style, mark) + span(BOLD, scene.title);
        let sum = scene.sum();
        let mut count = format!("{} answered", sum.answered);
        for (number, what) in [(sum.failed, "failed"), (sum.waiting, if story.is_over() { "lost" } else { "waiting" })]
        {
            if number > 0 {
                let _ = write!(count, ", {number} {what}");
            }
        }
        if airy {
            lines.push(Line::default());
        }
        lines.push(match title.width() + 2 + count.len() < width {
            true => pad(title, width - 1 - count.len()) + span(DIM, count),
            false => title,
        });
        let mut dots: Vec<_> = scene.calls.iter().map(|call| dot(call, story)).collect();
        if let Some(mark) = scene.mark {
            dots.insert(mark, (BOLD, "│"));
        }
        for row in dots.chunks(width - 4) {
            let line = Line::raw("   ");
            lines.push(row.iter().fold(line, |line, (style, dot)| line + span(*style, *dot)));
        }
        for note in scene.notes.iter().filter(|_| quiet <= at) {
            let style = match note.mood {
                Mood::Plain => DIM,
                Mood::Good => PLAIN,
                Mood::Quote => WARN,
                Mood::Bad => BAD,
            };
            let rows = wrap(&note.text, width - 4, NOTE_LINES_MAX);
            lines.extend(rows.into_iter().map(|row| Line::raw("   ") + span(style, row)));
        }
    }
    if airy {
        lines.push(Line::default());
    }
    let legend = if width < WIDE {
        "· call ○ waits ◆ long ✗ failed │ event"
    } else {
        "· a call, • ● it waited, ○ it waits, ◆ a long one, ✗ failed, │ an event"
    };
    lines.push(Line::from(span(DIM, format!(" {legend}"))));
    lines
}

/// One call, in the colour of the server that answered.
fn dot(call: &Call, story: &Story) -> (Style, &'static str) {
    match call.outcome {
        Outcome::Waiting if story.is_over() => (BAD, "?"),
        Outcome::Waiting => (DIM, "○"),
        Outcome::Answered { pid, .. } if call.is_long => (server_style(story.place(pid)), "◆"),
        Outcome::Answered { pid, wait } if wait < SHORT => (server_style(story.place(pid)), "·"),
        Outcome::Answered { pid, wait } if wait < NOTICED => (server_style(story.place(pid)), "•"),
        Outcome::Answered { pid, .. } => (server_style(story.place(pid)), "●"),
        Outcome::Failed { .. } => (BAD, "✗"),
    }
}

fn ends(story: &Story, now: Instant, width: usize) -> Vec<Line<'static>> {
    const LINK: usize = 9;
    let inside = (width - 2 - 2 * LINK) / 3 - 2;
    let sum = story.sum();
    let client = [format!("{} calls", sum.made), format!("{} answered", sum.answered)];
    let outlast = [format!("pid {}", story.pid), restarts(sum.restarts)];
    let (server, place) = match story.serving() {
        Some(server) => {
            let generation = server.generation.map_or("new".to_owned(), |generation| format!("gen {generation}"));
            let up = now.saturating_duration_since(server.since).as_secs_f64();
            let pid = server.pid.unwrap_or_default();
            ([format!("pid {pid}"), format!("{generation}, up {up:.1} s")], server_style(story.place(pid)))
        }
        None => (["none".to_owned(), "coming".to_owned()], BAD),
    };
    let boxes = [("client", client, PLAIN), ("outlast", outlast, BOLD), ("server", server, place)];

    let link = |row: usize, at: usize| match (row, at) {
        (1, 0) => (PLAIN, " ◀─────▶ "),
        (1, 1) if story.serving().is_some() => (place, " ◀─────▶ "),
        (1, 1) => (BAD, " ◀─ ✗ ─▶ "),
        _ => (PLAIN, "         "),
    };
    (0..4)
        .map(|row| {
            let mut line = Line::raw(" ");
            for (at, (name, texts, style)) in boxes.iter().enumerate() {
                line = match row {
                    0 => {
                        let rest = "─".repeat(inside.saturating_sub(name.len() + 3));
                        line + span(*style, format!("╭─ {name} {rest}╮"))
                    }
                    3 => line + span(*style, format!("╰{}╯", "─".repeat(inside))),
                    row => {
                        let room = inside - 2;
                        let text: String = texts[row - 1].chars().take(room).collect();
                        line + span(*style, "│ ") + span(PLAIN, format!("{text:<room$}")) + span(*style, " │")
                    }
                };
                if at < 2 {
                    let (style, text) = link(row, at);
                    line += span(style, text);
                }
            }
            line
        })
        .collect()
}

fn ends_in_a_line(story: &Story) -> Vec<Line<'static>> {
    let line = Line::raw(" client ⇄ ") + span(BOLD, "outlast");
    let line = match story.serving() {
        Some(server) => {
            let pid = server.pid.unwrap_or_default();
            line + span(PLAIN, " ⇄ ") + span(server_style(story.place(pid)), format!("server, pid {pid}"))
        }
        None => line + span(BAD, " ✗ no server"),
    };
    vec![line]
}

/// Every server so far, and if there is room how it ended.
fn lives(story: &Story, width: usize) -> Line<'static> {
    let mut line = Line::raw(" ");
    for (at, server) in story.servers.iter().enumerate() {
        if at > 0 {
            line += span(DIM, " → ");
        }
        let name = server.pid.map_or("broken".to_owned(), |pid| pid.to_string());
        let (style, fate) = match server.fate {
            Fate::Serving => (server_style(at), "serves"),
            Fate::Replaced => (DIM, "replaced"),
            Fate::NeverCameUp => (DIM, "refused"),
            Fate::Killed => (DIM, "killed"),
        };
        line += span(style, if width < WIDE { name } else { format!("{name} {fate}") });
    }
    line
}

/// The sums: the cost of each scene, and of all of them.
pub(super) fn table(story: &Story, columns: usize, is_installed: bool) -> Vec<Line<'static>> {
    let width = columns.clamp(WIDTH_MIN, WIDTH_MAX);
    let mut lines = Vec::new();
    let rows = story.scenes.iter().map(|scene| (scene.title, scene.sum())).chain([("all", story.sum())]);
    if width < TABLE {
        for (title, sum) in rows {
            lines.push(Line::raw(" ") + span(BOLD, title));
            let calls =
                format!("{} calls: {} answered, {} failed, {} lost", sum.made, sum.answered, sum.failed, sum.waiting);
            let cost = format!("{}, longest pause {}", restarts(sum.restarts), millis(sum.pause));
            for words in [calls, cost] {
                let rows = wrap(&words, width - 4, usize::MAX);
                lines.extend(rows.into_iter().map(|row| Line::raw("   ") + span(PLAIN, row)));
            }
        }
    } else {
        let head = format!(
            " {:<23}{:>6}{:>10}{:>8}{:>6}{:>10}{:>15}",
            "what happened", "calls", "answered", "failed", "lost", "restarts", "longest pause"
        );
        lines.push(Line::from(span(DIM, head)));
        for (title, sum) in rows {
            let style = if title == "all" { BOLD } else { PLAIN };
            if title == "all" {
                lines.push(Line::from(span(DIM, format!(" {}", "─".repeat(TABLE - 1)))));
            }
            let mark = |count: usize, bad: Style| if count == 0 { style } else { bad };
            lines.push(
                Line::from(span(style, format!(" {title:<23}{:>6}{:>10}", sum.made, sum.answered)))
                    + span(mark(sum.failed, WARN), format!("{:>8}", sum.failed))
                    + span(mark(sum.waiting, BAD), format!("{:>6}", sum.waiting))
                    + span(style, format!("{:>10}{:>15}", sum.restarts, millis(sum.pause))),
            );
        }
    }
    lines.push(Line::default());
    let (style, words) = verdict(story);
    let rows = wrap(&words, width - 2, usize::MAX);
    lines.extend(rows.into_iter().map(|row| Line::raw(" ") + span(style, row)));
    lines.push(Line::default());
    let rows = wrap(next_step(is_installed), width - 2, usize::MAX);
    lines.extend(rows.into_iter().map(|row| Line::raw(" ") + span(PLAIN, row)));
    lines
}

/// The next steps for a person after the demo.
fn next_step(is_installed: bool) -> &'static str {
    match is_installed {
        true => {
            "Next: `outlast wrap` puts outlast in front of your clients' MCP servers. It shows a diff and asks first."
        }
        false => {
            "Next: install outlast (in a clone: `cargo install --path crates/outlast`). Then `outlast wrap` puts it in \
             front of your clients' MCP servers. It shows a diff and asks first."
        }
    }
}

fn restarts(count: u64) -> String {
    if count == 1 { "1 restart".to_owned() } else { format!("{count} restarts") }
}

fn verdict(story: &Story) -> (Style, String) {
    if !story.complaints.is_empty() {
        return (BAD, "The demo did not run as expected.".to_owned());
    }
    let sum = story.sum();
    let restarts = restarts(story.restarts.unwrap_or_default());
    let told = match sum.failed {
        0 => String::new(),
        1 => ", one of them with the error that its server had crashed and its outcome is unknown".to_owned(),
        failed => format!(", {failed} of them with the error that their server had crashed and the outcome is unknown"),
    };
    let words = format!("{restarts}, one connection, {} calls, and every one was answered{told}.", sum.made);
    (GOOD, words)
}

/// Wraps words at `width`; text beyond `max` lines is cut, visibly.
fn wrap(text: &str, width: usize, max: usize) -> Vec<String> {
    let mut rows: Vec<String> = Vec::new();
    let mut row = String::new();
    for word in text.split_whitespace() {
        let letters = |text: &str| text.chars().count();
        if !row.is_empty() && width < letters(&row) + 1 + letters(word) {
            rows.push(std::mem::take(&mut row));
        }
        if !row.is_empty() {
            row.push(' ');
        }
        row.push_str(word);
    }
    rows.push(row);
    if max < rows.len() {
        rows.truncate(max);
        if let Some(last) = rows.last_mut() {
            *last = last.chars().take(width - 2).collect::<String>() + " …";
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::{
        super::story::rehearsal::{Flaw, play},
        *,
    };

    fn text(lines: &[Line<'_>]) -> String {
        lines.iter().map(|line| line.to_string().trim_end().to_owned() + "\n").collect()
    }

    fn screen(flaw: Flaw, columns: usize) -> String {
        let (story, end) = play(flaw);
        text(&picture(&story, end, columns, false, 0))
    }

    #[test]
    fn a_wide_picture() {
        insta::assert_snapshot!(screen(Flaw::None, 80), @"
        outlast demo  the connection outlasts the process                        9.9 s
        ╭─ client ─────────╮         ╭─ outlast ────────╮         ╭─ server ─────────╮
        │ 250 calls        │ ◀─────▶ │ pid 100          │ ◀─────▶ │ pid 104          │
        │ 249 answered     │         │ 2 restarts       │         │ gen 4, up 2.4 s  │
        ╰──────────────────╯         ╰──────────────────╯         ╰──────────────────╯
        101 replaced → 102 killed → broken refused → 104 serves
        ✓ calls flow                                                       50 answered
          ··················································
          a call every 40 ms, through outlast, to a server with pid 101
        ✓ reload, a tool changed                                           69 answered
          ◆········│····························································
          `restart_server`: pid 101 → 102 in 5 ms, discount added, price changed
          the client got list_changed and listed the tools: price, discount, report
          the long call from before was answered by the old server, pid 101
        ✓ reload, broken code                                              63 answered
          │·······························································
          “The restart failed: the new server ended before it was ready (exit code 1).
          The old server (pid 102) keeps serving.”
          the error quotes its stderr: error: expected `,` or `}` (server.json:4:22)
          the code is fixed before the next start
        ✓ kill -9                                                67 answered, 1 failed
          ✗·······│····························································
          pid 102 was killed with SIGKILL
          the long call in flight got the answer “The server ended (signal 9
          (SIGKILL)) while `report` was running; it may or may not have taken effect.”
          7.0 ms after the kill of 102, the next call was answered by pid 104
        · a call, • ● it waited, ○ it waits, ◆ a long one, ✗ failed, │ an event
        ");
    }

    #[test]
    fn a_narrow_picture() {
        insta::assert_snapshot!(screen(Flaw::None, 50), @"
        outlast demo                               9.9 s
        client ⇄ outlast ⇄ server, pid 104
        101 → 102 → broken → 104
        ✓ calls flow                         50 answered
          ··············································
          ····
          a call every 40 ms, through outlast, to a
          server with pid 101
        ✓ reload, a tool changed             69 answered
          ◆········│····································
          ························
          `restart_server`: pid 101 → 102 in 5 ms,
          discount added, price changed
          the client got list_changed and listed the
          tools: price, discount, report
          the long call from before was answered by the
          old server, pid 101
        ✓ reload, broken code                63 answered
          │·············································
          ··················
          “The restart failed: the new server ended
          before it was ready (exit code 1). The old
          server (pid 102) keeps serving.”
          the error quotes its stderr: error: expected
          `,` or `}` (server.json:4:22)
          the code is fixed before the next start
        ✓ kill -9                  67 answered, 1 failed
          ✗·······│·····································
          ·······················
          pid 102 was killed with SIGKILL
          the long call in flight got the answer “The
          server ended (signal 9 (SIGKILL)) while
          `report` was running; it may or may not have …
          7.0 ms after the kill of 102, the next call
          was answered by pid 104
        · call ○ waits ◆ long ✗ failed │ event
        ");
    }

    #[test]
    fn wide_sums() {
        insta::assert_snapshot!(text(&table(&play(Flaw::None).0, 80, true)), @"
        what happened           calls  answered  failed  lost  restarts  longest pause
        calls flow                 50        50       0     0         0         0.4 ms
        reload, a tool changed     69        69       0     0         1         0.4 ms
        reload, broken code        63        63       0     0         0         0.4 ms
        kill -9                    68        67       1     0         1         7.0 ms
        ──────────────────────────────────────────────────────────────────────────────
        all                       250       249       1     0         2         7.0 ms

        2 restarts, one connection, 250 calls, and every one was answered, one of them
        with the error that its server had crashed and its outcome is unknown.

        Next: `outlast wrap` puts outlast in front of your clients' MCP servers. It
        shows a diff and asks first.
        ");
    }

    #[test]
    fn narrow_sums() {
        insta::assert_snapshot!(text(&table(&play(Flaw::None).0, 50, false)), @"
        calls flow
          50 calls: 50 answered, 0 failed, 0 lost
          0 restarts, longest pause 0.4 ms
        reload, a tool changed
          69 calls: 69 answered, 0 failed, 0 lost
          1 restart, longest pause 0.4 ms
        reload, broken code
          63 calls: 63 answered, 0 failed, 0 lost
          0 restarts, longest pause 0.4 ms
        kill -9
          68 calls: 67 answered, 1 failed, 0 lost
          1 restart, longest pause 7.0 ms
        all
          250 calls: 249 answered, 1 failed, 0 lost
          2 restarts, longest pause 7.0 ms

        2 restarts, one connection, 250 calls, and every
        one was answered, one of them with the error
        that its server had crashed and its outcome is
        unknown.

        Next: install outlast (in a clone: `cargo
        install --path crates/outlast`). Then `outlast
        wrap` puts it in front of your clients' MCP
        servers. It shows a diff and asks first.
        ");
    }

    #[test]
    fn sums_with_a_loss() {
        insta::assert_snapshot!(text(&table(&play(Flaw::LosesACall).0, 80, true)), @"
        what happened           calls  answered  failed  lost  restarts  longest pause
        calls flow                 50        49       0     1         0         0.4 ms
        reload, a tool changed     69        69       0     0         1         0.4 ms
        reload, broken code        63        63       0     0         0         0.4 ms
        kill -9                    73        72       1     0         1         7.0 ms
        ──────────────────────────────────────────────────────────────────────────────
        all                       255       253       1     1         2         7.0 ms

        The demo did not run as expected.

        Next: `outlast wrap` puts outlast in front of your clients' MCP servers. It
        shows a diff and asks first.
        ");
    }

    #[test]
    fn plain_lines() {
        let (story, _) = play(Flaw::None);
        insta::assert_snapshot!(Lines::default().next(&story), @"
        0.00 s  calls flow
        0.00 s    a call every 40 ms, through outlast, to a server with pid 101
        2.00 s  reload, a tool changed
        2.31 s    `restart_server`: pid 101 → 102 in 5 ms, discount added, price changed
        2.31 s    the client got list_changed and listed the tools: price, discount, report
        2.90 s    the long call from before was answered by the old server, pid 101
        4.71 s  reload, broken code
        4.71 s    “The restart failed: the new server ended before it was ready (exit code 1). The old server (pid 102) keeps serving.”
        4.71 s    the error quotes its stderr: error: expected `,` or `}` (server.json:4:22)
        4.71 s    the code is fixed before the next start
        7.21 s  kill -9
        7.51 s    pid 102 was killed with SIGKILL
        7.51 s    the long call in flight got the answer “The server ended (signal 9 (SIGKILL)) while `report` was running; it may or may not have taken effect.”
        7.51 s    7.0 ms after the kill of 102, the next call was answered by pid 104
        ");
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let (story, end) = play(Flaw::None);
        // On a narrower terminal the title, the list of servers and the legend are cut.
        for columns in 44..130 {
            for line in picture(&story, end, columns, true, 0).into_iter().chain(table(&story, columns, false)) {
                assert!(line.width() <= columns, "{columns}: {line}");
            }
        }
    }

    #[test]
    fn each_server_has_its_colour_and_without_colours_there_is_none() {
        let (story, end) = play(Flaw::None);
        let styled = |colour| {
            let lines = with_colours(picture(&story, end, 80, true, 0), colour);
            lines.into_iter().flat_map(|line| line.spans).filter(|span| span.style != PLAIN).collect::<Vec<_>>()
        };
        assert_eq!(styled(false), []);
        assert!(styled(true).contains(&span(server_style(0), "·")));
    }
}
