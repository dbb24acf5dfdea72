//! How many conversations fit into the memory of a replica, and how many replicas hold a number of them.
//!
//! `fit = floor((utilisation * memory - weights) / bytes of a session)`, as engines that page their KV do it: vLLM takes
//! `gpu_memory_utilization` of the memory, subtracts weights and activations, and cuts the rest into blocks.

use super::input::{Refused, at_least_one, part_of, product, refused, share};
use serde::Serialize;

/// A replica and what it is asked to hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sessions {
    /// Memory of all its GPUs.
    pub memory_bytes: u64,
    /// The part of it that an engine uses.
    pub memory_utilisation: f64,
    /// What weights take.
    pub weight_bytes: u64,
    /// What else is taken: activations, graphs.
    pub other_bytes: u64,
    /// What one session takes.
    pub session_bytes: u64,
    /// Sessions that are to be held.
    pub sessions: u64,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// The part of the memory that an engine uses.
    pub memory_utilisation: f64,
    /// What is left for KV; 0 if the rest leaves nothing.
    pub kv_budget_bytes: u64,
    /// What one session takes.
    pub session_bytes: u64,
    /// What all take.
    pub total_bytes: u64,
    /// The same by the whole memory.
    pub times_memory: f64,
    /// Sessions that one replica holds.
    pub sessions_that_fit: u64,
    /// Whether it holds all.
    pub fits: bool,
    /// What is left; less than nothing where they do not fit.
    pub headroom_bytes: i64,
    /// Replicas that hold all, if one holds any.
    pub replicas_needed: Option<u64>,
}

impl Sessions {
    /// Does it.
    pub fn answer(&self) -> Result<Answer, Refused> {
        at_least_one("memory", self.memory_bytes)?;
        at_least_one("session bytes", self.session_bytes)?;
        at_least_one("sessions", self.sessions)?;
        let usable = part_of(self.memory_bytes, share("memory-utilisation", self.memory_utilisation)?);
        let taken = self.weight_bytes.checked_add(self.other_bytes);
        let taken = taken.ok_or_else(|| refused("weights", "are too large to be calculated with: check their unit"))?;
        let kv_budget_bytes = usable.saturating_sub(taken);
        let total_bytes = product("bytes of all sessions", &[self.session_bytes, self.sessions])?;
        let fit = kv_budget_bytes / self.session_bytes;
        let headroom = i128::from(usable) - i128::from(taken) - i128::from(total_bytes);
        let too_large =
            |_| refused("memory", "and what it is to hold are too large to be calculated with: check their units");
        Ok(Answer {
            memory_utilisation: self.memory_utilisation,
            kv_budget_bytes,
            session_bytes: self.session_bytes,
            total_bytes,
            times_memory: total_bytes as f64 / self.memory_bytes as f64,
            sessions_that_fit: fit,
            fits: fit >= self.sessions,
            headroom_bytes: i64::try_from(headroom).map_err(too_large)?,
            replicas_needed: (fit > 0).then(|| self.sessions.div_ceil(fit)),
        })
    }
}
