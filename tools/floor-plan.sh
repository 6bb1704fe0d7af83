#!/usr/bin/env bash
# Checks the floor plan of docs/ARCHITECTURE.md: which crate may depend on which, and which crate
# writes which table.
# shellcheck disable=SC2086 # lists of words
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0
fail() { echo "floor plan: $*" >&2; failed=1; }

# The names of all packages that `crate` depends on with `feature`.
tree() { # crate [feature]
  cargo tree --locked --offline --quiet --edges normal --prefix none --package "$1" --features "${2:+$1/$2}" --format '{p}' | cut -d' ' -f1 | sort -u
}
forbid() { # crate, feature, packages…
  local crate=$1 feature=$2 package
  local names; names=$(tree "$crate" "$feature")
  shift 2
  for package in "$@"; do
    if grep -qx -- "$package" <<<"$names"; then fail "$crate${feature:+ with $feature} depends on $package"; fi
  done
}

policy="artifact store model text"
libtorch="tch torch-sys autograd"
training="runs trainer"
forbid edge   ""    $libtorch event-log ingest $policy $training serving release demo world
forbid world  ""    $libtorch rdkafka event-log ingest $policy $training serving release demo
forbid event-log "" $libtorch ingest $policy $training serving release demo world
forbid ingest ""    $libtorch $policy $training serving release demo world
for crate in $policy; do
  forbid "$crate" "" $libtorch sqlx axum rdkafka edge event-log ingest $training serving release demo world
done
forbid artifact cuda  tokio futures reqwest hyper object_store tokenizers minijinja rand store model text
forbid store    ""    sqlx axum rdkafka tokenizers minijinja model text
forbid model    ""    sqlx axum rdkafka tokio object_store tokenizers minijinja store text edge event-log ingest
forbid text     ""    tokio object_store store model
forbid autograd ""    sqlx axum rdkafka tokio object_store tokenizers minijinja store text edge event-log ingest runs trainer serving release demo world
forbid runs    ""    $libtorch trainer ingest serving release demo
forbid trainer ""    ingest serving release demo
forbid serving ""    $libtorch ingest $training release demo world
# the wheel wraps `artifact` alone
forbid springtide-python "" tokio futures reqwest hyper object_store sqlx axum rdkafka $libtorch store model text edge event-log ingest $training serving release demo
forbid report  ""    sqlx tokio reqwest demo
forbid release ""    $libtorch ingest $training serving demo world
forbid evidence ""   $libtorch sqlx axum rdkafka tokio futures reqwest hyper rand time edge event-log ingest artifact store model text $training serving release demo world
# the front of the crates that decide
forbid control ""    $libtorch ingest trainer demo
# only its trainer needs libtorch
forbid springtide "" $libtorch trainer
forbid demo    ""    $libtorch edge event-log ingest store $training serving release

# Each table has one writing crate.
writer() {
  case $1 in
    erasure) echo migrations ;; # its functions alone
    tenant | policy | tenant_consent | api_key | api_key_revision | audit | sampler) echo edge ;;
    event_key | generation | open_generation | open_episode | payload_reference | payload_unreferenced | payload_sweep | expired_generation | expiring_generation | generation_expiry | generation_horizon | content_horizon | feedback | retraction | episode_end | judgement | reward_definition | trajectory | consumer_offset) echo ingest ;;
    run | line | task | rollout | run_event | step | published_intent | version | disposition | trajectory_use | dataset | baseline | judge_answer | run_judge | monitor | cohort | cohort_part) echo trainer/runs ;;
    assignment | release | transition | canary | canary_sums | canary_user | canary_closed | canary_transition | judgment | webhook | experiment) echo serving/release ;;
    replica | swap | tide_minute | engine_use) echo serving ;;
    *) echo nobody ;;
  esac
}
tables=$(sed -nE 's/^create table ([a-z_]+).*/\1/p' migrations/*.sql | grep -v '_default$' | sort -u)
for table in $tables; do
  [ "$(writer "$table")" != nobody ] || fail "tools/floor-plan.sh names no writer for the table $table"
done
places="edge ingest/log ingest policy trainer/runs trainer serving/release serving control report demo world python src"
for place in $places; do
  # a crate in another crate's folder is a place of its own
  inner=()
  for other in $places; do
    case $other in "$place"/*) inner+=(-not -path "$other/*") ;; esac
  done
  files=$(find "$place" \( -name '*.rs' -o -name '*.sql' -o -name '*.py' \) -not -path '*/tests/*' -not -path '*/target/*' ${inner[@]+"${inner[@]}"})
  # Statements may span lines, so each file is searched as one text.
  written=$(python3 - $files <<'PY'
import re, sys
statement = re.compile(r"\b(?:insert\s+into|merge\s+into|update|delete\s+from|truncate(?:\s+table)?|copy)\s+(?:only\s+)?([a-z_]+)\b", re.I)
for path in sys.argv[1:]:
    text = open(path, encoding="utf-8").read()
    text = re.split(r"#\[cfg\(test\)\]\s*mod ", text)[0]   # tests may write any table
    text = re.sub(r"^\s*//.*$", "", text, flags=re.M)
    text = re.sub(r'\\\s*\n\s*', ' ', text)
    for match in statement.finditer(text):
        print(match.group(1).lower())
PY
  )
  for table in $(sort -u <<<"$written"); do
    grep -qx "$table" <<<"$tables" || continue
    owner=$(writer "$table")
    [ "$owner" = "$place" ] || fail "$place writes the table $table, which belongs to $owner"
  done
done

[ "$failed" = 0 ] && echo "floor plan: in order"
exit "$failed"
