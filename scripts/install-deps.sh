#!/usr/bin/env bash
# Installs the system packages that building needs, checks the Rust toolchain and makes build/venv for the tests.
# Does nothing, quickly, when everything is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(build-essential ca-certificates clang cmake curl faketime libclang-dev python3 python3-venv unzip)
rust_minimum=1.95.0

fail() {
    printf 'warmset: %s\n' "$1" >&2
    exit 1
}

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || fail "these are missing, and this is no Debian or Ubuntu: ${missing[*]}. Install them and try again."
    as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "run as root, or install first: ${missing[*]}"
        as_root=(sudo)
    fi
    echo "installing ${missing[*]}" >&2
    "${as_root[@]}" apt-get update -q </dev/null
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" </dev/null
fi

command -v cargo >/dev/null || fail "cargo is missing. Install Rust $rust_minimum or newer (https://rustup.rs), then try again."
rust_version=$(rustc --version | cut -d' ' -f2 | cut -d- -f1)
oldest=$(printf '%s\n%s\n' "$rust_minimum" "$rust_version" | sort -V | head -n 1)
[ "$oldest" = "$rust_minimum" ] || fail "Rust $rust_version is too old; $rust_minimum or newer is needed: rustup update stable"

# The stamp holds the list that was installed, so that a changed pin installs again.
make_environment() {
    local environment=$1 requirements=$2 stamp=$1/requirements.installed
    if ! cmp -s "$requirements" "$stamp"; then
        echo "making $environment" >&2
        mkdir -p build
        [ -x "$environment/bin/python" ] || python3 -m venv "$environment"
        "$environment/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements"
        cp "$requirements" "$stamp"
    fi
}

make_environment build/venv tests/requirements.txt
# What commands start must not share packages with the tests.
make_environment build/xllamacpp-venv tests/servers/requirements.txt
