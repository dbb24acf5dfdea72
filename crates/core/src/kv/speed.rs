//! What computing and what moving really takes, from what was seen; and which of them is worth doing.

/// Weight of the newest observation of a bandwidth.
const NEWEST_WEIGHT: f64 = 0.2;
const PROBE_WEIGHT: f64 = 0.8;
/// An observation of computing fades to 1/e while so many tokens are computed: others may want the machine meanwhile.
const MEMORY_TOKENS: f64 = 16_384.0;
/// A single observation lets the ones before it fade as this many tokens at most: it says nothing of other depths.
const FADING_TOKENS_MAX: f64 = 4096.0;
/// Before anything was computed: a slow machine, so that the first reload is tried.
const PREFILL_TOKENS_PER_SECOND_GUESS: f64 = 500.0;
/// Tokens that a guess counts for.
const GUESS_TOKENS: f64 = 16.0;
/// A part that grows with the depth is believed when it shows over so many tokens.
const FLAT_DEPTH: f64 = 1024.0;
/// The least share of the mean that each token takes by itself.
const TOKENS_SHARE_MIN: f64 = 0.1;

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
        self.weigh(bytes, seconds, NEWEST_WEIGHT);
    }

    /// An observation that was made to see, and that comes seldom.
    pub(super) fn observe_probe(&mut self, bytes: u64, seconds: f64) {
        self.weigh(bytes, seconds, PROBE_WEIGHT);
    }

    fn weigh(&mut self, bytes: u64, seconds: f64, weight: f64) {
        if bytes == 0 || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let seen = bytes as f64 / seconds;
        // Means of seconds per byte: slow moments count for what they cost.
        self.bytes_per_second =
            if self.measured { 1.0 / ((1.0 - weight) / self.bytes_per_second + weight / seen) } else { seen };
        self.measured = true;
    }

    pub(super) fn seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes_per_second
    }

    /// Whether it was ever seen, or is a guess still.
    pub(super) fn is_measured(&self) -> bool {
        self.measured
    }

    /// What was seen; none as long as it is a guess.
    pub(super) fn measured_bytes_per_second(&self) -> Option<f64> {
        self.measured.then_some(self.bytes_per_second)
    }
}

/// Seconds to compute a prompt: a part of its own (steps are made however few tokens are computed), one for each token,
/// and one for every token before it (attention). Fitted by least squares over what was seen, older observations fading.
/// What it does not know it takes to be nothing, and a token to take what was guessed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PrefillSpeed {
    /// Upper half of the symmetric matrix of sums over observations of (1, n, n d), each weighted by 1/n: n is its tokens,
    /// d their mean depth.
    squares: [[f64; TERMS]; TERMS],
    /// The same of their products with the seconds.
    seconds: [f64; TERMS],
    /// Seconds per prompt, per token, and per token and token before it.
    cost: [f64; TERMS],
}

const TERMS: usize = 3;

impl Default for PrefillSpeed {
    fn default() -> Self {
        let guess = 1.0 / PREFILL_TOKENS_PER_SECOND_GUESS;
        let mut squares = [[0.0; TERMS]; TERMS];
        squares[1][1] = GUESS_TOKENS;
        Self { squares, seconds: [0.0, GUESS_TOKENS * guess, 0.0], cost: [0.0, guess, 0.0] }
    }
}

impl PrefillSpeed {
    pub(super) fn observe(&mut self, from_token: u32, to_token: u32, seconds: f64) {
        let tokens = f64::from(to_token.saturating_sub(from_token));
        if tokens <= 0.0 || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let depth = (f64::from(from_token) + f64::from(to_token)) / 2.0;
        let (terms, fade) = ([1.0, tokens, tokens * depth], libm::exp(-tokens.min(FADING_TOKENS_MAX) / MEMORY_TOKENS));
        for row in 0..TERMS {
            for column in row..TERMS {
                let sum = &mut self.squares[row][column];
                *sum = *sum * fade + terms[row] * terms[column] / tokens;
            }
            self.seconds[row] = self.seconds[row] * fade + terms[row] * seconds / tokens;
        }
        self.fit();
    }

    /// The least squares for which no part is negative and tokens take a share of the mean, whatever noise says: the best
    /// of those in which each part is either free or at its bound.
    fn fit(&mut self) {
        let mut squares = self.squares;
        squares[0][0] += GUESS_TOKENS / (GUESS_TOKENS * GUESS_TOKENS);
        squares[2][2] += GUESS_TOKENS * FLAT_DEPTH * FLAT_DEPTH;
        let least = [0.0, TOKENS_SHARE_MIN * self.seconds[1] / self.squares[1][1], 0.0];
        let mut best = (f64::INFINITY, [0.0, self.seconds[1] / self.squares[1][1], 0.0]);
        for free in 0..1_u8 << TERMS {
            let Some(cost) = solve(&squares, &self.seconds, &least, free) else { continue };
            let error = error(&squares, &self.seconds, &cost);
            if cost.iter().zip(&least).all(|(part, least)| part >= least) && error < best.0 {
                best = (error, cost);
            }
        }
        self.cost = best.1;
    }

    /// Seconds by which computing grows with the tokens from one to another.
    pub(super) fn seconds(&self, from_token: u32, to_token: u32) -> f64 {
        let [_, own, before] = self.cost;
        let (from, to) = (f64::from(from_token), f64::from(to_token.max(from_token)));
        (to - from) * own + before * (to * to - from * from) / 2.0
    }

    pub(super) fn tokens_per_second(&self, at_token: u32) -> f64 {
        let [_, own, before] = self.cost;
        1.0 / (own + before * f64::from(at_token))
    }
}

fn at(squares: &[[f64; TERMS]; TERMS], row: usize, column: usize) -> f64 {
    squares[row.min(column)][row.max(column)]
}

/// The parts of least squares, those not in `free` being at their bounds. None if they cannot be told apart.
fn solve(
    squares: &[[f64; TERMS]; TERMS],
    seconds: &[f64; TERMS],
    least: &[f64; TERMS],
    free: u8,
) -> Option<[f64; TERMS]> {
    let is_free = |term: usize| free >> term & 1 == 1;
    // Gauss and Jordan, with rows of what is at its bound being that bound. Positive definite: no row must be exchanged.
    let (mut left, mut right) = ([[0.0; TERMS]; TERMS], *least);
    for row in (0..TERMS).filter(|row| is_free(*row)) {
        right[row] = seconds[row];
        for column in 0..TERMS {
            if is_free(column) {
                left[row][column] = at(squares, row, column);
            } else {
                right[row] -= at(squares, row, column) * least[column];
            }
        }
    }
    for pivot in (0..TERMS).filter(|pivot| is_free(*pivot)) {
        let divisor = left[pivot][pivot];
        if divisor <= 1e-12 * at(squares, pivot, pivot) {
            return None;
        }
        for row in (0..TERMS).filter(|row| *row != pivot && is_free(*row)) {
            let factor = left[row][pivot] / divisor;
            let above = left[pivot];
            left[row].iter_mut().zip(above).for_each(|(part, above)| *part -= factor * above);
            right[row] -= factor * right[pivot];
        }
    }
    for row in (0..TERMS).filter(|row| is_free(*row)) {
        right[row] /= left[row][row];
    }
    Some(right)
}

/// The sum of squares that is to be least, but for what is the same for all.
fn error(squares: &[[f64; TERMS]; TERMS], seconds: &[f64; TERMS], cost: &[f64; TERMS]) -> f64 {
    let quadratic = |row: usize| (0..TERMS).map(|column| at(squares, row, column) * cost[column]).sum::<f64>();
    (0..TERMS).map(|row| cost[row] * (quadratic(row) - 2.0 * seconds[row])).sum()
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
    fn mixed_traffic_leaves_the_speed_what_it_is() {
        // Whole prompts, next turns of some tokens, and prompts of which all but the last token is there: those take a
        // step, however deep they stand, which is not what a token takes.
        let (step, token, before) = (0.015, 0.0004, 2e-8);
        let truth = |from: f64, to: f64| step + token * (to - from) + before * (to * to - from * from) / 2.0;
        let mut speed = PrefillSpeed::default();
        for turn in 0..200u32 {
            // Wavers by a tenth.
            let noise = 0.9 + 0.2 * f64::from(turn * 7 % 11) / 10.0;
            let (from, to) = match turn % 4 {
                0 => (0, 513 + 100 * (turn % 3)),
                1 => (512, 513),
                2 => (2048, 2049),
                _ => (1024, 1024 + 20 + turn % 50),
            };
            speed.observe(from, to, truth(f64::from(from), f64::from(to)) * noise);
            if turn < 12 {
                continue;
            }
            for (from, to) in [(0, 512), (0, 4096), (2048, 4096)] {
                let wanted = truth(f64::from(from), f64::from(to)) - step;
                let found = speed.seconds(from, to);
                assert!((found / wanted - 1.0).abs() < 0.35, "{found} for {wanted} of {from}..{to} after {turn}");
            }
        }
    }

    #[test]
    fn steps_of_one_token_say_nothing_of_how_long_prompts_take() {
        let mut speed = PrefillSpeed::default();
        for _ in 0..100 {
            speed.observe(4096, 4097, 0.02);
        }
        let guess = PREFILL_TOKENS_PER_SECOND_GUESS;
        assert!((speed.tokens_per_second(0) / guess - 1.0).abs() < 0.3, "{}", speed.tokens_per_second(0));
        for _ in 0..3 {
            speed.observe(0, 512, 512.0 / 5000.0);
        }
        assert!((speed.tokens_per_second(0) / 5000.0 - 1.0).abs() < 0.3, "{}", speed.tokens_per_second(0));
    }

    #[test]
    fn a_machine_that_others_leave_is_soon_known_to_be_fast() {
        let mut speed = PrefillSpeed::default();
        for _ in 0..100 {
            speed.observe(0, 512, 512.0 / 100.0);
        }
        for _ in 0..100 {
            speed.observe(0, 512, 512.0 / 2000.0);
        }
        assert!(speed.tokens_per_second(0) > 1000.0, "{}", speed.tokens_per_second(0));
    }

    #[test]
    fn one_slow_moment_moves_a_bandwidth_by_what_it_costs() {
        let mut bandwidth = Bandwidth::guessed(1e9);
        let seen = |bandwidth: &Bandwidth| bandwidth.measured_bytes_per_second().expect("it was seen");
        assert_eq!(bandwidth.measured_bytes_per_second(), None);
        bandwidth.observe(1000, 1e-6);
        assert!((seen(&bandwidth) - 1e9).abs() < 1.0);
        bandwidth.observe(1000, 1e-5);
        assert!(seen(&bandwidth) < 0.4e9);
        bandwidth.observe(0, 1.0);
        bandwidth.observe(10, f64::NAN);
        assert!(seen(&bandwidth).is_finite());
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
