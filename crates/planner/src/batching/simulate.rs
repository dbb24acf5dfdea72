//! Replicas behind a rule that spreads requests, until all is done or the time is over.
//!
//! What happens at the same instant: steps end, then requests come, then replicas that have had nothing to do begin; so
//! a step takes in all that came at its beginning. Replicas with the same time go in the order of their numbers.

use super::{
    cost::{Picoseconds, StepCost, TIME_MAX},
    engine::{Engine, EngineSettings},
    outcome::Outcomes,
    service::{Discipline, Service},
    soonest::{NEVER, Soonest},
    workload::Workload,
};
use serde::{Deserialize, Serialize};

/// How closely engines are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Every step.
    Step,
    /// Whole requests.
    Request,
}

/// Which replica a request goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routing {
    /// One after the other.
    #[default]
    RoundRobin,
    /// The one with the fewest requests.
    LeastRequests,
    /// Always the same one for prompts that begin alike; others one after the other.
    FirstChunk,
}

/// Replicas that are alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fleet {
    /// How many.
    pub replicas: usize,
    /// Which of them a request goes to.
    pub routing: Routing,
    /// What each is told.
    pub engine: EngineSettings,
    /// How long its steps take.
    pub cost: StepCost,
    /// How requests get in each other's way where steps are not looked at.
    pub discipline: Discipline,
}

#[derive(Debug)]
enum Replica {
    Step(Box<Engine>),
    Request(Box<Service>),
}

impl Replica {
    fn requests(&self) -> usize {
        match self {
            Self::Step(engine) => engine.requests(),
            Self::Request(service) => service.requests(),
        }
    }

    /// When something happens there next. Times count double: what begins does so after what comes at that instant.
    fn key(&self) -> u64 {
        let ends = match self {
            Self::Step(engine) => engine.ends(),
            Self::Request(service) => service.ends(),
        };
        ends.map_or(NEVER, |ends| 2 * ends)
    }

    fn push(&mut self, now: Picoseconds, request: u32, workload: &Workload, outcomes: &mut Outcomes) -> u64 {
        match self {
            Self::Step(engine) => {
                engine.push(now, request);
                engine.ends().map_or(2 * now + 1, |ends| 2 * ends)
            }
            Self::Request(service) => {
                service.push(now, request, workload, outcomes);
                self.key()
            }
        }
    }

    fn advance(&mut self, now: Picoseconds, workload: &Workload, outcomes: &mut Outcomes) -> u64 {
        match self {
            Self::Step(engine) => {
                engine.end(workload, outcomes);
                engine.begin(now, workload, outcomes);
            }
            Self::Request(service) => service.end(now, workload, outcomes),
        }
        self.key()
    }

    fn check(&self, workload: &Workload) -> bool {
        match self {
            Self::Step(engine) => engine.check(),
            Self::Request(service) => service.check(workload),
        }
    }
}

/// A run.
#[derive(Debug)]
pub struct Simulation<'a> {
    workload: &'a Workload,
    fleet: Fleet,
    replicas: Vec<Replica>,
    times: Soonest,
    loads: Soonest,
    turn: usize,
    arrived: usize,
    outcomes: Outcomes,
}

impl<'a> Simulation<'a> {
    /// One in which nothing has happened.
    pub fn new(workload: &'a Workload, fleet: &Fleet, level: Level) -> Self {
        let replica = |_| match level {
            Level::Step => Replica::Step(Box::new(Engine::new(fleet.engine, fleet.cost, workload.chunk_tokens()))),
            Level::Request => Replica::Request(Box::new(Service::new(fleet.engine, fleet.cost, fleet.discipline))),
        };
        Self {
            workload,
            fleet: *fleet,
            replicas: (0..fleet.replicas).map(replica).collect(),
            times: Soonest::new(fleet.replicas, NEVER),
            loads: Soonest::new(fleet.replicas, 0),
            turn: 0,
            arrived: 0,
            outcomes: Outcomes::new(workload.requests().len()),
        }
    }

    /// The next thing happens, if it does so by `until`; false if nothing does.
    pub fn advance(&mut self, until: Picoseconds) -> bool {
        let (key, number) = self.times.first();
        if let Some(request) = self.workload.requests().get(self.arrived)
            && 2 * request.arrives < key
        {
            if request.arrives > until {
                return false;
            }
            self.arrive(request.arrives);
            return true;
        }
        if key == NEVER || key / 2 > until {
            return false;
        }
        let replica = &mut self.replicas[number];
        let key = replica.advance(key / 2, self.workload, &mut self.outcomes);
        let load = replica.requests() as u64;
        self.times.set(number, key);
        self.load(number, load);
        true
    }

    fn load(&mut self, number: usize, requests: u64) {
        if self.fleet.routing == Routing::LeastRequests && self.loads.key(number) != requests {
            self.loads.set(number, requests);
        }
    }

    fn arrive(&mut self, now: Picoseconds) {
        let number = self.arrived as u32;
        self.arrived += 1;
        let request = self.workload.request(number);
        if !self.fleet.engine.fits(request.prompt_tokens, request.output_tokens) {
            self.outcomes.request(number).refused = true;
            return;
        }
        let chosen = self.choose(number);
        let replica = &mut self.replicas[chosen];
        let key = replica.push(now, number, self.workload, &mut self.outcomes);
        let load = replica.requests() as u64;
        self.times.set(chosen, key);
        self.load(chosen, load);
    }

    fn choose(&mut self, number: u32) -> usize {
        let first = self.workload.chunks(number).first();
        match (self.fleet.routing, first) {
            (Routing::LeastRequests, _) => self.loads.first().1,
            // A number that says nothing of the order in which chunks were first seen.
            (Routing::FirstChunk, Some(chunk)) => {
                fastrand::Rng::with_seed(u64::from(*chunk)).usize(..self.fleet.replicas)
            }
            (Routing::RoundRobin | Routing::FirstChunk, _) => {
                let chosen = self.turn;
                self.turn = (self.turn + 1) % self.fleet.replicas;
                chosen
            }
        }
    }

    /// Whether every replica's memory adds up, and every request that came is waiting, running, done or refused.
    pub fn check(&self) -> bool {
        let over = self.outcomes.requests.iter().filter(|one| one.refused || one.finished <= TIME_MAX).count();
        let held: usize = self.replicas.iter().map(Replica::requests).sum();
        over + held == self.arrived && self.replicas.iter().all(|replica| replica.check(self.workload))
    }

    /// What came of it.
    pub fn finish(self) -> Outcomes {
        self.outcomes
    }
}

/// A whole run, up to a time.
pub fn simulate(workload: &Workload, fleet: &Fleet, level: Level, until: Picoseconds) -> Outcomes {
    let mut simulation = Simulation::new(workload, fleet, level);
    while simulation.advance(until) {}
    simulation.finish()
}
