//! What a line may hold. A recording may come from anybody, so before a line is read into memory its lists and texts are
//! counted: none is longer than what a server writes.

/// The most things in one list or map: ten times the models and the requests of the largest servers.
pub const ITEMS_MAX: u32 = 1 << 17;
/// The longest text: names and messages, of which the longest are an engine's last words.
pub const TEXT_BYTES_MAX: usize = 1 << 20;
/// Lists within lists.
pub const DEPTH_MAX: usize = 64;

/// Something that no server writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Excess {
    /// A list or map.
    #[error("a list of more than {ITEMS_MAX} things")]
    Items,
    /// A name or message.
    #[error("a text of more than {TEXT_BYTES_MAX} bytes")]
    Text,
    /// Lists within lists.
    #[error("more than {DEPTH_MAX} lists within each other")]
    Depth,
}

/// Counts what a text of JSON holds, whether or not it is whole.
pub(super) fn check(text: &[u8]) -> Result<(), Excess> {
    let mut open: Vec<u32> = Vec::new();
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => pass_text(&mut bytes)?,
            b'[' | b'{' if open.len() == DEPTH_MAX => return Err(Excess::Depth),
            b'[' | b'{' => open.push(1),
            b']' | b'}' => drop(open.pop()),
            b',' => {
                if let Some(items) = open.last_mut() {
                    *items += 1;
                    if *items > ITEMS_MAX {
                        return Err(Excess::Items);
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Goes on behind the quote that ends a text.
fn pass_text(bytes: &mut std::slice::Iter<'_, u8>) -> Result<(), Excess> {
    let mut length = 0;
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => break,
            b'\\' => drop(bytes.next()),
            _ => {}
        }
        length += 1;
        if length > TEXT_BYTES_MAX {
            return Err(Excess::Text);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_found_wherever_it_stands_and_text_is_no_list() {
        let list = |items: usize| format!("{{\"a\":[{}]}}", vec!["0"; items].join(","));
        assert_eq!(check(list(ITEMS_MAX as usize).as_bytes()), Ok(()));
        assert_eq!(check(list(ITEMS_MAX as usize + 1).as_bytes()), Err(Excess::Items));
        let text = |bytes: usize| format!("[1,\"{}\"]", ",".repeat(bytes));
        assert_eq!(check(text(TEXT_BYTES_MAX).as_bytes()), Ok(()), "commas in a text");
        assert_eq!(check(text(TEXT_BYTES_MAX + 1).as_bytes()), Err(Excess::Text));
        assert_eq!(check(br#"["\"[[[[", {"a,b": "\\"}, [[]]]"#), Ok(()));
        assert_eq!(check("[".repeat(DEPTH_MAX).as_bytes()), Ok(()));
        assert_eq!(check("{[".repeat(DEPTH_MAX).as_bytes()), Err(Excess::Depth));
        for cut in [&b"\""[..], b"\"\\", b"]]]]", b",,,"] {
            assert_eq!(check(cut), Ok(()));
        }
    }
}
