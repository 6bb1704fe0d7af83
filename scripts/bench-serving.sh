#!/usr/bin/env bash
# Measures our server, vLLM's CPU build and our kernels alone, one after another: the same weights,
# prompts and cores. Only one of them runs at a time.
# Usage: bench-serving.sh SPRINGTIDE BENCH VLLM MODEL VOCAB STOP_IDS CORES [BENCH_ARGS…]
set -euo pipefail
springtide=$1 bench=$2 vllm=$3 model=$4 vocab=$5 stop_ids=$6 cores=$7
shift 7
out=$PWD/${CARGO_TARGET_DIR:-target}/bench
[[ ${CARGO_TARGET_DIR:-} != /* ]] || out=$CARGO_TARGET_DIR/bench
mkdir -p "$out" .springtide
state=$(mktemp -d "$PWD/.springtide/serving-XXXXXX")
server=
stop() {
    [ -z "$server" ] || kill -INT "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    server=
}
trap 'stop; rm -rf "$state"' EXIT
# The server's log is read by whoever sees it fail.
wait_for() {
    for _ in $(seq 300); do
        curl --silent --fail --max-time 5 "$1" >/dev/null && return
        kill -0 "$server" 2>/dev/null || break
        sleep 1
    done
    echo "the server did not start; see $2" >&2
    exit 1
}
run() {
    "$bench" --model "$(basename "$model")" --vocab "$vocab" --stop-ids "$stop_ids" --seed 1 "$@"
}

SPRINGTIDE__STATE_DIR=$state SPRINGTIDE__SERVE__THREADS=$cores \
    "$springtide" up --policy "$model" >"$out/serving-ours.log" 2>&1 &
server=$!
wait_for http://127.0.0.1:8000/health "$out/serving-ours.log"
run --server ours=http://127.0.0.1:8000 --kernel "$model" --threads "$cores" --json "$out/serving-ours.json" "$@"
stop

HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 CUDA_VISIBLE_DEVICES= VLLM_CPU_KVCACHE_SPACE=1 \
    OMP_NUM_THREADS=$cores "$vllm" serve "$model" --served-model-name "$(basename "$model")" --dtype float32 \
    --host 127.0.0.1 --port 8100 --max-num-seqs 64 >"$out/serving-vllm.log" 2>&1 &
server=$!
wait_for http://127.0.0.1:8100/health "$out/serving-vllm.log"
run --server vllm=http://127.0.0.1:8100 --json "$out/serving-vllm.json" "$@"
stop
