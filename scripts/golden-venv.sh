#!/usr/bin/env bash
# Creates or updates the virtual environment of scripts/golden/requirements.txt, and prints the path
# of its python. About 5 GB, because torch's wheel for Linux includes CUDA, which is not used here.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.springtide/golden-venv
if ! cmp --silent scripts/golden/requirements.txt "$venv/requirements.txt"; then
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: --require-hashes \
    --requirement scripts/golden/requirements.txt >&2
  cp scripts/golden/requirements.txt "$venv/"
fi
echo "$venv/bin/python"
