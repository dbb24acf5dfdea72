//! `warmset serve`: catalog, store, worker and gateway put together, and taken apart again.

use crate::{
    admin_backend::{Backend, Server},
    cli::{ListenArguments, ServeArguments},
    clockwork::{self, Schedules},
    coming::Coming,
    config::{self, Config},
    data::{DataLock, Locked},
    facts::{self, Listeners},
    job_store::{CatalogBatches, CatalogJobs},
    kv,
    link::{LocalLink, StoredArtifacts},
    mend,
    output::{self, Output},
    readiness,
    recording::{Recording, Recordings},
    reload::Configured,
    repository::{ModelOptions, Repository, Runtimes},
    settings, warmth,
};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::json;
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};
use warmset_core::{ClockSpeed, PoolName, WorkerId};
use warmset_gateway::{
    admin::EventLog,
    batches::{Batches, BatchesConfig},
    clock::Clock,
    frontend::{Frontend, FrontendConfig},
    jobs::Jobs,
    metrics::Metrics,
    router::Later,
};
use warmset_worker::{Agent, AgentConfig, AgentHandle, KvHandle};

const DEFAULT_LISTEN: &str = "127.0.0.1:8080";
/// How long a stopping server lets requests finish unless told otherwise.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(45);
/// The one worker of this process.
const WORKER: WorkerId = WorkerId(0);

/// Everything that a server is told.
struct Plan {
    config: Config,
    config_path: Option<PathBuf>,
    listen: SocketAddr,
    admin_listen: SocketAddr,
    settings: warmset_core::worker::Settings,
    worker_type: String,
    record: Option<PathBuf>,
    clock_speed: ClockSpeed,
}

/// Serves until a signal comes. The first one lets requests finish, the second one does not.
pub(crate) async fn serve(arguments: ServeArguments, data: PathBuf, output: Output) -> Result<()> {
    let plan = plan(arguments)?;
    let mut signals = Signals::new()?;
    let mut lock = lock(&data).await?;
    // Taken first: nothing is begun that could not be served.
    let listener = bind(plan.listen).await?;
    let admin_listener = bind(plan.admin_listen).await?;
    let (listen, admin_listen) = (listener.local_addr()?, admin_listener.local_addr()?);
    let runtimes = Runtimes::new(plan.config.runtimes.iter().cloned());
    let repository = Arc::new(Repository::open(lock.root(), runtimes, plan.config.sources.clone()).await?);
    let far = take_configured(&repository, &plan, output).await?;
    let (server, recording) = start(&plan, repository, lock.root(), listen).await?;
    server.bring(far);
    mend::follow(server.clone());
    lock.announce(&admin_listen.to_string())?;

    let (stop, stopped) = watch::channel(false);
    let drain_timeout = plan.config.gateway.drain_timeout.unwrap_or(DRAIN_TIMEOUT);
    let ready = readiness::follow(server.clone()).await?;
    let both = (listener, admin_listener);
    let listeners = crate::listeners::start(&plan.config, &server, both, stopped, drain_timeout, ready);
    let document = json!({
        "listen": listen.to_string(), "admin_listen": admin_listen.to_string(), "data": data, "version": env!("CARGO_PKG_VERSION"),
    });
    output.result(&document, |_| {
        format!(
            "warmset serves on http://{listen}, administration on http://{admin_listen}, data in {}",
            data.display()
        )
    });

    tokio::select! {
        () = signals.wait() => {}
        part = broken(&server) => bail!(
            "the {part} has broken, which it must not (the lines above say where): start again, and please report it"
        ),
    }
    output::note("warmset: finishing what runs; another signal stops at once");
    tokio::select! {
        () = server.drain_all() => {}
        () = signals.wait() => bail!("stopped before running requests were finished"),
        () = tokio::time::sleep(drain_timeout) => tracing::warn!("requests were cut: they took longer than the drain timeout"),
    }
    // Whoever asks for health during the drain got an answer; now nobody does.
    let _ = stop.send(true);
    tokio::select! {
        () = listeners => {}
        () = signals.wait() => {}
        () = tokio::time::sleep(drain_timeout) => {}
    }
    if let Some(recording) = recording {
        recording.end("the server has ended").await;
    }
    Ok(())
}

/// The command line goes before the file.
fn plan(arguments: ServeArguments) -> Result<Plan> {
    let (config, listen, admin_listen) = read_place(&arguments.place)?;
    if !config.replicas.is_empty() {
        tracing::warn!("[[replica]] is for `warmset gateway`: this server answers with its own models only");
    }
    let memory = arguments.memory.or(config.worker.memory);
    let reserve = arguments.reserve.or(config.worker.reserve);
    let (memory, reserve) = settings::memory_and_reserve(memory, reserve)?;
    if let Some(warning) = settings::beyond_machine(memory, crate::machine::memory_bytes()) {
        tracing::warn!("{warning}");
    }
    let settings = settings::worker_settings(&config, memory, reserve).map_err(|error| {
        // Only the slices can be at fault, and only together with the memory, which the command line may have given.
        match (&arguments.place.config, config.worker.slices_line) {
            (Some(path), Some(line)) => error.context(format!("{}:{line}", path.display())),
            _ => error,
        }
    })?;
    let worker_type = settings::worker_type(&config);
    let clock_speed = arguments.clock_speed;
    if clock_speed != ClockSpeed::default() {
        tracing::warn!("time passes {} times as fast here: for replays with synthetic engines", clock_speed.times());
    }
    Ok(Plan {
        config,
        config_path: arguments.place.config,
        listen,
        admin_listen,
        settings: settings::at_speed(settings, clock_speed),
        worker_type,
        record: arguments.record,
        clock_speed,
    })
}

/// Which of the run loops has ended without being told to. Without each of them a server answers nobody, so it ends and
/// lets whoever watches it start another: that one begins with what was warm.
async fn broken(server: &Server) -> &'static str {
    let part = tokio::select! {
        () = server.agent.ended() => "worker",
        () = server.frontend.ended() => "gateway",
        () = ended(server.kv.as_ref()) => "KV tier",
    };
    if server.draining.load(Ordering::Acquire) {
        // It was told to.
        std::future::pending().await
    }
    part
}

/// Resolves when the KV tier has ended; never without one.
async fn ended(kv: Option<&KvHandle>) {
    match kv {
        Some(kv) => kv.ended().await,
        None => std::future::pending().await,
    }
}

/// The configuration, and where callers and administrators are listened to.
pub(crate) fn read_place(place: &ListenArguments) -> Result<(Config, SocketAddr, SocketAddr)> {
    let config = place.config.as_deref().map(config::read_file).transpose()?.unwrap_or_default();
    let address = |given: Option<SocketAddr>, file: Option<SocketAddr>, default: &str| match given.or(file) {
        Some(address) => Ok(address),
        None => default.parse().context("the default address is valid"),
    };
    let listen = address(place.listen, config.gateway.listen, DEFAULT_LISTEN)?;
    let admin_listen = address(place.admin_listen, config.gateway.admin_listen, crate::client::DEFAULT_ADMIN)?;
    if !admin_listen.ip().is_loopback() {
        bail!("administration has no keys yet, so {admin_listen} must be a loopback address: use 127.0.0.1:PORT");
    }
    Ok((config, listen, admin_listen))
}

async fn lock(data: &Path) -> Result<DataLock> {
    let root = data.to_path_buf();
    match tokio::task::spawn_blocking(move || DataLock::take(&root)).await?? {
        Locked::Here(lock) => Ok(lock),
        Locked::Server(address) => {
            bail!("{} is in use by the server at {address}: stop it, or give another --data", data.display())
        }
    }
}

pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    bound.with_context(|| format!("cannot listen on {address}: is another server there? give another address"))
}

/// Takes the models of the configuration file into catalog and store. Returns those whose files have to come from other
/// machines first.
async fn take_configured(repository: &Repository, plan: &Plan, output: Output) -> Result<Vec<ModelOptions>> {
    let mut far = Vec::new();
    for name in repository.follow_runtimes().await? {
        tracing::warn!(%name, "the runtime of a model was defined anew: it has another digest");
    }
    let pools = pools(&plan.settings);
    for model in &plan.config.models {
        let checked = model.check_place(&pools, plan.config.devices.len());
        checked.map_err(|reason| anyhow!("the configured model {}: {reason}", model.name))?;
        if model.is_far() && !repository.is_as_configured(model).await {
            far.push(model.clone());
            continue;
        }
        let added = repository.ensure(model, output.bytes_progress(&model.name)).await;
        let added = added.with_context(|| format!("the configured model {}", model.name))?;
        if let Some(old) = added.replaced {
            tracing::warn!(model = model.name, old = %old.digest, new = %added.model.digest, "the source has changed");
        }
    }
    Ok(far)
}

fn pools(settings: &warmset_core::worker::Settings) -> Vec<PoolName> {
    settings.pools.iter().map(|(name, _)| name.clone()).collect()
}

/// Starts worker and gateway and lets them know each other and the catalog.
async fn start(
    plan: &Plan,
    repository: Arc<Repository>,
    root: &Path,
    listen: SocketAddr,
) -> Result<(Arc<Server>, Option<Recording>)> {
    let origin = Instant::now();
    let clock = Clock::since(origin, plan.clock_speed);
    let artifacts = Arc::new(StoredArtifacts::new(repository.store.clone()));
    let kv = kv::start(&plan.config.kv, &plan.settings, root, warmset_worker::Clock::since(origin, plan.clock_speed))?;
    let agent = start_worker(plan, &repository, root, origin, (&artifacts, kv.clone())).await?;
    let config =
        FrontendConfig { settings: settings::gateway_settings(&plan.config), clock, ..FrontendConfig::default() };
    let metrics = Arc::new(Metrics::default());
    let frontend = Frontend::start(config, metrics.clone());
    let recordings = Recordings::default();
    let record = |path: &PathBuf| recordings.record_file(path, &agent, &frontend);
    let recording = plan.record.as_ref().map(record).transpose()?;
    let later = later(plan, &repository, root, &frontend, metrics)?;
    let devices = plan.config.devices.iter().map(|device| device.id.clone());
    let server = Arc::new(Server {
        repository: repository.clone(),
        artifacts,
        agent: agent.clone(),
        kv,
        frontend: frontend.clone(),
        jobs: later.0,
        batches: later.1,
        events: Arc::new(EventLog::default()),
        worker: WORKER,
        worker_type: plan.worker_type.clone(),
        cores: plan.settings.cores,
        tiers: std::iter::once("host".to_owned()).chain(devices).collect(),
        pools: pools(&plan.settings),
        listen: listen.to_string(),
        data: root.to_path_buf(),
        draining: AtomicBool::new(false),
        promotions: Arc::default(),
        coming: Coming::default(),
        configured: Configured::new(plan.config_path.clone(), &plan.config),
        schedules: Schedules::default(),
        recordings,
    });
    for stored in server.repository.all().await? {
        server.schedules.set(stored.model.digest, &stored.model.settings.schedule);
    }
    server.publish().await?;
    frontend.worker_up(WORKER, Arc::new(LocalLink::new(agent.clone(), server.kv.is_some())));
    facts::follow(Listeners {
        worker: WORKER,
        worker_type: plan.worker_type.clone(),
        agent,
        frontend,
        events: server.events.clone(),
        repository,
    });
    // First the time: what is remembered is weighed by it.
    clockwork::follow(server.agent.clone(), server.schedules.clone());
    warmth::follow(server.clone(), plan.config.residency.restore.unwrap_or(true)).await;
    // It waits for the disk, and nobody for it.
    let forgetting = Arc::clone(&server);
    tokio::spawn(async move { kv::forget_removed(&forgetting).await });
    resume(&server).await;
    Ok((server, recording))
}

/// Jobs and batches, which rest until their models are known.
fn later(
    plan: &Plan,
    repository: &Repository,
    root: &Path,
    frontend: &Frontend,
    metrics: Arc<Metrics>,
) -> Result<(Jobs, Batches)> {
    let answering = crate::listeners::inference(&plan.config, frontend.clone(), Arc::new(|| Ok(())), Later::default());
    let store = Arc::new(CatalogJobs(repository.catalog.clone()));
    let jobs = Jobs::start(store, answering.clone(), settings::jobs_config(&plan.config), metrics);
    let directory = root.join("files");
    let line_bytes_max = crate::listeners::body_bytes_max(&plan.config);
    let config = BatchesConfig { line_bytes_max, ..BatchesConfig::new(directory.clone()) };
    let store = Arc::new(CatalogBatches(repository.catalog.clone()));
    let batches = Batches::new(store, frontend.clone(), answering, config);
    Ok((jobs, batches.with_context(|| format!("cannot use {}", directory.display()))?))
}

/// Takes up what the last server left, now that its models are known. A catalog that cannot say stops nothing else.
async fn resume(server: &Server) {
    let jobs = server.jobs.resume().await.map_err(|error| error.to_string());
    let batches = server.batches.resume().await.map_err(|error| error.to_string());
    match (jobs, batches) {
        (Ok(0), Ok(0)) => {}
        (Ok(jobs), Ok(batches)) => tracing::info!(jobs, batches, "what the last server left goes on"),
        (Err(error), _) | (_, Err(error)) => tracing::warn!("what the last server left is not known: {error}"),
    }
}

async fn start_worker(
    plan: &Plan,
    repository: &Repository,
    root: &Path,
    origin: Instant,
    (artifacts, kv): (&Arc<StoredArtifacts>, Option<KvHandle>),
) -> Result<AgentHandle> {
    let mut models = Vec::new();
    let pools = pools(&plan.settings);
    for stored in repository.all().await? {
        let digest = stored.model.digest;
        let (name, pool) = (&stored.model.name, &stored.model.settings.pool);
        if *pool != PoolName::default_pool() && !pools.contains(pool) {
            tracing::warn!(%name, %pool, "a model names a pool that this server does not have: it gets the default one");
        }
        artifacts.learn(digest, stored.manifest.files.iter().map(|file| file.sha256).collect());
        let measured = repository.catalog.measurement(&digest, &plan.worker_type).await?;
        models.push(settings::model_config(&stored, &repository.runtimes, measured.as_ref())?);
    }
    let config = AgentConfig {
        worker: WORKER,
        settings: plan.settings.clone(),
        program: std::env::current_exe().context("cannot find this program's own file")?,
        data_dir: root.to_path_buf(),
        worker_type: plan.worker_type.clone(),
        spare: true,
        artifacts: artifacts.clone(),
        kv,
        clock: warmset_worker::Clock::since(origin, plan.clock_speed),
    };
    Ok(Agent::start(config, models)?)
}

/// The signals that stop a server.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// The terminal is gone. None where whoever started the server had this one ignored, as `nohup` does.
    hangup: Option<Signal>,
}

impl Signals {
    pub(crate) fn new() -> Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let ignored = hangup_is_ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
        let hangup = if ignored { None } else { Some(signal(SignalKind::hangup())?) };
        Ok(Self { terminate, interrupt, hangup })
    }

    pub(crate) async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            Some(_) = hung_up(self.hangup.as_mut()) => {}
        }
    }
}

async fn hung_up(hangup: Option<&mut Signal>) -> Option<()> {
    hangup?.recv().await
}

/// Whether a process with this `/proc/PID/status` ignores SIGHUP, the first bit of the mask.
fn hangup_is_ignored(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

impl Server {
    /// The admin routes' view of it.
    pub(crate) fn backend(self: &Arc<Self>) -> Backend {
        Backend(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hangup_that_was_ignored_at_the_start_stays_so() {
        assert!(hangup_is_ignored("Name:\twarmset\nSigIgn:\t0000000000001001\nSigCgt:\t0\n"));
        assert!(!hangup_is_ignored("SigIgn:\t0000000000001000\nSigCgt:\t0000000000000001\n"));
        assert!(!hangup_is_ignored(""));
    }
}
