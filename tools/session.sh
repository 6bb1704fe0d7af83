#!/usr/bin/env bash
# Measures whether the policy learns from sessions: runs session demos one after another, each on a
# fresh stack, and prints the result of each.
# Usage: session.sh SPRINGTIDE 'end turns random' '1 2 3' MINUTES [DEMO_ARGS…]
#   end     a verdict at the end of a session is all that is learned from
#   turns   users also say of each turn whether they keep half of it; each turn is credited with that
#   random  control: the verdicts are permuted among the sessions
set -euo pipefail
springtide=$1 variants=$2 seeds=$3 minutes=$4
shift 4
out=$PWD/${CARGO_TARGET_DIR:-target}/bench
[[ ${CARGO_TARGET_DIR:-} != /* ]] || out=$CARGO_TARGET_DIR/bench
mkdir -p "$out/session" .springtide
reports=()
for seed in $seeds; do
    for variant in $variants; do
        name=$variant-$seed credit=trajectory signals=()
        case $variant in
            end) ;;
            turns) credit=turn signals=(--turn-signals) ;;
            random) signals=(--control) ;;
            *) echo "$variant: no such variant" >&2; exit 2 ;;
        esac
        state=$(mktemp -d "$PWD/.springtide/session-XXXXXX")
        echo "== $name"
        log=$out/session/$name.log report=$out/session/$name.json
        rm -f "$report"
        SPRINGTIDE__STATE_DIR=$state SPRINGTIDE__TRAINER__REALTIME__CREDIT=$credit \
            "$springtide" --config demo/session.toml up --demo --once -- --surface session --seed "$seed" \
            --minutes "$minutes" --report "$report" "${signals[@]}" "$@" >"$log" 2>&1 || echo "$name failed, see $log"
        grep -E '^(start:|learner − base|champion − base|2nd half:|sessions in|ledger|feedback to)' "$log" || true
        [ ! -f "$report" ] || reports+=("$variant=$report")
        rm -rf "$state"
    done
done
python3 tools/session.py "$out/session.json" "${reports[@]}"
