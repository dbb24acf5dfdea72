//! What models take that have the machine for themselves, as `warmset model profile --json` says.

use serde::Deserialize;
use std::collections::BTreeMap;
use warmset_core::Digest;

/// Profiles by digest.
pub type Profiles = BTreeMap<Digest, Profile>;

/// What one model takes alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Profile {
    /// A load.
    pub(super) load_seconds: f64,
    /// One token of a prompt and one of an answer; none of a model that does not generate.
    pub(super) token_seconds: Option<(f64, f64)>,
}

/// What is printed of one measurement.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Measured {
    digest: Digest,
    load_seconds: f64,
    warm_up_seconds: f64,
    prefill_tokens_per_second: Option<f64>,
    decode_tokens_per_second: Option<f64>,
}

/// No model takes longer for a load or a token.
const SECONDS_MAX: f64 = 1e6;

/// Why profiles cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// They are something else.
    #[error("it is not what `warmset model profile NAME --json` prints, once or several times")]
    Json(#[from] serde_json::Error),
    /// A figure that no model has.
    #[error(
        "the profile of {0} has a time or a rate that is not above 0, or more than a million seconds: measure it again"
    )]
    Figure(Digest),
}

impl Profile {
    /// Reads documents that stand one after the other. Of a model that was measured several times the medians count.
    pub fn read_all(text: &str) -> Result<Profiles, ProfileError> {
        let mut all: BTreeMap<Digest, Vec<Measured>> = BTreeMap::new();
        for measured in serde_json::Deserializer::from_str(text).into_iter::<Measured>() {
            let measured = measured?;
            all.entry(measured.digest).or_default().push(measured);
        }
        all.into_iter().map(|(digest, measured)| Ok((digest, Self::of(digest, &measured)?))).collect()
    }

    fn of(digest: Digest, measured: &[Measured]) -> Result<Self, ProfileError> {
        let loads = measured.iter().map(|one| one.load_seconds + one.warm_up_seconds).collect();
        let seconds_of_tokens =
            |rate: fn(&Measured) -> Option<f64>| median(measured.iter().filter_map(rate).map(f64::recip).collect());
        let load_seconds = median(loads).unwrap_or_default();
        let prompt = seconds_of_tokens(|one| one.prefill_tokens_per_second);
        let token_seconds = prompt.zip(seconds_of_tokens(|one| one.decode_tokens_per_second));
        let positive = |seconds: f64| seconds > 0.0 && seconds <= SECONDS_MAX;
        let tokens_too = token_seconds.is_none_or(|(prompt, output)| positive(prompt) && positive(output));
        if positive(load_seconds) && tokens_too {
            Ok(Self { load_seconds, token_seconds })
        } else {
            Err(ProfileError::Figure(digest))
        }
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
