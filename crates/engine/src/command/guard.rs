//! The process between a host and the server it started: whatever becomes of the host, no process of that server stays.
//!
//! Everything the server starts remains below this process, even what detaches itself. It reads orders from its
//! standard input, one a line: first what to launch, later `stop`. The end of its input means that the host is gone; then
//! all is killed. What the server writes goes on to the log, and its last lines are kept for the report of its end.

use crate::{child::log, process::tree};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, VecDeque},
    io::{Read, Write},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// Kept of the end of what the server wrote.
const TAIL_BYTES: usize = 2 << 10;
/// Read from the server's output at once.
const READ_BYTES: usize = 8 << 10;
/// How long the last of the output may take to come when its writers are gone.
const TAIL_PATIENCE: Duration = Duration::from_secs(1);
/// Between one kill and the next, while processes that start others are left.
const KILL_PAUSE: Duration = Duration::from_millis(10);
/// The environment without which hardly a program is found.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The order to end the server in its own time.
pub(super) const STOP: &str = "stop";

/// What to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Launch {
    pub(super) command: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) cwd: Option<PathBuf>,
    pub(super) user: Option<String>,
}

/// What a guard tells its host, one a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Report {
    /// The server's first process has started.
    Started,
    /// It cannot be started, and why.
    Refused { message: String },
    /// It is gone with everything it started: how it ended, and the last it wrote.
    Ended { how: String, tail: String },
}

/// Runs a guard.
pub(crate) fn run() -> ExitCode {
    let launch = match order() {
        Some(line) => serde_json::from_str::<Launch>(&line).map_err(|error| error.to_string()),
        None => Err("nobody says what to start".into()),
    };
    let started = launch.and_then(|launch| {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(|error| format!("cannot keep its processes together: {error}"))?;
        start(&launch)
    });
    let (server, tail) = match started {
        Ok(started) => started,
        Err(message) => {
            log(&message);
            report(&Report::Refused { message });
            return ExitCode::FAILURE;
        }
    };
    report(&Report::Started);
    let listener = std::thread::Builder::new().name("orders".into());
    let listening = listener.spawn(move || {
        while let Some(order) = order() {
            if order.trim_end() == STOP {
                // What has ended meanwhile needs no signal.
                let _ = rustix::process::kill_process_group(server, Signal::TERM);
            }
        }
        kill_all();
    });
    if listening.is_err() {
        // Nobody could end it.
        tree::kill_descendants(std::process::id());
    }
    let how = reap(server);
    let tail = tail.recv_timeout(TAIL_PATIENCE).unwrap_or_default();
    report(&Report::Ended { how, tail });
    ExitCode::SUCCESS
}

/// The next line of the input; none when the host is gone.
fn order() -> Option<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).is_ok_and(|bytes| bytes > 0).then_some(line)
}

fn report(report: &Report) {
    // A host that is gone needs no report.
    if let Ok(mut line) = serde_json::to_vec(report) {
        line.push(b'\n');
        let mut out = std::io::stdout();
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }
}

/// Kills until the process ends with the last of them.
fn kill_all() -> ! {
    loop {
        tree::kill_descendants(std::process::id());
        std::thread::sleep(KILL_PAUSE);
    }
}

/// Waits until nothing is left of the server; what outlives its first process is killed. Says how that one ended.
fn reap(server: Pid) -> String {
    let mut how = None;
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == server => {
                how = Some(describe(status));
                let killer = std::thread::Builder::new().name("killer".into());
                if killer.spawn(|| kill_all()).is_err() {
                    tree::kill_descendants(std::process::id());
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return how.unwrap_or_else(|| "its end was not seen".into()),
        }
    }
}

fn describe(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => crate::process::signal_name(signal),
        (None, None) => "for a reason nobody knows".into(),
    }
}

/// Starts the server; what it writes last is sent once nobody can write any more.
fn start(launch: &Launch) -> Result<(Pid, Receiver<String>), String> {
    let (program, arguments) = launch.command.split_first().ok_or("the command is empty")?;
    let identity = launch.user.as_deref().map(super::user::Identity::find).transpose()?;
    let (output, writer) = std::io::pipe().map_err(|error| format!("no pipe for its output: {error}"))?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("PATH", PATH).envs(&launch.env).process_group(0);
    command.current_dir(launch.cwd.as_deref().unwrap_or("/".as_ref())).stdin(Stdio::null());
    let shared = writer.try_clone().map_err(|error| format!("no pipe for its output: {error}"))?;
    command.stdout(shared).stderr(writer);
    super::user::become_on_exec(&mut command, identity);
    let child = command.spawn().map_err(|error| refusal(launch, program, &error))?;
    // The command holds the writing ends of the pipe.
    drop(command);
    let server = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or("a process without a number")?;
    let (sender, tail) = channel();
    let reader = std::thread::Builder::new().name("output".into());
    let reading = reader.spawn(move || {
        // Nobody may be left to hear it.
        let _ = sender.send(pass_on(output));
    });
    reading.map_err(|error| format!("cannot read its output: {error}"))?;
    Ok((server, tail))
}

fn refusal(launch: &Launch, program: &str, error: &std::io::Error) -> String {
    match (&launch.cwd, &launch.user) {
        (Some(cwd), _) if !cwd.is_dir() => format!("the runtime's cwd {} is not a directory", cwd.display()),
        (_, Some(user)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            format!("{program} cannot be started as {user}: {error}; may that user run it and enter its cwd?")
        }
        _ => format!("{program} cannot be started: {error}; correct the runtime's command"),
    }
}

/// Passes output on to the log. Returns its last lines.
fn pass_on(mut output: impl Read) -> String {
    let mut tail = VecDeque::with_capacity(TAIL_BYTES + READ_BYTES);
    let mut buffer = vec![0; READ_BYTES];
    while let Ok(length @ 1..) = output.read(&mut buffer) {
        // A log that cannot be written must not stop the server.
        let _ = std::io::stderr().write_all(&buffer[..length]);
        tail.extend(&buffer[..length]);
        tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
    }
    String::from_utf8_lossy(tail.make_contiguous()).trim_start_matches('\u{fffd}').trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_what_was_written_is_kept() {
        let text = "x".repeat(3 * READ_BYTES) + "\nlast words\n";
        let tail = pass_on(text.as_bytes());
        assert!(tail.ends_with("\nlast words") && tail.len() < TAIL_BYTES, "{}", tail.len());
        assert_eq!(pass_on(&b""[..]), "");
    }
}
