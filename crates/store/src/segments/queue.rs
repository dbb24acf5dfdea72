//! What waits for the thread that writes: blocks, up to a bound, and pages to give back.

use super::{error::AppendError, table::Location};
use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use warmset_core::kv::{BlockHeader, TrustDomain};

/// A block to write: header, payload and padding. It is read while it waits and never copied if it begins at a page.
pub type BlockBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Blocks that cannot wait any more, given back: too much waits, or the store closes.
pub struct Refused {
    /// The blocks.
    pub blocks: Vec<BlockBytes>,
}

impl std::fmt::Debug for Refused {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Refused({} blocks)", self.blocks.len())
    }
}

pub(super) type Results = Vec<Result<Location, AppendError>>;
pub(super) type Done = Box<dyn FnOnce(Results) + Send>;

/// Blocks of one caller.
pub(super) struct Request {
    pub(super) blocks: Vec<BlockBytes>,
    pub(super) done: Done,
}

impl Request {
    fn bytes(&self) -> u64 {
        self.blocks.iter().map(|block| (**block).as_ref().len() as u64).sum()
    }
}

/// What the thread that writes is to do next.
pub(super) struct Work {
    pub(super) requests: Vec<Request>,
    pub(super) clear: bool,
    pub(super) close: bool,
}

#[derive(Default)]
struct State {
    requests: VecDeque<Request>,
    bytes: u64,
    /// Requests to give pages back, and how many of them were seen to.
    clears_asked: u64,
    clears_taken: u64,
    clears_done: u64,
    /// Whether the last of them left nothing that must not stay.
    last_clear_worked: bool,
    is_closing: bool,
    is_closed: bool,
    since: Option<Instant>,
    /// Domains that were purged since the blocks being written were taken.
    purged: BTreeSet<TrustDomain>,
}

pub(super) struct Queue {
    bytes_max: u64,
    state: Mutex<State>,
    work: Condvar,
    progress: Condvar,
}

/// Bytes that are taken to be written together, if so many wait.
const BATCH_BYTES_MAX: u64 = 64 << 20;

impl Queue {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, state: Mutex::default(), work: Condvar::new(), progress: Condvar::new() }
    }

    pub(super) fn append(&self, blocks: Vec<BlockBytes>, done: Done) -> Result<(), Refused> {
        let request = Request { blocks, done };
        let bytes = request.bytes();
        let mut state = self.lock();
        // One that is larger than the whole queue is taken when it is alone, or never.
        let is_full = state.bytes > 0 && state.bytes.saturating_add(bytes) > self.bytes_max;
        if is_full || state.is_closing {
            return Err(Refused { blocks: request.blocks });
        }
        state.bytes += bytes;
        state.requests.push_back(request);
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    /// Waits for work. The blocks it holds count as waiting until [`Self::finished`].
    pub(super) fn take(&self) -> Work {
        let mut state = self.lock();
        while state.requests.is_empty() && state.clears_asked == state.clears_taken && !state.is_closing {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let mut requests = Vec::new();
        let mut bytes = 0;
        while let Some(request) = state.requests.front() {
            bytes += request.bytes();
            if bytes > BATCH_BYTES_MAX && !requests.is_empty() {
                break;
            }
            requests.extend(state.requests.pop_front());
        }
        state.purged.clear();
        state.since = Some(Instant::now());
        let clear = state.clears_asked > state.clears_taken;
        state.clears_taken = state.clears_asked;
        Work { close: state.is_closing && state.requests.is_empty(), requests, clear }
    }

    /// A request was answered.
    pub(super) fn answered(&self, bytes: u64) {
        let mut state = self.lock();
        state.bytes = state.bytes.saturating_sub(bytes);
    }

    /// Pages were given back, up to what was asked for when the work was taken.
    pub(super) fn cleared(&self, worked: bool) {
        let mut state = self.lock();
        state.clears_done = state.clears_taken;
        state.last_clear_worked = worked;
        drop(state);
        self.progress.notify_all();
    }

    /// The thread that writes waits again.
    pub(super) fn idle(&self) {
        self.lock().since = None;
    }

    pub(super) fn closed(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.since = None;
        drop(state);
        self.progress.notify_all();
    }

    pub(super) fn ask_to_clear(&self) {
        self.lock().clears_asked += 1;
        self.work.notify_one();
    }

    /// Asks for pages to be given back and waits. Whether all that must not stay is gone.
    pub(super) fn clear_and_wait(&self, patience: Duration) -> bool {
        let mut state = self.lock();
        state.clears_asked += 1;
        let number = state.clears_asked;
        self.work.notify_one();
        let state = self.wait(state, patience, |state| state.clears_done >= number || state.is_closed);
        state.clears_done >= number && state.last_clear_worked
    }

    /// Takes nothing more, and waits until everything that waits is written.
    pub(super) fn close_and_wait(&self, patience: Duration) -> bool {
        let mut state = self.lock();
        state.is_closing = true;
        self.work.notify_one();
        self.wait(state, patience, |state| state.is_closed).is_closed
    }

    /// What is being written of this domain does not become readable, and what waits is not written. Says how many blocks
    /// that are.
    pub(super) fn purge(&self, domain: &TrustDomain) -> usize {
        let mut blocks = 0;
        let mut state = self.lock();
        state.purged.insert(*domain);
        let mut answers = Vec::new();
        let waiting = std::mem::take(&mut state.requests);
        for request in waiting {
            let (mut kept, mut is_purged) = (Vec::new(), Vec::new());
            for block in request.blocks {
                let purged = is_of(&block, domain);
                is_purged.push(purged);
                if purged {
                    blocks += 1;
                    state.bytes = state.bytes.saturating_sub((*block).as_ref().len() as u64);
                } else {
                    kept.push(block);
                }
            }
            let done = request.done;
            let done: Done = if is_purged.contains(&true) { with_purged(is_purged, done) } else { done };
            if kept.is_empty() {
                answers.push(done);
            } else {
                state.requests.push_back(Request { blocks: kept, done });
            }
        }
        drop(state);
        for done in answers {
            done(Vec::new());
        }
        blocks
    }

    /// Whether the domain was purged since the work was taken.
    pub(super) fn was_purged(&self, domain: &TrustDomain) -> bool {
        self.lock().purged.contains(domain)
    }

    /// Bytes that wait, and how long the work under way has taken.
    pub(super) fn figures(&self) -> (u64, Option<Duration>) {
        let state = self.lock();
        (state.bytes, state.since.map(|since| since.elapsed()))
    }

    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        patience: Duration,
        is_done: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let end = Instant::now() + patience;
        while !is_done(&state) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.progress.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a block that waits belongs to a domain. One that is no block belongs to none, and is refused later.
fn is_of(block: &BlockBytes, domain: &TrustDomain) -> bool {
    BlockHeader::decode((**block).as_ref()).is_ok_and(|header| header.domain == *domain)
}

/// Puts the answers of blocks that were taken out between those of the others.
fn with_purged(is_purged: Vec<bool>, done: Done) -> Done {
    Box::new(move |results| {
        let mut results = results.into_iter();
        let answer = |purged| if purged { Some(Err(AppendError::Purged)) } else { results.next() };
        done(is_purged.into_iter().filter_map(answer).collect());
    })
}
