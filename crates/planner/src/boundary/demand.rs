//! Who asks for what, made up from a seed: the same requests whatever the memory is like.

use super::plan::{Boundary, Phase};
use crate::{
    node::{Prompt, block},
    pool::demand::{Popularity, exponential},
};
use std::time::Duration;
use warmset_core::{
    Digest, Instant,
    kv::{BLOCK_TOKENS, BlockKey},
};

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// When it comes.
    pub at: Instant,
    /// In which phase.
    pub phase: usize,
    /// For which model: first those that are asked for once in a while, then those that people talk to.
    pub model: usize,
    /// What it is about.
    pub prompt: Prompt,
    /// Tokens of the prompt that its model was given before.
    pub said_tokens: u32,
}

/// The digest of the so-manieth model.
pub fn digest(model: usize) -> Digest {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&(model as u64 + 1).to_be_bytes());
    Digest(bytes)
}

/// What a block holds, so that different ones differ.
#[derive(Debug, Clone, Copy)]
enum Content {
    System(u32),
    Conversation(u32),
    Once(u32),
}

/// A run of tokens that grows.
#[derive(Debug, Clone, Default)]
struct Text {
    keys: Vec<BlockKey>,
    tokens: u32,
}

impl Text {
    fn add(&mut self, digest: &Digest, content: Content, tokens: u32) {
        self.tokens += tokens;
        let (kind, number) = match content {
            Content::System(number) => (0, number),
            Content::Conversation(number) => (1, number),
            Content::Once(number) => (2, number),
        };
        while self.keys.len() < (self.tokens / BLOCK_TOKENS) as usize {
            let key = block(digest, self.keys.last(), &[kind, number, self.keys.len() as u32]);
            self.keys.push(key);
        }
    }
}

/// A conversation.
#[derive(Debug, Clone)]
struct Conversation {
    number: u32,
    text: Text,
    turns: u32,
    said_tokens: u32,
}

/// The conversations of a phase.
struct Talks<'a> {
    boundary: &'a Boundary,
    conversations: Vec<Conversation>,
    popularity: Popularity,
    begun: &'a mut u32,
}

impl Talks<'_> {
    fn model(&self, place: usize) -> usize {
        self.boundary.models.count + place % self.boundary.conversations.models
    }

    fn fresh(&mut self, place: usize, random: &mut fastrand::Rng) -> Conversation {
        let options = &self.boundary.conversations;
        let digest = digest(self.model(place));
        *self.begun += 1;
        let mut text = Text::default();
        text.add(&digest, Content::System(random.u32(0..options.system_prompts)), options.system_tokens);
        let said_tokens = text.tokens;
        text.add(&digest, Content::Conversation(*self.begun), options.first_tokens);
        Conversation { number: *self.begun, text, turns: 0, said_tokens }
    }

    fn next(&mut self, random: &mut fastrand::Rng) -> (usize, Prompt, u32) {
        let place = self.popularity.draw(random);
        let options = &self.boundary.conversations;
        if self.conversations[place].turns == options.turns {
            self.conversations[place] = self.fresh(place, random);
        }
        let model = self.model(place);
        let (digest, one) = (digest(model), &mut self.conversations[place]);
        let content = Content::Conversation(one.number);
        one.text.add(&digest, content, options.question_tokens);
        let tokens = one.text.tokens;
        one.text.add(&digest, content, options.answer_tokens);
        one.turns += 1;
        let said_tokens = std::mem::replace(&mut one.said_tokens, one.text.tokens);
        (model, Prompt { keys: one.text.keys.clone(), tokens, output_tokens: options.answer_tokens }, said_tokens)
    }
}

/// All requests, in order.
pub fn requests(boundary: &Boundary, seed: u64) -> Vec<Request> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut requests, mut begins, mut begun) = (Vec::new(), 0.0, 0);
    for (number, phase) in boundary.phase.iter().enumerate() {
        add_phase(boundary, (number, phase, begins), &mut begun, &mut random, &mut requests);
        begins += phase.seconds;
    }
    requests
}

fn add_phase(
    boundary: &Boundary,
    (number, phase, begins): (usize, &Phase, f64),
    begun: &mut u32,
    random: &mut fastrand::Rng,
    requests: &mut Vec<Request>,
) {
    // Whom people ask changes from phase to phase.
    let mut models: Vec<usize> = (0..boundary.models.count).collect();
    random.shuffle(&mut models);
    let popularity = Popularity::zipf(phase.models, boundary.models.zipf);
    let talking = Popularity::zipf(phase.conversations, boundary.conversations.zipf);
    let mut talks = Talks { boundary, conversations: Vec::new(), popularity: talking, begun };
    for place in 0..phase.conversations {
        let fresh = talks.fresh(place, random);
        talks.conversations.push(fresh);
    }
    let mut at = begins;
    while at < begins + phase.seconds {
        let talk = random.f64() < phase.talk_share;
        let (model, prompt, said_tokens) = if talk {
            talks.next(random)
        } else {
            let model = models[popularity.draw(random)];
            (model, once(boundary, model, requests.len() as u32), 0)
        };
        requests.push(Request {
            at: Instant::after(Duration::from_secs_f64(at)),
            phase: number,
            model,
            prompt,
            said_tokens,
        });
        at += exponential(1.0 / phase.requests_per_second, random);
    }
}

fn once(boundary: &Boundary, model: usize, number: u32) -> Prompt {
    let (mut text, options) = (Text::default(), &boundary.models);
    text.add(&digest(model), Content::Once(number), options.prompt_tokens);
    let tokens = text.tokens;
    text.add(&digest(model), Content::Once(number), options.answer_tokens);
    Prompt { keys: text.keys, tokens, output_tokens: options.answer_tokens }
}
