#!/usr/bin/env bash
# What is learned from tokens that vLLM sampled, with and without corrections: with a KV cache in fp8,
# in bf16 and in f32.
# Usage: bench-mismatch.sh BENCH VLLM MODEL [BENCH_ARGS…]
set -euo pipefail
cd "$(dirname "$0")/.."
bench=$1 vllm=$2 model=$3
shift 3
. tools/servers.sh
start() { # dtype port more arguments
    serve "$2" env DTYPE="$1" tools/vllm-server.sh "$vllm" "$model" "${@:2}"
}
start bfloat16 8130 --kv-cache-dtype fp8
start bfloat16 8131
start float32 8132
"$bench" --model "$model" --vllm "vLLM bf16, KV cache fp8=http://127.0.0.1:8130" \
    --vllm "vLLM bf16=http://127.0.0.1:8131" --vllm "vLLM f32=http://127.0.0.1:8132" "$@"
