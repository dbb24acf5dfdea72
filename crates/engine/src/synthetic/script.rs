//! What the synthetic engine says where its text is held to a grammar: the shortest text it can find.

use crate::{
    calls::may_call,
    protocol::{Output, ToolChoice},
};
use warmset_grammar::{Grammar, GrammarError, Vocabulary};

/// The longest text that is looked for.
const BYTES_MAX: usize = 16 << 10;
/// The token that ends a text; those below it are bytes.
const END: u32 = 256;
/// What closes comes first, so that texts stay short; then what opens.
const PREFERRED: &[u8] = b"\"}]0t{[<";

/// The text, cut into pieces that count as tokens, or none where the text is free: functions are called only where
/// they must be.
pub(super) fn pieces(output: &Output) -> Result<Option<Vec<String>>, GrammarError> {
    let grammar = match (&output.format, &output.tools) {
        (Some(format), _) => warmset_grammar::format(format)?,
        (None, Some(tools)) if may_call(Some(tools)) && tools.choice != ToolChoice::Auto => {
            warmset_grammar::calls(tools)?
        }
        _ => return Ok(None),
    };
    let text = shortest(&grammar)?;
    Ok(Some(text.split_inclusive([' ', ',', '\n']).map(str::to_owned).collect()))
}

fn shortest(grammar: &Grammar) -> Result<String, GrammarError> {
    // 0xff is in no text and would mark a special token.
    let mut tokens: Vec<Vec<u8>> = (0..0xff).map(|byte| vec![byte]).collect();
    tokens.extend([Vec::new(), Vec::new()]);
    let mut constraint = Vocabulary::new(&tokens, &[END])?.constrain(grammar)?;
    let mut text = Vec::new();
    while !constraint.is_complete() && text.len() < BYTES_MAX {
        constraint.look()?;
        if constraint.allows(END as usize) {
            break;
        }
        let preferred = PREFERRED.iter().copied().chain(0..0xff).find(|byte| constraint.allows((*byte).into()));
        let Some(byte) = preferred else { break };
        constraint.take(byte.into())?;
        text.push(byte);
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}
