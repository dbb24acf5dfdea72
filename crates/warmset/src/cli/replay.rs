//! `warmset replay`: the same machines told the same, or the same requests in another world.

use crate::{
    config::units,
    output::{Output, count, table, text_of},
    recording::{Ending, Reading},
};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use warmset_core::Bytes;
use warmset_planner::recording::{Costs, Difference, Line, Observed, Profile, Profiles, Replay, ReplayError, WhatIf};

/// `warmset replay`
#[derive(Debug, Args)]
pub(crate) struct ReplayArguments {
    /// What `warmset admin record` or `warmset serve --record` wrote
    #[arg(value_name = "RECORDING")]
    recording: PathBuf,
    /// What if the pool had so much memory: the requests and the engines of the recording in the simulator
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    memory: Option<Bytes>,
    /// What if so much of it were kept free
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    reserve: Option<Bytes>,
    /// What if another policy decided: warmset, no-preload, no-intervals, no-time-of-day or no-forecast
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// What if engines cost what they cost in another recording, of whatever models
    #[arg(long, value_name = "RECORDING")]
    costs: Option<PathBuf>,
    /// With --costs: what models take alone, as `warmset model profile NAME --json` printed it for each
    #[arg(long, value_name = "FILE", requires = "costs")]
    profiles: Option<PathBuf>,
}

/// Replays a recording and prints what came of it.
pub(super) fn run(arguments: &ReplayArguments, output: Output) -> Result<()> {
    let named = || format!("cannot replay {}", arguments.recording.display());
    let reading = Reading::open(&arguments.recording)?;
    let asks_what_if = arguments.memory.is_some()
        || arguments.reserve.is_some()
        || arguments.policy.is_some()
        || arguments.costs.is_some();
    if asks_what_if { what_if(arguments, reading, output) } else { replay(arguments, reading, output) }
        .with_context(named)
}

fn replay(arguments: &ReplayArguments, mut reading: Reading, output: Output) -> Result<()> {
    let mut replay = Replay::default();
    let spinner = output.spinner("replaying");
    let mut outcome = Ok(());
    while outcome.is_ok()
        && let Some(line) = reading.next()?
    {
        outcome = replay.take(line);
    }
    drop(spinner);
    let difference = match outcome.and_then(|()| replay.finish().map(drop)) {
        Ok(()) => None,
        Err(ReplayError::Different(difference)) => Some(difference),
        Err(error) => return Err(error.into()),
    };
    let machines = if difference.is_some() { Vec::new() } else { replay.finish()? };
    if machines.is_empty() && difference.is_none() {
        bail!("no machine is in it");
    }
    let mut document = json!({
        "recording": arguments.recording,
        "program": replay.header().map(|header| &header.program),
        "same": difference.is_none(),
        "machines": machines,
        "difference": difference,
    });
    add_ending(&mut document, &reading);
    output.result(&document, |document| match &difference {
        Some(difference) => difference_text(difference),
        None => same_text(document),
    });
    match difference {
        Some(difference) => bail!(
            "the {} does something else now than it did at its step {}: see above",
            difference.machine,
            difference.step
        ),
        None => Ok(()),
    }
}

/// How the recording ends; null where it was not read to its end.
fn add_ending(document: &mut Value, reading: &Reading) {
    (document["whole"], document["ended"]) = match reading.ending() {
        Some(Ending::Whole(reason)) => (json!(true), json!(reason)),
        Some(Ending::Cut) => (json!(false), Value::Null),
        None => (Value::Null, Value::Null),
    };
}

fn ending_text(document: &Value) -> String {
    match document["ended"].as_str() {
        Some(reason) => format!("the recording ends because {reason}"),
        None => "the recording was cut: whoever wrote it was stopped, and what it wrote last may be missing".to_owned(),
    }
}

fn same_text(document: &Value) -> String {
    let lines = document["machines"].as_array().into_iter().flatten().map(|machine| {
        let counted =
            |key: &str| machine[key].as_u64().and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
        format!(
            "the {} did the same: {}, {}, {:.1} s\n",
            text_of(machine, "machine"),
            count(counted("events"), "event"),
            count(counted("actions"), "action"),
            machine["seconds"].as_f64().unwrap_or_default(),
        )
    });
    lines.collect::<String>() + &ending_text(document)
}

fn difference_text(difference: &Difference) -> String {
    let Difference { machine, line, step, now_nanoseconds, event, recorded, replayed } = difference;
    let seconds = Duration::from_nanos(*now_nanoseconds).as_secs_f64();
    let same = recorded.iter().zip(replayed).take_while(|(then, now)| then == now).count();
    let mut text =
        format!("the {machine} at its step {step} (line {line}), {seconds:.6} s on the server's clock, was told\n");
    text += &format!("    {event}\n");
    for action in &recorded[..same] {
        text += &format!("  = {action}\n");
    }
    for (mark, actions, none) in [('-', recorded, "nothing more was recorded"), ('+', replayed, "nothing more now")] {
        for action in &actions[same..] {
            text += &format!("  {mark} {action}\n");
        }
        if actions.len() == same {
            text += &format!("  {mark} ({none})\n");
        }
    }
    text + "(= the same, - as recorded, + as it is now)"
}

fn what_if(arguments: &ReplayArguments, mut reading: Reading, output: Output) -> Result<()> {
    let parts = arguments.policy.as_deref().map(WhatIf::parts_of).transpose()?;
    let spinner = output.spinner("simulating");
    let profiles = arguments.profiles.as_deref().map(profiles_of).transpose()?.unwrap_or_default();
    let costs = arguments.costs.as_deref().map(|path| costs_of(path, profiles)).transpose()?;
    let asked = WhatIf { memory_bytes: arguments.memory, reserve_bytes: arguments.reserve, parts, costs };
    let observed = observe(&mut reading)?;
    let simulated = WhatIf::default().run(&observed)?;
    let other = asked.run(&observed)?;
    drop(spinner);
    let mut document = json!({
        "recording": arguments.recording,
        "memory_bytes": asked.memory_bytes,
        "reserve_bytes": asked.reserve_bytes,
        "policy": arguments.policy,
        "costs_of": arguments.costs,
        "costs": asked.costs,
        "recorded": observed.figures(),
        "simulated": simulated,
        "what_if": other,
    });
    add_ending(&mut document, &reading);
    output.result(&document, what_if_text);
    Ok(())
}

fn observe(reading: &mut Reading) -> Result<Observed> {
    let mut observed = Observed::default();
    while let Some(line) = reading.next()? {
        if let Line::Recording(header) = &line {
            header.check()?;
        }
        observed.take(line)?;
    }
    Ok(observed)
}

fn profiles_of(path: &Path) -> Result<Profiles> {
    let named = || format!("cannot read the profiles in {}", path.display());
    let text = std::fs::read_to_string(path).with_context(named)?;
    Profile::read_all(&text).with_context(named)
}

/// What engines cost in another recording.
fn costs_of(path: &Path, profiles: Profiles) -> Result<Costs> {
    let observed = observe(&mut Reading::open(path)?).with_context(|| format!("cannot read {}", path.display()))?;
    Costs::of(&observed, profiles).with_context(|| {
        format!("{} has no load or no answer to tell costs by: record until there are some", path.display())
    })
}

/// What is compared, in order: the words, the field and, of times, in seconds.
const COMPARED: [(&str, &str, bool); 13] = [
    ("requests", "requests", false),
    ("found their model ready", "warm", false),
    ("waited for a load", "cold", false),
    ("refused", "rejected", false),
    ("loads", "loads", false),
    ("evictions", "evictions", false),
    ("wait p50", "wait_p50_seconds", true),
    ("wait p99", "wait_p99_seconds", true),
    ("wait of the cold, p50", "cold_wait_p50_seconds", true),
    ("wait of the cold, p99", "cold_wait_p99_seconds", true),
    ("answer p50", "answer_p50_seconds", true),
    ("answer p99", "answer_p99_seconds", true),
    ("loaded ahead in vain", "preloads_wasted", false),
];

fn what_if_text(document: &Value) -> String {
    let rows = COMPARED.map(|(words, key, is_time)| {
        let figure = |run: &str| match document[run][key].as_f64() {
            Some(seconds) if is_time => format!("{seconds:.3} s"),
            _ => text_of(&document[run], key),
        };
        vec![words.to_owned(), figure("recorded"), figure("simulated"), figure("what_if")]
    });
    table(&["", "AS RECORDED", "SIMULATED AS IT WAS", "WHAT IF"], rows) + &ending_text(document)
}
