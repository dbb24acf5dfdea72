//! What computing and what moving really takes, from what was seen; and which of them is worth doing.

/// Weight of the newest observation of a bandwidth.
const NEWEST_WEIGHT: f64 = 0.2;
/// What an observation of prefill counts for when as many tokens again have been computed.
const PREFILL_MEMORY_TOKENS: f64 = 200_000.0;
/// Before anything was computed: a slow machine, so that the first reload is tried.
const PREFILL_TOKENS_PER_SECOND_GUESS: f64 = 500.0;

/// Bytes per second of a way between two places, and seconds before the first byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bandwidth {
    bytes_per_second: f64,
    measured: bool,
}

impl Bandwidth {
    pub(super) fn guessed(bytes_per_second: f64) -> Self {
        Self { bytes_per_second, measured: false }
    }

    pub(super) fn observe(&mut self, bytes: u64, seconds: f64) {
        if bytes == 0 || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let seen = bytes as f64 / seconds;
        // Means of seconds per byte: slow moments count for what they cost.
        self.bytes_per_second = if self.measured {
            1.0 / ((1.0 - NEWEST_WEIGHT) / self.bytes_per_second + NEWEST_WEIGHT / seen)
        } else {
            seen
        };
        self.measured = true;
    }

    pub(super) fn seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes_per_second
    }

    /// Whether it was ever seen, or is a guess still.
    pub(super) fn is_measured(&self) -> bool {
        self.measured
    }

    pub(super) fn bytes_per_second(&self) -> f64 {
        self.bytes_per_second
    }
}

/// Seconds to compute a prompt, as a line over the depth: each token costs a part of its own and a part for every token
/// before it (attention). Fitted by least squares over what was seen, older observations fading.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct PrefillSpeed {
    /// Sums over observations, weighted by their tokens: weight, depth, depth squared, seconds per token, their product.
    weight: f64,
    depth: f64,
    depth_squared: f64,
    cost: f64,
    cost_depth: f64,
}

impl PrefillSpeed {
    pub(super) fn observe(&mut self, from_token: u32, to_token: u32, seconds: f64) {
        let tokens = f64::from(to_token.saturating_sub(from_token));
        if tokens <= 0.0 || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let (depth, cost) = ((f64::from(from_token) + f64::from(to_token)) / 2.0, seconds / tokens);
        let fade = libm::exp(-tokens / PREFILL_MEMORY_TOKENS);
        for sum in [&mut self.weight, &mut self.depth, &mut self.depth_squared, &mut self.cost, &mut self.cost_depth] {
            *sum *= fade;
        }
        self.weight += tokens;
        self.depth += tokens * depth;
        self.depth_squared += tokens * depth * depth;
        self.cost += tokens * cost;
        self.cost_depth += tokens * cost * depth;
    }

    /// Seconds per token at depth 0, and what each token before adds.
    fn line(&self) -> (f64, f64) {
        if self.weight <= 0.0 {
            return (1.0 / PREFILL_TOKENS_PER_SECOND_GUESS, 0.0);
        }
        let (mean_depth, mean_cost) = (self.depth / self.weight, self.cost / self.weight);
        let spread = self.depth_squared / self.weight - mean_depth * mean_depth;
        // All at one depth: nothing is known of how it grows.
        let slope = if spread > 1.0 { (self.cost_depth / self.weight - mean_depth * mean_cost) / spread } else { 0.0 };
        let slope = slope.clamp(0.0, mean_cost / mean_depth.max(1.0));
        ((mean_cost - slope * mean_depth).max(mean_cost * 0.05), slope)
    }

    /// Seconds to compute the tokens from one to another.
    pub(super) fn seconds(&self, from_token: u32, to_token: u32) -> f64 {
        let (own, before) = self.line();
        let (from, to) = (f64::from(from_token), f64::from(to_token.max(from_token)));
        (to - from) * own + before * (to * to - from * from) / 2.0
    }

    pub(super) fn tokens_per_second(&self, at_token: u32) -> f64 {
        let (own, before) = self.line();
        1.0 / (own + before * f64::from(at_token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_line_is_found_again() {
        let truth = |from: f64, to: f64| 0.003 * (to - from) + 1e-6 * (to * to - from * from) / 2.0;
        let mut speed = PrefillSpeed::default();
        for from in [0u32, 512, 1024, 2048, 4096] {
            speed.observe(from, from + 512, truth(f64::from(from), f64::from(from) + 512.0));
        }
        let (found, wanted) = (speed.seconds(0, 8192), truth(0.0, 8192.0));
        assert!((found / wanted - 1.0).abs() < 0.02, "{found} for {wanted}");
        assert!(speed.tokens_per_second(0) > speed.tokens_per_second(4096));
    }

    #[test]
    fn one_slow_moment_moves_a_bandwidth_by_what_it_costs() {
        let mut bandwidth = Bandwidth::guessed(1e9);
        bandwidth.observe(1000, 1e-6);
        assert!((bandwidth.bytes_per_second() - 1e9).abs() < 1.0);
        bandwidth.observe(1000, 1e-5);
        assert!(bandwidth.bytes_per_second() < 0.4e9);
        bandwidth.observe(0, 1.0);
        bandwidth.observe(10, f64::NAN);
        assert!(bandwidth.bytes_per_second().is_finite());
    }

    proptest! {
        #[test]
        fn more_tokens_never_take_less(
            seen in prop::collection::vec((0u32..100_000, 1u32..5000, 1e-4f64..100.0), 0..20),
            from in 0u32..100_000,
            tokens in 0u32..100_000,
        ) {
            let mut speed = PrefillSpeed::default();
            for (from, tokens, seconds) in seen {
                speed.observe(from, from + tokens, seconds);
            }
            let seconds = speed.seconds(from, from + tokens);
            prop_assert!(seconds.is_finite() && seconds >= 0.0);
            prop_assert!(speed.seconds(from, from + tokens + 1) >= seconds);
        }
    }
}
