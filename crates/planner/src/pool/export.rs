//! A demand as a document, and where models are: what a replay against real servers needs.

use super::{
    demand::Demand,
    report::Project,
    scenario::{Lost, Pool},
    world::Fleet,
};
use serde::Serialize;
use warmset_core::Instant;

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Export<'a> {
    /// The scenario.
    pub pool: &'a Pool,
    /// The team of each model.
    pub models: &'a [usize],
    /// Ways to use machines.
    pub arrangements: Vec<Placed>,
    /// In the order of their arrival.
    pub requests: Vec<Asked>,
}

/// One way to use machines.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Placed {
    /// `shared` or `dedicated`.
    pub arrangement: &'static str,
    /// Fleets with a gateway each.
    pub fleets: Vec<Gathered>,
}

/// Machines behind one gateway.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gathered {
    /// The teams that ask here.
    pub teams: Vec<usize>,
    /// The models that each machine serves.
    pub machines: Vec<Vec<usize>>,
    /// Machines that are lost, by their number here.
    pub lost: Vec<Lost>,
}

/// One request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Asked {
    /// When it comes.
    pub second: f64,
    /// For which model.
    pub model: usize,
    /// Its conversation.
    pub session: usize,
    /// Tokens of what was said, question and answer in turn, the new question last.
    pub said_tokens: Vec<u32>,
    /// Tokens of the answer.
    pub output_tokens: u32,
}

fn gathered(fleet: Fleet) -> Gathered {
    Gathered { teams: fleet.teams, machines: fleet.models, lost: fleet.lost }
}

impl Project<'_> {
    /// The demand, and the machines of the scenario in both ways.
    pub fn export(&self) -> Export<'_> {
        let placed = |arrangement, fleets: Vec<Fleet>| Placed {
            arrangement,
            fleets: fleets.into_iter().map(gathered).collect(),
        };
        let demand: &Demand = self.demand();
        let asked = demand.requests.iter().map(|request| Asked {
            second: request.at.since(Instant::ZERO).as_secs_f64(),
            model: request.model,
            session: request.session,
            said_tokens: demand.said(request).to_vec(),
            output_tokens: request.output_tokens,
        });
        Export {
            pool: self.pool(),
            models: &demand.models,
            arrangements: vec![placed("shared", vec![self.shared()]), placed("dedicated", self.dedicated())],
            requests: asked.collect(),
        }
    }
}
