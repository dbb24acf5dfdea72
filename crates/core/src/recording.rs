//! A machine whose run is written down while somebody wants that.
//!
//! A recording is the machine as it was when the recording began, then every instant, event and list of actions since.
//! The machine decides nothing by anything else, so a copy that is told the same does the same.

use crate::{machine::Machine, time::Instant};
use alloc::{boxed::Box, vec::Vec};
use serde::{Deserialize, Serialize};

/// What happened to a machine, and what it wanted done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step<E, A> {
    /// When.
    pub now: Instant,
    /// What happened.
    pub event: E,
    /// What followed, in order.
    pub actions: Vec<A>,
}

/// A step of one kind of machine.
pub type StepOf<M> = Step<<M as Machine>::Event, <M as Machine>::Action>;

/// Takes down what happens to one machine. It is called by the machine's run loop, so it never waits for anything.
pub trait Tape<M: Machine>: Send {
    /// The machine as it is now. False ends the recording.
    fn begin(&mut self, now: Instant, machine: &M) -> bool;
    /// What happened next. False ends the recording: one with a hole would be worth nothing.
    fn step(&mut self, step: StepOf<M>) -> bool;
}

/// A machine, and the tape that takes it down, if any.
pub struct Recorded<M: Machine> {
    machine: M,
    tape: Option<Box<dyn Tape<M>>>,
}

impl<M: Machine> Recorded<M> {
    /// A machine that nobody records.
    pub fn new(machine: M) -> Self {
        Self { machine, tape: None }
    }

    /// The machine, to look at.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Begins a recording; one that runs ends.
    pub fn record(&mut self, now: Instant, mut tape: Box<dyn Tape<M>>) {
        self.tape = tape.begin(now, &self.machine).then_some(tape);
    }
}

impl<M: Machine<Event: Clone, Action: Clone>> Recorded<M> {
    /// Tells the machine, and takes it down.
    pub fn handle(&mut self, now: Instant, event: M::Event, actions: &mut Vec<M::Action>) {
        let Some(tape) = &mut self.tape else { return self.machine.handle(now, event, actions) };
        let before = actions.len();
        self.machine.handle(now, event.clone(), actions);
        if !tape.step(Step { now, event, actions: actions[before..].to_vec() }) {
            self.tape = None;
        }
    }
}

/// A tape for tests: a copy of the machine that is told what the machine is told. The function hears of every step
/// whether the copy did the same.
pub struct Twin<M, F> {
    copy: Option<M>,
    hear: F,
}

impl<M, F> Twin<M, F> {
    /// A tape that has not begun.
    pub fn new(hear: F) -> Self {
        Self { copy: None, hear }
    }
}

impl<M, F> Tape<M> for Twin<M, F>
where
    M: Machine<Action: PartialEq> + Clone + Send,
    F: FnMut(bool) + Send,
{
    fn begin(&mut self, _now: Instant, machine: &M) -> bool {
        self.copy = Some(machine.clone());
        true
    }

    fn step(&mut self, step: StepOf<M>) -> bool {
        let mut actions = Vec::new();
        if let Some(copy) = &mut self.copy {
            copy.handle(step.now, step.event, &mut actions);
        }
        (self.hear)(actions == step.actions);
        true
    }
}
