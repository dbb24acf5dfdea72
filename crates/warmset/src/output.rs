//! Everything that is printed: one JSON document or text on stdout, progress and errors on stderr.

use crate::{config::units::format_bytes, repository::Progress};
use comfy_table::{Attribute, Cell, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use std::io::{ErrorKind, IsTerminal, Write};

/// How this command prints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// One JSON document instead of text.
    pub(crate) json: bool,
}

impl Output {
    /// Prints the result: the document, or what `text` makes of it.
    pub(crate) fn result(self, document: &Value, text: impl FnOnce(&Value) -> String) {
        if self.json { print_line(&document.to_string()) } else { print_line(text(document).trim_end()) }
    }

    /// A progress bar for bytes, on a terminal only.
    pub(crate) fn bytes_progress(self, label: &str) -> Progress {
        if !shows_progress() {
            return Box::new(|_, _| {});
        }
        let bar = ProgressBar::new(0);
        let template = "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta} left";
        // A template that is a constant of this program parses.
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_prefix(label.to_owned());
        Box::new(move |done, total| {
            // Nobody may know how much comes.
            bar.set_length(total.max(done));
            bar.set_position(done);
            if done == total {
                bar.finish_and_clear();
            }
        })
    }

    /// Something is under way that takes its time; shown on a terminal only, until dropped.
    pub(crate) fn spinner(self, label: &str) -> Spinner {
        Spinner(shows_progress().then(|| {
            let bar = ProgressBar::new_spinner();
            bar.set_message(label.to_owned());
            bar.enable_steady_tick(std::time::Duration::from_millis(100));
            bar
        }))
    }
}

/// A line on the terminal that turns while something is under way.
pub(crate) struct Spinner(Option<ProgressBar>);

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

pub(crate) fn shows_progress() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Whether text on stdout may be bold or coloured.
fn shows_colour() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Prints a line. A reader that has gone away is no error: there is nobody left to tell. Whatever else keeps it from being
/// written is one, and ends the command: its result is lost.
pub(crate) fn print_line(text: &str) {
    print_text(text);
    print_text("\n");
}

/// Prints text as it comes, at once.
pub(crate) fn print_text(text: &str) {
    let mut stdout = std::io::stdout().lock();
    if let Err(problem) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        if problem.kind() == ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        note(&format!("warmset: the result cannot be written to standard output: {problem}"));
        std::process::exit(1);
    }
}

/// Prints bytes, for scripts.
pub(crate) fn print_bytes(bytes: &[u8]) {
    print_text(&String::from_utf8_lossy(bytes));
}

/// Prints a note for people on stderr.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints why a command failed: one line, whatever the cause has to say; problems of a file have a line each.
pub(crate) fn error(error: &anyhow::Error) {
    let text = format!("{error:#}");
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    if error.downcast_ref::<crate::config::ConfigError>().is_some() {
        lines.for_each(|line| note(&format!("warmset: {line}")));
    } else {
        note(&format!("warmset: {}", lines.collect::<Vec<_>>().join(" ")));
    }
}

/// A table for people.
pub(crate) fn table(headers: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    let bold = shows_colour();
    table.set_header(headers.iter().map(|header| {
        let cell = Cell::new(header);
        if bold { cell.add_attribute(Attribute::Bold) } else { cell }
    }));
    for row in rows {
        table.add_row(row);
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// `key: value` lines for people, aligned.
pub(crate) fn fields(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(key, _)| key.len()).max().unwrap_or(0) + 1;
    pairs.iter().map(|(key, value)| format!("{:<width$} {value}\n", format!("{key}:"))).collect()
}

/// A text in a document.
pub(crate) fn text_of(document: &Value, key: &str) -> String {
    match &document[key] {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A size in a document.
pub(crate) fn bytes_of(document: &Value, key: &str) -> String {
    document[key].as_u64().map_or_else(|| "-".to_owned(), format_bytes)
}

/// A number of things, in words.
pub(crate) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// The first characters of a digest, as far as people need them.
pub(crate) fn short_digest(document: &Value) -> String {
    short_digest_of(&document["digest"])
}

/// The same of the digest itself.
pub(crate) fn short_digest_of(digest: &Value) -> String {
    let digest = digest.as_str().unwrap_or_default();
    digest.strip_prefix("sha256:").unwrap_or(digest).chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn documents_become_text_for_people() {
        let document = json!({"digest": "sha256:0123456789abcdef", "size": 2048, "pin": true, "none": null});
        assert_eq!(short_digest(&document), "0123456789ab");
        assert_eq!(bytes_of(&document, "size"), "2.0 KiB");
        assert_eq!((text_of(&document, "pin"), text_of(&document, "none")), ("true".into(), "-".into()));
        assert_eq!((count(0, "model"), count(1, "model")), ("0 models".into(), "1 model".into()));
        assert_eq!(fields(&[("a", "1".into()), ("bcd", "2".into())]), "a:   1\nbcd: 2\n");
        let table = table(&["NAME"], [vec!["x".to_owned()]]);
        assert!(table.contains("NAME") && table.contains('x') && !table.contains("\u{1b}["), "{table}");
    }
}
