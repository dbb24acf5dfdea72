#!/usr/bin/env bash
# What bench/kv_blocks.py needs: the store's own example, bench/blocks (the foyer crate), and LMCache as it is published, in an
# environment of its own. LMCache needs torch, 6 GB in all; without room for it, or with LMCACHE=no, it is left out and the
# benchmark says so. No part of the product.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

place=build/bench
needed_kilobytes=$((12 << 20))
cargo build -q --release --locked -p warmset-store --example segments_speed --example kv_lookup
cargo build -q --release --locked --manifest-path bench/blocks/Cargo.toml --target-dir "$place/blocks-target"
[ "${LMCACHE:-}" = no ] || [ -x "$place/lmcache/bin/lmcache" ] && exit 0
if [ "$(df --output=avail "$place" | tail -1)" -lt "$needed_kilobytes" ]; then
    echo "warmset: there is no room for LMCache, so it is left out" >&2
    exit 0
fi
python3 -m venv "$place/lmcache"
"$place/lmcache/bin/pip" install -q --disable-pip-version-check --no-cache-dir torch==2.15.0 lmcache==0.5.6
