//! Reads TOML and collects every problem with its line, instead of stopping at the first.

use super::units;
use std::{net::SocketAddr, path::Path, time::Duration};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};
use warmset_core::Bytes;

/// Something wrong in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Problem {
    /// Its line, from 1.
    pub(crate) line: usize,
    /// What is wrong and what would be right.
    pub(crate) message: String,
}

/// Everything that is wrong in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(path, problems))]
pub(crate) struct ConfigError {
    pub(crate) path: std::path::PathBuf,
    pub(crate) problems: Vec<Problem>,
}

fn lines(path: &Path, problems: &[Problem]) -> String {
    let lines: Vec<String> =
        problems.iter().map(|problem| format!("{}:{}: {}", path.display(), problem.line, problem.message)).collect();
    lines.join("\n")
}

/// The text and what was found wrong in it so far.
pub(crate) struct Reader<'i> {
    text: &'i str,
    pub(crate) problems: Vec<Problem>,
    /// Its syntax is broken somewhere, so that keys may have landed where nobody wrote them.
    pub(crate) broken: bool,
}

impl<'i> Reader<'i> {
    /// Takes a document apart as far as its syntax allows.
    pub(crate) fn new(text: &'i str) -> (Self, DeTable<'i>) {
        let (root, errors) = DeTable::parse_recoverable(text);
        let mut reader = Self { text, problems: Vec::new(), broken: !errors.is_empty() };
        for error in errors {
            let start = error.span().map_or(0, |span| span.start);
            reader.report(start, error.message().replace('\n', " "));
        }
        (reader, root.into_inner())
    }

    /// Reports a table that is none, unless that may follow from broken syntax, which is reported already.
    fn report_shape(&mut self, offset: usize, message: String) {
        if !self.broken {
            self.report(offset, message);
        }
    }

    pub(crate) fn report(&mut self, offset: usize, message: impl Into<String>) {
        let line = self.line_at(offset);
        self.problems.push(Problem { line, message: message.into() });
    }

    fn line_at(&self, offset: usize) -> usize {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        1 + before.iter().filter(|byte| **byte == b'\n').count()
    }
}

/// One table whose keys are taken out one by one; what is left at the end is unknown.
pub(crate) struct Section<'i> {
    table: DeTable<'i>,
    label: String,
    offset: usize,
    known: Vec<&'static str>,
}

impl<'i> Section<'i> {
    pub(crate) fn root(table: DeTable<'i>) -> Self {
        Self { table, label: String::new(), offset: 0, known: Vec::new() }
    }

    /// Where the table begins, for problems of the whole.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Where a value begins that was not taken yet; the table itself if it is not there.
    pub(crate) fn offset_of(&self, key: &str) -> usize {
        self.table.get(key).map_or(self.offset, |value| value.span().start)
    }

    /// The line of a value that was not taken yet.
    pub(crate) fn line_of(&self, reader: &Reader<'_>, key: &str) -> Option<usize> {
        self.table.get(key).map(|value| reader.line_at(value.span().start))
    }

    /// Takes a key. A value that cannot be read is a problem and counts as absent.
    pub(crate) fn take<T>(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
        read: impl FnOnce(&DeValue<'i>) -> Result<T, String>,
    ) -> Option<T> {
        self.known.push(key);
        let value = self.table.remove(key)?;
        match read(value.get_ref()) {
            Ok(read) => Some(read),
            Err(message) => {
                reader.report(value.span().start, format!("{}: {message}", self.name_of(key)));
                None
            }
        }
    }

    /// Takes a table; an empty one if it is not there.
    pub(crate) fn take_table(&mut self, reader: &mut Reader<'_>, key: &'static str) -> Section<'i> {
        self.known.push(key);
        match self.table.remove(key) {
            Some(value) => self.section_of(reader, key, value).unwrap_or_else(|| Self::root(DeTable::default())),
            None => Self::root(DeTable::default()),
        }
    }

    /// Takes an array of tables, at most `limit` of them.
    pub(crate) fn take_tables(&mut self, reader: &mut Reader<'_>, key: &'static str, limit: usize) -> Vec<Section<'i>> {
        self.known.push(key);
        let Some(value) = self.table.remove(key) else { return Vec::new() };
        let offset = value.span().start;
        let DeValue::Array(items) = value.into_inner() else {
            let name = self.name_of(key);
            reader.report_shape(offset, format!("{name} must be an array of tables: write [[{key}]]"));
            return Vec::new();
        };
        if items.len() > limit {
            reader.report(offset, format!("{} has more than {limit} entries", self.name_of(key)));
            return Vec::new();
        }
        items.into_iter().filter_map(|item| self.section_of(reader, key, item)).collect()
    }

    fn section_of(&self, reader: &mut Reader<'_>, key: &str, value: Spanned<DeValue<'i>>) -> Option<Section<'i>> {
        let offset = value.span().start;
        let label = self.name_of(key);
        match value.into_inner() {
            DeValue::Table(table) => Some(Section { table, label, offset, known: Vec::new() }),
            other => {
                reader.report_shape(offset, format!("{label} must be a table, not {}", other.type_str()));
                None
            }
        }
    }

    /// Reports every key that nobody took.
    pub(crate) fn finish(self, reader: &mut Reader<'_>) {
        for (key, _) in self.table.iter() {
            let name = self.name_of(key.get_ref());
            let hint = match nearest(key.get_ref(), &self.known) {
                Some(similar) => format!("did you mean {similar}?"),
                None => format!("known here: {}", self.known.join(", ")),
            };
            reader.report(key.span().start, format!("unknown key {name}: {hint}"));
        }
    }

    fn name_of(&self, key: &str) -> String {
        if self.label.is_empty() { key.to_owned() } else { format!("{}.{key}", self.label) }
    }
}

/// The known key that differs least, if it is close.
fn nearest(unknown: &str, known: &[&'static str]) -> Option<&'static str> {
    let (distance, key) = known.iter().map(|key| (edit_distance(unknown, key), *key)).min()?;
    (distance <= 2 && distance < key.len()).then_some(key)
}

/// Insertions, deletions and replacements between two short texts.
fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (index, from) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for (column, to) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

fn wrong(expected: &str, value: &DeValue<'_>) -> String {
    format!("must be {expected}, not {}", value.type_str())
}

pub(crate) fn text(value: &DeValue<'_>) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| wrong("a string", value))
}

pub(crate) fn boolean(value: &DeValue<'_>) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| wrong("true or false", value))
}

/// A whole number between both bounds.
pub(crate) fn integer(least: u32, most: u32) -> impl Fn(&DeValue<'_>) -> Result<u32, String> {
    move |value| {
        let integer = value.as_integer().ok_or_else(|| wrong("a whole number", value))?;
        u32::from_str_radix(integer.as_str(), integer.radix())
            .ok()
            .filter(|number| (least..=most).contains(number))
            .ok_or_else(|| format!("must be between {least} and {most}, not {integer}"))
    }
}

/// A number, not below zero.
pub(crate) fn number(value: &DeValue<'_>) -> Result<f64, String> {
    let parsed = match value {
        DeValue::Float(float) => float.as_str().parse().ok(),
        DeValue::Integer(integer) => integer.as_str().parse().ok(),
        _ => return Err(wrong("a number", value)),
    };
    match parsed {
        Some(number) if number < 0.0 => Err("must not be negative".to_owned()),
        Some(number) if f64::is_finite(number) => Ok(number),
        Some(number) if f64::is_infinite(number) => Err("must be finite: write for instance 0.5 or 30".to_owned()),
        _ => Err("is not a number: write for instance 0.5 or 30".to_owned()),
    }
}

/// A size: `"2GiB"` or a number of bytes.
pub(crate) fn bytes(value: &DeValue<'_>) -> Result<Bytes, String> {
    match value {
        DeValue::String(text) => units::parse_bytes(text),
        DeValue::Integer(integer) => units::parse_bytes(integer.as_str()),
        _ => Err(wrong("a size such as \"2GiB\"", value)),
    }
}

/// A size of which nothing would be left at 0.
pub(crate) fn positive_bytes(value: &DeValue<'_>) -> Result<Bytes, String> {
    match bytes(value)? {
        0 => Err("must be more than 0: write for instance \"8MiB\" or \"2GiB\"".to_owned()),
        bytes => Ok(bytes),
    }
}

/// A duration in which nothing could happen if it were 0.
pub(crate) fn positive_duration(value: &DeValue<'_>) -> Result<Duration, String> {
    let duration = duration(value)?;
    if duration.is_zero() {
        return Err("must be more than 0: write for instance \"30s\" or \"5m\"".to_owned());
    }
    Ok(duration)
}

/// A duration: `"5m"` or a number of seconds.
pub(crate) fn duration(value: &DeValue<'_>) -> Result<Duration, String> {
    match value {
        DeValue::String(text) => units::parse_duration(text),
        DeValue::Integer(_) | DeValue::Float(_) => {
            units::duration_of_seconds(number(value)?).ok_or_else(|| "is too long".to_owned())
        }
        _ => Err(wrong("a duration such as \"5m\"", value)),
    }
}

pub(crate) fn address(value: &DeValue<'_>) -> Result<SocketAddr, String> {
    let text = text(value)?;
    text.parse().map_err(|_| format!("{text:?} is not an address: write for instance \"127.0.0.1:8080\""))
}

pub(crate) fn texts(value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let items = value.as_array().ok_or_else(|| wrong("an array of strings", value))?;
    items.iter().map(|item| text(item.get_ref())).collect()
}

/// A string that another function parses.
pub(crate) fn parsed<T, E: std::fmt::Display>(
    parse: impl Fn(&str) -> Result<T, E>,
) -> impl Fn(&DeValue<'_>) -> Result<T, String> {
    move |value| parse(&text(value)?).map_err(|error| error.to_string())
}
