//! Commands: what was asked, where it is done, what is printed.

mod arguments;
mod doctor;
mod model;
mod place;
mod run;

pub(crate) use arguments::ServeArguments;

use crate::{data, output, output::Output, serve};
use anyhow::Result;
use arguments::{Arguments, Command};
use clap::{CommandFactory, Parser};
use std::process::ExitCode;

/// Exit code of a command that was refused or failed.
const EXIT_FAILED: u8 = 1;

/// Reads the command line and does what it says. Wrong usage ends the process with exit code 2.
pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Before anything else happens in this process: an engine shuts itself in.
    if matches!(arguments.command, Command::Engine) {
        return warmset_engine::child::run();
    }
    match dispatch(arguments) {
        Ok(code) => code,
        Err(error) => {
            output::error(&error);
            ExitCode::from(EXIT_FAILED)
        }
    }
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
        Command::Model(command) => {
            start_log("error");
            done(runtime()?.block_on(model::run(command, &global, output)))
        }
        Command::Run(arguments) => {
            start_log("error");
            done(runtime()?.block_on(run::run(arguments, &global, output)))
        }
        Command::Doctor => {
            start_log("off");
            let healthy = runtime()?.block_on(doctor::run(&global, output))?;
            Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILED) })
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "warmset", &mut script);
            output::print_bytes(&script);
            Ok(ExitCode::SUCCESS)
        }
        Command::Engine => Ok(ExitCode::from(EXIT_FAILED)),
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

/// Logs to stderr; `RUST_LOG` says what.
fn start_log(default: &str) {
    use std::io::IsTerminal;
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour).init();
}
