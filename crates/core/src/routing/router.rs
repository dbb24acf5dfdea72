//! The machine: its replicas, the requests on their way, and what is heard of both.

use super::{
    breaker::{BreakerState, RetryBudget},
    decide::Scratch,
    groups::{Groups, Traffic},
    mirror::Mirror,
    plan::{Owner, Plan},
    protocol::{
        Ended, ModelKey, Outcome, Pause, ReplicaId, ReplicaSettings, Report, Settings, Ticket, Usage, Verdict, Why,
    },
    replica::{Replica, Trials},
};
use crate::time::Instant;
use alloc::{collections::BTreeMap, vec::Vec};
use core::time::Duration;

/// The most replicas of one router.
pub const REPLICAS_MAX: usize = 4096;
/// Bytes of text per token where nothing was measured.
const BYTES_PER_TOKEN_DEFAULT: f64 = 4.0;
const BYTES_PER_TOKEN_RANGE: (f64, f64) = (0.5, 32.0);
const BYTES_PER_TOKEN_SAMPLE_WEIGHT: f64 = 0.02;
/// A plan is made anew after this, and sooner while much of the traffic is of groups that nobody knew.
const PLAN_AGE_MAX: Duration = Duration::from_secs(5);
const PLAN_AGE_MAX_AT_FIRST: Duration = Duration::from_secs(1);
const UNKNOWN_SHARE_AT_FIRST: f64 = 0.05;
/// Groups times replicas of one plan: a few milliseconds.
const PLAN_WORK_MAX: usize = 1 << 20;
/// Below this a difference between what was expected to be cached and what was is rounding.
const CACHED_TOKENS_NOTED_MIN: u64 = 256;

/// The replicas of one model.
pub(super) struct Pool {
    /// Places in [`Router::replicas`], and beside each the replica's identity.
    pub(super) members: Vec<usize>,
    pub(super) identities: Vec<u64>,
    pub(super) traffic: Traffic,
    /// Of it, requests that were the first of their group.
    pub(super) strangers: Traffic,
    pub(super) bytes_per_token: f64,
    /// How often that was measured.
    samples: u32,
    /// Who owns what; made anew when `plan_at` is long ago, or replicas came or went.
    pub(super) plan: Plan,
    pub(super) plan_at: Option<Instant>,
}

impl Pool {
    /// The share of the traffic that groups have of which nobody has asked yet, as nearly as those tell who were new.
    fn unknown_share(&self, now: Instant) -> f64 {
        f64::from(self.strangers.count(now) / self.traffic.count(now).max(1.0))
    }
}

/// A request on its way.
#[derive(Clone, Copy)]
pub(super) struct Open {
    pub(super) replica: ReplicaId,
    pub(super) model: ModelKey,
    pub(super) since: Instant,
    pub(super) text_bytes: u64,
    /// What it adds to its replica's pending tokens; zero once its first token came.
    pub(super) pending_tokens: u64,
    /// What lay before it and itself when it was sent.
    pub(super) queue_tokens: f64,
    pub(super) expected_cached_tokens: u64,
    /// What it was to find cached cannot have been under way: less lay before it.
    pub(super) was_whole: bool,
    /// Whether it decides that its replica's breaker closes, or that of its model there.
    pub(super) trials: Trials,
}

pub(super) struct TicketPlace {
    pub(super) generation: u32,
    pub(super) open: Option<Open>,
}

/// Requests so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Decisions by [`Why`]: affinity, spill, least cost, only.
    pub decisions: [u64; 4],
    /// Requests that were allowed a second try.
    pub retries: u64,
    /// Requests that were not, because too many were.
    pub retries_refused: u64,
    /// Requests on their way.
    pub open: usize,
    /// Places of prompts that are remembered, over all replicas.
    pub remembered: usize,
    /// Bytes that this takes.
    pub remembered_bytes: usize,
}

impl Totals {
    /// Decisions taken for this reason.
    pub fn decided(&self, why: Why) -> u64 {
        self.decisions[why as usize]
    }
}

/// One replica, for metrics and the operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaView {
    /// Which.
    pub id: ReplicaId,
    /// Requests on their way to it from here.
    pub in_flight: u32,
    /// Tokens of prompts that it has not read yet.
    pub pending_tokens: u64,
    /// Tokens of prompts that it is believed to hold.
    pub held_tokens: u64,
    /// How fast it reads prompts.
    pub prefill_tokens_per_second: f64,
    /// What its breaker lets through.
    pub breaker: BreakerState,
    /// Whether it gets nothing new.
    pub draining: bool,
}

/// Decides where requests go.
pub struct Router {
    pub(super) settings: Settings,
    pub(super) replicas: Vec<Option<Replica>>,
    pub(super) by_id: BTreeMap<ReplicaId, usize>,
    pub(super) pools: BTreeMap<ModelKey, Pool>,
    pub(super) mirror: Mirror,
    pub(super) groups: Groups,
    pub(super) tickets: Vec<TicketPlace>,
    pub(super) free_tickets: Vec<u32>,
    pub(super) retry_budget: RetryBudget,
    pub(super) totals: Totals,
    pub(super) asked_last: Instant,
    pub(super) scratch: Scratch,
}

impl Router {
    /// Without replicas.
    pub fn new(settings: Settings) -> Self {
        Self {
            replicas: Vec::new(),
            by_id: BTreeMap::new(),
            pools: BTreeMap::new(),
            mirror: Mirror::new(settings.mirror_bytes),
            groups: Groups::new(settings.groups_max),
            tickets: Vec::new(),
            free_tickets: Vec::new(),
            retry_budget: RetryBudget::new(),
            totals: Totals::default(),
            asked_last: Instant::ZERO,
            scratch: Scratch::default(),
            settings,
        }
    }

    /// Adds a replica, or configures one anew: what is known of it stays. False if there are
    /// [`REPLICAS_MAX`] already.
    pub fn add(&mut self, id: ReplicaId, settings: ReplicaSettings) -> bool {
        if let Some(place) = self.by_id.get(&id).copied() {
            self.leave_pools(place);
            if let Some(replica) = &mut self.replicas[place] {
                replica.configure(settings);
            }
            self.join_pools(place);
            return true;
        }
        let free = self.replicas.iter().position(Option::is_none).unwrap_or(self.replicas.len());
        if free >= REPLICAS_MAX {
            return false;
        }
        if free == self.replicas.len() {
            self.replicas.push(None);
        }
        let replica = Replica::new(id, settings);
        self.mirror.add(free, replica.capacity_bytes(BYTES_PER_TOKEN_DEFAULT));
        self.replicas[free] = Some(replica);
        self.by_id.insert(id, free);
        self.join_pools(free);
        true
    }

    /// Forgets a replica. Its requests stay open until they end; nothing new goes there.
    pub fn remove(&mut self, id: ReplicaId) {
        let Some(place) = self.by_id.remove(&id) else { return };
        self.leave_pools(place);
        self.mirror.clear(place);
        self.replicas[place] = None;
    }

    fn join_pools(&mut self, place: usize) {
        let Some(replica) = &self.replicas[place] else { return };
        for model in &replica.settings.models {
            let pool = self.pools.entry(*model).or_insert_with(|| Pool {
                members: Vec::new(),
                identities: Vec::new(),
                traffic: Traffic::default(),
                strangers: Traffic::default(),
                bytes_per_token: BYTES_PER_TOKEN_DEFAULT,
                samples: 0,
                plan: Plan::default(),
                plan_at: None,
            });
            pool.plan_at = None;
            if !pool.members.contains(&place) {
                pool.members.push(place);
                pool.identities.push(replica.settings.identity);
            }
        }
    }

    fn leave_pools(&mut self, place: usize) {
        for pool in self.pools.values_mut() {
            if let Some(at) = pool.members.iter().position(|member| *member == place) {
                pool.members.swap_remove(at);
                pool.identities.swap_remove(at);
                pool.plan_at = None;
            }
        }
        self.pools.retain(|_, pool| !pool.members.is_empty());
    }

    /// The replica and its place, if it is there.
    fn replica_mut(&mut self, id: ReplicaId) -> Option<(usize, &mut Replica)> {
        let place = *self.by_id.get(&id)?;
        self.replicas[place].as_mut().map(|replica| (place, replica))
    }

    fn open_mut(&mut self, ticket: Ticket) -> Option<&mut Open> {
        let place = self.tickets.get_mut(ticket.place as usize)?;
        if place.generation == ticket.generation { place.open.as_mut() } else { None }
    }

    /// The first token of a request came.
    pub fn first_token(&mut self, now: Instant, ticket: Ticket) {
        let Some(open) = self.open_mut(ticket) else { return };
        let (tokens, queued, since, id) = (open.pending_tokens, open.queue_tokens, open.since, open.replica);
        open.pending_tokens = 0;
        if let Some((_, replica)) = self.replica_mut(id)
            && tokens > 0
        {
            replica.pending_tokens -= tokens;
            replica.prefill_seen(queued, now.since(since));
        }
    }

    /// A request has ended: answered, given up, or lost. A second call for it changes nothing.
    pub fn ended(&mut self, now: Instant, ticket: Ticket, ended: Ended) -> Verdict {
        let Some(open) = self.open_mut(ticket).copied() else { return Verdict::Over };
        let place = &mut self.tickets[ticket.place as usize];
        place.open = None;
        place.generation = place.generation.wrapping_add(1);
        self.free_tickets.push(ticket.place);
        self.totals.open -= 1;
        if let Some((_, replica)) = self.replica_mut(open.replica) {
            replica.in_flight -= 1;
            replica.pending_tokens -= open.pending_tokens;
            replica.ended(now, open.model, open.trials, ended.outcome);
        }
        if let Some(usage) = ended.usage.filter(|_| ended.outcome == Outcome::Finished) {
            self.learn(&open, usage);
        }
        self.verdict(now, &open, ended)
    }

    fn verdict(&mut self, now: Instant, open: &Open, ended: Ended) -> Verdict {
        let lost = matches!(ended.outcome, Outcome::Failed | Outcome::Lost | Outcome::Busy { .. });
        if !lost || ended.output_started || ended.retried {
            return Verdict::Over;
        }
        let elsewhere = self.pools.get(&open.model).is_some_and(|pool| {
            pool.members.iter().any(|member| {
                let replica = self.replicas[*member].as_ref();
                replica.is_some_and(|replica| replica.id != open.replica && replica.may_be_asked(now, open.model))
            })
        });
        if elsewhere && self.retry_budget.take(now) {
            self.totals.retries += 1;
            return Verdict::RetryElsewhere;
        }
        self.totals.retries_refused += u64::from(elsewhere);
        Verdict::Over
    }

    /// What a replica counted corrects what was supposed of it.
    fn learn(&mut self, open: &Open, usage: Usage) {
        if let Some(pool) = self.pools.get_mut(&open.model)
            && usage.prompt_tokens > 0
        {
            let (least, most) = BYTES_PER_TOKEN_RANGE;
            let sample = (open.text_bytes as f64 / usage.prompt_tokens as f64).clamp(least, most);
            // What was only supposed counts for nothing once something was measured.
            pool.samples = pool.samples.saturating_add(1);
            let weight = BYTES_PER_TOKEN_SAMPLE_WEIGHT.max(1.0 / f64::from(pool.samples));
            pool.bytes_per_token += weight * (sample - pool.bytes_per_token);
        }
        let Some(cached) = usage.cached_tokens else { return };
        let expected = open.expected_cached_tokens;
        let Some((place, replica)) = self.replica_mut(open.replica) else { return };
        if expected >= CACHED_TOKENS_NOTED_MIN && replica.in_doubt && open.was_whole {
            replica.in_doubt = false;
            if cached < expected / 2 {
                replica.restarted();
                self.mirror.clear(place);
                return;
            }
        }
        if expected >= CACHED_TOKENS_NOTED_MIN && cached < expected / 2 {
            // What was still being computed when the request came was not lost.
            if open.was_whole {
                replica.capacity_seen(false);
            }
        } else if cached >= CACHED_TOKENS_NOTED_MIN && expected < cached / 2 {
            replica.capacity_seen(true);
        }
    }

    /// Something is heard of a replica. News of one that is gone changes nothing.
    pub fn reported(&mut self, now: Instant, id: ReplicaId, report: Report) {
        let Some((place, replica)) = self.replica_mut(id) else { return };
        match report {
            Report::Load { requests } => replica.load_reported(now, requests),
            Report::Capacity { tokens } => {
                replica.capacity_reported(tokens);
                let bytes = replica.capacity_bytes(BYTES_PER_TOKEN_DEFAULT);
                self.mirror.set_capacity(place, bytes);
            }
            Report::Instance(instance) => {
                let other = replica.instance.is_some_and(|known| known != instance);
                replica.instance = Some(instance);
                if other {
                    self.restarted(place);
                }
            }
            Report::Restarted => self.restarted(place),
            Report::MayHaveRestarted => replica.in_doubt = true,
            Report::CacheCleared => self.mirror.clear(place),
            Report::Holds { boundary, held } => self.mirror.correct(place, boundary, held),
            Report::Probe { healthy } => replica.breaker.probed(now, healthy),
            Report::Draining(draining) => replica.draining = draining,
        }
    }

    fn restarted(&mut self, place: usize) {
        if let Some(replica) = &mut self.replicas[place] {
            replica.restarted();
        }
        self.mirror.clear(place);
    }

    /// Time has passed: what nobody asked for in a long while is forgotten, and its memory given back.
    pub fn tick(&mut self, now: Instant) {
        if !self.mirror.is_empty() && now.since(self.asked_last) >= self.settings.idle_after {
            self.mirror.reset();
            self.groups = Groups::new(self.settings.groups_max);
        }
        let models: Vec<ModelKey> = self.pools.keys().copied().collect();
        for model in models {
            let is_first = self.pools.get(&model).is_some_and(|pool| pool.unknown_share(now) > UNKNOWN_SHARE_AT_FIRST);
            self.plan(now, model, if is_first { PLAN_AGE_MAX_AT_FIRST } else { PLAN_AGE_MAX });
        }
    }

    /// Makes the plan of a model anew if it is older than this, or for other replicas.
    pub(super) fn plan(&mut self, now: Instant, model: ModelKey, age_max: Duration) {
        let Some(pool) = self.pools.get_mut(&model) else { return };
        if pool.plan_at.is_some_and(|at| now.since(at) < age_max) {
            return;
        }
        let owner = |(place, identity): (&usize, &u64)| {
            let replica = self.replicas[*place].as_ref().filter(|replica| !replica.draining)?;
            let capacity_bytes = replica.capacity_bytes(pool.bytes_per_token);
            Some(Owner { place: *place, identity: *identity, weight: replica.settings.weight, capacity_bytes })
        };
        let owners: Vec<Owner> = pool.members.iter().zip(&pool.identities).filter_map(owner).collect();
        let groups_max = (PLAN_WORK_MAX / owners.len().max(1)).max(1);
        let seen = (pool.members.len() as f64, self.settings.weights.owners_per_share);
        let wishes = self.groups.wishes(model, groups_max, seen, pool.traffic.count(now), now);
        pool.plan = Plan::new(&owners, wishes, pool.unknown_share(now), self.settings.groups_max);
        pool.plan_at = Some(now);
    }

    /// Requests so far, and what is kept.
    pub fn totals(&self) -> Totals {
        Totals { remembered: self.mirror.residences(), remembered_bytes: self.mirror.used_bytes(), ..self.totals }
    }

    /// The models that a replica is not asked for now.
    pub fn pauses(&self, now: Instant, id: ReplicaId) -> Vec<Pause> {
        let replica = self.by_id.get(&id).and_then(|place| self.replicas[*place].as_ref());
        replica.map_or_else(Vec::new, |replica| replica.pauses(now).collect())
    }

    /// One replica as it is now.
    pub fn view(&self, now: Instant, id: ReplicaId) -> Option<ReplicaView> {
        let place = *self.by_id.get(&id)?;
        let replica = self.replicas[place].as_ref()?;
        let pool = replica.settings.models.first().and_then(|model| self.pools.get(model));
        let bytes_per_token = pool.map_or(BYTES_PER_TOKEN_DEFAULT, |pool| pool.bytes_per_token);
        Some(ReplicaView {
            id,
            in_flight: replica.in_flight,
            pending_tokens: replica.pending(now) as u64,
            held_tokens: (self.mirror.held_bytes(place) as f64 / bytes_per_token) as u64,
            prefill_tokens_per_second: replica.prefill_tokens_per_second,
            breaker: replica.breaker.state(now),
            draining: replica.draining,
        })
    }
}
