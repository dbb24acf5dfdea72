//! Calculators: what a plan needs in closed form, each formula with where it comes from.
//!
//! Bytes are exact: whole numbers, multiplied and added with checks. Times and rates are floating point, and an input that
//! would make them infinite or nothing is refused. A figure of a data sheet is a ceiling; what real engines reach of it is
//! given beside it, with who measured it. Modules are declared in reading order.

pub mod input;

pub mod hardware;
pub mod hf_config;
pub mod model;

pub mod decode;
pub mod paging;
pub mod prefill;
pub mod sessions;
pub mod warm_set;

pub mod break_even;
pub mod transfer;

pub mod batch;
pub mod pools;
pub mod queueing;

pub mod distribute;
pub mod engine_args;
pub mod fleet;
pub mod prefixes;
