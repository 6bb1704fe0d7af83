#!/usr/bin/env bash
# Tries planted versions of the demo's base as canaries on a stack of its own: scripts/bench_release.py.
# Its figures go to target/bench/release.json.
# Usage: bench-release.sh SPRINGTIDE PYTHON [ARGS…]
set -euo pipefail
springtide=$(realpath "$1") python=$(realpath -s "$2")
shift 2
config=$PWD/scripts/bench-release.toml
out=$PWD/${CARGO_TARGET_DIR:-target}/bench
[[ ${CARGO_TARGET_DIR:-} != /* ]] || out=$CARGO_TARGET_DIR/bench
mkdir -p "$out" .springtide
work=$(mktemp -d "$PWD/.springtide/release-XXXXXX")
# short: a socket's path is limited
export SPRINGTIDE__STATE_DIR=$work/s
# at once, so that no earlier run is found in it
: >"$out/release-stack.log"
"$springtide" --config "$config" up >"$out/release-stack.log" 2>&1 &
stack=$!
trap 'kill -INT $stack 2>/dev/null; wait $stack || true; rm -rf "$work"' EXIT
until grep -qs 'Springtide is up' "$out/release-stack.log"; do
    kill -0 $stack 2>/dev/null || { tail -20 "$out/release-stack.log" >&2; exit 1; }
    sleep 1
done
"$python" scripts/bench_release.py --springtide "$springtide" --config "$config" --work "$work" --json "$out/release.json" "$@"
