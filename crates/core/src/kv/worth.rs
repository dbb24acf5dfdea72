//! What a block is worth, on the scale of everything warm: seconds saved per second and byte.
//!
//! Prompts come again in bursts: a conversation goes on within minutes or not at all, and the more often it went on, the
//! likelier it does again. So the demand for a block is its count of uses over the time since the last one. To that time a
//! pause is added, so that what was used just now is not worth more than everything: a long one after the first use, and a
//! short one for who has come back before, since who does so mostly does it soon. Counts fade by half in [`HALF_LIFE`], so
//! that what was popular once is forgotten.
//!
//! This order of blocks changes with time, but not among blocks whose count, cost and size make the same: of them the one
//! that was used longest ago is worth least. They form a class, and whoever looks for the least worthy block compares one
//! of each class. Worths that differ by less than a class is wide are equal: the speeds they come from are not known
//! better than that.

use core::time::Duration;

/// Time in which a use comes to count for half.
pub const HALF_LIFE: Duration = Duration::from_secs(15 * 60);
/// What is added to the time since the first use.
pub const PAUSE_FIRST: Duration = Duration::from_secs(3 * 60);
/// What is added to the time since a later use.
pub const PAUSE: Duration = Duration::from_secs(40);
/// The count of uses from which on one came before: less than this of it has faded away.
const CAME_BEFORE: f32 = 1.2;
/// Uses to come in a first pause, for each that was counted; between 0.2 and 0.4 on the traces this was fitted to.
const RETURNING: f64 = 0.25;

/// Classes in which worth doubles.
const CLASSES_PER_DOUBLING: f64 = 2.0;
/// The logarithm to base 2 of the least weight that is told apart: uses times seconds per byte.
const LEAST_WEIGHT: f64 = -75.0;
const STEP_MAX: f64 = 255.0;

/// Blocks whose worth falls alike: by uses, cost and size, in steps, and by whether they came back. 0 is none.
pub(super) type Class = u16;

/// A count of uses after a time without one.
pub(super) fn faded(uses: f32, age: Duration) -> f32 {
    (f64::from(uses) * half_lives(age)) as f32
}

fn half_lives(age: Duration) -> f64 {
    libm::exp2(-age.as_secs_f64() / HALF_LIFE.as_secs_f64())
}

/// Uses per second for each that was counted, after a time without one.
fn demand_per_second(came_before: bool, age: Duration) -> f64 {
    RETURNING * half_lives(age) / (age + if came_before { PAUSE } else { PAUSE_FIRST }).as_secs_f64()
}

/// The class of a block whose uses were counted at the last one.
pub(super) fn class(uses: f32, rewarm_seconds: f64, bytes: u64) -> Class {
    let weight = f64::from(uses.max(f32::MIN_POSITIVE)) * rewarm_seconds.max(1e-9) / bytes.max(1) as f64;
    let step = (libm::log2(weight) - LEAST_WEIGHT) * CLASSES_PER_DOUBLING;
    2 * (libm::round(step) + 1.0).clamp(1.0, STEP_MAX) as Class + Class::from(uses >= CAME_BEFORE)
}

/// Seconds saved per second and byte by blocks of a class that were used last so long ago.
pub(super) fn of_class(class: Class, age: Duration) -> f64 {
    let (step, came_before) = (class / 2, class % 2 == 1);
    let weight = libm::exp2((f64::from(step) - 1.0) / CLASSES_PER_DOUBLING + LEAST_WEIGHT);
    weight * demand_per_second(came_before, age)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_use_counts_for_half_after_the_half_life() {
        assert!((faded(3.0, HALF_LIFE) - 1.5).abs() < 1e-6);
        assert!((faded(1.0, Duration::ZERO) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn more_uses_hold_a_block_for_longer_but_not_for_ever() {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        let worth = |uses: f32, age| of_class(class(uses, 0.1, 1 << 20), age);
        assert!(worth(2.0, minutes(1)) > worth(1.0, minutes(0)));
        assert!(worth(4.0, minutes(5)) > worth(1.0, minutes(0)));
        assert!(worth(4.0, minutes(20)) < worth(1.0, minutes(1)));
    }

    proptest! {
        #[test]
        fn a_class_tells_the_worth(uses in 1f32..100_000.0, seconds in 1e-6f64..1e3, bytes in 1u64..1 << 40, age in 0u64..100_000) {
            let age = Duration::from_secs(age);
            let worth = crate::residency::worth(f64::from(uses) * demand_per_second(uses >= CAME_BEFORE, age), seconds, bytes);
            let told = of_class(class(uses, seconds, bytes), age);
            prop_assert!((0.84..1.19).contains(&(told / worth)), "{told} for {worth}");
        }

        #[test]
        fn within_a_class_the_older_is_worth_less(class in 2u16..=511, age in 0u64..1_000_000, longer in 1u64..1_000_000) {
            let (age, older) = (Duration::from_secs(age), Duration::from_secs(age + longer));
            prop_assert!(of_class(class, older) <= of_class(class, age));
        }
    }
}
