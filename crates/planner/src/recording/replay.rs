//! The same machines, told the same: what they do must be what they did.

use super::{Entry, FORMAT_VERSION, Header, Line};
use serde::Serialize;
use std::{fmt::Debug, time::Duration};
use warmset_core::{
    Instant, Machine,
    gateway::Gateway,
    recording::StepOf,
    worker::{self, Worker},
};

/// Every so many steps a machine's invariants are checked.
const CHECK_INTERVAL: u64 = 1_000;

/// No server was without any event for so long: what a machine does about a longer time may have no end.
const PAUSE_MAX: Duration = Duration::from_secs(400 * 24 * 3600);

/// Whether a line can be so much later than the one before it.
pub(super) fn check_pause(line: u64, before: Instant, now: Instant) -> Result<(), ReplayError> {
    if now.since(before) > PAUSE_MAX {
        return Err(ReplayError::Order { line, reason: "more than a year lies between it and what came before" });
    }
    Ok(())
}

/// Why a recording does not replay.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The machine does something else now.
    #[error("a machine does something else now than it did: {0:?}")]
    Different(Box<Difference>),
    /// The recording is none, or of another time.
    #[error("it is a recording of form {found}, and this program reads {FORMAT_VERSION}: use the version that made it")]
    Version {
        /// What its first line says.
        found: u32,
    },
    /// Lines that do not belong together.
    #[error("line {line} cannot stand there: {reason}")]
    Order {
        /// Where, from 1.
        line: u64,
        /// Why.
        reason: &'static str,
    },
    /// What must always hold of a machine does not.
    #[error("line {line}: the {machine} breaks what must always hold ({violation}): please report it")]
    Violation {
        /// Where, from 1.
        line: u64,
        /// Which machine.
        machine: &'static str,
        /// What.
        violation: String,
    },
}

/// The first step that is not repeated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The machine.
    pub machine: &'static str,
    /// The line of the recording, from 1.
    pub line: u64,
    /// The step of this machine, from 1.
    pub step: u64,
    /// Nanoseconds on the server's clock.
    pub now_nanoseconds: u64,
    /// What happened.
    pub event: String,
    /// What the machine wanted then.
    pub recorded: Vec<String>,
    /// What it wants now.
    pub replayed: Vec<String>,
}

/// How far one machine came.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MachineReplay {
    /// Its name.
    pub machine: &'static str,
    /// Events told.
    pub events: u64,
    /// Actions that followed, the same as recorded.
    pub actions: u64,
    /// From the beginning to the last event.
    pub seconds: f64,
}

/// A machine that can be looked over.
trait Checked: Machine {
    const NAME: &'static str;
    fn check_at(&self, now: Instant) -> Result<(), String>;
}

impl Checked for Gateway {
    const NAME: &'static str = "gateway";

    fn check_at(&self, _now: Instant) -> Result<(), String> {
        self.check().map_err(|violation| violation.to_string())
    }
}

impl Checked for Worker {
    const NAME: &'static str = "worker";

    fn check_at(&self, now: Instant) -> Result<(), String> {
        self.check(now).map_err(|violation: worker::Violation| format!("{violation:?}"))
    }
}

/// One machine on its way through a recording.
struct Follower<M> {
    machine: M,
    began: Instant,
    now: Instant,
    events: u64,
    actions: u64,
}

impl<M> Follower<M>
where
    M: Checked<Event: Debug + Clone, Action: Debug + PartialEq>,
{
    fn take(kept: &mut Option<Self>, line: u64, entry: Entry<M>) -> Result<(), ReplayError> {
        match (entry, kept) {
            (Entry::Begin { now, machine }, kept @ None) => {
                let follower = Self { machine: *machine, began: now, now, events: 0, actions: 0 };
                follower.check(line)?;
                *kept = Some(follower);
                Ok(())
            }
            (Entry::Step(step), Some(follower)) => follower.step(line, step),
            (Entry::Begin { .. }, Some(_)) => {
                Err(ReplayError::Order { line, reason: "this machine has begun already" })
            }
            (Entry::Step(_), None) => Err(ReplayError::Order { line, reason: "this machine has not begun" }),
        }
    }

    fn step(&mut self, line: u64, step: StepOf<M>) -> Result<(), ReplayError> {
        check_pause(line, self.now, step.now)?;
        let mut actions = Vec::new();
        self.machine.handle(step.now, step.event.clone(), &mut actions);
        self.events += 1;
        self.actions += actions.len() as u64;
        self.now = step.now;
        if actions != step.actions {
            let lines = |actions: &[M::Action]| actions.iter().map(|action| format!("{action:?}")).collect();
            return Err(ReplayError::Different(Box::new(Difference {
                machine: M::NAME,
                line,
                step: self.events,
                now_nanoseconds: step.now.0,
                event: format!("{:?}", step.event),
                recorded: lines(&step.actions),
                replayed: lines(&actions),
            })));
        }
        if self.events.is_multiple_of(CHECK_INTERVAL) { self.check(line) } else { Ok(()) }
    }

    fn check(&self, line: u64) -> Result<(), ReplayError> {
        let checked = self.machine.check_at(self.now);
        checked.map_err(|violation| ReplayError::Violation { line, machine: M::NAME, violation })
    }

    fn result(&self) -> MachineReplay {
        let seconds = self.now.since(self.began).as_secs_f64();
        MachineReplay { machine: M::NAME, events: self.events, actions: self.actions, seconds }
    }
}

/// A replay on its way.
#[derive(Default)]
pub struct Replay {
    header: Option<Header>,
    gateway: Option<Follower<Gateway>>,
    worker: Option<Follower<Worker>>,
    lines: u64,
}

impl Replay {
    /// The next line. After an error there is no next one.
    pub fn take(&mut self, line: Line) -> Result<(), ReplayError> {
        self.lines += 1;
        let number = self.lines;
        match (line, &self.header) {
            (Line::Recording(header), None) => {
                header.check()?;
                self.header = Some(header);
                Ok(())
            }
            (_, None) => Err(ReplayError::Order { line: number, reason: "a recording begins with what it is" }),
            (Line::Recording(_), Some(_)) => {
                Err(ReplayError::Order { line: number, reason: "only the first line says what it is" })
            }
            (Line::Gateway(entry), Some(_)) => Follower::take(&mut self.gateway, number, entry),
            (Line::Worker(entry), Some(_)) => Follower::take(&mut self.worker, number, *entry),
            (Line::End(_), Some(_)) => Ok(()),
        }
    }

    /// What the first line said.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// How far each machine came, after a last look at what must hold of it.
    pub fn finish(&self) -> Result<Vec<MachineReplay>, ReplayError> {
        let mut results = Vec::new();
        if let Some(gateway) = &self.gateway {
            gateway.check(self.lines)?;
            results.push(gateway.result());
        }
        if let Some(worker) = &self.worker {
            worker.check(self.lines)?;
            results.push(worker.result());
        }
        Ok(results)
    }
}
