//! The subjects, and how each is started.

use std::{
    env, fs,
    fs::File,
    io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// The server itself.
    Direct,
    /// `cat | server | cat`: the least cost of a relay.
    Floor,
    Outlast,
    Mcpmon,
    Fastmcp,
}

impl Subject {
    pub(super) const ALL: [Self; 5] = [Self::Direct, Self::Floor, Self::Outlast, Self::Mcpmon, Self::Fastmcp];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Floor => "cat floor",
            Self::Outlast => "outlast",
            Self::Mcpmon => "mcpmon",
            Self::Fastmcp => "fastmcp",
        }
    }

    pub(super) fn is_rival(self) -> bool {
        matches!(self, Self::Mcpmon | Self::Fastmcp)
    }

    /// Whether there are processes between client and server.
    pub(super) fn is_relay(self) -> bool {
        self != Self::Direct
    }
}

/// The programs, and a directory to run them in, which is removed with their state.
pub(super) struct Stage {
    directory: TempDir,
    pub echo: PathBuf,
    outlast: PathBuf,
    mcpmon: Option<PathBuf>,
    fastmcp: Option<PathBuf>,
}

impl Stage {
    pub(super) fn set(outlast: Option<PathBuf>) -> io::Result<Self> {
        let beside = env::current_exe()?;
        let beside = beside.parent().expect("a program lies in a directory");
        let echo = beside.join("outlast-echo").canonicalize().map_err(|problem| {
            io::Error::new(problem.kind(), format!("outlast-echo is not built beside this program: {problem}"))
        })?;
        let directory = tempfile::tempdir()?;
        let config = format!(r#"{{"mcpServers":{{"echo":{{"command":{:?},"args":[]}}}}}}"#, echo.display().to_string());
        fs::write(directory.path().join("mcp.json"), config)?;
        Ok(Self {
            directory,
            echo,
            outlast: outlast.unwrap_or_else(|| beside.join("outlast")),
            mcpmon: find_peer("mcpmon"),
            fastmcp: find_peer("fastmcp"),
        })
    }

    pub(crate) fn outlast(&self) -> &Path {
        &self.outlast
    }

    /// Why a subject cannot be measured here, or none.
    pub(super) fn absence(&self, subject: Subject) -> Option<String> {
        match subject {
            Subject::Direct | Subject::Floor => None,
            Subject::Outlast => (!self.outlast.is_file()).then(|| format!("there is no {}", self.outlast.display())),
            Subject::Mcpmon => self.mcpmon.is_none().then(|| "not provisioned in $OUTLAST_PEERS".into()),
            Subject::Fastmcp => self.fastmcp.is_none().then(|| "not provisioned in $OUTLAST_PEERS".into()),
        }
    }

    /// Starts a subject. The first process reads the client's messages, the last one writes the answers.
    pub(super) fn start(&self, subject: Subject) -> io::Result<Vec<Child>> {
        // Started with the Python of its environment: the script still names the directory that it was installed in.
        let peer = |path: &Option<PathBuf>| {
            let path = path.as_ref().expect("only subjects that are here are started");
            let mut command = Command::new(path.with_file_name("python"));
            command.arg(path);
            command
        };
        let mut command = match subject {
            Subject::Direct => Command::new(&self.echo),
            Subject::Floor => return self.start_floor(),
            Subject::Outlast => {
                let mut command = Command::new(&self.outlast);
                command.args(["mcp", "--"]).arg(&self.echo);
                command
            }
            Subject::Mcpmon => {
                let mut command = peer(&self.mcpmon);
                command.args(["--quiet", "--watch"]).arg(self.directory.path()).arg("--").arg(&self.echo);
                command
            }
            Subject::Fastmcp => {
                let mut command = peer(&self.fastmcp);
                command.args(["run", "mcp.json", "--no-banner", "--log-level", "ERROR"]);
                command
            }
        };
        Ok(vec![self.settle(&mut command)?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?])
    }

    fn start_floor(&self) -> io::Result<Vec<Child>> {
        let mut before =
            self.settle(&mut Command::new("/bin/cat"))?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let words = before.stdout.take().expect("stdout is piped");
        let mut server = self.settle(&mut Command::new(&self.echo))?.stdin(words).stdout(Stdio::piped()).spawn()?;
        let answers = server.stdout.take().expect("stdout is piped");
        let after = self.settle(&mut Command::new("/bin/cat"))?.stdin(answers).stdout(Stdio::piped()).spawn()?;
        Ok(vec![before, server, after])
    }

    /// The subjects write neither to the terminal nor to the user's home.
    pub(crate) fn settle<'a>(&self, command: &'a mut Command) -> io::Result<&'a mut Command> {
        let stderr = File::options().create(true).append(true).open(self.directory.path().join("stderr"))?;
        Ok(command.current_dir(self.directory.path()).env("HOME", self.directory.path()).stderr(stderr))
    }
}

/// A program of that name in `$OUTLAST_PEERS` itself or in one of the environments in it.
fn find_peer(name: &str) -> Option<PathBuf> {
    let peers = PathBuf::from(env::var_os("OUTLAST_PEERS")?).canonicalize().ok()?;
    let program = |directory: &Path| Some(directory.join("bin").join(name)).filter(|path| path.is_file());
    let mut environments: Vec<_> = fs::read_dir(&peers).ok()?.flatten().map(|entry| entry.path()).collect();
    environments.sort();
    program(&peers).or_else(|| environments.iter().find_map(|directory| program(directory)))
}
