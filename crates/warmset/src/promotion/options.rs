//! What can be said of a promotion, and what is asked of the version that it is about.

use crate::repository::Stored;
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use warmset_core::{
    ModelName,
    rollout::{Canary, Expected},
};

/// Tokens of an answer that a person gave the expectation for.
const GIVEN_TOKENS: u32 = 64;
/// The least score unless told otherwise: a few words may differ between machines, what another model says does not
/// come near.
pub(crate) const SCORE_MIN: f64 = 0.5;
/// The longest an answer may take unless told otherwise.
pub(crate) const LATENCY_MAX_SECONDS: f64 = 60.0;

/// What somebody says of a promotion. What is not said is none.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct PromoteOptions {
    /// The version, or the beginning of its digest.
    pub(crate) digest: Option<String>,
    /// Where to take it from if it is not there yet.
    pub(crate) source: Option<String>,
    /// Who says so.
    pub(crate) by: Option<String>,
    /// Say what would happen and do nothing.
    pub(crate) dry_run: bool,
    /// A question to ask it before callers do.
    pub(crate) canary_prompt: Option<String>,
    /// What the answer must contain or be like.
    pub(crate) canary_expect: Option<String>,
    /// The least score, 0 to 1.
    pub(crate) canary_score_min: Option<f64>,
    /// The longest it may take.
    pub(crate) canary_latency_max_seconds: Option<f64>,
}

/// Characters of the name of whoever approves.
const BY_CHARACTERS_MAX: usize = 128;

/// Whether this names somebody: it is shown in tables and kept with what was approved.
pub(crate) fn check_by(by: &str) -> Result<()> {
    if by.trim().is_empty() || by.chars().count() > BY_CHARACTERS_MAX || by.chars().any(char::is_control) {
        bail!("who approves must be named in 1 to {BY_CHARACTERS_MAX} characters, without control characters");
    }
    Ok(())
}

impl PromoteOptions {
    /// Who says so.
    pub(crate) fn by(&self) -> &str {
        self.by.as_deref().unwrap_or("unknown")
    }

    /// Whether a version that its name stands for already may be asked for so: nothing is approved then, so nothing is
    /// kept of what it was to answer.
    pub(crate) fn check_current(&self, name: &ModelName) -> Result<()> {
        let canary = [self.canary_prompt.is_some(), self.canary_expect.is_some(), self.canary_score_min.is_some()];
        if canary.contains(&true) || self.canary_latency_max_seconds.is_some() {
            bail!(
                "{name} stands for this version already, and a canary is approved when a name comes to stand for a \
                 version: leave the canary out, or promote another version first and then this one again"
            );
        }
        Ok(())
    }

    /// What the version must answer: what is said now; else what it was given or recorded with; else what a person gave
    /// the version before it. None records its first answer.
    pub(crate) fn canary(&self, next: &Stored, current: &Stored) -> Result<Option<Canary>> {
        let known = next.canary.clone().or_else(|| current.canary.clone().filter(|canary| canary.given));
        let canary = match (&self.canary_prompt, &self.canary_expect, known) {
            (Some(prompt), Some(expected), _) => Some(Canary {
                prompt: prompt.clone(),
                max_tokens: GIVEN_TOKENS,
                expected: Expected::Text(expected.clone()),
                score_min: SCORE_MIN,
                latency_max_seconds: LATENCY_MAX_SECONDS,
                given: true,
            }),
            (None, None, known) => known,
            _ => bail!("a canary has a prompt and an expectation: give both --canary-prompt and --canary-expect"),
        };
        let Some(canary) = canary else {
            if self.canary_score_min.is_some() || self.canary_latency_max_seconds.is_some() {
                bail!("this version has no canary yet: give --canary-prompt and --canary-expect, or profile it first");
            }
            return Ok(None);
        };
        let canary = Canary {
            score_min: self.canary_score_min.unwrap_or(canary.score_min),
            latency_max_seconds: self.canary_latency_max_seconds.unwrap_or(canary.latency_max_seconds),
            ..canary
        };
        canary.check().map_err(anyhow::Error::msg)?;
        Ok(Some(canary))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_approves_is_a_short_plain_name() {
        assert!(check_by("ada").is_ok() && check_by(&"a".repeat(BY_CHARACTERS_MAX)).is_ok());
        for wrong in ["", " ", "a\nb", "a\u{1b}[31mred", &"a".repeat(BY_CHARACTERS_MAX + 1)] {
            assert!(check_by(wrong).is_err(), "{wrong:?}");
        }
    }
}
