//! Writes a GGUF model in another quantisation: `requantise IN OUT Q4_0|Q8_0|F16|... [THREADS]`.

use std::{path::Path, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (input, output, file_type, threads) = match arguments.as_slice() {
        [input, output, file_type] => (input, output, file_type, 0),
        [input, output, file_type, threads] => (input, output, file_type, threads.parse().unwrap_or(0)),
        _ => {
            eprintln!("usage: requantise IN OUT Q4_0|Q8_0|F16|... [THREADS]");
            return ExitCode::from(2);
        }
    };
    match warmset_engine::llama::requantise(Path::new(input), Path::new(output), file_type, threads) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
