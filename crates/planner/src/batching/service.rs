//! A replica without steps: how long a request is served, from the same costs.
//!
//! Two models. **Servers**: so many requests at a time, each served as if all servers were busy: its prompt, then a
//! step for each token (G/G/c, first come first served; with exponential or constant times this is M/M/c and M/D/1).
//! **Sharing**: prompts are read in the order in which they came, from the end of the step on the way on, as many in a
//! step as it has tokens, and those that generate get a token for each of these steps. The rest of the time they share:
//! all of them have got a token when a step's time has passed, which depends on how many they are and how much they
//! have read (processor sharing with a rate that depends on its load: Kleinrock, Queueing Systems II, section 4.4).
//! Both keep a request out while there is no sequence or no memory for all its tokens, so that nobody has to give way.
//! Prompts share nothing.

use super::{
    cost::{Picoseconds, StepCost, StepShape, TIME_MAX, pairs},
    engine::EngineSettings,
    outcome::Outcomes,
    workload::{Request, Workload},
};
use serde::{Deserialize, Serialize};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

/// Progress of a sequence is counted in parts of a token.
const PARTS_PER_TOKEN: u64 = 1 << 20;

/// How requests at a replica get in each other's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Discipline {
    /// They share its time.
    #[default]
    Sharing,
    /// Each has a server of its own while it is served, and waits for one before.
    Servers,
}

/// One replica.
#[derive(Debug)]
pub struct Service {
    settings: EngineSettings,
    cost: StepCost,
    discipline: Discipline,
    waiting: VecDeque<u32>,
    /// Those that are served, by the time (servers) or the progress (sharing) at which they end.
    serving: BinaryHeap<Reverse<(u64, u32)>>,
    /// Tokens of memory that are spoken for.
    blocks: u64,
    /// The step or steps in which prompts were last to be read, when they begin and when they end.
    reading: StepShape,
    reading_from: Picoseconds,
    reading_until: Picoseconds,
    /// Progress of each that generates, in parts of a token, at `counted`.
    progress: u64,
    counted: Picoseconds,
    /// Tokens that those have which are served, less the progress since.
    base_tokens: i128,
}

impl Service {
    /// One that has nothing to do.
    pub fn new(settings: EngineSettings, cost: StepCost, discipline: Discipline) -> Self {
        Self {
            settings,
            cost,
            discipline,
            waiting: VecDeque::new(),
            serving: BinaryHeap::new(),
            blocks: 0,
            reading: StepShape::default(),
            reading_from: 0,
            reading_until: 0,
            progress: 0,
            counted: 0,
            base_tokens: 0,
        }
    }

    /// Requests it has.
    pub fn requests(&self) -> usize {
        self.waiting.len() + self.serving.len()
    }

    fn blocks_of(&self, request: &Request) -> u64 {
        let tokens = request.prompt_tokens.saturating_add(request.output_tokens - 1);
        u64::from(tokens.div_ceil(self.settings.block_tokens))
    }

    /// A step in which all that are served generate.
    fn step(&self) -> StepShape {
        let sequences = self.serving.len() as u64;
        let grown = i128::from(self.progress / PARTS_PER_TOKEN) * sequences as i128;
        let context_tokens = u64::try_from(self.base_tokens + grown).unwrap_or(0);
        StepShape { sequences, context_tokens, ..StepShape::default() }
    }

    /// A request comes.
    pub fn push(&mut self, now: Picoseconds, request: u32, workload: &Workload, outcomes: &mut Outcomes) {
        self.waiting.push_back(request);
        self.admit(now, workload, outcomes);
    }

    /// When the next one ends, if none comes before.
    pub fn ends(&self) -> Option<Picoseconds> {
        let Reverse((end, _)) = *self.serving.peek()?;
        match self.discipline {
            Discipline::Servers => Some(end),
            Discipline::Sharing => {
                let parts = u128::from(end.saturating_sub(self.progress)) * u128::from(self.cost.of(&self.step()));
                let left = parts.div_ceil(u128::from(PARTS_PER_TOKEN)).min(u128::from(TIME_MAX)) as u64;
                Some((self.counted.max(self.reading_until) + left).min(TIME_MAX))
            }
        }
    }

    /// The next one ends, at the time that was told, and so do all others that are done by then.
    pub fn end(&mut self, now: Picoseconds, workload: &Workload, outcomes: &mut Outcomes) {
        outcomes.ended = now;
        let Some(Reverse((first, _))) = self.serving.peek().copied() else { return };
        let due = match self.discipline {
            Discipline::Servers => now,
            Discipline::Sharing => {
                self.counted = now;
                self.progress = self.progress.max(first);
                self.progress
            }
        };
        while let Some(Reverse((end, request))) = self.serving.peek().copied().filter(|Reverse((end, _))| *end <= due) {
            self.serving.pop();
            outcomes.request(request).finished = now;
            let asked = workload.request(request);
            self.blocks -= self.blocks_of(asked);
            if self.discipline == Discipline::Sharing {
                self.base_tokens -= i128::from(asked.prompt_tokens) - begun(end, asked);
                let gaps = u64::from(asked.output_tokens - 1);
                let generating = now - outcomes.request(request).first_token;
                outcomes.gap(generating / gaps.max(1), gaps);
            }
        }
        self.admit(now, workload, outcomes);
    }

    /// Whether the memory that is spoken for is that of the requests that are served, and there is so much.
    pub fn check(&self, workload: &Workload) -> bool {
        let held = self.serving.iter().map(|Reverse((_, request))| self.blocks_of(workload.request(*request)));
        held.sum::<u64>() == self.blocks
            && self.blocks <= self.settings.blocks
            && self.serving.len() <= self.settings.max_sequences as usize
    }

    fn admit(&mut self, now: Picoseconds, workload: &Workload, outcomes: &mut Outcomes) {
        while self.serving.len() < self.settings.max_sequences as usize {
            let Some(request) = self.waiting.front().copied() else { break };
            let asked = workload.request(request);
            let blocks = self.blocks_of(asked);
            if self.blocks + blocks > self.settings.blocks {
                break;
            }
            self.waiting.pop_front();
            self.blocks += blocks;
            outcomes.request(request).admitted = now;
            outcomes.memory_max_share = outcomes.memory_max_share.max(self.blocks as f64 / self.settings.blocks as f64);
            match self.discipline {
                Discipline::Servers => self.serve(now, request, asked, outcomes),
                Discipline::Sharing => self.share(now, request, asked, outcomes),
            }
        }
    }

    /// A server takes it.
    fn serve(&mut self, now: Picoseconds, request: u32, asked: &Request, outcomes: &mut Outcomes) {
        let sequences = u64::from(self.settings.max_sequences);
        let tokens = u64::from(asked.prompt_tokens) + u64::from(asked.output_tokens) / 2;
        let shape = StepShape { sequences, context_tokens: sequences * tokens, ..StepShape::default() };
        let (steps, step) = (u64::from(asked.output_tokens - 1), self.cost.of(&shape));
        let first_token = (now + self.cost.of(&prompt(asked))).min(TIME_MAX);
        let end = first_token.saturating_add(step.saturating_mul(steps)).min(TIME_MAX);
        outcomes.request(request).first_token = first_token;
        outcomes.gap(step, steps);
        self.serving.push(Reverse((end, request)));
    }

    /// It joins those that share, in a step that reads other prompts if there is one to come that has room.
    fn share(&mut self, now: Picoseconds, request: u32, asked: &Request, outcomes: &mut Outcomes) {
        self.count(now);
        let read = prompt(asked);
        let step_tokens = u64::from(self.settings.step_tokens);
        let joined = StepShape {
            prefill_tokens: self.reading.prefill_tokens + read.prefill_tokens,
            prefill_pairs: self.reading.prefill_pairs + read.prefill_pairs,
            ..self.reading
        };
        if self.reading_from >= now && joined.prefill_tokens <= step_tokens && self.reading_until > now {
            let more = self.cost.of(&joined) - self.cost.of(&self.reading);
            self.reading = joined;
            self.reading_until = (self.reading_until + more).min(TIME_MAX);
        } else {
            let beside = self.step();
            self.reading_from = self.next_step(now, &beside);
            let steps = read.prefill_tokens.div_ceil(step_tokens);
            let (sequences, context_tokens) = (beside.sequences * steps, beside.context_tokens * steps);
            self.reading = StepShape { sequences, context_tokens, ..read };
            self.reading_until = (self.reading_from + self.cost.of(&self.reading)).min(TIME_MAX);
            self.progress += steps * PARTS_PER_TOKEN;
        }
        let outcome = outcomes.request(request);
        (outcome.admitted, outcome.first_token) = (self.reading_from, self.reading_until);
        let end = self.progress + u64::from(asked.output_tokens - 1) * PARTS_PER_TOKEN;
        self.base_tokens += i128::from(asked.prompt_tokens) - begun(end, asked);
        self.serving.push(Reverse((end, request)));
    }

    /// When the step on the way is over: progress is that of steps, so what is missing to a whole token is its rest.
    fn next_step(&mut self, now: Picoseconds, beside: &StepShape) -> Picoseconds {
        if now < self.reading_until || beside.sequences == 0 {
            return now.max(self.reading_until);
        }
        let rest = self.progress.next_multiple_of(PARTS_PER_TOKEN) - self.progress;
        self.progress += rest;
        now + (u128::from(rest) * u128::from(self.cost.of(beside)) / u128::from(PARTS_PER_TOKEN)) as u64
    }

    /// What they have got up to now.
    fn count(&mut self, now: Picoseconds) {
        let since = self.counted.max(self.reading_until);
        if now > since && !self.serving.is_empty() {
            let parts =
                u128::from(now - since) * u128::from(PARTS_PER_TOKEN) / u128::from(self.cost.of(&self.step()).max(1));
            self.progress += parts as u64;
        }
        self.counted = now;
    }
}

/// Reading a prompt, alone.
fn prompt(request: &Request) -> StepShape {
    let tokens = u64::from(request.prompt_tokens);
    StepShape { prefill_tokens: tokens, prefill_pairs: pairs(tokens, 0), ..StepShape::default() }
}

/// Whole tokens of progress when it began, from where it ends.
fn begun(end: u64, asked: &Request) -> i128 {
    i128::from(end / PARTS_PER_TOKEN) - i128::from(asked.output_tokens - 1)
}
