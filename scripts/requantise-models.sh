#!/usr/bin/env bash
# Makes variants of SmolLM2 in other weight formats with llama.cpp's own quantiser: distinct real files of 88 to 270 MB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base=build/models/SmolLM2-135M-Instruct
for type in Q4_0 Q8_0 F16; do
    file=$base.$type.gguf
    [ -f "$file" ] && continue
    # The whole workspace is named so that dependencies resolve to the features that everything else is built with.
    cargo build -q --release --locked --workspace --example requantise
    echo "making $file" >&2
    target/release/examples/requantise "$base.Q4_1.gguf" "$file.part" "$type" >&2
    mv -f "$file.part" "$file"
done
