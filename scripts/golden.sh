#!/usr/bin/env bash
# Makes the golden fixtures of policy/tests/golden anew, with the versions that scripts/golden/requirements.txt pins, in a virtual
# environment of its own (about 5 GB: torch's wheel for Linux brings CUDA along, nothing here uses it).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.springtide/golden-venv
if ! cmp --silent scripts/golden/requirements.txt "$venv/requirements.txt"; then
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement scripts/golden/requirements.txt
  cp scripts/golden/requirements.txt "$venv/"
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=
"$venv/bin/python" scripts/golden/models.py policy/tests/golden "$scratch"
"$venv/bin/python" scripts/golden/chat.py policy/tests/golden/chat
"$venv/bin/python" scripts/golden/sampling.py policy/tests/golden/sampling.json
