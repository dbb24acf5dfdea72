//! What a worker shows of itself. Reading counts as no use of anything.

use super::{
    Worker,
    model::{Model, Phase},
    protocol::{LedgerLine, ModelSpec, Recollection},
};
use crate::{
    forecast::Expectation,
    ids::{Digest, PoolName},
    memory::MemoryVector,
    residency::{Charge, held_bytes, worth},
    time::Instant,
};
use alloc::vec::Vec;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// How a pool's memory is used, per device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PoolMemory {
    /// The pool.
    pub pool: PoolName,
    /// What it may hold, the reserve already taken off.
    pub capacity: MemoryVector,
    /// Models being loaded, at their peak.
    pub loading: MemoryVector,
    /// Models that serve, as measured. Pages that a loading model shares with these count here.
    pub resident: MemoryVector,
    /// Models whose process is ending.
    pub unloading: MemoryVector,
    /// States of requests that gave way.
    pub parked: MemoryVector,
    /// What is left.
    pub free: MemoryVector,
    /// Share of time spent reloading what was recently evicted.
    pub thrash_ratio: f64,
    /// Whether the thrash alarm is raised.
    pub thrash_alarm: bool,
}

impl Worker {
    /// What is known of each model that is configured.
    pub fn specs(&self) -> impl Iterator<Item = &ModelSpec> {
        self.models.values().filter(|model| !model.forgotten).map(|model| &model.spec)
    }

    /// What there is to remember of every model that was ever asked for or is in memory.
    pub fn recollections(&self, now: Instant) -> Vec<Recollection> {
        let half_life = self.settings.demand_half_life;
        let all = self.models.values().filter(|model| !model.forgotten).map(|model| Recollection {
            digest: model.spec.digest,
            demand_per_second: model.demand.per_second_at(model.demand.last(), half_life),
            age: now.since(model.demand.last()),
            warm: model.restore || matches!(model.phase, Phase::Ready(_)),
            forecast: model.forecast.clone(),
        });
        all.filter(|model| model.warm || model.demand_per_second > 0.0).collect()
    }

    /// What is expected of a model; none if there is no such model.
    pub fn expectation(&self, now: Instant, digest: &Digest) -> Option<Expectation> {
        let model = self.models.get(digest).filter(|model| !model.forgotten)?;
        Some(model.forecast.expectation(self.moment(now)))
    }

    /// Who holds which bytes, and who waits: one line for each model that is not merely catalogued.
    pub fn ledger(&self, now: Instant) -> Vec<LedgerLine> {
        self.models.active().map(|model| self.ledger_line(now, model)).collect()
    }

    fn ledger_line(&self, now: Instant, model: &Model) -> LedgerLine {
        let half_life = self.settings.demand_half_life;
        let life = model.phase.life();
        let private = life.map(|life| life.charge.private.clone()).unwrap_or_default();
        let shared_host_bytes = life.map_or(0, |life| life.charge.shared_host_bytes);
        let loss = self.loss(now, model);
        LedgerLine {
            digest: model.spec.digest,
            name: model.spec.name.clone(),
            pool: life.map_or_else(|| model.spec.pool.clone(), |life| life.pool.clone()),
            state: model.state(now),
            worth: worth(loss, 1.0, (private.total() + shared_host_bytes).max(1)),
            private,
            shared_host_bytes,
            in_flight: model.in_flight(),
            waiting: u32::try_from(model.waiting.len()).unwrap_or(u32::MAX),
            parked: model.parked(),
            demand_per_second: model.demand.per_second_at(now, half_life),
            last_used: model.last_used,
            measured: model.spec.measured,
            pin: model.spec.pin,
        }
    }

    /// How each pool's memory is used.
    pub fn memory(&self, now: Instant) -> Vec<PoolMemory> {
        self.pools.keys().filter_map(|name| self.pool_memory(now, name)).collect()
    }

    fn pool_memory(&self, now: Instant, name: &PoolName) -> Option<PoolMemory> {
        let pool = self.pools.get(name)?;
        let sum = |wanted: &[fn(&Phase) -> bool]| held_bytes(self.charges_in(name, wanted));
        let serving: fn(&Phase) -> bool = |phase| matches!(phase, Phase::Ready(_) | Phase::Draining(..));
        let leaving: fn(&Phase) -> bool = |phase| matches!(phase, Phase::Unloading { .. });
        let resident = sum(&[serving]);
        let kept = sum(&[serving, leaving]);
        let all = sum(&[serving, leaving, Phase::is_loading]);
        let parked = self.parked_in(name).map(|held| held.charge.private).unwrap_or_default();
        Some(PoolMemory {
            pool: name.clone(),
            free: pool.capacity.saturating_sub(&all).saturating_sub(&parked),
            parked,
            loading: all.saturating_sub(&kept),
            unloading: kept.saturating_sub(&resident),
            resident,
            capacity: pool.capacity.clone(),
            thrash_ratio: pool.thrash.ratio(now, self.settings.thrash_window),
            thrash_alarm: pool.thrash.is_raised(),
        })
    }

    fn charges_in<'a>(
        &'a self,
        pool: &'a PoolName,
        wanted: &'a [fn(&Phase) -> bool],
    ) -> impl Iterator<Item = &'a Charge> {
        self.models
            .active()
            .filter(move |model| wanted.iter().any(|matches| matches(&model.phase)))
            .filter_map(|model| model.phase.life())
            .filter(move |life| life.pool == *pool)
            .map(|life| &life.charge)
    }

    /// Bytes held in a pool right now, whatever their state.
    pub(super) fn held_in_pool(&self, pool: &PoolName) -> MemoryVector {
        self.held_with(pool, false, None)
    }

    /// Bytes held in a pool by those that stay, or by all, with somebody more if so.
    pub(super) fn held_with(&self, pool: &PoolName, is_staying: bool, more: Option<&Charge>) -> MemoryVector {
        let parked = self.parked_in(pool).map(|held| held.charge);
        let mut others = more.into_iter().chain(&parked).peekable();
        match self.models.held(pool, is_staying) {
            Some(held) if others.peek().is_none() => held.total(),
            Some(held) => {
                let mut held = held.clone();
                others.for_each(|charge| held.add(charge));
                held.total()
            }
            None => held_bytes(others),
        }
    }

    /// How long the longest waiting caller of a model that is not ready has waited.
    pub fn oldest_pending_load(&self, now: Instant) -> Duration {
        let at_work = self.models.busy().chain(self.models.absent());
        let pending = at_work.filter(|model| !matches!(model.phase, Phase::Ready(_)));
        pending.filter_map(Model::waiting_since).map(|since| now.since(since)).max().unwrap_or_default()
    }

    /// The limits it lives within.
    pub fn settings(&self) -> &super::Settings {
        &self.settings
    }
}
