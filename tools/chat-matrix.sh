#!/usr/bin/env bash
# Compares prompts with `transformers`: the chat templates of TRL's wheel, which is fetched, with the
# conversations of tools/golden/chat_matrix.py. Needs no torch: about 300 MB.
#   tools/chat-matrix.sh RENDER_CHATS [arguments of chat_matrix.py]
set -euo pipefail
program=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
venv=.springtide/chat-venv
wanted="transformers==5.24.0 jinja2==3.1.6 trl==1.16.0"
if [ "$(cat "$venv/wanted" 2>/dev/null)" != "$wanted" ]; then
  python3 -m venv "$venv"
  read -r transformers jinja trl <<<"$wanted"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$transformers" "$jinja"
  "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$venv" "$trl"
  echo "$wanted" >"$venv/wanted"
fi
"$venv/bin/python" tools/golden/chat_matrix.py "$program" "$venv"/trl-*.whl "$@"
