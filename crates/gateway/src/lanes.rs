//! Threads that each drive the connections they were given, and nobody else's.
//!
//! An answer that passes by is read from one connection and written to another. Where any thread may drive either, most
//! pieces wake a second thread, which costs more than the piece itself. So a caller's connection stays on the lane
//! that it came to, and so do the connections to replicas that are opened for it.

use axum::Router;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};
use tokio::{
    runtime::{Builder, Handle},
    sync::watch,
};

/// More would not be kept busy by what a gateway does.
pub const LANES_MAX: usize = 16;

/// Running threads; they end with this.
pub struct Lanes {
    handles: Vec<Handle>,
    _running: watch::Sender<()>,
}

impl Lanes {
    /// One for each core that this process may use.
    pub fn start() -> io::Result<Self> {
        let count = thread::available_parallelism().map_or(1, usize::from).min(LANES_MAX);
        let (running, ended) = watch::channel(());
        let mut handles = Vec::with_capacity(count);
        for number in 0..count {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            handles.push(runtime.handle().clone());
            let mut ended = ended.clone();
            thread::Builder::new().name(format!("lane-{number}")).spawn(move || {
                runtime.block_on(async {
                    // Nothing is ever sent: this is the end.
                    let _ = ended.changed().await;
                });
            })?;
        }
        Ok(Self { handles, _running: running })
    }

    /// The routes of each lane, with what is to be its own in them.
    pub fn serve(&self, routes: impl Fn() -> Router) -> Vec<Lane> {
        self.handles.iter().map(|handle| Lane { handle: Some(handle.clone()), ..Lane::here(routes()) }).collect()
    }
}

/// Where connections are driven, and what answers them there.
pub struct Lane {
    /// None is wherever they are accepted.
    pub(crate) handle: Option<Handle>,
    pub(crate) routes: Router,
    open: Arc<AtomicUsize>,
}

impl Lane {
    /// The runtime that accepts them.
    pub fn here(routes: Router) -> Self {
        Self { handle: None, routes, open: Arc::default() }
    }

    /// The one with the fewest connections; among equals they take turns.
    pub(crate) fn freest(lanes: &[Self], turn: u64) -> Option<&Self> {
        let first = turn as usize % lanes.len().max(1);
        let order = lanes[first..].iter().chain(&lanes[..first]);
        order.min_by_key(|lane| lane.open.load(Ordering::Relaxed))
    }

    pub(crate) fn seat(&self) -> Seat {
        self.open.fetch_add(1, Ordering::Relaxed);
        Seat(self.open.clone())
    }
}

/// A connection's place on a lane.
pub(crate) struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_go_where_the_fewest_are() {
        let lanes: Vec<Lane> = (0..3).map(|_| Lane::here(Router::new())).collect();
        let at = |turn| lanes.iter().position(|lane| std::ptr::eq(lane, Lane::freest(&lanes, turn).expect("one")));
        let mut seats: Vec<Seat> = Vec::new();
        for turn in 4..8 {
            assert_eq!(at(turn), Some(turn as usize % 3));
            seats.push(lanes[turn as usize % 3].seat());
        }
        // The second one has two, and loses one of them.
        assert_eq!(at(1), Some(2));
        seats.remove(0);
        assert_eq!((at(1), at(2)), (Some(1), Some(2)));
        assert!(Lane::freest(&[], 1).is_none());
    }
}
