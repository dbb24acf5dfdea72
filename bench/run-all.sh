#!/usr/bin/env bash
# Every benchmark, one after another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for name in decode cold_start overhead interference zipf_router fetch kv_blocks kv_restore kv_conversations kv_useless heartbeats parent_memory azure_replay router_overhead router_affinity sim_speed sim_live sim_judged capacity; do
    echo "bench/run $name" >&2
    bench/run "$name"
done
