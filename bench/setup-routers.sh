#!/usr/bin/env bash
# What the router's benchmarks need: the routers of others as they are published (three from PyPI, each in an environment of
# its own, and HAProxy, which Debian packages: `apt-get install haproxy`), and bench/router. No part of the product.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

place=build/bench/routers
mkdir -p "$place"
install() {
    local name=$1 package=$2 program=$3
    [ -x "$place/$name/bin/$program" ] && return
    python3 -m venv "$place/$name"
    "$place/$name/bin/pip" install -q --disable-pip-version-check "$package"
}
install sglang sglang-router==0.3.2 sglang-router
install smg smg==1.13.0 smg
install vllm vllm-router==0.1.17 vllm-router
command -v haproxy >/dev/null || echo "warmset: haproxy is not installed, so it is left out" >&2
cargo build -q --release --locked --manifest-path bench/router/Cargo.toml --target-dir build/bench/router-target
