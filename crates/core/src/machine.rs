//! The shape of a decision maker: events in, actions out, time as an argument.

use crate::time::Instant;
use alloc::vec::Vec;

/// A deterministic state machine. Live it is owned by one run loop; simulated it sits on a virtual clock.
///
/// The same sequence of `(now, event)` always gives the same actions, so a recorded run replays exactly.
pub trait Machine {
    /// What can happen to it. A passing timer is an event too.
    type Event;
    /// What it wants done.
    type Action;

    /// Takes one event and appends the actions that follow from it.
    fn handle(&mut self, now: Instant, event: Self::Event, actions: &mut Vec<Self::Action>);

    /// When it next wants its timer event, if at all.
    fn next_timer(&self) -> Option<Instant>;
}
