#!/usr/bin/env bash
# Trains a few steps of all weights and of adapters, saves them, and compares what transformers and PEFT make of the folders
# with what the engine answers.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/golden-venv.sh)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
SPRINGTIDE_SAVED=$scratch cargo test --locked --workspace --test saved
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= "$python" scripts/golden/saved.py "$scratch"
