//! Requests of the synthetic engine that leave in the middle and come back. Their states are bytes that follow from their
//! tokens, so that a wrong one shows.

use super::{SyntheticEngine, generation::Generation};
use crate::{
    kv::{Ages, ParkedMemory, Parts, not_resumed},
    port::Report,
    protocol::{FromEngine, GenerateJob},
};
use serde::{Deserialize, Serialize};

/// All of a generation but its state.
#[derive(Serialize, Deserialize)]
struct Record {
    job: GenerateJob,
    /// Whether it may begin; else it is looked up anew.
    granted: bool,
    prefill_left: u32,
    generated: u32,
    cached: Option<u32>,
    known_blocks: u32,
    offered: bool,
    prefill_seconds: f64,
    ages: Ages,
}

impl SyntheticEngine {
    fn generation(&mut self, request: u64) -> Option<&mut Generation> {
        self.generations.iter_mut().find(|generation| generation.request == request)
    }

    /// Stops a request and says what it takes to leave.
    pub(super) fn stop(&mut self, request: u64, report: Report<'_>) {
        let Self { generations, kv, .. } = self;
        let found = generations.iter_mut().find(|generation| generation.request == request);
        let Some(generation) = found.filter(|generation| generation.choices() == 1) else {
            return report(FromEngine::ParkRefused { request });
        };
        let record = Record {
            job: generation.job.clone(),
            granted: generation.prefix.cached.is_some(),
            prefill_left: generation.prefill_left,
            generated: generation.longest(),
            cached: generation.prefix.cached,
            known_blocks: generation.prefix.known_blocks,
            offered: generation.prefix.offered,
            prefill_seconds: generation.prefill_seconds(),
            ages: generation.ages(),
        };
        match Parts::new(&record, kv.state_bytes(generation.held().len())) {
            Ok(parts) => {
                report(FromEngine::ParkSized { request, bytes: parts.bytes() });
                generation.leaving = Some(parts);
            }
            Err(_) => report(FromEngine::ParkRefused { request }),
        }
    }

    pub(super) fn run_on(&mut self, request: u64) {
        if let Some(generation) = self.generation(request) {
            generation.leaving = None;
        }
    }

    pub(super) fn leave(&mut self, request: u64, mut memory: ParkedMemory, report: Report<'_>) {
        let Self { generations, kv, .. } = self;
        let Some(place) = generations.iter().position(|other| other.request == request && other.leaving.is_some())
        else {
            return report(FromEngine::ParkRefused { request });
        };
        let mut generation = generations.remove(place);
        if let Some(parts) = generation.leaving.take() {
            let written = parts.write(&mut memory, |room| {
                kv.write_state(&generation.held(), room);
                Ok(room.len())
            });
            if written.is_err() {
                generations.insert(place, generation);
                return report(FromEngine::ParkRefused { request });
            }
        }
        generation.prefix.settle(request, report);
        report(FromEngine::Parked { request });
    }

    pub(super) fn come_back(&mut self, request: u64, memory: &ParkedMemory, report: Report<'_>) {
        let (record, state) = match memory.read::<Record>() {
            Ok(found) => found,
            Err(reason) => return report(not_resumed(request, &reason)),
        };
        if !record.granted {
            return self.accept(request, &record.job, report);
        }
        let mut generation = match self.read(request, &record.job) {
            Ok(generation) => generation,
            Err(failed) => return report(*failed),
        };
        generation.granted = true;
        generation.prefill_left = record.prefill_left;
        generation.prefix.cached = record.cached;
        (generation.prefix.known_blocks, generation.prefix.offered) = (record.known_blocks, record.offered);
        generation.replay(record.generated, record.prefill_seconds, record.ages);
        if !self.kv.is_state(&generation.held(), state) {
            return report(not_resumed(request, "its state has other bytes than were parked"));
        }
        self.generations.push(generation);
    }
}
