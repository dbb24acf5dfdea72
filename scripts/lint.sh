#!/usr/bin/env bash
# Formatting, clippy with the ban lists (in the profile of the build, so that llama.cpp is not compiled again), licences,
# sources and duplicate versions of dependencies, and the syntax of scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cargo_deny_version=0.20.2

scripts/install-deps.sh
cargo fmt --all --check
cargo clippy --release --locked --workspace --all-targets -- -D warnings

cargo_deny=$(command -v cargo-deny || echo build/tools/bin/cargo-deny)
if [ "$("$cargo_deny" --version 2>/dev/null)" != "cargo-deny $cargo_deny_version" ]; then
    echo "compiling cargo-deny $cargo_deny_version into build/tools" >&2
    # Unoptimised: it runs for a second or two, compiling it well would take minutes.
    cargo install --quiet --locked --debug --no-default-features --root build/tools --target-dir build/tools/target \
        --version "$cargo_deny_version" cargo-deny
    rm -rf build/tools/target
    cargo_deny=build/tools/bin/cargo-deny
fi
# It looks at the dependencies of every platform; a build fetches its own only.
cargo fetch --quiet --locked
"$cargo_deny" --offline --locked check bans licenses sources

while IFS= read -r script; do bash -n "$script"; done < <(git ls-files '*.sh' .ci/run)
python_files=$(git ls-files '*.py')
[ -z "$python_files" ] || build/venv/bin/python -m compileall -q $python_files
