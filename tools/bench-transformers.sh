#!/usr/bin/env bash
# Adds transformers on PyTorch to the report of `cargo bench --bench model`: the same weights, prompts
# and batches, in f32 on one thread. Without the environment of `make golden` the report stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.springtide/golden-venv/bin/python
if [ ! -x $python ]; then
  echo "transformers is not measured: \`make golden\` sets up its environment (about 5 GB)"
  exit 0
fi
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 exec $python tools/bench_transformers.py "$1"
