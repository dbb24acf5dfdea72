//! Which machine serves which model, as an operator writes it down for a gateway (`[[replica]] models`): each model on so many
//! machines, those with the least to do so far, the models with the most work first.

use super::scenario::{Pool, Team};
use crate::pool::demand::Demand;
use std::cmp::Ordering;

/// The models of each machine, for these teams; on all machines where a team does not say on how many.
pub(super) fn place(pool: &Pool, demand: &Demand, teams: &[usize], machines: usize) -> Vec<Vec<usize>> {
    let mut ranks = vec![0; pool.team.len()];
    let mut models = Vec::new();
    for (model, number) in demand.models.iter().enumerate() {
        let team = &pool.team[*number];
        ranks[*number] += 1;
        if teams.contains(number) {
            models.push((work(team, ranks[*number]), model, team));
        }
    }
    models.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut placed = vec![(0.0, 0_u64, Vec::new()); machines];
    for (work, model, team) in models {
        let copies = team.machines_per_model.unwrap_or(machines).clamp(1, machines);
        let mut order: Vec<usize> = (0..machines).collect();
        order.sort_by(|a, b| lighter(&placed[*a], &placed[*b]).then(a.cmp(b)));
        for machine in order.into_iter().take(copies) {
            let (load, bytes, served) = &mut placed[machine];
            *load += work / copies as f64;
            *bytes += team.model_bytes;
            served.push(model);
        }
    }
    placed.into_iter().map(|(_, _, served)| served).collect()
}

type Placed = (f64, u64, Vec<usize>);

fn lighter(one: &Placed, other: &Placed) -> Ordering {
    one.0.total_cmp(&other.0).then(one.1.cmp(&other.1))
}

/// Seconds of work that a model has in a second, by its rank in its team and the middle of what is drawn for each request.
fn work(team: &Team, rank: usize) -> f64 {
    let weight = |rank: usize| libm::pow(rank as f64, -team.zipf);
    let share = weight(rank) / (1..=team.models).map(weight).sum::<f64>();
    let middle = |(least, most): (u32, u32)| f64::from(least) / 2.0 + f64::from(most) / 2.0;
    let reading = middle(team.question_tokens) / team.prefill_tokens_per_second;
    let writing = middle(team.output_tokens) * team.decode_step_seconds / f64::from(team.parallel);
    share * team.requests_per_second * (reading + writing)
}

#[cfg(test)]
mod tests {
    use super::super::scenario::{Plan, SHIPPED};
    use super::*;

    #[test]
    fn every_model_is_on_as_many_machines_as_its_team_says_and_work_is_even() {
        let mut pool = Plan::parse(SHIPPED.1).expect("it is shipped").pool;
        let demand = Demand::new(&Pool { hours: 0.1, ..pool.clone() }, 1);
        for (machines, copies) in [(1, 2), (6, 1), (6, 2), (6, 9)] {
            pool.team.iter_mut().for_each(|team| team.machines_per_model = Some(copies));
            let placed = place(&pool, &demand, &[0, 1, 2, 3], machines);
            assert_eq!(placed.len(), machines);
            for model in 0..demand.models.len() {
                let count = placed.iter().filter(|served| served.contains(&model)).count();
                assert_eq!(count, copies.min(machines), "model {model} on {machines}");
            }
        }
        let placed = place(&pool, &demand, &[1], 2);
        assert!(placed.iter().flatten().all(|model| demand.models[*model] == 1));
    }
}
