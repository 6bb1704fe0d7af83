#!/usr/bin/env bash
# Runs one SGLang server on the CPU, with stubbed kernels, in the foreground.
# Usage: sglang-server.sh PYTHON MODEL PORT [ARGS…]
set -euo pipefail
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
python=$1 model=$2 port=$3
shift 3
exec "$python" -m sglang.launch_server --model-path "$model" --served-model-name demo --host 127.0.0.1 --port "$port" \
    --device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule \
    --dtype float32 --max-total-tokens 8192 --max-running-requests 16 "$@"
