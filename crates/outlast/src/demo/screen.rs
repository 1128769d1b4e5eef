//! The story as a picture on a terminal, or as plain lines.

use std::{
    fmt::Write as _,
    io::{self, Write},
    time::{Duration, Instant},
};

use super::story::{Call, Fate, Mood, Outcome, Story, millis};
use crate::wrap::on_path;

/// Narrower than this the three boxes have no room.
const WIDE: usize = 72;
/// The width of the table's columns; where they have no room, it is a list.
const TABLE: usize = 79;
/// A line is hard to read when it is longer.
const WIDTH_MAX: usize = 96;
const WIDTH_MIN: usize = 24;
/// From here on a call's dot is bigger, and bigger still.
const SHORT: Duration = Duration::from_millis(5);
const NOTICED: Duration = Duration::from_millis(20);
/// The longest note on the picture; plain lines have it whole.
const NOTE_LINES_MAX: usize = 3;

const TITLE: &str = "outlast demo";

/// How a piece of text looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Plain,
    Bold,
    Dim,
    Good,
    Warn,
    Bad,
    /// The colour of the server with this place in the order of lives.
    Server(usize),
}

impl Style {
    fn code(self) -> &'static str {
        const SERVERS: [&str; 4] = ["36", "32", "33", "35"];
        match self {
            Style::Plain => "",
            Style::Bold => "1",
            Style::Dim => "2",
            Style::Good => "32",
            Style::Warn => "33",
            Style::Bad => "1;31",
            Style::Server(place) => SERVERS[place % SERVERS.len()],
        }
    }
}

/// One line of the picture. Every character of it is one column wide.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Line(Vec<(Style, String)>);

impl Line {
    fn of(style: Style, text: impl Into<String>) -> Line {
        Line::default().and(style, text)
    }

    fn and(mut self, style: Style, text: impl Into<String>) -> Line {
        self.0.push((style, text.into()));
        self
    }

    fn width(&self) -> usize {
        self.0.iter().map(|(_, text)| text.chars().count()).sum()
    }

    /// Blanks up to a column.
    fn to(self, column: usize) -> Line {
        let blanks = column.saturating_sub(self.width());
        self.and(Style::Plain, " ".repeat(blanks))
    }

    fn paint(&self, width: usize, colour: bool) -> String {
        let mut painted = String::new();
        let mut room = width;
        for (style, text) in &self.0 {
            let text: String = text.chars().take(room).collect();
            room -= text.chars().count();
            match style.code() {
                "" => painted.push_str(&text),
                code if colour => {
                    let _ = write!(painted, "\x1b[{code}m{text}\x1b[0m");
                }
                _ => painted.push_str(&text),
            }
        }
        painted
    }
}

/// A terminal on which a picture is redrawn in place. Dropping it gives the cursor back.
pub struct Screen {
    out: io::Stdout,
    colour: bool,
    /// The lines of the picture that stands there; the cursor is below them.
    drawn: usize,
}

impl Screen {
    pub fn begin(colour: bool) -> io::Result<Screen> {
        let mut screen = Screen { out: io::stdout(), colour, drawn: 0 };
        screen.put("\x1b[?25l")?;
        Ok(screen)
    }

    /// The picture as it is now, as far as the terminal has room: old notes make way first.
    pub fn draw(&mut self, story: &Story, now: Instant, (columns, rows): (usize, usize)) -> io::Result<()> {
        // The cursor stands on a line of its own.
        let room = rows.saturating_sub(1);
        let mut airy = true;
        let mut quiet = 0;
        let mut lines = picture(story, now, columns, airy, quiet);
        while room < lines.len() && quiet < story.scenes.len() {
            quiet += usize::from(!airy);
            airy = false;
            lines = picture(story, now, columns, airy, quiet);
        }
        let from = lines.len().saturating_sub(room);
        self.replace(&lines[from..], columns)
    }

    /// The whole picture and the sums, to stay.
    pub fn finish(&mut self, story: &Story, now: Instant, (columns, rows): (usize, usize)) -> io::Result<()> {
        let table = table(story, columns, on_path("outlast").is_some());
        let mut lines = picture(story, now, columns, true, 0);
        if rows < lines.len() + table.len() + 2 {
            lines = picture(story, now, columns, false, 0);
        }
        lines.push(Line::default());
        lines.extend(table);
        self.replace(&lines, columns)
    }

    /// One write, each line over its predecessor: nothing is ever blank that was not and will not be.
    fn replace(&mut self, lines: &[Line], columns: usize) -> io::Result<()> {
        let mut bytes = String::from("\x1b[?2026h");
        if self.drawn > 0 {
            let _ = write!(bytes, "\x1b[{}A", self.drawn);
        }
        bytes.push('\r');
        for line in lines {
            bytes.push_str(&line.paint(columns, self.colour));
            bytes.push_str("\x1b[K\n");
        }
        bytes.push_str("\x1b[J\x1b[?2026l");
        self.drawn = lines.len();
        self.put(&bytes)
    }

    fn put(&mut self, bytes: &str) -> io::Result<()> {
        let mut out = self.out.lock();
        out.write_all(bytes.as_bytes())?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If nobody is there to see it, nobody misses the cursor.
        let _ = self.put("\x1b[?25h");
    }
}

/// The story as lines that are written once and stay.
#[derive(Debug, Default)]
pub struct Lines {
    scenes: usize,
    notes: usize,
}

impl Lines {
    /// What happened since the last time.
    pub fn next(&mut self, story: &Story) -> String {
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
    pub fn finish(&mut self, story: &Story) -> String {
        let lines = table(story, WIDTH_MAX, on_path("outlast").is_some());
        lines.iter().map(|line| line.paint(usize::MAX, false) + "\n").collect()
    }
}

/// The ends and what lies between them, and each scene with its calls. An airy one has blank lines; the first
/// `quiet` scenes are without notes.
fn picture(story: &Story, now: Instant, columns: usize, airy: bool, quiet: usize) -> Vec<Line> {
    let width = columns.clamp(WIDTH_MIN, WIDTH_MAX);
    let time = format!("{:.1} s", story.elapsed(now).as_secs_f64());
    let mut lines = vec![
        Line::of(Style::Plain, " ")
            .and(Style::Bold, TITLE)
            .and(Style::Dim, if width < WIDE { "" } else { "  the connection outlasts the process" })
            .to(width - 1 - time.len())
            .and(Style::Dim, time),
    ];
    lines.extend(if width < WIDE { ends_in_a_line(story) } else { ends(story, now, width) });
    lines.push(lives(story, width));
    for (at, scene) in story.scenes.iter().enumerate() {
        let is_last = at + 1 == story.scenes.len();
        let (mark, style) = match is_last && !story.is_over() {
            true => ("▶ ", Style::Bold),
            false if scene.sum().waiting > 0 && story.is_over() => ("✗ ", Style::Bad),
            false => ("✓ ", Style::Good),
        };
        let title = Line::of(Style::Plain, " ").and(style, mark).and(Style::Bold, scene.title);
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
            true => title.to(width - 1 - count.len()).and(Style::Dim, count),
            false => title,
        });
        let mut dots: Vec<_> = scene.calls.iter().map(|call| dot(call, story)).collect();
        if let Some(mark) = scene.mark {
            dots.insert(mark, (Style::Bold, "│"));
        }
        for row in dots.chunks(width - 4) {
            let line = Line::of(Style::Plain, "   ");
            lines.push(row.iter().fold(line, |line, (style, dot)| line.and(*style, *dot)));
        }
        for note in scene.notes.iter().filter(|_| quiet <= at) {
            let style = match note.mood {
                Mood::Plain => Style::Dim,
                Mood::Good => Style::Plain,
                Mood::Quote => Style::Warn,
                Mood::Bad => Style::Bad,
            };
            let rows = wrap(&note.text, width - 4, NOTE_LINES_MAX);
            lines.extend(rows.into_iter().map(|row| Line::of(Style::Plain, "   ").and(style, row)));
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
    lines.push(Line::of(Style::Dim, format!(" {legend}")));
    lines
}

/// One call. Its colour is the server that answered.
fn dot(call: &Call, story: &Story) -> (Style, &'static str) {
    match call.outcome {
        Outcome::Waiting if story.is_over() => (Style::Bad, "?"),
        Outcome::Waiting => (Style::Dim, "○"),
        Outcome::Answered { pid, .. } if call.is_long => (Style::Server(story.place(pid)), "◆"),
        Outcome::Answered { pid, wait } if wait < SHORT => (Style::Server(story.place(pid)), "·"),
        Outcome::Answered { pid, wait } if wait < NOTICED => (Style::Server(story.place(pid)), "•"),
        Outcome::Answered { pid, .. } => (Style::Server(story.place(pid)), "●"),
        Outcome::Failed { .. } => (Style::Bad, "✗"),
    }
}

fn ends(story: &Story, now: Instant, width: usize) -> Vec<Line> {
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
            ([format!("pid {pid}"), format!("{generation}, up {up:.1} s")], Style::Server(story.place(pid)))
        }
        None => (["none".to_owned(), "coming".to_owned()], Style::Bad),
    };
    let boxes = [("client", client, Style::Plain), ("outlast", outlast, Style::Bold), ("server", server, place)];

    let link = |row: usize, at: usize| match (row, at) {
        (1, 0) => (Style::Plain, " ◀─────▶ "),
        (1, 1) if story.serving().is_some() => (place, " ◀─────▶ "),
        (1, 1) => (Style::Bad, " ◀─ ✗ ─▶ "),
        _ => (Style::Plain, "         "),
    };
    (0..4)
        .map(|row| {
            let mut line = Line::of(Style::Plain, " ");
            for (at, (name, texts, style)) in boxes.iter().enumerate() {
                line = match row {
                    0 => {
                        let rest = "─".repeat(inside.saturating_sub(name.len() + 3));
                        line.and(*style, format!("╭─ {name} {rest}╮"))
                    }
                    3 => line.and(*style, format!("╰{}╯", "─".repeat(inside))),
                    row => {
                        let room = inside - 2;
                        let text: String = texts[row - 1].chars().take(room).collect();
                        line.and(*style, "│ ").and(Style::Plain, format!("{text:<room$}")).and(*style, " │")
                    }
                };
                if at < 2 {
                    let (style, text) = link(row, at);
                    line = line.and(style, text);
                }
            }
            line
        })
        .collect()
}

fn ends_in_a_line(story: &Story) -> Vec<Line> {
    let line = Line::of(Style::Plain, " client ⇄ ").and(Style::Bold, "outlast");
    let line = match story.serving() {
        Some(server) => {
            let pid = server.pid.unwrap_or_default();
            line.and(Style::Plain, " ⇄ ").and(Style::Server(story.place(pid)), format!("server, pid {pid}"))
        }
        None => line.and(Style::Bad, " ✗ no server"),
    };
    vec![line]
}

/// Every server there was, and where there is room what became of it.
fn lives(story: &Story, width: usize) -> Line {
    let mut line = Line::of(Style::Plain, " ");
    for (at, server) in story.servers.iter().enumerate() {
        if at > 0 {
            line = line.and(Style::Dim, " → ");
        }
        let name = server.pid.map_or("broken".to_owned(), |pid| pid.to_string());
        let (style, fate) = match server.fate {
            Fate::Serving => (Style::Server(at), "serves"),
            Fate::Replaced => (Style::Dim, "replaced"),
            Fate::NeverCameUp => (Style::Dim, "refused"),
            Fate::Killed => (Style::Dim, "killed"),
        };
        line = line.and(style, if width < WIDE { name } else { format!("{name} {fate}") });
    }
    line
}

/// The sums: what each scene cost, and all of them.
pub fn table(story: &Story, columns: usize, is_installed: bool) -> Vec<Line> {
    let width = columns.clamp(WIDTH_MIN, WIDTH_MAX);
    let mut lines = Vec::new();
    let rows = story.scenes.iter().map(|scene| (scene.title, scene.sum())).chain([("all", story.sum())]);
    if width < TABLE {
        for (title, sum) in rows {
            lines.push(Line::of(Style::Plain, " ").and(Style::Bold, title));
            let calls =
                format!("{} calls: {} answered, {} failed, {} lost", sum.made, sum.answered, sum.failed, sum.waiting);
            let cost = format!("{}, longest pause {}", restarts(sum.restarts), millis(sum.pause));
            for words in [calls, cost] {
                let rows = wrap(&words, width - 4, usize::MAX);
                lines.extend(rows.into_iter().map(|row| Line::of(Style::Plain, "   ").and(Style::Plain, row)));
            }
        }
    } else {
        let head = format!(
            " {:<23}{:>6}{:>10}{:>8}{:>6}{:>10}{:>15}",
            "what happened", "calls", "answered", "failed", "lost", "restarts", "longest pause"
        );
        lines.push(Line::of(Style::Dim, head));
        for (title, sum) in rows {
            let style = if title == "all" { Style::Bold } else { Style::Plain };
            if title == "all" {
                lines.push(Line::of(Style::Dim, format!(" {}", "─".repeat(TABLE - 1))));
            }
            let mark = |count: usize, bad: Style| if count == 0 { style } else { bad };
            lines.push(
                Line::of(style, format!(" {title:<23}{:>6}{:>10}", sum.made, sum.answered))
                    .and(mark(sum.failed, Style::Warn), format!("{:>8}", sum.failed))
                    .and(mark(sum.waiting, Style::Bad), format!("{:>6}", sum.waiting))
                    .and(style, format!("{:>10}{:>15}", sum.restarts, millis(sum.pause))),
            );
        }
    }
    lines.push(Line::default());
    let (style, words) = verdict(story);
    let rows = wrap(&words, width - 2, usize::MAX);
    lines.extend(rows.into_iter().map(|row| Line::of(Style::Plain, " ").and(style, row)));
    lines.push(Line::default());
    let rows = wrap(next_step(is_installed), width - 2, usize::MAX);
    lines.extend(rows.into_iter().map(|row| Line::of(Style::Plain, " ").and(Style::Plain, row)));
    lines
}

/// What a person does after the demo.
fn next_step(is_installed: bool) -> &'static str {
    match is_installed {
        true => {
            "Next: `outlast wrap` puts outlast in front of the servers that your clients have. It shows a diff and asks \
             first."
        }
        false => {
            "Next: install outlast (in a clone: `cargo install --path crates/outlast`). Then `outlast wrap` puts it in \
             front of the servers that your clients have. It shows a diff and asks first."
        }
    }
}

fn restarts(count: u64) -> String {
    if count == 1 { "1 restart".to_owned() } else { format!("{count} restarts") }
}

fn verdict(story: &Story) -> (Style, String) {
    if !story.complaints.is_empty() {
        return (Style::Bad, "Not everything went as it should.".to_owned());
    }
    let sum = story.sum();
    let restarts = restarts(story.restarts.unwrap_or_default());
    let told = match sum.failed {
        0 => String::new(),
        1 => ", one of them with the news that its server had died and its outcome is unknown".to_owned(),
        failed => format!(", {failed} of them with the news that their server had died and the outcome is unknown"),
    };
    let words = format!("{restarts}, one connection, {} calls, and every one was answered{told}.", sum.made);
    (Style::Good, words)
}

/// Words in lines of at most `width`; what goes beyond `max` lines is cut, visibly.
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

    fn text(lines: &[Line]) -> String {
        lines.iter().map(|line| line.paint(usize::MAX, false).trim_end().to_owned() + "\n").collect()
    }

    fn screen(flaw: Flaw, columns: usize) -> String {
        let (story, end) = play(flaw);
        text(&picture(&story, end, columns, false, 0))
    }

    #[test]
    fn a_wide_picture() {
        insta::assert_snapshot!(screen(Flaw::None, 80), @r#"
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
          told that the list changed, the client asked: price, discount, report
          the long call from before was answered by the old server, pid 101
        ✓ reload, broken code                                              63 answered
          │·······························································
          “The restart failed: the new server ended before it was ready (exit code 1).
          The old server (pid 102) keeps serving.”
          its stderr came with it: error: expected `,` or `}` (server.json:4:22)
          the code is mended before the next start needs it
        ✓ kill -9                                                67 answered, 1 failed
          ✗·······│····························································
          pid 102 was killed without a warning
          the long call in flight was told: “The server ended (signal 9 (SIGKILL))
          while `report` was running; it may or may not have taken effect.”
          7.0 ms after the death of 102, the next call was answered by pid 104
        · a call, • ● it waited, ○ it waits, ◆ a long one, ✗ failed, │ an event
        "#);
    }

    #[test]
    fn a_narrow_picture() {
        insta::assert_snapshot!(screen(Flaw::None, 50), @r#"
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
          told that the list changed, the client asked:
          price, discount, report
          the long call from before was answered by the
          old server, pid 101
        ✓ reload, broken code                63 answered
          │·············································
          ··················
          “The restart failed: the new server ended
          before it was ready (exit code 1). The old
          server (pid 102) keeps serving.”
          its stderr came with it: error: expected `,`
          or `}` (server.json:4:22)
          the code is mended before the next start needs
          it
        ✓ kill -9                  67 answered, 1 failed
          ✗·······│·····································
          ·······················
          pid 102 was killed without a warning
          the long call in flight was told: “The server
          ended (signal 9 (SIGKILL)) while `report` was
          running; it may or may not have taken effect.”
          7.0 ms after the death of 102, the next call
          was answered by pid 104
        · call ○ waits ◆ long ✗ failed │ event
        "#);
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
        with the news that its server had died and its outcome is unknown.

        Next: `outlast wrap` puts outlast in front of the servers that your clients
        have. It shows a diff and asks first.
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
        one was answered, one of them with the news that
        its server had died and its outcome is unknown.

        Next: install outlast (in a clone: `cargo
        install --path crates/outlast`). Then `outlast
        wrap` puts it in front of the servers that your
        clients have. It shows a diff and asks first.
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

        Not everything went as it should.

        Next: `outlast wrap` puts outlast in front of the servers that your clients
        have. It shows a diff and asks first.
        ");
    }

    #[test]
    fn plain_lines() {
        let (story, _) = play(Flaw::None);
        insta::assert_snapshot!(Lines::default().next(&story), @r#"
        0.00 s  calls flow
        0.00 s    a call every 40 ms, through outlast, to a server with pid 101
        2.00 s  reload, a tool changed
        2.31 s    `restart_server`: pid 101 → 102 in 5 ms, discount added, price changed
        2.31 s    told that the list changed, the client asked: price, discount, report
        2.90 s    the long call from before was answered by the old server, pid 101
        4.71 s  reload, broken code
        4.71 s    “The restart failed: the new server ended before it was ready (exit code 1). The old server (pid 102) keeps serving.”
        4.71 s    its stderr came with it: error: expected `,` or `}` (server.json:4:22)
        4.71 s    the code is mended before the next start needs it
        7.21 s  kill -9
        7.51 s    pid 102 was killed without a warning
        7.51 s    the long call in flight was told: “The server ended (signal 9 (SIGKILL)) while `report` was running; it may or may not have taken effect.”
        7.51 s    7.0 ms after the death of 102, the next call was answered by pid 104
        "#);
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let (story, end) = play(Flaw::None);
        for columns in WIDTH_MIN..130 {
            for line in picture(&story, end, columns, true, 0).into_iter().chain(table(&story, columns, false)) {
                let painted = line.paint(columns, false);
                assert!(painted.chars().count() <= columns, "{columns}: {painted}");
                // On less than this the title, the lives and the legend lose their ends.
                if 44 <= columns {
                    assert!(line.width() <= columns, "{columns}: {painted}");
                }
            }
        }
    }

    #[test]
    fn without_colour_there_is_no_escape() {
        let (story, end) = play(Flaw::None);
        let painted = |colour| -> String {
            picture(&story, end, 80, true, 0).iter().map(|line| line.paint(80, colour)).collect()
        };
        assert!(!painted(false).contains('\x1b'));
        assert!(painted(true).contains("\x1b[36m·"));
    }
}
