#!/usr/bin/env bash
# What bench/sim_speed.py needs: the planner's own example, and the simulators of others as they are published on PyPI, each in an
# environment of its own. No part of the product.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

place=build/bench/simulators
mkdir -p "$place"
install() {
    local name=$1 program=$2
    shift 2
    [ -x "$place/$name/bin/$program" ] && return
    python3 -m venv "$place/$name"
    "$place/$name/bin/pip" install -q --disable-pip-version-check "$@"
}
install vllm-sr-sim vllm-sr-sim vllm-sr-sim==0.1.0.dev20260713123629
# The stable release is an empty one that wants another index; the nightly one is whole.
install aisimulate aisimulate --only-binary :all: aisimulate==0.13.0.dev202610270000000085
cargo build -q --release --locked -p warmset-planner --example sim_speed
