#!/usr/bin/env bash
# Updates a running vLLM under load, and compares its last version with a server that was started with it.
# TENSOR_PARALLEL=2 divides each server's weights between two processes.
# Usage: bench-engines.sh BENCH VLLM MODEL [BENCH_ARGS…]
set -euo pipefail
cd "$(dirname "$0")/.."
bench=$1 vllm=$2 model=$3
shift 3
ranks=${TENSOR_PARALLEL:-1}
work=$(mktemp -d)
servers=()
stop() {
    for server in "${servers[@]}"; do kill -TERM -- "-$server" 2>/dev/null || true; done
    rm -rf "$work"
}
trap stop EXIT
start() { # model port
    # otherwise every rank wants cores of its own, and there are too few
    VLLM_CPU_OMP_THREADS_BIND=$([ "$ranks" = 1 ] && echo auto || echo nobind) \
        setsid scripts/vllm-server.sh "$vllm" "$1" "$2" --tensor-parallel-size "$ranks" >"$work/$2.log" 2>&1 &
    servers+=($!)
    for _ in $(seq 300); do
        curl --silent --fail --max-time 5 "http://127.0.0.1:$2/health" >/dev/null && return
        kill -0 "${servers[-1]}" 2>/dev/null || break
        sleep 1
    done
    tail -20 "$work/$2.log" >&2
    exit 1
}
"$bench" --model "$model" --write-last "$work/last" "$@"
start "$model" 8120
start "$work/last" 8121
"$bench" --model "$model" --url http://127.0.0.1:8120 --fresh http://127.0.0.1:8121 "$@"
