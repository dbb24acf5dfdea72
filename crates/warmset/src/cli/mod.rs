//! Commands: what was asked, where it is done, what is printed.

mod admin;
mod arguments;
mod batches;
mod doctor;
mod import;
mod jobs;
mod kv;
mod latency;
mod listing;
mod model;
mod place;
mod plan;
mod record;
mod replay;
mod run;
mod sim;
mod sim_arguments;
mod sim_batching;
mod sim_boundary;
mod sim_cache;
mod sim_changes;
mod sim_loader;
mod sim_pool;
mod sim_routing;
mod top;
mod version;

pub(crate) use arguments::{GatewayArguments, ListenArguments, ServeArguments};

use crate::{data, front, output, output::Output, serve};
use anyhow::Result;
use arguments::{Arguments, Command};
use clap::{ArgMatches, CommandFactory, FromArgMatches, error::ErrorKind, parser::ValueSource};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Exit code of a command that was refused or failed.
const EXIT_FAILED: u8 = 1;

/// Reads the command line and does what it says. Wrong usage ends the process with exit code 2.
pub(crate) fn main() -> ExitCode {
    let matches = command_line().get_matches();
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    // Before anything else happens in this process: an engine shuts itself in.
    if let Command::Engine { role } = &arguments.command {
        return warmset_engine::child::run(role.as_deref());
    }
    if let Some((name, option)) = unused_option(&matches) {
        let reason = format!("`warmset {name}` does not use --{option}: see `warmset {name} --help`");
        Arguments::command().error(ErrorKind::ArgumentConflict, reason).exit();
    }
    match dispatch(arguments) {
        Ok(code) => code,
        Err(error) => {
            output::error(&error);
            ExitCode::from(EXIT_FAILED)
        }
    }
}

/// What every command understands and these have no use for: they are no commands of a server or a data directory.
const UNUSED: [(&str, &[&str]); 6] = [
    ("serve", &["server"]),
    ("gateway", &["server", "data"]),
    ("plan", &["server", "data"]),
    ("sim", &["server", "data"]),
    ("replay", &["server", "data"]),
    ("completions", &["server", "data"]),
];

/// The command line, with a help that does not name what a command has no use for.
fn command_line() -> clap::Command {
    let mut command = Arguments::command();
    for (name, options) in UNUSED {
        // What a subcommand says of its own of such an option counts for it.
        let everywhere = command.get_arguments().filter(|option| options.contains(&option.get_id().as_str()));
        let hidden: Vec<_> = everywhere.map(|option| option.clone().hide(true)).collect();
        command = command.mut_subcommand(name, |subcommand| subcommand.args(hidden));
    }
    command
}

/// An option that somebody wrote for a command that has no use for it, with that command's name. The environment may
/// say it for the other commands.
fn unused_option(matches: &ArgMatches) -> Option<(&'static str, &'static str)> {
    UNUSED.iter().find_map(|(name, options)| {
        let mut given = matches.subcommand_matches(name)?;
        // What stands behind a subcommand of it is known there only.
        while let Some((_, deeper)) = given.subcommand() {
            given = deeper;
        }
        let written = |option: &&&str| given.value_source(option) == Some(ValueSource::CommandLine);
        options.iter().find(written).map(|option| (*name, *option))
    })
}

fn dispatch(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { global, command } = arguments;
    let output = Output { json: global.json };
    let done = |result: Result<()>| result.map(|()| ExitCode::SUCCESS);
    match command {
        Command::Serve(arguments) => {
            start_log("info");
            let data = global.data.unwrap_or_else(data::default_directory);
            done(runtime()?.block_on(serve::serve(*arguments, data, output)))
        }
        Command::Gateway(arguments) => {
            start_log("info");
            // Requests have lanes of their own beside this thread.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            done(runtime.block_on(front::run(arguments, output)))
        }
        Command::Model(command) => {
            start_log("error");
            done(runtime()?.block_on(model::run(command, &global, output)))
        }
        Command::Jobs(command) => {
            start_log("error");
            done(runtime()?.block_on(jobs::run(command, &global, output)))
        }
        Command::Batches(command) => {
            start_log("error");
            done(runtime()?.block_on(batches::run(command, &global, output)))
        }
        Command::Kv { command } => {
            start_log("error");
            done(runtime()?.block_on(kv::run(command, &global, output)))
        }
        Command::Run(arguments) => {
            start_log("error");
            done(runtime()?.block_on(run::run(arguments, &global, output)))
        }
        Command::Import(command) => {
            start_log("error");
            done(runtime()?.block_on(import::run(command, &global, output)))
        }
        Command::Admin(command) => {
            start_log("error");
            done(runtime()?.block_on(admin::run(command, &global, output)))
        }
        Command::Top(arguments) => {
            start_log("off");
            done(runtime()?.block_on(top::run(arguments, &global, output)))
        }
        Command::Doctor => {
            start_log("off");
            let healthy = runtime()?.block_on(doctor::run(&global, output))?;
            Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILED) })
        }
        Command::Plan(command) => done(plan::run(&command, output)),
        Command::Sim(arguments) => done(sim::run(&arguments, output)),
        Command::Replay(arguments) => done(replay::run(&arguments, output)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command_line(), "warmset", &mut script);
            output::print_bytes(&script);
            Ok(ExitCode::SUCCESS)
        }
        Command::Engine { .. } => Ok(ExitCode::from(EXIT_FAILED)),
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

/// Logs to stderr; `RUST_LOG` says what.
fn start_log(default: &str) {
    use std::io::IsTerminal;
    let wanted = std::env::var("RUST_LOG").unwrap_or_default();
    let filter = if wanted.is_empty() { EnvFilter::new(default) } else { filter_of(&wanted, default) };
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour);
    // A terminal that is gone must not stop what still runs: nobody is left to read the complaint.
    log.log_internal_errors(false).init();
}

/// What `RUST_LOG` asks for; the default if nobody can tell.
fn filter_of(wanted: &str, default: &str) -> EnvFilter {
    EnvFilter::try_new(wanted).unwrap_or_else(|error| {
        output::note(&format!("warmset: RUST_LOG={wanted:?} is not understood ({error}): logging {default:?} instead"));
        EnvFilter::new(default)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_a_command_has_no_use_for_is_refused_and_not_shown() {
        let unused = |line: &[&str]| unused_option(&command_line().get_matches_from(line));
        assert_eq!(unused(&["warmset", "serve", "--server", "127.0.0.1:1"]), Some(("serve", "server")));
        assert_eq!(unused(&["warmset", "--server", "127.0.0.1:1", "serve"]), Some(("serve", "server")));
        assert_eq!(unused(&["warmset", "gateway", "--data", "/tmp"]), Some(("gateway", "data")));
        assert_eq!(
            unused(&[
                "warmset",
                "plan",
                "queueing",
                "--arrivals-per-second",
                "1",
                "--service-seconds",
                "1",
                "--data",
                "/"
            ]),
            Some(("plan", "data"))
        );
        assert_eq!(unused(&["warmset", "serve", "--data", "/tmp"]), None);
        assert_eq!(unused(&["warmset", "gateway"]), None);
        assert_eq!(unused(&["warmset", "doctor", "--server", "127.0.0.1:1"]), None);
        let mut all = command_line();
        all.build();
        for (name, options) in UNUSED {
            let help = all.find_subcommand_mut(name).expect("a command").render_long_help().to_string();
            assert!(
                help.contains("--json") && options.iter().all(|option| !help.contains(&format!("--{option} "))),
                "{help}"
            );
        }
        assert!(all.find_subcommand_mut("doctor").expect("a command").render_help().to_string().contains("--server "));
    }

    #[test]
    fn a_log_filter_that_nobody_understands_gives_way_to_the_default() {
        assert_eq!(filter_of("warmset=debug", "info").to_string(), "warmset=debug");
        assert_eq!(filter_of("warmset=loud", "info").to_string(), "info");
    }
}
