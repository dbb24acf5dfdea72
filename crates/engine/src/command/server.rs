//! The server of a model: started by its guard, awaited until it can serve, ended.

use super::{
    guard::{Launch, Report, STOP},
    upstream::Upstream,
    variables,
};
use crate::{
    child::Role,
    port::{LoadFailure, LoadFault},
    process::{ENGINE_ARGUMENT, tree},
    protocol::{CommandRequest, LoadRequest},
};
use hyper::StatusCode;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    process::Stdio,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::Instant,
};

/// Between one look at a starting server and the next.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// How long one look may take.
pub(super) const LOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// What is asked where there is no route for health.
const MODELS_PATH: &str = "/v1/models";

/// A server and its guard.
pub(super) struct Server {
    pub(super) upstream: Upstream,
    /// Dropping its input ends the server at once.
    guard: Child,
    orders: Option<ChildStdin>,
    reports: Lines<BufReader<ChildStdout>>,
    health: String,
}

/// What a server says of itself once it can serve.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Served {
    /// The name that it knows its model by.
    pub(super) model: Option<String>,
    /// Tokens one sequence may hold.
    pub(super) context_tokens: Option<u32>,
}

fn failure(message: String, fault: LoadFault) -> LoadFailure {
    LoadFailure { message, fault }
}

impl Server {
    /// Lets a guard start the command.
    pub(super) async fn start(load: &LoadRequest, wanted: &CommandRequest) -> Result<Self, LoadFailure> {
        let passing = |what: &str, error: std::io::Error| failure(format!("{what}: {error}"), LoadFault::Passing);
        let upstream = Upstream::choose().map_err(|error| passing("no free port on 127.0.0.1", error))?;
        let launch = launch(load, wanted, upstream.port).map_err(|reason| failure(reason, LoadFault::Artifact))?;
        let program =
            std::env::current_exe().map_err(|error| passing("this program's own file is not there", error))?;
        let mut command = Command::new(program);
        command.arg(ENGINE_ARGUMENT).args(Role::Guard.argument());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).current_dir("/").process_group(0);
        let mut guard = command.spawn().map_err(|error| passing("cannot start the guard of a server", error))?;
        let (Some(mut orders), Some(reports)) = (guard.stdin.take(), guard.stdout.take()) else {
            return Err(failure("the guard of a server has no pipes".into(), LoadFault::Passing));
        };
        let mut line = serde_json::to_vec(&launch).unwrap_or_default();
        line.push(b'\n');
        orders.write_all(&line).await.map_err(|error| passing("the guard of a server ended", error))?;
        let (reports, health) = (BufReader::new(reports).lines(), wanted.runtime.health.clone());
        let mut server = Self { upstream, guard, orders: Some(orders), reports, health };
        match server.report().await {
            Report::Started => Ok(server),
            Report::Refused { message } => {
                Err(failure(format!("runtime {}: {message}", wanted.runtime.name), LoadFault::Artifact))
            }
            Report::Ended { how, .. } => {
                Err(failure(format!("the guard of a server ended: {how}"), LoadFault::Passing))
            }
        }
    }

    /// The next report of the guard. Safe to drop and call again.
    async fn report(&mut self) -> Report {
        let read = self.reports.next_line().await;
        let report = read.ok().flatten().and_then(|line| serde_json::from_str(&line).ok());
        report.unwrap_or_else(|| Report::Ended { how: "with its guard".into(), tail: String::new() })
    }

    /// Waits until it is gone: how it ended, and what it wrote last. Safe to drop and call again.
    pub(super) async fn ended(&mut self) -> (String, String) {
        loop {
            if let Report::Ended { how, tail } = self.report().await {
                return (how, tail);
            }
        }
    }

    /// Waits until it can serve.
    pub(super) async fn ready(&mut self, wanted: &CommandRequest) -> Result<Served, LoadFailure> {
        let (name, began) = (&wanted.runtime.name, Instant::now());
        let timeout = Duration::from_secs(wanted.runtime.health_timeout_seconds);
        let upstream = self.upstream;
        let mut path = self.health.clone();
        loop {
            tokio::select! {
                (how, tail) = self.ended() => {
                    let message = format!("the server of runtime {name} ended before it could serve: {how}{}", last(&tail));
                    return Err(failure(message, LoadFault::Passing));
                }
                looked = look(upstream, &path) => match looked {
                    Some(StatusCode::OK) if self.listens().is_none_or(|ports| ports.contains(&upstream.port)) => break,
                    Some(StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED) => {
                        path = MODELS_PATH.into();
                    }
                    _ => {}
                },
            }
            if began.elapsed() >= timeout {
                return Err(self.too_late(name, &path, timeout).await);
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        self.health = path;
        Ok(served(upstream).await)
    }

    /// The ports that it listens on, if the system shows them: whoever answers on the right one must be this server.
    fn listens(&self) -> Option<BTreeSet<u16>> {
        tree::listening_ports(self.guard.id()?)
    }

    async fn too_late(&mut self, name: &str, path: &str, timeout: Duration) -> LoadFailure {
        let port = self.upstream.port;
        let others: Vec<String> = self.listens().unwrap_or_default().iter().map(u16::to_string).collect();
        let listens = match others.len() {
            0 => "It listens on no port".to_owned(),
            _ => format!("It listens on {}", others.join(", ")),
        };
        self.kill();
        let (_, tail) = self.ended().await;
        let seconds = timeout.as_secs();
        let message = format!(
            "the server of runtime {name} did not answer GET {path} on 127.0.0.1:{port} with 200 within {seconds} s. \
             {listens}; its command must listen on ${{PORT}}, and a larger health_timeout gives it longer{}",
            last(&tail)
        );
        failure(message, LoadFault::Passing)
    }

    /// Whether it answers now.
    pub(super) fn alive(&self) -> impl Future<Output = bool> + Send + 'static {
        let (upstream, path) = (self.upstream, self.health.clone());
        async move { look(upstream, &path).await == Some(StatusCode::OK) }
    }

    /// Asks it to end in its own time.
    pub(super) async fn stop(&mut self) {
        if let Some(orders) = &mut self.orders {
            // A guard that is gone has nothing left to stop.
            let _ = orders.write_all(format!("{STOP}\n").as_bytes()).await;
        }
    }

    /// Ends it at once.
    fn kill(&mut self) {
        self.orders = None;
    }

    /// Waits until it and its guard are gone.
    pub(super) async fn gone(&mut self) {
        self.ended().await;
        // There is nothing to do about a guard that cannot be waited for.
        let _ = self.guard.wait().await;
    }
}

/// The end of a log, as part of a message.
fn last(tail: &str) -> String {
    if tail.is_empty() { "; it wrote nothing".into() } else { format!("; its last words:\n{tail}") }
}

async fn look(upstream: Upstream, path: &str) -> Option<StatusCode> {
    tokio::time::timeout(LOOK_TIMEOUT, upstream.get(path)).await.ok()?.ok().map(|(status, _)| status)
}

/// What the server says of its model: not every server says anything.
async fn served(upstream: Upstream) -> Served {
    let asked = tokio::time::timeout(LOOK_TIMEOUT, upstream.get(MODELS_PATH)).await;
    let Ok(Ok((StatusCode::OK, body))) = asked else { return Served::default() };
    let value: Value = serde_json::from_slice(&body).unwrap_or_default();
    let model = &value["data"][0];
    let context = model["max_model_len"].as_u64().or(model["meta"]["n_ctx"].as_u64());
    Served {
        model: model["id"].as_str().map(str::to_owned),
        context_tokens: context.and_then(|tokens| u32::try_from(tokens).ok()),
    }
}

/// The command with everything filled in.
fn launch(load: &LoadRequest, wanted: &CommandRequest, port: u16) -> Result<Launch, String> {
    let runtime = &wanted.runtime;
    let chosen: Vec<String> = load.accelerators.iter().map(u32::to_string).collect();
    let devices = runtime.visible_devices.clone().unwrap_or_else(|| chosen.join(","));
    let file = load.files.first().map(|file| file.to_str().ok_or("the path of the data directory is not UTF-8"));
    let model = file.transpose()?.map_or_else(|| wanted.model.clone(), str::to_owned);
    let values = BTreeMap::from([
        ("PORT", port.to_string()),
        ("HOST", "127.0.0.1".to_owned()),
        ("MODEL", model),
        ("NAME", wanted.name.clone()),
        ("CONTEXT_TOKENS", load.context_tokens.to_string()),
        ("TOTAL_CONTEXT_TOKENS", load.context_tokens.saturating_mul(load.parallel).to_string()),
        ("PARALLEL", load.parallel.to_string()),
        ("THREADS", load.threads.max(1).to_string()),
        ("DEVICES", devices.clone()),
    ]);
    let fill = |text: &String| variables::fill(text, &values);
    let mut env = BTreeMap::from([("CUDA_VISIBLE_DEVICES".to_owned(), devices)]);
    for (name, value) in &runtime.env {
        env.insert(name.clone(), fill(value)?);
    }
    let command = runtime.command.iter().map(fill).collect::<Result<_, _>>()?;
    Ok(Launch { command, env, cwd: runtime.cwd.clone(), user: runtime.user.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{EngineKind, Runtime};

    #[test]
    fn a_launch_has_its_variables_and_nothing_of_this_environment() {
        let load = LoadRequest {
            engine: EngineKind::Command,
            files: vec!["/store/a".into()],
            context_tokens: 512,
            parallel: 3,
            threads: 2,
            accelerators: vec![1, 3],
            command: None,
        };
        let command = ["serve", "${MODEL}", "--port=${PORT}", "-c", "${TOTAL_CONTEXT_TOKENS}"];
        let mut wanted = CommandRequest {
            runtime: Runtime {
                name: "r".into(),
                command: command.map(str::to_owned).into(),
                env: BTreeMap::from([("A".into(), "${NAME}/${DEVICES}".into())]),
                cwd: None,
                user: None,
                visible_devices: None,
                health: "/health".into(),
                health_timeout_seconds: 1,
            },
            name: "chat".into(),
            model: "org/model".into(),
        };
        let made = launch(&load, &wanted, 5).unwrap();
        assert_eq!(made.command, ["serve", "/store/a", "--port=5", "-c", "1536"]);
        let env = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        assert_eq!(made.env, env(&[("A", "chat/1,3"), ("CUDA_VISIBLE_DEVICES", "1,3")]));
        wanted.runtime.visible_devices = Some("7".into());
        let made = launch(&LoadRequest { files: Vec::new(), ..load }, &wanted, 5).unwrap();
        assert_eq!((made.command[1].as_str(), made.env["CUDA_VISIBLE_DEVICES"].as_str()), ("org/model", "7"));
    }
}
