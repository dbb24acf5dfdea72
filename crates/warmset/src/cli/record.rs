//! `warmset admin record`: takes a recording from a running server into a file of this machine.

use crate::{
    client::Client,
    config::units,
    output::{Output, text_of},
    recording::create_new,
    serve::Signals,
};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use std::{fs::File, io::Write, path::PathBuf};
use warmset_core::Bytes;
use warmset_planner::recording::{End, LINE_BYTES_MAX, Line};

/// `warmset admin record`
#[derive(Debug, Args)]
pub(crate) struct RecordArguments {
    /// The file, which must not be there yet
    #[arg(long, value_name = "FILE", default_value = "warmset-recording.jsonl")]
    out: PathBuf,
    /// End after so many seconds [default: when interrupted]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// End before the recording is longer than this [default: 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    max_bytes: Option<Bytes>,
}

fn some_bytes(text: &str) -> Result<Bytes, String> {
    match units::parse_bytes(text)? {
        0 => Err("a recording of no bytes holds nothing: give a size such as 64MiB".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Records until the end and says what came of it.
pub(super) async fn run(arguments: &RecordArguments, client: &Client, output: Output) -> Result<()> {
    let mut signals = Signals::new()?;
    let path = &arguments.out;
    let file = create_new(path).with_context(|| format!("cannot record into {}", path.display()))?;
    let mut taken = Taken { file, pending: Vec::new(), last: Vec::new(), lines: 0, bytes: 0 };
    let limits = [("seconds", arguments.seconds), ("max_bytes", arguments.max_bytes)];
    let limits = limits.iter().filter_map(|(name, limit)| limit.map(|limit| format!("{name}={limit}")));
    let route = format!("/admin/v1/recording?{}", limits.collect::<Vec<_>>().join("&"));
    let spinner = output.spinner(&format!("recording into {}; an interrupt ends it", path.display()));
    let outcome = tokio::select! {
        outcome = client.pieces(&route, |piece| taken.take(piece)) => outcome,
        () = signals.wait() => taken.interrupted(),
    };
    drop(spinner);
    if let Err(error) = outcome {
        if taken.lines == 0 {
            // It was made for nothing; if it stays, no harm is done.
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        return Err(error.context(format!("{} holds what came before", path.display())));
    }
    let Some(reason) = taken.reason() else {
        bail!("the server broke off: {} holds what came before", path.display());
    };
    let document = json!({ "recording": path, "lines": taken.lines, "bytes": taken.bytes, "ended": reason });
    output.result(&document, text);
    Ok(())
}

fn text(document: &Value) -> String {
    let [path, lines, bytes, ended] = ["recording", "lines", "bytes", "ended"].map(|key| text_of(document, key));
    format!("{path}: {lines} lines, {bytes} bytes; it ends because {ended}")
}

/// What has come so far: whole lines in the file, the rest here.
struct Taken {
    file: File,
    pending: Vec<u8>,
    /// The last whole line, without its line break.
    last: Vec<u8>,
    lines: u64,
    bytes: u64,
}

impl Taken {
    fn take(&mut self, piece: &[u8]) -> Result<()> {
        self.pending.extend_from_slice(piece);
        let Some(end) = self.pending.iter().rposition(|byte| *byte == b'\n') else {
            if self.pending.len() as u64 > LINE_BYTES_MAX {
                bail!("the server sends a line of more than {LINE_BYTES_MAX} bytes, which is no recording");
            }
            return Ok(());
        };
        let rest = self.pending.split_off(end + 1);
        let whole = std::mem::replace(&mut self.pending, rest);
        self.write(&whole)
    }

    fn write(&mut self, whole: &[u8]) -> Result<()> {
        self.file.write_all(whole).context("cannot write the recording")?;
        let body = whole.strip_suffix(b"\n").unwrap_or(whole);
        let begin = body.iter().rposition(|byte| *byte == b'\n').map_or(0, |before| before + 1);
        self.last.clear();
        self.last.extend_from_slice(&body[begin..]);
        self.lines += whole.iter().filter(|byte| **byte == b'\n').count() as u64;
        self.bytes += whole.len() as u64;
        Ok(())
    }

    /// Writes the last line in the server's place.
    fn interrupted(&mut self) -> Result<()> {
        let mut text = Vec::new();
        Line::End(End { reason: "it was interrupted".to_owned() }).write(self.lines + 1, &mut text)?;
        self.write(&text)
    }

    /// Why it ends, as its last line says.
    fn reason(&mut self) -> Option<String> {
        match Line::read(self.lines, &mut self.last) {
            Ok(Line::End(end)) => Some(end.reason),
            _ => None,
        }
    }
}
