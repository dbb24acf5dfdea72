//! What the documents must keep: the changelog's form, and links that lead somewhere.

use crate::{assert_none, files_below, root};
use std::fs;

const CHANGE_KINDS: [&str; 6] = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"];

#[test]
fn the_changelog_keeps_its_form() {
    let text = fs::read_to_string(root().join("CHANGELOG.md")).unwrap();
    let mut faults = Vec::new();
    let mut sections = 0;
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        if let Some(kind) = line.strip_prefix("### ") {
            if !CHANGE_KINDS.contains(&kind) {
                faults.push(format!("line {line_number}: `{kind}` is none of {}", CHANGE_KINDS.join(", ")));
            }
        } else if let Some(section) = line.strip_prefix("## ") {
            sections += 1;
            let right = if sections == 1 { section == "[Unreleased]" } else { is_release(section) };
            if !right {
                faults.push(format!("line {line_number}: `{section}`: first [Unreleased], then [1.2.3] - 2026-01-31"));
            }
        }
    }
    assert!(text.starts_with("# Changelog\n"), "CHANGELOG.md does not start with its title");
    assert!(sections > 0, "CHANGELOG.md has no section");
    assert_none(faults);
}

fn is_release(section: &str) -> bool {
    let Some((version, date)) = section.split_once(" - ") else { return false };
    let numbers = version.trim_start_matches('[').trim_end_matches(']');
    let digits_only = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    version == format!("[{numbers}]")
        && numbers.split('.').count() == 3
        && numbers.split('.').all(digits_only)
        && date.split('-').map(str::len).eq([4, 2, 2])
        && date.split('-').all(digits_only)
}

#[test]
fn links_between_documents_lead_somewhere() {
    let root = root();
    let mut faults = Vec::new();
    let mut pages = files_below(&root.join("docs"), "md");
    for entry in fs::read_dir(&root).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for target in link_targets(&text) {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            if !page.parent().unwrap().join(file).exists() {
                faults.push(format!("{}: no such file: {target}", page.strip_prefix(&root).unwrap().display()));
            }
        }
    }
    assert_none(faults);
}

fn link_targets(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).filter(|target| !target.contains(' '))
}

#[test]
fn the_readme_begins_with_the_two_commands() {
    let text = fs::read_to_string(root().join("README.md")).unwrap();
    let top: Vec<&str> = text.lines().take(20).collect();
    for command in ["make demo", "make test"] {
        assert!(top.iter().any(|line| line.contains(command)), "`{command}` is not at the top of README.md");
    }
}
