//! `warmset top`: what a running server holds and does, as it changes.

mod draw;
mod view;

use super::{
    arguments::{GlobalArguments, TopArguments},
    place::{Place, Sought},
};
use crate::{
    client::{CallError, Client},
    output::{self, Output},
};
use anyhow::{Result, bail};
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
};
use serde_json::{Value, json};
use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};
use view::View;

/// Events that one snapshot shows.
const EVENTS_SHOWN: usize = 20;
/// How long one look for a key lasts: longer holds a redraw up, shorter does nothing for long.
const KEY_PATIENCE: Duration = Duration::from_millis(100);
/// The width of a frame that is printed, where nobody says.
const FRAME_COLUMNS: u16 = 140;
/// Lines of a frame that is printed, beside those of models and tiers.
const FRAME_LINES_MORE: u16 = 12;

/// Shows it, or prints it once.
pub(crate) async fn run(arguments: TopArguments, global: &GlobalArguments, output: Output) -> Result<()> {
    let client = find(global).await?;
    let once = arguments.once || output.json || !std::io::stdout().is_terminal();
    if once {
        let snapshot = snapshot(&client).await?;
        output.result(&snapshot, |snapshot| frame_text(snapshot, client.authority()));
        return Ok(());
    }
    let mut terminal = ratatui::try_init()?;
    let ended = watch(&mut terminal, &client, Duration::from_secs_f64(arguments.interval)).await;
    ratatui::try_restore()?;
    ended
}

/// The server as other commands find it; a data directory alone does nothing that could be watched.
async fn find(global: &GlobalArguments) -> Result<Client> {
    let sought = Sought::find(global).await?;
    let nothing = matches!(&sought, Sought::Directory(root) if !root.exists());
    if !nothing {
        let place = Place::open(sought).await?;
        match place {
            Place::Server(client) => return Ok(client),
            Place::Directory { .. } => place.leave().await,
        }
    }
    bail!("no server runs, so there is nothing to watch: start `warmset serve` first, or give --server")
}

/// Everything that is shown, as one document.
async fn snapshot(client: &Client) -> Result<Value, CallError> {
    let events = format!("/admin/v1/events?recent={EVENTS_SHOWN}");
    let (models, ledger, workers, events) = tokio::try_join!(
        client.get("/admin/v1/models"),
        client.get("/admin/v1/ledger"),
        client.get("/admin/v1/workers"),
        client.get(&events),
    )?;
    let jobs = match client.get("/admin/v1/jobs").await {
        // A server without jobs.
        Err(CallError::Refused { status: 404, .. }) => Value::Null,
        jobs => jobs?["jobs"].take(),
    };
    Ok(json!({
        "listen": workers["listen"], "memory": ledger["memory"], "models": models["models"], "jobs": jobs,
        "events": events["events"],
    }))
}

/// Draws until somebody has seen enough. A server that is gone is waited for.
async fn watch(terminal: &mut DefaultTerminal, client: &Client, interval: Duration) -> Result<()> {
    let mut view = View::default();
    let mut shown = snapshot(client).await?;
    let mut taken = Instant::now();
    loop {
        terminal.draw(|frame| draw::draw(frame, &shown, client.authority(), &mut view))?;
        if let Some(event) = tokio::task::spawn_blocking(next_event).await?? {
            match event {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    if is_end(key.code, key.modifiers) {
                        return Ok(());
                    }
                    view.press(key.code);
                }
                _ => {}
            }
        }
        if taken.elapsed() >= interval {
            match snapshot(client).await {
                Ok(snapshot) => (shown, view.trouble) = (snapshot, None),
                Err(error) => view.trouble = Some(error.to_string()),
            }
            taken = Instant::now();
        }
    }
}

fn is_end(code: KeyCode, modifiers: KeyModifiers) -> bool {
    let interrupt = code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL);
    interrupt || matches!(code, KeyCode::Char('q') | KeyCode::Esc)
}

fn next_event() -> std::io::Result<Option<Event>> {
    if event::poll(KEY_PATIENCE)? { event::read().map(Some) } else { Ok(None) }
}

/// One frame as text.
fn frame_text(snapshot: &Value, server: &str) -> String {
    let lines = |key: &str| snapshot[key].as_array().map_or(0, Vec::len);
    let tiers = snapshot["memory"]["tiers"].as_array().map_or(0, Vec::len);
    let rows = u16::try_from(lines("models") + tiers).unwrap_or(u16::MAX).saturating_add(FRAME_LINES_MORE);
    let columns = ratatui::crossterm::terminal::size().ok().filter(|_| std::io::stdout().is_terminal());
    let columns = columns.map_or(FRAME_COLUMNS, |(columns, _)| columns.max(80));
    let backend = ratatui::backend::TestBackend::new(columns, rows);
    let drawn = ratatui::Terminal::new(backend).and_then(|mut terminal| {
        let mut view = View { for_paper: true, ..View::default() };
        terminal.draw(|frame| draw::draw(frame, snapshot, server, &mut view))?;
        Ok(draw::text_of_buffer(terminal.backend().buffer()))
    });
    drawn.unwrap_or_else(|error| {
        output::note(&format!("warmset: the frame cannot be drawn: {error}"));
        String::new()
    })
}
