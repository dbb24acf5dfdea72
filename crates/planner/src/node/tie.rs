//! A worker and a KV tier that share host memory, tied together as they are live: after each event the tier hears what models
//! leave, and the worker hears from the tier when blocks leave that are worth something.

use super::{Ask, Happening, Node, Prompt, PromptCost, PromptOutcome, kv};
use crate::events::Rank;
use std::collections::BTreeMap;
use warmset_core::{
    Bytes, Digest, Instant, Machine,
    memory::HOST,
    worker::{Event, PoolMemory},
};

/// Who holds host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Models, those included that load or leave.
    pub models_bytes: Bytes,
    /// KV outside of engines.
    pub kv_bytes: Bytes,
}

impl Node {
    /// Keeps KV from now on, beside models whose engines deal with prompts as told.
    pub fn keep_kv(&mut self, costs: kv::KvCosts, models: &BTreeMap<Digest, PromptCost>) {
        self.kv = Some(kv::Kv::new(costs, models));
        self.limit_kv();
    }

    /// Lets a request come at its time whose prompt is known.
    pub fn ask_with_prompt(&mut self, at: Instant, ask: Ask, prompt: Prompt) {
        self.prompts.insert(ask.request, prompt);
        self.ask(at, ask);
    }

    /// Holds the invariants of both machines, and of what ties them together. What is broken, in words.
    pub fn check(&self) -> Result<(), String> {
        let worker = self.worker.machine();
        worker.check(self.now).map_err(|violation| format!("{violation:?}"))?;
        let Some(kv) = &self.kv else { return Ok(()) };
        kv.tier().check().map_err(|violation| violation.to_string())?;
        let (held_bytes, limit_bytes) = (kv.tier().host_bytes(), worker.kv_limit_bytes());
        if kv.is_idle() && held_bytes > limit_bytes {
            return Err(format!("KV has what models leave: {held_bytes} bytes of blocks for {limit_bytes}"));
        }
        Ok(())
    }

    /// Who holds host memory now.
    pub fn held(&self) -> Held {
        let pools = self.worker.machine().memory(self.now);
        let of_pool = |pool: &PoolMemory| [&pool.loading, &pool.resident, &pool.unloading].map(|held| held.get(HOST));
        Held {
            models_bytes: pools.iter().flat_map(of_pool).sum(),
            kv_bytes: self.kv.as_ref().map_or(0, |kv| kv.tier().host_bytes()),
        }
    }

    /// What came of prompts.
    pub fn prompt_outcome(&self) -> PromptOutcome {
        self.kv.as_ref().map(|kv| kv.outcome.clone()).unwrap_or_default()
    }

    /// When the next thing happens.
    pub fn next_at(&self) -> Option<Instant> {
        self.next_timer().into_iter().chain(self.next_end()).min()
    }

    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.worker.machine().next_timer().into_iter().chain(self.kv_timer()).min()
    }

    fn kv_timer(&self) -> Option<Instant> {
        self.kv.as_ref().and_then(|kv| kv.tier().next_timer())
    }

    /// The timer of whoever it is that asked for one by now.
    pub(super) fn turn_timers(&mut self) {
        let is_due = self.kv_timer().is_some_and(|at| at <= self.now);
        match self.kv.as_mut().filter(|_| is_due) {
            Some(kv) => {
                kv.timer(self.now);
                self.follow();
            }
            None => self.feed(Event::Timer),
        }
    }

    pub(super) fn kv_step(&mut self, step: kv::Step) {
        if let Some(kv) = &mut self.kv {
            kv.step(self.now, step);
            self.follow();
        }
    }

    /// What the worker is about to be told concerns engines, too.
    pub(super) fn kv_hears(&mut self, event: &Event) {
        if let Some(kv) = &mut self.kv {
            kv.hear(self.now, event);
        }
    }

    /// KV may have what models leave.
    pub(super) fn limit_kv(&mut self) {
        let limit_bytes = self.worker.machine().kv_limit_bytes();
        if let Some(kv) = &mut self.kv {
            kv.limit(self.now, limit_bytes);
            self.follow();
        }
    }

    /// What follows from what the tier and engines did happens in its time.
    fn follow(&mut self) {
        let follows = self.kv.as_mut().map(|kv| std::mem::take(&mut kv.follows)).unwrap_or_default();
        for outcome in follows {
            let (delay, happening) = match outcome {
                kv::Outcome::Step(delay, step) => (delay, Happening::Kv(step)),
                kv::Outcome::Worker(delay, event) => (delay, Happening::Worker(event)),
            };
            self.queue.push(self.now + delay, Rank::Completion, happening);
        }
    }
}
