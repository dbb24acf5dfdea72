//! Several machines behind `core::Router`, as `warmset gateway` has them, on one virtual clock.

mod moves;
mod regions;
mod rollouts;

use super::{
    course::Course,
    demand::{Demand, Request},
    links::Link,
    machine::{Machine, Notice, Start, model_of},
    placement::place,
    record::{End, Memory, Recording},
    scenario::{Lost, Pool},
};
use crate::events::{EventQueue, Rank};
use regions::REGION_LOST;
use rollouts::Progress;
use std::{collections::BTreeSet, time::Duration};
use warmset_core::{
    Digest, Instant, RequestId,
    gateway::Refusal,
    routing::{
        Ask, Ended, ModelKey, Outcome, ReplicaId, ReplicaSettings, Report, Router, Settings, Ticket, Usage, Verdict,
    },
    worker::{self, Recollection, Rejection, StartKind},
};

/// How often the router hears that time passes, and looks after machines that do not answer.
const TICK: Duration = Duration::from_secs(1);
/// How long the run goes on after the last request came.
const DRAIN: Duration = Duration::from_secs(600);
/// A stream's head is sent after this at the latest: from then on nobody else can answer.
const STREAM_GRACE: Duration = Duration::from_millis(200);
/// A run has few prompts: less is remembered than by a gateway that nobody says otherwise.
const MIRROR_BYTES: usize = 8 << 20;
const GROUPS_MAX: usize = 1_024;
/// What the router takes a machine to run at once, which says nothing of that.
const SLOTS: u32 = 64;

/// One fleet: machines and who uses them. More than one have a router in front.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    /// The teams whose requests they get.
    pub teams: Vec<usize>,
    /// Machines that are lost, by their number here.
    pub lost: Vec<Lost>,
    /// The models that each machine serves.
    pub models: Vec<Vec<usize>>,
    /// What of it changes.
    pub course: Course,
}

impl Fleet {
    /// So many machines for these teams, each model on as many of them as its team says, or on all.
    pub fn new(pool: &Pool, demand: &Demand, (teams, machines): (Vec<usize>, usize), lost: Vec<Lost>) -> Self {
        let models = place(pool, demand, &teams, machines);
        Self { teams, lost, models, course: Course::default() }
    }

    /// How many machines, those that are not always there included.
    pub fn machines(&self) -> usize {
        self.models.len()
    }
}

enum Event {
    Arrival(usize),
    Enter { number: usize, region: usize },
    Machine { machine: usize, life: u32, event: Box<worker::Event> },
    Wake { machine: usize },
    Lose { machine: usize, away: Duration },
    LoseRegion { region: usize, away: Duration },
    Return { machine: usize },
    Look { machine: usize },
    Join { machine: usize },
    Leave { machine: usize },
    LinkDue,
    Promote { rollout: usize, machine: usize },
    Tick,
    Sample,
}

/// A place for a machine, which is there or not.
struct Place<'a> {
    machine: Option<Machine<'a>>,
    life: u32,
    /// The one wake that counts.
    wake_at: Option<Instant>,
    open: BTreeSet<usize>,
    remembered: Vec<Recollection>,
    lost_at: Instant,
    /// Models whose weights are not there.
    lacks: BTreeSet<Digest>,
    /// It gets nothing new.
    leaving: bool,
    /// Models whose name stands for the new version.
    switched: BTreeSet<usize>,
}

/// A request that has not ended.
#[derive(Clone, Copy)]
struct Way {
    machine: usize,
    ticket: Option<Ticket>,
    sent_at: Instant,
    retried: bool,
}

/// A run.
pub(super) struct World<'a> {
    pool: &'a Pool,
    demand: &'a Demand,
    fleet: &'a Fleet,
    seed: u64,
    now: Instant,
    /// One for each region.
    routers: Vec<Router>,
    /// Until when regions are lost.
    down_until: Vec<Instant>,
    places: Vec<Place<'a>>,
    queue: EventQueue<Event>,
    ways: Vec<Option<Way>>,
    recording: Recording,
    /// What gives weights to those who lack them, for each region from its own and from others; and the one moment to look at
    /// them that counts.
    links: Vec<Link>,
    link_due_at: Option<Instant>,
    /// Where each rollout of the course is.
    rollouts: Vec<Progress>,
    /// Whether every invariant is checked after every event.
    checked: bool,
}

/// Plays a whole demand to a fleet. Every invariant of every machine is checked at the end, and after every event if that is
/// asked for.
pub fn play(pool: &Pool, demand: &Demand, fleet: &Fleet, seed: u64, checked: bool) -> Result<Recording, String> {
    let mut world = World::new(pool, demand, fleet, seed, checked);
    let end = Instant::after(Duration::from_secs_f64(pool.hours * 3_600.0)) + DRAIN;
    while world.queue.next().is_some_and(|(at, _)| at <= end) {
        let Some((at, event)) = world.queue.pop() else { break };
        world.now = at;
        world.recording.events += 1;
        world.handle(event);
        if world.checked {
            world.check()?;
        }
    }
    world.now = end;
    world.check()?;
    for machine in world.places.iter().filter_map(|place| place.machine.as_ref()) {
        world.recording.add(&machine.counts);
    }
    Ok(world.recording)
}

impl<'a> World<'a> {
    fn new(pool: &'a Pool, demand: &'a Demand, fleet: &'a Fleet, seed: u64, checked: bool) -> Self {
        let regions = pool.region.len().max(1);
        let settings = Settings { mirror_bytes: MIRROR_BYTES, groups_max: GROUPS_MAX, ..Settings::default() };
        let mut world = Self {
            pool,
            demand,
            fleet,
            seed,
            now: Instant::ZERO,
            routers: (0..regions).map(|_| Router::new(settings.clone())).collect(),
            down_until: vec![Instant::ZERO; regions],
            places: Vec::new(),
            queue: EventQueue::default(),
            ways: vec![None; demand.requests.len()],
            recording: Recording::new(demand, pool.team.len()),
            links: Vec::new(),
            link_due_at: None,
            rollouts: Vec::new(),
            checked,
        };
        for machine in 0..fleet.machines() {
            let lacks = world.lacked_at_first(machine);
            world.places.push(Place {
                machine: None,
                life: 0,
                wake_at: None,
                open: BTreeSet::new(),
                remembered: Vec::new(),
                lost_at: Instant::ZERO,
                lacks,
                leaving: false,
                switched: BTreeSet::new(),
            });
            if !fleet.course.stays.contains_key(&machine) {
                world.start(machine);
                world.enter(machine);
            }
        }
        world.plan_stays();
        world.plan_rollouts();
        world.plan_regions();
        for (number, request) in demand.requests.iter().enumerate() {
            if fleet.teams.contains(&request.team) {
                world.queue.push(request.at, Rank::Arrival, Event::Arrival(number));
            }
        }
        for lost in fleet.lost.iter().filter(|lost| lost.machine < fleet.machines()) {
            let at = Instant::after(Duration::from_secs_f64(lost.at_hours * 3_600.0));
            let away = Duration::from_secs_f64(lost.away_seconds);
            world.queue.push(at, Rank::Completion, Event::Lose { machine: lost.machine, away });
        }
        if fleet.machines() > 1 {
            world.queue.push(Instant::ZERO, Rank::Timer, Event::Tick);
        }
        world.queue.push(Instant::ZERO, Rank::Timer, Event::Sample);
        world
    }

    /// The router learns of a machine and what it serves.
    fn enter(&mut self, machine: usize) {
        let settings = ReplicaSettings {
            identity: fastrand::Rng::with_seed(machine as u64).u64(..),
            models: self.fleet.models[machine].iter().map(|model| key_of(*model)).collect(),
            slots: SLOTS,
            weight: 1.0,
            capacity_tokens: None,
            prefill_tokens_per_second: None,
        };
        self.router_of(machine).add(ReplicaId(machine as u32), settings);
    }

    fn start(&mut self, number: usize) {
        let place = &mut self.places[number];
        place.life += 1;
        let seed = self.seed ^ ((number as u64) << 32) ^ u64::from(place.life);
        let models = &self.fleet.models[number];
        let start = Start { models, lacks: place.lacks.clone(), switched: &place.switched };
        let mut machine = Machine::new(self.pool, self.demand, start, self.now, seed);
        let away = self.now.since(place.lost_at);
        let mut models = core::mem::take(&mut place.remembered);
        models.iter_mut().for_each(|model| model.age += away);
        machine.remember(self.now, models);
        place.machine = Some(machine);
        self.after(number);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival(number) => self.arrive(number),
            Event::Enter { number, region } => self.enter_region(number, region),
            Event::Machine { machine, life, event } => {
                let now = self.now;
                let place = &mut self.places[machine];
                if let Some(there) = place.machine.as_mut().filter(|_| place.life == life) {
                    there.happen(now, *event);
                    self.after(machine);
                }
            }
            Event::Wake { machine } => {
                let now = self.now;
                let place = &mut self.places[machine];
                // Another one was wanted since.
                if place.wake_at == Some(now) {
                    place.wake_at = None;
                    if let Some(there) = &mut place.machine {
                        there.wake(now);
                        self.after(machine);
                    }
                }
            }
            Event::Lose { machine, away } => self.lose(machine, away),
            Event::LoseRegion { region, away } => self.lose_region(region, away),
            Event::Return { machine } if self.recording.departures.contains_key(&machine) => {}
            Event::Return { machine } => {
                if !self.waits_for_region(machine, |machine| Event::Return { machine }) {
                    self.start(machine);
                }
            }
            Event::Join { machine } => self.join(machine),
            Event::Leave { machine } => self.begin_leaving(machine),
            Event::LinkDue => self.link_due(),
            Event::Promote { rollout, machine } => self.promote(rollout, machine),
            Event::Look { machine } => self.look(machine),
            Event::Tick => {
                self.routers.iter_mut().for_each(|router| router.tick(self.now));
                self.queue.push(self.now + TICK, Rank::Timer, Event::Tick);
            }
            Event::Sample => self.sample(),
        }
    }

    /// Sends a request to where the router of a region says.
    fn send(&mut self, number: usize, region: usize, failed: Option<ReplicaId>) {
        let Some(request) = self.demand.requests.get(number) else { return };
        let Some((machine, ticket)) = self.route(request, region, failed) else {
            // Nobody else can answer: what the first one said stands.
            let end = if failed.is_some() { End::Refused("machine_lost") } else { End::Refused("no_machine") };
            return self.recording.end(number, self.now, end);
        };
        let way = Way { machine, ticket, sent_at: self.now, retried: failed.is_some() };
        self.ways[number] = Some(way);
        self.recording.sent(number, machine);
        let now = self.now;
        let place = &mut self.places[machine];
        place.open.insert(number);
        match &mut place.machine {
            Some(there) => {
                there.arrive(now, RequestId(number as u64), request);
                self.after(machine);
            }
            None => self.lost(number),
        }
    }

    fn route(
        &mut self,
        request: &Request,
        region: usize,
        failed: Option<ReplicaId>,
    ) -> Option<(usize, Option<Ticket>)> {
        if self.fleet.machines() == 1 {
            // There is nothing to choose.
            return Some((0, None));
        }
        let prefix = self.demand.prefix(request, self.pool.team[request.team].system_tokens);
        let ask = Ask {
            model: key_of(request.model),
            prefix: &prefix,
            tenant: request.team as u64,
            streamed: true,
            excluded: failed,
        };
        let decision = self.routers[region].decide(self.now, &ask).ok()?;
        Some((decision.replica.0 as usize, Some(decision.ticket)))
    }

    /// What a machine has to say, and when it wants to be woken.
    fn after(&mut self, machine: usize) {
        let place = &mut self.places[machine];
        let Some(there) = &mut place.machine else { return };
        let notices = core::mem::take(&mut there.notices);
        let next = there.next_wake();
        if let Some(next) = next.filter(|next| place.wake_at.is_none_or(|at| *next < at)) {
            place.wake_at = Some(next);
            self.queue.push(next, Rank::Timer, Event::Wake { machine });
        }
        let life = place.life;
        for notice in notices {
            match notice {
                Notice::Later(at, event) => {
                    self.queue.push(at, Rank::Completion, Event::Machine { machine, life, event: Box::new(event) });
                }
                Notice::Fetch(digest, load) => self.fetch(machine, digest, load),
                Notice::Promoted(promoted) => self.promoted(machine, &promoted),
                Notice::Started(request, start) => {
                    self.recording.started(request.0 as usize, self.now, start == StartKind::Cold);
                }
                Notice::FirstToken(request) => self.first_token(request.0 as usize),
                Notice::Finished(request, cached) => self.finished(request.0 as usize, cached),
                Notice::Refused(request, refusal) => self.refused(request.0 as usize, &refusal),
            }
        }
    }

    fn first_token(&mut self, number: usize) {
        self.recording.first_token(number, self.now);
        if let Some(Way { machine, ticket: Some(ticket), .. }) = self.ways[number] {
            let now = self.now;
            self.router_of(machine).first_token(now, ticket);
        }
    }

    fn finished(&mut self, number: usize, cached_tokens: u64) {
        let request = &self.demand.requests[number];
        let usage = Usage { prompt_tokens: u64::from(request.prompt_tokens), cached_tokens: Some(cached_tokens) };
        self.leave(number, Outcome::Finished, Some(usage));
        self.recording.end(number, self.now, End::Answered);
    }

    /// A request has left its machine: whether it may be tried elsewhere.
    fn leave(&mut self, number: usize, outcome: Outcome, usage: Option<Usage>) -> Verdict {
        let Some(way) = self.ways[number].take() else { return Verdict::Over };
        self.places[way.machine].open.remove(&number);
        let begun = self.recording.has_begun(number);
        let output_started = begun || self.now.since(way.sent_at) > STREAM_GRACE;
        let ended = Ended { outcome, output_started, retried: way.retried, usage };
        let (now, router) = (self.now, self.router_of(way.machine));
        let verdict = way.ticket.map_or(Verdict::Over, |ticket| router.ended(now, ticket, ended));
        self.depart_if_idle(way.machine);
        verdict
    }

    fn refused(&mut self, number: usize, refusal: &Refusal) {
        let (name, outcome) = told(refusal);
        let Some(Way { machine, .. }) = self.ways[number] else { return };
        match self.leave(number, outcome, None) {
            Verdict::RetryElsewhere => self.send_elsewhere(number, machine),
            Verdict::Over => self.recording.end(number, self.now, End::Refused(name)),
        }
    }

    /// The machine of a request is gone.
    fn lost(&mut self, number: usize) {
        let Some(Way { machine, .. }) = self.ways[number] else { return };
        let verdict = self.leave(number, Outcome::Lost, None);
        self.report(machine, Report::MayHaveRestarted);
        let all_lost = self.is_lost_with_region(machine);
        match verdict {
            Verdict::RetryElsewhere if !all_lost => self.send_elsewhere(number, machine),
            _ if self.recording.has_begun(number) => self.recording.end(number, self.now, End::Broken),
            _ if all_lost => self.recording.end(number, self.now, End::Refused(REGION_LOST)),
            _ => self.recording.end(number, self.now, End::Refused("machine_lost")),
        }
    }

    fn send_elsewhere(&mut self, number: usize, machine: usize) {
        self.send(number, self.region_of(machine), Some(ReplicaId(machine as u32)));
    }

    /// The router of a machine hears of it.
    fn report(&mut self, machine: usize, report: Report) {
        let now = self.now;
        self.router_of(machine).reported(now, ReplicaId(machine as u32), report);
    }

    fn lose(&mut self, number: usize, away: Duration) {
        if !self.put_away(number) {
            return;
        }
        let open: Vec<usize> = self.places[number].open.iter().copied().collect();
        self.recording.away(number, self.now, away);
        open.into_iter().for_each(|request| self.lost(request));
        self.queue.push(self.now + away, Rank::Completion, Event::Return { machine: number });
        self.queue.push(self.now + TICK, Rank::Timer, Event::Look { machine: number });
    }

    /// A machine stops, if it is there; what it knew and counted stays.
    fn put_away(&mut self, number: usize) -> bool {
        let place = &mut self.places[number];
        let Some(machine) = place.machine.take() else { return false };
        self.recording.add(&machine.counts);
        place.remembered = machine.recollections();
        (place.lost_at, place.wake_at) = (self.now, None);
        self.links.iter_mut().for_each(|link| link.drop_machine(self.now, number));
        self.look_at_links();
        self.promote_again(number);
        true
    }

    /// Whether a machine that was gone answers again.
    fn look(&mut self, number: usize) {
        if self.recording.departures.contains_key(&number) {
            return;
        }
        let healthy = self.places[number].machine.is_some();
        if healthy {
            self.report(number, Report::Restarted);
        } else {
            self.queue.push(self.now + TICK, Rank::Timer, Event::Look { machine: number });
        }
        self.report(number, Report::Probe { healthy });
    }

    fn sample(&mut self) {
        for (number, place) in self.places.iter().enumerate() {
            let ledger = place.machine.as_ref().map(Machine::ledger).unwrap_or_default();
            for line in ledger {
                let bytes = line.private.total();
                if bytes > 0 {
                    let memory = Memory { at: self.now, machine: number, model: model_of(line.digest), bytes };
                    self.recording.memory.push(memory);
                }
            }
        }
        let next = self.now + Duration::from_secs_f64(self.pool.sample_seconds);
        if next <= Instant::after(Duration::from_secs_f64(self.pool.hours * 3_600.0)) {
            self.queue.push(next, Rank::Timer, Event::Sample);
        }
    }

    fn check(&self) -> Result<(), String> {
        for router in &self.routers {
            router.check().map_err(|violation| violation.to_string())?;
        }
        if let Some(number) = self.recording.ended_again {
            return Err(format!("request {number} has ended more than once"));
        }
        for place in &self.places {
            place.machine.as_ref().map_or(Ok(()), Machine::check)?;
        }
        Ok(())
    }
}

fn key_of(model: usize) -> ModelKey {
    ModelKey(model as u64)
}

/// What a router is told by a refusal: its name, and what its status says of who sent it.
fn told(refusal: &Refusal) -> (&'static str, Outcome) {
    let busy = |retry_after: &Duration| Outcome::Busy { retry_after: Some(*retry_after) };
    match refusal {
        Refusal::UnknownModel => ("model_not_found", Outcome::Finished),
        Refusal::QueueFull { retry_after } => ("queue_full", busy(retry_after)),
        Refusal::ModelLoading { retry_after } => ("model_loading", busy(retry_after)),
        Refusal::DeadlinePassed => ("deadline_passed", Outcome::Failed),
        Refusal::NoWorker { retry_after } => ("no_worker", busy(retry_after)),
        Refusal::Draining => ("draining", Outcome::Busy { retry_after: None }),
        Refusal::Worker(rejection) => match rejection {
            Rejection::UnknownModel => ("model_not_found", Outcome::Finished),
            Rejection::TooLarge { .. } => ("model_too_large", Outcome::Finished),
            Rejection::LoadFailed { retry_after, .. } => ("model_load_failed", busy(retry_after)),
            Rejection::QueueFull { retry_after } => ("queue_full", busy(retry_after)),
            Rejection::NoMemory { retry_after } => ("insufficient_memory", busy(retry_after)),
            Rejection::EngineLost { .. } => ("engine_lost", Outcome::Failed),
            Rejection::Draining => ("draining", Outcome::Busy { retry_after: None }),
        },
    }
}
