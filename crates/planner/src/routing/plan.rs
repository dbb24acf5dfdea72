//! Runs of the router as a file describes them: one world, several loads, several rules.

use super::{Outcome, Policy, Scenario, simulate};
use serde::{Deserialize, Serialize};

/// What is shipped: the name, and the file as it is in `scenarios/`.
pub const SHIPPED: (&str, &str) = ("shared-prompts", include_str!("../../../../scenarios/shared-prompts.toml"));

/// Loads of one plan.
const LOADS_MAX: usize = 32;
/// Requests of one run.
const REQUESTS_MAX: f64 = 1e6;
const TENANTS_MAX: u32 = 10_000;
const REPLICAS_MAX: usize = 256;
const GATEWAYS_MAX: usize = 16;
/// Tokens of anything.
const TOKENS_MAX: u32 = 1 << 20;

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
}

/// A world and its loads.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// For people.
    pub description: String,
    /// Loads to compare.
    pub requests_per_second: Vec<f64>,
    /// Everything else of the world.
    pub routing: Scenario,
}

/// One rule at one load.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Requests per second.
    pub requests_per_second: f64,
    /// The rule.
    pub policy: &'static str,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl Plan {
    /// Whether a text describes one: it has a table `[routing]`.
    pub fn is_described_by(text: &str) -> bool {
        crate::scenario::has_table(text, "routing")
    }

    /// Reads a text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let plan: Self = toml::from_str(text)?;
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), PlanError> {
        let world = &self.routing;
        let amount = |value: f64| value.is_finite() && value >= 0.0;
        let tokens = |value: u32| (1..=TOKENS_MAX).contains(&value);
        let loads = &self.requests_per_second;
        let seconds = world.seconds + world.warm_up_seconds;
        let rules = [
            ((1..=LOADS_MAX).contains(&loads.len()), "requests_per_second must be 1 to 32 numbers"),
            (amount(world.seconds) && world.seconds > 0.0 && amount(world.warm_up_seconds), "seconds must be positive"),
            (
                loads.iter().all(|load| *load > 0.0 && load * seconds <= REQUESTS_MAX),
                "requests_per_second must be positive, and a run have at most a million requests",
            ),
            ((2..=TENANTS_MAX).contains(&world.tenants), "tenants must be between 2 and 10000"),
            ((1..=REPLICAS_MAX).contains(&world.replicas), "replicas must be between 1 and 256"),
            ((1..=GATEWAYS_MAX).contains(&world.gateways), "gateways must be between 1 and 16"),
            ((0.0..=1.0).contains(&world.hot_share), "hot_share must be between 0 and 1"),
            ((0.0..=10.0).contains(&world.skew), "skew must be between 0 and 10"),
            ((0.01..=100.0).contains(&world.believed_memory), "believed_memory must be between 0.01 and 100"),
            ((1..=100_000).contains(&world.prompts_per_replica), "prompts_per_replica must be between 1 and 100000"),
            (tokens(world.system_tokens) && tokens(world.question_tokens), "tokens must be between 1 and 1048576"),
            (world.output_tokens >= 1.0 && world.output_tokens <= 1024.0, "output_tokens must be between 1 and 1024"),
            (
                world.load_reports_seconds.is_none_or(|pause| (0.01..=1e6).contains(&pause)),
                "load_reports_seconds must be at least 0.01",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, broken)) => Err(PlanError::Value(broken)),
            None => Ok(()),
        }
    }

    /// The rules that were asked for, in the order of the table; all if none was.
    pub fn policies(wanted: &[String]) -> Result<Vec<(&'static str, Policy)>, PlanError> {
        let all = Policy::all();
        if let Some(unknown) = wanted.iter().find(|name| !all.iter().any(|(known, _)| known == name)) {
            let known: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
            return Err(PlanError::Policy { name: unknown.clone(), known: known.join(", ") });
        }
        Ok(all.into_iter().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|other| other == name)).collect())
    }

    /// One rule at one load.
    pub fn run(&self, requests_per_second: f64, seed: u64, (name, policy): &(&'static str, Policy)) -> Row {
        let world = Scenario { requests_per_second, seed, ..self.routing.clone() };
        Row { requests_per_second, policy: name, outcome: simulate(&world, policy) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shipped_can_be_read_and_nonsense_cannot() {
        let (_, text) = SHIPPED;
        assert!(Plan::is_described_by(text) && Plan::parse(text).is_ok());
        for (from, to, words) in [
            ("tenants = 200", "tenants = 1", "tenants must be"),
            ("[24.0, 100.0, 165.0]", "[1e9]", "a million"),
            ("[24.0, 100.0, 165.0]", "[-1.0]", "positive"),
            ("[24.0, 100.0, 165.0]", "[nan]", "positive"),
            ("hot_share = 0.3", "hot_share = 3", "hot_share"),
            ("replicas = 16", "replica = 16", "unknown field"),
            ("seconds = 90.0", "seconds = inf", "seconds"),
        ] {
            crate::scenario::assert_refused(text, (from, to), words, Plan::parse);
        }
        assert!(Plan::policies(&["nothing".into()]).unwrap_err().to_string().contains("round-robin"));
    }
}
