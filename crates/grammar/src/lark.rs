//! GBNF's rules in llguidance's notation. What it calls terminals are regular expressions, of which each takes as much
//! as it can; so rules that come back to themselves are written character by character, and mean what they say.

use crate::gbnf::{Expression, Rules};
use std::fmt::Write;

/// The grammar as one regular expression, if no rule comes back to itself.
pub(crate) fn terminals(rules: &Rules) -> Option<String> {
    let order = order(rules)?;
    let mut text = format!("start: T{}\n", rules.root);
    for index in order {
        let _ = write!(text, "T{index}: ");
        write(&rules.bodies[index], 'T', &mut text);
        text.push('\n');
    }
    Some(text)
}

/// The grammar as rules.
pub(crate) fn rules(rules: &Rules) -> String {
    let mut text = format!("start: r{}\n", rules.root);
    for (index, body) in rules.bodies.iter().enumerate() {
        let _ = write!(text, "r{index}: ");
        write(body, 'r', &mut text);
        text.push('\n');
    }
    text
}

/// Rules after those they use; none if that has no end.
fn order(rules: &Rules) -> Option<Vec<usize>> {
    let (mut order, mut state) = (Vec::new(), vec![0u8; rules.bodies.len()]);
    // A stack of its own: chains of rules may be long.
    let mut stack = vec![(rules.root, false)];
    while let Some((index, left)) = stack.pop() {
        if left {
            state[index] = 2;
            order.push(index);
            continue;
        }
        match state[index] {
            0 => state[index] = 1,
            1 => return None,
            _ => continue,
        }
        stack.push((index, true));
        let mut used = Vec::new();
        collect(&rules.bodies[index], &mut used);
        for next in used {
            match state[next] {
                0 => stack.push((next, false)),
                1 => return None,
                _ => {}
            }
        }
    }
    Some(order)
}

fn collect(expression: &Expression, used: &mut Vec<usize>) {
    match expression {
        Expression::Sequence(parts) | Expression::Choice(parts) => parts.iter().for_each(|part| collect(part, used)),
        Expression::Rule(index) => used.push(*index),
        Expression::Repeat { what, .. } => collect(what, used),
        Expression::Character { .. } => {}
    }
    used.sort_unstable();
    used.dedup();
}

fn write(expression: &Expression, prefix: char, text: &mut String) {
    match expression {
        Expression::Sequence(parts) if parts.is_empty() => text.push_str("\"\""),
        Expression::Sequence(parts) => separated(parts, " ", prefix, text),
        Expression::Choice(parts) => separated(parts, " | ", prefix, text),
        Expression::Rule(index) => {
            let _ = write!(text, "{prefix}{index}");
        }
        Expression::Repeat { what, least, most } => {
            text.push('(');
            write(what, prefix, text);
            text.push(')');
            match (least, most) {
                (0, None) => text.push('*'),
                (1, None) => text.push('+'),
                (0, Some(1)) => text.push('?'),
                (least, None) => {
                    let _ = write!(text, "{{{least},}}");
                }
                (least, Some(most)) => {
                    let _ = write!(text, "{{{least},{most}}}");
                }
            }
        }
        Expression::Character { ranges, negated } => {
            text.push_str(match (negated, ranges.is_empty()) {
                (true, true) => "/[\\x{0}-\\x{10FFFF}",
                (true, false) => "/[^",
                (false, _) => "/[",
            });
            for (from, to) in ranges {
                let _ = write!(text, "\\x{{{from:X}}}-\\x{{{to:X}}}");
            }
            text.push_str("]/");
        }
    }
}

fn separated(parts: &[Expression], separator: &str, prefix: char, text: &mut String) {
    text.push('(');
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            text.push_str(separator);
        }
        write(part, prefix, text);
    }
    text.push(')');
}
