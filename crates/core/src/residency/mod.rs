//! What stays in memory.
