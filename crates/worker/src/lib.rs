//! The node agent: the run loop of the worker machine, and the engine processes it keeps.
//!
//! `config` is what a worker is told at start; `handle` is how the rest of the server talks to it; `agent` is the run
//! loop that owns the machine: events in, actions out. `requests` are the callers it answers to. Slow work leaves as
//! tasks (`life`: one engine process from start to end, with the `canary` it must pass; `park`: requests
//! that leave it in the middle; `spare`: the next one, already initialised) and comes back as
//! events that carry the generation they were started for. `kv` is the run loop of the tier that KV outlives its request in,
//! with the memory and files it decides about.

mod config;
mod handle;

mod agent;
mod canary;
mod kv;
mod life;
mod park;
mod requests;
mod spare;
mod timer;

pub use agent::{Agent, FACTS_KEPT};
pub use canary::{embedding_question, text_question};
pub use config::{AgentConfig, AgentError, Artifacts, Clock, ModelConfig};
pub use handle::{AgentGone, AgentHandle, Assignment, LOG_LINES_MAX, MemoryReport};
pub use kv::{DiskConfig, KvConfig, KvHandle};
