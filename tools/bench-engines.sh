#!/usr/bin/env bash
# Updates a running vLLM under load, and compares its last version with a server that was started with it.
# TENSOR_PARALLEL=2 divides each server's weights between two processes.
# Usage: bench-engines.sh BENCH VLLM MODEL [BENCH_ARGS…]
set -euo pipefail
cd "$(dirname "$0")/.."
bench=$1 vllm=$2 model=$3
shift 3
ranks=${TENSOR_PARALLEL:-1}
. tools/servers.sh
start() { # model port
    # otherwise every rank wants cores of its own, and there are too few
    serve "$2" env VLLM_CPU_OMP_THREADS_BIND="$([ "$ranks" = 1 ] && echo auto || echo nobind)" \
        tools/vllm-server.sh "$vllm" "$1" "$2" --tensor-parallel-size "$ranks"
}
"$bench" --model "$model" --write-last "$work/last" "$@"
start "$model" 8120
start "$work/last" 8121
"$bench" --model "$model" --url http://127.0.0.1:8120 --fresh http://127.0.0.1:8121 "$@"
