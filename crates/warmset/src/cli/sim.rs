//! `warmset sim`: what would happen, policies side by side. Nothing in its JSON depends on how fast this machine is.

use super::{sim_arguments::SimArguments, sim_batching, sim_boundary, sim_cache, sim_loader, sim_pool, sim_routing};
use crate::output::{Output, table, text_of};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufReader, Read},
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};
use warmset_core::Instant;
use warmset_planner::{
    batching::plan as batching_plan,
    boundary,
    cache::plan as cache_plan,
    demand::Demand,
    loader,
    pool::scenario as pool_scenario,
    report::{POLICIES, Row, compare},
    routing::plan::{self, Plan},
    scenario::{SHIPPED, Scenario},
};

/// The longest file that is read, unpacked.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// The longest description of a scenario.
const SCENARIO_BYTES_MAX: u64 = 1 << 20;

/// Runs a scenario and prints what came of it.
pub(crate) fn run(arguments: &SimArguments, output: Output) -> Result<()> {
    let description = described(&arguments.scenario)?;
    if Plan::is_described_by(&description) {
        return sim_routing::run(&description, arguments, output);
    }
    if batching_plan::Plan::is_described_by(&description) {
        return sim_batching::run(&description, arguments, output);
    }
    if cache_plan::Plan::is_described_by(&description) {
        return sim_cache::run(&description, arguments, output);
    }
    if pool_scenario::Plan::is_described_by(&description) {
        return sim_pool::run(&description, arguments, output);
    }
    if loader::Plan::is_described_by(&description) {
        return sim_loader::run(&description, arguments, output);
    }
    if boundary::Plan::is_described_by(&description) {
        return sim_boundary::run(&description, arguments, output);
    }
    arguments.refuse(&["--capacity-tokens", "--html", "--live"], "this one is about models")?;
    let policies = policies(&arguments.compare)?;
    let scenario = Scenario::parse(&description)
        .with_context(|| format!("in {}", arguments.scenario))?
        .with(&arguments.slots, arguments.load_seconds)?;
    let trace = arguments.trace.as_deref().map(read_trace).transpose()?;
    let demand = scenario.demand(arguments.seed, trace.as_deref())?;
    arguments.write_demand(&demand_document(&demand))?;
    let pairs = scenario.slots.iter().flat_map(|slots| policies.iter().map(|policy| (*slots, *policy)));
    let pairs: Vec<_> = pairs.collect();
    let rows = {
        let _spinner = output.spinner(&format!("replaying {} requests", demand.arrivals.len()));
        replay_all(&scenario, &demand, &pairs)?
    };
    let document = json!({
        "scenario": arguments.scenario,
        "description": scenario.description.trim(),
        "demand": arguments.trace.as_ref().map_or_else(|| json!("synthetic"), |path| json!(path)),
        "seed": arguments.seed,
        "models": demand.models,
        "requests": demand.arrivals.len(),
        "load_seconds": scenario.load_seconds,
        "run_seconds": scenario.run_seconds,
        "rows": rows,
    });
    output.result(&document, text);
    Ok(())
}

/// The requests themselves, for a replay against a server.
fn demand_document(demand: &Demand) -> Value {
    let seconds = |at: Instant| at.since(Instant::ZERO).as_secs_f64();
    let requests: Vec<_> = demand.arrivals.iter().map(|arrival| (seconds(arrival.at), arrival.model)).collect();
    json!({ "models": demand.models, "requests": requests })
}

/// One replay for each pair of room and policy; the rows are in the order of the pairs.
fn replay_all(scenario: &Scenario, demand: &Demand, pairs: &[(usize, &'static str)]) -> Result<Vec<Row>> {
    let rows = on_all_cores(pairs, |(slots, policy)| compare(scenario, demand, *slots, policy));
    rows.into_iter().map(|row| Ok(row?)).collect()
}

/// Does something with each of these, as many at once as there are cores; results are in their order.
pub(super) fn on_all_cores<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let worker = || {
        while let index = next.fetch_add(1, Ordering::Relaxed)
            && let Some(item) = items.get(index)
        {
            let result = work(item);
            done.lock().unwrap_or_else(PoisonError::into_inner).insert(index, result);
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..cores.min(items.len()) {
            scope.spawn(worker);
        }
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// The policies that were asked for, in the order of the table.
fn policies(wanted: &[String]) -> Result<Vec<&'static str>> {
    let known = POLICIES.map(|(name, _)| name);
    if let Some(unknown) = wanted.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("there is no policy {unknown}: there are {}", known.join(", "));
    }
    Ok(known.into_iter().filter(|name| wanted.is_empty() || wanted.iter().any(|other| other == name)).collect())
}

/// The text of a scenario that is shipped, or of a file.
fn described(name: &str) -> Result<String> {
    let others =
        [plan::SHIPPED, cache_plan::SHIPPED, batching_plan::SHIPPED, loader::plan::SHIPPED, boundary::plan::SHIPPED];
    let pools = [pool_scenario::SHIPPED, pool_scenario::SHIPPED_CHANGES];
    let mut shipped = SHIPPED.into_iter().chain(others).chain(pools);
    if let Some((_, text)) = shipped.clone().find(|(known, _)| *known == name) {
        return Ok(text.to_owned());
    }
    if !name.contains('/') && Path::new(name).extension().is_none_or(|ending| ending != "toml") {
        let names: Vec<&str> = shipped.by_ref().map(|(known, _)| known).collect();
        bail!("there is no scenario {name}: there are {}; a file's name ends in .toml", names.join(", "));
    }
    read(File::open(name).with_context(|| format!("cannot read {name}"))?, SCENARIO_BYTES_MAX)
        .with_context(|| format!("cannot read {name}"))
}

/// What was played live, as text.
pub(super) fn read_live(path: &Path) -> Result<String> {
    let name = || format!("cannot read {}", path.display());
    read(File::open(path).with_context(name)?, FILE_BYTES_MAX).with_context(name)
}

/// A trace as text, unpacked if it is packed.
pub(super) fn read_trace(path: &Path) -> Result<String> {
    let file = BufReader::new(File::open(path).with_context(|| format!("cannot read the trace {}", path.display()))?);
    let packed = path.extension().is_some_and(|ending| ending == "gz");
    let text = if packed {
        read(flate2::bufread::MultiGzDecoder::new(file), FILE_BYTES_MAX)
    } else {
        read(file, FILE_BYTES_MAX)
    };
    text.with_context(|| format!("cannot read the trace {}", path.display()))
}

fn read(source: impl Read, limit: u64) -> Result<String> {
    let mut text = String::new();
    let length = source.take(limit + 1).read_to_string(&mut text)?;
    if length as u64 > limit {
        bail!("it has more than {limit} bytes");
    }
    Ok(text)
}

fn text(document: &Value) -> String {
    let rows = document["rows"].as_array().into_iter().flatten().map(|row| {
        let number = |key: &str| row[key].as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"));
        vec![
            text_of(row, "slots"),
            text_of(row, "policy"),
            format!("{:.1} %", 100.0 * row["cold_share"].as_f64().unwrap_or(0.0)),
            text_of(row, "cold"),
            row["loads"].as_u64().map_or_else(|| "-".to_owned(), |loads| loads.to_string()),
            row["preloads_used"].as_u64().map_or_else(|| "-".to_owned(), |used| used.to_string()),
            row["preloads_wasted"].as_u64().map_or_else(|| "-".to_owned(), |wasted| wasted.to_string()),
            number("cold_wait_mean_seconds"),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let heads = ["ROOM FOR", "POLICY", "COLD", "REQUESTS", "LOADS", "AHEAD: USED", "WASTED", "COLD WAIT, S"];
    format!(
        "{}\n{} models, {} requests ({}), seed {}, a load takes {} s\n{}",
        text_of(document, "description"),
        text_of(document, "models"),
        text_of(document, "requests"),
        text_of(document, "demand"),
        text_of(document, "seed"),
        text_of(document, "load_seconds"),
        table(&heads, rows),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn policies_are_known_and_in_the_order_of_the_table() {
        assert_eq!(policies(&["lru".to_owned(), "warmset".to_owned()]).unwrap(), ["warmset", "lru"]);
        assert_eq!(policies(&[]).unwrap().len(), POLICIES.len());
        assert!(policies(&["magic".to_owned()]).unwrap_err().to_string().contains("no-forecast"));
    }

    #[test]
    fn a_packed_trace_is_unpacked_and_a_missing_one_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("day.csv.gz");
        let mut packed = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        packed.write_all(b"HashFunction,1,2\na,0,3\n").unwrap();
        packed.finish().unwrap();
        assert_eq!(read_trace(&path).unwrap(), "HashFunction,1,2\na,0,3\n");
        let missing = read_trace(Path::new("/nonexistent.csv")).unwrap_err();
        assert!(format!("{missing:#}").contains("cannot read the trace /nonexistent.csv"));
        assert!(described("nothing").unwrap_err().to_string().contains("rare-models"));
    }
}
