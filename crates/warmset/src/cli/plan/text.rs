//! Any answer as people read it: the names of its fields say their units, so that one way of writing serves all commands.
//!
//! Single figures are lines, lists of objects are tables, and where an object has `ceiling` and `calibrated` figures, the two stand side
//! by side.

use crate::{config::units::format_span, output};
use serde_json::{Map, Value};

/// Endings of names, and how the figure is written. The first that fits counts.
type Format = fn(f64) -> String;
const UNITS: [(&str, Format); 10] = [
    ("_bytes_per_second", |value| format!("{}B/s", scaled(value))),
    ("_bits_per_second", |value| format!("{}bit/s", scaled(value))),
    ("_flops_per_second", |value| format!("{}FLOP/s", scaled(value))),
    ("_flops", |value| format!("{}FLOP", scaled(value))),
    ("_seconds_per_token", seconds),
    ("_seconds", seconds),
    ("_mb", |value| format!("{} MB", plain(value))),
    ("_hours", |value| format!("{} h", plain(value))),
    ("_per_second_per_sequence", |value| format!("{}/s", plain(value))),
    ("_per_second", |value| format!("{}/s", plain(value))),
];
/// Endings that the words for a name leave out, since the figure has them, and what stands for them.
const LEFT_OUT: [(&str, &str); 8] = [
    ("_bytes_per_second", " bandwidth"),
    ("_bits_per_second", " bandwidth"),
    ("_flops_per_second", " speed"),
    ("_bytes", ""),
    ("_seconds", ""),
    ("_flops", ""),
    ("_mb", ""),
    ("_hours", ""),
];
/// Endings of names of shares of one.
const SHARES: [&str; 8] =
    ["utilisation", "waste", "efficiency", "mfu", "probability", "share", "same_replica", "fragmentation"];

/// What a window of 100 columns leaves an indented table.
const COLUMNS: usize = 98;
/// Where a row's figures come from.
const SOURCE: &str = "SOURCE";

/// The whole document.
pub(super) fn render(document: &Value) -> String {
    fields_and_sections(document).trim_start_matches('\n').to_owned()
}

fn fields_and_sections(document: &Value) -> String {
    let Some(fields) = document.as_object() else { return document.to_string() };
    let mut text = lines(fields);
    for (name, value) in fields {
        match value {
            Value::Array(rows) if rows.iter().any(Value::is_object) => text += &section(name, &table_of(rows)),
            Value::Object(inner) => text += &section(name, &inside(inner)),
            _ => {}
        }
    }
    text
}

/// An object: a ceiling and what is reached of it side by side, or its fields.
fn inside(fields: &Map<String, Value>) -> String {
    match (fields.get("ceiling"), fields.get("calibrated")) {
        (Some(Value::Object(ceiling)), Some(calibrated)) => {
            let row = |(name, value): (&String, &Value)| {
                vec![words(name), figure(name, value), figure(name, &calibrated[name])]
            };
            output::table(&["", "CEILING", "CALIBRATED"], ceiling.iter().map(row))
        }
        _ => fields_and_sections(&Value::Object(fields.clone())),
    }
}

fn section(name: &str, body: &str) -> String {
    let lines = body.trim_start_matches('\n').lines();
    let body: String =
        lines.map(|line| if line.trim().is_empty() { "\n".to_owned() } else { format!("  {line}\n") }).collect();
    format!("\n{}\n{body}", words(name))
}

/// Fields that are one figure or text; what there is none of is left out.
fn lines(fields: &Map<String, Value>) -> String {
    let single = |value: &Value| match value {
        Value::Object(_) | Value::Null => false,
        Value::Array(items) => !items.is_empty() && !items.iter().any(Value::is_object),
        _ => true,
    };
    let shown = fields.iter().filter(|(_, value)| single(value));
    let pairs: Vec<(String, String)> = shown.map(|(name, value)| (words(name), figure(name, value))).collect();
    let pairs: Vec<(&str, String)> = pairs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    output::fields(&pairs)
}

fn table_of(rows: &[Value]) -> String {
    let rows: Vec<Vec<(String, String)>> = rows.iter().filter_map(Value::as_object).map(columns).collect();
    let mut heads: Vec<&str> = Vec::new();
    for (head, _) in rows.iter().flatten() {
        if !heads.contains(&head.as_str()) {
            heads.push(head);
        }
    }
    let cell = |row: &Vec<(String, String)>, head: &str| {
        row.iter().find(|(name, _)| name == head).map_or_else(|| "-".to_owned(), |(_, value)| value.clone())
    };
    let cells: Vec<Vec<String>> = rows.iter().map(|row| heads.iter().map(|head| cell(row, head)).collect()).collect();
    let heads: Vec<String> = heads.iter().map(|head| head.to_uppercase()).collect();
    narrow_table(heads, cells)
}

/// A table that people can read without a wide window, as far as that can be: where figures come from stands below it,
/// and one with more columns than rows is turned on its side.
fn narrow_table(mut heads: Vec<String>, mut cells: Vec<Vec<String>>) -> String {
    let mut notes = String::new();
    if width(&heads, &cells) > COLUMNS
        && let Some(place) = heads.iter().position(|head| head == SOURCE)
    {
        let sources = cells.iter_mut().map(|row| (row[0].clone(), row.remove(place)));
        let sources: Vec<(String, String)> = sources.filter(|(_, source)| source != "-").collect();
        let pairs: Vec<(&str, String)> = sources.iter().map(|(name, source)| (name.as_str(), source.clone())).collect();
        heads.remove(place);
        notes = format!("\nsources\n{}", output::fields(&pairs));
    }
    if width(&heads, &cells) > COLUMNS {
        let turned = turned(&heads, &cells);
        if width(&turned.0, &turned.1) <= COLUMNS {
            (heads, cells) = turned;
        }
    }
    output::table(&heads.iter().map(String::as_str).collect::<Vec<_>>(), cells) + &notes
}

/// Rows as columns.
fn turned(heads: &[String], cells: &[Vec<String>]) -> (Vec<String>, Vec<Vec<String>>) {
    let column = |place: usize| cells.iter().map(move |row| row[place].clone());
    let line = |place: usize| std::iter::once(heads[place].clone()).chain(column(place)).collect::<Vec<_>>();
    (line(0), (1..heads.len()).map(line).collect())
}

/// Columns of text that a table takes, with the space beside each.
fn width(heads: &[String], cells: &[Vec<String>]) -> usize {
    let longest = |place: usize| cells.iter().map(|row| row[place].chars().count()).max().unwrap_or_default();
    heads.iter().enumerate().map(|(place, head)| head.chars().count().max(longest(place)) + 2).sum()
}

/// The cells of a row; a ceiling and what is reached of it share one.
fn columns(row: &Map<String, Value>) -> Vec<(String, String)> {
    let mut cells = Vec::new();
    for (name, value) in row {
        match (name.as_str(), value) {
            ("ceiling", Value::Object(ceiling)) => {
                let beside = |key: &str| row.get("calibrated").and_then(|other| other.get(key));
                for (key, value) in ceiling {
                    let text = beside(key)
                        .map_or_else(|| figure(key, value), |other| pair(figure(key, value), figure(key, other)));
                    cells.push((words(key), text));
                }
            }
            ("calibrated", _) => {}
            (_, Value::Object(inner)) => cells.extend(columns(inner)),
            _ => cells.push((words(name), figure(name, value))),
        }
    }
    cells
}

/// Both, if they differ.
fn pair(ceiling: String, calibrated: String) -> String {
    if ceiling == calibrated { ceiling } else { format!("{ceiling} | {calibrated}") }
}

/// A name without its unit.
fn words(name: &str) -> String {
    let of_ending = |(ending, instead): &(&str, &str)| name.strip_suffix(ending).map(|rest| format!("{rest}{instead}"));
    let text = LEFT_OUT.iter().find_map(of_ending).unwrap_or_else(|| name.to_owned());
    if name == "bytes_per_second" { "speed".to_owned() } else { text.replace('_', " ") }
}

/// A figure with its unit.
fn figure(name: &str, value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::Bool(truth) => if *truth { "yes" } else { "no" }.to_owned(),
        Value::String(text) => match text.parse() {
            Ok(amount) if name.starts_with("cost") => money(amount),
            _ => text.clone(),
        },
        Value::Array(items) => {
            let nested = items.iter().any(Value::is_array);
            let items =
                items.iter().map(|item| figure(name, item)).map(|item| if nested { format!("[{item}]") } else { item });
            items.collect::<Vec<_>>().join(", ")
        }
        Value::Object(_) => value.to_string(),
        Value::Number(number) => {
            number.as_f64().map_or_else(|| number.to_string(), |value| with_unit(name, value, number.is_f64()))
        }
    }
}

fn with_unit(name: &str, value: f64, fractional: bool) -> String {
    let name = format!("_{name}");
    if let Some((_, format)) = UNITS.iter().find(|(ending, _)| name.ends_with(ending)) {
        return format(value);
    }
    if name.ends_with("bytes") || name.contains("_bytes_per_") || name.contains("bytes_read") {
        return bytes(value);
    }
    if SHARES.iter().any(|share| name.ends_with(&format!("_{share}"))) {
        return format!("{} %", plain(100.0 * value));
    }
    if fractional { plain(value) } else { format!("{value}") }
}

/// Whole amounts with two digits behind the point, smaller ones with as many as tell something.
fn money(amount: f64) -> String {
    if amount.abs() >= 1.0 { format!("{amount:.2}") } else { plain(amount) }
}

/// Up to two minutes as a number of four digits, longer ones as a span beside it.
fn seconds(value: f64) -> String {
    match value {
        _ if value < 1e-3 => format!("{} µs", plain(value * 1e6)),
        _ if value < 1.0 => format!("{} ms", plain(value * 1e3)),
        _ if value < 120.0 => format!("{} s", plain(value)),
        _ => format!("{} s ({})", plain(value), format_span(value)),
    }
}

/// A decimal and a binary size: the two are mistaken for each other too often.
fn bytes(value: f64) -> String {
    if value.abs() < 1e4 {
        return format!("{value} B");
    }
    const NAMES: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut binary, mut index) = (value, 0);
    while binary.abs() >= 1024.0 && index + 1 < NAMES.len() {
        binary /= 1024.0;
        index += 1;
    }
    format!("{}B ({} {})", scaled(value), plain(binary), NAMES[index])
}

/// Four digits and the letter of a power of a thousand.
fn scaled(value: f64) -> String {
    const LETTERS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let (mut value, mut index) = (value, 0);
    while value.abs() >= 1000.0 && index + 1 < LETTERS.len() {
        value /= 1000.0;
        index += 1;
    }
    format!("{} {}", plain(value), LETTERS[index])
}

/// Four digits, as far as there are any, and no more zeros than a number needs.
fn plain(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let digits = (3 - value.abs().log10().floor() as i32).clamp(0, 9) as usize;
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_say_the_units() {
        for (name, value, text) in [
            ("kv_bytes", json!(9_830_400_000u64), "9.83 GB (9.155 GiB)"),
            ("bytes_per_token", json!(327_680), "327.7 kB (320 KiB)"),
            ("headroom_bytes", json!(-512), "-512 B"),
            ("bytes_per_second", json!(3.125e9), "3.125 GB/s"),
            ("bf16_flops_per_second", json!(989e12), "989 TFLOP/s"),
            ("seconds_per_token", json!(0.0069), "6.9 ms"),
            ("exposed_seconds", json!(0.0000335), "33.5 µs"),
            ("origin_only_seconds", json!(11_280.0), "11280 s (3 h 8 min)"),
            ("worker_mb", json!(0.000_001), "0.000001 MB"),
            ("tokens_per_second", json!(145.642_857), "145.6/s"),
            ("memory_utilisation", json!(0.9), "90 %"),
            ("headroom_mb", json!(-264), "-264 MB"),
            ("sessions", json!(1_000_000), "1000000"),
            ("gain_ideal", json!(13.6533), "13.65"),
            ("fits", json!(false), "no"),
            ("cost", json!("215.854715"), "215.85"),
            ("cost_per_million_output_tokens", json!("0.0123456"), "0.01235"),
            ("least_prefix_tokens", json!(null), "-"),
            ("placement", json!([["a", "b"], ["c"]]), "[a, b], [c]"),
        ] {
            assert_eq!(figure(name, &value), text, "{name}");
        }
    }

    #[test]
    fn a_ceiling_and_what_is_reached_stand_side_by_side() {
        let row =
            json!({"batch": 1, "ceiling": {"tokens_per_second": 145.6}, "calibrated": {"tokens_per_second": 94.6}});
        let text = render(&json!({"gpu": "x", "used": {"kv_bytes": 5}, "rows": [row]}));
        assert!(text.starts_with("gpu: x\n") && text.contains("\nused\n  kv: 5 B\n"), "{text}");
        assert!(
            text.contains("BATCH") && text.contains("TOKENS PER SECOND") && text.contains("145.6/s | 94.6/s"),
            "{text}"
        );
    }
    #[test]
    fn wide_tables_are_turned_on_their_side_and_their_sources_stand_below() {
        let many: Map<String, Value> = (0..12).map(|number| (format!("a_long_name_{number}"), json!(number))).collect();
        let text = render(&json!({"rows": [many.clone(), many]}));
        assert!(text.contains("A LONG NAME 11  11  11\n"), "{text}");
        let row =
            |name: &str| json!({"name": name, "bytes_per_second": 7e9, "source": "a data sheet ".repeat(9).trim()});
        let text = render(&json!({"rows": [row("one"), row("two")]}));
        assert!(text.contains("one   7 GB/s\n") && text.contains("\n  sources\n  one: a data sheet a"), "{text}");
        let short = render(&json!({"rows": [{"name": "one", "source": "a data sheet"}]}));
        assert!(short.contains("NAME  SOURCE") && !short.contains("sources"), "{short}");
    }
}
