//! The command line, as clap reads it.

use super::{
    admin::AdminCommand, import::ImportCommand, plan::PlanCommand, replay::ReplayArguments, sim_arguments::SimArguments,
};
use crate::{
    config::{CONTEXT_TOKENS_MAX, PARALLEL_MAX, parse_pool, parse_runtime, units},
    repository::{ModelOptions, parse_accelerators, parse_cold, parse_engine, parse_model_name, parse_priority},
    schedule::Window,
};
use clap::{
    Args, Parser, Subcommand,
    builder::{PathBufValueParser, TypedValueParser},
};
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use warmset_core::{Bytes, ClockSpeed, ModelName, Priority, gateway::ColdPolicy, targets::Targets};
use warmset_engine::protocol::EngineKind;
use warmset_gateway::proxy::ReplicaUrl;

/// OpenAI's upper bound.
const TEMPERATURE_MAX: f32 = 2.0;
/// Seconds between two looks at a server.
const INTERVAL_MIN: f64 = 0.1;
const INTERVAL_MAX: f64 = 3600.0;

/// One pool that keeps models warm inside a memory budget.
#[derive(Debug, Parser)]
#[command(name = "warmset", version, propagate_version = true, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: GlobalArguments,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command understands.
#[derive(Debug, Clone, Args)]
pub(crate) struct GlobalArguments {
    /// Print one JSON document on stdout and nothing else
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Admin listener of a running server [default: 127.0.0.1:8081]
    #[arg(long, global = true, value_name = "HOST:PORT", env = "WARMSET_SERVER")]
    pub(crate) server: Option<String>,
    /// Data directory [default: $XDG_DATA_HOME/warmset or ~/.local/share/warmset]
    #[arg(long, global = true, value_name = "DIR", env = "WARMSET_DATA", value_parser = absolute_path())]
    pub(crate) data: Option<PathBuf>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve models over HTTP from one memory budget
    Serve(Box<ServeArguments>),
    /// Stand in front of servers that have OpenAI's routes, and send each request where its prompt is warm
    Gateway(GatewayArguments),
    /// Add, list, pin, load, measure and remove models
    #[command(subcommand)]
    Model(ModelCommand),
    /// List, show and cancel requests that are answered later
    #[command(subcommand)]
    Jobs(JobsCommand),
    /// List, show and cancel files of requests that are answered later
    #[command(subcommand)]
    Batches(BatchesCommand),
    /// Show what is kept of prompts, and whether it pays; or forget it
    Kv {
        /// What to do [default: show]
        #[command(subcommand)]
        command: Option<KvCommand>,
    },
    /// Chat with a model in the terminal, or send it one prompt
    Run(RunArguments),
    /// Watch memory, models, queues and events of a running server
    Top(TopArguments),
    /// Take over what other tools have
    #[command(subcommand)]
    Import(ImportCommand),
    /// Administer a running server
    #[command(subcommand)]
    Admin(AdminCommand),
    /// Check this machine, the data directory and the server
    Doctor,
    /// Calculate what fits, how fast it goes and what it takes
    #[command(subcommand)]
    Plan(Box<PlanCommand>),
    /// Replay demand through the machines that serve, on a virtual clock, and compare with others
    Sim(SimArguments),
    /// Tell a recording to the machines again, which must do the same; or ask what would have been
    Replay(ReplayArguments),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// An engine process; started by the worker only
    #[command(hide = true)]
    Engine {
        /// What kind of engine process
        role: Option<String>,
    },
}

/// `warmset kv`
#[derive(Debug, Clone, Copy, Subcommand)]
pub(crate) enum KvCommand {
    /// Forget all prompts that were asked until now: in engines, in memory and on disk
    Clear,
}

/// What both servers are told: a file, and where to listen.
#[derive(Debug, Clone, Args)]
pub(crate) struct ListenArguments {
    /// Configuration file (TOML); the command line wins over it
    #[arg(long, value_name = "FILE", env = "WARMSET_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Address for inference [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
    /// Address for administration, a loopback one [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) admin_listen: Option<SocketAddr>,
}

/// `warmset serve`
#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    #[command(flatten)]
    pub(crate) place: ListenArguments,
    /// Memory the pool may use, such as 2GiB [default: 80 % of the machine's]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    pub(crate) memory: Option<Bytes>,
    /// Part of it that is kept free [default: a tenth, at least 384MiB, never more than half]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    pub(crate) reserve: Option<Bytes>,
    /// Record what the machines are told and do into this file, from the start on, for `warmset replay`
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Let time pass so many times as fast, for replays with synthetic engines
    #[arg(long, value_name = "N", hide = true, default_value = "1", value_parser = clock_speed)]
    pub(crate) clock_speed: ClockSpeed,
}

/// `warmset gateway`
#[derive(Debug, Clone, Args)]
pub(crate) struct GatewayArguments {
    #[command(flatten)]
    pub(crate) place: ListenArguments,
    /// A replica, beside those of the configuration
    #[arg(long, value_name = "URL")]
    pub(crate) replica: Vec<ReplicaUrl>,
}

/// The most times as fast as the wall's that a server's time may pass: a day in less than a minute and a half.
const CLOCK_SPEED_MAX: u32 = 1_000;

fn clock_speed(text: &str) -> Result<ClockSpeed, String> {
    let times = text.parse().ok().filter(|times| *times <= CLOCK_SPEED_MAX);
    times.and_then(ClockSpeed::new).ok_or_else(|| format!("write a whole number between 1 and {CLOCK_SPEED_MAX}"))
}

/// `warmset model ...`
#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Copy a model into the store and give it a name
    Add(Box<AddArguments>),
    /// List all models
    #[command(visible_alias = "ls")]
    List,
    /// Show everything about a model
    Show {
        /// Name or alias
        name: String,
    },
    /// Remove a model, its aliases and the files nothing else uses
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or alias
        name: String,
        /// Only this version, which the name must not stand for
        #[arg(long)]
        digest: Option<String>,
    },
    /// Let a name stand for another of its versions, once that is loaded and answers as it must
    Promote(Box<PromoteArguments>),
    /// Let a name stand for what it stood for before
    Rollback(RollbackArguments),
    /// List the versions of a model
    Versions {
        /// Name or alias
        name: String,
    },
    /// Keep a model in memory whatever happens
    Pin {
        /// Name or alias
        name: String,
    },
    /// Let a model be evicted again
    Unpin {
        /// Name or alias
        name: String,
    },
    /// Load a model now and wait until it is ready
    Load {
        /// Name or alias
        name: String,
        /// Return at once
        #[arg(long)]
        no_wait: bool,
    },
    /// Unload a model as soon as it is idle; it is loaded again when somebody asks for it
    Unload {
        /// Name or alias
        name: String,
    },
    /// Print what the engines of a model have written
    Logs {
        /// Name or alias
        name: String,
        /// How many lines, the last ones
        #[arg(long, short = 'n', default_value_t = 100)]
        lines: usize,
    },
    /// Load a model alone, measure time, memory and speed, and record what it must answer from now on
    Profile {
        /// Name or alias
        name: String,
        /// A version that the name does not stand for
        #[arg(long)]
        digest: Option<String>,
    },
    /// Further names for models
    #[command(subcommand)]
    Alias(AliasCommand),
}

/// `warmset model promote`
#[derive(Debug, Args)]
pub(crate) struct PromoteArguments {
    /// Name or alias
    pub(crate) name: String,
    /// The version: its digest, or the beginning of it
    #[arg(required_unless_present = "source")]
    pub(crate) digest: Option<String>,
    /// Take the version from here first
    #[arg(long, value_name = "SOURCE")]
    pub(crate) source: Option<String>,
    /// Say what would happen and what callers would see, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Who approves it [default: the user]
    #[arg(long, value_name = "WHO")]
    pub(crate) by: Option<String>,
    /// Ask it this before callers get it
    #[arg(long, value_name = "TEXT", requires = "canary_expect")]
    pub(crate) canary_prompt: Option<String>,
    /// What the answer must contain or be like
    #[arg(long, value_name = "TEXT", requires = "canary_prompt")]
    pub(crate) canary_expect: Option<String>,
    /// The least score that passes, 0 to 1 [default: 0.5]
    #[arg(long, value_name = "SCORE", value_parser = parse_score)]
    pub(crate) canary_score: Option<f64>,
    /// The longest the answer may take [default: 1m]
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    pub(crate) canary_latency: Option<Duration>,
}

/// `warmset model rollback`
#[derive(Debug, Args)]
pub(crate) struct RollbackArguments {
    /// Name or alias
    pub(crate) name: String,
    /// Say what would happen and what callers would see, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Who says so [default: the user]
    #[arg(long, value_name = "WHO")]
    pub(crate) by: Option<String>,
}

/// `warmset model alias ...`
#[derive(Debug, Subcommand)]
pub(crate) enum AliasCommand {
    /// Let a further name mean a model
    Add {
        /// The new name
        alias: String,
        /// The model's own name
        model: String,
        /// If the name means another model now, let it mean this one in one step
        #[arg(long)]
        replace: bool,
    },
    /// Take a further name away
    Remove {
        /// The name
        alias: String,
    },
    /// List all further names
    List,
}

/// `warmset jobs ...`
#[derive(Debug, Subcommand)]
pub(crate) enum JobsCommand {
    /// List jobs, the newest first
    #[command(visible_alias = "ls")]
    List {
        /// How many
        #[arg(long, short = 'n', default_value_t = 100)]
        limit: u64,
    },
    /// Show a job with its answer
    Show {
        /// Its name, job_...
        job: String,
    },
    /// Take a job back
    Cancel {
        /// Its name, job_...
        job: String,
    },
}

/// `warmset batches ...`
#[derive(Debug, Subcommand)]
pub(crate) enum BatchesCommand {
    /// List batches, the newest first
    #[command(visible_alias = "ls")]
    List {
        /// How many
        #[arg(long, short = 'n', default_value_t = 100)]
        limit: u64,
    },
    /// Show how far a batch is, and what is wrong with its file
    Show {
        /// Its name, batch_...
        batch: String,
    },
    /// Begin no more lines of a batch
    Cancel {
        /// Its name, batch_...
        batch: String,
    },
}

/// `warmset model add`
#[derive(Debug, Args)]
pub(crate) struct AddArguments {
    /// What callers will name it
    name: String,
    /// A path, a file://, https://, hf://, s3:// or ollama:// URL, or command:ID for what the runtime's server finds
    source: String,
    /// Further names
    #[arg(long = "alias", value_name = "NAME")]
    aliases: Vec<String>,
    /// Engine, llama, command or synthetic [default: llama for .gguf, command with --runtime]
    #[arg(long, value_parser = parse_engine)]
    engine: Option<EngineKind>,
    /// Configured runtime that serves it, for --engine command
    #[arg(long, value_name = "NAME", value_parser = parse_runtime)]
    runtime: Option<String>,
    /// Never evict it, and load it at start
    #[arg(long)]
    pin: bool,
    /// critical, standard or batch
    #[arg(long, value_parser = parse_priority)]
    priority: Option<Priority>,
    /// Requests that run at once [default: as --parallel]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(PARALLEL_MAX)))]
    max_concurrency: Option<u32>,
    /// How many of those only critical requests may use
    #[arg(long, value_name = "N")]
    critical_reserve: Option<u32>,
    /// Sequences the engine computes together [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(PARALLEL_MAX)))]
    parallel: Option<u32>,
    /// Tokens per sequence [default: the model's own limit, at most 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(CONTEXT_TOKENS_MAX)))]
    context_tokens: Option<u32>,
    /// The most memory its process may take
    #[arg(long, value_name = "SIZE", value_parser = parse_cap)]
    memory_cap: Option<Bytes>,
    /// What callers get while it is cold: wait, reject, or async for a job
    #[arg(long, value_parser = parse_cold)]
    cold: Option<ColdPolicy>,
    /// Which model answers if this one cannot
    #[arg(long, value_name = "NAME", value_parser = parse_model_name)]
    fallback: Option<ModelName>,
    /// Part of the memory it lives in
    #[arg(long, value_parser = parse_pool)]
    pool: Option<String>,
    /// Unload after so long without a request
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    keep_alive: Option<Duration>,
    /// When to keep it warm whatever its demand, such as "Mon-Fri 08:00-18:00 Europe/Berlin"
    #[arg(long = "schedule", value_name = "WHEN", value_parser = parse_schedule)]
    schedule: Vec<String>,
    /// Target for the 99th percentile of the time to the first token while it is warm
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    ttft_p99_warm_ms: Option<u32>,
    /// The same for requests that wait for its load
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    ttft_p99_cold_ms: Option<u32>,
    /// cpu, gpu, or gpu:N for N accelerators
    #[arg(long, value_parser = parse_accelerators)]
    device: Option<u32>,
}

impl AddArguments {
    /// The same as options.
    pub(crate) fn into_options(self) -> ModelOptions {
        let slo = Targets { ttft_p99_warm_ms: self.ttft_p99_warm_ms, ttft_p99_cold_ms: self.ttft_p99_cold_ms };
        ModelOptions {
            name: self.name,
            source: self.source,
            aliases: self.aliases,
            digest: None,
            engine: self.engine,
            runtime: self.runtime,
            pin: self.pin.then_some(true),
            priority: self.priority,
            max_concurrency: self.max_concurrency,
            critical_reserve: self.critical_reserve,
            parallel: self.parallel,
            context_tokens: self.context_tokens,
            memory_cap_bytes: self.memory_cap,
            cold: self.cold,
            fallback: self.fallback,
            pool: self.pool,
            keep_alive_seconds: self.keep_alive.map(|duration| duration.as_secs_f64()),
            accelerators: self.device,
            schedule: (!self.schedule.is_empty()).then_some(self.schedule),
            slo: (!slo.is_empty()).then_some(slo),
        }
    }
}

/// `warmset top`
#[derive(Debug, Args)]
pub(crate) struct TopArguments {
    /// Print one frame as text and end, as where the output is no terminal
    #[arg(long)]
    pub(crate) once: bool,
    /// Seconds between one look at the server and the next
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_interval)]
    pub(crate) interval: f64,
}

/// `warmset run`
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// Name or alias
    pub(crate) name: String,
    /// What to say; without it a chat begins, or the prompt is read from a pipe
    pub(crate) prompt: Vec<String>,
    /// Instructions that come before the conversation
    #[arg(long)]
    pub(crate) system: Option<String>,
    /// The most tokens of each answer
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<u32>,
    /// How freely to choose words, 0 to 2
    #[arg(long, value_parser = parse_temperature)]
    pub(crate) temperature: Option<f32>,
}

/// Engine processes work in `/`, so a relative directory would mean another one there.
fn absolute_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(std::path::absolute)
}

fn parse_schedule(text: &str) -> Result<String, String> {
    Window::parse(text).map(|_| text.to_owned())
}

fn parse_cap(text: &str) -> Result<Bytes, String> {
    match units::parse_bytes(text)? {
        0 => Err("a process cannot run in 0 bytes: give a size such as 1GiB".to_owned()),
        bytes => Ok(bytes),
    }
}

fn parse_score(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "must be a number from 0 to 1".to_owned())
}

fn parse_interval(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (INTERVAL_MIN..=INTERVAL_MAX).contains(number));
    number.ok_or_else(|| format!("must be a number of seconds from {INTERVAL_MIN} to {INTERVAL_MAX}"))
}

fn parse_temperature(text: &str) -> Result<f32, String> {
    let number = text.parse().ok().filter(|number| (0.0..=TEMPERATURE_MAX).contains(number));
    number.ok_or_else(|| format!("must be a number from 0 to {TEMPERATURE_MAX}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn options_reach_the_model() {
        let line = "warmset model add a /m.gguf --pin --priority batch --memory-cap 1GiB --cold reject --fallback org/b --keep-alive 5m \
                    --device gpu:2 --max-concurrency 3 --parallel 2 --context-tokens 512 --pool small --alias b";
        let arguments = Arguments::try_parse_from(line.split_whitespace()).unwrap();
        let Command::Model(ModelCommand::Add(add)) = arguments.command else { panic!("another command") };
        let options = add.into_options();
        assert_eq!((options.pin, options.priority), (Some(true), Some(Priority::Batch)));
        assert_eq!((options.memory_cap_bytes, options.keep_alive_seconds), (Some(1 << 30), Some(300.0)));
        assert_eq!((options.cold, options.accelerators), (Some(ColdPolicy::Reject), Some(2)));
        assert_eq!(options.fallback.map(|name| name.to_string()).as_deref(), Some("org/b"));
        assert_eq!((options.max_concurrency, options.parallel, options.context_tokens), (Some(3), Some(2), Some(512)));
        assert_eq!((options.pool.as_deref(), options.aliases.as_slice()), (Some("small"), ["b".to_owned()].as_slice()));
    }

    #[test]
    fn a_relative_data_directory_is_made_absolute_where_it_is_read() {
        let arguments = Arguments::try_parse_from(["warmset", "doctor", "--data", "some/where"]).unwrap();
        let expected = std::env::current_dir().unwrap().join("some/where");
        assert_eq!(arguments.global.data, Some(expected));
        assert!(Arguments::try_parse_from(["warmset", "doctor", "--data", ""]).is_err());
    }

    #[test]
    fn limits_of_options_are_named() {
        let refused = |line: &str| Arguments::try_parse_from(line.split_whitespace()).unwrap_err().to_string();
        for option in ["--parallel", "--max-concurrency"] {
            let text = refused(&format!("warmset model add a /a.gguf {option} {}", PARALLEL_MAX + 1));
            assert!(text.contains("65 is not in 1..=64"), "{text}");
        }
        assert!(refused("warmset model add a /a.gguf --memory-cap 0").contains("0 bytes"));
        for temperature in ["nan", "inf", "-1", "2.1", "warm"] {
            let text = refused(&format!("warmset run a --temperature={temperature} hi"));
            assert!(text.contains("must be a number from 0 to 2"), "{text}");
        }
        for temperature in ["0", "2", "0.7"] {
            let line = ["warmset", "run", "a", "--temperature", temperature, "hi"];
            assert!(Arguments::try_parse_from(line).is_ok(), "{temperature}");
        }
    }
}
