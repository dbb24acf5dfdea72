//! Sources of every kind, taken apart or refused.

use super::*;
use proptest::prelude::*;

fn file(path: &str) -> Result<Location, SourceError> {
    Ok(Location::File(PathBuf::from(path)))
}

#[test]
fn paths_and_file_urls_are_understood() {
    for (text, path) in [
        ("model.gguf", "model.gguf"),
        ("/a b/%41.gguf", "/a b/%41.gguf"),
        ("c:/x", "c:/x"),
        ("file:///a/b.gguf", "/a/b.gguf"),
        ("FILE://localhost/a%20b/%41.gguf", "/a b/A.gguf"),
        ("file:///%C3%A4", "/ä"),
    ] {
        assert_eq!(Location::parse(text), file(path), "{text}");
    }
}

#[test]
fn urls_of_each_kind_are_understood() {
    for (text, shown, name) in [
        ("https://h.example/a/b%20c.gguf?token=secret", "https://h.example/a/b%20c.gguf", "b c.gguf"),
        ("hf://org/repo/dir/f.gguf", "hf://org/repo/dir/f.gguf@main", "f.gguf"),
        ("hf://org/repo/f.gguf@v1.0", "hf://org/repo/f.gguf@v1.0", "f.gguf"),
        ("hf://org/repo@refs/f.gguf", "hf://org/repo/f.gguf@refs", "f.gguf"),
        ("hf://org/repo/f.gguf@refs/pr/1", "hf://org/repo/f.gguf@refs/pr/1", "f.gguf"),
        ("s3://bucket/a/b c.gguf", "s3://bucket/a/b c.gguf", "b c.gguf"),
        ("ollama://llama3", "ollama://llama3:latest", "llama3.gguf"),
        ("ollama://me/llama3:8b-q4", "ollama://me/llama3:8b-q4", "llama3.gguf"),
        ("ollama://hf.co/me/llama3:8b", "ollama://hf.co/me/llama3:8b", "llama3.gguf"),
        ("ollama://localhost:5000/me/llama3", "ollama://localhost:5000/me/llama3:latest", "llama3.gguf"),
    ] {
        let location = Location::parse(text).unwrap();
        assert_eq!((location.to_string().as_str(), location.file_name().as_str()), (shown, name), "{text}");
    }
}

#[test]
fn everything_else_is_refused_with_its_reason() {
    assert_eq!(Location::parse(""), Err(SourceError::Empty));
    assert_eq!(Location::parse(&"a".repeat(SOURCE_BYTES_MAX + 1)), Err(SourceError::TooLong));
    assert_eq!(Location::parse("ftp://x/y"), Err(SourceError::Scheme { scheme: "ftp".into() }));
    assert_eq!(Location::parse("HTTP://x/y"), Err(SourceError::Unencrypted));
    assert_eq!(Location::parse("file://other/a"), Err(SourceError::Host { host: "other".into() }));
    let malformed = [
        "file://",
        "file://a",
        "file:///a%2",
        "file:///a%zz",
        "file:///a?b",
        "file:///a#b",
        "file:///a%00",
        "a\0b",
        "https://",
        "https://h",
        "https://h/a/",
        "https://u:p@h/a.gguf",
        "https://u@h/a.gguf",
        "https://h/a#b",
        "https://h h/a",
        "hf://",
        "hf://a",
        "hf://a/b",
        "hf://a/b/",
        "hf:///b/c",
        "hf://a/../c",
        "hf://a/b/../c",
        "hf://a/b//c",
        "hf://a/b/c@",
        "hf://a/b@1/c@2",
        "hf://a/b/c@../x",
        "hf://a b/c/d",
        "s3://",
        "s3://b",
        "s3://b/",
        "s3:///k",
        "s3://b/a//b",
        "s3://b/../k",
        "s3://b c/k",
        "ollama://",
        "ollama://a/b/c/d",
        "ollama://../x",
        "ollama://a/.b",
        "ollama://a:",
        "ollama://a:b/c:d:e",
    ];
    for bad in malformed {
        assert!(matches!(Location::parse(bad), Err(SourceError::Malformed { .. })), "{bad}");
    }
}

#[test]
fn parts_of_a_split_model_are_found_by_their_names() {
    for prefix in ["/m/", "https://h.example/m/", "hf://o/r/m/", "s3://b/m/"] {
        let first = Location::parse(&format!("{prefix}x-00001-of-00002.gguf")).unwrap();
        let parts = first.parts().unwrap();
        assert_eq!(parts.len(), 2);
        assert_eq!(parts[0], first);
        assert_eq!(parts[1], Location::parse(&format!("{prefix}x-00002-of-00002.gguf")).unwrap());
        let later = Location::parse(&format!("{prefix}x-00002-of-00002.gguf")).unwrap().parts();
        assert!(matches!(later, Err(SourceError::NotFirstPart { .. })));
        let many = Location::parse(&format!("{prefix}x-00001-of-99999.gguf")).unwrap().parts();
        assert!(matches!(many, Err(SourceError::TooManyParts { .. })));
        for plain in ["x.gguf", "x-1-of-2.gguf", "x-00001-of-00000.gguf", "-of-.gguf"] {
            let whole = Location::parse(&format!("{prefix}{plain}")).unwrap();
            assert_eq!(whole.parts(), Ok(vec![whole]));
        }
    }
    // What gives access to the first part gives access to the others.
    let signed = Location::parse("https://h.example/x-00001-of-00002.gguf?key=1").unwrap().parts().unwrap();
    assert!(matches!(&signed[1], Location::Https(url) if url.query() == Some("key=1")));
}

proptest! {
    #[test]
    fn an_encoded_path_comes_back(path in "/[^\0]{0,60}") {
        let encoded: String = path.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let url = format!("file:///{}", encoded.trim_start_matches("%2F"));
        let expected = format!("/{}", path.trim_start_matches('/'));
        prop_assert_eq!(Location::parse(&url), file(&expected));
    }

    #[test]
    fn any_text_is_taken_or_refused_without_a_panic(scheme in "(|file|https|hf|s3|ollama|x)(://)?", text in "[ -~äß\0]{0,80}") {
        if let Ok(location) = Location::parse(&format!("{scheme}{text}")) {
            // What is shown names the same thing, and no part of it leads elsewhere.
            let shown = location.to_string();
            if !matches!(location, Location::File(_)) {
                let again = Location::parse(&shown).unwrap();
                prop_assert_eq!(again.to_string(), shown);
                prop_assert!(!location.file_name().contains('/'));
            }
            let _ = location.parts();
        }
    }
}
