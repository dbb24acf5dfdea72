//! How a new version of a model could take the place of the old one. Looking changes nothing.

use super::{Worker, model::Model, plan::Reach, protocol::Rejection};
use crate::{
    ids::Digest,
    residency::{Held, Placement, Problem, Standing, place},
    rollout::Takeover,
    time::Instant,
};
use alloc::vec::Vec;

impl Worker {
    /// Whether a version fits beside the one it is to replace, and who leaves memory for it. Both must be configured.
    pub fn takeover(&self, now: Instant, digest: Digest, predecessor: Digest) -> Takeover {
        let Some(model) = self.models.get(&digest) else {
            return Takeover::Impossible { rejection: Rejection::UnknownModel };
        };
        if model.phase.life().is_some() && !model.phase.is_leaving() {
            return Takeover::SideBySide { evicts: Vec::new() };
        }
        let beside = self.place_among(now, model, |held| {
            if held.digest == predecessor && held.standing != Standing::Leaving {
                held.standing = Standing::Fixed;
            }
        });
        if let Some(placement) = beside {
            return Takeover::SideBySide { evicts: placement.victims };
        }
        let instead = self.place_among(now, model, |held| {
            if held.digest == predecessor {
                held.standing = Standing::Leaving;
            }
        });
        let footprint = self.peak_to_plan(model);
        match instead {
            Some(placement) => {
                Takeover::DrainThenLoad { needed_bytes: footprint.total_bytes(), evicts: placement.victims }
            }
            None => {
                let no_memory = Rejection::NoMemory { retry_after: self.settings.backoff_max };
                Takeover::Impossible { rejection: self.too_large_alone(model).unwrap_or(no_memory) }
            }
        }
    }

    /// Where a model would go if holders of memory stood as `change` says.
    fn place_among(&self, now: Instant, model: &Model, change: impl Fn(&mut Held)) -> Option<Placement> {
        let pool = self.pools.get(&model.spec.pool)?;
        let mut held = self.held_in(now, &model.spec.pool, model.class(), Reach::InUse);
        held.iter_mut().for_each(change);
        let footprint = self.peak_to_plan(model);
        place(&Problem { capacity: &pool.capacity, held: &held, footprint: &footprint, artifact: model.spec.artifact })
    }
}
