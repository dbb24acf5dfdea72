//! The callers of this worker whose requests have not ended: who they are, what they wait for, what they were told.

use crate::park::Parked;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tokio::sync::mpsc::UnboundedSender;
use warmset_core::{
    Digest, Priority, RequestId,
    inference::{Reply, Work},
    worker::{Generation, Rejection},
};

/// A request that waits for its model or for a free sequence.
pub(crate) struct Waiting {
    pub(crate) task: Task,
    pub(crate) replies: UnboundedSender<Reply>,
}

/// What an engine is to do for it.
pub(crate) enum Task {
    Begin(Work),
    GoOn(Parked),
}

impl Task {
    /// Whether its caller has seen a part of its answer.
    pub(crate) fn output_started(&self) -> bool {
        matches!(self, Self::GoOn(parked) if parked.output_started)
    }
}

enum State {
    Waiting(Box<Waiting>),
    /// An engine has it, and answers its caller from there.
    Running(Generation),
}

struct Entry {
    digest: Digest,
    class: Priority,
    /// In order of arrival.
    sequence: u64,
    state: State,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Requests {
    entries: HashMap<RequestId, Entry>,
    /// Who waits for each model, in the order in which they will be started.
    queues: BTreeMap<Digest, BTreeSet<(Priority, u64, RequestId)>>,
    arrived: u64,
    /// Models whose queues have moved since positions were last told.
    moved: BTreeSet<Digest>,
}

impl Requests {
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes a new one. One whose identity is in use already is turned away by closing its replies.
    pub(crate) fn add(&mut self, request: RequestId, digest: Digest, class: Priority, waiting: Waiting) -> bool {
        if self.entries.contains_key(&request) {
            tracing::error!(request = request.0, "a request came twice; the second one is dropped");
            return false;
        }
        self.arrived += 1;
        let sequence = self.arrived;
        let state = State::Waiting(Box::new(waiting));
        self.entries.insert(request, Entry { digest, class, sequence, state });
        self.queues.entry(digest).or_default().insert((class, sequence, request));
        self.moved.insert(digest);
        true
    }

    /// An engine gets it: returns what the engine's life needs, unless it is gone or runs already.
    pub(crate) fn start(&mut self, request: RequestId, generation: Generation) -> Option<Waiting> {
        let entry = self.entries.get_mut(&request)?;
        if !matches!(entry.state, State::Waiting(_)) {
            return None;
        }
        let key = (entry.digest, entry.class, entry.sequence);
        let State::Waiting(waiting) = std::mem::replace(&mut entry.state, State::Running(generation)) else {
            return None;
        };
        self.leave_queue(key, request);
        Some(*waiting)
    }

    /// Its engine has let go of it: it waits again, in front of those who came after it.
    pub(crate) fn park(&mut self, request: RequestId, waiting: Waiting) {
        if let Some(entry) = self.entries.get_mut(&request) {
            entry.state = State::Waiting(Box::new(waiting));
            self.queues.entry(entry.digest).or_default().insert((entry.class, entry.sequence, request));
            self.moved.insert(entry.digest);
        }
    }

    /// The engine that works on it.
    pub(crate) fn engine_of(&self, request: RequestId) -> Option<(Digest, Generation)> {
        let entry = self.entries.get(&request)?;
        match entry.state {
            State::Running(generation) => Some((entry.digest, generation)),
            State::Waiting(_) => None,
        }
    }

    /// It has ended, or nobody wants it any more. Returns its caller if it was still waiting.
    pub(crate) fn remove(&mut self, request: RequestId) -> Option<Waiting> {
        let entry = self.entries.remove(&request)?;
        match entry.state {
            State::Waiting(waiting) => {
                self.leave_queue((entry.digest, entry.class, entry.sequence), request);
                Some(*waiting)
            }
            State::Running(_) => None,
        }
    }

    /// Removes it if it waits; whether it did.
    pub(crate) fn remove_waiting(&mut self, request: RequestId) -> bool {
        let waits = self.entries.get(&request).is_some_and(|entry| matches!(entry.state, State::Waiting(_)));
        waits && self.remove(request).is_some()
    }

    /// Refuses it if it waits: an engine's own callers are told by its life.
    pub(crate) fn reject(&mut self, request: RequestId, rejection: Rejection) {
        if let Some(waiting) = self.remove(request) {
            // A caller that is gone needs no answer.
            let _ = waiting.replies.send(Reply::Rejected(rejection));
        }
    }

    /// An engine is gone, and has told its callers.
    pub(crate) fn forget_running(&mut self, digest: Digest, ended: Generation) {
        self.entries.retain(|_, entry| {
            !(entry.digest == digest && matches!(entry.state, State::Running(generation) if generation == ended))
        });
    }

    /// Tells something to everybody who waits for a model.
    pub(crate) fn tell_waiting(&self, digest: Digest, reply: &Reply) {
        for (_, _, request) in self.queues.get(&digest).into_iter().flatten() {
            self.tell(*request, reply.clone());
        }
    }

    /// Whether positions have changed since they were last told.
    pub(crate) fn has_moved(&self) -> bool {
        !self.moved.is_empty()
    }

    /// Tells everybody in a queue that moved their place.
    pub(crate) fn tell_positions(&mut self) {
        for digest in std::mem::take(&mut self.moved) {
            for (position, (_, _, request)) in (1..).zip(self.queues.get(&digest).into_iter().flatten()) {
                self.tell(*request, Reply::Queued { position });
            }
        }
    }

    fn tell(&self, request: RequestId, reply: Reply) {
        // Whoever was parked knows that it waits, and no more is told.
        if let Some(Entry { state: State::Waiting(waiting), .. }) = self.entries.get(&request)
            && matches!(waiting.task, Task::Begin(_))
        {
            // A caller that is gone cancels by itself.
            let _ = waiting.replies.send(reply);
        }
    }

    fn leave_queue(&mut self, (digest, class, sequence): (Digest, Priority, u64), request: RequestId) {
        if let Some(queue) = self.queues.get_mut(&digest) {
            queue.remove(&(class, sequence, request));
            if queue.is_empty() {
                self.queues.remove(&digest);
                self.moved.remove(&digest);
            } else {
                self.moved.insert(digest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    const DIGEST: Digest = Digest([1; 32]);

    fn waiting() -> (Waiting, UnboundedReceiver<Reply>) {
        let (replies, receiver) = unbounded_channel();
        (Waiting { task: Task::Begin(Work::Embed { inputs: Vec::new() }), replies }, receiver)
    }

    #[test]
    fn places_follow_class_and_arrival() {
        let mut requests = Requests::default();
        let mut receivers = Vec::new();
        for (number, class) in [(1, Priority::Batch), (2, Priority::Standard), (3, Priority::Standard)] {
            let (caller, receiver) = waiting();
            assert!(requests.add(RequestId(number), DIGEST, class, caller));
            receivers.push(receiver);
        }
        requests.tell_positions();
        let places: Vec<_> = receivers.iter_mut().map(|receiver| receiver.try_recv().unwrap()).collect();
        assert_eq!(places, [3, 1, 2].map(|position| Reply::Queued { position }));
        assert!(!requests.has_moved());
        assert!(requests.start(RequestId(2), Generation(1)).is_some());
        assert!(requests.start(RequestId(2), Generation(1)).is_none(), "it runs already");
        requests.tell_positions();
        assert_eq!(receivers[2].try_recv().unwrap(), Reply::Queued { position: 1 });
        assert_eq!(receivers[0].try_recv().unwrap(), Reply::Queued { position: 2 });
    }

    #[test]
    fn a_caller_is_refused_once_and_only_while_it_waits() {
        let mut requests = Requests::default();
        let (caller, mut receiver) = waiting();
        requests.add(RequestId(1), DIGEST, Priority::Standard, caller);
        requests.reject(RequestId(1), Rejection::Draining);
        requests.reject(RequestId(1), Rejection::Draining);
        assert_eq!(receiver.try_recv().unwrap(), Reply::Rejected(Rejection::Draining));
        assert!(receiver.try_recv().is_err());

        let (caller, mut receiver) = waiting();
        requests.add(RequestId(2), DIGEST, Priority::Standard, caller);
        let running = requests.start(RequestId(2), Generation(7)).unwrap();
        requests.reject(RequestId(2), Rejection::Draining);
        drop(running);
        assert!(receiver.try_recv().is_err(), "its engine answers it");
        assert!(requests.is_empty());
    }

    #[test]
    fn the_end_of_a_life_takes_its_callers_and_no_others() {
        let mut requests = Requests::default();
        let mut kept = Vec::new();
        for number in 1..=3 {
            let (caller, receiver) = waiting();
            requests.add(RequestId(number), DIGEST, Priority::Standard, caller);
            kept.push(receiver);
        }
        requests.start(RequestId(1), Generation(1));
        requests.start(RequestId(2), Generation(2));
        requests.forget_running(DIGEST, Generation(1));
        assert!(requests.start(RequestId(1), Generation(3)).is_none());
        assert!(requests.remove_waiting(RequestId(3)));
        assert!(!requests.remove_waiting(RequestId(2)), "it runs");
        requests.forget_running(DIGEST, Generation(2));
        assert!(requests.is_empty());
    }
}
