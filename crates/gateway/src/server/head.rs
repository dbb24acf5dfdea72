//! Strict reading of a request's head before any parser sees it: what two parsers could read differently is refused.

/// How the body that follows a head is delimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// So many bytes.
    Length(u64),
    /// Chunks, up to the last one.
    Chunked,
}

/// Why a head is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadError {
    /// It is malformed or ambiguous.
    Malformed(&'static str),
    /// It has too many header fields or too many bytes.
    TooLarge,
}

use HeadError::{Malformed, TooLarge};

/// Looks for the end of a head in `bytes`, of which the first `scanned` were looked at before. A line feed without
/// its carriage return is refused at once.
pub(super) fn find_end(bytes: &[u8], scanned: usize) -> Result<Option<usize>, HeadError> {
    for index in scanned..bytes.len() {
        if bytes[index] != b'\n' {
            continue;
        }
        if index == 0 || bytes[index - 1] != b'\r' {
            return Err(Malformed("a line ends without a carriage return"));
        }
        if index >= 3 && bytes[index - 3..index - 1] == *b"\r\n" {
            return Ok(Some(index + 1));
        }
    }
    Ok(None)
}

/// Checks a whole head, its last empty line included.
pub(super) fn inspect(head: &[u8], headers_max: usize) -> Result<Framing, HeadError> {
    let head = head.strip_suffix(b"\r\n\r\n").ok_or(Malformed("the head has no end"))?;
    let mut lines = head.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let old = request_line(lines.next().unwrap_or_default())?;
    let (mut headers, mut hosts) = (0, 0);
    let (mut length, mut chunked) = (None, false);
    for line in lines {
        headers += 1;
        if headers > headers_max {
            return Err(TooLarge);
        }
        let (name, value) = field(line)?;
        if name.eq_ignore_ascii_case(b"host") {
            hosts += 1;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            if length.is_some() {
                return Err(Malformed("more than one content-length"));
            }
            length = Some(content_length(value)?);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if chunked || old || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(Malformed("a transfer-encoding other than one \"chunked\""));
            }
            chunked = true;
        }
    }
    match (length, chunked) {
        _ if hosts > 1 || (hosts == 0 && !old) => Err(Malformed("not exactly one host")),
        (Some(_), true) => Err(Malformed("both content-length and transfer-encoding")),
        (length, false) => Ok(Framing::Length(length.unwrap_or(0))),
        (None, true) => Ok(Framing::Chunked),
    }
}

/// Checks the first line; true for HTTP/1.0.
fn request_line(line: &[u8]) -> Result<bool, HeadError> {
    let mut words = line.split(|byte| *byte == b' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let method_ok = method.is_some_and(|method| !method.is_empty() && method.iter().all(|byte| is_token(*byte)));
    let target_ok = target.is_some_and(|target| !target.is_empty() && target.iter().all(u8::is_ascii_graphic));
    match version {
        Some(b"HTTP/1.1") if method_ok && target_ok && words.next().is_none() => Ok(false),
        Some(b"HTTP/1.0") if method_ok && target_ok && words.next().is_none() => Ok(true),
        _ => Err(Malformed("the request line is not \"METHOD target HTTP/1.1\"")),
    }
}

/// Splits a header line into its name and its trimmed value.
fn field(line: &[u8]) -> Result<(&[u8], &[u8]), HeadError> {
    if line.first().is_some_and(|byte| matches!(byte, b' ' | b'\t')) {
        return Err(Malformed("a folded header line"));
    }
    let colon = line.iter().position(|byte| *byte == b':').ok_or(Malformed("a header line without a colon"))?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) {
        return Err(Malformed("a header name with characters it may not have"));
    }
    if value.iter().any(|byte| (*byte < b' ' && *byte != b'\t') || *byte == 0x7f) {
        return Err(Malformed("a header value with control characters"));
    }
    Ok((name, value.trim_ascii()))
}

fn content_length(value: &[u8]) -> Result<u64, HeadError> {
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(value).ok().filter(|_| digits).and_then(|text| text.parse().ok());
    number.ok_or(Malformed("a content-length that is no number of bytes"))
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(head: &str) -> Result<Framing, HeadError> {
        match find_end(head.as_bytes(), 0)? {
            Some(end) => inspect(&head.as_bytes()[..end], 64),
            None => panic!("no end in {head:?}"),
        }
    }

    #[test]
    fn plain_heads_are_understood() {
        assert_eq!(read("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), Ok(Framing::Length(0)));
        assert_eq!(read("GET / HTTP/1.0\r\n\r\n"), Ok(Framing::Length(0)));
        assert_eq!(read("POST /x HTTP/1.1\r\nhost:a\r\ncontent-length: 12 \r\n\r\nbody"), Ok(Framing::Length(12)));
        assert_eq!(read("POST /x HTTP/1.1\r\nhost:a\r\nTransfer-Encoding: Chunked\r\n\r\n"), Ok(Framing::Chunked));
    }

    #[test]
    fn what_parsers_read_differently_is_refused() {
        let fields = [
            "content-length: 3\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: chunked\r\ncontent-length: 3\r\n",
            "content-length: 3\r\ncontent-length: 4\r\n",
            "content-length: 3\r\ncontent-length: 3\r\n",
            "content-length: 3, 3\r\n",
            "content-length: +3\r\n",
            "content-length: 0x3\r\n",
            "content-length: -1\r\n",
            "content-length: 99999999999999999999\r\n",
            "content-length:\r\n",
            "content-length : 3\r\n",
            "transfer-encoding: gzip, chunked\r\n",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: identity\r\n",
            "x: a\r\n b\r\n",
            "x: a\r\n\tb\r\n",
            "x: a\nb: c\r\n",
            "x: a\rb: c\r\n",
            "x: a\0b\r\n",
            "x\r\n",
            ": x\r\n",
            "host: b\r\n",
        ];
        for field in fields {
            let head = format!("POST / HTTP/1.1\r\nhost: a\r\n{field}\r\n");
            assert!(matches!(read(&head), Err(Malformed(_))), "{field:?}");
        }
        for line in
            ["GET / HTTP/1.1 x", "GET  / HTTP/1.1", "GET /", "GET / HTTP/2.0", "PRI * HTTP/2.0", "G\tT / HTTP/1.1"]
        {
            assert!(matches!(read(&format!("{line}\r\nhost: a\r\n\r\n")), Err(Malformed(_))), "{line:?}");
        }
        assert!(matches!(read("GET / HTTP/1.1\r\n\r\n"), Err(Malformed(_))), "no host");
        let old = "POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n";
        assert!(matches!(read(old), Err(Malformed(_))));
    }

    #[test]
    fn the_number_of_headers_is_bounded() {
        let head = |count| format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", "x: y\r\n".repeat(count));
        assert_eq!(read(&head(63)), Ok(Framing::Length(0)));
        assert_eq!(read(&head(64)), Err(TooLarge));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic_and_the_same_in_pieces(
            bytes in prop::collection::vec(prop::sample::select(b"\r\n :aGET/HTTP1.0\0x".to_vec()), 0..200),
            cut in 0..200_usize,
        ) {
            let whole = find_end(&bytes, 0);
            if let Ok(Some(end)) = whole {
                let _ = inspect(&bytes[..end], 64);
            }
            let cut = cut.min(bytes.len());
            let pieces = match find_end(&bytes[..cut], 0) {
                Ok(None) => find_end(&bytes, cut),
                found => found,
            };
            prop_assert_eq!(whole, pieces);
        }
    }
}
