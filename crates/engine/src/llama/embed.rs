//! Embeddings: one vector of length 1 for each input.
//!
//! Models made for it pool by themselves and need each input whole in one batch. Of the others the mean over all
//! token embeddings is taken, piece by piece, on a sequence that no choice uses at the moment.

use super::{context::Batch, generate::failed, load::Loaded, request::Refusal, sys::Token};
use crate::{
    port::Report,
    protocol::{FailureKind, FromEngine},
};
use std::collections::VecDeque;

/// Tokens at once on generating models. All of them give logits too, which need room.
pub(super) const CHUNK_TOKENS: u32 = 64;

struct Embedding {
    request: u64,
    inputs: Vec<Vec<Token>>,
    vectors: Vec<Vec<f32>>,
    /// Sum over the token embeddings of the input in work.
    sum: Vec<f32>,
    /// Tokens of the input in work that are computed.
    computed: usize,
}

/// All embedding requests of an engine, oldest first.
#[derive(Default)]
pub(super) struct Embeddings {
    queue: VecDeque<Embedding>,
    batch: Batch,
}

impl Embeddings {
    pub(super) fn add(&mut self, request: u64, inputs: Vec<Vec<Token>>) {
        self.queue.push_back(Embedding { request, inputs, vectors: Vec::new(), sum: Vec::new(), computed: 0 });
    }

    pub(super) fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether the request in work has something on the sequence it was given.
    pub(super) fn holds_sequence(&self) -> bool {
        self.queue.front().is_some_and(|embedding| embedding.computed > 0)
    }

    /// Gives up a request and says so. False if it is not here.
    pub(super) fn cancel(&mut self, loaded: &mut Loaded, request: u64, sequence: usize, report: Report<'_>) -> bool {
        let Some(index) = self.queue.iter().position(|embedding| embedding.request == request) else { return false };
        if index == 0 && self.holds_sequence() {
            loaded.context.forget(sequence as i32, 0);
        }
        self.queue.remove(index);
        let message = "the request was cancelled".to_owned();
        report(failed(request, Refusal { kind: FailureKind::InvalidRequest, message, param: None }));
        true
    }

    /// One batch for the oldest request, on a free sequence of a generating model.
    pub(super) fn step(&mut self, loaded: &mut Loaded, sequence: usize, report: Report<'_>) {
        let Some(embedding) = self.queue.front_mut() else { return };
        self.batch.clear();
        let result = if loaded.pools {
            embedding.step_pooled(loaded, &mut self.batch)
        } else {
            loaded.context.set_embeddings(true);
            let result = embedding.step_mean(loaded, &mut self.batch, sequence);
            loaded.context.set_embeddings(false);
            result
        };
        let request = embedding.request;
        match result {
            Ok(false) => return,
            Ok(true) => {
                let prompt_tokens = embedding.inputs.iter().map(Vec::len).sum::<usize>() as u32;
                let vectors = std::mem::take(&mut embedding.vectors);
                report(FromEngine::Embedded { request, vectors, prompt_tokens });
            }
            Err(message) => {
                loaded.context.forget(sequence as i32, 0);
                report(failed(request, Refusal::internal(format!("the computation failed: {message}"))));
            }
        }
        self.queue.pop_front();
    }
}

impl Embedding {
    /// As many whole inputs as fit into one batch. True when all inputs are done.
    fn step_pooled(&mut self, loaded: &mut Loaded, batch: &mut Batch) -> Result<bool, String> {
        let sequences = loaded.info.parallel as usize;
        let room = loaded.info.context_tokens as usize;
        let begin = self.vectors.len();
        let mut count = 0;
        for input in self.inputs[begin..].iter().take(sequences) {
            if batch.len() + input.len() > room {
                break;
            }
            for (position, token) in input.iter().enumerate() {
                batch.add(*token, position, count, true);
            }
            count += 1;
        }
        loaded.context.decode(batch)?;
        for sequence in 0..count {
            let vector = loaded.context.sequence_embedding(sequence as i32).ok_or("an embedding is missing")?;
            self.vectors.push(normalised(vector)?);
        }
        loaded.context.clear();
        Ok(self.vectors.len() == self.inputs.len())
    }

    /// A piece of the input in work. True when all inputs are done.
    fn step_mean(&mut self, loaded: &mut Loaded, batch: &mut Batch, sequence: usize) -> Result<bool, String> {
        let input = &self.inputs[self.vectors.len()];
        let end = input.len().min(self.computed + CHUNK_TOKENS as usize);
        for (position, token) in input.iter().enumerate().take(end).skip(self.computed) {
            batch.add(*token, position, sequence, true);
        }
        loaded.context.decode(batch)?;
        self.sum.resize(loaded.model.embedding_length(), 0.0);
        for index in 0..batch.len() {
            let row = loaded.context.token_embedding(index).ok_or("an embedding is missing")?;
            self.sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += *value);
        }
        self.computed = end;
        if end == input.len() {
            loaded.context.forget(sequence as i32, 0);
            self.vectors.push(normalised(&self.sum)?);
            self.sum.clear();
            self.computed = 0;
        }
        Ok(self.vectors.len() == self.inputs.len())
    }
}

/// The vector of length 1 in the same direction.
fn normalised(vector: &[f32]) -> Result<Vec<f32>, String> {
    let length = vector.iter().map(|value| f64::from(*value) * f64::from(*value)).sum::<f64>().sqrt();
    if !length.is_finite() {
        return Err("the model's output is not a number; its weights may be damaged".into());
    }
    let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
    Ok(vector.iter().map(|value| (f64::from(*value) * scale) as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_have_length_one_unless_they_are_nothing() {
        assert_eq!(normalised(&[3.0, 4.0]), Ok(vec![0.6, 0.8]));
        assert_eq!(normalised(&[0.0, 0.0]), Ok(vec![0.0, 0.0]));
        assert!(normalised(&[f32::NAN]).is_err());
    }
}
