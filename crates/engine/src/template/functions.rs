//! What transformers gives to chat templates beyond Jinja itself.

use minijinja::{Environment, Error, ErrorKind, Value, value::Kwargs};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};
use std::io;

/// The longest refusal that is passed on.
const REFUSAL_CHARACTERS_MAX: usize = 500;

pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
}

/// A template's own refusal, told apart from its mistakes.
#[derive(Debug)]
struct Refusal(String);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

fn raise_exception(message: &str) -> Result<Value, Error> {
    let words: String = message.chars().take(REFUSAL_CHARACTERS_MAX).collect();
    Err(Error::new(ErrorKind::InvalidOperation, "refused").with_source(Refusal(words)))
}

/// The words of `raise_exception`, if that is why rendering ended.
pub(super) fn refusal(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(refusal) = inner.downcast_ref::<Refusal>() {
            return Some(refusal.0.clone());
        }
        source = inner.source();
    }
    None
}

/// JSON as Python's `json.dumps(..., ensure_ascii=False)` writes it, never escaped for HTML.
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted as transformers does; the first is what happens anyway, the others are not used by templates.
    for name in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(name)?;
    }
    options.assert_all_used()?;
    let json = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(16));
            serialize(value, PrettyFormatter::with_indent(spaces.as_bytes()))
        }
        None => serialize(value, Spaced(CompactFormatter)),
    }?;
    Ok(Value::from(json))
}

fn serialize(value: &Value, formatter: impl Formatter) -> Result<String, Error> {
    let mut bytes = Vec::new();
    let wrong = |words: String| Error::new(ErrorKind::InvalidOperation, words);
    value
        .serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
        .map_err(|error| wrong(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| wrong(error.to_string()))
}

/// Python's separators: a space after each comma and colon.
#[derive(Default)]
pub(super) struct Spaced(CompactFormatter);

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The date and time, UTC, by the common conversions of `strftime`.
fn strftime_now(format: &str) -> Result<String, Error> {
    let seconds = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map(|elapsed| elapsed.as_secs())
        .unwrap_or(0);
    strftime(format, seconds).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "unknown strftime conversion"))
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

pub(super) fn strftime(format: &str, unix_seconds: u64) -> Option<String> {
    let days = unix_seconds / 86_400;
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (unix_seconds / 3600 % 24, unix_seconds / 60 % 60, unix_seconds % 60);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[((days + 4) % 7) as usize];
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let padded = |number: u64| format!("{number:02}");
        out.push_str(&match letters.next()? {
            'Y' => format!("{year:04}"),
            'y' => padded(year % 100),
            'm' => padded(month),
            'd' => padded(day),
            'e' => format!("{day:2}"),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => day_name.to_owned(),
            'a' => day_name[..3].to_owned(),
            'H' => padded(hour),
            'I' => padded((hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => padded(minute),
            'S' => padded(second),
            'F' => format!("{year:04}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '-' => match letters.next()? {
                'd' => day.to_string(),
                'm' => month.to_string(),
                'H' => hour.to_string(),
                'I' => ((hour + 11) % 12 + 1).to_string(),
                _ => return None,
            },
            '%' => "%".to_owned(),
            _ => return None,
        });
    }
    Some(out)
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil_date(days: u64) -> (u64, u64, u64) {
    // Years are counted from March here, so that the leap day is the last one.
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}
