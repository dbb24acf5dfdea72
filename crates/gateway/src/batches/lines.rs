//! The lines of a batch's file: read one by one, checked, and never all in memory.

use super::BATCH_LINES_MAX;
use serde::Deserialize;
use serde_json::{error::Category, value::RawValue};
use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};
use warmset_core::jobs::BatchFault;

/// Faults told of one file.
const FAULTS_MAX: usize = 100;
/// The longest name a caller may give a line.
const CUSTOM_ID_BYTES_MAX: usize = 512;

/// One request of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) custom_id: String,
    pub(crate) model: String,
    pub(crate) body: String,
}

#[derive(Deserialize)]
struct Written<'a> {
    #[serde(default)]
    custom_id: Option<String>,
    #[serde(default)]
    method: Option<String>,
    #[serde(default)]
    url: Option<String>,
    #[serde(borrow, default)]
    body: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
}

fn fault(code: &str, param: Option<&str>, message: impl Into<String>) -> BatchFault {
    BatchFault { code: code.to_owned(), message: message.into(), param: param.map(str::to_owned), line: None }
}

/// Reads one line.
pub(crate) fn parse(text: &str, endpoint: &str) -> Result<Line, BatchFault> {
    // What its library says of a type names things that no caller knows.
    let not_json = |error: serde_json::Error| match error.classify() {
        Category::Data => {
            let message = "not a JSON object with the strings custom_id, method and url, each once, and body";
            fault("invalid_json_line", None, message)
        }
        Category::Syntax | Category::Eof | Category::Io => {
            fault("invalid_json_line", None, format!("not JSON: {error}"))
        }
    };
    let written: Written<'_> = serde_json::from_str(text).map_err(not_json)?;
    let wrong = |param: &str, message: &str| fault("invalid_request", Some(param), format!("{param} {message}"));
    let custom_id = written.custom_id.filter(|id| !id.is_empty() && id.len() <= CUSTOM_ID_BYTES_MAX);
    let Some(custom_id) = custom_id else {
        return Err(wrong("custom_id", &format!("must be a string of 1 to {CUSTOM_ID_BYTES_MAX} bytes")));
    };
    if written.method.is_none_or(|method| method != "POST") {
        return Err(fault("invalid_method", Some("method"), "method must be POST"));
    }
    if written.url.is_none_or(|url| url != endpoint) {
        return Err(fault("mismatched_endpoint", Some("url"), format!("url must be the batch's endpoint {endpoint}")));
    }
    let body = written.body.map_or("", RawValue::get);
    let Ok(Body { model, stream }) = serde_json::from_str(body) else {
        return Err(wrong("body", "must be the body of a request"));
    };
    if stream == Some(true) {
        return Err(fault("invalid_request", Some("body.stream"), "a line of a batch cannot stream"));
    }
    let Some(model) = model else { return Err(wrong("body.model", "is missing")) };
    Ok(Line { custom_id, model, body: body.to_owned() })
}

/// What some editors write before the first line of a text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads lines of bounded length; empty ones are passed over, with their number.
pub(crate) struct Lines {
    reader: BufReader<File>,
    bytes_max: usize,
    number: u64,
}

impl Lines {
    pub(crate) fn open(path: &Path, bytes_max: usize) -> io::Result<Self> {
        Ok(Self { reader: BufReader::new(File::open(path)?), bytes_max, number: 0 })
    }

    /// The next line with its number from 1; an error inside is the caller's.
    pub(crate) fn next(&mut self) -> io::Result<Option<(u64, Result<String, BatchFault>)>> {
        loop {
            let mut bytes = Vec::new();
            let limit = self.bytes_max as u64 + 2;
            let read = self.reader.by_ref().take(limit).read_until(b'\n', &mut bytes)?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if self.number == 1 && bytes.starts_with(BYTE_ORDER_MARK) {
                bytes.drain(..BYTE_ORDER_MARK.len());
            }
            if read as u64 == limit && bytes.last() != Some(&b'\n') {
                let message = format!("longer than {} bytes", self.bytes_max);
                return Ok(Some((self.number, Err(fault("line_too_long", None, message)))));
            }
            match String::from_utf8(bytes) {
                Ok(text) if text.trim().is_empty() => {}
                Ok(text) => return Ok(Some((self.number, Ok(text)))),
                Err(_) => return Ok(Some((self.number, Err(fault("invalid_encoding", None, "not UTF-8"))))),
            }
        }
    }
}

/// Checks a whole file: the number of its lines, or everything that is wrong with it, up to a bound.
pub(crate) fn validate(path: &Path, endpoint: &str, bytes_max: usize) -> io::Result<Result<u64, Vec<BatchFault>>> {
    let mut lines = Lines::open(path, bytes_max)?;
    let (mut total, mut faults, mut names) = (0, Vec::new(), BTreeSet::new());
    while let Some((number, text)) = lines.next()? {
        let parsed = text.and_then(|text| parse(&text, endpoint));
        let is_long = parsed.as_ref().is_err_and(|fault| fault.code == "line_too_long");
        let checked = parsed.and_then(|line| {
            let again = || fault("duplicate_custom_id", Some("custom_id"), "another line has this custom_id");
            if names.insert(line.custom_id) { Ok(()) } else { Err(again()) }
        });
        total += 1;
        if let Err(found) = checked {
            faults.push(BatchFault { line: Some(number), ..found });
        }
        if total > BATCH_LINES_MAX {
            faults.push(fault("too_many_lines", None, format!("a batch has at most {BATCH_LINES_MAX} lines")));
        }
        if total > BATCH_LINES_MAX || faults.len() >= FAULTS_MAX || is_long {
            break;
        }
    }
    if total == 0 {
        faults.push(fault("empty_file", None, "the file has no lines"));
    }
    Ok(if faults.is_empty() { Ok(total) } else { Err(faults) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: &str = "/v1/completions";

    fn line(id: &str) -> String {
        format!(r#"{{"custom_id": "{id}", "method": "POST", "url": "{ENDPOINT}", "body": {{"model": "m", "n":  1}}}}"#)
    }

    fn check(text: &str) -> Result<u64, Vec<String>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lines");
        std::fs::write(&path, text).unwrap();
        let checked = validate(&path, ENDPOINT, 1000).unwrap();
        checked.map_err(|faults| {
            faults.into_iter().map(|fault| format!("{}:{}", fault.line.unwrap_or(0), fault.code)).collect()
        })
    }

    #[test]
    fn a_line_is_taken_as_it_is() {
        let read = parse(&line("a"), ENDPOINT).unwrap();
        let expected = Line { custom_id: "a".into(), model: "m".into(), body: r#"{"model": "m", "n":  1}"#.into() };
        assert_eq!(read, expected);
    }

    #[test]
    fn files_are_checked_line_by_line() {
        assert_eq!(check(&format!("{}\n\n{}", line("a"), line("b"))), Ok(2));
        assert_eq!(check(""), Err(vec!["0:empty_file".into()]));
        assert_eq!(check(&format!("\u{feff}{}\r\n{}\r\n", line("a"), line("b"))), Ok(2));
        assert_eq!(check("\u{feff}\n"), Err(vec!["0:empty_file".into()]));
        assert_eq!(check(&format!("{}\n\u{feff}{}", line("a"), line("b"))), Err(vec!["2:invalid_json_line".into()]));
        let long = format!("{{\"custom_id\": \"{}\"}}", "x".repeat(2000));
        let faulty = [
            line("a"),
            line("a"),
            "not json".to_owned(),
            line("b").replace("POST", "GET"),
            line("c").replace("completions", "embeddings"),
            line("d").replace("\"m\"", "1"),
            line("e").replace("\"n\":  1", "\"stream\": true"),
            line(""),
            long,
        ];
        let expected = [
            "2:duplicate_custom_id",
            "3:invalid_json_line",
            "4:invalid_method",
            "5:mismatched_endpoint",
            "6:invalid_request",
            "7:invalid_request",
            "8:invalid_request",
            "9:line_too_long",
        ];
        assert_eq!(check(&faulty.join("\n")), Err(expected.map(String::from).to_vec()));
    }

    #[test]
    fn faults_are_told_in_words_of_the_caller() {
        for text in ["7", "[1]", r#"{"custom_id": 7}"#, r#"{"url": "a", "url": "b"}"#, "{", r#"{"body": tru}"#] {
            let message = parse(text, ENDPOINT).unwrap_err().message;
            for word in ["struct", "Written", "sequence", "map", "`"] {
                assert!(!message.contains(word), "{text}: {message}");
            }
        }
    }

    #[test]
    fn the_number_of_lines_is_bounded() {
        let text: String = (0..=BATCH_LINES_MAX).map(|number| line(&number.to_string()) + "\n").collect();
        assert_eq!(check(&text), Err(vec!["0:too_many_lines".into()]));
        let cut = &text[..text.trim_end().rfind('\n').unwrap()];
        assert_eq!(check(cut), Ok(BATCH_LINES_MAX));
    }
}
