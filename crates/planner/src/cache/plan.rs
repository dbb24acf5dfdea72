//! Runs of the rules for KV as a file describes them: requests, several sizes of room, several rules.

use super::{
    BuildPolicy, Hits, LRU, OPTIMUM, POLICIES, Replay, replay,
    sessions::Sessions,
    trace::{Trace, TraceError},
};
use serde::{Deserialize, Serialize};

/// What is shipped: the name, and the file as it is in `scenarios/`.
pub const SHIPPED: (&str, &str) = ("kv-cache", include_str!("../../../../scenarios/kv-cache.toml"));

/// Sizes of room of one plan.
const SIZES_MAX: usize = 32;
const BLOCK_TOKENS_MAX: u32 = 1 << 16;

/// Why a plan cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// It cannot be read.
    #[error("the scenario cannot be read")]
    Toml(#[from] toml::de::Error),
    /// A value makes no sense.
    #[error("the scenario's {0}")]
    Value(&'static str),
    /// There is no such rule.
    #[error("there is no policy {name}: there are {known}")]
    Policy {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The trace cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// Requests and sizes of room.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// For people.
    pub description: String,
    /// How blocks are kept.
    pub cache: Cache,
    /// Who makes up the requests, where there is no trace.
    pub sessions: Sessions,
}

/// How blocks are kept.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Sizes of room to compare.
    pub capacity_tokens: Vec<u64>,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// One rule with so much room.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The room.
    pub capacity_tokens: u64,
    /// The rule.
    pub policy: &'static str,
    /// Tokens of all requests.
    #[serde(flatten)]
    pub hits: Hits,
    /// Share of tokens that were there.
    pub hit_share: f64,
    /// The same of the first half of the requests.
    pub first_half_hit_share: f64,
    /// And of the second.
    pub second_half_hit_share: f64,
    /// How far the rule comes from LRU to the optimum, if both are among the rows: 1 is the optimum.
    pub gap_closed: Option<f64>,
    /// The same in the first half.
    pub first_half_gap_closed: Option<f64>,
    /// And in the second.
    pub second_half_gap_closed: Option<f64>,
}

impl Plan {
    /// Whether a text describes one: it has a table `[cache]`.
    pub fn is_described_by(text: &str) -> bool {
        crate::scenario::has_table(text, "cache")
    }

    /// Reads a text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let plan: Self = toml::from_str(text)?;
        plan.check()?;
        Ok(plan)
    }

    /// The same with other sizes of room, if any are given.
    pub fn with(mut self, capacity_tokens: &[u64]) -> Result<Self, PlanError> {
        if !capacity_tokens.is_empty() {
            self.cache.capacity_tokens = capacity_tokens.to_vec();
        }
        self.check()?;
        Ok(self)
    }

    fn check(&self) -> Result<(), PlanError> {
        let sizes = &self.cache.capacity_tokens;
        let one = u64::from(self.cache.block_tokens);
        let problem = if sizes.is_empty() || sizes.len() > SIZES_MAX || sizes.iter().any(|size| *size < one) {
            Some("capacity_tokens must be 1 to 32 numbers, each at least one block")
        } else if !(1..=BLOCK_TOKENS_MAX).contains(&self.cache.block_tokens) {
            Some("block_tokens must be between 1 and 65536")
        } else {
            self.sessions.problem()
        };
        problem.map_or(Ok(()), |problem| Err(PlanError::Value(problem)))
    }

    /// Its requests: those of a trace if one is given, else made up from the seed.
    pub fn requests(&self, seed: u64, trace: Option<&str>) -> Result<Trace, PlanError> {
        let tokens = self.cache.block_tokens;
        Ok(trace.map_or_else(|| self.sessions.trace(seed, tokens), |text| Trace::read(text, tokens))?)
    }

    /// The rules that were asked for, in the order of the table; all if none was.
    pub fn policies(wanted: &[String]) -> Result<Vec<(&'static str, BuildPolicy)>, PlanError> {
        if let Some(unknown) = wanted.iter().find(|name| !POLICIES.iter().any(|(known, _)| known == name)) {
            let known = POLICIES.map(|(name, _)| name).join(", ");
            return Err(PlanError::Policy { name: unknown.clone(), known });
        }
        let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|other| other == name);
        Ok(POLICIES.into_iter().filter(|(name, _)| is_wanted(name)).collect())
    }
}

/// One rule with room for so many tokens.
pub fn run(trace: &Trace, capacity_tokens: u64, build: BuildPolicy) -> Replay {
    replay(trace, build(trace, trace.blocks_of(capacity_tokens)).as_mut())
}

/// Rows for what was replayed: room, rule, and what came of it.
pub fn rows(replays: &[(u64, &'static str, Replay)]) -> Vec<Row> {
    let of = |capacity: u64, name: &str| {
        let found = replays.iter().find(|(other, policy, _)| *other == capacity && *policy == name);
        found.map(|(_, _, replay)| *replay)
    };
    let row = |(capacity_tokens, policy, replay): &(u64, &'static str, Replay)| {
        let (lru, optimum) = (of(*capacity_tokens, LRU), of(*capacity_tokens, OPTIMUM));
        let gap = |part: fn(&Replay) -> f64| {
            let (low, high) = (part(&lru?), part(&optimum?));
            (high > low).then(|| (part(replay) - low) / (high - low))
        };
        Row {
            capacity_tokens: *capacity_tokens,
            policy,
            hits: replay.all(),
            hit_share: replay.all().share(),
            first_half_hit_share: replay.first_half.share(),
            second_half_hit_share: replay.second_half.share(),
            gap_closed: gap(|replay| replay.all().share()),
            first_half_gap_closed: gap(|replay| replay.first_half.share()),
            second_half_gap_closed: gap(|replay| replay.second_half.share()),
        }
    };
    replays.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shipped_can_be_read_and_nonsense_cannot() {
        let (_, text) = SHIPPED;
        assert!(Plan::is_described_by(text));
        let plan = Plan::parse(text).expect("it is shipped");
        assert!(plan.clone().with(&[100]).is_err(), "less than a block");
        for (from, to, words) in [
            ("block_tokens = 512", "block_tokens = 0", "block_tokens"),
            ("sessions = 5000", "sessions = 0", "sessions must be"),
            ("sessions_per_second = 1.5", "sessions_per_second = nan", "sessions_per_second"),
            ("question_tokens = [100, 20000]", "question_tokens = [200, 100]", "question_tokens"),
            ("continued_share = 0.4", "continued_share = 1.5", "continued_share"),
            ("block_tokens = 512", "block_token = 512", "unknown field"),
        ] {
            crate::scenario::assert_refused(text, (from, to), words, Plan::parse);
        }
        let unknown = Plan::policies(&["magic".to_owned()]).expect_err("there is none").to_string();
        assert!(unknown.contains("hybrid-histogram"), "{unknown}");
    }
}
