//! Whether models stay in memory together: at rest, at the worst moment, while one is replaced, and after a worker is lost.
//!
//! A set fits if `sum + reserve <= budget`. The worst moment adds what requests take, what fragmentation loses, and what the
//! models that load at once need above what they keep. Side by side, a roll holds the old version and loads the new one.
//! Workers are filled by first fit, largest first, which for sizes alone never takes more than 11/9 of the fewest plus one (Dosa, 2007).

use super::input::{Refused, at_least_one, refused, share_or_none};
use serde::Serialize;
use std::collections::BTreeSet;

/// The most models of one set.
pub const MODELS_MAX: usize = 10_000;
/// The largest size that is believed, and the most requests at once.
const SIZE_MAX: u64 = 1 << 60;
const CONCURRENCY_MAX: u64 = 1 << 32;
/// The most workers that are filled.
const WORKERS_MAX: usize = 10_000;

/// A model of the set. Sizes are in any unit, the same for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmModel {
    /// Its name.
    pub name: String,
    /// What it keeps.
    pub steady: u64,
    /// The most it takes while it loads, at least as much.
    pub peak: u64,
    /// What one request takes beside that.
    pub per_request: u64,
    /// Requests at the same time.
    pub concurrency: u64,
}

/// A set of models and the worker it is for.
#[derive(Debug, Clone, PartialEq)]
pub struct WarmSet {
    /// The models.
    pub models: Vec<WarmModel>,
    /// Memory of a worker.
    pub budget: u64,
    /// What of it is kept free.
    pub reserve: u64,
    /// What is lost between allocations, as a share of what models keep.
    pub fragmentation: f64,
    /// How many models load at the same moment.
    pub loads_at_once: u64,
}

/// How much is used, and what is left of it; less than nothing where it does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// What is taken.
    pub used: u128,
    /// What remains.
    pub headroom: i128,
}

/// One model being replaced by a version of the same size while all others stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roll {
    /// Which.
    pub model: String,
    /// Old and new at once. Where this has no room, the old one must leave first, or another worker must help.
    pub side_by_side: Room,
}

/// Workers that hold the set together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Workers {
    /// Fewer cannot: the sum over what one offers.
    pub at_least: u64,
    /// So many hold it.
    pub packed: u64,
    /// One more: the set stays warm when one is lost.
    pub with_one_to_spare: u64,
    /// Which models share a worker.
    pub placement: Vec<Vec<String>>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// What models may use.
    pub usable: u64,
    /// All models at rest.
    pub steady: Room,
    /// All models at rest, their requests, fragmentation, and the largest loads at once.
    pub worst: Room,
    /// What of the worst moment requests take.
    pub requests: u128,
    /// What fragmentation takes.
    pub fragmentation: u128,
    /// What loading takes.
    pub loading: u128,
    /// Replacing each model, by name.
    pub rolls: Vec<Roll>,
    /// Workers for all, or none if a model is too large for any.
    pub workers: Option<Workers>,
    /// Models that no worker can hold.
    pub too_large: Vec<String>,
}

impl Room {
    /// Whether it fits. A set that fills its room exactly does.
    pub fn fits(&self) -> bool {
        self.headroom >= 0
    }
}

impl WarmModel {
    fn requests(&self) -> u128 {
        u128::from(self.per_request) * u128::from(self.concurrency)
    }

    fn loading(&self) -> u64 {
        self.peak - self.steady
    }
}

impl WarmSet {
    fn check(&self) -> Result<u64, Refused> {
        at_least_one("worker-memory", self.budget)?;
        share_or_none("fragmentation", self.fragmentation)?;
        if self.reserve >= self.budget {
            return Err(refused("reserve", "is not less than the worker's memory: nothing would be left for models"));
        }
        if self.models.is_empty() || self.models.len() > MODELS_MAX {
            return Err(refused("model", format!("is given {} times: give 1 to {MODELS_MAX}", self.models.len())));
        }
        let mut names = BTreeSet::new();
        for model in &self.models {
            at_least_one("model size", model.steady)?;
            if model.peak.max(model.per_request) > SIZE_MAX {
                return Err(refused(
                    "model size",
                    format!("of {} is more than any memory: check its unit", model.name),
                ));
            }
            if model.concurrency > CONCURRENCY_MAX {
                return Err(refused(
                    "concurrency",
                    format!("of {} is more than {CONCURRENCY_MAX}: check it", model.name),
                ));
            }
            if model.peak < model.steady {
                return Err(refused(
                    "peak",
                    format!("of {} is less than it keeps: give the most it takes", model.name),
                ));
            }
            if !names.insert(&model.name) {
                return Err(refused("model", format!("{} is given twice: give each once", model.name)));
            }
        }
        Ok(self.budget - self.reserve)
    }

    /// Fragmentation of so much, rounded up.
    fn lost(&self, kept: u128) -> u128 {
        let millionths = (self.fragmentation * 1e6).round() as u128;
        (kept * millionths).div_ceil(1_000_000)
    }

    /// Does all of it.
    pub fn answer(&self) -> Result<Answer, Refused> {
        let usable = self.check()?;
        let room = |used: u128| Room { used, headroom: i128::from(usable) - used as i128 };
        let steady: u128 = self.models.iter().map(|model| u128::from(model.steady)).sum();
        let requests: u128 = self.models.iter().map(WarmModel::requests).sum();
        let mut loads: Vec<u64> = self.models.iter().map(WarmModel::loading).collect();
        loads.sort_unstable_by(|first, second| second.cmp(first));
        let at_once = usize::try_from(self.loads_at_once).unwrap_or(usize::MAX).min(loads.len());
        let loading: u128 = loads[..at_once].iter().map(|bytes| u128::from(*bytes)).sum();
        let fragmentation = self.lost(steady);
        let roll =
            |model: &WarmModel| Roll { model: model.name.clone(), side_by_side: room(steady + u128::from(model.peak)) };
        let alone = |model: &&WarmModel| self.share_of(model) + u128::from(model.loading()) > u128::from(usable);
        let too_large: Vec<String> = self.models.iter().filter(alone).map(|model| model.name.clone()).collect();
        Ok(Answer {
            usable,
            steady: room(steady),
            worst: room(steady + requests + fragmentation + loading),
            requests,
            fragmentation,
            loading,
            rolls: self.models.iter().map(roll).collect(),
            workers: if too_large.is_empty() { Some(self.workers(usable)?) } else { None },
            too_large,
        })
    }

    /// What a model adds to its worker at the worst moment, without its load.
    fn share_of(&self, model: &WarmModel) -> u128 {
        u128::from(model.steady) + model.requests() + self.lost(u128::from(model.steady))
    }

    /// First fit, largest first; each worker keeps room for the largest load of its own.
    fn workers(&self, usable: u64) -> Result<Workers, Refused> {
        let mut order: Vec<&WarmModel> = self.models.iter().collect();
        order.sort_by(|first, second| {
            self.share_of(second).cmp(&self.share_of(first)).then_with(|| first.name.cmp(&second.name))
        });
        let mut filled: Vec<(u128, u64, Vec<String>)> = Vec::new();
        for model in order {
            let share = self.share_of(model);
            let fits = |(used, load, _): &(u128, u64, Vec<String>)| {
                *used + share + u128::from((*load).max(model.loading())) <= u128::from(usable)
            };
            let place = filled.iter().position(fits).unwrap_or_else(|| {
                filled.push((0, 0, Vec::new()));
                filled.len() - 1
            });
            if place >= WORKERS_MAX {
                return Err(refused(
                    "worker-memory",
                    format!("needs more than {WORKERS_MAX} workers: give a larger one"),
                ));
            }
            let (used, load, names) = &mut filled[place];
            *used += share;
            *load = (*load).max(model.loading());
            names.push(model.name.clone());
        }
        let total: u128 = self.models.iter().map(|model| self.share_of(model)).sum();
        let packed = filled.len() as u64;
        Ok(Workers {
            at_least: total.div_ceil(u128::from(usable)) as u64,
            packed,
            with_one_to_spare: packed + 1,
            placement: filled.into_iter().map(|(_, _, names)| names).collect(),
        })
    }
}
