#!/usr/bin/env bash
# Compares the answers of a real vLLM with the recorded ones that `make test` plays back, and applies a
# patch to it.
# Usage: test-engines.sh VLLM MODEL
set -euo pipefail
cd "$(dirname "$0")/.."
port=8120
log=$(mktemp)
setsid scripts/vllm-server.sh "$1" "$2" "$port" >"$log" 2>&1 &
server=$!
trap 'kill -TERM -- -$server 2>/dev/null; wait "$server" 2>/dev/null; rm -f "$log"' EXIT
for _ in $(seq 300); do
    ! curl --silent --fail --max-time 5 "http://127.0.0.1:$port/health" >/dev/null || break
    kill -0 "$server" 2>/dev/null || { tail -20 "$log" >&2; exit 1; }
    sleep 1
done
python3 tests/engines/contract.py check "http://127.0.0.1:$port" "$2" tests/engines/vllm-0.32.0.json
"$(dirname "$1")/python" tests/engines/patch.py vllm "http://127.0.0.1:$port" "$2"
