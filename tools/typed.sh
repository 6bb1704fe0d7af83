#!/usr/bin/env bash
# What users type as a second teacher: a live demo whose developers also send what they typed, a
# supervised run on that, and how often three versions write what users on whom that run was not trained
# typed: the base, the learning arm's last version, and the supervised run's.
# Usage: typed.sh SPRINGTIDE USERS SEED MINUTES OUT
set -euo pipefail
springtide=$1 users=$2 seed=$3 minutes=$4 out=$5
mkdir -p "$out"
rm -f "$out"/*.json # of an earlier run
out=$(cd "$out" && pwd)
state=$(mktemp -d "$out/state-XXXXXX")
export SPRINGTIDE__STATE_DIR=$state
call() { "$springtide" --config demo/completion.toml "$@"; }

# not by `call`: the signal below must reach the program and not a shell
"$springtide" --config demo/completion.toml up --demo -- --users "$users" --seed "$seed" --minutes "$minutes" --reference-pauses 0 --demonstrations \
    --report "$out/report.json" >"$out/up.log" 2>&1 &
up=$!
trap 'kill -TERM $up 2>/dev/null; wait $up || true; rm -rf "$state"' EXIT
until grep -q "the demo is over" "$out/up.log"; do
    kill -0 $up || { tail "$out/up.log"; exit 1; }
    sleep 2
done
sleep 35 # trajectories of the last 30 seconds are in no dataset

echo '{"split": {"salt": "typed", "share": 0.8}}' >"$out/train.json"
echo '{"split": {"salt": "typed", "share": 0.8, "rest": true}}' >"$out/held-out.json"
call dataset create train "$out/train.json"
call dataset create held-out "$out/held-out.json"

run() { # prints the run's row when it has ended
    printf '%s' "$1" >"$out/run.json"
    id=$(call run create --json "$out/run.json" | python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])')
    while :; do
        call run show --json "$id" >"$out/ended.json"
        python3 -c 'import json, sys; sys.exit(json.load(open(sys.argv[1]))["finished_at"] is None)' "$out/ended.json" && break
        sleep 2
    done
    cat "$out/ended.json"
}
# as many samples to a step, and the same learning rate, as the realtime run has
run '{"kind": "sft", "dataset": "train@1", "target": "demonstration", "base_version": 1, "steps": 60, "batch_size": 64,
      "learning_rate": 1e-4}' >"$out/sft.json"
head=$(python3 -c 'import json, sys; run = json.load(open(sys.argv[1])); print(run["head"])' "$out/sft.json")
run '{"kind": "evaluate", "dataset": "held-out@1", "base_version": 1}' >"$out/base.json"
run '{"kind": "evaluate", "dataset": "held-out@1", "base": "learner"}' >"$out/learner.json"
run '{"kind": "evaluate", "dataset": "held-out@1", "base_version": '"$head"'}' >"$out/supervised.json"
python3 - "$out" <<'END'
import json, sys
for name in ("base", "learner", "supervised"):
    run = json.load(open(f"{sys.argv[1]}/{name}.json"))
    print(name, run["status"], run["reason"], json.dumps((run["result"] or {}).get("demonstrations")))
END
