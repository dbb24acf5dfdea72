//! Other tools' configurations, turned into ours: as far as they say the same, and with a list of what they say besides.

mod llama_swap;
mod words;

pub(crate) use llama_swap::import;
