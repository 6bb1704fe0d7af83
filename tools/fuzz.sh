#!/usr/bin/env bash
# Runs libFuzzer on the decoders of a crate, one after the other, each for SECONDS_EACH seconds or
# RUNS inputs. Prints a table and writes target/fuzz/CRATE.json. Fails if an input crashes, hangs or
# takes too much memory, and prints where that input is. Uses the coverage pass of the stable
# compiler (tools/sancov.sh); libFuzzer itself needs a C++ compiler.
# Usage: [SECONDS_EACH=60 | RUNS=1000000] [TARGETS="event_json …"] tools/fuzz.sh ingest|policy
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")/fuzz
mkdir -p "$dir"

crate=$1
case $crate in
  # With the features of every other build, so that few crates are built twice.
  ingest) build=(cargo build --locked --workspace --features ingest/fuzz --example fuzz) example=fuzz ;;
  policy) build=(cargo build --locked --package artifact --features artifact/fuzz --example fuzz-policy) example=fuzz-policy ;;
  *) echo "fuzz: $crate has no targets; use ingest or policy" >&2; exit 2 ;;
esac
# The profile leaves these checks out of `artifact`, whose loops they slow. Here they find bugs.
checks="profile.dev.package.artifact"
build+=(--config "$checks.overflow-checks=true" --config "$checks.debug-assertions=true")
RUSTC_WORKSPACE_WRAPPER=$PWD/tools/sancov.sh "${build[@]}"
program=$dir/../debug/examples/$example

limit=(-max_total_time="${SECONDS_EACH:-60}")
if [ -n "${RUNS:-}" ]; then limit=(-runs="$RUNS"); fi
targets=${TARGETS:-$("$program")}
export SPRINGTIDE_FUZZ_DIR=$dir
failed=0
rm -rf "$dir/counts" "$dir/logs"
mkdir -p "$dir/logs" "$dir/counts"
for target in $targets; do
  corpus=$dir/corpus/$target seeds=$dir/seeds/$target crashes=$dir/crashes/$target
  rm -rf "$crashes"
  mkdir -p "$corpus" "$seeds" "$crashes"
  echo "fuzz: $target" >&2
  # An input that takes 10 s or more than 1 GiB is a failure like a panic.
  SPRINGTIDE_FUZZ_TARGET=$target "$program" "$corpus" "$seeds" "${limit[@]}" -max_len=16384 -timeout=10 -rss_limit_mb=1024 \
    -artifact_prefix="$crashes/" -print_final_stats=1 >"$dir/logs/$target" 2>&1 || failed=1
done

python3 - "$dir" "$crate" $targets <<'PY'
import json, os, re, sys
dir, crate, targets = sys.argv[1], sys.argv[2], sys.argv[3:]
rows = []
for target in targets:
    log = open(f"{dir}/logs/{target}", errors="replace").read()
    stat = lambda name: int((re.findall(rf"stat::{name}:\s+(\d+)", log) or [0])[-1])
    try:
        counted, accepted = map(int, open(f"{dir}/counts/{target}").read().split())
    except FileNotFoundError:
        counted, accepted = 0, 0
    covered = re.findall(r"cov: (\d+)", log)
    rows.append({
        "target": target,
        "executions": stat("number_of_executed_units"),
        "executions_per_second": stat("average_exec_per_sec"),
        "accepted_share": accepted / counted if counted else None,
        "edges_covered": int(covered[-1]) if covered else None,
        "rss_mib_peak": stat("peak_rss_mb"),
        "crashes": len(os.listdir(f"{dir}/crashes/{target}")),
    })
print(f"{'target':24}{'executions':>12}{'per s':>8}{'accepted':>10}{'edges':>8}{'MiB':>6}{'crashes':>9}")
for row in rows:
    share = "" if row["accepted_share"] is None else f"{row['accepted_share']:.1%}"
    print(f"{row['target']:24}{row['executions']:>12,}{row['executions_per_second']:>8,}{share:>10}"
          f"{row['edges_covered'] or 0:>8,}{row['rss_mib_peak']:>6}{row['crashes']:>9}")
total = sum(row["executions"] for row in rows)
print(f"{'all':24}{total:>12,}{'':>32}{sum(row['crashes'] for row in rows):>9}")
json.dump({"targets": rows, "executions": total}, open(f"{dir}/{crate}.json", "w"), indent=1)
PY
if [ "$failed" != 0 ]; then
  echo "fuzz: a target failed; see its input in $dir/crashes and its output in $dir/logs" >&2
fi
exit "$failed"
