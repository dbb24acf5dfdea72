//! Requests that leave in the middle, and go on here or in another engine of the same model, token for token.
//!
//! A stopped request stays on its sequence until its state is out, so that it can also just run on. What was told is not
//! told again: filter, grammar, sampler and parser are brought to where they were by the tokens that were generated.

use super::{
    super::{
        load::Loaded,
        logprobs::PendingLogprobs,
        request::{Clock, Generation, Refusal, numbers},
        sys::Token,
    },
    Generations, Running, failed,
    running::text_of,
};
use crate::{
    kv::{Ages, ParkedMemory, Parts, State, not_resumed},
    port::Report,
    protocol::{FromEngine, GenerateJob},
};
use serde::{Deserialize, Serialize};

/// All of a request but its state.
#[derive(Serialize, Deserialize)]
struct Record {
    job: Box<GenerateJob>,
    /// None if nothing was computed: then it begins anew.
    progress: Option<Progress>,
}

/// How far a request has come.
#[derive(Serialize, Deserialize)]
struct Progress {
    prompt: Vec<u32>,
    seed: u64,
    prefilled: usize,
    generated: Vec<u32>,
    cached_tokens: u32,
    known_blocks: u32,
    offered: bool,
    logprobs: PendingLogprobs,
    ages: Ages,
}

/// A request that waits for a sequence to put its state into.
pub(in crate::llama) struct Resuming {
    running: Running,
    memory: ParkedMemory,
}

impl Resuming {
    pub(super) fn request(&self) -> u64 {
        self.running.request
    }
}

/// Leaving.
impl Generations {
    /// Stops a request and says what it takes to leave, or that it cannot.
    pub(in crate::llama) fn stop(&mut self, loaded: &Loaded, request: u64, report: Report<'_>) {
        match self.size(loaded, request) {
            Some(parts) => {
                report(FromEngine::ParkSized { request, bytes: parts.bytes() });
                self.set_stopped(request, true);
                self.leaving.insert(request, parts);
            }
            None => report(FromEngine::ParkRefused { request }),
        }
    }

    /// What a request would leave behind; none if it cannot leave.
    fn size(&self, loaded: &Loaded, request: u64) -> Option<Parts<Vec<u8>>> {
        let generation = self.all.get(&request).filter(|generation| generation.job.choices == 1)?;
        let job = generation.job.clone();
        if generation.choices_started == 0 {
            return Parts::new(&Record { job, progress: None }, 0).ok();
        }
        // One that has just come back and waits for its sequence stays.
        let (sequence, running) = self.placed(request)?;
        let ready = running.finish.is_none() && running.cached() > 0 && !loaded.context.is_unsettled(sequence as i32);
        loaded.states.as_ref().filter(|_| ready)?;
        let clock = &generation.clock;
        let progress = Progress {
            prompt: generation.prompt_numbers(),
            seed: generation.seed,
            prefilled: running.prefilled,
            generated: numbers(&running.generated),
            cached_tokens: generation.cached_tokens,
            known_blocks: generation.known_blocks,
            offered: generation.offered,
            logprobs: running.logprobs.clone(),
            ages: Ages::of([Some(clock.received), clock.prefill_begin, clock.first_token, clock.last_token]),
        };
        // Room for the other sequences' numbers of cells: see `Context::state`.
        let room = 4 * loaded.context.sequences() as usize;
        let record = Record { job, progress: Some(progress) };
        Parts::new(&record, loaded.context.state_bytes(sequence as i32) + room).ok()
    }

    fn placed(&self, request: u64) -> Option<(usize, &Running)> {
        let slots = self.slots.iter().enumerate().filter_map(|(sequence, slot)| Some((sequence, slot.as_ref()?)));
        slots.into_iter().find(|(_, running)| running.request == request)
    }

    fn set_stopped(&mut self, request: u64, stopped: bool) {
        if let Some(generation) = self.all.get_mut(&request) {
            generation.stopped = stopped;
        }
        for running in self.slots.iter_mut().flatten().filter(|running| running.request == request) {
            running.stopped = stopped;
        }
    }

    /// Computes a stopped request on.
    pub(in crate::llama) fn run_on(&mut self, request: u64) {
        self.leaving.remove(&request);
        self.set_stopped(request, false);
    }

    /// Puts a stopped request into memory of the server and forgets it.
    pub(in crate::llama) fn leave(
        &mut self,
        loaded: &mut Loaded,
        request: u64,
        memory: ParkedMemory,
        report: Report<'_>,
    ) {
        let Some(true) = self.all.get(&request).map(|generation| generation.stopped) else {
            return report(FromEngine::ParkRefused { request });
        };
        if let Err(reason) = self.write(loaded, request, memory) {
            crate::child::log(&format!("does not park a request: {reason}"));
            self.run_on(request);
            return report(FromEngine::ParkRefused { request });
        }
        if let Some(sequence) = self.placed(request).map(|(sequence, _)| sequence) {
            self.slots[sequence] = None;
            self.clear_sequence(loaded, sequence);
        }
        self.forget_waiting(request);
        if let Some(mut generation) = self.all.remove(&request) {
            generation.settle_grant(report);
        }
        report(FromEngine::Parked { request });
    }

    fn write(&self, loaded: &mut Loaded, request: u64, mut memory: ParkedMemory) -> Result<(), String> {
        let parts = self.leaving.get(&request).ok_or("it was not stopped")?;
        let Some((sequence, running)) = self.placed(request) else { return parts.write(&mut memory, |_| Ok(0)) };
        let template = loaded.states.as_ref().ok_or("states of this model cannot be moved")?;
        parts.write(&mut memory, |room| {
            let bytes = loaded.context.state(sequence as i32, room)?;
            let state = State::parse(template.layout(), &room[..bytes]).map_err(|error| error.to_string())?;
            let right = state.cells() as usize == running.cached();
            if right { Ok(bytes) } else { Err(format!("its sequence holds {} tokens", state.cells())) }
        })
    }
}

/// Coming back.
impl Generations {
    /// Takes a request that was stopped elsewhere. Gives it back if it begins anew.
    pub(in crate::llama) fn resume(
        &mut self,
        loaded: &Loaded,
        request: u64,
        memory: ParkedMemory,
        report: Report<'_>,
    ) -> Option<Box<GenerateJob>> {
        let Record { job, progress } = match memory.read() {
            Ok((record, _)) => record,
            Err(reason) => {
                report(not_resumed(request, &reason));
                return None;
            }
        };
        let Some(progress) = progress else { return Some(job) };
        match self.rebuild(loaded, request, job, progress) {
            Ok((generation, running)) => {
                self.all.insert(request, generation);
                self.resuming.push(Resuming { running, memory });
            }
            Err(refusal) => report(failed(request, refusal)),
        }
        None
    }

    fn rebuild(
        &mut self,
        loaded: &Loaded,
        request: u64,
        job: Box<GenerateJob>,
        progress: Progress,
    ) -> Result<(Generation, Running), Refusal> {
        let tokens = |numbers: &[u32]| numbers.iter().map(|token| *token as Token).collect::<Vec<Token>>();
        let [received, prefill_begin, first_token, last_token] = progress.ages.moments();
        let received = received.ok_or_else(|| Refusal::internal("a parked request has no beginning"))?;
        let clock = Clock { received, prefill_begin, first_token, last_token };
        let prompt = tokens(&progress.prompt);
        let mut generation = Generation::resumed(loaded, request, job, (prompt, progress.seed), clock)?;
        generation.granted = true;
        generation.choices_started = 1;
        generation.completion_tokens = progress.generated.len() as u32;
        (generation.cached_tokens, generation.known_blocks) = (progress.cached_tokens, progress.known_blocks);
        generation.offered = progress.offered;
        let mut running = Running::new(loaded, &generation, 0, progress.prefilled);
        running.generated = tokens(&progress.generated);
        self.replay(loaded, &generation, &mut running)?;
        running.logprobs = progress.logprobs;
        Ok((generation, running))
    }

    /// Brings a choice to where it was after its tokens were picked and told.
    fn replay(&mut self, loaded: &Loaded, generation: &Generation, running: &mut Running) -> Result<(), Refusal> {
        let (sampler, filter) = (&mut running.sampler, &mut running.filter);
        for token in &running.generated {
            sampler.replay(*token);
            if let Some(constraint) = &mut running.constraint {
                constraint.take(*token as u32).map_err(|error| Refusal::internal(error.to_string()))?;
            }
            text_of(loaded, running.calls.is_some(), *token, &mut self.pieces);
            filter.push(&self.pieces);
        }
        if generation.job.stream {
            let told = filter.take();
            if let Some(calls) = &mut running.calls {
                calls.push(&told, false, (running.request, running.choice));
            }
        }
        Ok(())
    }

    /// Puts the states of requests that come back into free sequences.
    pub(super) fn admit_resumed(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        while !self.hold
            && !self.resuming.is_empty()
            && let Some(sequence) = self.free_sequence()
        {
            if loaded.context.is_unsettled(sequence as i32) && self.slots.iter().any(Option::is_some) {
                // The next batch makes the copy that it is a part of.
                return;
            }
            let Resuming { running, memory } = self.resuming.remove(0);
            let request = running.request;
            self.clear_sequence(loaded, sequence);
            let taken = memory.read::<Record>().and_then(|(_, state)| {
                let layout = loaded.states.as_ref().ok_or("states of this model cannot be moved")?.layout();
                let cells = State::parse(layout, state).map_err(|error| error.to_string())?.cells();
                let right = cells as usize == running.cached() && loaded.context.set_state(sequence as i32, state);
                if right { Ok(()) } else { Err("the model does not take its state".to_owned()) }
            });
            match taken {
                Ok(()) => self.slots[sequence] = Some(running),
                Err(reason) => {
                    self.all.remove(&request);
                    report(not_resumed(request, &reason));
                }
            }
        }
    }
}
