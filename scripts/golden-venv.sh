#!/usr/bin/env bash
# The virtual environment of scripts/golden/requirements.txt: made, or brought up to date (about 5 GB: torch's wheel for Linux
# brings CUDA along, nothing here uses it). Prints the path of its python.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.springtide/golden-venv
if ! cmp --silent scripts/golden/requirements.txt "$venv/requirements.txt"; then
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement scripts/golden/requirements.txt >&2
  cp scripts/golden/requirements.txt "$venv/"
fi
echo "$venv/bin/python"
