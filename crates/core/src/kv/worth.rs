//! What a block is worth, on the scale of everything warm: seconds saved per second and byte kept.
//!
//! Demand is a count of uses in which each fades by half in [`HALF_LIFE`]. All counts fade alike, so their order does not
//! change with time: it is kept as a logarithm at the tier's origin, and changes only when a block is used.

use crate::time::Instant;
use core::time::Duration;

/// Time in which a use comes to count for half.
pub const HALF_LIFE: Duration = Duration::from_secs(30 * 60);

fn fading(now: Instant) -> f64 {
    now.since(Instant::ZERO).as_secs_f64() * core::f64::consts::LN_2 / HALF_LIFE.as_secs_f64()
}

/// A score with one more use.
pub(super) fn used(score: f64, now: Instant) -> f64 {
    let newest = fading(now);
    let (greater, less) = if score > newest { (score, newest) } else { (newest, score) };
    greater + libm::log1p(libm::exp(less - greater))
}

/// Uses per second that a score stands for.
#[cfg(test)]
pub(super) fn demand_per_second(score: f64, now: Instant) -> f64 {
    libm::exp(score - fading(now)) * core::f64::consts::LN_2 / HALF_LIFE.as_secs_f64()
}

/// The place in an order by worth, greater than 0, the least worth first. Does not change with time.
pub(super) fn order(score: f64, rewarm_seconds: f64, bytes: u64) -> u64 {
    let logarithm = score + libm::log(rewarm_seconds.max(1e-9)) - libm::log(bytes.max(1) as f64);
    // Bits of floating-point numbers sort like the numbers once negative ones are turned over.
    let bits = logarithm.to_bits();
    let sorted = if bits >> 63 == 0 { bits | 1 << 63 } else { !bits };
    sorted.max(1)
}

/// Seconds saved per second and byte that a place in the order stands for now.
pub(super) fn of_order(order: u64, now: Instant) -> f64 {
    let bits = if order >> 63 == 1 { order & !(1 << 63) } else { !order };
    libm::exp(f64::from_bits(bits) - fading(now)) * core::f64::consts::LN_2 / HALF_LIFE.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_use_counts_for_half_after_the_half_life() {
        let then = Instant::after(Duration::from_secs(77));
        let score = used(f64::NEG_INFINITY, then);
        let (now, later) = (demand_per_second(score, then), demand_per_second(score, then + HALF_LIFE));
        assert!((now / later - 2.0).abs() < 1e-9);
        let twice = used(score, then);
        assert!((demand_per_second(twice, then) / now - 2.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn an_order_tells_the_worth(uses in 1u64..100_000, seconds in 1e-6f64..1e3, bytes in 1u64..1 << 40, later in 0u64..100_000) {
            let score = used(f64::NEG_INFINITY, Instant::after(Duration::from_secs(uses)));
            let now = Instant::after(Duration::from_secs(uses + later));
            let worth = crate::residency::worth(demand_per_second(score, now), seconds, bytes);
            let told = of_order(order(score, seconds, bytes), now);
            prop_assert!((told / worth - 1.0).abs() < 1e-6, "{told} for {worth}");
        }

        #[test]
        fn the_order_is_that_of_worth(one in (-50f64..50.0, 1e-6f64..1e3), other in (-50f64..50.0, 1e-6f64..1e3)) {
            let worth = |(score, seconds): (f64, f64)| libm::exp(score) * seconds;
            let place = |(score, seconds)| order(score, seconds, 4096);
            prop_assert_eq!(worth(one) < worth(other), place(one) < place(other));
        }

        #[test]
        fn time_changes_no_order(uses in prop::collection::vec(0u64..100_000, 2..20)) {
            let scores: alloc::vec::Vec<f64> =
                uses.iter().map(|at| used(f64::NEG_INFINITY, Instant::after(Duration::from_secs(*at)))).collect();
            for now in [100_000, 1_000_000] {
                let now = Instant::after(Duration::from_secs(now));
                for (one, other) in scores.iter().zip(&scores[1..]) {
                    prop_assert_eq!(one < other, demand_per_second(*one, now) < demand_per_second(*other, now));
                }
            }
        }
    }
}
