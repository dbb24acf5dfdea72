//! Which due model is loaded next, where, and who leaves for it.
//!
//! Due models are served strictly in order within a pool: whoever cannot be placed yet keeps its claim on what is being
//! freed, so that a stream of small models never starves a large one.

use super::{
    Worker,
    model::{Life, Model, Phase},
    protocol::{Action, EvictionReason, Fact, Generation, LoadError, Rejection},
};
use crate::{
    ids::{Digest, PoolName, Priority},
    memory::{Footprint, HOST, MemoryVector},
    residency::{Charge, Held, HeldSum, Placement, Problem, Standing, place, worth},
    time::Instant,
};
use alloc::{collections::BTreeMap, string::ToString, vec::Vec};
use core::{cmp::Reverse, time::Duration};

/// A model reloaded right after an eviction stays for this many times its load time (or `minimum_residency`, if that
/// is less): so that a pool that is too small spends at most a fifth of its time loading.
const RESIDENCY_PER_REWARM: f64 = 4.0;

/// Whom a newcomer may displace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reach {
    /// Models nobody is using.
    Idle,
    /// Also models whose requests all give way to one of this class: they are parked.
    Yielding(Priority),
    /// Also models in use, which are drained first.
    InUse,
}

/// Who holds bytes of a pool, as newcomers of a class see them.
struct View {
    held: Vec<Held>,
    /// What no newcomer gets.
    taken: HeldSum,
}

impl View {
    fn new(held: Vec<Held>) -> Self {
        let taken = held.iter().filter(|one| matches!(one.standing, Standing::Fixed | Standing::Claimed));
        Self { taken: taken.map(|one| &one.charge).collect(), held }
    }

    fn claim(&mut self, claim: &Held) {
        self.taken.add(&claim.charge);
        self.held.push(claim.clone());
    }

    /// Whether host memory alone does not forbid it.
    fn may_fit(&mut self, footprint: &Footprint, artifact: Digest, capacity: &MemoryVector) -> bool {
        let in_host = Charge::new(footprint, artifact, &[]);
        self.taken.add(&in_host);
        let fits = self.taken.total().get(HOST) <= capacity.get(HOST);
        self.taken.remove(&in_host);
        fits
    }
}

/// What one pass over those who are due has seen. In a pool that is full they are many, and all see the same.
#[derive(Default)]
pub(super) struct Views {
    claims: Vec<(PoolName, Held)>,
    seen: BTreeMap<(PoolName, Priority, Reach), View>,
}

impl Views {
    fn claim(&mut self, pool: PoolName, claim: Held) {
        self.seen.iter_mut().filter(|((other, ..), _)| *other == pool).for_each(|(_, view)| view.claim(&claim));
        self.claims.push((pool, claim));
    }

    /// Somebody's bytes have changed.
    fn look_again(&mut self) {
        self.seen.clear();
    }
}

impl Worker {
    pub(super) fn plan_loads(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let due = self.due_models(now);
        self.revive_needless_drains(&due);
        let mut views = Views::default();
        for digest in due {
            if self.loading_count() >= self.settings.concurrent_loads_max {
                break;
            }
            let Some(model) = self.models.get(&digest) else { continue };
            if self.hopeless(model).is_some() {
                self.refuse_hopeless(digest, actions);
                continue;
            }
            let asked = model.is_asked_for();
            let footprint = self.peak_to_plan(model);
            let pool = model.spec.pool.clone();
            if let Some(mut model) = self.models.get_mut(&digest) {
                model.impossible = false;
            }
            match self.find_place(now, digest, &pool, &footprint, &mut views) {
                Some((placement, _)) if !asked && placement.fits_now && placement.victims.is_empty() => {
                    views.look_again();
                    self.begin_load(now, digest, &pool, &footprint, placement.accelerators, actions);
                }
                _ if !asked => self.give_up_restoring(digest, &pool),
                Some((placement, reach)) => {
                    views.look_again();
                    self.make_room(now, &placement, reach, actions);
                    if placement.fits_now {
                        self.begin_load(now, digest, &pool, &footprint, placement.accelerators, actions);
                    } else {
                        views.claim(pool, self.claim(digest, &footprint, &placement.accelerators));
                    }
                }
                None if self.waits_for_parked(digest) => {
                    views.look_again();
                    self.refuse_parked_in_vain(digest, actions);
                }
                None => views.claim(pool, self.claim(digest, &footprint, &[])),
            }
        }
    }

    /// A model that nobody asks for comes back only into memory that is free. While another load holds its peak, or
    /// somebody is on the way out, there may be more in a moment.
    fn give_up_restoring(&mut self, digest: Digest, pool: &PoolName) {
        let moving = |model: &Model| model.phase.is_loading() || model.phase.is_leaving();
        let in_motion = self.models.busy().filter(|other| moving(other)).any(|other| other.spec.pool == *pool);
        if let Some(mut model) = self.models.get_mut(&digest) {
            model.restore &= in_motion;
            model.preload &= in_motion;
        }
    }

    /// Due models in the order in which they are served: those asked for by class, then by when their load must
    /// begin, then longest waiting; then what was
    /// here before a restart; of equals the one that is worth most, then by identity.
    pub(super) fn due_models(&self, now: Instant) -> Vec<Digest> {
        let mut due: Vec<_> = self
            .models
            .absent()
            .filter(|model| !self.draining && model.is_due(now))
            .map(|model| {
                // Whoever has callers is told from all others by them.
                let told = !model.waiting.is_empty();
                let loss = if told { 0.0 } else { self.loss(now, model) };
                let worth = worth(loss, 1.0, model.spec.steady.total_bytes());
                // The bits of numbers that are not negative are in their order.
                let least_worth_last = Reverse(worth.to_bits());
                let order = (!model.is_asked_for(), model.class(), model.first_in_line());
                (order, least_worth_last, model.spec.digest)
            })
            .collect();
        due.sort_unstable();
        due.into_iter().map(|(_, _, digest)| digest).collect()
    }

    pub(super) fn loading_count(&self) -> u32 {
        self.models.loading_count()
    }

    /// The first placement that works: among idle models if possible, else by draining some in use.
    pub(super) fn find_place(
        &self,
        now: Instant,
        newcomer: Digest,
        pool: &PoolName,
        footprint: &Footprint,
        views: &mut Views,
    ) -> Option<(Placement, Reach)> {
        let capacity = &self.pools.get(pool)?.capacity;
        let model = self.models.get(&newcomer)?;
        let (artifact, class) = (model.spec.artifact, model.class());
        let caller = model.waiting.first().map(|waiter| Reach::Yielding(waiter.class));
        [Some(Reach::Idle), caller, Some(Reach::InUse)].into_iter().flatten().find_map(|reach| {
            let view = self.view(now, (pool, class, reach), views);
            if !view.may_fit(footprint, artifact, capacity) {
                return None;
            }
            let problem = Problem { capacity, held: &view.held, footprint, artifact };
            place(&problem).map(|placement| (placement, reach))
        })
    }

    fn view<'a>(
        &self,
        now: Instant,
        (pool, class, reach): (&PoolName, Priority, Reach),
        views: &'a mut Views,
    ) -> &'a mut View {
        let Views { claims, seen } = views;
        seen.entry((pool.clone(), class, reach)).or_insert_with(|| {
            let mut view = View::new(self.held_in(now, pool, class, reach));
            claims.iter().filter(|(other, _)| other == pool).for_each(|(_, claim)| view.claim(claim));
            view
        })
    }

    /// Who holds bytes in a pool, as those see them for whom nobody leaves who is in use.
    pub(super) fn seen<'a>(&self, now: Instant, pool: &PoolName, class: Priority, views: &'a mut Views) -> &'a [Held] {
        &self.view(now, (pool, class, Reach::Idle), views).held
    }

    /// Who holds bytes in a pool, as a newcomer of this class sees them.
    pub(super) fn held_in(&self, now: Instant, pool: &PoolName, class: Priority, reach: Reach) -> Vec<Held> {
        self.models
            .active()
            .filter_map(|model| Some((model, model.phase.life()?)))
            .filter(|(_, life)| life.pool == *pool)
            .map(|(model, life)| Held {
                digest: model.spec.digest,
                charge: life.charge.clone(),
                standing: self.standing(now, model, life, class, reach),
            })
            .chain(self.parked_in(pool))
            .collect()
    }

    /// What a newcomer of this class may do with a model's bytes.
    fn standing(&self, now: Instant, model: &Model, life: &Life, class: Priority, reach: Reach) -> Standing {
        if model.phase.is_leaving() {
            return Standing::Leaving;
        }
        let ready = matches!(model.phase, Phase::Ready(_));
        let yields = matches!(reach, Reach::Yielding(caller) if self.yields(model, caller));
        let displaceable = ready && self.may_be_displaced(now, model, life, class, yields);
        let reachable = model.is_idle() && model.waiting.is_empty() || yields || reach == Reach::InUse;
        if displaceable && reachable { Standing::Evictable { loss: self.loss(now, model) } } else { Standing::Fixed }
    }

    /// Pins, promises to callers who waited, minimum residency and classes bound the rule of worth. What yields does so
    /// at any time: how often is bounded otherwise.
    fn may_be_displaced(&self, now: Instant, model: &Model, life: &Life, class: Priority, yields: bool) -> bool {
        let pinned = model.spec.pin && !model.unwanted;
        let protected = (life.protected_until > now && !yields) || life.promised > 0;
        let outranks = model.spec.priority < class
            && model.last_used.unwrap_or(life.since) + self.settings.priority_protection > now;
        !pinned && !protected && !outranks && !self.has_successor_on_its_way(model.spec.digest)
    }

    /// A version that is about to be replaced answers callers until its successor can.
    pub(super) fn has_successor_on_its_way(&self, digest: Digest) -> bool {
        self.models.has_successor(&digest)
    }

    /// What dropping a model would lose, in seconds of rewarming per second; those beyond its target weigh more.
    pub(super) fn loss(&self, now: Instant, model: &Model) -> f64 {
        let decayed = model.demand.per_second_at(now, self.settings.demand_half_life);
        model.forecast.demand_per_second(self.moment(now), decayed)
            * model.spec.targets.weigh(model.spec.rewarm_seconds)
    }

    fn claim(&self, digest: Digest, footprint: &Footprint, devices: &[usize]) -> Held {
        let artifact = self.models.get(&digest).map_or(digest, |model| model.spec.artifact);
        let charge = Charge::new(footprint, artifact, devices);
        Held { digest, charge, standing: Standing::Claimed }
    }

    fn make_room(&mut self, now: Instant, placement: &Placement, reach: Reach, actions: &mut Vec<Action>) {
        for victim in &placement.victims {
            let idle = self.models.get(victim).is_some_and(|model| model.is_idle() && model.waiting.is_empty());
            if idle {
                self.stop(now, *victim, EvictionReason::Memory, actions);
            } else if reach != Reach::Idle {
                self.begin_drain(now, *victim, EvictionReason::Memory, actions);
            }
        }
    }

    pub(super) fn begin_load(
        &mut self,
        now: Instant,
        digest: Digest,
        pool: &PoolName,
        footprint: &Footprint,
        accelerators: Vec<usize>,
        actions: &mut Vec<Action>,
    ) {
        let window = self.settings.thrash_window;
        self.last_generation = self.last_generation.saturating_add(1);
        let generation = Generation(self.last_generation);
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let charge = Charge::new(footprint, model.spec.artifact, &accelerators);
        let life = Life {
            generation,
            pool: pool.clone(),
            accelerators,
            parallel: model.spec.parallel.max(1) as usize,
            private_at_ready: charge.private.get(HOST),
            working_bytes: 0,
            charge,
            since: now,
            protected_until: now,
            promised: 0,
            ahead: model.preload && !model.is_asked_for(),
            last_progress: now,
            measured_at: now,
        };
        model.phase = Phase::Verifying(life);
        let rewarm_seconds = model.spec.rewarm_seconds;
        let reload = model.evicted_at.is_some_and(|evicted| now.since(evicted) < window);
        if let Some(pool) = self.pools.get_mut(pool).filter(|_| reload) {
            pool.thrash.note_reload(now, window, rewarm_seconds);
        }
        actions.push(Action::Tell(Fact::LoadStarted { digest, generation }));
        actions.push(Action::Verify { digest, generation });
    }

    /// How long a model stays after a load: not at all the first time, a while when it had just been evicted.
    pub(super) fn residency_protection(&self, now: Instant, digest: Digest) -> Duration {
        let Some(model) = self.models.get(&digest) else { return Duration::ZERO };
        let reloaded = model.evicted_at.is_some_and(|evicted| now.since(evicted) < self.settings.thrash_window);
        if !reloaded {
            return Duration::ZERO;
        }
        let by_cost = Duration::from_secs_f64((RESIDENCY_PER_REWARM * model.spec.rewarm_seconds).clamp(0.0, 3_600.0));
        by_cost.min(self.settings.minimum_residency)
    }

    /// The peak to plan with. An estimate is never believed so far as to refuse a file that itself would fit; a cap that
    /// the model died of is.
    pub(super) fn peak_to_plan(&self, model: &Model) -> Footprint {
        let mut peak = model.spec.peak.clone();
        let Some(pool) = self.pools.get(&model.spec.pool) else { return peak };
        let host = pool.capacity.get(HOST);
        if !model.spec.measured && peak.shared_host_bytes <= host {
            peak.private_host_bytes = peak.private_host_bytes.min(host - peak.shared_host_bytes);
        }
        if let Some(cap_bytes) = model.outgrown_bytes {
            let least = cap_bytes.saturating_add(1).saturating_sub(peak.shared_host_bytes);
            peak.private_host_bytes = peak.private_host_bytes.max(least);
        }
        peak
    }

    /// Why a model can never be placed as things are configured, if so.
    pub(super) fn hopeless(&self, model: &Model) -> Option<Rejection> {
        if let Some(rejection) = self.too_large_alone(model) {
            return Some(rejection);
        }
        let retry_after = self.settings.backoff_max;
        (!self.fits_beside(model, &self.pinned_beside(model))).then_some(Rejection::NoMemory { retry_after })
    }

    /// What stays in a model's pool whatever happens.
    pub(super) fn pinned_beside(&self, model: &Model) -> Vec<Held> {
        self.models
            .pinned()
            .filter(|other| other.spec.digest != model.spec.digest)
            .filter_map(|other| Some((other, other.phase.life()?)))
            .filter(|(_, life)| life.pool == model.spec.pool)
            .map(|(other, life)| Held {
                digest: other.spec.digest,
                charge: life.charge.clone(),
                standing: Standing::Fixed,
            })
            .collect()
    }

    /// Why a model does not fit its pool even alone, if so.
    pub(super) fn too_large_alone(&self, model: &Model) -> Option<Rejection> {
        let pool = self.pools.get(&model.spec.pool)?;
        (!self.fits_beside(model, &[])).then(|| too_large(&self.peak_to_plan(model), &pool.capacity))
    }

    pub(super) fn fits_beside(&self, model: &Model, held: &[Held]) -> bool {
        let Some(pool) = self.pools.get(&model.spec.pool) else { return false };
        let (footprint, artifact) = (self.peak_to_plan(model), model.spec.artifact);
        place(&Problem { capacity: &pool.capacity, held, footprint: &footprint, artifact }).is_some()
    }

    fn refuse_hopeless(&mut self, digest: Digest, actions: &mut Vec<Action>) {
        let Some(model) = self.models.get(&digest) else { return };
        let Some(rejection) = self.hopeless(model) else { return };
        let untold = (model.wanted || model.spec.pin) && !model.impossible;
        self.reject_waiting(digest, &rejection, actions);
        // No load was tried, so there is none to pause after: as soon as things change it is planned again.
        if untold {
            let message = match rejection {
                Rejection::TooLarge { needed_bytes, available_bytes } => alloc::format!(
                    "the model needs {needed_bytes} bytes while loading and its pool has {available_bytes}: give the pool more memory or the model a smaller context"
                ),
                _ => "pinned models leave no room for this one: unpin one or give the pool more memory".to_string(),
            };
            let error = LoadError { message, permanent: matches!(rejection, Rejection::TooLarge { .. }) };
            actions.push(Action::Tell(Fact::LoadRefused { digest, error, retry_after: Duration::ZERO }));
        }
        if let Some(mut model) = self.models.get_mut(&digest) {
            model.impossible |= untold;
            (model.wanted, model.restore, model.load_outlives_callers) = (false, false, false);
            (model.preload, model.predecessor) = (false, None);
        }
    }

    /// Models drained for memory that nobody in their pool waits for any more serve on, if there is room for them.
    fn revive_needless_drains(&mut self, due: &[Digest]) {
        let waiting_pools: Vec<PoolName> =
            due.iter().filter_map(|digest| self.models.get(digest)).map(|model| model.spec.pool.clone()).collect();
        for digest in self.models.busy_digests() {
            let Some(model) = self.models.get(&digest) else { continue };
            let Phase::Draining(life, EvictionReason::Memory) = &model.phase else { continue };
            let needed = waiting_pools.contains(&life.pool) || self.draining || model.forgotten;
            let room = self.overflow(&life.pool, Some(&life.charge)).is_zero();
            let life = life.clone();
            if let Some(mut model) = self.models.get_mut(&digest).filter(|_| !needed && room) {
                model.phase = Phase::Ready(life);
            }
        }
    }

    /// Bytes held in a pool beyond its capacity, what is leaving not counted, with somebody more if so.
    pub(super) fn overflow(&self, pool: &PoolName, more: Option<&Charge>) -> MemoryVector {
        let capacity = self.pools.get(pool).map(|pool| pool.capacity.clone()).unwrap_or_default();
        self.held_with(pool, true, more).saturating_sub(&capacity)
    }

    /// A model turned out larger than thought: the deficit leaves, cheapest first, never the one just loaded.
    pub(super) fn shrink_to_budget(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let pools: Vec<PoolName> =
            self.pools.keys().filter(|name| !self.overflow(name, None).is_zero()).cloned().collect();
        for pool in pools {
            let Some(capacity) = self.pools.get(&pool).map(|pool| pool.capacity.clone()) else { continue };
            let newest = self.newest_ready(&pool);
            for reach in [Reach::Idle, Reach::InUse] {
                // Bytes that are really there outrank every class.
                let mut held = self.held_in(now, &pool, Priority::Critical, reach);
                for holder in held.iter_mut().filter(|holder| Some(holder.digest) == newest) {
                    holder.standing = Standing::Fixed;
                }
                let (footprint, artifact) = (Footprint::default(), Digest([0; 32]));
                let problem = Problem { capacity: &capacity, held: &held, footprint: &footprint, artifact };
                if let Some(placement) = place(&problem) {
                    self.make_room(now, &placement, reach, actions);
                    break;
                }
            }
        }
    }

    fn newest_ready(&self, pool: &PoolName) -> Option<Digest> {
        self.models
            .active()
            .filter_map(|model| match &model.phase {
                Phase::Ready(life) if life.pool == *pool => Some((life.generation, model.spec.digest)),
                _ => None,
            })
            .max()
            .map(|(_, digest)| digest)
    }
}

/// What does not fit, by the numbers of the kind of memory that lacks: the host's, or that of all accelerators.
fn too_large(footprint: &Footprint, capacity: &MemoryVector) -> Rejection {
    let (host_bytes, host) =
        (footprint.private_host_bytes.saturating_add(footprint.shared_host_bytes), capacity.get(HOST));
    if host_bytes > host {
        return Rejection::TooLarge { needed_bytes: host_bytes, available_bytes: host };
    }
    let needed_bytes = MemoryVector(footprint.accelerator_bytes.clone()).total();
    Rejection::TooLarge { needed_bytes, available_bytes: capacity.total().saturating_sub(host) }
}
