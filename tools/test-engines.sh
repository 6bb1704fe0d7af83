#!/usr/bin/env bash
# Compares the answers of a real vLLM and a real SGLang with the recorded ones that `make test` plays
# back, and applies a patch to both. With `record` as the last argument, records the answers anew.
# First it runs the tests of python/ in vLLM's environment, which has torch and the wheel: `make test`
# has no torch and skips some of them.
# Usage: test-engines.sh VLLM SGLANG_PYTHON MODEL [record]
set -euo pipefail
cd "$(dirname "$0")/.."
vllm=$1 sglang=$2 model=$(realpath "$3") command=${4:-check}
port=8120 server=
log=$(mktemp)
stop() {
    [ -z "$server" ] || kill -TERM -- "-$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    server=
}
trap 'stop; rm -f "$log"' EXIT
start() { # command of the server
    setsid "$@" >"$log" 2>&1 &
    server=$!
    for _ in $(seq 300); do
        ! curl --silent --fail --max-time 5 "http://127.0.0.1:$port/health" >/dev/null || return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 1
    done
    tail -20 "$log" >&2
    exit 1
}
python=$(dirname "$vllm")/python
contract() { # kind, file
    "$python" tests/engines/contract.py "$command" "$1" "http://127.0.0.1:$port" "$model" "tests/engines/$2"
}
pytest=.springtide/pytest
[ -d "$pytest" ] || "$python" -m pip --quiet --disable-pip-version-check install --no-deps --target "$pytest" \
    pytest==9.2.0 iniconfig==2.3.1 pluggy==1.7.0 packaging==26.3 pygments==2.21.0
(
    pytest=$(realpath "$pytest")
    cd python/tests # so that the tests import what was installed
    PYTHONPATH=$pytest "$python" -m pytest -p no:cacheprovider --quiet -rs --no-skips
)
start tools/vllm-server.sh "$vllm" "$model" "$port"
contract vllm vllm-0.32.0.json
"$python" tests/engines/patch.py vllm "http://127.0.0.1:$port" "$model"
stop
start tools/sglang-server.sh "$sglang" "$model" "$port"
contract sglang sglang-0.5.23.json
"$sglang" tests/engines/patch.py sglang "http://127.0.0.1:$port" "$model"
stop
