//! Rust source as the tidy checks see it: comments and literals blanked out, functions found by their braces.

/// Where a function stands and how long it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) line: usize,
    pub(crate) lines: usize,
}

/// Replaces the inside of comments, strings and character literals by spaces; line breaks stay where they are.
pub(crate) fn blank_comments_and_literals(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_or_comment_end(bytes, at);
        if end > at {
            for byte in &mut code[at..end] {
                if *byte != b'\n' {
                    *byte = b' ';
                }
            }
            at = end;
        } else {
            at += 1;
        }
    }
    String::from_utf8_lossy(&code).into_owned()
}

/// The end of the comment or literal that begins at `at`, or `at` if none does.
fn literal_or_comment_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return at + rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        return block_comment_end(bytes, at);
    }
    let begins_word = at == 0 || !is_word(bytes[at - 1]);
    if begins_word && let Some(end) = raw_string_end(bytes, at) {
        return end;
    }
    match rest[0] {
        b'"' => quoted_end(bytes, at, b'"'),
        b'\'' if is_char_literal(rest) => quoted_end(bytes, at, b'\''),
        _ => at,
    }
}

fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0;
    let mut at = start;
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

/// `r"..."`, `r#"..."#`, `br#"..."#` and so on.
fn raw_string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let mut at = start;
    if matches!(bytes.get(at), Some(b'b' | b'c')) {
        at += 1;
    }
    if bytes.get(at) != Some(&b'r') {
        return None;
    }
    at += 1;
    let hashes = bytes[at..].iter().take_while(|byte| **byte == b'#').count();
    at += hashes;
    if bytes.get(at) != Some(&b'"') {
        return None;
    }
    let mut closing = vec![b'"'];
    closing.resize(1 + hashes, b'#');
    let body = &bytes[at + 1..];
    let length = body.windows(closing.len()).position(|window| window == closing)?;
    Some(at + 1 + length + closing.len())
}

fn quoted_end(bytes: &[u8], start: usize, quote: u8) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Tells `'a'` and `'\n'` from the lifetime `'a`.
fn is_char_literal(rest: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(&rest[..rest.len().min(8)]).or_else(|error| {
        // The window may cut a character in two.
        std::str::from_utf8(&rest[..error.valid_up_to()])
    }) else {
        return false;
    };
    let mut chars = text.chars().skip(1);
    match chars.next() {
        Some('\\') => true,
        Some(_) => chars.next() == Some('\''),
        None => false,
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Every occurrence of a whole word, as byte offsets.
pub(crate) fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let bytes = code.as_bytes();
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = at.checked_sub(1).is_none_or(|previous| !is_word(bytes[previous]));
        let after = bytes.get(at + word.len()).is_none_or(|next| !is_word(*next));
        before && after
    })
}

/// The line, counted from 1, in which a byte lies.
pub(crate) fn line_of(code: &str, at: usize) -> usize {
    code.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// Every function with a body. `code` is free of comments and literals.
pub(crate) fn functions(code: &str) -> Vec<Function> {
    words(code, "fn").filter_map(|at| function_at(code, at)).collect()
}

fn function_at(code: &str, at: usize) -> Option<Function> {
    let after = code[at + 2..].trim_start();
    let name: String = after.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect();
    if name.is_empty() {
        return None; // a function pointer type
    }
    let bytes = code.as_bytes();
    let mut nesting = 0_i32;
    let mut body = at;
    loop {
        match bytes.get(body)? {
            b'(' | b'[' => nesting += 1,
            b')' | b']' => nesting -= 1,
            b';' if nesting == 0 => return None, // a declaration
            b'{' if nesting == 0 => break,
            _ => {}
        }
        body += 1;
    }
    let mut depth = 0;
    let mut end = body;
    loop {
        match bytes.get(end)? {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        end += 1;
    }
    let line = line_of(code, at);
    Some(Function { name, line, lines: line_of(code, end) - line + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_in_comments_strings_and_characters_do_not_count() {
        let source = "fn first() {\n    let a = '{'; // {\n    let b = \"}\\\"{\";\n    let c = r#\"\"{{\"#;\n}\n/* { /* { */ */\nfn second<'a>(x: &'a str) -> [u8; 2] { x; }\n";
        let found = functions(&blank_comments_and_literals(source));
        assert_eq!(
            found,
            [
                Function { name: "first".into(), line: 1, lines: 5 },
                Function { name: "second".into(), line: 7, lines: 1 },
            ]
        );
    }

    #[test]
    fn declarations_and_pointer_types_are_no_functions() {
        let source = "trait T { fn declared(&self, x: [u8; 4]); }\ntype P = fn(u8) -> u8;\n";
        assert_eq!(functions(&blank_comments_and_literals(source)), []);
    }

    #[test]
    fn words_are_whole() {
        assert_eq!(words("unsafe_code unsafe { not_unsafe }", "unsafe").collect::<Vec<_>>(), [12]);
    }
}
