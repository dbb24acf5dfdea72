//! The usual way: some models are pinned, of the rest the one that was used longest ago leaves if nobody is using it; one
//! loader takes models in the order in which they were first asked for, and who asks for one on its way waits for that load.

use crate::events::{EventQueue, Rank};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};
use warmset_core::Instant;

/// The world of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct World {
    /// Models that fit.
    pub slots: usize,
    /// The first so many models are there from the beginning and stay.
    pub pinned: usize,
    /// How long a load takes.
    pub fetch: Duration,
    /// How long a request runs, however many others do.
    pub service: Duration,
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Requests that found their model ready.
    pub hits: u64,
    /// From arrival to the end, of each request, in the order in which they ended.
    pub seconds: Vec<f64>,
    /// Loads.
    pub loads: u64,
    /// When the last request ended.
    pub end: Instant,
}

enum Event {
    Arrival { model: usize },
    Loaded { model: usize },
    Done { model: usize },
}

struct Resident {
    used: Instant,
    running: u32,
}

struct Run<'a> {
    world: &'a World,
    now: Instant,
    queue: EventQueue<Event>,
    residents: BTreeMap<usize, Resident>,
    /// Models to load, in order; the first one may be on its way.
    wanted: VecDeque<usize>,
    is_loading: bool,
    waiting: BTreeMap<usize, Vec<Instant>>,
    outcome: Outcome,
}

/// Plays requests, each a time and a model.
pub fn play(world: &World, requests: &[(Instant, usize)]) -> Outcome {
    let pinned = (0..world.pinned.min(world.slots)).map(|model| (model, Resident { used: Instant::ZERO, running: 0 }));
    let mut run = Run {
        world,
        now: Instant::ZERO,
        queue: EventQueue::default(),
        residents: pinned.collect(),
        wanted: VecDeque::new(),
        is_loading: false,
        waiting: BTreeMap::new(),
        outcome: Outcome::default(),
    };
    for (at, model) in requests {
        run.queue.push(*at, Rank::Arrival, Event::Arrival { model: *model });
    }
    while let Some((at, event)) = run.queue.pop() {
        run.now = at;
        match event {
            Event::Arrival { model } => run.arrival(model),
            Event::Loaded { model } => run.loaded(model),
            Event::Done { model } => {
                if let Some(resident) = run.residents.get_mut(&model) {
                    resident.running -= 1;
                }
                run.outcome.end = at;
            }
        }
        run.load_next();
    }
    run.outcome
}

impl Run<'_> {
    fn arrival(&mut self, model: usize) {
        if self.residents.contains_key(&model) {
            self.outcome.hits += 1;
            self.serve(model, self.now);
            return;
        }
        let waiting = self.waiting.entry(model).or_default();
        if waiting.is_empty() {
            self.wanted.push_back(model);
        }
        waiting.push(self.now);
    }

    fn serve(&mut self, model: usize, arrived: Instant) {
        let Some(resident) = self.residents.get_mut(&model) else { return };
        (resident.used, resident.running) = (self.now, resident.running + 1);
        let done = self.now + self.world.service;
        self.outcome.seconds.push(done.since(arrived).as_secs_f64());
        self.queue.push(done, Rank::Completion, Event::Done { model });
    }

    fn loaded(&mut self, model: usize) {
        self.is_loading = false;
        self.wanted.pop_front();
        self.residents.insert(model, Resident { used: self.now, running: 0 });
        for arrived in self.waiting.remove(&model).unwrap_or_default() {
            self.serve(model, arrived);
        }
    }

    fn load_next(&mut self) {
        let Some(model) = self.wanted.front().copied().filter(|_| !self.is_loading) else { return };
        if self.residents.len() >= self.world.slots {
            let pinned = self.world.pinned;
            let idle = self.residents.iter().filter(|(model, resident)| **model >= pinned && resident.running == 0);
            let Some(victim) = idle.min_by_key(|(model, resident)| (resident.used, **model)).map(|(model, _)| *model)
            else {
                return;
            };
            self.residents.remove(&victim);
        }
        self.is_loading = true;
        self.outcome.loads += 1;
        self.queue.push(self.now + self.world.fetch, Rank::Completion, Event::Loaded { model });
    }
}
