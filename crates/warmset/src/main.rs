//! Warmset: one pool that keeps models warm inside a memory budget.
//!
//! This is the binary: command line, configuration and wiring. `cli` reads what is asked, `config` the file, `repository`
//! keeps catalog and store in step, `serve` puts gateway, worker and admin together. Modules in reading order.
#![forbid(unsafe_code)]

mod cli;
mod config;
mod output;

mod client;
mod clockwork;
mod data;
mod machine;
mod profile;
mod promotion;
mod repository;
mod settings;
mod warmth;

mod admin_backend;
mod alone;
mod coming;
mod facts;
mod fetch_events;
mod front;
mod import;
mod job_store;
mod kv;
mod link;
mod listeners;
mod mend;
mod readiness;
mod recording;
mod reload;
mod schedule;
mod serve;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
