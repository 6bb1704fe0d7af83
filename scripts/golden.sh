#!/usr/bin/env bash
# Regenerates the golden fixtures in policy/*/tests/golden and trainer/tests/golden, with the
# versions that scripts/golden/requirements.txt and requirements-verl.txt pin.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/golden-venv.sh)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=
"$python" scripts/golden/models.py policy/model/tests/golden "$scratch"
"$python" scripts/golden/defaults.py policy/model/tests/golden/defaults.json
"$python" scripts/golden/lora.py policy/model/tests/golden
"$python" scripts/golden/chat.py policy/text/tests/golden/chat
"$python" scripts/golden/sampling.py policy/model/tests/golden/sampling.json
"$python" scripts/golden/quant.py policy/artifact/tests/golden/quantised.json
"$python" scripts/golden/preference.py trainer/tests/golden/preference.json
"$python" scripts/golden/policy_loss.py trainer/tests/golden/policy_loss.json
"$python" scripts/golden/verl_loss.py trainer/tests/golden/verl.json
