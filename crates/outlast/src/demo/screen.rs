//! The story as a picture on a terminal, or as plain lines.

use std::{
    fmt::Write as _,
    io::{self, Write},
    time::{Duration, Instant},
};

use super::story::{Call, Fate, Mood, Outcome, Story, millis};

/// Narrower than this the three boxes and the table's columns have no room.
const WIDE: usize = 72;
/// A line is hard to read when it is longer.
const WIDTH_MAX: usize = 96;
const WIDTH_MIN: usize = 24;
/// Who waited this long would have noticed.
const NOTICED: Duration = Duration::from_millis(10);
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
        let mut quiet = 0;
        let mut lines = picture(story, now, columns, quiet);
        while room < lines.len() && quiet < story.scenes.len() {
            quiet += 1;
            lines = picture(story, now, columns, quiet);
        }
        let from = lines.len().saturating_sub(room);
        self.replace(&lines[from..], columns)
    }

    /// The whole picture and the sums, to stay.
    pub fn finish(&mut self, story: &Story, now: Instant, columns: usize) -> io::Result<()> {
        let mut lines = picture(story, now, columns, 0);
        lines.push(Line::default());
        lines.extend(table(story, columns));
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
        let lines = table(story, WIDTH_MAX);
        lines.iter().map(|line| line.paint(usize::MAX, false) + "\n").collect()
    }
}

/// The ends and what lies between them, and each scene with its calls. The first `quiet` scenes are without notes.
fn picture(story: &Story, now: Instant, columns: usize, quiet: usize) -> Vec<Line> {
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
    lines.push(lives(story));
    for (at, scene) in story.scenes.iter().enumerate() {
        let is_last = at + 1 == story.scenes.len();
        let (mark, style) = match is_last && !story.is_over() {
            true => ("▶ ", Style::Bold),
            false if scene.sum().waiting > 0 && story.is_over() => ("✗ ", Style::Bad),
            false => ("✓ ", Style::Good),
        };
        let title = Line::of(Style::Plain, " ").and(style, mark).and(Style::Bold, scene.title);
        let sum = scene.sum();
        let count = match sum.failed {
            0 => format!("{} of {}", sum.answered, sum.made),
            failed => format!("{} + {failed} of {}", sum.answered, sum.made),
        };
        lines.push(title.to(width.saturating_sub(1 + count.len())).and(Style::Dim, count));
        for row in scene.calls.chunks(width - 4) {
            let dots = row.iter().map(|call| dot(call, story));
            lines.push(dots.fold(Line::of(Style::Plain, "   "), |line, (style, dot)| line.and(style, dot)));
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
    lines
}

/// One call. Its colour is the server that answered.
fn dot(call: &Call, story: &Story) -> (Style, &'static str) {
    match call.outcome {
        Outcome::Waiting if story.is_over() => (Style::Bad, "?"),
        Outcome::Waiting => (Style::Dim, "○"),
        Outcome::Answered { pid, .. } if call.is_long => (Style::Server(story.place(pid)), "◆"),
        Outcome::Answered { pid, wait } if wait < NOTICED => (Style::Server(story.place(pid)), "·"),
        Outcome::Answered { pid, .. } => (Style::Server(story.place(pid)), "●"),
        Outcome::Failed { .. } => (Style::Bad, "✗"),
    }
}

fn ends(story: &Story, now: Instant, width: usize) -> Vec<Line> {
    const LINK: usize = 9;
    let inside = (width - 2 - 2 * LINK) / 3 - 2;
    let sum = story.sum();
    let client = [format!("{} calls", sum.made), format!("{} waiting", sum.waiting)];
    let replaced = story.servers.iter().filter(|server| server.fate != Fate::Serving).count();
    let outlast = ["one connection".to_owned(), format!("{replaced} servers outlived")];
    let (server, place) = match story.serving() {
        Some(server) => {
            let generation = server.generation.map_or(String::new(), |generation| format!("generation {generation}"));
            let up = now.saturating_duration_since(server.since).as_secs_f64();
            let pid = server.pid.unwrap_or_default();
            ([generation, format!("pid {pid}, {up:.1} s")], Style::Server(story.place(pid)))
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

/// Every server there was.
fn lives(story: &Story) -> Line {
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
        line = line.and(style, format!("{name} {fate}"));
    }
    line
}

/// The sums: what each scene cost, and all of them.
pub fn table(story: &Story, columns: usize) -> Vec<Line> {
    let width = columns.clamp(WIDTH_MIN, WIDTH_MAX);
    let mut lines = Vec::new();
    let rows = story.scenes.iter().map(|scene| (scene.title, scene.sum())).chain([("all", story.sum())]);
    if width < WIDE {
        for (title, sum) in rows {
            lines.push(Line::of(Style::Plain, " ").and(Style::Bold, title));
            let words = format!(
                "{} calls, {} answered, {} failed, {} lost, longest pause {}",
                sum.made,
                sum.answered,
                sum.failed,
                sum.waiting,
                millis(sum.pause)
            );
            let words = wrap(&words, width - 4, usize::MAX);
            lines.extend(words.into_iter().map(|row| Line::of(Style::Plain, "   ").and(Style::Plain, row)));
        }
    } else {
        let head = format!(
            " {:<28}{:>7}{:>10}{:>8}{:>6}{:>15}",
            "what happened", "calls", "answered", "failed", "lost", "longest pause"
        );
        lines.push(Line::of(Style::Dim, head));
        for (title, sum) in rows {
            let style = if title == "all" { Style::Bold } else { Style::Plain };
            if title == "all" {
                lines.push(Line::of(Style::Dim, format!(" {}", "─".repeat(74))));
            }
            let mark = |count: usize, bad: Style| if count == 0 { style } else { bad };
            lines.push(
                Line::of(style, format!(" {title:<28}{:>7}{:>10}", sum.made, sum.answered))
                    .and(mark(sum.failed, Style::Warn), format!("{:>8}", sum.failed))
                    .and(mark(sum.waiting, Style::Bad), format!("{:>6}", sum.waiting))
                    .and(style, format!("{:>15}", millis(sum.pause))),
            );
        }
    }
    lines.push(Line::default());
    let (style, words) = verdict(story);
    let rows = wrap(&words, width - 2, usize::MAX);
    lines.extend(rows.into_iter().map(|row| Line::of(Style::Plain, " ").and(style, row)));
    lines
}

fn verdict(story: &Story) -> (Style, String) {
    if !story.complaints.is_empty() {
        return (Style::Bad, "Not everything went as it should.".to_owned());
    }
    let sum = story.sum();
    let restarts = story.restarts.unwrap_or_default();
    let told = match sum.failed {
        0 => String::new(),
        1 => " One was told that it was running when the server died, and that its outcome is unknown.".to_owned(),
        failed => format!(" {failed} were told that they were running when the server died: outcome unknown."),
    };
    let words = format!("{restarts} restarts, one connection, and every one of {} calls was answered.{told}", sum.made);
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
