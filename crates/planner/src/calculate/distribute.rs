//! How long weights take to reach many nodes, by who passes them on.
//!
//! From the origin alone: `nodes * bytes / origin`. No scheme is faster than `bytes / node`. Nodes that have all pass all on, doubling each
//! round: `ceil(log2(nodes + 1))` rounds. Passed on chunk by chunk, a chain takes `bytes / node + (nodes - 1) * chunk / node`, and a tree in
//! which each feeds `fanout` others `fanout * bytes / node + depth * fanout * chunk / node`, since a node's link is shared by those it
//! feeds (application-level multicast: Castro et al., SplitStream, SOSP'03, section 1; the arithmetic of pipelines).

use super::input::{Refused, at_least_one, finite, positive, product, refused};
use serde::Serialize;

/// The most nodes.
const NODES_MAX: u64 = 10_000_000;

/// What goes where.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distribute {
    /// What every node is to have.
    pub bytes: u64,
    /// How many.
    pub nodes: u64,
    /// What the origin sends, to all together.
    pub origin_bytes_per_second: f64,
    /// What a node receives, and sends.
    pub node_bytes_per_second: f64,
    /// What is passed on at a time.
    pub chunk_bytes: u64,
    /// Nodes that a node of the tree feeds.
    pub fanout: u64,
}

/// How long each scheme takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// What arrives altogether.
    pub total_bytes: u64,
    /// Pieces that are passed on.
    pub chunks: u64,
    /// No scheme is faster.
    pub floor_seconds: f64,
    /// Everybody takes it from the origin.
    pub origin_only_seconds: f64,
    /// Rounds until all have it, if their number doubles.
    pub doubling_rounds: u64,
    /// Whole copies, doubling.
    pub doubling_seconds: f64,
    /// Chunk by chunk from one to the next.
    pub chain_seconds: f64,
    /// Levels of the tree.
    pub tree_depth: u64,
    /// Chunk by chunk down a tree.
    pub tree_seconds: f64,
    /// The fastest.
    pub best: &'static str,
}

impl Distribute {
    /// Does it.
    pub fn answer(&self) -> Result<Answer, Refused> {
        let nodes = at_least_one("nodes", self.nodes)?;
        if nodes > NODES_MAX {
            return Err(refused("nodes", format!("is {nodes}: at most {NODES_MAX} are looked at")));
        }
        let bytes = at_least_one("bytes", self.bytes)?;
        let chunk = at_least_one("chunk", self.chunk_bytes)?.min(bytes);
        let total_bytes = product("total bytes", &[bytes, nodes])?;
        let origin = positive("origin bandwidth", self.origin_bytes_per_second)?;
        let node = positive("node bandwidth", self.node_bytes_per_second)?;
        let (once, one_chunk) = (finite("seconds", bytes as f64 / node)?, chunk as f64 / node);
        let origin_only_seconds = finite("seconds", (total_bytes as f64 / origin).max(once))?;
        let doubling_rounds = u64::from((nodes + 1).next_power_of_two().trailing_zeros());
        let tree_depth = self.tree_depth(nodes)?;
        let fanout = self.fanout as f64;
        // What passes it on cannot be faster than the origin gives it once.
        let source = once.max(bytes as f64 / origin);
        let schemes = [
            ("origin-only", origin_only_seconds),
            ("doubling", doubling_rounds as f64 * source),
            ("chain", source + (nodes - 1) as f64 * one_chunk),
            ("tree", (fanout * once).max(source) + tree_depth as f64 * fanout * one_chunk),
        ];
        let best =
            schemes.iter().min_by(|first, second| first.1.total_cmp(&second.1)).map_or("origin-only", |best| best.0);
        Ok(Answer {
            total_bytes,
            chunks: bytes.div_ceil(chunk),
            floor_seconds: once,
            origin_only_seconds,
            doubling_rounds,
            doubling_seconds: schemes[1].1,
            chain_seconds: schemes[2].1,
            tree_depth,
            tree_seconds: schemes[3].1,
            best,
        })
    }

    /// Levels of a full tree that holds all nodes.
    fn tree_depth(&self, nodes: u64) -> Result<u64, Refused> {
        if self.fanout < 2 {
            return Err(refused("fanout", format!("is {}: give at least 2; 1 is the chain", self.fanout)));
        }
        let (mut depth, mut level, mut held) = (0, 1u64, 0u64);
        while held < nodes {
            held = held.saturating_add(level);
            level = level.saturating_mul(self.fanout);
            depth += 1;
        }
        Ok(depth)
    }
}
