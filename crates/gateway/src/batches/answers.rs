//! The two files that a batch writes: a line for each answer, a line for each error. They are appended to as lines
//! end, so they say after a restart which lines have ended.

use super::content::{Contents, exists};
use crate::jobs::Answer;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    io::{self, BufRead, BufReader, Write},
    path::Path,
};
use warmset_core::jobs::{BatchCounts, BatchRecord};

/// What a line came to.
pub(crate) enum Outcome {
    /// An answer, good or bad.
    Answered(Answer),
    /// None, and why.
    Unanswered { code: &'static str, message: &'static str },
}

#[derive(Serialize)]
struct Written<'a> {
    id: String,
    custom_id: &'a str,
    response: Option<Response<'a>>,
    error: Option<Error>,
}

#[derive(Serialize)]
struct Response<'a> {
    status_code: u16,
    request_id: &'a str,
    body: &'a RawValue,
}

#[derive(Serialize)]
struct Error {
    code: &'static str,
    message: &'static str,
}

#[derive(Deserialize)]
struct Ended {
    custom_id: String,
}

/// Both files, open for appending.
pub(crate) struct Answers {
    output: File,
    errors: File,
    /// Lines that have ended, by the name that their caller gave them.
    pub(crate) ended: BTreeSet<String>,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
}

impl Answers {
    /// Opens both and reads which lines have ended. A line that was cut is removed: it has not.
    pub(crate) fn open(contents: &Contents, batch: &BatchRecord) -> io::Result<Self> {
        let mut ended = BTreeSet::new();
        let (output, completed) = take(contents, &batch.output_file, &mut ended)?;
        let (errors, failed) = take(contents, &batch.error_file, &mut ended)?;
        Ok(Self { output, errors, ended, completed, failed })
    }

    pub(crate) fn counts(&self, total: u64) -> BatchCounts {
        BatchCounts { total, completed: self.completed, failed: self.failed }
    }

    /// Appends what a line came to. Once this returns it is not run again, whatever happens to this process.
    pub(crate) fn write(&mut self, batch: &str, custom_id: &str, outcome: &Outcome) -> io::Result<()> {
        let number = self.completed + self.failed + 1;
        let id = format!("batch_req_{}_{number}", batch.trim_start_matches("batch_"));
        let (good, mut text) = match outcome {
            Outcome::Answered(answer) => {
                let (status_code, request_id) = (answer.http_status, answer.request_id.as_deref().unwrap_or_default());
                let body: &RawValue = serde_json::from_slice(&answer.body).map_err(io::Error::other)?;
                let response = Some(Response { status_code, request_id, body });
                let written = serde_json::to_vec(&Written { id, custom_id, response, error: None });
                ((200..300).contains(&status_code), written)
            }
            Outcome::Unanswered { code, message } => {
                let error = Some(Error { code, message });
                (false, serde_json::to_vec(&Written { id, custom_id, response: None, error }))
            }
        };
        let text = text.as_mut().map_err(|error| io::Error::other(error.to_string()))?;
        text.push(b'\n');
        self.ended.insert(custom_id.to_owned());
        if good {
            self.output.write_all(text)?;
            self.completed += 1;
        } else {
            self.errors.write_all(text)?;
            self.failed += 1;
        }
        Ok(())
    }

    /// Puts everything written so far on disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.output.sync_data()?;
        self.errors.sync_data()
    }
}

fn take(contents: &Contents, name: &str, ended: &mut BTreeSet<String>) -> io::Result<(File, u64)> {
    let (partial, whole) = (contents.partial_path(name), contents.path(name));
    if !exists(&partial) && exists(&whole) {
        // The server was killed between the file's end and its record.
        std::fs::rename(&whole, &partial)?;
    }
    let file = OpenOptions::new().create(true).append(true).open(&partial)?;
    let (lines, whole_bytes) = read_ended(&partial, ended)?;
    file.set_len(whole_bytes)?;
    Ok((file, lines))
}

/// Reads the names of ended lines; returns how many there are and where the last whole one ends.
fn read_ended(path: &Path, ended: &mut BTreeSet<String>) -> io::Result<(u64, u64)> {
    let mut reader = BufReader::new(File::open(path)?);
    let (mut count, mut whole_bytes, mut line) = (0, 0, Vec::new());
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        let Ok(Ended { custom_id }) = serde_json::from_slice(&line) else { return Ok((count, whole_bytes)) };
        if line.last() != Some(&b'\n') {
            return Ok((count, whole_bytes));
        }
        ended.insert(custom_id);
        count += 1;
        whole_bytes += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use warmset_core::{TenantId, jobs::BatchStatus};

    fn batch() -> BatchRecord {
        BatchRecord {
            name: "batch_1".into(),
            tenant: TenantId::anonymous(),
            endpoint: "/v1/completions".into(),
            input_file: "file-in".into(),
            output_file: "file-out-1".into(),
            error_file: "file-err-1".into(),
            has_output: false,
            has_errors: false,
            status: BatchStatus::InProgress,
            faults: Vec::new(),
            counts: BatchCounts::default(),
            metadata: BTreeMap::new(),
            created_unix_seconds: 0,
            expires_unix_seconds: 0,
            reached_unix_seconds: BTreeMap::new(),
        }
    }

    fn answer(http_status: u16, body: &str) -> Outcome {
        let (request_id, body) = (Some("r".to_owned()), body.as_bytes().to_vec());
        Outcome::Answered(Answer { http_status, digest: None, start: None, request_id, retry_after: None, body })
    }

    #[test]
    fn what_was_written_is_known_after_a_kill_and_what_was_cut_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let contents = Contents::open(directory.path().to_path_buf()).unwrap();
        let batch = batch();
        let mut answers = Answers::open(&contents, &batch).unwrap();
        answers.write(&batch.name, "a", &answer(200, "{\"x\":  1}")).unwrap();
        answers.write(&batch.name, "b", &answer(400, "{\"error\": {}}")).unwrap();
        answers.write(&batch.name, "c", &Outcome::Unanswered { code: "batch_expired", message: "late" }).unwrap();
        answers.sync().unwrap();
        let path = contents.partial_path("file-out-1");
        let whole = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            whole,
            "{\"id\":\"batch_req_1_1\",\"custom_id\":\"a\",\"response\":{\"status_code\":200,\"request_id\":\"r\",\
             \"body\":{\"x\":  1}},\"error\":null}\n"
        );
        std::fs::write(&path, format!("{whole}{{\"id\":\"batch_req_1_4\",\"custom_id\":\"d\",\"resp")).unwrap();
        let mut again = Answers::open(&contents, &batch).unwrap();
        assert_eq!((again.completed, again.failed), (1, 2));
        assert_eq!(again.ended.iter().map(String::as_str).collect::<Vec<_>>(), ["a", "b", "c"]);
        again.write(&batch.name, "d", &answer(200, "1")).unwrap();
        contents.publish("file-out-1").unwrap();
        // Published, but not yet written down.
        let third = Answers::open(&contents, &batch).unwrap();
        assert_eq!((third.completed, third.ended.len()), (2, 4));
    }
}
