//! What an answer may be, as one kind of grammar: JSON schemas, llama.cpp's notation (GBNF) and calls of functions are
//! compiled by llguidance, with a bound on all work (docs/adr/0009-llguidance.md says why not llama.cpp's own).
//!
//! A server checks with it what callers send before anything is loaded; an engine holds its tokens to it.

mod calls;
mod constraint;
mod gbnf;
mod lark;
mod schema;
mod words;

pub use calls::{CALL_ARGUMENTS, CALL_BEGIN, CALL_END, CALL_NAME, calls};
pub use constraint::{Constraint, Vocabulary};

use llguidance::{
    Logger,
    api::{GrammarInit, ParserLimits, TopLevelGrammar},
};
use warmset_core::inference::{TextFormat, Tools};

/// The longest schema.
pub const SCHEMA_BYTES_MAX: usize = 64 << 10;
/// The deepest schema.
pub const SCHEMA_DEPTH_MAX: usize = 32;
/// The longest grammar in GBNF.
pub const GRAMMAR_BYTES_MAX: usize = 64 << 10;
/// The longest message about a grammar.
const MESSAGE_CHARACTERS_MAX: usize = 300;

/// Why a grammar cannot be used: for the caller to read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub(crate) String);

impl GrammarError {
    /// One line about what went wrong, without what would fill a screen.
    fn of(error: &dyn std::fmt::Display) -> Self {
        let line = words::of(&error.to_string());
        Self(line.chars().filter(|letter| !letter.is_control()).take(MESSAGE_CHARACTERS_MAX).collect())
    }
}

/// A grammar, compiled as far as that goes without a vocabulary.
#[derive(Debug, Clone)]
pub struct Grammar(TopLevelGrammar);

/// How much work a grammar may cause. A step is one token of one choice, in which every other choice waits.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1_000,
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: 100_000,
        step_max_items: 25_000,
        max_lexer_states: 50_000,
        max_grammar_size: 100_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// The grammar of a text format.
pub fn format(format: &TextFormat) -> Result<Grammar, GrammarError> {
    match format {
        TextFormat::JsonObject => schema::parse("{\"type\":\"object\"}").and_then(from_schema),
        TextFormat::JsonSchema { schema } => schema::parse(schema).and_then(from_schema),
        TextFormat::Gbnf { grammar } => {
            let rules = gbnf::parse(grammar)?;
            // A grammar that comes back to none of its rules is one regular expression, which is the quicker way.
            if let Some(text) = lark::terminals(&rules) {
                let grammar = Grammar(TopLevelGrammar::from_lark(text));
                if check(&grammar).is_ok() {
                    return Ok(grammar);
                }
            }
            checked(Grammar(TopLevelGrammar::from_lark(lark::rules(&rules))))
        }
    }
}

/// Checks the arguments' schema of a function.
pub fn check_parameters(parameters: &str) -> Result<(), GrammarError> {
    schema::parse(parameters).and_then(from_schema).map(|_| ())
}

/// Checks that calls of these functions can be held to a grammar.
pub fn check_tools(tools: &Tools) -> Result<(), GrammarError> {
    calls(tools).map(|_| ())
}

fn from_schema(schema: serde_json::Value) -> Result<Grammar, GrammarError> {
    checked(Grammar(TopLevelGrammar::from_json_schema(schema)))
}

fn checked(grammar: Grammar) -> Result<Grammar, GrammarError> {
    check(&grammar)?;
    Ok(grammar)
}

/// Compiles a grammar without a vocabulary.
fn check(grammar: &Grammar) -> Result<(), GrammarError> {
    let grammar = grammar.0.clone();
    llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let init = GrammarInit::Serialized(grammar);
        init.to_cgrammar(None, &mut Logger::new(0, 0), limits(), Vec::new())
    }))
    .map(|_| ())
    .map_err(|error| GrammarError::of(&error))
}

#[cfg(test)]
mod tests;
