//! For this crate's tests: an engine process.

use std::process::ExitCode;

fn main() -> ExitCode {
    warmset_engine::child::run()
}
