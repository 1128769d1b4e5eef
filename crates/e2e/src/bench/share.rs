//! What a shared server costs: the memory of ten clients compared with one, and a call through the hub compared with a call
//! through `outlast mcp` alone. The server is one on the Python SDK; the calls are repeated with the native echo server,
//! where the way of a message is nearly all of its time.

use std::{
    env, io,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    session::{Request, Session},
    subject::Stage,
    table::median,
    tree,
};

/// The limits of SPEC M3.
const MEMORY_MAX: f64 = 1.3;
const CALL_MAX: f64 = 1.6;
const CLIENTS: usize = 10;
/// Long enough for start-up work to finish, before memory is measured.
const SETTLE: Duration = Duration::from_millis(1500);
const GUARD: Duration = Duration::from_secs(180);
/// A hub that the benchmark leaves behind ends soon.
const LINGER: &str = "1s";

struct Size {
    rounds: usize,
    calls: usize,
    warm_up: usize,
}

const FULL: Size = Size { rounds: 7, calls: 2_000, warm_up: 300 };
const QUICK: Size = Size { rounds: 3, calls: 500, warm_up: 100 };

/// Which server is behind outlast.
#[derive(Clone)]
struct Server {
    name: &'static str,
    command: Vec<PathBuf>,
}

struct Row {
    name: String,
    plain: f64,
    shared: f64,
    unit: &'static str,
    /// The most that `shared / plain` may be.
    max: Option<f64>,
}

pub(crate) struct Report(Vec<Row>);

pub(crate) fn run(outlast: Option<PathBuf>, is_quick: bool) -> Result<Report, String> {
    let stage = Stage::set(outlast).map_err(|problem| problem.to_string())?;
    let size = if is_quick { QUICK } else { FULL };
    let peers = env::var_os("OUTLAST_PEERS").map(PathBuf::from).ok_or("OUTLAST_PEERS is not set")?;
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("peers/servers/python_mcp1.py");
    let python = Server { name: "Python server", command: vec![peers.join("python-1/bin/python"), script] };
    let echo = Server { name: "echo server", command: vec![stage.echo.clone()] };
    let bench = Bench { stage, size };
    let mut rows = vec![bench.memory(&python).map_err(|problem| problem.to_string())?];
    for (server, max) in [(python, Some(CALL_MAX)), (echo, None)] {
        rows.push(bench.calls(&server, max).map_err(|problem| format!("{}: it {problem}", server.name))?);
    }
    Ok(Report(rows))
}

struct Bench {
    stage: Stage,
    size: Size,
}

impl Bench {
    fn open(&self, server: &Server, is_shared: bool) -> io::Result<Session> {
        let mut command = Command::new(self.stage.outlast());
        command.arg("mcp");
        if is_shared {
            command.args(["--share", "--linger", LINGER]);
        }
        command.arg("--").args(&server.command);
        let child = self.stage.settle(&mut command)?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        Session::opened(vec![child])
    }

    /// All processes of one client, and of ten, hub and server included.
    fn memory(&self, server: &Server) -> io::Result<Row> {
        eprintln!("memory");
        let mut sessions = vec![self.open(server, true)?];
        let one = self.weigh(&sessions)?;
        while sessions.len() < CLIENTS {
            sessions.push(self.open(server, true)?);
        }
        let ten = self.weigh(&sessions)?;
        drop(sessions);
        self.wait_for_end()?;
        let name = format!("PSS of one client, and of {CLIENTS}, {}", server.name);
        Ok(Row { name, plain: one, shared: ten, unit: "MB", max: Some(MEMORY_MAX) })
    }

    fn weigh(&self, sessions: &[Session]) -> io::Result<f64> {
        thread::sleep(SETTLE);
        let mut roots: Vec<u32> = sessions.iter().flat_map(Session::pids).collect();
        let hubs = self.listed()?;
        if hubs.len() != 1 {
            return Err(io::Error::other(format!("has {} hubs instead of one", hubs.len())));
        }
        roots.extend(hubs.iter().filter_map(|hub| hub["pid"].as_u64()).map(|pid| pid as u32));
        Ok(tree::descent(&roots).iter().map(|process| process.memory()).sum::<u64>() as f64 / 1e6)
    }

    fn listed(&self) -> io::Result<Vec<Value>> {
        let mut command = Command::new(self.stage.outlast());
        let output = self.stage.settle(command.args(["ps", "--json"]))?.output()?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn wait_for_end(&self) -> io::Result<()> {
        let deadline = Instant::now() + GUARD;
        while !self.listed()?.is_empty() {
            if deadline < Instant::now() {
                return Err(io::Error::other("does not end its hub"));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Both ways in turns, so that the ratio holds on a busy machine.
    fn calls(&self, server: &Server, max: Option<f64>) -> io::Result<Row> {
        let mut samples = [Vec::new(), Vec::new()];
        for round in 0..self.size.rounds {
            eprintln!("{}: round {} of {}", server.name, round + 1, self.size.rounds);
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            let mut sessions = [self.open(server, false)?, self.open(server, true)?];
            for way in order {
                samples[way].push(self.p50(&mut sessions[way])?);
            }
        }
        self.wait_for_end()?;
        let [plain, shared] = samples.map(|samples| median(samples).unwrap_or(f64::NAN));
        let name = format!("call, p50: `outlast mcp`, and with `--share`, {}", server.name);
        Ok(Row { name, plain, shared, unit: "µs", max })
    }

    fn p50(&self, session: &mut Session) -> io::Result<f64> {
        let _guard = session.guard(GUARD);
        let mut call = Request::call(&session.echo_tool, r#"{"text":"hello"}"#);
        let mut times = Vec::with_capacity(self.size.calls);
        for number in 0..self.size.warm_up + self.size.calls {
            let before = Instant::now();
            if session.ask(&mut call, None)?.is_failed {
                return Err(io::Error::other("failed a call"));
            }
            if number >= self.size.warm_up {
                times.push(before.elapsed().as_secs_f64() * 1e6);
            }
        }
        Ok(median(times).unwrap_or(f64::NAN))
    }
}

impl Row {
    fn ratio(&self) -> f64 {
        self.shared / self.plain
    }

    fn verdict(&self) -> &'static str {
        match self.max {
            None => "",
            Some(max) if self.ratio() <= max => "ok",
            Some(_) => "MISSED",
        }
    }
}

impl Report {
    pub(crate) fn to_json(&self) -> Value {
        let row = |row: &Row| {
            json!({
                "name": row.name, "plain": row.plain, "shared": row.shared, "unit": row.unit,
                "ratio": row.ratio(), "max": row.max, "verdict": row.verdict(),
            })
        };
        self.0.iter().map(row).collect()
    }

    pub(crate) fn to_markdown(&self) -> String {
        let mut text = "| measured | plain | shared | ratio | limit | |\n|---|---|---|---|---|---|\n".to_owned();
        for row in &self.0 {
            let max = row.max.map_or_else(String::new, |max| format!("{max}"));
            let (name, unit, ratio, verdict) = (&row.name, row.unit, row.ratio(), row.verdict());
            let line = format!(
                "| {name} | {:.1} {unit} | {:.1} {unit} | {ratio:.2} | {max} | {verdict} |\n",
                row.plain, row.shared
            );
            text.push_str(&line);
        }
        text
    }
}
