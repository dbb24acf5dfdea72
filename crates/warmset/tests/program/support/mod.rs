//! Runs the built program as its users do.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
};

/// What a command left behind.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    fn of(output: &Output) -> Self {
        Self {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout.clone()).unwrap(),
            stderr: String::from_utf8(output.stderr.clone()).unwrap(),
        }
    }

    /// The one document on stdout.
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{}", self.stderr);
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// A failure as it should be: one line that holds `words`, nothing on stdout.
    pub(crate) fn fails_with(&self, words: &str) {
        assert_eq!((self.code, self.stdout.as_str()), (1, ""), "{}", self.stderr);
        assert_eq!(self.stderr.trim_end().lines().count(), 1, "{}", self.stderr);
        assert!(self.stderr.contains(words), "{words:?} in {}", self.stderr);
    }
}

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmset"));
    command.args(arguments).env_remove("WARMSET_SERVER").env_remove("WARMSET_DATA").env_remove("WARMSET_CONFIG");
    command.env("NO_COLOR", "1").stdin(Stdio::null());
    command
}

pub(crate) fn run(arguments: &[&str]) -> Ran {
    Ran::of(&command(arguments).output().unwrap())
}

/// A directory with models and data of its own.
pub(crate) struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn data(&self) -> String {
        self.text_path("data")
    }

    pub(crate) fn text_path(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Writes a file and returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.path(name), text).unwrap();
        self.text_path(name)
    }

    /// Runs a command on this data directory.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        run(&[arguments, &["--data", &self.data()]].concat())
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        self.run(&[arguments, &["--json"]].concat()).json()
    }

    /// Starts a server here and waits until it serves.
    pub(crate) fn serve(&self, arguments: &[&str]) -> Server {
        let fixed = ["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--data"];
        let memory = ["--memory", "1GiB", "--reserve", "128MiB", "--json"];
        let data = self.data();
        let mut command = command(&[&fixed[..], &[&data], &memory, arguments].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let document: Value = serde_json::from_str(&line).unwrap();
        let admin = document["admin_listen"].as_str().unwrap().to_owned();
        Server { child, admin }
    }
}

/// A running server, killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) admin: String,
}

impl Server {
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        run(&[arguments, &["--server", &self.admin, "--json"]].concat()).json()
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        run(&[arguments, &["--server", &self.admin]].concat())
    }

    /// Process identities of the engines.
    pub(crate) fn engines(&self) -> Vec<u32> {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        let tasks = Path::new("/proc").join(self.child.id().to_string()).join("task");
        // The thread that started them is their parent's task.
        let mut engines = Vec::new();
        for task in tasks.read_dir().unwrap() {
            let text = std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default();
            engines.extend(text.split_whitespace().map(|pid| pid.parse::<u32>().unwrap()));
        }
        assert!(Path::new(&children).exists());
        engines
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Most tests have ended it already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Waits until something holds; a test that fails waits a minute for nothing.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "not within a minute: {what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
