//! Who asks whom for what, made up from a seed: the same requests whatever machines there are.

use super::scenario::{Burst, Pool, Range, Team, Tokens};
use std::time::Duration;
use warmset_core::{
    Instant,
    routing::{PrefixBuilder, PrefixChain, Salt},
};

const DAY_HOURS: f64 = 24.0;
const HOUR_SECONDS: f64 = 3_600.0;
/// Questions of one conversation.
const TURNS_MAX: usize = 32;
/// A conversation ends before its prompt has more tokens.
const PROMPT_TOKENS_MAX: u32 = 1 << 20;
/// Bytes of text per token.
const BYTES_PER_TOKEN: u32 = 4;
/// Numbers of conversations, apart from those of models.
const SESSION_WORDS: u64 = 1 << 40;

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// When it comes.
    pub at: Instant,
    /// Whose.
    pub team: usize,
    /// For which model, counted over all teams.
    pub model: usize,
    /// Its conversation.
    pub session: usize,
    /// Which question of that, from 0 on.
    pub turn: usize,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u32,
    /// Tokens of that which the conversation had before.
    pub said_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
}

/// All that is asked, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Demand {
    /// In the order of their arrival.
    pub requests: Vec<Request>,
    /// The team of each model.
    pub models: Vec<usize>,
    /// Tokens of each conversation: question, answer, question, ...
    sessions: Vec<Vec<u32>>,
}

impl Demand {
    /// Everything that the teams of a pool ask.
    pub fn new(pool: &Pool, seed: u64) -> Self {
        let mut demand = Self::default();
        for (number, team) in pool.team.iter().enumerate() {
            // Each team has chances of its own: what one does changes nothing for the others.
            let mut random = fastrand::Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number as u64);
            demand.add_team(pool, (number, team), &mut random);
            demand.models.extend(std::iter::repeat_n(number, team.models));
        }
        demand.requests.sort_by_key(|request| (request.at, request.session, request.turn));
        demand
    }

    /// These requests, in order, each a conversation of its own.
    pub fn of_requests(requests: Vec<Request>, models: Vec<usize>) -> Self {
        Self { requests, models, sessions: Vec::new() }
    }

    fn add_team(&mut self, pool: &Pool, (number, team): (usize, &Team), random: &mut fastrand::Rng) {
        let rate = Rate::new(pool, team);
        let popularity = Popularity::new(team);
        let first_model = self.models.len();
        let turns_mean = 1.0 / (1.0 - team.continued_share);
        let most = rate.most() / turns_mean;
        let (mut at, end) = (0.0, pool.hours * HOUR_SECONDS);
        loop {
            at += exponential(1.0 / most, random);
            if at >= end {
                return;
            }
            // Thinning (Lewis and Shedler 1979): of a steady stream at the highest rate, as many as are due stay.
            if random.f64() * rate.most() < rate.at(at) {
                let model = first_model + popularity.draw(random);
                self.add_session((number, team), model, (at, end), random);
            }
        }
    }

    fn add_session(
        &mut self,
        (number, team): (usize, &Team),
        model: usize,
        (mut at, end): (f64, f64),
        random: &mut fastrand::Rng,
    ) {
        let session = self.sessions.len();
        let (mut pieces, mut said_tokens) = (Vec::new(), team.system_tokens);
        for turn in 0..TURNS_MAX {
            let (question, output) = (tokens(team.question_tokens, random), tokens(team.output_tokens, random));
            let prompt_tokens = said_tokens.saturating_add(question);
            if at >= end || prompt_tokens > PROMPT_TOKENS_MAX {
                break;
            }
            self.requests.push(Request {
                at: Instant::after(Duration::from_secs_f64(at)),
                team: number,
                model,
                session,
                turn,
                prompt_tokens,
                said_tokens: if turn == 0 { 0 } else { said_tokens },
                output_tokens: output,
            });
            pieces.extend([question, output]);
            said_tokens = prompt_tokens.saturating_add(output);
            at += drawn(team.pause_seconds, random);
            if random.f64() >= team.continued_share {
                break;
            }
        }
        self.sessions.push(pieces);
    }

    /// Tokens of what a conversation has said up to a request, question and answer in turn, the new question last.
    pub(super) fn said(&self, request: &Request) -> &[u32] {
        let pieces = self.sessions.get(request.session).map_or(&[][..], Vec::as_slice);
        &pieces[..(2 * request.turn + 1).min(pieces.len())]
    }

    /// A request's prompt as a router sees it: what all of the model's prompts begin with, then message by message.
    pub fn prefix(&self, request: &Request, system_tokens: u32) -> PrefixChain {
        let words = |number: u64, tokens: u32| number.to_le_bytes().repeat((tokens * BYTES_PER_TOKEN / 8) as usize);
        let mut builder = PrefixBuilder::new(Salt::new(b"simulated", &(request.model as u64).to_le_bytes()));
        if system_tokens > 0 {
            builder.push(&words(request.model as u64, system_tokens));
            builder.boundary();
        }
        for (place, tokens) in self.said(request).iter().enumerate() {
            let number = SESSION_WORDS + ((request.session as u64) << 8) + place as u64;
            builder.push(&words(number, (*tokens).max(2)));
            builder.boundary();
        }
        builder.finish()
    }
}

/// How often a team asks at a time.
struct Rate<'a> {
    team: &'a Team,
    start_hour: f64,
    bursts: Vec<&'a Burst>,
}

impl<'a> Rate<'a> {
    fn new(pool: &'a Pool, team: &'a Team) -> Self {
        let bursts = pool.burst.iter().filter(|burst| burst.team == team.name).collect();
        Self { team, start_hour: pool.start_hour, bursts }
    }

    /// Requests per second so many seconds after the beginning.
    fn at(&self, seconds: f64) -> f64 {
        let hour = self.start_hour + seconds / HOUR_SECONDS - self.team.peak_hour;
        let swing = 1.0 + self.team.swing * libm::cos(hour / DAY_HOURS * core::f64::consts::TAU);
        let under_way = |burst: &&&Burst| {
            let since = seconds - burst.at_hours * HOUR_SECONDS;
            (0.0..burst.seconds).contains(&since)
        };
        let times: f64 = self.bursts.iter().filter(under_way).map(|burst| burst.times).product();
        self.team.requests_per_second * swing * times
    }

    /// No more than this at any time.
    fn most(&self) -> f64 {
        let times: f64 = self.bursts.iter().map(|burst| burst.times.max(1.0)).product();
        self.team.requests_per_second * (1.0 + self.team.swing) * times
    }
}

/// Zipf's law over some models, the first one the most often asked for.
pub(crate) struct Popularity {
    sums: Vec<f64>,
}

impl Popularity {
    fn new(team: &Team) -> Self {
        Self::zipf(team.models, team.zipf)
    }

    pub(crate) fn zipf(models: usize, exponent: f64) -> Self {
        let weights = (1..=models).map(|rank| libm::pow(rank as f64, -exponent));
        let sums = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self { sums: sums.collect() }
    }

    pub(crate) fn draw(&self, random: &mut fastrand::Rng) -> usize {
        let wanted = random.f64() * self.sums.last().copied().unwrap_or(1.0);
        self.sums.partition_point(|sum| *sum <= wanted).min(self.sums.len().saturating_sub(1))
    }

    /// The share of all that each has.
    pub(crate) fn shares(&self) -> Vec<f64> {
        let all = self.sums.last().copied().unwrap_or(1.0);
        let mut before = 0.0;
        let share = |sum: &f64| (sum - core::mem::replace(&mut before, *sum)) / all;
        self.sums.iter().map(share).collect()
    }
}

pub(crate) fn exponential(mean: f64, random: &mut fastrand::Rng) -> f64 {
    -libm::log(1.0 - random.f64()) * mean
}

fn drawn((least, most): Range, random: &mut fastrand::Rng) -> f64 {
    least * libm::pow(most / least, random.f64())
}

fn tokens((least, most): Tokens, random: &mut fastrand::Rng) -> u32 {
    libm::round(drawn((f64::from(least), f64::from(most)), random)) as u32
}
