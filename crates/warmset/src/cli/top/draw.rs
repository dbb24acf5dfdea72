//! One frame: a bar of the ledger for each tier, the models, jobs, the last events.

use super::view::{Sort, View, waiting};
use crate::{
    cli::latency::percentiles_text,
    config::units::{format_bytes, format_seconds},
    output::{count, short_digest, text_of},
};
use ratatui::{
    Frame,
    buffer::Buffer,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Cell, Paragraph, Row, Table},
};
use serde_json::Value;

/// Lines of events.
const EVENT_LINES: u16 = 8;
/// Columns of a tier's bar, and how narrow a terminal has half of it, so that what it says in words fits beside it.
const BAR_COLUMNS: usize = 40;
const NARROW_COLUMNS: u16 = 130;
/// What a bar is made of, in order: the field of the tier, the sign, the colour.
const BAR: [(&str, &str, Color); 5] = [
    ("resident_bytes", "█", Color::Green),
    ("loading_bytes", "▓", Color::Yellow),
    ("unloading_bytes", "▒", Color::Magenta),
    ("kv_bytes", "▚", Color::Cyan),
    ("reserve_bytes", "░", Color::DarkGray),
];
const FREE: &str = "·";
/// Worth is told per GiB: per byte it would be a number of many zeros.
const GIBIBYTE: f64 = (1u64 << 30) as f64;

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, snapshot: &Value, server: &str, view: &mut View) {
    let tiers = list(&snapshot["memory"]["tiers"]);
    let heights = [
        Constraint::Length(1),
        Constraint::Length(u16::try_from(tiers.len()).unwrap_or(u16::MAX)),
        Constraint::Min(3),
        Constraint::Length(EVENT_LINES + 1),
        Constraint::Length(u16::from(!view.for_paper)),
    ];
    let [head, bars, models, events, foot] = Layout::vertical(heights).areas(frame.area());
    frame.render_widget(Paragraph::new(title(snapshot, server, view)), head);
    frame.render_widget(Paragraph::new(tiers.iter().map(|tier| bar(tier, bars.width)).collect::<Vec<_>>()), bars);
    draw_models(frame, models, snapshot, view);
    draw_events(frame, events, list(&snapshot["events"]));
    frame.render_widget(Paragraph::new(keys(view)), foot);
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn title(snapshot: &Value, server: &str, view: &View) -> Line<'static> {
    if let Some(trouble) = &view.trouble {
        return Line::styled(trouble.clone(), Style::new().fg(Color::Red));
    }
    let models = list(&snapshot["models"]);
    let ready = models.iter().filter(|model| model["state"] == "ready").count();
    let running: u64 = models.iter().filter_map(|model| model["in_flight"].as_u64()).sum();
    let queued: u64 = models.iter().map(waiting).sum();
    let mut text = format!(
        "warmset {server}  {}, {ready} ready  {running} running, {queued} waiting",
        count(models.len(), "model")
    );
    if let Some(jobs) = snapshot["jobs"].as_array() {
        text += &format!("  {}", count(jobs.len(), "job"));
    }
    let thrashing = list(&snapshot["memory"]["pools"]).iter().filter(|pool| pool["thrash_alarm"] == true);
    for pool in thrashing {
        text += &format!("  {} THRASHES", text_of(pool, "pool"));
    }
    Line::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

/// `host  ████▓▓··░░  free 1.2 GiB of 2.0 GiB: resident ...`
fn bar(tier: &Value, width: u16) -> Line<'static> {
    let bar_columns = if width < NARROW_COLUMNS { BAR_COLUMNS / 2 } else { BAR_COLUMNS };
    let bytes = |key: &str| tier[key].as_u64().unwrap_or(0);
    let capacity = bytes("capacity_bytes").max(1);
    let mut spans = vec![Span::raw(format!("{:<6}", text_of(tier, "tier")))];
    let mut used = 0;
    for (key, sign, colour) in BAR {
        let share = u128::from(bytes(key)) * bar_columns as u128 / u128::from(capacity);
        // What is there at all is seen.
        let wanted = usize::try_from(share).unwrap_or(bar_columns).max(usize::from(bytes(key) > 0));
        let columns = wanted.min(bar_columns - used);
        used += columns;
        spans.push(Span::styled(sign.repeat(columns), Style::new().fg(colour)));
    }
    spans.push(Span::raw(FREE.repeat(bar_columns - used)));
    // What is not there is not named, and what matters most is said first: the line must fit.
    let there = BAR.iter().filter(|(key, _, _)| bytes(key) > 0);
    let parts: Vec<String> =
        there.map(|(key, _, _)| format!("{} {}", key.trim_end_matches("_bytes"), format_bytes(bytes(key)))).collect();
    let free = format_bytes(bytes("free_bytes"));
    let colon = if parts.is_empty() { "" } else { ": " };
    spans.push(Span::raw(format!("  free {free} of {}{colon}{}", format_bytes(capacity), parts.join(", "))));
    Line::from(spans)
}

fn draw_models(frame: &mut Frame<'_>, area: Rect, snapshot: &Value, view: &mut View) {
    let ordered = view.ordered(list(&snapshot["models"]));
    let visible = usize::from(area.height.saturating_sub(1));
    view.above = view.above.min(ordered.len().saturating_sub(visible));
    let shown = shown_columns(area.width, snapshot);
    let rows = ordered.iter().skip(view.above).take(visible).map(|model| row(model, &shown));
    let headers = shown.iter().map(|column| COLUMNS[*column].0);
    let widths = shown.iter().map(|column| match COLUMNS[*column].1 {
        0 => Constraint::Fill(1),
        columns => Constraint::Length(columns),
    });
    let header = Row::new(headers).style(Style::new().add_modifier(Modifier::BOLD));
    frame.render_widget(Table::new(rows, widths).header(header), area);
}

/// What is known of a model by column: its head and its width; the name takes what the others leave.
const COLUMNS: [(&str, u16); 12] = [
    ("MODEL", 0),
    ("STATE", 9),
    ("POOL", 10),
    ("MEMORY", 10),
    ("WORTH/GiB", 9),
    ("DEMAND/s", 8),
    ("RUN", 4),
    ("QUEUE", 5),
    ("PARKED", 6),
    ("WARM p50/p99", 16),
    ("COLD p50/p99", 16),
    ("DIGEST", 12),
];
/// Which of them a narrow terminal does without, the first first.
const DISPENSABLE: [usize; 7] = [11, 4, 10, 5, 9, 2, 8];
/// Which of them say nothing where there is one pool, and where nothing is parked.
const POOL: usize = 2;
const PARKED: usize = 8;
/// A name is told from others by so much of it.
const NAME_COLUMNS_MIN: u16 = 20;

fn shown_columns(width: u16, snapshot: &Value) -> Vec<usize> {
    let says_something = |column: &usize| match *column {
        POOL => list(&snapshot["memory"]["pools"]).len() > 1,
        PARKED => list(&snapshot["models"]).iter().any(|model| model["parked"].as_u64() > Some(0)),
        _ => true,
    };
    let mut shown: Vec<usize> = (0..COLUMNS.len()).filter(says_something).collect();
    for dispensable in DISPENSABLE {
        let others: u16 = shown.iter().skip(1).map(|column| COLUMNS[*column].1 + 1).sum();
        if others + NAME_COLUMNS_MIN <= width {
            break;
        }
        shown.retain(|column| *column != dispensable);
    }
    shown
}

fn row(model: &Value, shown: &[usize]) -> Row<'static> {
    let state = text_of(model, "state");
    let colour = match state.as_str() {
        "ready" => Color::Green,
        "failed" => Color::Red,
        "absent" => Color::DarkGray,
        _ => Color::Yellow,
    };
    let mark = if model["pin"] == true { "*" } else { "" };
    let held = model["held_bytes"].as_u64().filter(|bytes| *bytes > 0);
    let number = |key: &str, scale: f64| match model[key].as_f64().unwrap_or(0.0) * scale {
        value if value > 0.0 => format!("{value:.3}"),
        _ => "-".to_owned(),
    };
    let times = |start: &str| percentiles_text(&model["latency"][start]["first_token"]);
    let cells = [
        Cell::new(format!("{}{mark}", text_of(model, "name"))),
        Cell::new(state).style(Style::new().fg(colour)),
        Cell::new(text_of(model, "pool")),
        Cell::new(held.map_or_else(|| "-".to_owned(), format_bytes)),
        Cell::new(number("worth", GIBIBYTE)),
        Cell::new(number("demand_per_second", 1.0)),
        Cell::new(model["in_flight"].as_u64().unwrap_or(0).to_string()),
        Cell::new(waiting(model).to_string()),
        Cell::new(model["parked"].as_u64().unwrap_or(0).to_string()),
        Cell::new(times("warm")),
        Cell::new(times("cold")),
        Cell::new(short_digest(model)),
    ];
    Row::new(shown.iter().map(|column| cells[*column].clone()))
}

/// The last ones, the newest first.
fn draw_events(frame: &mut Frame<'_>, area: Rect, events: &[Value]) {
    let mut lines = vec![Line::styled("EVENTS", Style::new().add_modifier(Modifier::BOLD))];
    lines.extend(events.iter().rev().take(usize::from(EVENT_LINES)).map(event_line));
    frame.render_widget(Paragraph::new(lines), area);
}

fn event_line(event: &Value) -> Line<'static> {
    let data = &event["data"];
    let known = ["type", "worker", "digest", "model"];
    let details = data
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(key, value)| !known.contains(&key.as_str()) && !value.is_object() && !value.is_null());
    let details: Vec<String> = details.map(|(key, value)| detail_text(key, value)).collect();
    Line::raw(format!(
        "{:>6} {:<18} {:<24} {}",
        text_of(event, "id"),
        text_of(event, "kind"),
        text_of(data, "model"),
        details.join(", ")
    ))
}

/// `peak 1.0 GiB`, `took 250 ms`: what a number is of stands in its key.
fn detail_text(key: &str, value: &Value) -> String {
    if let (Some(key), Some(bytes)) = (key.strip_suffix("_bytes"), value.as_u64()) {
        return format!("{key} {}", format_bytes(bytes));
    }
    let seconds = if key == "seconds" { Some("took") } else { key.strip_suffix("_seconds") };
    if let (Some(key), Some(seconds)) = (seconds, value.as_f64()) {
        return format!("{} {}", key.replace('_', " "), format_seconds(seconds));
    }
    format!("{} {}", key.replace('_', " "), plain(value))
}

/// A value without quotes and brackets.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.replace('\n', " "),
        Value::Number(number) if number.is_f64() => format!("{:.2}", number.as_f64().unwrap_or_default()),
        Value::Bool(is_so) => if *is_so { "yes" } else { "no" }.to_owned(),
        Value::Array(values) if values.is_empty() => "none".to_owned(),
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" "),
        Value::Null | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}

fn keys(view: &View) -> Line<'static> {
    let mut spans = vec![Span::raw("q quit  sort by:")];
    for (key, sort, word) in Sort::ALL {
        let chosen = if sort == view.sort { Modifier::REVERSED } else { Modifier::empty() };
        spans.push(Span::styled(format!(" {key} {word}"), Style::new().add_modifier(chosen)));
    }
    spans.push(Span::raw("  r reverse  ↑ ↓ scroll"));
    Line::from(spans)
}

/// A drawn frame as lines of text.
pub(super) fn text_of_buffer(buffer: &Buffer) -> String {
    let columns = usize::from(buffer.area.width).max(1);
    let lines = buffer.content().chunks(columns).map(|cells| {
        let line: String = cells.iter().map(|cell| cell.symbol()).collect();
        line.trim_end().to_owned()
    });
    let lines: Vec<String> = lines.collect();
    let last = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    lines[..last].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::{Terminal, backend::TestBackend};
    use serde_json::json;

    fn drawn(snapshot: &Value, columns: u16, lines: u16, view: &mut View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
        terminal.draw(|frame| draw(frame, snapshot, "127.0.0.1:8081", view)).unwrap();
        text_of_buffer(terminal.backend().buffer())
    }

    fn snapshot() -> Value {
        json!({
            "memory": {
                "tiers": [{"tier": "host", "capacity_bytes": 4u64 << 30, "reserve_bytes": 1u64 << 30, "loading_bytes": 1,
                           "resident_bytes": 1u64 << 30, "unloading_bytes": 0, "kv_bytes": 0, "free_bytes": 2u64 << 30}],
                "pools": [{"pool": "small", "thrash_alarm": true}],
            },
            "models": [
                {"name": "a", "state": "absent", "digest": "sha256:00112233445566778899", "latency": null},
                {"name": "b", "state": "ready", "pin": true, "digest": "sha256:ffeeddccbbaa99887766", "held_bytes": 1u64 << 30,
                 "worth": 2e-9, "demand_per_second": 0.25, "in_flight": 2, "waiting": 1, "queued": 3,
                 "latency": {"warm": {"first_token": {"count": 9, "p50_seconds": 0.012, "p99_seconds": 0.34}, "duration": null},
                             "cold": {"first_token": null, "duration": null}}},
            ],
            "events": [
                {"id": 1, "kind": "load_finished", "data": {"model": "b", "seconds": 0.5, "peak_bytes": 1u64 << 30, "timings": {},
                                                             "retry_after_seconds": 2.0, "ratio": 1.0 / 3.0, "raised": true, "added": ["a", "b"]}},
                {"id": 2, "kind": "load_refused", "data": {"model": "a", "message": "two\nlines"}},
            ],
        })
    }

    #[test]
    fn a_narrow_terminal_shows_whole_names_and_less_of_the_rest() {
        let mut snapshot = snapshot();
        snapshot["models"][1]["name"] = json!("a-name-of-twenty-one");
        let text = drawn(&snapshot, 80, 20, &mut View::default());
        assert!(text.contains("a-name-of-twenty-one*") && text.contains("QUEUE") && !text.contains("DIGEST"), "{text}");
        assert!(drawn(&snapshot, 150, 20, &mut View::default()).contains("DIGEST"));
    }

    #[test]
    fn pools_are_shown_where_there_are_several_and_parked_requests_where_there_are_any() {
        let mut snapshot = snapshot();
        snapshot["models"][1]["pool"] = json!("chat");
        let head = |snapshot: &Value, columns: u16| -> Vec<String> {
            let text = drawn(snapshot, columns, 20, &mut View::default());
            let head = text.lines().find(|line| line.starts_with("MODEL")).unwrap_or_default();
            head.split_whitespace().map(str::to_owned).collect()
        };
        let has = |snapshot: &Value, columns: u16, name: &str| head(snapshot, columns).contains(&name.to_owned());
        assert!(!has(&snapshot, 150, "POOL") && !has(&snapshot, 150, "PARKED"));
        snapshot["memory"]["pools"] = json!([{"pool": "default"}, {"pool": "chat"}]);
        snapshot["models"][1]["parked"] = json!(2);
        assert!(has(&snapshot, 150, "POOL") && has(&snapshot, 150, "PARKED"));
        let text = drawn(&snapshot, 150, 20, &mut View::default());
        let model: Vec<&str> = text.lines().nth(3).unwrap_or_default().split_whitespace().collect();
        assert_eq!((model[2], &model[7..10]), ("chat", &["2", "4", "2"][..]), "{text}");
        assert!(has(&snapshot, 80, "POOL") && !has(&snapshot, 60, "POOL") && has(&snapshot, 60, "QUEUE"));
    }

    #[test]
    fn a_frame_shows_ledger_models_and_events() {
        let text = drawn(&snapshot(), 150, 20, &mut View::default());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "warmset 127.0.0.1:8081  2 models, 1 ready  2 running, 4 waiting  small THRASHES");
        let bar = "█".repeat(10) + "▓" + &"░".repeat(10) + &"·".repeat(19);
        assert_eq!(
            lines[1].split("  ").collect::<Vec<_>>()[1..],
            [bar.as_str(), "free 2.0 GiB of 4.0 GiB: resident 1.0 GiB, loading 1 B, reserve 1.0 GiB"]
        );
        let narrow = drawn(&snapshot(), 100, 20, &mut View::default());
        let whole = format!("{}▓{}{}  free 2.0 GiB of 4.0 GiB", "█".repeat(5), "░".repeat(5), "·".repeat(9));
        assert!(narrow.contains(&whole) && narrow.contains("reserve 1.0 GiB\n"), "{narrow}");
        let model: Vec<&str> = lines[3].split_whitespace().collect();
        let expected =
            ["b*", "ready", "1.0", "GiB", "2.147", "0.250", "2", "4", "12", "ms/340", "ms", "-", "ffeeddccbbaa"];
        assert_eq!(model, expected);
        assert!(lines[4].starts_with("a ") && lines[4].contains("absent"), "{text}");
        let events: Vec<&str> = lines.iter().skip_while(|line| **line != "EVENTS").copied().collect();
        assert!(events[1].contains("load_refused") && events[1].ends_with("message two lines"), "{text}");
        let details = ["peak 1.0 GiB", "took 500 ms", "retry after 2.00 s", "ratio 0.33", "raised yes", "added a b"];
        assert!(details.iter().all(|detail| events[2].contains(detail)), "{text}");
        assert!(text.ends_with("r reverse  ↑ ↓ scroll"), "{text}");
    }

    #[test]
    fn any_terminal_and_any_document_can_be_drawn() {
        for (columns, lines) in [(1, 1), (20, 5), (80, 24), (300, 3)] {
            let mut view = View { above: 1000, trouble: Some("gone".into()), ..View::default() };
            drawn(&snapshot(), columns, lines, &mut view);
            drawn(&json!({}), columns, lines, &mut view);
            assert_eq!(view.above, 0);
        }
    }
}
