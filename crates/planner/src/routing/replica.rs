//! A replica as a model of continuous batching: steps with a token budget, prompts read in order of arrival, and a
//! memory that keeps the prompts used last.

use std::collections::VecDeque;

/// Time of a step, before what it does.
const STEP_SECONDS: f64 = 0.012;
/// Time that each answer being written adds to a step.
const STREAM_SECONDS: f64 = 0.000_25;
/// Time that each token of a prompt adds to a step.
const PREFILL_SECONDS: f64 = 0.000_1;
/// Tokens of one step.
const STEP_TOKENS: u32 = 2048;
/// Requests computed at a time.
pub const SLOTS: u32 = 64;

/// A request at a replica.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Its number.
    pub number: usize,
    /// Whose prompt it begins with.
    pub tenant: u32,
    /// Tokens of that prompt, and of what comes after it.
    pub system_tokens: u32,
    /// Tokens of the question.
    pub question_tokens: u32,
    /// Tokens of the answer still to be written.
    pub output_tokens: u32,
}

#[derive(Debug, Clone, Copy)]
struct Running {
    job: Job,
    prefill_left: u32,
}

/// What one step did.
#[derive(Debug, Default)]
pub struct Step {
    /// Requests that were begun, and whether their prompt was in memory.
    pub begun: Vec<(usize, bool)>,
    /// Requests whose first token it wrote.
    pub first_tokens: Vec<usize>,
    /// Requests that it finished.
    pub finished: Vec<usize>,
}

/// One replica.
#[derive(Debug)]
pub struct Replica {
    /// Whether it is there.
    pub up: bool,
    /// Whether a step of it is on the way.
    pub stepping: bool,
    /// The step on the way.
    pub step: Step,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    /// Prompts in memory, used last at the end.
    prompts: Vec<u32>,
    prompts_max: usize,
}

impl Replica {
    /// One that keeps this many prompts.
    pub fn new(prompts_max: usize) -> Self {
        Self {
            up: true,
            stepping: false,
            step: Step::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            prompts: Vec::new(),
            prompts_max,
        }
    }

    /// Requests it has.
    pub fn requests(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// A request comes.
    pub fn push(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// It is gone, and these requests with it.
    pub fn lose(&mut self) -> Vec<Job> {
        self.up = false;
        let running = self.running.drain(..).map(|running| running.job);
        let lost = running.chain(self.waiting.drain(..)).collect();
        self.prompts.clear();
        lost
    }

    fn keep(&mut self, tenant: u32) {
        self.prompts.retain(|kept| *kept != tenant);
        self.prompts.push(tenant);
        if self.prompts.len() > self.prompts_max {
            self.prompts.remove(0);
        }
    }

    /// The step on the way is over: what it did.
    pub fn end_step(&mut self) -> Step {
        self.running.retain(|running| running.prefill_left > 0 || running.job.output_tokens > 0);
        core::mem::take(&mut self.step)
    }

    /// Begins a step, if there is anything to do, and says how long it takes.
    pub fn begin_step(&mut self) -> Option<f64> {
        let mut step = Step::default();
        let streams = self.running.iter().filter(|running| running.prefill_left == 0).count();
        let mut budget = STEP_TOKENS.saturating_sub(streams as u32);
        let mut read_tokens = 0;
        for at in 0..self.running.len() {
            if self.running[at].prefill_left > 0 {
                read_tokens += self.read(at, &mut budget, &mut step);
            }
        }
        while budget > 0 && self.running.len() < SLOTS as usize {
            let Some(job) = self.waiting.pop_front() else { break };
            let hit = self.prompts.contains(&job.tenant);
            if hit {
                self.keep(job.tenant);
            }
            step.begun.push((job.number, hit));
            let prefill_left = job.question_tokens + if hit { 0 } else { job.system_tokens };
            self.running.push(Running { job, prefill_left });
            read_tokens += self.read(self.running.len() - 1, &mut budget, &mut step);
        }
        self.stepping = streams > 0 || read_tokens > 0;
        for running in self.running.iter_mut().filter(|running| running.prefill_left == 0) {
            running.job.output_tokens = running.job.output_tokens.saturating_sub(1);
            if running.job.output_tokens == 0 {
                step.finished.push(running.job.number);
            }
        }
        self.step = step;
        let seconds = STEP_SECONDS + STREAM_SECONDS * streams as f64 + PREFILL_SECONDS * f64::from(read_tokens);
        self.stepping.then_some(seconds)
    }

    /// Reads as much of a prompt as the step has room for.
    fn read(&mut self, at: usize, budget: &mut u32, step: &mut Step) -> u32 {
        let running = &mut self.running[at];
        let tokens = running.prefill_left.min(*budget);
        running.prefill_left -= tokens;
        *budget -= tokens;
        if running.prefill_left == 0 && tokens > 0 {
            let Job { number, tenant, .. } = running.job;
            step.first_tokens.push(number);
            self.keep(tenant);
        }
        tokens
    }
}
