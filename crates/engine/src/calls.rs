//! Calls of functions in a model's text, found while the text comes. The text is held to a grammar, so that a call has
//! exactly one shape; what could still become one is held back.

use crate::protocol::{FromEngine, ToolChoice, Tools};
use warmset_grammar::{CALL_ARGUMENTS, CALL_BEGIN, CALL_END, CALL_NAME};

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    Call { call: u32, name: String },
    Arguments { call: u32, text: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In plain text.
    Text,
    /// Between the mark that begins a call and its arguments.
    Head,
    Arguments,
}

/// Takes the text of one choice apart.
#[derive(Debug)]
pub(crate) struct CallParser {
    place: Place,
    held: String,
    /// Calls that have begun.
    calls: u32,
}

/// Whether a model with these tools may call one of them.
pub(crate) fn may_call(tools: Option<&Tools>) -> bool {
    tools.is_some_and(|tools| tools.choice != ToolChoice::None)
}

impl CallParser {
    pub(crate) fn new() -> Self {
        Self { place: Place::Text, held: String::new(), calls: 0 }
    }

    /// Whether a call has begun.
    pub(crate) fn has_called(&self) -> bool {
        self.calls > 0
    }

    /// Takes more text; with `last` nothing is held back any more. Says what has become of it.
    pub(crate) fn push(&mut self, text: &str, last: bool, (request, choice): (u64, u32)) -> Vec<FromEngine> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while self.step(&mut pieces, last) {}
        let message = |piece| match piece {
            Piece::Text(text) => FromEngine::Delta { request, choice, text },
            Piece::Call { call, name } => FromEngine::ToolCall { request, choice, call, name },
            Piece::Arguments { call, text } => FromEngine::ToolArguments { request, choice, call, text },
        };
        pieces.into_iter().map(message).collect()
    }

    /// One move from one place to the next; false if more text is needed for that.
    fn step(&mut self, pieces: &mut Vec<Piece>, last: bool) -> bool {
        match self.place {
            Place::Text => {
                let found = self.held.find(CALL_BEGIN);
                let safe = found.unwrap_or_else(|| self.held.len() - held_back(&self.held, CALL_BEGIN, last));
                // Space between calls is no text.
                let is_text = self.calls == 0 || !self.held[..safe].trim().is_empty();
                if safe > 0 && (is_text || found.is_some() || last) {
                    let text: String = self.held.drain(..safe).collect();
                    if is_text {
                        pieces.push(Piece::Text(text));
                    }
                }
                if found.is_some() {
                    self.held.drain(..CALL_BEGIN.len());
                    self.place = Place::Head;
                }
                found.is_some()
            }
            Place::Head => {
                let Some(end) = self.held.find(CALL_ARGUMENTS) else { return false };
                let name = self.held[..end].trim_start_matches(CALL_NAME).to_owned();
                self.held.drain(..end + CALL_ARGUMENTS.len());
                pieces.push(Piece::Call { call: self.calls, name });
                self.calls += 1;
                self.place = Place::Arguments;
                true
            }
            Place::Arguments => {
                let found = self.held.find(CALL_END);
                let safe = found.unwrap_or_else(|| self.held.len() - held_back(&self.held, CALL_END, last));
                if safe > 0 {
                    let text = self.held.drain(..safe).collect();
                    pieces.push(Piece::Arguments { call: self.calls - 1, text });
                }
                if found.is_some() {
                    self.held.drain(..CALL_END.len());
                    self.place = Place::Text;
                }
                found.is_some()
            }
        }
    }
}

/// Bytes at the end of a text that a mark may begin with.
fn held_back(text: &str, mark: &str, last: bool) -> usize {
    if last {
        return 0;
    }
    (1..mark.len()).rev().find(|length| text.as_bytes().ends_with(&mark.as_bytes()[..*length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TWO: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"a}b\"}}\n</tool_call>\n\
                       <tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>";

    /// The text, and the calls with their arguments.
    fn told(pieces: &[&str]) -> (String, Vec<(String, String)>) {
        let (mut parser, mut text, mut calls) = (CallParser::new(), String::new(), Vec::new());
        let last = pieces.len().saturating_sub(1);
        for (index, piece) in pieces.iter().enumerate() {
            for message in parser.push(piece, index == last, (1, 0)) {
                match message {
                    FromEngine::Delta { text: more, .. } => text.push_str(&more),
                    FromEngine::ToolCall { call, name, .. } => {
                        assert_eq!(call as usize, calls.len());
                        calls.push((name, String::new()));
                    }
                    FromEngine::ToolArguments { call, text, .. } => calls[call as usize].1.push_str(&text),
                    other => panic!("{other:?}"),
                }
            }
        }
        (text, calls)
    }

    #[test]
    fn text_without_calls_is_text() {
        for text in ["", "Hello <tool> there <tool_cal", "a\n"] {
            assert_eq!(told(&[text]), (text.to_owned(), Vec::new()));
        }
        let mut parser = CallParser::new();
        let shown = parser.push("Hello <to", false, (1, 0));
        assert_eq!(shown, [FromEngine::Delta { request: 1, choice: 0, text: "Hello ".into() }]);
    }

    #[test]
    fn a_call_that_is_cut_off_keeps_what_there_is() {
        let (text, calls) = told(&["<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1"]);
        assert_eq!((text.as_str(), calls), ("", vec![("f".into(), "{\"a\": 1".into())]));
        assert_eq!(told(&["<tool_call>\n{\"na"]), (String::new(), Vec::new()));
    }

    proptest! {
        #[test]
        fn any_cut_tells_the_same(cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12)) {
            let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(TWO.len() + 1)).collect();
            places.extend([0, TWO.len()]);
            places.sort_unstable();
            let pieces: Vec<&str> = places.windows(2).map(|pair| &TWO[pair[0]..pair[1]]).collect();
            let (text, calls) = told(&pieces);
            prop_assert_eq!(text, "I look.\n");
            let expected = [("weather", "{\"city\": \"a}b\"}"), ("stop", "{}")];
            prop_assert_eq!(calls, expected.map(|(name, arguments)| (name.to_owned(), arguments.to_owned())));
        }
    }
}
