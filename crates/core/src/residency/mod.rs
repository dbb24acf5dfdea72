//! What stays in memory: plain data in, plain data out.
//!
//! Everything warm has bytes, a demand and a cost to make it warm again; what is kept is what loses most per byte if
//! dropped: `demand * rewarm / bytes`.

mod backoff;
mod charge;
mod demand;
mod place;
mod thrash;

pub use backoff::Backoff;
pub use charge::{Charge, HeldSum, held_bytes};
pub use demand::Demand;
pub use place::{Held, Placement, Problem, Standing, place};
pub use thrash::Thrash;

/// Seconds of rewarming saved per second and byte kept: the one currency of everything warm.
///
/// A model of no bytes costs nothing to keep and is worth infinitely much.
pub fn worth(demand_per_second: f64, rewarm_seconds: f64, bytes: u64) -> f64 {
    if bytes == 0 {
        return f64::INFINITY;
    }
    // A u64 of bytes loses precision above 2^53, which no comparison of worth notices.
    demand_per_second * rewarm_seconds / bytes as f64
}

#[cfg(test)]
mod tests {
    use super::worth;

    #[test]
    fn worth_is_seconds_saved_per_second_and_byte() {
        assert!((worth(0.5, 8.0, 2) - 2.0).abs() < 1e-12);
        assert!(worth(1.0, 1.0, 10) < worth(1.0, 1.0, 5), "the same loss in fewer bytes is worth more");
        assert!(worth(1.0, 1.0, 0).is_infinite());
    }
}
