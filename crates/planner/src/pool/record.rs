//! What is noted of a run: of each request when what happened to it, and who held which memory.

use super::{
    demand::Demand,
    machine::{Counts, Promoted},
};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{Bytes, Instant};

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It has not.
    Unfinished,
    /// With a complete answer.
    Answered,
    /// With a refusal of this name.
    Refused(&'static str),
    /// Its answer broke off.
    Broken,
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Record {
    /// When an engine began it.
    pub started: Option<Instant>,
    /// Whether its model was not ready when it came.
    pub cold: bool,
    /// When its first token came.
    pub first_token: Option<Instant>,
    /// How it ended.
    pub end: End,
    /// When.
    pub ended: Option<Instant>,
    /// The machine that it was sent to last.
    pub machine: Option<usize>,
}

/// What a model held on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// When.
    pub at: Instant,
    /// Where.
    pub machine: usize,
    /// Which, counted over all teams.
    pub model: usize,
    /// How many.
    pub bytes: Bytes,
}

/// A time in which a machine was not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absence {
    /// Which.
    pub machine: usize,
    /// From when on.
    pub from: Instant,
    /// Until when.
    pub until: Instant,
}

/// Weights that a machine fetched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fetched {
    /// Which machine.
    pub machine: usize,
    /// How many.
    pub bytes: Bytes,
    /// When they were there.
    pub at: Instant,
    /// How long that took.
    pub seconds: f64,
}

/// A promotion on one machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Promotion {
    /// Which.
    pub machine: usize,
    /// When the name changed its meaning, or it was clear that it does not.
    pub ended: Instant,
    /// What came of it.
    pub promoted: Promoted,
}

/// All of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// By the number of the request.
    pub records: Vec<Record>,
    /// In the order of time.
    pub memory: Vec<Memory>,
    /// Times without a machine.
    pub absences: Vec<Absence>,
    /// What happened how often to the models of each team.
    pub counts: Vec<Counts>,
    /// Events that were played.
    pub events: u64,
    /// A request that ended more than once: there must be none.
    pub(super) ended_again: Option<usize>,
    /// Weights that were fetched, in the order of their arrival.
    pub fetches: Vec<Fetched>,
    /// Promotions that came to an end, in its order.
    pub promotions: Vec<Promotion>,
    /// Requests that entered in another region than their caller's.
    pub failovers: u64,
    /// When machines had left in good order.
    pub departures: BTreeMap<usize, Instant>,
}

impl Recording {
    pub(super) fn new(demand: &Demand, teams: usize) -> Self {
        let record =
            Record { started: None, cold: false, first_token: None, end: End::Unfinished, ended: None, machine: None };
        Self {
            records: vec![record; demand.requests.len()],
            memory: Vec::new(),
            absences: Vec::new(),
            counts: vec![Counts::default(); teams],
            events: 0,
            ended_again: None,
            fetches: Vec::new(),
            promotions: Vec::new(),
            failovers: 0,
            departures: BTreeMap::new(),
        }
    }

    /// What happened in one life of a machine.
    pub(super) fn add(&mut self, counts: &[Counts]) {
        self.counts.iter_mut().zip(counts).for_each(|(all, more)| all.add(more));
    }

    /// What happened to the models of all teams.
    pub(super) fn all_counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.counts.iter().for_each(|team| counts.add(team));
        counts
    }

    pub(super) fn sent(&mut self, number: usize, machine: usize) {
        self.records[number].machine = Some(machine);
    }

    pub(super) fn started(&mut self, number: usize, now: Instant, cold: bool) {
        let record = &mut self.records[number];
        record.started = Some(now);
        record.cold |= cold;
    }

    pub(super) fn first_token(&mut self, number: usize, now: Instant) {
        self.records[number].first_token.get_or_insert(now);
    }

    /// Whether its caller has got any of its answer.
    pub(super) fn has_begun(&self, number: usize) -> bool {
        self.records[number].first_token.is_some()
    }

    pub(super) fn end(&mut self, number: usize, now: Instant, end: End) {
        let record = &mut self.records[number];
        if record.end == End::Unfinished {
            (record.end, record.ended) = (end, Some(now));
        } else {
            self.ended_again.get_or_insert(number);
        }
    }

    pub(super) fn away(&mut self, machine: usize, now: Instant, away: Duration) {
        self.absences.push(Absence { machine, from: now, until: now + away });
    }
}
