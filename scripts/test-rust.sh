#!/usr/bin/env bash
# The tests of the crates: with cargo-nextest where it is installed, else with cargo's own runner; then the examples in
# the documentation. One profile for everything, so that llama.cpp is compiled once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The same tree has the same verdict: generated inputs are drawn from this seed. Another one, or none, finds other inputs.
export PROPTEST_RNG_SEED="${PROPTEST_RNG_SEED:-1}"
echo "seed of generated inputs: $PROPTEST_RNG_SEED (set PROPTEST_RNG_SEED for others)" >&2

if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --release --locked --workspace
else
    cargo test --release --locked --workspace --lib --bins --tests
fi
cargo test --release --locked --workspace --doc
