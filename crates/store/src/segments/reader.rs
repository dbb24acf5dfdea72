//! Reads, each with a deadline: a few threads read, one watches the clock.
//!
//! A read that the disk does not answer cannot be taken back: the kernel may still write into its memory. So memory is
//! given away for a read and comes back with its answer; at the deadline the caller is free and the memory stays with the
//! thread, which is written off. Another takes its place, until too many are: then the tier is off until all are back.

use super::error::ReadError;
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Reads that may wait; a caller beyond them is told at once.
pub const READS_WAITING_MAX: usize = 4096;
/// Threads that the disk may keep before the tier is off.
pub const STUCK_READS_MAX: usize = 8;

/// One read on its way.
pub(super) trait Read: Send + Sync {
    /// Does it and answers, unless it was given up.
    fn run(&self);
    /// Answers in its place.
    fn give_up(&self, error: ReadError);
}

struct Waiting {
    read: Arc<dyn Read>,
    deadline: Instant,
}

struct Running {
    number: u64,
    read: Arc<dyn Read>,
    deadline: Instant,
    is_stuck: bool,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    running: Vec<Running>,
    next_number: u64,
    stuck: usize,
    is_off: bool,
    is_closed: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    clock: Condvar,
}

/// The threads that read.
pub(super) struct Readers {
    shared: Arc<Shared>,
}

impl Readers {
    pub(super) fn start(threads: usize) -> std::io::Result<Self> {
        let readers = Self { shared: Arc::default() };
        for _ in 0..threads.max(1) {
            spawn_reader(&readers.shared)?;
        }
        let shared = Arc::clone(&readers.shared);
        thread::Builder::new().name("kv-clock".to_owned()).spawn(move || shared.watch())?;
        Ok(readers)
    }

    /// Takes a read, or answers it at once.
    pub(super) fn submit(&self, read: Arc<dyn Read>, deadline: Instant) {
        let mut state = self.shared.lock();
        let refusal = if state.is_closed {
            Some(ReadError::Gone)
        } else if state.is_off {
            Some(ReadError::Off)
        } else if state.waiting.len() >= READS_WAITING_MAX {
            Some(ReadError::Busy)
        } else {
            None
        };
        if let Some(error) = refusal {
            drop(state);
            return read.give_up(error);
        }
        state.waiting.push_back(Waiting { read, deadline });
        drop(state);
        self.shared.work.notify_one();
        self.shared.clock.notify_one();
    }

    /// Threads that the disk keeps, and whether they are too many.
    pub(super) fn stuck(&self) -> (usize, bool) {
        let state = self.shared.lock();
        (state.stuck, state.is_off)
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.shared.lock();
            state.is_closed = true;
            std::mem::take(&mut state.waiting)
        };
        self.shared.work.notify_all();
        self.shared.clock.notify_all();
        for waiting in waiting {
            waiting.read.give_up(ReadError::Gone);
        }
    }
}

fn spawn_reader(shared: &Arc<Shared>) -> std::io::Result<()> {
    let shared = Arc::clone(shared);
    thread::Builder::new().name("kv-read".to_owned()).spawn(move || shared.read())?;
    Ok(())
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) {
        let mut state = self.lock();
        loop {
            let Some(Waiting { read, deadline }) = state.waiting.pop_front() else {
                if state.is_closed {
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let number = state.next_number;
            state.next_number += 1;
            state.running.push(Running { number, read: Arc::clone(&read), deadline, is_stuck: false });
            drop(state);
            read.run();
            drop(read);
            state = self.lock();
            if let Some(at) = state.running.iter().position(|running| running.number == number)
                && state.running.swap_remove(at).is_stuck
            {
                // Another thread took this one's place.
                state.came_back();
                return;
            }
        }
    }

    /// Gives up what is past its deadline.
    fn watch(self: &Arc<Self>) {
        let mut state = self.lock();
        while !state.is_closed {
            let late = self.take_late(&mut state, Instant::now());
            if !late.is_empty() {
                drop(state);
                for read in late {
                    let (read, error) = read;
                    read.give_up(error);
                }
                state = self.lock();
                continue;
            }
            state = match state.next_deadline() {
                Some(deadline) => {
                    let wait = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
                    self.clock.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.clock.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Writes threads off that are late, and starts others in their place.
    fn take_late(self: &Arc<Self>, state: &mut State, now: Instant) -> Vec<(Arc<dyn Read>, ReadError)> {
        let mut late = Vec::new();
        let mut replaced = 0;
        for running in &mut state.running {
            if !running.is_stuck && running.deadline <= now {
                running.is_stuck = true;
                replaced += 1;
                late.push((Arc::clone(&running.read), ReadError::Stuck));
            }
        }
        state.stuck += replaced;
        for _ in 0..replaced {
            if let Err(error) = spawn_reader(self) {
                tracing::error!(%error, "a thread that reads the KV tier cannot be replaced; the tier is off");
                state.is_off = true;
            }
        }
        if state.stuck >= STUCK_READS_MAX && !state.is_off {
            tracing::error!(stuck = state.stuck, "the KV tier on disk is off: its disk does not answer");
            state.is_off = true;
        }
        if state.is_off {
            late.extend(state.waiting.drain(..).map(|waiting| (waiting.read, ReadError::Off)));
            return late;
        }
        state.waiting.retain(|waiting| {
            let is_late = waiting.deadline <= now;
            if is_late {
                late.push((Arc::clone(&waiting.read), ReadError::Stuck));
            }
            !is_late
        });
        late
    }
}

impl State {
    fn next_deadline(&self) -> Option<Instant> {
        let running = self.running.iter().filter(|running| !running.is_stuck).map(|running| running.deadline);
        running.chain(self.waiting.iter().map(|waiting| waiting.deadline)).min()
    }

    /// A thread that was written off has its answer after all.
    fn came_back(&mut self) {
        self.stuck -= 1;
        if self.stuck == 0 && self.is_off {
            tracing::info!("the disk of the KV tier answers again; the tier is on");
            self.is_off = false;
        }
    }
}
