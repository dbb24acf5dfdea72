//! Many models, one loader: how often a request finds its model ready, and from which rate of requests on loads cannot keep up.
//!
//! Two run side by side on the same requests: an ideal of the usual way (pins, and the least recently used of the rest
//! leaves), and the machines that serve.

pub mod page;
pub mod pinned_lru;
pub mod plan;

pub use plan::Plan;
