#!/usr/bin/env bash
# What the router's benchmarks need: the routers of others as they are published (two from PyPI, each in an environment of
# its own, and HAProxy, which Debian packages: `apt-get install haproxy`), and bench/router. No part of the product.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

place=build/bench/routers
mkdir -p "$place"
install() {
    local name=$1 package=$2
    [ -x "$place/$name/bin/$name-router" ] && return
    python3 -m venv "$place/$name"
    "$place/$name/bin/pip" install -q --disable-pip-version-check "$package"
}
install sglang sglang-router==0.3.2
install vllm vllm-router==0.1.17
command -v haproxy >/dev/null || echo "warmset: haproxy is not installed, so it is left out" >&2
cargo build -q --release --locked --manifest-path bench/router/Cargo.toml --target-dir build/bench/router-target
