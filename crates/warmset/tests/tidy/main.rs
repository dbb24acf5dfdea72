//! The rules that keep the source readable, held from the first commit: sizes, headers, dependency arrows, pins.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod documents;
mod manifests;
mod source;

use source::{blank_comments_and_literals, functions, line_of, words};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A file holds one thing.
const FILE_LINES_MAX: usize = 600;
/// A function fits a screen.
const FUNCTION_LINES_MAX: usize = 70;
/// How far above an `unsafe` its reason may begin.
const SAFETY_COMMENT_LINES_MAX: usize = 12;
/// The one crate, and the one file beside it, that may hold `unsafe` code.
const UNSAFE_PLACES: [&str; 2] = ["crates/engine/", "crates/store/src/arena.rs"];

/// The root of the workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Every file below a folder with one of these endings, sorted, without hidden folders and build outputs.
fn files_below(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" && name != "build" {
                    open.push(path);
                }
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Every Rust file of the workspace as (path from the root, text).
fn rust_files() -> Vec<(String, String)> {
    let root = root();
    let files = files_below(&root.join("crates"), "rs");
    assert!(files.len() > 20, "the crates were not found below {}", root.display());
    files
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
            (name, fs::read_to_string(path).unwrap())
        })
        .collect()
}

/// Fails with every fault at once.
fn assert_none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn files_hold_one_thing() {
    let faults = rust_files()
        .into_iter()
        .map(|(name, text)| (name, text.lines().count()))
        .filter(|(_, lines)| *lines > FILE_LINES_MAX)
        .map(|(name, lines)| format!("{name}: {lines} lines, at most {FILE_LINES_MAX}"))
        .collect();
    assert_none(faults);
}

#[test]
fn functions_fit_a_screen() {
    let mut faults = Vec::new();
    for (name, text) in rust_files() {
        for function in functions(&blank_comments_and_literals(&text)) {
            if function.lines > FUNCTION_LINES_MAX {
                faults.push(format!("{name}:{}: fn {} has {} lines", function.line, function.name, function.lines));
            }
        }
    }
    assert_none(faults);
}

#[test]
fn every_module_says_what_it_is() {
    let faults = rust_files()
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//! "))
        .map(|(name, _)| format!("{name}: does not start with `//! `"))
        .collect();
    assert_none(faults);
}

#[test]
fn no_placeholders_and_no_ignored_tests() {
    let mut faults = Vec::new();
    for (name, text) in rust_files() {
        let code = blank_comments_and_literals(&text);
        for word in ["todo", "unimplemented", "dbg"] {
            for at in words(&code, word) {
                if code[at + word.len()..].starts_with('!') {
                    faults.push(format!("{name}:{}: {word}!", line_of(&code, at)));
                }
            }
        }
        for (at, _) in code.match_indices("#[ignore") {
            faults.push(format!("{name}:{}: an ignored test", line_of(&code, at)));
        }
    }
    assert_none(faults);
}

#[test]
fn unsafe_lives_where_it_must_and_says_why() {
    let mut faults = Vec::new();
    for (name, text) in rust_files() {
        let code = blank_comments_and_literals(&text);
        let lines: Vec<&str> = text.lines().collect();
        for at in words(&code, "unsafe") {
            let line = line_of(&code, at);
            let rest = code[at + "unsafe".len()..].trim_start();
            let needs_reason = rest.starts_with('{') || rest.starts_with("impl");
            let above = &lines[line.saturating_sub(1 + SAFETY_COMMENT_LINES_MAX)..line];
            if !UNSAFE_PLACES.iter().any(|place| name.starts_with(place)) {
                faults.push(format!("{name}:{line}: unsafe outside {UNSAFE_PLACES:?}"));
            } else if needs_reason && !above.iter().any(|line| line.contains("SAFETY:")) {
                faults.push(format!("{name}:{line}: unsafe without a SAFETY comment"));
            }
        }
    }
    assert_none(faults);
}
