//! What `warmset sim` is told.

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::PathBuf,
};
use warmset_planner::html::PlotError;

/// `warmset sim`
#[derive(Debug, Args)]
pub(crate) struct SimArguments {
    /// A scenario that is shipped (rare-models, office-hours, shared-prompts, kv-cache, batching,
    /// capacity, changes, two-hundred-models, models-and-conversations), or a file that describes one
    #[arg(value_name = "SCENARIO")]
    pub(crate) scenario: String,
    /// Recorded requests in the place of synthetic ones: a table of the Azure Functions trace, for kv-cache lines of Mooncake's or
    /// RAGPulse's form, for batching lines of Mooncake's form or a table of Azure's language models; .gz or not
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// What synthetic demand and the moments within a trace's minutes are drawn from
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Policies to compare, for batching the levels step and request [default: all]
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    pub(crate) compare: Vec<String>,
    /// Sizes of memory to compare, in models [default: the scenario's]
    #[arg(long, value_name = "N,M,...", value_delimiter = ',')]
    pub(crate) slots: Vec<usize>,
    /// Room for KV to compare, in tokens [default: the scenario's]
    #[arg(long, value_name = "N,M,...", value_delimiter = ',')]
    pub(crate) capacity_tokens: Vec<u64>,
    /// How long a load takes [default: as the scenario says]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) load_seconds: Option<f64>,
    /// Write every request into this file, as JSON: for each at least its second and its model
    #[arg(long, value_name = "FILE")]
    pub(crate) demand: Option<PathBuf>,
    /// What was played live of the same requests, to stand beside what is simulated (for a pool of machines)
    #[arg(long, value_name = "FILE")]
    pub(crate) live: Option<PathBuf>,
    /// Write tables and plots into this file: one page of HTML that needs nothing else
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

impl SimArguments {
    /// Writes the demand down, if that was asked for.
    pub(super) fn write_demand(&self, demand: &impl Serialize) -> Result<()> {
        let Some(path) = &self.demand else { return Ok(()) };
        let write = || -> Result<()> {
            let mut file = BufWriter::new(File::create(path)?);
            serde_json::to_writer(&mut file, demand)?;
            Ok(file.flush()?)
        };
        write().with_context(|| format!("cannot write the demand to {}", path.display()))
    }

    /// Writes the page that was asked for, if one was.
    pub(super) fn write_page(&self, page: impl FnOnce() -> Result<String, PlotError>) -> Result<()> {
        let Some(path) = &self.html else { return Ok(()) };
        std::fs::write(path, page()?).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Refuses options that are for other kinds of scenarios than this one.
    pub(super) fn refuse(&self, options: &[&str], why: &str) -> Result<()> {
        let given = [
            ("--trace", self.trace.is_some()),
            ("--compare", !self.compare.is_empty()),
            ("--slots", !self.slots.is_empty()),
            ("--load-seconds", self.load_seconds.is_some()),
            ("--demand", self.demand.is_some()),
            ("--capacity-tokens", !self.capacity_tokens.is_empty()),
            ("--html", self.html.is_some()),
            ("--live", self.live.is_some()),
        ];
        match given.iter().find(|(option, given)| *given && options.contains(option)) {
            Some((option, _)) => bail!("{option} is for other scenarios: {why}"),
            None => Ok(()),
        }
    }
}
