//! The engine port, the engines behind it, and the processes they live in.
//!
//! `protocol` is what worker and engine process say to each other; `port` is what an engine implements inside its
//! process; the rest is the parent's side (starting, measuring, limiting) and the engines themselves.

pub mod port;
pub mod protocol;

mod calls;
pub mod child;
pub mod command;
pub mod frame;
pub mod gguf;
pub mod kv;
#[cfg(feature = "llama")]
pub mod llama;
pub mod measure;
pub mod process;
pub mod start_pages;
pub mod synthetic;
pub mod template;
