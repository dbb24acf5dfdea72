//! Conversations made up from a seed: system prompts that many share, turns that each bring all that was said before, and
//! callers that think in between.

use super::trace::{Builder, Trace, TraceError};
use serde::Deserialize;
use std::time::Duration;
use warmset_core::Instant;

/// A range within which values are drawn evenly on a logarithmic scale: as many between one and ten as between ten and a
/// hundred.
pub type Range = (f64, f64);

/// Who talks.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sessions {
    /// Conversations that begin.
    pub sessions: u32,
    /// How many begin per second.
    pub sessions_per_second: f64,
    /// System prompts; the first is twice as frequent as the second, three times as frequent as the third, and so on.
    pub system_prompts: u32,
    /// Tokens of each.
    pub system_tokens: Range,
    /// Tokens of a question.
    pub question_tokens: Range,
    /// Tokens of an answer.
    pub answer_tokens: Range,
    /// The share of conversations that go on after their first turn.
    pub continued_share: f64,
    /// The share that goes on after each further one.
    pub continued_again_share: f64,
    /// Seconds between a turn and the next.
    pub pause_seconds: Range,
}

/// Turns of one conversation.
const TURNS_MAX: u32 = 64;
const SESSIONS_MAX: u32 = 200_000;
const SYSTEM_PROMPTS_MAX: u32 = 10_000;
const TOKENS_MAX: f64 = 1e6;
/// Tokens of one prompt: a conversation that is longer ends.
const PROMPT_TOKENS_MAX: u32 = 1 << 20;

/// What a block holds, so that different ones differ.
#[derive(Debug, Clone, Copy)]
enum Content {
    System {
        prompt: u32,
        place: u32,
    },
    Session {
        session: u32,
        place: u32,
    },
    /// The end of a prompt, which the next one continues.
    End {
        session: u32,
        turn: u32,
    },
}

impl Content {
    fn number(self) -> u64 {
        let (kind, first, second) = match self {
            Self::System { prompt, place } => (0, prompt, place),
            Self::Session { session, place } => (1, session, place),
            Self::End { session, turn } => (2, session, turn),
        };
        kind << 62 | u64::from(first) << 31 | u64::from(second)
    }
}

impl Sessions {
    /// What is wrong with it, if anything is.
    pub fn problem(&self) -> Option<&'static str> {
        let range = |range: Range, most: f64| range.0 >= 1.0 && range.0 <= range.1 && range.1 <= most;
        let share = |share: f64| (0.0..=1.0).contains(&share);
        let rules = [
            ((1..=SESSIONS_MAX).contains(&self.sessions), "sessions must be between 1 and 200000"),
            ((1e-6..=1e6).contains(&self.sessions_per_second), "sessions_per_second must be above 0"),
            ((1..=SYSTEM_PROMPTS_MAX).contains(&self.system_prompts), "system_prompts must be between 1 and 10000"),
            (range(self.system_tokens, TOKENS_MAX), "system_tokens must be [least, most], from 1 on"),
            (range(self.question_tokens, TOKENS_MAX), "question_tokens must be [least, most], from 1 on"),
            (range(self.answer_tokens, TOKENS_MAX), "answer_tokens must be [least, most], from 1 on"),
            (share(self.continued_share), "continued_share must be between 0 and 1"),
            (share(self.continued_again_share), "continued_again_share must be between 0 and 1"),
            (range(self.pause_seconds, 1e7), "pause_seconds must be [least, most], from 1 on"),
        ];
        rules.iter().find(|(holds, _)| !holds).map(|(_, problem)| *problem)
    }

    /// The requests.
    pub fn trace(&self, seed: u64, block_tokens: u32) -> Result<Trace, TraceError> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut builder = Builder::new(Some(block_tokens));
        let prompts: Vec<u32> = (0..self.system_prompts).map(|_| tokens(self.system_tokens, &mut random)).collect();
        let weights: f64 = (1..=self.system_prompts).map(|rank| 1.0 / f64::from(rank)).sum();
        let mut begins = 0.0;
        for session in 0..self.sessions {
            begins += -(1.0 - random.f64()).ln() / self.sessions_per_second;
            let prompt = popular(random.f64() * weights, self.system_prompts);
            let system_tokens = prompts[prompt as usize];
            let (mut at, mut length) = (begins, system_tokens);
            for turn in 0..TURNS_MAX {
                length = length.saturating_add(tokens(self.question_tokens, &mut random));
                if length > PROMPT_TOKENS_MAX {
                    break;
                }
                let contents = (0..length.div_ceil(block_tokens)).map(|place| {
                    let end = (place + 1) * block_tokens;
                    let content = match (end <= system_tokens, end <= length) {
                        (true, _) => Content::System { prompt, place },
                        (false, true) => Content::Session { session, place },
                        (false, false) => Content::End { session, turn },
                    };
                    content.number()
                });
                builder.push(Instant::after(Duration::from_secs_f64(at)), (length, 0), contents)?;
                length = length.saturating_add(tokens(self.answer_tokens, &mut random));
                at += drawn(self.pause_seconds, &mut random);
                let share = if turn == 0 { self.continued_share } else { self.continued_again_share };
                if random.f64() >= share {
                    break;
                }
            }
        }
        builder.finish()
    }
}

fn drawn((least, most): Range, random: &mut fastrand::Rng) -> f64 {
    least * (most / least).powf(random.f64())
}

fn tokens(range: Range, random: &mut fastrand::Rng) -> u32 {
    drawn(range, random).round() as u32
}

/// Which of so many by Zipf's law, from a number up to the sum of their weights.
fn popular(mut left: f64, count: u32) -> u32 {
    for rank in 0..count {
        left -= 1.0 / f64::from(rank + 1);
        if left <= 0.0 {
            return rank;
        }
    }
    count - 1
}
