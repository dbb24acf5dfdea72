//! The decision: a few candidates, what each is expected to cost, and the cheapest within the load bound.
//!
//! Candidates are the replicas that hold the most of the prompt, the owners of its group, and those with the least to
//! do. Owners come from hashes alone: gateways that never talk agree on them, and so keep the same prefixes on the
//! same replicas.

use super::{
    chain::Boundary,
    groups::{Seen, score},
    mirror::Matches,
    protocol::{Ask, CANDIDATES_SHOWN, Candidate, Decision, ModelKey, Refusal, Ticket, Weights, Why},
    replica::{Replica, Trials},
    router::{Open, Pool, Router, TicketPlace},
};
use crate::time::Instant;
use alloc::vec::Vec;
use core::time::Duration;

/// The most owners that one decision looks at; the next one looks at others.
const OWNERS_MAX: usize = 24;
/// The most replicas with little to do that one decision looks at.
const LIGHTEST_MAX: usize = 4;
/// A replica that may not be asked.
const NOWHERE: usize = usize::MAX;
/// A group with more of the traffic than this is everybody's: the message after it decides.
const SHARE_OF_ALL: f64 = 2.0 / 3.0;
/// Who holds this share of what the best one holds, holds it.
const HELD_SHARE_MIN: f64 = 0.9;
/// How far the slots of a replica change what a request weighs.
const SLOTS_FACTOR: (f64, f64) = (0.25, 16.0);

/// A replica under consideration.
#[derive(Debug, Clone, Copy)]
struct Considered {
    place: usize,
    /// How much the prompt's group wants it: decides between equals.
    score: u64,
    /// Its requests, and as many of others as are believed.
    load: f64,
    foreign: f64,
    weight: f64,
    owner: bool,
    within_bound: bool,
    matched_bytes: u64,
    cost_seconds: f64,
}

/// What one decision needs and the next one can use again.
#[derive(Default)]
pub(super) struct Scratch {
    matches: Matches,
    /// Those that may be asked.
    members: Vec<Considered>,
    /// Where each replica's place is among these.
    numbers: Vec<usize>,
    scores: Vec<u64>,
    candidates: Vec<Considered>,
    decisions: usize,
}

/// What is the same for all candidates.
struct Prompt {
    text_bytes: u64,
    /// The part that others share: the group's, or what somebody holds.
    shared_bytes: u64,
    anchor_bytes: u64,
    bytes_per_token: f64,
    /// How fast prompts are read, on average.
    tokens_per_second: f64,
    /// Whether owners are told from others at all.
    owned: bool,
}

impl Prompt {
    fn tokens(&self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes_per_token
    }
}

impl Router {
    /// Chooses a replica and reserves the request there.
    pub fn decide(&mut self, now: Instant, ask: &Ask<'_>) -> Result<Decision, Refusal> {
        let mut scratch = core::mem::take(&mut self.scratch);
        let decision = self.decide_with(now, ask, &mut scratch);
        self.scratch = scratch;
        decision
    }

    fn decide_with(&mut self, now: Instant, ask: &Ask<'_>, scratch: &mut Scratch) -> Result<Decision, Refusal> {
        if self.totals.open >= self.settings.tickets_max {
            return Err(Refusal::TooMany);
        }
        self.asked_last = now;
        let anchor = self.find_owners(now, ask)?;
        let pool = &self.pools[&ask.model];
        self.survey(now, ask, pool, anchor.hash, scratch);
        if scratch.members.is_empty() {
            return Err(Refusal::Unavailable { retry_at: self.next_chance(now, ask.model, pool) });
        }
        self.mirror.look_up(ask.prefix, &mut scratch.matches);
        let best = scratch.matches.found.first().map_or(0, |found| found.end_bytes);
        let owners = self.choose_candidates(pool.plan.owners(anchor.hash), scratch);
        let prompt = Prompt {
            text_bytes: ask.prefix.text_bytes(),
            shared_bytes: best.max(anchor.end_bytes),
            anchor_bytes: anchor.end_bytes,
            bytes_per_token: pool.bytes_per_token,
            tokens_per_second: mean_speed(&self.replicas, &scratch.members),
            owned: owners < scratch.members.len(),
        };
        for candidate in &mut scratch.candidates {
            candidate.matched_bytes = self.mirror.matched(ask.prefix, &scratch.matches, candidate.place);
            candidate.cost_seconds = self.cost_seconds(now, &prompt, candidate);
        }
        scratch.candidates.sort_unstable_by(|a, b| {
            let key = |one: &Considered| (!one.within_bound, one.cost_seconds);
            let ((a_over, a_cost), (b_over, b_cost)) = (key(a), key(b));
            a_over.cmp(&b_over).then(a_cost.total_cmp(&b_cost)).then(b.score.cmp(&a.score)).then(a.place.cmp(&b.place))
        });
        Ok(self.reserve(now, ask, &prompt, best, scratch))
    }

    /// Sees to it that the group of the prompt has the owners that it needs; tells its anchor.
    fn find_owners(&mut self, now: Instant, ask: &Ask<'_>) -> Result<Boundary, Refusal> {
        self.plan(now, ask.model, Duration::MAX);
        let pool = self.pools.get_mut(&ask.model).ok_or(Refusal::UnknownModel)?;
        let total = pool.traffic.add(now);
        let (replicas, owners_per_share) = (pool.members.len() as f64, self.settings.weights.owners_per_share);
        if !self.groups.is_known(ask.prefix.anchor.hash) {
            pool.strangers.add(now);
        }
        let mut seen = Seen { anchor: ask.prefix.anchor, model: ask.model, pool: replicas, owners_per_share };
        let mut wish = self.groups.add(&seen, total, now);
        if wish.share > SHARE_OF_ALL && ask.prefix.deeper.end_bytes > seen.anchor.end_bytes {
            seen.anchor = ask.prefix.deeper;
            wish = self.groups.add(&seen, total, now);
        }
        if pool.plan.owners(wish.anchor).len() < wish.owners {
            pool.plan.place(&wish);
        }
        Ok(seen.anchor)
    }

    /// Who may be asked, with what each has to do, and which of them own the group.
    fn survey(&self, now: Instant, ask: &Ask<'_>, pool: &Pool, anchor: u64, scratch: &mut Scratch) {
        let bound = &self.settings;
        let tenant_least = self.tenant_least(ask, pool, &mut scratch.scores);
        scratch.members.clear();
        scratch.numbers.resize(self.replicas.len(), NOWHERE);
        let (mut own, mut weights) = (0_u32, 0.0);
        for (place, identity) in pool.members.iter().zip(&pool.identities) {
            scratch.numbers[*place] = NOWHERE;
            let Some(replica) = &self.replicas[*place] else { continue };
            let tenants = tenant_least == 0 || score(ask.tenant, *identity) >= tenant_least;
            if !tenants || Some(replica.id) == ask.excluded || !replica.may_be_asked(now, ask.model) {
                continue;
            }
            own += replica.in_flight;
            weights += replica.settings.weight;
            scratch.numbers[*place] = scratch.members.len();
            scratch.members.push(Considered {
                place: *place,
                score: score(anchor, *identity),
                load: f64::from(replica.in_flight),
                foreign: replica.foreign(now),
                weight: replica.settings.weight,
                owner: false,
                within_bound: true,
                matched_bytes: 0,
                cost_seconds: 0.0,
            });
        }
        // What others are said to have there is believed up to twice what is here on average. More would be truer
        // where others have much, but it is seconds old, and all gateways would run from and to the same replicas.
        let floor = f64::from(bound.load_floor);
        let own_mean = f64::from(own) / (scratch.members.len().max(1)) as f64;
        let foreign_most = (own_mean * 2.0).max(floor);
        let mut total = 1.0;
        for member in &mut scratch.members {
            member.load += member.foreign.min(foreign_most);
            total += member.load;
        }
        let each = bound.load_bound * total / weights;
        for member in &mut scratch.members {
            member.within_bound = member.load + 1.0 <= libm::ceil(each * member.weight).max(floor);
        }
    }

    /// The least score with which a replica is one of the tenant's.
    fn tenant_least(&self, ask: &Ask<'_>, pool: &Pool, scores: &mut Vec<u64>) -> u64 {
        let members = pool.identities.len();
        let spread = libm::ceil(self.settings.tenant_spread * members as f64) as usize;
        if spread >= members {
            return 0;
        }
        scores.clear();
        scores.extend(pool.identities.iter().map(|identity| score(ask.tenant, *identity)));
        let (_, least, _) = scores.select_nth_unstable(members - spread.max(1));
        *least
    }

    /// Holders, owners, and who has the least to do, each once; how many owners there are.
    fn choose_candidates(&self, planned: &[usize], scratch: &mut Scratch) -> usize {
        let Scratch { matches, members, numbers, candidates, decisions, .. } = scratch;
        *decisions = decisions.wrapping_add(1);
        candidates.clear();
        let mut owners = 0;
        let mut own = |at: usize, members: &mut Vec<Considered>, numbers: &mut Vec<usize>| {
            members[at].owner = true;
            members.swap(owners, at);
            numbers[members[at].place] = at;
            numbers[members[owners].place] = owners;
            owners += 1;
        };
        for place in planned {
            let at = numbers.get(*place).copied().unwrap_or(NOWHERE);
            if at != NOWHERE && members.get(at).is_some_and(|member| member.place == *place) {
                own(at, members, numbers);
            }
        }
        // Where none of them may be asked, the one that the group wants most.
        if !members.iter().take(1).any(|member| member.owner)
            && let Some(at) = (0..members.len()).max_by_key(|at| members[*at].score)
        {
            own(at, members, numbers);
        }
        let first = if owners > OWNERS_MAX { *decisions * OWNERS_MAX % owners } else { 0 };
        let shown = owners.min(OWNERS_MAX);
        candidates.extend((0..shown).map(|step| members[(first + step) % owners]));
        add_lightest(&members[owners..], candidates);
        for found in &matches.found {
            let at = numbers.get(found.replica).copied().unwrap_or(NOWHERE);
            let member = members.get(at).filter(|member| member.place == found.replica);
            if candidates.iter().all(|other| other.place != found.replica) {
                candidates.extend(member.copied());
            }
        }
        owners
    }

    fn cost_seconds(&self, now: Instant, prompt: &Prompt, candidate: &Considered) -> f64 {
        let Some(replica) = &self.replicas[candidate.place] else { return f64::MAX };
        let weights = &self.settings.weights;
        let lost_bytes = prompt.shared_bytes.saturating_sub(candidate.matched_bytes);
        let held = self.mirror.held_bytes(candidate.place) + lost_bytes;
        let full = held > replica.capacity_bytes(prompt.bytes_per_token);
        let mut miss = prompt.tokens(lost_bytes) * (weights.miss + if full { weights.eviction } else { 0.0 });
        if prompt.owned && candidate.owner {
            miss *= 1.0 - weights.owner;
        } else if prompt.owned {
            miss += weights.owner * weights.miss * prompt.tokens(prompt.anchor_bytes);
        }
        // What it takes is a matter of the replica. What it costs others is charged at the same rate to all, so that
        // an error in one replica's speed does not look like a reason to move what it holds.
        let computed = replica.pending(now) + prompt.tokens(prompt.text_bytes - candidate.matched_bytes);
        let charged = miss - prompt.tokens(lost_bytes) + load_tokens(weights, replica, candidate.load);
        computed / replica.prefill_tokens_per_second + charged / prompt.tokens_per_second
    }

    /// When a replica of the model may be asked again.
    fn next_chance(&self, now: Instant, model: ModelKey, pool: &Pool) -> Option<Instant> {
        let replicas = pool.members.iter().filter_map(|place| self.replicas[*place].as_ref());
        replicas.filter(|replica| !replica.draining).filter_map(|replica| replica.next_chance(now, model)).min()
    }

    fn reserve(&mut self, now: Instant, ask: &Ask<'_>, prompt: &Prompt, best: u64, scratch: &Scratch) -> Decision {
        let chosen = scratch.candidates[0];
        let mut shown = [None; CANDIDATES_SHOWN];
        for (place, candidate) in shown.iter_mut().zip(&scratch.candidates) {
            *place = self.show(prompt, candidate);
        }
        let held = chosen.matched_bytes as f64 >= best as f64 * HELD_SHARE_MIN;
        let why = match (scratch.members.len(), best, held) {
            (1, ..) => Why::Only,
            (_, 0, _) => Why::LeastCost,
            (_, _, true) => Why::Affinity,
            (_, _, false) => Why::Spill,
        };
        self.totals.decisions[why as usize] += 1;
        self.totals.open += 1;
        self.retry_budget.request();
        let uncached = prompt.tokens(prompt.text_bytes - chosen.matched_bytes) as u64;
        let expected_cached_tokens = prompt.tokens(chosen.matched_bytes) as u64;
        let mut open = Open {
            replica: super::ReplicaId(0),
            model: ask.model,
            since: now,
            text_bytes: prompt.text_bytes,
            pending_tokens: if ask.streamed { uncached } else { 0 },
            queue_tokens: uncached as f64,
            expected_cached_tokens,
            was_whole: true,
            trials: Trials::default(),
        };
        let mut expected_seconds = 0.0;
        if let Some(replica) = &mut self.replicas[chosen.place] {
            let before = replica.pending(now);
            open.replica = replica.id;
            open.was_whole = before < expected_cached_tokens as f64;
            open.queue_tokens += before;
            open.trials = replica.sent(now, ask.model);
            expected_seconds = open.queue_tokens / replica.prefill_tokens_per_second;
            replica.in_flight += 1;
            replica.pending_tokens += open.pending_tokens;
            if !ask.streamed {
                replica.add_silent(now, uncached);
            }
            let capacity = replica.capacity_bytes(prompt.bytes_per_token);
            self.mirror.set_capacity(chosen.place, capacity);
        }
        self.mirror.touch(ask.prefix, chosen.place);
        Decision {
            ticket: self.issue(open),
            replica: open.replica,
            why,
            prompt_tokens: prompt.tokens(prompt.text_bytes) as u64,
            expected_cached_tokens,
            expected_seconds,
            candidates: shown,
        }
    }

    fn show(&self, prompt: &Prompt, candidate: &Considered) -> Option<Candidate> {
        let replica = self.replicas[candidate.place].as_ref()?;
        Some(Candidate {
            replica: replica.id,
            cost_seconds: candidate.cost_seconds,
            cached_tokens: prompt.tokens(candidate.matched_bytes) as u64,
            in_flight: replica.in_flight,
            owner: candidate.owner,
        })
    }

    fn issue(&mut self, open: Open) -> Ticket {
        let place = self.free_tickets.pop().unwrap_or_else(|| {
            self.tickets.push(TicketPlace { generation: 0, open: None });
            (self.tickets.len() - 1) as u32
        });
        let ticket = &mut self.tickets[place as usize];
        ticket.open = Some(open);
        Ticket { place, generation: ticket.generation }
    }
}

/// Adds those with the least to do; among equals those that the group wants most.
fn add_lightest(members: &[Considered], candidates: &mut Vec<Considered>) {
    let first = candidates.len();
    let lighter = |a: &Considered, b: &Considered| {
        a.load.total_cmp(&b.load).then(b.score.cmp(&a.score)).then(a.place.cmp(&b.place)).is_lt()
    };
    for member in members {
        let full = candidates.len() == first + LIGHTEST_MAX;
        if full && candidates.last().is_some_and(|last| !lighter(member, last)) {
            continue;
        }
        if full {
            candidates.pop();
        }
        let at = candidates[first..].partition_point(|other| lighter(other, member));
        candidates.insert(first + at, *member);
    }
}

fn mean_speed(replicas: &[Option<Replica>], members: &[Considered]) -> f64 {
    let speed = |member: &Considered| replicas[member.place].as_ref().map_or(0.0, |one| one.prefill_tokens_per_second);
    members.iter().map(speed).sum::<f64>() / members.len() as f64
}

fn load_tokens(weights: &Weights, replica: &Replica, load: f64) -> f64 {
    let slots = f64::from(replica.settings.slots.max(1));
    let (least, most) = SLOTS_FACTOR;
    let each = weights.in_flight * (Weights::SLOTS / slots).clamp(least, most);
    (each * load + weights.over_slots * (load + 1.0 - slots).max(0.0)) / replica.settings.weight
}
