//! The canary of a load: one question to the engine itself, after the load and before any caller.

use std::time::Instant;
use warmset_core::{
    inference::{GenerateJob, Prompt, TokensOrText, Work},
    rollout::{Canary, CanaryScore, Expected},
};
use warmset_engine::protocol::{FromEngine, KvGrant, ToEngine};

/// The number of the question: no caller's request ever has it.
pub(crate) const CANARY_REQUEST: u64 = u64::MAX;

/// Characters of a wrong answer that an error shows.
const SHOWN_CHARACTERS: usize = 120;

/// A question on its way.
pub(crate) struct Asking {
    canary: Canary,
    began: Instant,
    text: String,
}

/// What comes of an engine's message.
pub(crate) enum Step {
    /// Nothing yet; the engine may have to be told something.
    Going(Option<ToEngine>),
    /// It passed or it did not.
    Over(Result<CanaryScore, String>),
}

impl Asking {
    /// Begins; the second part is the question.
    pub(crate) fn begin(canary: Canary) -> (Self, Work) {
        let question = match canary.expected {
            Expected::Text(_) => text_question(&canary.prompt, canary.max_tokens),
            Expected::Embedding(_) => embedding_question(&canary.prompt),
        };
        (Self { canary, began: Instant::now(), text: String::new() }, question)
    }

    /// Whether this message is about the question.
    pub(crate) fn concerns(message: &FromEngine) -> bool {
        use FromEngine::{ChoiceDone, Delta, Done, Embedded, Failed, Prepared};
        match message {
            Prepared { request, .. }
            | Delta { request, .. }
            | ChoiceDone { request, .. }
            | Done { request, .. }
            | Embedded { request, .. }
            | Failed { request, .. } => *request == CANARY_REQUEST,
            _ => false,
        }
    }

    /// Hears what the engine says of it.
    pub(crate) fn hear(&mut self, message: FromEngine) -> Step {
        match message {
            FromEngine::Prepared { request, .. } => {
                Step::Going(Some(ToEngine::Grant { request, source: KvGrant::Recompute { known: 0 } }))
            }
            FromEngine::Delta { text, .. } => {
                self.text.push_str(&text);
                Step::Going(None)
            }
            FromEngine::Done { .. } => Step::Over(self.judge(text_score(&self.canary.expected, &self.text))),
            FromEngine::Embedded { vectors, .. } => {
                let vector = vectors.first().map(Vec::as_slice).unwrap_or_default();
                Step::Over(self.judge(vector_score(&self.canary.expected, vector)))
            }
            FromEngine::Failed { message, .. } => Step::Over(Err(format!("the canary failed: {message}"))),
            _ => Step::Going(None),
        }
    }

    fn judge(&self, score: f64) -> Result<CanaryScore, String> {
        let verdict = self.canary.judge(score, self.began.elapsed().as_secs_f64());
        verdict.map_err(|failure| match self.text.is_empty() {
            true => failure.to_string(),
            false => {
                let answer: String = self.text.chars().take(SHOWN_CHARACTERS).collect();
                format!("{failure}; it said {answer:?}")
            }
        })
    }
}

/// What is asked for a text: one user's message, greedily, so that the same model answers the same. A model without a
/// chat template of its own gets it in a common one.
pub fn text_question(prompt: &str, max_tokens: u32) -> Work {
    let messages = serde_json::json!([{ "role": "user", "content": prompt }]).to_string();
    Work::Generate(Box::new(GenerateJob::greedy(Prompt::Chat { messages }, max_tokens)))
}

/// What is asked for an embedding.
pub fn embedding_question(prompt: &str) -> Work {
    Work::Embed { inputs: vec![TokensOrText::Text(prompt.to_owned())] }
}

/// 1 where the expected text is contained, else how alike both are (normalised edit distance).
fn text_score(expected: &Expected, answer: &str) -> f64 {
    let Expected::Text(expected) = expected else { return f64::NAN };
    if answer.contains(expected.trim()) { 1.0 } else { strsim::normalized_levenshtein(expected, answer) }
}

/// The cosine of two vectors; no number where they cannot be compared or one is not finite.
fn vector_score(expected: &Expected, answer: &[f32]) -> f64 {
    let Expected::Embedding(expected) = expected else { return f64::NAN };
    if expected.len() != answer.len() {
        return f64::NAN;
    }
    let dot = |one: &[f32], other: &[f32]| -> f64 {
        one.iter().zip(other).map(|(one, other)| f64::from(*one) * f64::from(*other)).sum()
    };
    dot(expected, answer) / (dot(expected, expected) * dot(answer, answer)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canary(expected: Expected) -> Canary {
        Canary {
            prompt: "The capital of France is".into(),
            max_tokens: 8,
            expected,
            score_min: 0.8,
            latency_max_seconds: 3600.0,
            given: true,
        }
    }

    fn ask(expected: Expected, answers: Vec<FromEngine>) -> Result<CanaryScore, String> {
        let embeds = matches!(expected, Expected::Embedding(_));
        let (mut asking, question) = Asking::begin(canary(expected));
        assert_eq!(matches!(question, Work::Embed { .. }), embeds);
        for answer in answers {
            assert!(Asking::concerns(&answer));
            if let Step::Over(verdict) = asking.hear(answer) {
                return verdict;
            }
        }
        panic!("no end")
    }

    fn text(text: &str) -> Vec<FromEngine> {
        let (usage, timings) = Default::default();
        vec![
            FromEngine::Prepared { request: CANARY_REQUEST, prompt_tokens: 5, device_tokens: 0, keys: vec![] },
            FromEngine::Delta { request: CANARY_REQUEST, choice: 0, text: text.into() },
            FromEngine::Done { request: CANARY_REQUEST, usage, timings },
        ]
    }

    #[test]
    fn a_text_passes_if_it_is_contained_or_nearly_the_same() {
        let expected = || Expected::Text(" Paris, the capital.".into());
        assert_eq!(ask(expected(), text("is Paris, the capital. Yes")).unwrap().score, 1.0);
        assert!(ask(expected(), text(" Paris, the Capital.")).unwrap().score > 0.9);
        let refused = ask(expected(), text("\u{fffd}\u{fffd}@@@@ 0 0 0")).unwrap_err();
        assert!(refused.contains("scored 0.") && refused.contains("0.80 is needed"), "{refused}");
        assert!(ask(expected(), text("")).is_err());
    }

    #[test]
    fn an_embedding_passes_by_its_direction() {
        let vectors = |vector: Vec<f32>| {
            vec![FromEngine::Embedded { request: CANARY_REQUEST, vectors: vec![vector], prompt_tokens: 3 }]
        };
        let expected = || Expected::Embedding(vec![1.0, 2.0]);
        assert!(ask(expected(), vectors(vec![10.0, 20.1])).is_ok());
        for wrong in [vec![2.0, -1.0], vec![f32::NAN, 2.0], vec![0.0, 0.0], vec![1.0], vec![]] {
            assert!(ask(expected(), vectors(wrong)).is_err());
        }
    }

    #[test]
    fn what_the_engine_refuses_fails_and_what_others_asked_is_not_heard() {
        let kind = warmset_core::inference::FailureKind::Internal;
        let failed = FromEngine::Failed { request: CANARY_REQUEST, kind, message: "not finite".into(), param: None };
        assert!(ask(Expected::Text("x".into()), vec![failed]).unwrap_err().contains("not finite"));
        assert!(!Asking::concerns(&FromEngine::Prepared {
            request: 1,
            prompt_tokens: 1,
            device_tokens: 0,
            keys: vec![]
        }));
        assert!(!Asking::concerns(&FromEngine::Beat));
    }
}
