//! The simulator of engines against a plain one step by step, and against queues with answers in closed form.

#[cfg(test)]
mod queues;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod steps;
