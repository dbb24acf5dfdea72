//! Recordings written down, read back, told again and simulated, from runs whose outcome is known.
#![expect(clippy::disallowed_types, reason = "a tape and the test that reads it share their lines")]

use proptest::prelude::*;
use sha2::{Digest as _, Sha256};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use warmset_core::{
    Digest, Instant, Machine, ModelName, Priority, RequestId, TenantId, WorkerId,
    forecast::{Parts, WallTime},
    gateway::{self, ColdPolicy, Gateway, Route},
    recording::{Recorded, StepOf, Tape},
    targets::Targets,
    worker::{self, Worker},
};
use warmset_planner::{
    demand::Demand,
    node::{Cost, Node, settings},
    recording::{
        Costs, End, Entry, Excess, FORMAT_VERSION, Figures, Header, Line, LineError, Observed, Profile, Profiles,
        Replay, ReplayError, WhatIf,
    },
    scenario::Scenario,
    sharing::Slowdown,
};

const GIBIBYTE: u64 = 1 << 30;

/// Writes lines as a server does.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<(u64, Vec<u8>)>>);

impl Lines {
    fn add(&self, line: &Line) -> bool {
        let mut lines = self.0.lock().expect("no test panics with it");
        lines.0 += 1;
        let number = lines.0;
        line.write(number, &mut lines.1).expect("plain data");
        true
    }

    fn text(&self) -> Vec<Vec<u8>> {
        let lines = self.0.lock().expect("no test panics with it");
        lines.1.split_inclusive(|byte| *byte == b'\n').map(|line| line[..line.len() - 1].to_vec()).collect()
    }
}

impl<M: Machine + Clone> Tape<M> for Lines
where
    Line: From<Entry<M>>,
{
    fn begin(&mut self, now: Instant, machine: &M) -> bool {
        self.add(&Entry::Begin { now, machine: Box::new(machine.clone()) }.into())
    }

    fn step(&mut self, step: StepOf<M>) -> bool {
        self.add(&Entry::Step(step).into())
    }
}

fn begun() -> Lines {
    let lines = Lines::default();
    lines.add(&Line::Recording(Header { version: FORMAT_VERSION, program: "test".to_owned() }));
    lines
}

/// Models with a timer each, and some that are asked for at random.
const SCENARIO: &str = r#"
description = "a few models"
slots = [4]
load_seconds = 5.0
run_seconds = 2.0
days = 1

[[group]]
models = 4
pattern = "periodic"
every_minutes = [30, 30]
jitter = 0.05

[[group]]
models = 8
pattern = "random"
every_minutes = [30, 120]
burst = 3
"#;

/// A day of the scenario, recorded from its first event on.
fn simulated(slots: u64) -> (Lines, Node) {
    let scenario = Scenario::parse(SCENARIO).expect("it makes sense");
    let demand = scenario.demand(1, None).expect("synthetic");
    let cost = Cost { bytes: GIBIBYTE, load: scenario.load(), run: scenario.run() };
    let lines = begun();
    let mut node = Node::new(settings(slots * GIBIBYTE, Parts::ALL), vec![cost; demand.models]);
    node.record(Box::new(lines.clone()));
    // A server tells it again and again.
    let wall = WallTime { weekday: 0, second: 0 };
    node.schedule(Instant::ZERO, worker::Event::WallTime { wall, asleep: Duration::ZERO });
    node.run(&demand).expect("every invariant holds");
    (lines, node)
}

fn read(number: usize, text: &[u8]) -> Result<Line, LineError> {
    Line::read(number as u64 + 1, &mut text.to_vec())
}

/// Tells the lines again; the error, and how many went before it.
fn replay(text: &[Vec<u8>]) -> (usize, Result<Replay, ReplayError>) {
    let mut replay = Replay::default();
    for (number, line) in text.iter().enumerate() {
        if let Err(error) = replay.take(read(number, line).expect("as written")) {
            return (number, Err(error));
        }
    }
    (text.len(), Ok(replay))
}

#[test]
fn a_recorded_run_is_the_same_again_and_simulated_it_is_itself() {
    let (lines, node) = simulated(4);
    let text = lines.text();
    let (_, replayed) = replay(&text);
    let machines = replayed.expect("the same machine does the same").finish().expect("every invariant holds");
    assert_eq!(machines.len(), 1);
    assert_eq!(machines[0].events as usize, text.len() - 2, "all but the header and the beginning");

    let observed = observed(&lines);
    let recorded = observed.figures();
    assert_eq!((recorded.warm, recorded.cold), (node.outcome.starts.warm, node.outcome.starts.cold));
    assert_eq!((recorded.loads, recorded.evictions), (node.outcome.loads, node.outcome.evictions));
    assert_eq!(WhatIf::default().run(&observed).expect("it runs"), recorded, "nothing was asked to be other");
    let roomy = WhatIf { memory_bytes: Some(1_000 * GIBIBYTE), ..WhatIf::default() }.run(&observed).expect("it runs");
    assert!(roomy.evictions == 0 && roomy.cold < recorded.cold && roomy.requests == recorded.requests, "{roomy:?}");
    let parts = WhatIf::parts_of("no-preload").expect("it is one");
    let lazy = WhatIf { parts: Some(parts), ..WhatIf::default() }.run(&observed).expect("it runs");
    assert_eq!((lazy.preloads_used, lazy.preloads_wasted), (0, 0));
    let tiny = WhatIf { reserve_bytes: Some(4 * GIBIBYTE), ..WhatIf::default() }.run(&observed);
    assert!(tiny.expect_err("nothing is left").to_string().contains("leaves nothing"));
    assert!(WhatIf::parts_of("lru").expect_err("not our machine").to_string().contains("no-forecast"));
    assert!(WhatIf::default().run(&Observed::default()).is_err(), "there is no worker");
}

/// A day of the scenario with models of several sizes, from so many gibibytes on, whose answers have several lengths: a
/// load takes a second and two for each gibibyte, a request half a second and a tenth for each token, each alone on the machine.
fn priced(least_gibibytes: u64, capacity_gibibytes: u64, request: Slowdown, load: Slowdown) -> Lines {
    let demand = Scenario::parse(SCENARIO).expect("it makes sense").demand(1, None).expect("synthetic");
    let output_tokens = |model: usize| 5 + u32::try_from(model).expect("few");
    let costs = (0..demand.models).map(|model| {
        let gibibytes = least_gibibytes + model as u64 % 4;
        let run = Duration::from_millis(500 + 100 * u64::from(output_tokens(model)));
        Cost { bytes: gibibytes * GIBIBYTE, load: Duration::from_secs(1 + 2 * gibibytes), run }
    });
    recorded(
        &demand,
        settings(capacity_gibibytes * GIBIBYTE, Parts::ALL),
        costs.collect(),
        request,
        load,
        output_tokens,
    )
}

/// A demand played to engines of these costs, with what the gateway says of answers.
fn recorded(
    demand: &Demand,
    settings: worker::Settings,
    costs: Vec<Cost>,
    request: Slowdown,
    load: Slowdown,
    output_tokens: impl Fn(usize) -> u32,
) -> Lines {
    let mut node = Node::new(settings, costs);
    node.share(request, load);
    let lines = begun();
    node.record(Box::new(lines.clone()));
    node.run(demand).expect("every invariant holds");
    for (arrival, number) in demand.arrivals.iter().zip(1..) {
        let completion_tokens = output_tokens(arrival.model);
        let event = gateway::Event::Finished { request: RequestId(number), prompt_tokens: 10, completion_tokens };
        lines.add(&Line::Gateway(Entry::Step(StepOf::<Gateway> { now: arrival.at, event, actions: Vec::new() })));
    }
    lines
}

fn observed(lines: &Lines) -> Observed {
    let mut observed = Observed::default();
    for (number, line) in lines.text().iter().enumerate() {
        observed.take(read(number, line).expect("as written")).expect("in order");
    }
    observed
}

#[test]
fn what_one_recording_says_of_costs_holds_for_models_of_other_sizes() {
    let alone = Slowdown::default();
    let costs =
        Costs::of(&observed(&priced(1, 8, alone, alone)), Profiles::new()).expect("there are loads and answers");
    let near = |found: f64, wanted: f64| (found / wanted - 1.0).abs() < 1e-6;
    assert!(near(costs.load_seconds, 1.0) && near(costs.load_seconds_per_byte, 2.0 / GIBIBYTE as f64), "{costs:?}");
    assert!(near(costs.output_token_seconds, 0.1) && costs.request_slowdown == alone, "{costs:?}");
    assert!(costs.load_error < 1e-6 && costs.request_error < 1e-6, "{costs:?}");
    holds_for_others(costs, alone, alone);
    assert_eq!(Costs::of(&observed(&simulated(4).0), Profiles::new()), None, "nobody said how many tokens there were");
}

#[test]
fn by_how_much_requests_and_loads_slow_each_other_down_is_found_and_holds_for_models_of_other_sizes() {
    let request = Slowdown { request_beside: 0.6, engine: 0.9, load: 1.4 };
    let load = Slowdown { request_beside: 0.0, engine: 0.5, load: 0.8 };
    let costs =
        Costs::of(&observed(&priced(1, 8, request, load)), Profiles::new()).expect("there are loads and answers");
    for (found, wanted) in [
        (costs.request_slowdown.request_beside, request.request_beside),
        (costs.request_slowdown.engine, request.engine),
        (costs.request_slowdown.load, request.load),
        (costs.load_slowdown.engine, load.engine),
        (costs.load_slowdown.load, load.load),
    ] {
        assert!((found - wanted).abs() < 0.05, "{found} for {wanted}: {costs:?}");
    }
    assert!(costs.load_error < 0.01 && costs.request_error < 0.01, "{costs:?}");
    holds_for_others(costs, request, load);
}

/// What larger models with other room did is what the costs say, within what is promised of counts: one load more or less that
/// is under way when a request comes changes what follows.
fn holds_for_others(costs: Costs, request: Slowdown, load: Slowdown) {
    let other = observed(&priced(3, 17, request, load));
    let recorded = other.figures();
    let simulated = WhatIf { costs: Some(costs), ..WhatIf::default() }.run(&other).expect("it runs");
    let figures = |of: &Figures| {
        let counts = [of.warm, of.cold, of.loads, of.evictions].map(|count| count as f64);
        let seconds =
            [of.answer_p50_seconds, of.answer_p99_seconds, of.cold_wait_p50_seconds, of.cold_wait_p99_seconds];
        [counts, seconds].concat()
    };
    for (said, was) in figures(&simulated).iter().zip(figures(&recorded)) {
        assert!((said / was - 1.0).abs() < 0.05, "{said} for {was}: {simulated:?} {recorded:?}");
    }
    assert!(recorded.evictions > 10, "{recorded:?}");
}

/// Every other model takes three times as long as its bytes and tokens say, which nothing but its profile tells.
#[test]
fn a_profile_tells_what_bytes_and_tokens_do_not() {
    let profile = |model: u8, disturbed: f64| {
        let times = if model.is_multiple_of(2) { disturbed } else { 3.0 * disturbed };
        let mut digest = [0; 32];
        digest[7] = model;
        let (load, prefill, decode) = (times * 2.0, 100.0 / times, 10.0 / times);
        format!(
            r#"{{"digest": "{}", "load_seconds": {load}, "warm_up_seconds": 0.0, "name": "m",
                "prefill_tokens_per_second": {prefill}, "decode_tokens_per_second": {decode}}}"#,
            Digest(digest),
        )
    };
    let slow = |text: &str| {
        // Each three times, once in bad company: the median counts.
        let all = (0..4).flat_map(|model| [1.0, 9.0, 1.0].map(|disturbed| profile(model, disturbed)));
        Profile::read_all(&(all.collect::<Vec<_>>().join("\n") + text))
    };
    let profiles = slow("").expect("as printed");
    assert_eq!(profiles.len(), 4);
    for (text, why) in [("{}", "model profile"), ("x", "model profile")] {
        let refusal = slow(text).expect_err("it is none").to_string();
        assert!(refusal.contains(why), "{refusal}");
    }
    let zero = r#"{"digest": "sha256:00", "load_seconds": 0, "warm_up_seconds": 0}"#.replace("00", &"00".repeat(32));
    assert!(Profile::read_all(&zero).expect_err("no load").to_string().contains("measure it again"));
    let lines = of_two_kinds();
    let blind = Costs::of(&observed(&lines), Profiles::new()).expect("there are loads and answers");
    let costs = Costs::of(&observed(&lines), profiles).expect("there are loads and answers");
    assert!(blind.load_error > 0.3 && blind.request_error > 0.3, "{blind:?}");
    assert!(costs.load_error < 1e-6 && costs.request_error < 1e-6, "{costs:?}");
    // A load takes what its profile says; a request half of it.
    assert!((costs.load_share_of_profile - 1.0).abs() < 1e-6, "{costs:?}");
    assert!((costs.output_share_of_profile - 0.5).abs() < 1e-6, "{costs:?}");
}

/// Four models of as many bytes, two of which take three times as long.
fn of_two_kinds() -> Lines {
    let output_tokens = |model: usize| 10 + 5 * u32::try_from(model).expect("few");
    let text = SCENARIO.split("[[group]]").take(2).collect::<Vec<_>>().join("[[group]]");
    let demand = Scenario::parse(&text).expect("it makes sense").demand(1, None).expect("synthetic");
    let costs = (0..demand.models).map(|model| {
        let times = if model.is_multiple_of(2) { 1 } else { 3 };
        let run = Duration::from_millis(50 * times * u64::from(output_tokens(model)));
        Cost { bytes: GIBIBYTE, load: Duration::from_secs(2 * times), run }
    });
    let alone = Slowdown::default();
    recorded(&demand, settings(2 * GIBIBYTE, Parts::ALL), costs.collect(), alone, alone, output_tokens)
}

#[test]
fn what_was_changed_lost_or_moved_is_found_by_its_sum() {
    let text = gateway_recording(|_, _| {}).text();
    for (number, line) in text.iter().enumerate() {
        assert!(read(number, line).is_ok());
        assert!(matches!(read(number + 1, line), Err(LineError::Changed)), "it has another place");
        for place in [0, 8, 24, 30, line.len() - 1] {
            let mut changed = line.clone();
            changed[place] ^= 1;
            assert!(read(number, &changed).is_err(), "byte {place} of line {number}");
        }
        assert!(read(number, &line[..line.len() - 1]).is_err());
    }
    for foreign in [&b""[..], b"{}", b"{\"sum\":\"0123456789abcdef\"", b"\xff\xfe"] {
        assert!(matches!(read(0, foreign), Err(LineError::Foreign)));
    }
}

/// A line with this text, as somebody writes it who knows how sums are made.
fn sealed(number: usize, json: &[u8]) -> Vec<u8> {
    let rest = [&b","[..], json.get(1..).unwrap_or_default()].concat();
    let hash = Sha256::new().chain_update((number + 1).to_string()).chain_update(&rest).finalize();
    let sum: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    [b"{\"sum\":\"", sum.as_bytes(), b"\"", &rest].concat()
}

/// What stands in a line beside its sum.
fn unsealed(line: &[u8]) -> Vec<u8> {
    let begin = b"{\"sum\":\"0123456789abcdef\",".len();
    [b"{", &line[begin..]].concat()
}

#[test]
fn what_no_server_writes_is_refused_before_it_takes_memory() {
    let text = gateway_recording(|_, _| {}).text();
    assert_eq!(sealed(1, &unsealed(&text[1])), text[1], "as it is written");
    let long = |items: usize| format!("{{\"end\":{{\"reason\":\"\",\"more\":[{}]}}}}", vec!["0"; items].join(","));
    assert!(read(0, &sealed(0, long(9).as_bytes())).is_ok());
    let refused = read(0, &sealed(0, long(200_000).as_bytes())).map(drop).expect_err("too long");
    assert!(matches!(refused, LineError::Excess(Excess::Items)) && refused.to_string().contains("forgery"));
    let deep = [b"{\"end\":", "[".repeat(100_000).as_bytes()].concat();
    assert!(matches!(read(0, &sealed(0, &deep)), Err(LineError::Excess(Excess::Depth))));
    let older = replay(&[sealed(0, b"{\"recording\":{\"version\":1,\"program\":\"0.1.0\"}}")]).1;
    assert!(matches!(older, Err(ReplayError::Version { found: 1 })), "before machines kept lists of who is due");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(matches!(read(0, &bytes), Err(LineError::Foreign | LineError::Changed)));
        // Whatever the sum is of.
        let _ = read(0, &sealed(0, &bytes)).map_err(|error| error.to_string());
    }

    #[test]
    fn any_change_to_a_line_is_read_or_refused(
        which in 0_usize..6,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0_usize..3), 1..6),
    ) {
        let text = gateway_recording(|_, _| {}).text();
        let number = which % text.len();
        let mut json = unsealed(&text[number]);
        for (place, byte, how) in changes {
            let place = place.index(json.len());
            match how {
                0 => json[place] = byte,
                1 => json.insert(place, byte),
                _ => drop(json.remove(place)),
            }
        }
        // What is read can be written.
        if let Ok(line) = read(number, &sealed(number, &json)) {
            prop_assert!(line.write(1, &mut Vec::new()).is_ok());
        }
    }
}

/// A gateway that hands out three requests with one permit, recorded from the middle on.
fn gateway_recording(change: impl Fn(usize, &mut gateway::Event)) -> Lines {
    let mut machine = Recorded::new(Gateway::new(gateway::Settings::default()));
    let digest = Digest([1; 32]);
    let route = Route {
        digest,
        name: ModelName::parse("m").expect("a name"),
        priority: Priority::Standard,
        max_concurrency: 1,
        critical_reserve: 0,
        parks: false,
        cold: ColdPolicy::Wait,
        rewarm_seconds: 1.25,
        targets: Targets::default(),
    };
    let arrived = |request| gateway::Event::Arrived {
        request: RequestId(request),
        tenant: TenantId::anonymous(),
        digest,
        class: Priority::Standard,
        patience: Duration::from_secs(60),
    };
    let finished =
        |request| gateway::Event::Finished { request: RequestId(request), prompt_tokens: 1, completion_tokens: 2 };
    let events = [
        gateway::Event::Configure(route),
        gateway::Event::WorkerUp { worker: WorkerId(0) },
        arrived(1),
        arrived(2),
        arrived(3),
        finished(1),
        finished(2),
    ];
    let lines = begun();
    for (number, event) in events.into_iter().enumerate() {
        if number == 3 {
            machine.record(Instant(number as u64), Box::new(lines.clone()));
        }
        machine.handle(Instant(number as u64), event, &mut Vec::new());
    }
    let written = lines.text();
    let changed = begun();
    for (number, text) in written.iter().enumerate().skip(1) {
        let mut line = read(number, text).expect("as written");
        if let Line::Gateway(Entry::Step(step)) = &mut line {
            change(number, &mut step.event);
        }
        changed.add(&line);
    }
    changed
}

#[test]
fn the_first_step_that_differs_is_shown_with_what_was_and_what_is() {
    assert!(replay(&gateway_recording(|_, _| {}).text()).1.is_ok());
    let changed = gateway_recording(|number, event| {
        if number == 4 {
            *event = gateway::Event::Cancelled { request: RequestId(2) };
        }
    });
    let (before, outcome) = replay(&changed.text());
    let Err(ReplayError::Different(difference)) = outcome else { panic!("it is another run") };
    assert_eq!((before, difference.machine, difference.line, difference.step), (4, "gateway", 5, 3));
    assert!(difference.event.contains("Cancelled"), "{difference:?}");
    assert!(difference.recorded[0].contains("Dispatch") && difference.replayed.is_empty(), "{difference:?}");
}

#[test]
fn lines_that_do_not_belong_together_are_refused() {
    let refusal = |lines: &[Line]| {
        let mut replay = Replay::default();
        // Lines have no copies: they are written and read.
        let mut text = Vec::new();
        let taken = lines.iter().try_for_each(|line| {
            text.clear();
            line.write(1, &mut text).expect("plain data");
            text.pop();
            replay.take(Line::read(1, &mut text).expect("as written"))
        });
        taken.expect_err("it is refused").to_string()
    };
    let header = |version| Line::Recording(Header { version, program: String::new() });
    let begin = || {
        let machine = Box::new(Worker::new(settings(GIBIBYTE, Parts::ALL), Instant::ZERO));
        Entry::Begin { now: Instant::ZERO, machine }.into()
    };
    let end = || Line::End(End { reason: String::new() });
    assert!(refusal(&[header(FORMAT_VERSION + 1)]).contains("use the version that made it"));
    assert!(refusal(&[end()]).contains("line 1"));
    assert!(refusal(&[header(FORMAT_VERSION), header(FORMAT_VERSION)]).contains("line 2"));
    assert!(refusal(&[header(FORMAT_VERSION), begin(), begin()]).contains("has begun already"));
    let step = gateway_recording(|_, _| {}).text();
    let step = read(2, &step[2]).expect("as written");
    assert!(refusal(&[header(FORMAT_VERSION), step]).contains("has not begun"));
}

/// Where numbers and truths stand in a text of JSON.
fn values(text: &str) -> Vec<(usize, usize)> {
    let bytes = text.as_bytes();
    let (mut found, mut place, mut in_text) = (Vec::new(), 0, false);
    while place < bytes.len() {
        match bytes[place] {
            b'"' => in_text = !in_text,
            b'0'..=b'9' | b'-' | b't' | b'f' | b'n' if !in_text => {
                let end = (place..bytes.len()).find(|end| b",}]".contains(&bytes[*end])).unwrap_or(bytes.len());
                found.push((place, end));
                place = end;
                continue;
            }
            _ => {}
        }
        place += 1;
    }
    found
}

/// The same with another number or truth somewhere.
fn forged(text: &str, random: &mut fastrand::Rng) -> String {
    let Some((from, to)) = random.choice(values(text)) else { return text.to_owned() };
    let old = &text[from..to];
    let new = match (old.parse::<u64>(), random.u8(..8)) {
        (_, 0) => "0".to_owned(),
        (_, 1) => u64::MAX.to_string(),
        (_, 2) => u32::MAX.to_string(),
        (_, 3) => "1e300".to_owned(),
        (_, 4) => "null".to_owned(),
        (Ok(number), 5) => (number / 2).to_string(),
        (Ok(number), 6) => number.saturating_add(1).to_string(),
        (Ok(number), _) => number.saturating_mul(1_000).to_string(),
        (Err(_), _) => if old == "true" { "false" } else { "true" }.to_owned(),
    };
    format!("{}{new}{}", &text[..from], &text[to..])
}

/// A recording of a few models' day, with what the gateway says of answers behind it, and how many lines are the worker's.
fn written() -> (Vec<String>, usize) {
    const FEW: &str = r#"
description = "a few models with a timer each"
slots = [4]
load_seconds = 5.0
run_seconds = 2.0
days = 1

[[group]]
models = 6
pattern = "periodic"
every_minutes = [120, 200]
jitter = 0.05
"#;
    let demand = Scenario::parse(FEW).expect("it makes sense").demand(1, None).expect("synthetic");
    let cost = Cost { bytes: GIBIBYTE, load: Duration::from_secs(5), run: Duration::from_secs(2) };
    let alone = Slowdown::default();
    let lines =
        recorded(&demand, settings(4 * GIBIBYTE, Parts::ALL), vec![cost; demand.models], alone, alone, |_| 10).text();
    let answers = demand.arrivals.len();
    (lines.iter().map(|line| plain(line)).collect(), lines.len() - answers)
}

fn plain(line: &[u8]) -> String {
    String::from_utf8(unsealed(line)).expect("JSON")
}

/// What comes of lines, whatever they say: whether they are replayed, and simulated as they were and by their own costs.
fn played(text: &[String], of_machine: usize) -> (bool, bool) {
    let lines = || text.iter().enumerate().map(|(number, line)| read(number, &sealed(number, line.as_bytes())));
    let mut replay = Replay::default();
    let taken = lines().take(of_machine).try_for_each(|line| replay.take(line.map_err(drop)?).map_err(drop));
    let observed = lines().try_fold(Observed::default(), |mut observed, line| {
        observed.take(line.map_err(drop)?).map_err(drop)?;
        Ok::<_, ()>(observed)
    });
    let simulated = observed.is_ok_and(|observed| {
        let costs = Costs::of(&observed, Profiles::new());
        let by_costs =
            costs.is_none_or(|costs| WhatIf { costs: Some(costs), ..WhatIf::default() }.run(&observed).is_ok());
        WhatIf::default().run(&observed).is_ok() && by_costs
    });
    (taken.is_ok() && replay.finish().is_ok(), simulated)
}

/// Somebody who knows how sums are made may write anything: no number of it brings the program down, or takes it for ever.
#[test]
fn whatever_a_forger_writes_is_replayed_simulated_or_refused() {
    let (worker, of_worker) = written();
    let gateway: Vec<String> = gateway_recording(|_, _| {}).text().iter().map(|line| plain(line)).collect();
    let (mut replayed, mut simulated, mut refused) = (0, 0, 0);
    for seed in 0..1_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut text, of_machine) =
            if seed % 4 == 0 { (gateway.clone(), gateway.len()) } else { (worker.clone(), of_worker) };
        for _ in 0..random.usize(1..4) {
            // Half of them in the machine as it was at the beginning: there is most to get wrong.
            let place = if random.bool() { 1 } else { random.usize(..text.len()) };
            text[place] = forged(&text[place], &mut random);
        }
        let fine = played(&text, of_machine);
        replayed += u32::from(fine.0);
        simulated += u32::from(fine.1);
        refused += u32::from(!fine.0);
    }
    assert!(replayed > 100 && simulated > 100 && refused > 100, "all are tried: {replayed}, {simulated}, {refused}");
}
