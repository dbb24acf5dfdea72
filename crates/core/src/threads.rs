//! Threads leased to engines.
