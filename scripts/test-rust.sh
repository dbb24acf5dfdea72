#!/usr/bin/env bash
# The tests of the crates: with cargo-nextest where it is installed, else with cargo's own runner; then the examples in
# the documentation. One profile for everything, so that llama.cpp is compiled once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --release --locked --workspace
else
    cargo test --release --locked --workspace --lib --bins --tests
fi
cargo test --release --locked --workspace --doc
