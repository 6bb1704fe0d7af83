#!/usr/bin/env bash
# Measures whether the policy learns: runs demos one after another, each on a fresh stack, and
# prints the result of each. Fails at the end if one of them failed.
# Usage: learn.sh SPRINGTIDE 'house plain' '1 2 3 4 5' MINUTES [DEMO_ARGS…]
set -euo pipefail
springtide=$1 kinds=$2 seeds=$3 minutes=$4
shift 4
out=$PWD/.springtide/learn
mkdir -p "$out"
failed=0
for seed in $seeds; do
    for users in $kinds; do
        name=$users-$seed
        state=$(mktemp -d "$out/state-XXXXXX")
        echo "== $name"
        rm -f "$out/$name.json" # of an earlier run
        SPRINGTIDE__STATE_DIR=$state "$springtide" --config demo/completion.toml up --demo --once -- --users "$users" --seed "$seed" --minutes "$minutes" \
            --report "$out/$name.json" "$@" >"$out/$name.log" 2>&1 || { failed=1; echo "$name failed, see $out/$name.log"; }
        grep -E -B1 '^((learner|champion) − base|feedback to serving|ledger|report:)' "$out/$name.log" | grep -vE '^(--|report:|$)' || true
        rm -rf "$state"
    done
done
exit $failed
