#!/usr/bin/env bash
# Trains the agent model in the example environments on a stack of its own: examples/environments/SCRIPT.py.
# Its figures go to target/bench/NAME.json.
# Usage: bench-environments.sh SPRINGTIDE PYTHON BASE SCRIPT NAME [ARGS…]
set -euo pipefail
springtide=$(realpath "$1") python=$(realpath -s "$2") base=$(realpath "$3") script=$4 name=$5
shift 5
here=examples/environments
out=$PWD/${CARGO_TARGET_DIR:-target}/bench
[[ ${CARGO_TARGET_DIR:-} != /* ]] || out=$CARGO_TARGET_DIR/bench
work=$(mktemp -d "$PWD/.springtide/bench-environments-XXXXXX")
mkdir -p "$out"
# short: a socket's path is limited
export SPRINGTIDE__STATE_DIR=$work/s SPRINGTIDE__POLICY__BASE=$base/model
rm -f "$out/$name-stack.log" # an earlier run's says that it is up
"$springtide" --config $here/springtide.toml up >"$out/$name-stack.log" 2>&1 &
stack=$!
trap 'kill -INT $stack 2>/dev/null; wait $stack || true; rm -rf "$work"' EXIT
until grep -qs 'Springtide is up' "$out/$name-stack.log"; do
    kill -0 $stack 2>/dev/null || { tail -20 "$out/$name-stack.log" >&2; exit 1; }
    sleep 1
done
"$python" $here/$script.py --springtide "$springtide" --base "$base" --work "$work" --json "$out/$name.json" "$@"
