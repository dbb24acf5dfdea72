//! What callers of real servers saw of the same requests: read, checked against the scenario, and made into the recordings
//! that simulated runs have, so that the same code counts and prices both.

use super::{
    machine::Counts,
    record::{End, Memory, Record, Recording},
    report::{Project, Runs},
    world::Fleet,
};
use serde::Deserialize;
use std::time::Duration;
use warmset_core::{Bytes, Instant};

/// The arrangements that can be played, and what they are called then.
pub const LIVE: [(&str, &str); 2] = [("shared", "shared, live"), ("dedicated", "dedicated, live")];
/// A live run is over after so long.
const SECONDS_MAX: f64 = 1e7;
/// Why servers refuse, as far as it is told apart.
const REFUSALS: [&str; 12] = [
    "deadline_passed",
    "draining",
    "engine_lost",
    "insufficient_memory",
    "machine_lost",
    "model_load_failed",
    "model_loading",
    "model_not_found",
    "model_too_large",
    "no_machine",
    "no_worker",
    "queue_full",
];

/// Why a live run cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// It cannot be read.
    #[error("what was played live cannot be read")]
    Json(#[from] serde_json::Error),
    /// It is of something else.
    #[error("what was played live {0}")]
    Other(String),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Played {
    seed: u64,
    arrangements: Vec<PlayedArrangement>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlayedArrangement {
    arrangement: String,
    fleets: Vec<PlayedFleet>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlayedFleet {
    counts: Vec<Counts>,
    absences: Vec<Away>,
    memory: Vec<Held>,
    requests: Vec<Seen>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Away {
    machine: usize,
    from_seconds: f64,
    until_seconds: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Held {
    second: f64,
    machine: usize,
    model: usize,
    bytes: Bytes,
}

/// Times are from the moment at which the request was due.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Seen {
    number: usize,
    second: f64,
    model: usize,
    machine: Option<usize>,
    cold: bool,
    first_token_seconds: Option<f64>,
    end: Ended,
    refusal: Option<String>,
    ended_seconds: f64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Ended {
    Answered,
    Refused,
    Broken,
}

fn other(what: impl Into<String>) -> LiveError {
    LiveError::Other(what.into())
}

fn duration(seconds: f64) -> Result<Duration, LiveError> {
    let known = (0.0..=SECONDS_MAX).contains(&seconds);
    known.then(|| Duration::from_secs_f64(seconds)).ok_or_else(|| other(format!("has a time of {seconds} seconds")))
}

impl Seen {
    fn end(&self) -> End {
        match self.end {
            Ended::Answered => End::Answered,
            Ended::Broken => End::Broken,
            Ended::Refused => {
                let known = REFUSALS.into_iter().find(|name| Some(*name) == self.refusal.as_deref());
                End::Refused(known.unwrap_or("other"))
            }
        }
    }
}

impl Project<'_> {
    /// Reads what was played live of these requests: the fleets of each arrangement, and what came of them.
    pub fn read_live(&self, text: &str) -> Result<Vec<(&'static str, Runs)>, LiveError> {
        let played: Played = serde_json::from_str(text)?;
        if played.seed != self.seed() {
            return Err(other(format!("is of seed {0}, not {1}: give --seed {0}", played.seed, self.seed())));
        }
        let mut rows: Vec<(&'static str, Runs)> = Vec::new();
        for arrangement in &played.arrangements {
            let named = LIVE.into_iter().find(|(name, _)| *name == arrangement.arrangement);
            let Some((simulated, live)) = named.filter(|(_, live)| rows.iter().all(|(name, _)| name != live)) else {
                let name = &arrangement.arrangement;
                return Err(other(format!("has an arrangement {name:?}: there are shared and dedicated, each once")));
            };
            let fleets = if simulated == "shared" { vec![self.shared()] } else { self.dedicated() };
            if fleets.len() != arrangement.fleets.len() {
                let (found, wanted) = (arrangement.fleets.len(), fleets.len());
                return Err(other(format!("has {found} fleets as {simulated}, and the scenario {wanted}")));
            }
            let pairs = fleets.into_iter().zip(&arrangement.fleets);
            let runs: Result<Runs, LiveError> =
                pairs.map(|(fleet, played)| Ok((fleet.clone(), self.recording(&fleet, played)?))).collect();
            rows.push((live, runs?));
        }
        Ok(rows)
    }

    fn recording(&self, fleet: &Fleet, played: &PlayedFleet) -> Result<Recording, LiveError> {
        let teams = self.pool().team.len();
        let mut recording = Recording::new(self.demand(), teams);
        if played.counts.len() != teams {
            return Err(other(format!("has counts of {} teams, and the scenario has {teams}", played.counts.len())));
        }
        recording.add(&played.counts);
        let known = |machine: usize| match machine < fleet.machines() {
            true => Ok(machine),
            false => Err(other(format!("names machine {machine} of a fleet with {}", fleet.machines()))),
        };
        for away in &played.absences {
            let (from, until) = (duration(away.from_seconds)?, duration(away.until_seconds)?);
            recording.away(known(away.machine)?, Instant::after(from), until.saturating_sub(from));
        }
        for held in &played.memory {
            if held.model >= self.demand().models.len() {
                return Err(other(format!("names model {}, which the scenario does not have", held.model)));
            }
            let (at, machine) = (Instant::after(duration(held.second)?), known(held.machine)?);
            recording.memory.push(Memory { at, machine, model: held.model, bytes: held.bytes });
        }
        for seen in &played.requests {
            let machine = seen.machine.map(known).transpose()?;
            let record = Record { machine, ..self.record(fleet, seen)? };
            recording.records[seen.number] = record;
        }
        Ok(recording)
    }

    fn record(&self, fleet: &Fleet, seen: &Seen) -> Result<Record, LiveError> {
        let number = seen.number;
        let due = duration(seen.second)?;
        let asked = self.demand().requests.get(number).filter(|asked| {
            let apart = asked.at.since(Instant::after(due)).max(Instant::after(due).since(asked.at));
            asked.model == seen.model && apart < Duration::from_millis(1) && fleet.teams.contains(&asked.team)
        });
        let asked = asked.ok_or_else(|| {
            let what =
                format!("asks model {} as request {number}, {} seconds after the beginning", seen.model, seen.second);
            other(format!("{what}, and the scenario does not: it was played from another one"))
        })?;
        let after = |seconds: f64| Ok::<_, LiveError>(asked.at + duration(seconds)?);
        let (first_token, ended) = (seen.first_token_seconds.map(after).transpose()?, after(seen.ended_seconds)?);
        if first_token.is_some_and(|first| first > ended)
            || (first_token.is_none() && !matches!(seen.end, Ended::Refused))
        {
            return Err(other(format!("has an end of request {number} that does not go with its first token")));
        }
        Ok(Record { started: None, cold: seen.cold, first_token, end: seen.end(), ended: Some(ended), machine: None })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        report::Task,
        scenario::{Plan, Pool, SHIPPED},
    };
    use super::*;
    use serde_json::{Value, json};

    fn plan() -> Plan {
        let plan = Plan::parse(SHIPPED.1).expect("it is shipped");
        Plan { pool: Pool { hours: 0.2, ..plan.pool }, ..plan }
    }

    /// Everybody had a first token after a tenth of a second and an answer after one.
    fn played(project: &Project<'_>) -> Value {
        let asked = project.demand().requests.iter().enumerate();
        let seen = asked.map(|(number, request)| {
            let second = request.at.since(Instant::ZERO).as_secs_f64();
            json!({"number": number, "second": second, "model": request.model, "machine": 0, "cold": number == 0,
                   "first_token_seconds": 0.1, "end": "answered", "refusal": null, "ended_seconds": 1.0})
        });
        let counts = json!({"loads": 2, "failed_loads": 0, "evictions": 1, "preloads_used": 0, "preloads_wasted": 0, "parked": 0});
        json!({"seed": 1, "arrangements": [{"arrangement": "shared", "fleets": [{
            "counts": vec![counts; project.pool().team.len()],
            "absences": [{"machine": 1, "from_seconds": 60.0, "until_seconds": 90.0}],
            "memory": [{"second": 300.0, "machine": 4, "model": 0, "bytes": 16_000_000_000_u64}],
            "requests": seen.collect::<Vec<_>>(),
        }]}]})
    }

    #[test]
    fn what_was_played_live_is_counted_and_priced_as_what_is_simulated() {
        let plan = plan();
        let project = Project::new(&plan, 1);
        let live = project.read_live(&played(&project).to_string()).expect("it is whole");
        let shared = (Task::Shared(5), project.run(&Task::Shared(5)).expect("it holds"));
        let report = project.report(vec![shared], &live);
        let row = report.rows.iter().find(|row| row.arrangement == "shared, live").expect("it was played");
        let requests = project.demand().requests.len() as u64;
        assert_eq!((row.figures.requests, row.figures.answered), (requests, requests));
        assert_eq!((row.figures.first_token_p99_seconds, row.figures.answer_p50_seconds), (Some(0.1), Some(1.0)));
        assert_eq!(row.figures.cold_share, Some(1.0 / requests as f64));
        assert_eq!((row.counts.loads, row.counts.evictions, row.teams[0].counts.loads), (8, 4, 2));
        assert_eq!((row.cost, row.away[0].away_seconds), (5.0 * 0.2 * 2.5, 30.0));
        // The one model that was seen bears the cost of all machines.
        assert_eq!((row.teams[0].cost, row.teams[1].cost), (row.cost, 0.0));
        assert_eq!(report.compared.len(), 1 + plan.pool.team.len());
        let answered = report.compared[0].figures["answered"];
        assert_eq!(
            (answered.simulated, answered.live, answered.ratio),
            (Some(requests as f64), Some(requests as f64), Some(1.0))
        );
    }

    #[test]
    fn what_is_of_another_run_or_makes_no_sense_is_refused_by_its_name() {
        let plan = plan();
        let project = Project::new(&plan, 1);
        let fleet = "/arrangements/0/fleets/0";
        for (place, value, words) in [
            ("/seed".to_owned(), json!(2), "is of seed 2, not 1"),
            ("/arrangements/0/arrangement".to_owned(), json!("shard"), "shard"),
            ("/arrangements/0/arrangement".to_owned(), json!("dedicated"), "1 fleets as dedicated, and the scenario 4"),
            (format!("{fleet}/counts"), json!([]), "counts of 0 teams"),
            (format!("{fleet}/counts/0/loads"), json!(-1), "invalid value"),
            (format!("{fleet}/absences/0/machine"), json!(5), "machine 5 of a fleet with 5"),
            (format!("{fleet}/memory/0/model"), json!(99), "names model 99"),
            (format!("{fleet}/memory/0/second"), json!(-1.0), "a time of -1 seconds"),
            (format!("{fleet}/requests/0/model"), json!(18), "played from another one"),
            (format!("{fleet}/requests/0/second"), json!(0.5), "played from another one"),
            (format!("{fleet}/requests/0/number"), json!(1_000_000), "played from another one"),
            (format!("{fleet}/requests/0/end"), json!("lost"), "unknown variant"),
            (format!("{fleet}/requests/0/first_token_seconds"), json!(2.0), "does not go with its first token"),
            (format!("{fleet}/requests/0/first_token_seconds"), json!(null), "does not go with its first token"),
            (format!("{fleet}/requests/0/late"), json!(1), "unknown field"),
        ] {
            let mut played = played(&project);
            match played.pointer_mut(&place) {
                Some(there) => *there = value,
                None => played["arrangements"][0]["fleets"][0]["requests"][0]["late"] = value,
            }
            let error = project.read_live(&played.to_string()).map(|_| ()).expect_err(&place);
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            assert!(format!("{error}: {cause}").contains(words), "{place}: {error}: {cause}");
        }
    }

    #[test]
    fn a_refusal_that_nobody_knows_is_another_one() {
        let seen = |refusal: &str| Seen {
            number: 0,
            second: 0.0,
            model: 0,
            machine: None,
            cold: false,
            first_token_seconds: None,
            end: Ended::Refused,
            refusal: Some(refusal.to_owned()),
            ended_seconds: 0.0,
        };
        assert_eq!(seen("queue_full").end(), End::Refused("queue_full"));
        assert_eq!(seen("teapot").end(), End::Refused("other"));
    }
}
