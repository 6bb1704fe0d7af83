#!/usr/bin/env bash
# Creates or updates the virtual environment of tools/golden/requirements.txt and
# requirements-verl.txt, and prints the path of its python. About 5 GB, because torch's wheel for Linux
# includes CUDA, which is not used here.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.springtide/golden-venv
wanted=(tools/golden/requirements.txt tools/golden/requirements-verl.txt)
if ! cat "${wanted[@]}" | cmp --silent - "$venv/requirements.txt"; then
  python3 -m venv "$venv"
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary=:all:)
  "${pip[@]}" --requirement "${wanted[0]}" >&2
  # the parser that verl's configuration needs has no wheel
  "${pip[@]}" --no-deps --no-binary=antlr4-python3-runtime --no-build-isolation --use-pep517 --requirement "${wanted[1]}" >&2
  cat "${wanted[@]}" >"$venv/requirements.txt"
fi
echo "$venv/bin/python"
