//! What the library says about a grammar, in the words of whoever wrote the schema.

/// The longest piece of a caller's pattern in a message.
const PATTERN_CHARACTERS_MAX: usize = 60;

/// What the library says when it means something else, and what to do about it.
const SAID: [(&str, &str); 6] = [
    (
        "NoExtensionBias",
        "no text fits it: a part of it refers to itself and has no way to end; give it one, as another choice (anyOf) \
         or a property that is not required",
    ),
    ("attempt to ", BOUNDS),
    ("Failed to generate regex for ", BOUNDS),
    (
        "without 'referencing' feature",
        "a $ref must begin with #/ and name a place in the same schema: copy what it refers to into $defs",
    ),
    ("invalid multiple of", "multipleOf must be a number above 0"),
    (
        "lookarounds not supported",
        "a pattern looks around itself (\\b, or ^ and $ in its middle): that is not supported; leave it out",
    ),
];
const BOUNDS: &str = "a number has a bound (minimum, maximum, exclusiveMinimum, exclusiveMaximum) that cannot be kept \
                      to: bounds must lie from -10^18 to 10^18; leave out one that is not needed";

/// One line about what is wrong with a grammar.
pub(crate) fn of(said: &str) -> String {
    if let Some((_, words)) = SAID.iter().find(|(library, _)| said.contains(library)) {
        return (*words).to_owned();
    }
    pattern(said).unwrap_or_else(|| said.lines().next().unwrap_or_default().trim_start_matches("panic: ").to_owned())
}

/// The message about a regular expression has the expression in its second line and the reason in its last.
fn pattern(said: &str) -> Option<String> {
    let (_, report) = said.split_once("regex parse error:\n")?;
    let reason = report.lines().find_map(|line| line.trim().strip_prefix("error: "))?;
    let shown: String = report.lines().next()?.trim().chars().take(PATTERN_CHARACTERS_MAX).collect();
    Some(format!("a pattern or a length in it makes no regular expression ({reason}): {shown}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_named_with_its_reason_and_the_rest_is_one_line() {
        let report = "regex parse error:\n    (ab\n    ^\nerror: unclosed group";
        assert_eq!(of(report), "a pattern or a length in it makes no regular expression (unclosed group): (ab");
        let long = format!("regex parse error:\n    {}\nerror: too large", "(a".repeat(500));
        assert!(of(&long).len() < 150, "{}", of(&long));
        assert_eq!(of("panic: odd\nmore"), "odd");
    }
}
