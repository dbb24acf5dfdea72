//! `warmset plan`: closed formulas on the command line. What is calculated, and where each formula comes from, stands in
//! `warmset_planner::calculate`; here options become its inputs, and its answers a document.

mod load;
mod memory;
mod model;
mod speed;
mod text;
mod values;

use crate::output::Output;
use anyhow::Result;
use clap::Subcommand;

/// `warmset plan ...`
#[derive(Debug, Subcommand)]
pub(crate) enum PlanCommand {
    /// Whether models stay in memory together: at rest, at the worst moment, while one is replaced; how many workers
    WarmSet(memory::WarmSetArguments),
    /// What keys and values take
    Kv(memory::KvArguments),
    /// Where bringing KV back beats computing it again
    BreakEven(speed::BreakEvenArguments),
    /// How many conversations fit, and what happens when they grow
    Sessions(memory::SessionsArguments),
    /// What paged KV gains over reserving the longest context
    Paging(memory::PagingArguments),
    /// What long prompts that tenants share take on replicas, and how a large tenant's load spreads
    Prefixes(memory::PrefixesArguments),
    /// How fast tokens are generated
    Decode(speed::DecodeArguments),
    /// How long a prompt takes to read
    Prefill(speed::PrefillArguments),
    /// What moving a prompt's KV between machines takes
    Transfer(speed::TransferArguments),
    /// How many instances read prompts and how many generate, if the two are apart
    PdPools(load::PoolsArguments),
    /// What a batch of requests takes overnight: instances, hours, cost
    Batch(load::BatchArguments),
    /// How long weights take to reach many nodes
    Distribute(speed::DistributeArguments),
    /// Flags for vLLM and SGLang, with the reason for each
    EngineArgs(load::EngineArguments),
    /// How long requests wait (M/M/c, M/D/1)
    Queueing(load::QueueingArguments),
    /// How many replicas a load needs, with some to spare
    Fleet(load::FleetArguments),
    /// How many of rarely used models are in use at once
    ActiveModels(load::ActiveModelsArguments),
}

impl PlanCommand {
    /// Refuses what means nothing, also where the answer does not depend on it: somebody meant something by it.
    fn check(&self) -> Result<()> {
        let (model, gpus, rates) = match self {
            Self::Kv(one) => (&one.model, None, None),
            Self::BreakEven(one) => (&one.model, Some(&one.gpus), None),
            Self::Sessions(one) => (&one.model, Some(&one.gpus), None),
            Self::Paging(one) => (&one.model, None, None),
            Self::Prefixes(one) => (&one.model, None, None),
            Self::Decode(one) => (&one.model, Some(&one.gpus), None),
            Self::Prefill(one) => (&one.model, Some(&one.gpus), None),
            Self::Transfer(one) => (&one.model, None, None),
            Self::PdPools(one) => (&one.model, Some(&one.gpus), Some(&one.rates)),
            Self::Batch(one) => (&one.model, Some(&one.gpus), Some(&one.rates)),
            Self::EngineArgs(one) => (&one.model, Some(&one.gpus), None),
            // Every option of these is calculated with.
            Self::WarmSet(_) | Self::Distribute(_) | Self::Queueing(_) | Self::Fleet(_) | Self::ActiveModels(_) => {
                return Ok(());
            }
        };
        model.check()?;
        gpus.map_or(Ok(()), model::GpuArguments::check)?;
        rates.map_or(Ok(()), model::RateArguments::check)
    }
}

/// Calculates and prints. "It does not fit" is an answer.
pub(crate) fn run(command: &PlanCommand, output: Output) -> Result<()> {
    command.check()?;
    let document = match command {
        PlanCommand::WarmSet(arguments) => arguments.document(),
        PlanCommand::Kv(arguments) => arguments.document(),
        PlanCommand::BreakEven(arguments) => arguments.document(),
        PlanCommand::Sessions(arguments) => arguments.document(),
        PlanCommand::Paging(arguments) => arguments.document(),
        PlanCommand::Prefixes(arguments) => arguments.document(),
        PlanCommand::Decode(arguments) => arguments.document(),
        PlanCommand::Prefill(arguments) => arguments.document(),
        PlanCommand::Transfer(arguments) => arguments.document(),
        PlanCommand::PdPools(arguments) => arguments.document(),
        PlanCommand::Batch(arguments) => arguments.document(),
        PlanCommand::Distribute(arguments) => arguments.document(),
        PlanCommand::EngineArgs(arguments) => arguments.document(),
        PlanCommand::Queueing(arguments) => arguments.document(),
        PlanCommand::Fleet(arguments) => arguments.document(),
        PlanCommand::ActiveModels(arguments) => arguments.document(),
    }?;
    output.result(&document, text::render);
    Ok(())
}
