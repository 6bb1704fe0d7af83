#!/usr/bin/env bash
# Measures our server, vLLM's CPU build, llama.cpp's server, `transformers serve` and our kernels alone,
# one after another: the same weights, prompts and cores. Only one of them runs at a time.
# SERVERS names some of: ours vllm llama transformers.
# Usage: bench-serving.sh SPRINGTIDE BENCH VLLM OTHERS MODEL VOCAB STOP_IDS CORES [BENCH_ARGS…]
set -euo pipefail
springtide=$1 bench=$2 vllm=$3 others=$4 model=$5 vocab=$6 stop_ids=$7 cores=$8
shift 8
out=$PWD/${CARGO_TARGET_DIR:-target}/bench
[[ ${CARGO_TARGET_DIR:-} != /* ]] || out=$CARGO_TARGET_DIR/bench
mkdir -p "$out" .springtide
model=$(realpath "$model")
name=$(basename "$model")
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
run() { # which server, arguments
    local which=$1
    shift
    "$bench" --vocab "$vocab" --stop-ids "$stop_ids" --seed 1 --json "$out/serving-$name-$which.json" "$@"
}
log() { echo "$out/serving-$name-$1.log"; }
export HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 CUDA_VISIBLE_DEVICES=

# All servers sample up to 64 sequences together.
ours() {
    SPRINGTIDE__STATE_DIR=$state SPRINGTIDE__SERVE__THREADS=$cores SPRINGTIDE__SERVE__SLOTS=64 OMP_NUM_THREADS=1 \
        "$springtide" up --policy "$model" >"$(log ours)" 2>&1 &
    server=$!
    wait_for http://127.0.0.1:8000/health "$(log ours)"
    run ours --server ours=http://127.0.0.1:8000 --model "$name" --kernel "$model" --threads "$cores" "$@"
}
vllm() {
    VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=$cores "$vllm" serve "$model" --served-model-name "$name" \
        --dtype float32 --host 127.0.0.1 --port 8100 --max-num-seqs 64 >"$(log vllm)" 2>&1 &
    server=$!
    wait_for http://127.0.0.1:8100/health "$(log vllm)"
    run vllm --server vllm=http://127.0.0.1:8100 --model "$name" "$@"
}
llama() {
    [ -f "$state/model.gguf" ] || "$others/bin/python" tools/gguf_of.py "$model" "$state/model.gguf"
    # f32 like the others, also the cache; 64 sequences of 256 tokens
    "$others/bin/llama-server" --model "$state/model.gguf" --alias "$name" --host 127.0.0.1 --port 8110 \
        --parallel 64 --ctx-size 16384 --threads "$cores" --cache-type-k f32 --cache-type-v f32 --no-webui \
        >"$(log llama)" 2>&1 &
    server=$!
    wait_for http://127.0.0.1:8110/health "$(log llama)"
    run llama --server llama.cpp=http://127.0.0.1:8110 --model "$name" "$@"
}
# Its completions take text, and one request is answered at a time: with --continuous-batching it gave
# no token on the CPU.
transformers() {
    OMP_NUM_THREADS=$cores "$others/bin/python" -c 'from transformers.cli.transformers import main; main()' \
        serve "$model" --host 127.0.0.1 --port 8120 --dtype float32 --device cpu >"$(log transformers)" 2>&1 &
    server=$!
    wait_for http://127.0.0.1:8120/health "$(log transformers)"
    run transformers --text-server transformers=http://127.0.0.1:8120 --tokenizer "$model" --model "$model" "$@"
}
for which in ${SERVERS:-ours vllm llama transformers}; do
    echo "--- $name, $which"
    "$which" "$@"
    stop
done
