#!/usr/bin/env bash
# Starts a stack of its own, and runs a benchmark on it. Its figures go to target/bench/NAME.json.
# Usage: bench-stack.sh NAME SPRINGTIDE PYTHON [ARGS…]
#   release     tools/bench_release.py, planted versions as canaries
#   rollback    tools/bench_rollback.py, how long users get a bad version after a rollback, and what fails
#   offpolicy   tools/bench_offpolicy.py, estimates from logged answers beside what users gave later
set -euo pipefail
name=$1 springtide=$(realpath "$2") python=$(realpath -s "$3")
shift 3
config=$PWD/tools/bench-$name.toml
out=$PWD/${CARGO_TARGET_DIR:-target}/bench
[[ ${CARGO_TARGET_DIR:-} != /* ]] || out=$CARGO_TARGET_DIR/bench
mkdir -p "$out" .springtide
work=$(mktemp -d "$PWD/.springtide/$name-XXXXXX")
# short: a socket's path is limited
export SPRINGTIDE__STATE_DIR=$work/s
log=$out/$name-stack.log
# at once, so that no earlier run is found in it
: >"$log"
"$springtide" --config "$config" up >"$log" 2>&1 &
stack=$!
trap 'kill -INT $stack 2>/dev/null; wait $stack || true; rm -rf "$work"' EXIT
until grep -qs 'Springtide is up' "$log"; do
    kill -0 $stack 2>/dev/null || { tail -20 "$log" >&2; exit 1; }
    sleep 1
done
"$python" "tools/bench_$name.py" --springtide "$springtide" --config "$config" --work "$work" --json "$out/$name.json" "$@"
