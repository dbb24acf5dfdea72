//! What a runtime's command and environment may leave open: `${PORT}` and the like, filled in when it starts.

use std::collections::BTreeMap;

/// What there is to fill in, and what it means.
pub const VARIABLES: [(&str, &str); 9] = [
    ("PORT", "the port of 127.0.0.1 that the server must listen on"),
    ("HOST", "127.0.0.1"),
    ("MODEL", "the path of the model's file, or what follows command: in its source"),
    ("NAME", "the model's name in the catalog"),
    ("CONTEXT_TOKENS", "the model's context_tokens: per sequence, 0 if none were given"),
    ("TOTAL_CONTEXT_TOKENS", "context_tokens times parallel"),
    ("PARALLEL", "the model's parallel: sequences at once"),
    ("THREADS", "the threads that were free when it started"),
    ("DEVICES", "the accelerators it may use, as in CUDA_VISIBLE_DEVICES"),
];

/// A piece of a text.
#[derive(Debug, PartialEq, Eq)]
enum Piece<'a> {
    Text(&'a str),
    Variable(&'a str),
}

/// Takes a text apart. `$${` stands for `${` itself.
fn pieces(text: &str) -> Result<Vec<Piece<'_>>, String> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if let Some(before) = rest[..at].strip_suffix('$') {
            found.push(Piece::Text(before));
            found.push(Piece::Text("${"));
            rest = &rest[at + 2..];
            continue;
        }
        found.push(Piece::Text(&rest[..at]));
        let (name, after) = rest[at + 2..].split_once('}').ok_or_else(|| format!("{text:?} has ${{ without }}"))?;
        if !VARIABLES.iter().any(|(known, _)| *known == name) {
            let known: Vec<&str> = VARIABLES.iter().map(|(name, _)| *name).collect();
            return Err(format!("there is no variable ${{{name}}}: there are {}", known.join(", ")));
        }
        found.push(Piece::Variable(name));
        rest = after;
    }
    found.push(Piece::Text(rest));
    Ok(found)
}

/// The variables that a text names. An error says what is wrong with it.
pub fn named(text: &str) -> Result<Vec<&str>, String> {
    let names = pieces(text)?.into_iter().filter_map(|piece| match piece {
        Piece::Variable(name) => Some(name),
        Piece::Text(_) => None,
    });
    Ok(names.collect())
}

/// The text with every variable filled in.
pub(super) fn fill(text: &str, values: &BTreeMap<&str, String>) -> Result<String, String> {
    let mut filled = String::new();
    for piece in pieces(text)? {
        filled.push_str(match piece {
            Piece::Text(text) => text,
            Piece::Variable(name) => values.get(name).map_or("", String::as_str),
        });
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_filled_in_and_dollars_stay() {
        let values = BTreeMap::from([("PORT", "1".to_owned()), ("MODEL", "a b".to_owned())]);
        let filled = |text| fill(text, &values);
        assert_eq!(filled("--port=${PORT}${MODEL}"), Ok("--port=1a b".into()));
        assert_eq!(filled("$PORT $${PORT} $$"), Ok("$PORT ${PORT} $$".into()));
        assert_eq!(filled(""), Ok(String::new()));
        assert!(filled("${PROT}").unwrap_err().contains("no variable ${PROT}: there are PORT, "));
        assert!(filled("${PORT").unwrap_err().contains("without }"));
        assert_eq!(named("${PORT}:${HOST}"), Ok(vec!["PORT", "HOST"]));
    }
}
