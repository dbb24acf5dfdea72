//! The scheduler as plainly as it can be written: every step by itself, every page by its number, every list searched.

use std::collections::BTreeMap;
use warmset_planner::batching::{
    Fleet, Picoseconds, Routing, Workload,
    cost::{StepShape, pairs},
    engine::EngineSettings,
};

/// What became of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Story {
    pub(crate) admitted: Option<Picoseconds>,
    pub(crate) first_token: Option<Picoseconds>,
    pub(crate) finished: Option<Picoseconds>,
}

#[derive(Debug, Default)]
pub(crate) struct Played {
    pub(crate) stories: Vec<Story>,
    pub(crate) gaps: Vec<Picoseconds>,
    pub(crate) preemptions: u64,
    pub(crate) found_tokens: u64,
    pub(crate) steps: u64,
}

#[derive(Debug, Clone, Default)]
struct Sequence {
    request: u32,
    emitted: u32,
    computed: u32,
    scheduled: u32,
    chunks: Vec<u32>,
    pages: Vec<u64>,
    last_token: Option<Picoseconds>,
}

#[derive(Debug)]
struct Engine {
    settings: EngineSettings,
    chunk_tokens: u32,
    free: Vec<u64>,
    /// Pages and users of chunks that are kept.
    chunks: BTreeMap<u32, (Vec<u64>, u32)>,
    /// Chunks without users, in the order in which they became so.
    idle: Vec<u32>,
    waiting: Vec<Sequence>,
    running: Vec<Sequence>,
    ends: Option<Picoseconds>,
}

impl Engine {
    fn new(settings: EngineSettings, chunk_tokens: u32) -> Self {
        Self {
            settings,
            chunk_tokens: if settings.prefix_cache { chunk_tokens } else { 0 },
            free: (0..settings.blocks).collect(),
            chunks: BTreeMap::new(),
            idle: Vec::new(),
            waiting: Vec::new(),
            running: Vec::new(),
            ends: None,
        }
    }

    fn pages_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.settings.block_tokens) as usize
    }

    fn chunk_pages(&self) -> usize {
        self.pages_for(self.chunk_tokens)
    }

    fn obtainable(&self) -> usize {
        self.free.len() + self.idle.len() * self.chunk_pages()
    }

    fn take_page(&mut self) -> u64 {
        if self.free.is_empty() {
            let oldest = self.idle.remove(0);
            let (pages, users) = self.chunks.remove(&oldest).unwrap();
            assert_eq!(users, 0);
            self.free.extend(pages);
        }
        self.free.pop().unwrap()
    }

    fn use_chunk(&mut self, chunk: u32) {
        self.idle.retain(|idle| *idle != chunk);
        self.chunks.get_mut(&chunk).unwrap().1 += 1;
    }

    fn give_back(&mut self, sequence: &mut Sequence) {
        self.free.append(&mut sequence.pages);
        while let Some(chunk) = sequence.chunks.pop() {
            let entry = self.chunks.get_mut(&chunk).unwrap();
            entry.1 -= 1;
            if entry.1 == 0 {
                self.idle.push(chunk);
            }
        }
        (sequence.computed, sequence.scheduled) = (0, 0);
    }

    fn begin(&mut self, now: Picoseconds, workload: &Workload, fleet: &Fleet, played: &mut Played) {
        let mut budget = self.settings.step_tokens;
        let mut gave_way = false;
        let mut at = 0;
        while at < self.running.len() {
            let known = workload.request(self.running[at].request).prompt_tokens + self.running[at].emitted;
            let scheduled = self.tokens(at, known, budget, workload);
            let sequence = &self.running[at];
            let wanted = self.pages_for(sequence.computed + scheduled) - sequence.chunks.len() * self.chunk_pages();
            let missing = wanted - sequence.pages.len();
            if missing > self.obtainable() {
                let mut last = self.running.pop().unwrap();
                self.give_back(&mut last);
                self.waiting.insert(0, last);
                played.preemptions += 1;
                gave_way = true;
                continue;
            }
            let pages: Vec<u64> = (0..missing).map(|_| self.take_page()).collect();
            let sequence = &mut self.running[at];
            sequence.pages.extend(pages);
            sequence.scheduled = scheduled;
            budget -= scheduled;
            at += 1;
        }
        while !gave_way && budget > 0 && self.running.len() < self.settings.max_sequences as usize {
            if self.waiting.is_empty() || !self.take_up(now, &mut budget, workload, played) {
                break;
            }
            let last = self.running.last().unwrap();
            if last.computed + last.scheduled < workload.request(last.request).prompt_tokens + last.emitted {
                break;
            }
        }
        let shape = self.shape(&self.running, workload);
        self.ends = (!self.running.is_empty()).then(|| now + fleet.cost.of(&shape));
    }

    fn take_up(&mut self, now: Picoseconds, budget: &mut u32, workload: &Workload, played: &mut Played) -> bool {
        let mut sequence = self.waiting[0].clone();
        let known = workload.request(sequence.request).prompt_tokens + sequence.emitted;
        let mut found = Vec::new();
        if self.chunk_tokens > 0 {
            for chunk in workload.chunks(sequence.request) {
                let tokens = (found.len() as u32 + 1) * self.chunk_tokens;
                if tokens >= known || !self.chunks.contains_key(chunk) {
                    break;
                }
                found.push(*chunk);
            }
        }
        let computed = found.len() as u32 * self.chunk_tokens;
        sequence.computed = computed;
        self.running.push(sequence.clone());
        let scheduled = self.tokens(self.running.len() - 1, known, *budget, workload);
        self.running.pop();
        if scheduled == 0 {
            return false;
        }
        let missing = self.pages_for(computed + scheduled) - self.pages_for(computed);
        let idle_found = found.iter().filter(|chunk| self.idle.contains(chunk)).count();
        if missing > self.obtainable() - idle_found * self.chunk_pages() {
            return false;
        }
        found.iter().for_each(|chunk| self.use_chunk(*chunk));
        sequence.pages = (0..missing).map(|_| self.take_page()).collect();
        (sequence.computed, sequence.scheduled, sequence.chunks) = (computed, scheduled, found);
        *budget -= scheduled;
        let story = &mut played.stories[sequence.request as usize];
        if story.admitted.is_none() {
            story.admitted = Some(now);
            played.found_tokens += u64::from(computed);
        }
        self.waiting.remove(0);
        self.running.push(sequence);
        true
    }

    /// What a step takes of a sequence after those before it: prompts get less where somebody generates.
    fn tokens(&self, at: usize, known: u32, budget: u32, workload: &Workload) -> u32 {
        let sequence = &self.running[at];
        let before = self.shape(&self.running[..at], workload);
        let tokens = (known - sequence.computed).min(budget);
        if before.sequences == 0 || (sequence.emitted > 0 && known - sequence.computed == 1) {
            return tokens;
        }
        let beside = self.settings.prefill_tokens_beside as u64;
        tokens.min(beside.saturating_sub(before.prefill_tokens) as u32)
    }

    fn shape(&self, running: &[Sequence], workload: &Workload) -> StepShape {
        let mut shape = StepShape::default();
        for sequence in running {
            let known = workload.request(sequence.request).prompt_tokens + sequence.emitted;
            if sequence.emitted > 0 && known - sequence.computed == 1 {
                shape.sequences += 1;
                shape.context_tokens += u64::from(known);
            } else {
                shape.prefill_tokens += u64::from(sequence.scheduled);
                shape.prefill_pairs += pairs(u64::from(sequence.scheduled), u64::from(sequence.computed));
            }
        }
        shape
    }

    fn end(&mut self, now: Picoseconds, workload: &Workload, played: &mut Played) {
        played.steps += 1;
        for at in 0..self.running.len() {
            let mut sequence = std::mem::take(&mut self.running[at]);
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            self.share(&mut sequence, workload);
            let request = workload.request(sequence.request);
            if sequence.computed == request.prompt_tokens + sequence.emitted {
                let story = &mut played.stories[sequence.request as usize];
                match sequence.last_token.replace(now) {
                    None => story.first_token = Some(now),
                    Some(last) => played.gaps.push(now - last),
                }
                sequence.emitted += 1;
                if sequence.emitted == request.output_tokens {
                    story.finished = Some(now);
                }
            }
            self.running[at] = sequence;
        }
        let (done, running): (Vec<_>, Vec<_>) = std::mem::take(&mut self.running)
            .into_iter()
            .partition(|sequence| sequence.emitted == workload.request(sequence.request).output_tokens);
        self.running = running;
        done.into_iter().for_each(|mut sequence| self.give_back(&mut sequence));
    }

    fn share(&mut self, sequence: &mut Sequence, workload: &Workload) {
        let chunks = workload.chunks(sequence.request);
        while self.chunk_tokens > 0
            && sequence.chunks.len() < chunks.len()
            && (sequence.chunks.len() as u32 + 1) * self.chunk_tokens <= sequence.computed
        {
            let chunk = chunks[sequence.chunks.len()];
            let pages: Vec<u64> = sequence.pages.drain(..self.chunk_pages()).collect();
            match self.chunks.get_mut(&chunk) {
                Some(_) => {
                    self.free.extend(pages);
                    self.use_chunk(chunk);
                }
                None => drop(self.chunks.insert(chunk, (pages, 1))),
            }
            sequence.chunks.push(chunk);
        }
    }

    fn requests(&self) -> usize {
        self.waiting.len() + self.running.len()
    }
}

/// Plays all of it.
pub(crate) fn play(workload: &Workload, fleet: &Fleet) -> Played {
    let mut played = Played { stories: vec![Story::default(); workload.requests().len()], ..Played::default() };
    let mut engines: Vec<Engine> =
        (0..fleet.replicas).map(|_| Engine::new(fleet.engine, workload.chunk_tokens())).collect();
    let (mut arrived, mut turn) = (0, 0);
    loop {
        let arrival = workload.requests().get(arrived).map(|request| request.arrives);
        let Some(now) = engines.iter().filter_map(|engine| engine.ends).chain(arrival).min() else { return played };
        for engine in engines.iter_mut().filter(|engine| engine.ends == Some(now)) {
            engine.end(now, workload, &mut played);
            engine.begin(now, workload, fleet, &mut played);
        }
        while let Some(request) = workload.requests().get(arrived).filter(|request| request.arrives == now) {
            let number = arrived as u32;
            arrived += 1;
            if !fleet.engine.fits(request.prompt_tokens, request.output_tokens) {
                continue;
            }
            let chosen = match fleet.routing {
                Routing::LeastRequests => (0..engines.len()).min_by_key(|at| engines[*at].requests()).unwrap(),
                _ => {
                    turn += 1;
                    (turn - 1) % engines.len()
                }
            };
            engines[chosen].waiting.push(Sequence { request: number, ..Sequence::default() });
        }
        for engine in engines.iter_mut().filter(|engine| engine.ends.is_none()) {
            engine.begin(now, workload, fleet, &mut played);
        }
    }
}
