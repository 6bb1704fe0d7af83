#!/usr/bin/env bash
# What is learned from tokens that vLLM sampled, with and without corrections: with a KV cache in fp8,
# in bf16 and in f32.
# Usage: bench-mismatch.sh BENCH VLLM MODEL [BENCH_ARGS…]
set -euo pipefail
cd "$(dirname "$0")/.."
bench=$1 vllm=$2 model=$3
shift 3
work=$(mktemp -d)
servers=()
stop() {
    for server in "${servers[@]}"; do kill -TERM -- "-$server" 2>/dev/null || true; done
    rm -rf "$work"
}
trap stop EXIT
start() { # dtype port more arguments
    DTYPE=$1 setsid scripts/vllm-server.sh "$vllm" "$model" "$2" "${@:3}" >"$work/$2.log" 2>&1 &
    servers+=($!)
    for _ in $(seq 300); do
        curl --silent --fail --max-time 5 "http://127.0.0.1:$2/health" >/dev/null && return
        kill -0 "${servers[-1]}" 2>/dev/null || break
        sleep 1
    done
    tail -20 "$work/$2.log" >&2
    exit 1
}
start bfloat16 8130 --kv-cache-dtype fp8
start bfloat16 8131
start float32 8132
"$bench" --model "$model" --vllm "vLLM bf16, KV cache fp8=http://127.0.0.1:8130" \
    --vllm "vLLM bf16=http://127.0.0.1:8131" --vllm "vLLM f32=http://127.0.0.1:8132" "$@"
