//! What the manifests must keep: which crate may use which, exact pins, and a core without the standard library.

use crate::{assert_none, root};
use serde_json::Value;
use std::{collections::BTreeMap, fs, process::Command};

/// Which crates of the workspace each one may use. Adapters never use each other; only the binary sees everything.
const ARROWS: &[(&str, &[&str])] = &[
    ("warmset-core", &[]),
    ("warmset-planner", &["warmset-core"]),
    ("warmset-grammar", &["warmset-core"]),
    ("warmset-engine", &["warmset-core", "warmset-grammar"]),
    ("warmset-store", &["warmset-core"]),
    ("warmset-source", &["warmset-core", "warmset-store"]),
    ("warmset-catalog", &["warmset-core"]),
    ("warmset-gateway", &["warmset-core", "warmset-grammar"]),
    ("warmset-worker", &["warmset-core", "warmset-engine", "warmset-store"]),
    (
        "warmset",
        &[
            "warmset-core",
            "warmset-planner",
            "warmset-engine",
            "warmset-store",
            "warmset-source",
            "warmset-catalog",
            "warmset-gateway",
            "warmset-worker",
        ],
    ),
];

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn crates_use_only_what_their_place_allows() {
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let mut faults = Vec::new();
    let metadata = metadata();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let Some(arrows) = allowed.get(name) else {
            faults.push(format!("{name} has no place in the arrows: give the new crate a reason and a line"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let used = dependency["name"].as_str().unwrap();
            if allowed.contains_key(used) && !arrows.contains(&used) {
                faults.push(format!("{name} must not use {used}"));
            }
        }
    }
    assert_none(faults);
}

fn manifest(path: &str) -> toml::Table {
    fs::read_to_string(root().join(path)).unwrap().parse().unwrap()
}

#[test]
fn every_dependency_is_pinned_exactly_in_one_place() {
    let workspace = manifest("Cargo.toml");
    let mut faults = Vec::new();
    for (name, entry) in workspace["workspace"]["dependencies"].as_table().unwrap() {
        let version = entry.as_str().or_else(|| entry.get("version")?.as_str());
        let exact = version.is_some_and(|version| version.starts_with('='));
        if !exact && entry.get("path").is_none() {
            faults.push(format!("{name} has no exact version"));
        }
    }
    for member in fs::read_dir(root().join("crates")).unwrap() {
        let member = member.unwrap().file_name().to_string_lossy().into_owned();
        let crate_manifest = manifest(&format!("crates/{member}/Cargo.toml"));
        for table in ["dependencies", "dev-dependencies", "build-dependencies"] {
            for (name, entry) in crate_manifest.get(table).and_then(|table| table.as_table()).into_iter().flatten() {
                if entry.get("workspace").and_then(toml::Value::as_bool) != Some(true) {
                    faults.push(format!("crates/{member}: {name} does not say `workspace = true`"));
                }
            }
        }
    }
    assert_none(faults);
}

#[test]
fn the_core_knows_no_standard_library() {
    let library = fs::read_to_string(root().join("crates/core/src/lib.rs")).unwrap();
    let declared = library.contains("#![no_std]") || library.contains("#![cfg_attr(not(test), no_std)]");
    assert!(declared, "crates/core/src/lib.rs is not no_std");
    let core = manifest("crates/core/Cargo.toml");
    for (name, _) in core["dependencies"].as_table().unwrap() {
        let known = ["hashbrown", "libm", "serde", "sha2", "twox-hash"].contains(&name.as_str());
        assert!(known, "core depends on {name}: does it know a clock, a file, a thread or a random source?");
    }
}
