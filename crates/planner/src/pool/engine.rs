//! What an engine does with its time: prompts one after the other, answers side by side.
//!
//! A prompt is read at the model's rate; a step writes one token of every answer under way and takes longer the more
//! there are. Reading is bound by arithmetic and writing by memory, so that neither slows the other down, unless the engine
//! takes turns. Only what changes is computed: from one change to the next everything goes on at a constant rate.

use super::{
    prompts::Prompts,
    scenario::Team,
    turns::{Stage, Turns},
};
use std::collections::{BTreeMap, VecDeque};
use warmset_core::{Digest, RequestId};

/// Less than this is nothing: what rounding to nanoseconds leaves.
pub(super) const NOTHING: f64 = 1e-9;

/// What a request has before it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sequence {
    /// Tokens of its prompt that were there.
    pub(super) cached_tokens: u64,
    /// Seconds of reading.
    pub(super) read_left_seconds: f64,
    /// Tokens to write.
    pub(super) tokens_left: f64,
    /// Whether its first token was written.
    pub(super) begun: bool,
    /// Steps that end before it takes part in one.
    pub(super) waits_steps: u32,
    /// Stopped between two steps.
    pub(super) stopped: bool,
}

impl Sequence {
    pub(super) fn writes(&self) -> bool {
        self.read_left_seconds <= 0.0 && !self.stopped && self.waits_steps == 0
    }
}

/// Steps that end before a request takes part in one, where it comes to an engine that is in the middle of one: in that one it
/// is not seen, and during the next it is asked what of its prompt is kept elsewhere.
const STEPS_BEFORE_JOINING: u32 = 2;

/// What has happened in an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// The first token of an answer.
    FirstToken(RequestId),
    /// Its last one.
    Finished(RequestId),
}

/// An engine that is loaded, or being loaded.
#[derive(Debug, Clone)]
pub(super) struct Engine {
    pub(super) digest: Digest,
    pub(super) threads: u32,
    pub(super) prompts: Prompts,
    /// What its first request takes longer.
    pub(super) first_request_seconds: f64,
    step_seconds: f64,
    step_seconds_per_sequence: f64,
    sequences: BTreeMap<RequestId, Sequence>,
    reading: VecDeque<RequestId>,
    /// If it does one thing after the other: what it is at.
    turns: Option<Turns>,
    /// Threads that it was told to step with from its next step on.
    told_threads: Vec<u32>,
}

impl Engine {
    pub(super) fn new(digest: Digest, team: &Team, threads: u32) -> Self {
        Self {
            digest,
            threads,
            prompts: Prompts::new(team.kept_tokens),
            first_request_seconds: team.first_request_seconds,
            step_seconds: team.decode_step_seconds,
            step_seconds_per_sequence: team.decode_step_seconds_per_sequence,
            sequences: BTreeMap::new(),
            reading: VecDeque::new(),
            turns: team.read_step_seconds.map(Turns::new),
            told_threads: Vec::new(),
        }
    }

    /// Whether it is in the middle of a step, of those that take one.
    fn is_stepping(&self) -> bool {
        self.threads > 0 && self.turns.as_ref().is_some_and(|turns| !turns.is_idle())
    }

    /// It is told to step with so many threads; whether it does from now on, or once its step has ended.
    pub(super) fn set_threads(&mut self, threads: u32) -> bool {
        let at_once = !self.is_stepping();
        if at_once {
            self.threads = threads;
            self.take_up_work();
        } else {
            self.told_threads.push(threads);
        }
        at_once
    }

    /// A request begins, or goes on.
    pub(super) fn push(&mut self, request: RequestId, mut sequence: Sequence) {
        sequence.waits_steps = if self.is_stepping() { STEPS_BEFORE_JOINING } else { 0 };
        if sequence.read_left_seconds > 0.0 {
            self.reading.push_back(request);
        }
        self.sequences.insert(request, sequence);
        self.take_up_work();
    }

    /// A request leaves, with what it still has before it.
    pub(super) fn remove(&mut self, request: RequestId) -> Option<Sequence> {
        self.reading.retain(|other| *other != request);
        self.sequences.remove(&request)
    }

    /// Stops a request, or lets it go on; whether it is there.
    pub(super) fn set_stopped(&mut self, request: RequestId, stopped: bool) -> bool {
        let Some(sequence) = self.sequences.get_mut(&request) else { return false };
        sequence.stopped = stopped;
        self.take_up_work();
        true
    }

    /// Whether it has anything to compute and threads to do so. A step that was begun is ended, whoever has left.
    pub(super) fn is_busy(&self) -> bool {
        self.threads > 0 && (self.is_stepping() || self.sequences.values().any(|sequence| !sequence.stopped))
    }

    fn reads(&self) -> Option<RequestId> {
        let reads = |sequence: &Sequence| !sequence.stopped && sequence.waits_steps == 0;
        self.reading.iter().find(|request| self.sequences.get(request).is_some_and(reads)).copied()
    }

    /// How long one token of each answer takes.
    fn seconds_per_token(&self) -> f64 {
        let writers = self.sequences.values().filter(|sequence| sequence.writes()).count();
        self.step_seconds + self.step_seconds_per_sequence * writers.saturating_sub(1) as f64
    }

    /// An engine that takes turns and has nothing to do begins with what there is.
    fn take_up_work(&mut self) {
        if self.threads > 0 && self.turns.as_ref().is_some_and(Turns::is_idle) {
            self.begin_step();
        }
    }

    /// An engine that takes turns is between two steps.
    fn end_step(&mut self, held: &mut Vec<u32>) {
        for threads in self.told_threads.drain(..) {
            self.threads = threads;
            held.push(threads);
        }
        self.sequences.values_mut().for_each(|sequence| sequence.waits_steps = sequence.waits_steps.saturating_sub(1));
        self.begin_step();
    }

    fn begin_step(&mut self) {
        if self.reads().is_none() && !self.sequences.values().any(Sequence::writes) {
            // With nothing else to do it does not make anybody wait.
            self.sequences.values_mut().for_each(|sequence| sequence.waits_steps = 0);
        }
        let reads = self.reads().and_then(|request| Some((request, self.sequences.get(&request)?.read_left_seconds)));
        let (writes, seconds) = (self.sequences.values().any(Sequence::writes), self.seconds_per_token());
        let Some(turns) = &mut self.turns else { return };
        match reads {
            _ if self.threads == 0 => turns.rest(),
            Some((request, left)) => turns.read(request, left),
            None if writes => turns.write(seconds),
            None => turns.rest(),
        }
    }

    /// What an engine that takes turns is through with by now, and what follows; threads that it holds from now on.
    fn take_stages(&mut self, happened: &mut Vec<Progress>) -> Vec<u32> {
        let mut held = Vec::new();
        while let Some(stage) = self.turns.as_ref().and_then(Turns::ended) {
            match stage {
                Stage::Reading(request, seconds) => self.read_piece(request, seconds),
                Stage::Writing => self.write_step(happened),
            }
            let (writes, seconds) = (self.sequences.values().any(Sequence::writes), self.seconds_per_token());
            match &mut self.turns {
                // The step in which a piece of a prompt was read writes, too.
                Some(turns) if writes && stage != Stage::Writing => turns.write(seconds),
                _ => self.end_step(&mut held),
            }
        }
        held
    }

    fn read_piece(&mut self, request: RequestId, seconds: f64) {
        let Some(sequence) = self.sequences.get_mut(&request) else { return };
        sequence.read_left_seconds -= seconds;
        if sequence.read_left_seconds <= NOTHING {
            sequence.read_left_seconds = 0.0;
            self.reading.retain(|other| *other != request);
        }
    }

    fn write_step(&mut self, happened: &mut Vec<Progress>) {
        self.sequences.retain(|request, sequence| {
            if !sequence.writes() {
                return true;
            }
            sequence.tokens_left -= 1.0;
            if !std::mem::replace(&mut sequence.begun, true) {
                happened.push(Progress::FirstToken(*request));
            }
            let done = sequence.tokens_left <= NOTHING;
            if done {
                happened.push(Progress::Finished(*request));
            }
            !done
        });
    }

    /// Seconds of its own computing pass.
    pub(super) fn advance(&mut self, seconds: f64) {
        if let Some(turns) = &mut self.turns {
            return turns.advance(seconds);
        }
        let (reads, per_token) = (self.reads(), self.seconds_per_token());
        let written = if per_token > 0.0 { seconds / per_token } else { f64::INFINITY };
        for (request, sequence) in &mut self.sequences {
            if sequence.writes() {
                sequence.tokens_left -= written;
            } else if Some(*request) == reads {
                sequence.read_left_seconds -= seconds;
            }
        }
    }

    /// Seconds of its own computing until something happens.
    pub(super) fn due_seconds(&self) -> Option<f64> {
        if let Some(turns) = &self.turns {
            return turns.due_seconds();
        }
        let (reads, per_token) = (self.reads(), self.seconds_per_token());
        let due = self.sequences.iter().filter_map(|(request, sequence)| {
            if sequence.writes() {
                Some(sequence.tokens_left * per_token)
            } else {
                (Some(*request) == reads).then_some(sequence.read_left_seconds)
            }
        });
        due.min_by(f64::total_cmp).map(|seconds| seconds.max(0.0))
    }

    /// What has happened by now; threads that it was told of and holds from now on.
    pub(super) fn take_due(&mut self, happened: &mut Vec<Progress>) -> Vec<u32> {
        if self.turns.is_some() {
            return self.take_stages(happened);
        }
        let reads = self.reads();
        for (request, sequence) in &mut self.sequences {
            if Some(*request) == reads && sequence.read_left_seconds <= NOTHING {
                sequence.read_left_seconds = 0.0;
                // The step that ends the reading writes the first token.
                sequence.tokens_left -= 1.0;
                sequence.begun = true;
                happened.push(Progress::FirstToken(*request));
            }
            if sequence.writes() && sequence.tokens_left <= NOTHING {
                happened.push(Progress::Finished(*request));
            }
        }
        for progress in &*happened {
            match progress {
                Progress::FirstToken(request) => self.reading.retain(|other| other != request),
                Progress::Finished(request) => {
                    self.sequences.remove(request);
                }
            }
        }
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::super::scenario::{Plan, SHIPPED};
    use super::*;

    /// Lets an engine compute until it has nothing to do; what happened when.
    fn run(engine: &mut Engine, mut arrivals: Vec<(f64, u64, f64, f64)>) -> Vec<(i64, Progress)> {
        let (mut now, mut all) = (0.0, Vec::new());
        loop {
            let due = engine.due_seconds().filter(|_| engine.is_busy()).map(|seconds| now + seconds);
            let next = arrivals.first().map(|arrival| arrival.0);
            let Some(at) = [due, next].into_iter().flatten().min_by(f64::total_cmp) else { return all };
            if engine.is_busy() {
                engine.advance(at - now);
            }
            now = at;
            let mut happened = Vec::new();
            engine.take_due(&mut happened);
            all.extend(happened.into_iter().map(|progress| ((now * 1000.0).round() as i64, progress)));
            if next == Some(now) {
                let (_, number, read_left_seconds, tokens_left) = arrivals.remove(0);
                let sequence = Sequence {
                    cached_tokens: 0,
                    read_left_seconds,
                    tokens_left,
                    begun: false,
                    waits_steps: 0,
                    stopped: false,
                };
                engine.push(RequestId(number), sequence);
            }
        }
    }

    fn engine(read_step_seconds: Option<f64>) -> Engine {
        let team = Plan::parse(SHIPPED.1).expect("it is shipped").pool.team.remove(0);
        let team = Team { decode_step_seconds: 0.02, decode_step_seconds_per_sequence: 0.0, read_step_seconds, ..team };
        Engine::new(Digest([1; 32]), &team, 1)
    }

    /// 120 milliseconds of reading and three tokens; another one comes when that is read.
    #[test]
    fn an_engine_that_takes_turns_writes_between_the_pieces_that_it_reads() {
        let arrivals = || vec![(0.0, 1, 0.12, 3.0), (0.125, 2, 0.08, 2.0)];
        let (first, second) = (RequestId(1), RequestId(2));
        let found = run(&mut engine(Some(0.05)), arrivals());
        assert_eq!(
            found,
            [
                // Read in three pieces until 120. The other one came during that step, and is not seen in the next one.
                (140, Progress::FirstToken(first)),
                // 50 of reading and a token by 230, the other 30 and a token by 280.
                (230, Progress::Finished(first)),
                (280, Progress::FirstToken(second)),
                (300, Progress::Finished(second)),
            ]
        );
        let beside = run(&mut engine(None), arrivals());
        assert_eq!(
            beside,
            [
                (120, Progress::FirstToken(first)),
                (160, Progress::Finished(first)),
                (205, Progress::FirstToken(second)),
                (225, Progress::Finished(second)),
            ]
        );
    }
    #[test]
    fn an_engine_in_the_middle_of_a_step_gives_its_threads_up_at_the_end_of_it() {
        let mut engine = engine(Some(0.05));
        assert!(engine.set_threads(4), "it does nothing");
        let sequence = Sequence {
            cached_tokens: 0,
            read_left_seconds: 0.1,
            tokens_left: 2.0,
            begun: false,
            waits_steps: 0,
            stopped: false,
        };
        engine.push(RequestId(1), sequence);
        assert!(!engine.set_threads(2) && engine.threads == 4);
        engine.advance(0.05);
        assert_eq!((engine.take_due(&mut Vec::new()), engine.threads), (vec![2], 2));
        // Without a thread it rests, and goes on where it was.
        assert!(!engine.set_threads(0));
        engine.advance(0.05);
        assert_eq!(
            (engine.take_due(&mut Vec::new()), engine.is_busy()),
            (Vec::new(), true),
            "it writes in that step, too"
        );
        engine.advance(0.02);
        let mut happened = Vec::new();
        assert_eq!((engine.take_due(&mut happened), engine.is_busy()), (vec![0], false));
        assert_eq!(happened, [Progress::FirstToken(RequestId(1))]);
        assert!(engine.set_threads(1) && engine.is_busy());
        assert_eq!(engine.due_seconds(), Some(0.02));
    }
}
