//! Prompts that an engine keeps in one life: what comes again need not be read again. The one used longest ago leaves.

/// What a prompt begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beginning {
    /// What all of the model's prompts begin with.
    System,
    /// What was said in a conversation.
    Session(usize),
}

/// Beginnings and their tokens, used last at the end.
#[derive(Debug, Clone)]
pub(super) struct Prompts {
    kept: Vec<(Beginning, u64)>,
    tokens_max: u64,
}

impl Prompts {
    pub(super) fn new(tokens_max: u64) -> Self {
        Self { kept: Vec::new(), tokens_max }
    }

    /// How many tokens of a beginning are here; that uses it.
    pub(super) fn find(&mut self, beginning: Beginning) -> u64 {
        let Some(place) = self.kept.iter().position(|(other, _)| *other == beginning) else { return 0 };
        let found = self.kept.remove(place);
        self.kept.push(found);
        found.1
    }

    /// Keeps so many tokens of a beginning from now on.
    pub(super) fn keep(&mut self, beginning: Beginning, tokens: u64) {
        self.kept.retain(|(other, _)| *other != beginning);
        self.kept.push((beginning, tokens));
        let mut held: u64 = self.kept.iter().map(|(_, tokens)| tokens).sum();
        while held > self.tokens_max {
            held -= self.kept.remove(0).1;
        }
    }
}
