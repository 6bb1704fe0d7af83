#!/usr/bin/env bash
# Runs one vLLM server on the CPU as `springtide serve` needs it, in the foreground.
# Usage: [DTYPE=bfloat16] vllm-server.sh VLLM MODEL PORT [MORE_ARGS…]
set -euo pipefail
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 CUDA_VISIBLE_DEVICES='' VLLM_CPU_KVCACHE_SPACE=1
export VLLM_SERVER_DEV_MODE=1 OMP_NUM_THREADS=1
exec "$1" serve "$2" --served-model-name demo --host 127.0.0.1 --port "$3" --dtype "${DTYPE:-float32}" --max-num-seqs 16 \
    --max-num-batched-tokens 4096 --enable-scale-out --logprobs-mode processed_logprobs \
    --weight-transfer-config '{"backend":"springtide"}' "${@:4}"
