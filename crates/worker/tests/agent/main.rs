//! The node agent over real engine processes of the synthetic engine.

mod faults;
mod serving;
mod support;
