#!/usr/bin/env bash
# Regenerates the golden fixtures in policy/*/tests/golden and trainer/tests/golden, with the
# versions that tools/golden/requirements.txt and requirements-verl.txt pin.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/golden-venv.sh)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=
"$python" tools/golden/models.py policy/model/tests/golden "$scratch"
"$python" tools/golden/defaults.py policy/model/tests/golden/defaults.json
"$python" tools/golden/lora.py policy/model/tests/golden
"$python" tools/golden/chat.py policy/text/tests/golden/chat
"$python" tools/golden/sampling.py policy/model/tests/golden/sampling.json
"$python" tools/golden/quant.py policy/artifact/tests/golden/quantised.json
"$python" tools/golden/preference.py trainer/tests/golden/preference.json
"$python" tools/golden/policy_loss.py trainer/tests/golden/policy_loss.json
"$python" tools/golden/verl_loss.py trainer/tests/golden/verl.json
