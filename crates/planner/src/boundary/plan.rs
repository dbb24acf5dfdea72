//! What a file says of a machine, of its models and of the phases of a run.

use crate::pool::scenario::PlanError;
use serde::{Deserialize, Serialize};
use warmset_core::Bytes;

/// What is shipped: the name, and the file as it is in `scenarios/`.
pub const SHIPPED: (&str, &str) =
    ("models-and-conversations", include_str!("../../../../scenarios/models-and-conversations.toml"));

const MODELS_MAX: usize = 1_000;
const CONVERSATIONS_MAX: usize = 10_000;
const PHASES_MAX: usize = 64;
/// Fixed boundaries to compare.
const SHARES_MAX: usize = 32;
const TURNS_MAX: u32 = 1_000;
/// Tokens of a part of a prompt.
const TOKENS_MAX: u32 = 1 << 20;
const BYTES_MAX: Bytes = 1 << 50;
/// Seconds of anything, and requests per second.
const MOST: f64 = 1e6;
/// Requests of one run.
const REQUESTS_MAX: f64 = 1e6;

/// A scenario.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// For people.
    pub description: String,
    /// All of it.
    pub boundary: Boundary,
}

/// One machine and what it is asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boundary {
    /// Host memory for models and KV together.
    pub memory_bytes: Bytes,
    /// Fixed boundaries to compare: the share of the memory that KV has.
    pub fixed_kv_shares: Vec<f64>,
    /// A model while it loads and serves.
    pub model_bytes: Bytes,
    /// How long a load takes.
    pub load_seconds: f64,
    /// Requests that an engine runs at once, and finished ones whose KV it keeps.
    pub parallel: u32,
    /// Computing one token of a prompt.
    pub prefill_token_seconds: f64,
    /// Computing one token of an answer.
    pub decode_token_seconds: f64,
    /// Between engines and host memory.
    pub copy_bytes_per_second: f64,
    /// Time in which a request comes to count for half.
    pub demand_half_life_seconds: f64,
    /// How long a model stays that was just used.
    pub protection_seconds: f64,
    /// Room on disk for KV, if there is any.
    pub disk: Option<Disk>,
    /// Models that are asked for once in a while.
    pub models: Models,
    /// Models that people talk to.
    pub conversations: Conversations,
    /// What comes after what.
    pub phase: Vec<Phase>,
}

/// Room on disk for KV.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// How much.
    pub bytes: Bytes,
    /// How fast it is, either way.
    pub bytes_per_second: f64,
}

/// Models that are asked for once in a while.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Models {
    /// How many there are.
    pub count: usize,
    /// How uneven they are asked for.
    pub zipf: f64,
    /// Tokens of a prompt, which never comes again.
    pub prompt_tokens: u32,
    /// Tokens of an answer.
    pub answer_tokens: u32,
    /// KV of a token.
    pub kv_bytes_per_token: Bytes,
}

/// Models that people talk to: every turn brings all that was said before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conversations {
    /// Models.
    pub models: usize,
    /// How uneven conversations go on.
    pub zipf: f64,
    /// System prompts, each as likely.
    pub system_prompts: u32,
    /// Tokens of each.
    pub system_tokens: u32,
    /// Tokens that a conversation begins with, behind its system prompt.
    pub first_tokens: u32,
    /// Tokens of a question.
    pub question_tokens: u32,
    /// Tokens of an answer.
    pub answer_tokens: u32,
    /// Turns after which another conversation begins.
    pub turns: u32,
    /// KV of a token.
    pub kv_bytes_per_token: Bytes,
}

/// A part of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// For people.
    pub name: String,
    /// How long it lasts.
    pub seconds: f64,
    /// How often somebody asks.
    pub requests_per_second: f64,
    /// The share of requests that go on with a conversation.
    pub talk_share: f64,
    /// Models of those that are asked for once in a while that are wanted now.
    pub models: usize,
    /// Conversations at the same time.
    pub conversations: usize,
}

impl Plan {
    /// Whether a text describes one: it has a table `[boundary]`.
    pub fn is_described_by(text: &str) -> bool {
        crate::scenario::has_table(text, "boundary")
    }

    /// Reads a text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let plan: Self = toml::from_str(text)?;
        match plan.boundary.problem() {
            Some(problem) => Err(PlanError::Value(problem.to_owned())),
            None => Ok(plan),
        }
    }
}

fn positive(value: f64) -> bool {
    value > 0.0 && value <= MOST
}

fn bandwidth(value: f64) -> bool {
    (1e3..=1e15).contains(&value)
}

fn first_broken(rules: &[(bool, &'static str)]) -> Option<&'static str> {
    rules.iter().find(|(holds, _)| !holds).map(|(_, broken)| *broken)
}

impl Boundary {
    fn problem(&self) -> Option<&'static str> {
        let room = (1..=BYTES_MAX).contains(&self.memory_bytes) && self.model_bytes <= self.memory_bytes;
        let shares = &self.fixed_kv_shares;
        let own = [
            (room && self.model_bytes > 0, "model_bytes must be above 0, and memory_bytes at least as much"),
            (
                shares.len() <= SHARES_MAX && shares.iter().all(|share| self.leaves_a_model(*share)),
                "fixed_kv_shares must be at most 32 numbers from 0 on that leave room for a model",
            ),
            (positive(self.load_seconds), "load_seconds must be above 0"),
            ((1..=1_024).contains(&self.parallel), "parallel must be between 1 and 1024"),
            (positive(self.prefill_token_seconds), "prefill_token_seconds must be above 0"),
            (positive(self.decode_token_seconds), "decode_token_seconds must be above 0"),
            (bandwidth(self.copy_bytes_per_second), "copy_bytes_per_second must be between 1e3 and 1e15"),
            (positive(self.demand_half_life_seconds), "demand_half_life_seconds must be above 0"),
            ((0.0..=MOST).contains(&self.protection_seconds), "protection_seconds must be between 0 and 1000000"),
            (
                self.disk.as_ref().is_none_or(|disk| disk.bytes <= BYTES_MAX && bandwidth(disk.bytes_per_second)),
                "disk must have at most 2^50 bytes and bytes_per_second between 1e3 and 1e15",
            ),
        ];
        first_broken(&own)
            .or_else(|| self.models.problem())
            .or_else(|| self.conversations.problem())
            .or_else(|| self.phases_problem())
    }

    fn leaves_a_model(&self, kv_share: f64) -> bool {
        (0.0..1.0).contains(&kv_share) && self.memory_bytes - self.kv_bytes(kv_share) >= self.model_bytes
    }

    /// What KV has of the memory behind a fixed boundary.
    pub(super) fn kv_bytes(&self, kv_share: f64) -> Bytes {
        (self.memory_bytes as f64 * kv_share) as Bytes
    }

    fn phases_problem(&self) -> Option<&'static str> {
        let requests: f64 = self.phase.iter().map(|phase| phase.seconds * phase.requests_per_second).sum();
        // What nobody asks for or talks in is there all the same.
        let least = |unused: bool| usize::from(!unused);
        let asks = |phase: &Phase| (least(phase.talk_share >= 1.0)..=self.models.count).contains(&phase.models);
        let talks = |phase: &Phase| (least(phase.talk_share <= 0.0)..=CONVERSATIONS_MAX).contains(&phase.conversations);
        let times = |phase: &Phase| positive(phase.seconds) && positive(phase.requests_per_second);
        let all = |rule: &dyn Fn(&Phase) -> bool| self.phase.iter().all(rule);
        first_broken(&[
            ((1..=PHASES_MAX).contains(&self.phase.len()), "phases must be 1 to 64"),
            (all(&times), "phases must have seconds and requests_per_second above 0"),
            (requests <= REQUESTS_MAX, "phases must have at most a million requests together"),
            (all(&|phase| (0.0..=1.0).contains(&phase.talk_share)), "talk_share must be between 0 and 1"),
            (all(&asks), "a phase's models must be at most those there are, and at least one where any is asked for"),
            (all(&talks), "a phase's conversations must be at most 10000, and at least one where anybody talks"),
        ])
    }
}

impl Models {
    fn problem(&self) -> Option<&'static str> {
        let tokens = [self.prompt_tokens, self.answer_tokens];
        first_broken(&[
            ((1..=MODELS_MAX).contains(&self.count), "models.count must be between 1 and 1000"),
            ((0.0..=10.0).contains(&self.zipf), "models.zipf must be between 0 and 10"),
            (tokens.iter().all(|tokens| (1..=TOKENS_MAX).contains(tokens)), "models' tokens must be 1 to 2^20"),
            (self.kv_bytes_per_token <= BYTES_MAX >> 30, "models.kv_bytes_per_token must be at most 2^20"),
        ])
    }
}

impl Conversations {
    fn problem(&self) -> Option<&'static str> {
        let tokens = [self.first_tokens, self.question_tokens, self.answer_tokens];
        let most = u64::from(self.question_tokens.saturating_add(self.answer_tokens)) * u64::from(self.turns);
        let longest = most + u64::from(self.system_tokens) + u64::from(self.first_tokens);
        first_broken(&[
            ((1..=MODELS_MAX).contains(&self.models), "conversations.models must be between 1 and 1000"),
            ((0.0..=10.0).contains(&self.zipf), "conversations.zipf must be between 0 and 10"),
            (self.system_prompts >= 1, "conversations.system_prompts must be at least 1"),
            (tokens.iter().all(|tokens| *tokens >= 1), "conversations' tokens must be at least 1"),
            ((1..=TURNS_MAX).contains(&self.turns), "conversations.turns must be between 1 and 1000"),
            (longest <= u64::from(TOKENS_MAX), "a conversation must have at most 2^20 tokens"),
            (self.kv_bytes_per_token <= BYTES_MAX >> 30, "conversations.kv_bytes_per_token must be at most 2^20"),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shipped_can_be_read_and_nonsense_cannot() {
        let (_, text) = SHIPPED;
        assert!(Plan::is_described_by(text));
        Plan::parse(text).expect("it is shipped");
        for (from, to, words) in [
            ("fixed_kv_shares = [0.1", "fixed_kv_shares = [1.0", "fixed_kv_shares"),
            ("load_seconds = ", "load_seconds = -", "load_seconds"),
            ("talk_share = 0.5", "talk_share = 1.5", "talk_share"),
            ("turns = ", "turns = 100", "conversations.turns"),
            ("copy_bytes_per_second = ", "copy_bytes_per_second = nan #", "copy_bytes_per_second"),
            ("models = 14", "models = 99", "at most those there are"),
            ("parallel = ", "paralel = ", "unknown field"),
            // Counts that a phase has no use for make work all the same.
            ("models = 0", "models = 3_000_000_000", "a phase's models"),
            ("conversations = 0", "conversations = 20_000_000", "a phase's conversations"),
        ] {
            crate::scenario::assert_refused(text, (from, to), words, Plan::parse);
        }
    }
}
