//! One run: requests arrive, gateways that do not talk to each other choose, replicas compute.

use super::{
    policy::{Policy, Simple},
    replica::{Job, Replica, SLOTS},
};
use serde::{Deserialize, Serialize};
use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};
use warmset_core::{
    Instant,
    routing::{
        Ask, Ended, ModelKey, Outcome as End, PrefixBuilder, PrefixChain, ReplicaId, ReplicaSettings, Report, Router,
        Salt, Ticket, Usage,
    },
};

const MODEL: ModelKey = ModelKey(1);
const BYTES_PER_TOKEN: u32 = 4;
/// The longest answer.
const OUTPUT_TOKENS_MAX: f64 = 1024.0;
/// Time to the first token within which a request counts as served well.
const TARGET_SECONDS: f64 = 1.0;

/// The world of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// Tenants, each with a system prompt of its own.
    pub tenants: u32,
    /// Replicas.
    pub replicas: usize,
    /// Share of the traffic that one tenant has.
    pub hot_share: f64,
    /// How uneven the others are: 0 for alike, 1 for Zipf's law.
    pub skew: f64,
    /// System prompts that a replica keeps.
    pub prompts_per_replica: usize,
    /// What gateways believe of that, as a factor.
    pub believed_memory: f64,
    /// Requests per second, all gateways together.
    #[serde(skip)]
    pub requests_per_second: f64,
    /// Seconds that count, after those that do not.
    pub seconds: f64,
    /// Seconds before.
    pub warm_up_seconds: f64,
    /// Tokens of a system prompt.
    pub system_tokens: u32,
    /// Tokens of a question.
    pub question_tokens: u32,
    /// Tokens of an answer, on average.
    pub output_tokens: f64,
    /// Gateways.
    pub gateways: usize,
    /// How often gateways hear how much replicas have to do, if at all.
    pub load_reports_seconds: Option<f64>,
    /// Whether another tenant becomes the hot one half-way.
    pub hot_switch: bool,
    /// Whether a replica is lost half-way.
    pub lose_replica: bool,
    /// What chance follows from.
    #[serde(skip)]
    pub seed: u64,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            tenants: 200,
            replicas: 16,
            hot_share: 0.3,
            skew: 0.0,
            prompts_per_replica: 16,
            believed_memory: 1.0,
            requests_per_second: 24.0,
            seconds: 160.0,
            warm_up_seconds: 90.0,
            system_tokens: 4096,
            question_tokens: 256,
            output_tokens: 128.0,
            gateways: 1,
            load_reports_seconds: None,
            hot_switch: false,
            lose_replica: false,
            seed: 1,
        }
    }
}

/// What came of it.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// Share of requests whose system prompt was in memory.
    pub hit_share: f64,
    /// The same for all tenants but the hot one.
    pub cold_hit_share: f64,
    /// The most requests that a replica had on average, by the mean of all.
    pub max_to_mean_in_flight: f64,
    /// Share of requests with their first token within a second.
    pub within_target_share: f64,
    /// Time to the first token that half of the requests had.
    pub first_token_p50_seconds: f64,
    /// The same for 99 of 100.
    pub first_token_p99_seconds: f64,
    /// Requests counted.
    pub requests: usize,
}

enum Gateway {
    Router(Box<Router>),
    Simple(Simple),
}

struct Request {
    job: Job,
    gateway: usize,
    replica: usize,
    arrived: f64,
    ticket: Option<Ticket>,
    prefix: Option<PrefixChain>,
    hit: bool,
    first_token: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival,
    Step(usize),
    Lose(usize),
    Reports,
    Tick,
}

struct World<'a> {
    scenario: &'a Scenario,
    policy: &'a Policy,
    random: fastrand::Rng,
    replicas: Vec<Replica>,
    gateways: Vec<Gateway>,
    requests: Vec<Request>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    /// Shares of the tenants that are not hot, summed up.
    tenants: Vec<f64>,
    /// Requests at each replica, by time.
    load: Vec<f64>,
    load_at: Vec<f64>,
    now: f64,
}

/// Runs a scenario.
pub fn simulate(scenario: &Scenario, policy: &Policy) -> Outcome {
    let mut world = World::new(scenario, policy);
    let end = scenario.warm_up_seconds + scenario.seconds;
    while let Some(Reverse((at, event))) = world.events.pop() {
        world.now = at as f64 / 1e9;
        if world.now > end {
            break;
        }
        world.handle(event);
    }
    world.outcome(end)
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, policy: &'a Policy) -> Self {
        let weights = (1..scenario.tenants).map(|tenant| f64::from(tenant).powf(-scenario.skew));
        let tenants = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        let gateway = |number| match policy {
            Policy::Router(_) => Gateway::Router(Box::new(router(scenario, policy))),
            _ => Gateway::Simple(Simple::new(scenario.replicas, number * 5)),
        };
        let mut world = Self {
            scenario,
            policy,
            random: fastrand::Rng::with_seed(scenario.seed),
            replicas: (0..scenario.replicas).map(|_| Replica::new(scenario.prompts_per_replica)).collect(),
            gateways: (0..scenario.gateways).map(gateway).collect(),
            requests: Vec::new(),
            events: BinaryHeap::new(),
            tenants: tenants.collect(),
            load: vec![0.0; scenario.replicas],
            load_at: vec![0.0; scenario.replicas],
            now: 0.0,
        };
        world.at(0.0, Event::Arrival);
        world.at(0.0, Event::Tick);
        if scenario.lose_replica {
            world.at(scenario.warm_up_seconds + scenario.seconds / 2.0, Event::Lose(3 % scenario.replicas));
        }
        if scenario.load_reports_seconds.is_some() {
            world.at(0.0, Event::Reports);
        }
        world
    }

    fn at(&mut self, seconds: f64, event: Event) {
        self.events.push(Reverse(((seconds * 1e9) as u64, event)));
    }

    fn instant(&self) -> Instant {
        Instant::after(Duration::from_secs_f64(self.now))
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.random.f64()).ln() * mean
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival => self.arrival(),
            Event::Step(replica) => self.step(replica),
            Event::Lose(replica) => self.lose(replica),
            Event::Reports => self.report(),
            Event::Tick => self.tick(),
        }
    }

    fn arrival(&mut self) {
        let gap = self.exponential(1.0 / self.scenario.requests_per_second);
        self.at(self.now + gap, Event::Arrival);
        let half = self.scenario.warm_up_seconds + self.scenario.seconds / 2.0;
        let hot = u32::from(self.scenario.hot_switch && self.now > half);
        let tenant = if self.random.f64() < self.scenario.hot_share {
            hot
        } else {
            let wanted = self.random.f64() * self.tenants.last().copied().unwrap_or(1.0);
            1 + self.tenants.partition_point(|sum| *sum <= wanted).min(self.tenants.len() - 1) as u32
        };
        let number = self.requests.len();
        let output = self.exponential(self.scenario.output_tokens).clamp(1.0, OUTPUT_TOKENS_MAX);
        let Scenario { system_tokens, question_tokens, .. } = *self.scenario;
        let job = Job { number, tenant, system_tokens, question_tokens, output_tokens: output.ceil() as u32 };
        let gateway = self.random.usize(..self.scenario.gateways);
        let routed = matches!(self.policy, Policy::Router(_));
        let prefix = routed.then(|| prompt(self.scenario, tenant, number));
        self.requests.push(Request {
            job,
            gateway,
            replica: 0,
            arrived: self.now,
            ticket: None,
            prefix,
            hit: false,
            first_token: None,
        });
        self.send(number);
    }

    fn send(&mut self, number: usize) {
        let now = self.instant();
        let request = &mut self.requests[number];
        let replica = match &mut self.gateways[request.gateway] {
            Gateway::Simple(simple) => {
                let mut order: Vec<usize> = (0..self.replicas.len()).filter(|one| self.replicas[*one].up).collect();
                order.sort_by_key(|one| Reverse(hash(request.job.tenant, *one)));
                let replica = simple.choose(self.policy, &order).unwrap_or(0);
                simple.in_flight[replica] += 1;
                replica
            }
            Gateway::Router(router) => {
                let Some(prefix) = &request.prefix else { return };
                let tenant = u64::from(request.job.tenant);
                let ask = Ask { model: MODEL, prefix, tenant, streamed: true, excluded: None };
                let Ok(decision) = router.decide(now, &ask) else { return };
                request.ticket = Some(decision.ticket);
                decision.replica.0 as usize
            }
        };
        request.replica = replica;
        let job = request.job;
        self.count(replica);
        self.replicas[replica].push(job);
        if !self.replicas[replica].stepping {
            self.at(self.now, Event::Step(replica));
        }
    }

    /// Counts what a replica has had to do up to now.
    fn count(&mut self, replica: usize) {
        let since = self.load_at[replica].max(self.scenario.warm_up_seconds);
        self.load[replica] += self.replicas[replica].requests() as f64 * (self.now - since).max(0.0);
        self.load_at[replica] = self.now;
    }

    /// One step of a replica is over, and the next one begins.
    fn step(&mut self, number: usize) {
        if !self.replicas[number].up {
            return;
        }
        self.count(number);
        let done = self.replicas[number].end_step();
        for request in done.first_tokens {
            self.requests[request].first_token = Some(self.now);
            self.tell(request, |router, now, ticket, _| router.first_token(now, ticket));
        }
        for request in done.finished {
            self.finished(request);
        }
        let Some(seconds) = self.replicas[number].begin_step() else { return };
        for (request, hit) in core::mem::take(&mut self.replicas[number].step.begun) {
            self.requests[request].hit = hit;
        }
        self.at(self.now + seconds, Event::Step(number));
    }

    fn tell(&mut self, number: usize, what: impl FnOnce(&mut Router, Instant, Ticket, &Request)) {
        let now = self.instant();
        let request = &self.requests[number];
        match &mut self.gateways[request.gateway] {
            Gateway::Router(router) => {
                if let Some(ticket) = request.ticket {
                    what(router, now, ticket, request);
                }
            }
            Gateway::Simple(_) => {}
        }
    }

    fn finished(&mut self, number: usize) {
        let Scenario { system_tokens, question_tokens, .. } = *self.scenario;
        self.tell(number, |router, now, ticket, request| {
            let cached = if request.hit { u64::from(system_tokens) } else { 0 };
            let prompt_tokens = u64::from(system_tokens + question_tokens);
            let usage = Some(Usage { prompt_tokens, cached_tokens: Some(cached) });
            let outcome = End::Finished;
            router.ended(now, ticket, Ended { outcome, output_started: true, retried: false, usage });
        });
        let Request { gateway, replica, .. } = self.requests[number];
        if let Gateway::Simple(simple) = &mut self.gateways[gateway] {
            simple.in_flight[replica] -= 1;
        }
        // What the router needed of it is not needed any more.
        self.requests[number].prefix = None;
    }

    fn lose(&mut self, replica: usize) {
        self.count(replica);
        let lost = self.replicas[replica].lose();
        for gateway in &mut self.gateways {
            match gateway {
                Gateway::Router(router) => router.remove(ReplicaId(replica as u32)),
                Gateway::Simple(simple) => simple.in_flight[replica] = 0,
            }
        }
        for job in lost {
            self.tell(job.number, |router, now, ticket, _| {
                let ended = Ended { outcome: End::Failed, output_started: false, retried: false, usage: None };
                router.ended(now, ticket, ended);
            });
            self.send(job.number);
        }
    }

    fn tick(&mut self) {
        let now = self.instant();
        for gateway in &mut self.gateways {
            if let Gateway::Router(router) = gateway {
                router.tick(now);
            }
        }
        self.at(self.now + 1.0, Event::Tick);
    }

    fn report(&mut self) {
        let now = self.instant();
        for (number, replica) in self.replicas.iter().enumerate() {
            let report = Report::Load { requests: replica.requests() as u32 };
            for gateway in &mut self.gateways {
                if let Gateway::Router(router) = gateway {
                    router.reported(now, ReplicaId(number as u32), report);
                }
            }
        }
        if let Some(seconds) = self.scenario.load_reports_seconds {
            self.at(self.now + seconds, Event::Reports);
        }
    }

    fn outcome(mut self, end: f64) -> Outcome {
        self.now = end;
        for replica in 0..self.replicas.len() {
            self.count(replica);
        }
        let hot = |request: &Request| request.job.tenant == 0;
        let counted = || self.requests.iter().filter(|request| request.arrived > self.scenario.warm_up_seconds);
        // Whoever still waits has waited until now: else overload would look well.
        let wait = |request: &Request| request.first_token.unwrap_or(end + 1.0) - request.arrived;
        let mut waits: Vec<f64> = counted().map(wait).collect();
        waits.sort_by(f64::total_cmp);
        let percentile = |share: f64| waits.get((waits.len() as f64 * share) as usize).copied().unwrap_or(0.0);
        let share = |of: usize, all: usize| of as f64 / all.max(1) as f64;
        let begun = || counted().filter(|request| request.first_token.is_some());
        let cold = || begun().filter(|request| !hot(request));
        let loads: Vec<f64> =
            self.load.iter().zip(&self.replicas).filter(|(_, replica)| replica.up).map(|(load, _)| *load).collect();
        let mean = loads.iter().sum::<f64>() / loads.len() as f64;
        Outcome {
            hit_share: share(begun().filter(|request| request.hit).count(), begun().count()),
            cold_hit_share: share(cold().filter(|request| request.hit).count(), cold().count()),
            max_to_mean_in_flight: loads.iter().copied().fold(0.0, f64::max) / mean,
            within_target_share: share(waits.partition_point(|wait| *wait <= TARGET_SECONDS), waits.len()),
            first_token_p50_seconds: percentile(0.5),
            first_token_p99_seconds: percentile(0.99),
            requests: waits.len(),
        }
    }
}

fn hash(tenant: u32, replica: usize) -> u64 {
    let mut random = fastrand::Rng::with_seed((u64::from(tenant) << 32) | replica as u64);
    random.u64(..);
    random.u64(..)
}

/// A tenant's system prompt and a question that nobody else asks.
fn prompt(scenario: &Scenario, tenant: u32, number: usize) -> PrefixChain {
    let words = |seed: u64, tokens: u32| seed.to_le_bytes().repeat((tokens * BYTES_PER_TOKEN / 8) as usize);
    let mut builder = PrefixBuilder::new(Salt::new(b"simulated", b"model"));
    builder.push(&words(u64::from(tenant), scenario.system_tokens));
    builder.boundary();
    builder.push(&words((1 << 40) | number as u64, scenario.question_tokens));
    builder.boundary();
    builder.finish()
}

fn router(scenario: &Scenario, policy: &Policy) -> Router {
    let Policy::Router(settings) = policy else { return Router::new(Default::default()) };
    let mut router = Router::new(settings.clone());
    let tokens = scenario.prompts_per_replica as f64 * f64::from(scenario.system_tokens + scenario.question_tokens);
    for number in 0..scenario.replicas {
        router.add(
            ReplicaId(number as u32),
            ReplicaSettings {
                identity: hash(u32::MAX, number),
                models: vec![MODEL],
                slots: SLOTS,
                weight: 1.0,
                capacity_tokens: Some((tokens * scenario.believed_memory) as u64),
                prefill_tokens_per_second: None,
            },
        );
    }
    router
}
