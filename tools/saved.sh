#!/usr/bin/env bash
# Trains a few steps of all weights and of adapters and saves them. Then compares the engine's
# results with those of transformers and PEFT on the saved folders.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/golden-venv.sh)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
SPRINGTIDE_SAVED=$scratch cargo test --locked --workspace --test saved
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= "$python" tools/golden/saved.py "$scratch"
