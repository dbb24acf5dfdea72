//! A grammar at work: which tokens may come next.

use crate::{Grammar, GrammarError, limits};
use llguidance::{
    Matcher, ParserFactory,
    toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie},
};
use std::sync::Arc;

/// The tokens of a model, prepared once.
pub struct Vocabulary {
    factory: ParserFactory,
}

impl Vocabulary {
    /// `tokens` are the bytes of each, empty for those that never stand for text; `ends` are those that end a text.
    pub fn new(tokens: &[Vec<u8>], ends: &[u32]) -> Result<Self, GrammarError> {
        let wrong = |words: &str| GrammarError(words.into());
        let first = *ends.first().ok_or_else(|| wrong("the model has no token that ends a text"))?;
        let size = u32::try_from(tokens.len()).map_err(|_| wrong("the model has too many tokens"))?;
        if ends.iter().any(|end| *end >= size) {
            return Err(wrong("the model's end token is none of its tokens"));
        }
        let build = || {
            let trie = TokTrie::from(&TokRxInfo::new(size, first), tokens).with_eos_tokens(ends);
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)?;
            *factory.limits_mut() = limits();
            factory.quiet();
            Ok(Self { factory })
        };
        llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(build))
            .map_err(|error| GrammarError::of(&error))
    }

    /// Begins a text that keeps to a grammar.
    pub fn constrain(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let matcher = Matcher::new(self.factory.create_parser(grammar.0.clone()));
        match matcher.get_error() {
            None => Ok(Constraint { matcher, allowed: None }),
            Some(error) => Err(GrammarError::of(&error)),
        }
    }
}

/// One text that keeps to a grammar.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    allowed: Option<SimpleVob>,
}

impl Constraint {
    /// Finds out which tokens may come next; `allows` knows then.
    pub fn look(&mut self) -> Result<(), GrammarError> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|error| GrammarError::of(&error))?;
        if allowed.is_zero() {
            return Err(GrammarError("the grammar leads nowhere with this model's tokens".into()));
        }
        self.allowed = Some(allowed);
        Ok(())
    }

    /// Whether a token may come next.
    pub fn allows(&self, token: usize) -> bool {
        self.allowed.as_ref().is_some_and(|allowed| token < allowed.len() && allowed.get(token))
    }

    /// Takes the token that came.
    pub fn take(&mut self, token: u32) -> Result<(), GrammarError> {
        self.matcher.consume_token(token).map_err(|error| GrammarError::of(&error))
    }

    /// Whether the text is complete and nothing can follow.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }
}
