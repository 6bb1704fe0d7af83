#!/usr/bin/env bash
# Runs well-known clients against `springtide up`, with the demo's model and a chat template. Those for
# Node need `npm`.
# Usage: test-clients.sh SPRINGTIDE MODEL VENV
set -euo pipefail
cd "$(dirname "$0")/.."
springtide=$1 model=$2 venv=$3
if ! cmp --quiet tests/clients/requirements.txt "$venv/requirements.txt"; then
    echo "installing $(tr '\n' ' ' <tests/clients/requirements.txt)into $venv (PyPI, 100 MB)"
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" --quiet --disable-pip-version-check install --requirement tests/clients/requirements.txt
    cp tests/clients/requirements.txt "$venv/requirements.txt"
fi
if ! command -v npm >/dev/null; then
    echo "npm is missing: install Node to run its clients too" >&2
elif ! cmp --quiet tests/clients/package.json "$venv/node/package.json"; then
    echo "installing the clients for Node into $venv/node (npm, 20 MB)"
    mkdir -p "$venv/node"
    cp tests/clients/package.json "$venv/node"
    npm --prefix "$venv/node" install --no-audit --no-fund --no-package-lock --silent
fi
state=$(mktemp -d "$PWD/.springtide/clients-XXXXXX")
server=
stop() {
    [ -z "$server" ] || kill -INT "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    rm -rf "$state"
}
trap stop EXIT
cp -r "$model" "$state/chat"
python3 - "$state/chat/tokenizer_config.json" <<'PYTHON'
import json, sys
path = sys.argv[1]
config = json.load(open(path))
config["chat_template"] = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
json.dump(config, open(path, "w"))
PYTHON
SPRINGTIDE__STATE_DIR=$state/state "$springtide" up --policy "$state/chat" >"$state/log" 2>&1 &
server=$!
for _ in $(seq 120); do
    ! curl --silent --fail --max-time 5 http://127.0.0.1:8000/health >/dev/null || break
    kill -0 "$server" 2>/dev/null || { tail -20 "$state/log" >&2; exit 1; }
    sleep 1
done
failed=0
"$venv/bin/python" tests/clients/clients.py http://127.0.0.1:8000 chat || failed=1
if command -v npm >/dev/null; then
    cp tests/clients/clients.mjs "$venv/node"
    (cd "$venv/node" && node clients.mjs http://127.0.0.1:8000 chat) || failed=1
fi
exit "$failed"
