#!/usr/bin/env bash
# Runs well-known clients against `springtide up`, with the demo's weights, a chat template and a long
# context. Kinds: sdk (OpenAI, Anthropic, LiteLLM, LangChain, Vercel AI SDK), evaluators (guidellm,
# lm-eval; they share vLLM's torch), agents (Claude Code, Codex). What needs Node needs `npm`.
# Usage: test-clients.sh SPRINGTIDE MODEL FOLDER VLLM [KIND…]
set -euo pipefail
cd "$(dirname "$0")/.."
springtide=$(realpath "$1") model=$2 vllm=$4
mkdir -p "$3"
folder=$(realpath "$3")
kinds=("${@:5}")
[ "${#kinds[@]}" -gt 0 ] || kinds=(sdk evaluators agents)

python_clients() { # requirements, environment, size, folder of shared packages
    local requirements=tests/clients/$1 venv=$folder/$2
    ! cmp --quiet "$requirements" "$venv/requirements.txt" || return 0
    echo "installing $(tr '\n' ' ' <"$requirements")into $venv (PyPI, $3)"
    rm -rf "$venv"
    python3 -m venv "$venv"
    [ -z "${4:-}" ] || echo "$4" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
    "$venv/bin/pip" --quiet --disable-pip-version-check install --requirement "$requirements"
    cp "$requirements" "$venv/requirements.txt"
}
node_clients() { # package.json, folder, size
    local package=tests/clients/$1 node=$folder/$2
    command -v npm >/dev/null || { echo "npm is missing: install Node to run its clients too" >&2; return 1; }
    ! cmp --quiet "$package" "$node/package.json" || return 0
    echo "installing $package into $node (npm, $3)"
    mkdir -p "$node"
    npm --prefix "$node" install --no-audit --no-fund --no-package-lock --silent \
        $(python3 -c 'import json, sys; [print(f"{name}@{version}") for name, version in json.load(open(sys.argv[1]))["dependencies"].items()]' "$package")
    cp "$package" "$node"
}

state=$(mktemp -d "$PWD/.springtide/clients-XXXXXX")
server=
stop() {
    [ -z "$server" ] || kill -INT "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    rm -rf "$state"
}
trap stop EXIT
cp -r "$model" "$state/chat"
# agents send up to 20,000 tokens
python3 - "$state/chat" <<'PYTHON'
import json, sys
def change(name, **fields):
    path = f"{sys.argv[1]}/{name}"
    config = json.load(open(path))
    json.dump({**config, **fields}, open(path, "w"))
change("config.json", max_position_embeddings=65536)
change(
    "tokenizer_config.json",
    model_max_length=65536,
    chat_template="{% if tools %}# tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %} {{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}# assistant:",
)
PYTHON
export SPRINGTIDE__STATE_DIR=$state/state SPRINGTIDE__SERVE__CONTEXT_TOKENS_MAX=65536
# caches of whole contexts: 800 MB each
export SPRINGTIDE__SERVE__SLOTS=3 SPRINGTIDE__SERVE__SLOTS_RESERVED_FOR_PRODUCTION=1
export SPRINGTIDE__SERVE__RESIDENT_BYTES_MAX=8589934592
url=http://${SPRINGTIDE__LISTEN__SERVE:-127.0.0.1:8000} ingest=http://${SPRINGTIDE__LISTEN__INGEST:-127.0.0.1:8001}
"$springtide" up --policy "$state/chat" >"$state/log" 2>&1 &
server=$!
for _ in $(seq 120); do
    ! curl --silent --fail --max-time 5 "$url/health" >/dev/null || break
    kill -0 "$server" 2>/dev/null || { tail -20 "$state/log" >&2; exit 1; }
    sleep 1
done

failed=0
sdk() {
    python_clients requirements.txt sdk "100 MB"
    "$folder/sdk/bin/python" tests/clients/clients.py "$url" chat || failed=1
    node_clients package.json node "20 MB" || return 0
    cp tests/clients/clients.mjs "$folder/node"
    (cd "$folder/node" && node clients.mjs "$url" chat) || failed=1
}
evaluators() {
    local shared
    shared=$("$(dirname "$vllm")/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python_clients requirements-evaluators.txt evaluators "150 MB" "$shared"
    "$folder/evaluators/bin/python" tests/clients/evaluators.py "$url" chat "$state/chat" || failed=1
}
agents() {
    local psql database
    node_clients agents/package.json agents "250 MB, 800 MB on disk" || return 0
    psql=$("$springtide" stack fetch | awk '/^Postgres/ { print $2 }')/bin/psql
    database=$(sed -n 's/^ *database *//p' "$state/log")
    python3 tests/clients/agents.py "$url" "$ingest" chat "$folder/agents" "$psql" "$database" || failed=1
}
for kind in "${kinds[@]}"; do
    case $kind in
    sdk | evaluators | agents) "$kind" ;;
    *) echo "there is no kind of clients named $kind: give sdk, evaluators or agents" >&2; exit 1 ;;
    esac
done
exit "$failed"
