//! A pool as its file describes it: machines, the teams that ask them, what their models cost, and what goes wrong.

use super::{
    course::{Join, Rollout},
    regions::Region,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use warmset_core::{Bytes, Priority, targets::Targets};

/// What is shipped: the name, and the file as it is in `scenarios/`.
pub const SHIPPED: (&str, &str) = ("capacity", include_str!("../../../../scenarios/capacity.toml"));
/// The one in which something changes.
pub const SHIPPED_CHANGES: (&str, &str) = ("changes", include_str!("../../../../scenarios/changes.toml"));

/// Machines of one fleet.
pub const MACHINES_MAX: usize = 64;
/// Teams of one scenario.
const TEAMS_MAX: usize = 64;
/// Models of one scenario.
const MODELS_MAX: usize = 10_000;
/// Requests that a scenario expects on average: what a run keeps in memory.
const REQUESTS_MAX: f64 = 5e6;
/// A fortnight.
pub(super) const HOURS_MAX: f64 = 336.0;
/// Tokens of anything.
const TOKENS_MAX: u32 = 1 << 20;
/// Faults of one kind.
const FAULTS_MAX: usize = 100;
/// Bytes of one machine.
const MEMORY_BYTES_MAX: Bytes = 1 << 45;
pub(super) const SECONDS_MAX: f64 = 1e6;
/// Samples of memory that one run keeps.
const SAMPLES_MAX: f64 = 10_000.0;

/// Why a scenario cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// It cannot be read.
    #[error("the scenario cannot be read")]
    Toml(#[from] toml::de::Error),
    /// A value makes no sense.
    #[error("the scenario's {0}")]
    Value(String),
}

/// A scenario.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// For people.
    pub description: String,
    /// All of it.
    pub pool: Pool,
}

/// Least and most: drawn evenly on a logarithmic scale.
pub type Range = (f64, f64);
/// The same for tokens.
pub type Tokens = (u32, u32);

/// Machines, teams and faults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// How long requests come.
    pub hours: f64,
    /// The hour of the first day, a Monday, at which that begins.
    #[serde(default)]
    pub start_hour: f64,
    /// Machines of the shared pool, and of all dedicated ones together.
    pub machines: usize,
    /// What one machine may hold.
    pub memory_bytes: Bytes,
    /// What of that stays free.
    #[serde(default)]
    pub reserve_bytes: Bytes,
    /// Loads at once on one machine.
    #[serde(default = "two")]
    pub concurrent_loads: u32,
    /// Whether engines of one machine that compute at the same time share what it can do, as on one accelerator. If not,
    /// each is as fast as if it were alone.
    #[serde(default = "yes")]
    pub shares_compute: bool,
    /// How long an engine that is told to stop takes to be gone.
    #[serde(default = "stop_seconds")]
    pub stop_seconds: f64,
    /// How long callers wait for the first byte.
    #[serde(default = "patience_seconds")]
    pub patience_seconds: f64,
    /// Requests that may wait on one machine.
    #[serde(default = "queue_limit")]
    pub queue_limit: u32,
    /// What a machine costs in an hour, in whatever money.
    pub price_per_machine_hour: f64,
    /// The share of each team's requests that is to be within its targets.
    pub target_share: f64,
    /// The same while a machine is away: what N+1 is judged by.
    pub away_target_share: f64,
    /// How often is noted who holds which memory.
    #[serde(default = "sample_seconds")]
    pub sample_seconds: f64,
    /// Who asks.
    pub team: Vec<Team>,
    /// Machines that are lost for a while.
    #[serde(default)]
    pub lost: Vec<Lost>,
    /// Times at which loads take longer.
    #[serde(default)]
    pub slow_disk: Vec<SlowDisk>,
    /// Times at which loads fail.
    #[serde(default)]
    pub failing_loads: Vec<FailingLoads>,
    /// Times at which a team asks more often.
    #[serde(default)]
    pub burst: Vec<Burst>,
    /// Machines that come while it runs.
    #[serde(default)]
    pub join: Vec<Join>,
    /// Models that get a new version while it runs.
    #[serde(default)]
    pub rollout: Vec<Rollout>,
    /// What gives weights to machines that lack them, to all who fetch at the same time together.
    pub origin_bytes_per_second: Option<f64>,
    /// Places with machines of their own; one if none is named.
    #[serde(default)]
    pub region: Vec<Region>,
    /// What gives weights to the machines of a region that has not got them, to all of them together.
    pub region_bytes_per_second: Option<f64>,
    /// Whether every region has the weights of all models. If not, those of the teams whose callers are there.
    #[serde(default)]
    pub weights_everywhere: bool,
    /// How long callers take to learn that a region is lost, or back.
    #[serde(default = "notice_seconds")]
    pub notice_seconds: f64,
}

/// One team: its models, what they cost, and when it asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Team {
    /// For people.
    pub name: String,
    /// The class of its requests.
    #[serde(default = "standard")]
    pub class: Priority,
    /// Machines of its own where nothing is shared: that is looked at where nothing changes.
    #[serde(default)]
    pub dedicated_machines: usize,
    /// How many machines serve each of its models; all if not said.
    pub machines_per_model: Option<usize>,
    /// The regions of its callers, each with its share of the traffic; all alike if none is named.
    #[serde(default)]
    pub regions: BTreeMap<String, f64>,
    /// How many models it has.
    pub models: usize,
    /// How many of them, the most often asked for, are pinned.
    #[serde(default)]
    pub pinned: usize,
    /// How uneven they are asked for: 0 for alike, 1 for Zipf's law.
    #[serde(default)]
    pub zipf: f64,
    /// Bytes of one model once loaded.
    pub model_bytes: Bytes,
    /// Bytes while it loads, if these are more.
    #[serde(default)]
    pub peak_bytes: Bytes,
    /// How long a load takes.
    pub load_seconds: f64,
    /// How much longer the first request after a load takes to read its prompt.
    #[serde(default)]
    pub first_request_seconds: f64,
    /// Requests that one engine runs at once.
    pub parallel: u32,
    /// How fast prompts are read, one after the other.
    pub prefill_tokens_per_second: f64,
    /// How long a step takes that writes one token of one answer.
    pub decode_step_seconds: f64,
    /// How much longer it takes for each further answer that is written at the same time.
    #[serde(default)]
    pub decode_step_seconds_per_sequence: f64,
    /// If given, engines do one thing after the other: a step reads at most this long of one prompt, then writes one token
    /// of each answer. If not, reading and writing go on side by side.
    pub read_step_seconds: Option<f64>,
    /// Bytes of the state of a request for each of its tokens: what parking it takes.
    #[serde(default)]
    pub kv_bytes_per_token: Bytes,
    /// Tokens of prompts that an engine keeps, so that what comes again is not read again.
    #[serde(default)]
    pub kept_tokens: u64,
    /// Requests per second, on average over a day without bursts.
    pub requests_per_second: f64,
    /// How far the rate swings around that in a day: 0 not at all, 1 from nothing to twice as much.
    #[serde(default)]
    pub swing: f64,
    /// The hour of the day with the highest rate.
    #[serde(default)]
    pub peak_hour: f64,
    /// The share of answers after which the caller asks on, with all that was said before in front.
    #[serde(default)]
    pub continued_share: f64,
    /// From one question of a conversation to the next.
    #[serde(default = "pause_seconds")]
    pub pause_seconds: Range,
    /// Tokens that every prompt for one model begins with.
    #[serde(default)]
    pub system_tokens: u32,
    /// Tokens of a question.
    pub question_tokens: Tokens,
    /// Tokens of an answer.
    pub output_tokens: Tokens,
    /// What its callers were promised.
    #[serde(default)]
    pub targets: Targets,
}

/// A machine that is lost and comes back empty, with what it remembers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lost {
    /// Which, from 0 on.
    pub machine: usize,
    /// When, from the beginning on.
    pub at_hours: f64,
    /// For how long.
    pub away_seconds: f64,
}

/// Loads take so many times as long, on all machines.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlowDisk {
    /// When, from the beginning on.
    pub at_hours: f64,
    /// For how long.
    pub seconds: f64,
    /// How many times.
    pub times: f64,
}

/// Loads that begin fail with this chance, on all machines.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailingLoads {
    /// When, from the beginning on.
    pub at_hours: f64,
    /// For how long.
    pub seconds: f64,
    /// The chance.
    pub share: f64,
}

/// A team asks so many times as often.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// Who.
    pub team: String,
    /// When, from the beginning on.
    pub at_hours: f64,
    /// For how long.
    pub seconds: f64,
    /// How many times.
    pub times: f64,
}

fn notice_seconds() -> f64 {
    30.0
}

fn two() -> u32 {
    2
}

fn yes() -> bool {
    true
}

fn stop_seconds() -> f64 {
    0.01
}

fn patience_seconds() -> f64 {
    600.0
}

fn queue_limit() -> u32 {
    1_024
}

fn sample_seconds() -> f64 {
    300.0
}

fn pause_seconds() -> Range {
    (20.0, 120.0)
}

fn standard() -> Priority {
    Priority::Standard
}

impl Plan {
    /// Whether a text describes one: it has a table `[pool]`.
    pub fn is_described_by(text: &str) -> bool {
        crate::scenario::has_table(text, "pool")
    }

    /// Reads a text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let plan: Self = toml::from_str(text)?;
        plan.pool.check()?;
        Ok(plan)
    }
}

/// The first rule that is broken, as an error.
pub(super) fn first_broken(rules: &[(bool, &str)], who: &str) -> Result<(), PlanError> {
    match rules.iter().find(|(holds, _)| !holds) {
        Some((_, broken)) => Err(PlanError::Value(format!("{who}{broken}"))),
        None => Ok(()),
    }
}

pub(super) fn within(value: f64, least: f64, most: f64) -> bool {
    (least..=most).contains(&value)
}

impl Pool {
    fn check(&self) -> Result<(), PlanError> {
        let models: usize = self.team.iter().map(|team| team.models.min(MODELS_MAX + 1)).sum();
        let requests: f64 = self.team.iter().map(|team| team.requests_per_second * self.hours * 3_600.0).sum();
        let dedicated: usize = self.team.iter().map(|team| team.dedicated_machines.min(MACHINES_MAX + 1)).sum();
        let rules = [
            (within(self.hours, 0.01, HOURS_MAX), "hours must be between 0.01 and 336"),
            (within(self.start_hour, 0.0, 24.0), "start_hour must be between 0 and 24"),
            ((1..=MACHINES_MAX).contains(&self.machines), "machines must be between 1 and 64"),
            ((1..=MEMORY_BYTES_MAX).contains(&self.memory_bytes), "memory_bytes must be between 1 and 2^45"),
            (self.reserve_bytes < self.memory_bytes, "reserve_bytes must leave something of memory_bytes"),
            ((1..=64).contains(&self.concurrent_loads), "concurrent_loads must be between 1 and 64"),
            (within(self.stop_seconds, 0.0, 60.0), "stop_seconds must be between 0 and 60"),
            (within(self.patience_seconds, 0.1, SECONDS_MAX), "patience_seconds must be between 0.1 and 1000000"),
            ((1..=1_000_000).contains(&self.queue_limit), "queue_limit must be between 1 and 1000000"),
            (within(self.price_per_machine_hour, 0.0, 1e6), "price_per_machine_hour must be between 0 and 1000000"),
            (within(self.target_share, 0.0, 1.0), "target_share must be between 0 and 1"),
            (within(self.away_target_share, 0.0, 1.0), "away_target_share must be between 0 and 1"),
            (
                within(self.sample_seconds, 1.0, SECONDS_MAX)
                    && self.hours * 3_600.0 / self.sample_seconds <= SAMPLES_MAX,
                "sample_seconds must be at least 1, and a run have at most 10000 samples",
            ),
            ((1..=TEAMS_MAX).contains(&self.team.len()), "team must be there 1 to 64 times"),
            ((1..=MODELS_MAX).contains(&models), "models must be between 1 and 10000 over all teams"),
            (requests <= REQUESTS_MAX, "requests_per_second and hours make more than 5000000 requests"),
            (
                dedicated == self.machines || self.changes(),
                "dedicated_machines must be as many over all teams as machines",
            ),
        ];
        first_broken(&rules, "")?;
        for team in &self.team {
            team.check(self)?;
        }
        self.check_faults()?;
        self.check_changes()
    }

    fn check_faults(&self) -> Result<(), PlanError> {
        let counts = [self.lost.len(), self.slow_disk.len(), self.failing_loads.len(), self.burst.len()];
        let time = |at_hours: f64, seconds: f64| within(at_hours, 0.0, HOURS_MAX) && within(seconds, 0.0, SECONDS_MAX);
        let known = |name: &str| self.team.iter().any(|team| team.name == name);
        let lost = |one: &Lost| time(one.at_hours, one.away_seconds) && one.machine < self.machines;
        let burst = |one: &Burst| time(one.at_hours, one.seconds) && within(one.times, 0.001, 1e3) && known(&one.team);
        let slow = |one: &SlowDisk| time(one.at_hours, one.seconds) && within(one.times, 1.0, 1e3);
        let failing = |one: &FailingLoads| time(one.at_hours, one.seconds) && within(one.share, 0.0, 1.0);
        let rules = [
            (counts.iter().all(|count| *count <= FAULTS_MAX), "faults must be at most 100 of a kind"),
            (self.lost.iter().all(lost), "lost must name a machine that is there, at_hours and away_seconds"),
            (self.slow_disk.iter().all(slow), "slow_disk must have times from 1 to 1000, at_hours and seconds"),
            (self.failing_loads.iter().all(failing), "failing_loads must have a share up to 1, at_hours and seconds"),
            (
                self.burst.iter().all(burst),
                "burst must name a team that is there, times from 0.001 to 1000, at_hours and seconds",
            ),
        ];
        first_broken(&rules, "")
    }
}

impl Team {
    /// Bytes while a model of it loads.
    pub fn load_bytes(&self) -> Bytes {
        self.peak_bytes.max(self.model_bytes)
    }

    fn check(&self, pool: &Pool) -> Result<(), PlanError> {
        let room = pool.memory_bytes - pool.reserve_bytes;
        let tokens = |(least, most): Tokens| least >= 1 && least <= most && most <= TOKENS_MAX;
        let (pause_least, pause_most) = self.pause_seconds;
        let named_twice = pool.team.iter().filter(|other| other.name == self.name).count() > 1;
        let rules = [
            (!self.name.is_empty() && !named_twice, "name must be given, and once only"),
            (
                (1..=MACHINES_MAX).contains(&self.dedicated_machines) || pool.changes(),
                "dedicated_machines must be between 1 and 64",
            ),
            ((1..=MODELS_MAX).contains(&self.models), "models must be between 1 and 10000"),
            (
                self.machines_per_model.is_none_or(|count| (1..=MACHINES_MAX).contains(&count)),
                "machines_per_model must be between 1 and 64",
            ),
            (self.pinned <= self.models, "pinned must be at most models"),
            (within(self.zipf, 0.0, 10.0), "zipf must be between 0 and 10"),
            ((1..=room).contains(&self.load_bytes()), "model_bytes and peak_bytes must fit into a machine"),
            (
                self.peak_bytes == 0 || self.peak_bytes >= self.model_bytes,
                "peak_bytes must not be below model_bytes: a model that loads takes what it takes afterwards at least",
            ),
            (within(self.load_seconds, 0.0, SECONDS_MAX), "load_seconds must be between 0 and 1000000"),
            (within(self.first_request_seconds, 0.0, 3_600.0), "first_request_seconds must be between 0 and 3600"),
            ((1..=1_024).contains(&self.parallel), "parallel must be between 1 and 1024"),
            (
                within(self.prefill_tokens_per_second, 0.1, 1e9),
                "prefill_tokens_per_second must be between 0.1 and 1000000000",
            ),
            (within(self.decode_step_seconds, 0.0, 60.0), "decode_step_seconds must be between 0 and 60"),
            (
                within(self.decode_step_seconds_per_sequence, 0.0, 60.0),
                "decode_step_seconds_per_sequence must be between 0 and 60",
            ),
            (
                self.read_step_seconds.is_none_or(|seconds| within(seconds, 0.001, 60.0)),
                "read_step_seconds must be between 0.001 and 60",
            ),
            (self.kv_bytes_per_token <= 1 << 30, "kv_bytes_per_token must be at most 2^30"),
            (within(self.requests_per_second, 1e-6, 1e4), "requests_per_second must be between 0.000001 and 10000"),
            (within(self.swing, 0.0, 1.0), "swing must be between 0 and 1"),
            (within(self.peak_hour, 0.0, 24.0), "peak_hour must be between 0 and 24"),
            (within(self.continued_share, 0.0, 0.95), "continued_share must be between 0 and 0.95"),
            (
                within(pause_least, 0.1, SECONDS_MAX) && within(pause_most, pause_least, SECONDS_MAX),
                "pause_seconds must be [least, most], from 0.1 on",
            ),
            (self.system_tokens <= TOKENS_MAX, "system_tokens must be at most 1048576"),
            (tokens(self.question_tokens), "question_tokens must be [least, most], from 1 to 1048576"),
            (tokens(self.output_tokens), "output_tokens must be [least, most], from 1 to 1048576"),
        ];
        first_broken(&rules, &format!("team {:?}: ", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shipped_can_be_read_and_nonsense_is_refused_by_its_name() {
        let (_, text) = SHIPPED;
        assert!(Plan::is_described_by(text));
        let plan = Plan::parse(text).expect("it is shipped");
        assert!(!plan.pool.lost.is_empty() && !plan.pool.burst.is_empty(), "it has a restart and a burst");
        for (from, to, words) in [
            ("machines = ", "machinery = 1\nmachines = ", "machinery"),
            ("machines = ", "machines = 1 # ", "dedicated_machines"),
            ("zipf = ", "zipf = -1 # ", "zipf"),
            ("hours = ", "hours = nan # ", "hours"),
            ("target_share = ", "target_share = 2 # ", "target_share"),
            ("load_seconds = ", "load_seconds = inf # ", "load_seconds"),
            ("question_tokens = ", "question_tokens = [9, 1] # ", "question_tokens"),
            ("requests_per_second = ", "requests_per_second = 9000 # ", "more than"),
            ("team = \"", "team = \"no-", "burst"),
            ("at_hours = ", "at_hours = 300 # ", "change nothing"),
            ("peak_bytes = ", "peak_bytes = 1 # ", "below model_bytes"),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text, "{from}");
            let error = Plan::parse(&changed).unwrap_err();
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            assert!(format!("{error}: {cause}").contains(words), "{to}: {error}: {cause}");
        }
    }
}
