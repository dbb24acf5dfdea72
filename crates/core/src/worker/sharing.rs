//! Host memory between models and cached KV: one scale for both.
//!
//! Models come first when somebody waits for them; KV gives way at once. What an idle model holds, KV may get: where blocks
//! leave that are worth more per byte than a model nobody uses, that model leaves in their place.

use super::{
    Worker,
    protocol::{Action, EvictionReason},
};
use crate::{
    ids::{Digest, PoolName, Priority},
    memory::{Bytes, HOST},
    residency::{Standing, worth},
    time::Instant,
};
use alloc::vec::Vec;

/// A model leaves for KV only if that is worth so many times as much: both are estimates, and coming back costs a load.
const WORTH_MARGIN: f64 = 2.0;

impl Worker {
    /// Host bytes that cached KV may take: what models leave of the default pool.
    pub fn kv_limit_bytes(&self) -> Bytes {
        let default = PoolName::default_pool();
        let capacity = self.pools.get(&default).map_or(0, |pool| pool.capacity.get(HOST));
        capacity.saturating_sub(self.held_in_pool(&default).get(HOST))
    }

    /// Blocks of this worth per byte and second leave host memory for want of room.
    pub(super) fn kv_pressed(&mut self, now: Instant, kv_worth: f64, actions: &mut Vec<Action>) {
        self.note_kv_pressure(now, kv_worth);
        if let Some((digest, model_worth)) = self.least_worth_idle(now)
            && model_worth * WORTH_MARGIN < kv_worth
        {
            self.stop(now, digest, EvictionReason::Memory, actions);
        }
    }

    /// The idle model of the default pool that is worth least per byte of host memory, and what it is worth.
    fn least_worth_idle(&self, now: Instant) -> Option<(Digest, f64)> {
        let default = PoolName::default_pool();
        // KV is nobody's request: it displaces nobody who was used a moment ago.
        let held = self.held_in(now, &default, Priority::Batch, super::plan::Reach::Idle);
        let evictable = held.iter().filter_map(|held| match held.standing {
            Standing::Evictable { loss } => {
                let bytes = held.charge.private.get(HOST) + held.charge.shared_host_bytes;
                let model = self.models.get(&held.digest)?;
                // Who has not been asked for in some time is not asked for more often than once in it, whatever was before.
                let idle = now.since(model.last_used.unwrap_or(Instant::ZERO)).as_secs_f64();
                let once = model.spec.targets.weigh(model.spec.rewarm_seconds) / idle.max(1.0);
                Some((held.digest, worth(loss.min(once), 1.0, bytes)))
            }
            _ => None,
        });
        evictable.min_by(|one, other| one.1.total_cmp(&other.1).then(one.0.cmp(&other.0)))
    }
}
