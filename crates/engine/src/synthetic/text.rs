//! Pseudo text: words that follow from prompt and seed alone, and the stop texts that cut it.

use crate::protocol::TokenLogprob;

/// Sixty-four words; each is one token.
const WORDS: [&str; 64] = [
    "amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "ledge",
    "marsh", "north", "orbit", "pearl", "quarry", "ridge", "shore", "tidal", "umber", "valley", "water", "xenon",
    "yield", "zephyr", "arch", "brook", "cliff", "dune", "east", "field", "glade", "hill", "isle", "juniper", "keel",
    "lake", "mesa", "nook", "oak", "pine", "quartz", "reef", "sand", "thorn", "upland", "vine", "west", "yard", "zone",
    "ash", "bay", "cove", "dell", "elm", "fern", "gulf", "holm", "iris", "jade", "kelp", "lime", "moss",
];

/// FNV-1a over 64 bits: stable over versions, platforms and runs.
pub(super) fn hash(parts: &[&[u8]]) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        for byte in *part {
            state = (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        // A separator, so that ("ab", "c") and ("a", "bc") differ.
        state = (state ^ 0xff).wrapping_mul(0x0100_0000_01b3);
    }
    // Without a last mix the low bits of similar texts are similar.
    state ^= state >> 33;
    state = state.wrapping_mul(0xff51_afd7_ed55_8ccd);
    state ^ (state >> 33)
}

/// The `index`-th word of a text, with the space before it.
pub(super) fn piece(text_seed: u64, index: u32) -> String {
    let choice = hash(&[&text_seed.to_le_bytes(), &index.to_le_bytes()]) % WORDS.len() as u64;
    let word = usize::try_from(choice).map_or(WORDS[0], |choice| WORDS[choice]);
    if index == 0 { word.to_owned() } else { format!(" {word}") }
}

/// Words with log probabilities that follow from them; each one with its space is a token.
pub(super) fn logprobs(text: &str, top: u32) -> Vec<TokenLogprob> {
    let one = |word: &str| {
        let share = hash(&[word.as_bytes()]) % 1000 + 1;
        let logprob = (f32::from(u16::try_from(share).unwrap_or(u16::MAX)) / 1001.0).ln();
        let alternatives = (0..top).map(|index| {
            let other = WORDS[index as usize % WORDS.len()];
            (other.as_bytes().to_vec(), logprob - (index + 1) as f32)
        });
        TokenLogprob { bytes: word.as_bytes().to_vec(), logprob, top: alternatives.collect() }
    };
    text.split_inclusive(' ').map(one).collect()
}

/// A unit vector that follows from the text.
pub(super) fn vector(text: &[u8], length: u32) -> Vec<f32> {
    let values: Vec<f64> = (0..length)
        .map(|index| {
            let part = hash(&[text, &index.to_le_bytes()]) % 2_000_001;
            // Below 2^53, so exact.
            part as f64 / 1_000_000.0 - 1.0
        })
        .collect();
    let norm = values.iter().map(|value| value * value).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
    #[expect(clippy::cast_possible_truncation, reason = "embeddings are single precision")]
    values.iter().map(|value| (value / norm) as f32).collect()
}

/// Passes text on as soon as it can no longer be the beginning of a stop text.
#[derive(Debug, Default)]
pub(super) struct StopFilter {
    stops: Vec<String>,
    held: String,
    stopped: Option<String>,
}

impl StopFilter {
    pub(super) fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), ..Self::default() }
    }

    /// Takes the next piece and returns what may be shown.
    pub(super) fn push(&mut self, piece: &str) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str()).zip(Some(stop))).min();
        if let Some((at, stop)) = first {
            self.stopped = Some(stop.clone());
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// The stop text that has come.
    pub(super) fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// No more pieces come: what was held back is text.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that begins `stop` without being all of it.
fn overlap(text: &str, stop: &str) -> usize {
    (1..stop.len()).rev().find(|length| stop.is_char_boundary(*length) && text.ends_with(&stop[..*length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_follows_from_its_seed() {
        let text = |seed| (0..20).map(|index| piece(seed, index)).collect::<String>();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
        assert_eq!(text(1).split_whitespace().count(), 20);
    }

    #[test]
    fn vectors_are_of_unit_length() {
        let norm: f32 = vector(b"abc", 8).iter().map(|value| value * value).sum();
        assert!((norm - 1.0).abs() < 1e-5, "{norm}");
        assert_ne!(vector(b"abc", 8), vector(b"abd", 8));
    }

    proptest! {
        #[test]
        fn the_filter_shows_exactly_what_comes_before_the_first_stop(
            pieces in prop::collection::vec("[abé]{0,3}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..3),
        ) {
            let mut filter = StopFilter::new(&stops);
            let mut shown = String::new();
            let mut given = String::new();
            for piece in &pieces {
                if filter.stopped().is_some() {
                    break;
                }
                given.push_str(piece);
                shown.push_str(&filter.push(piece));
            }
            shown.push_str(&filter.finish());
            let first = stops.iter().filter_map(|stop| given.find(stop.as_str())).min();
            prop_assert_eq!(filter.stopped().is_some(), first.is_some());
            prop_assert_eq!(shown.as_str(), &given[..first.unwrap_or(given.len())]);
        }
    }
}
