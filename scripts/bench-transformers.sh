#!/usr/bin/env bash
# Adds transformers on PyTorch, f32, to what `cargo bench --bench model` measured: the same weights, prompts, batches and one
# thread. Needs the environment of `make golden`; without it says so and leaves the report as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.springtide/golden-venv/bin/python
if [ ! -x $python ]; then
  echo "transformers is not measured: \`make golden\` sets up its environment (about 5 GB)"
  exit 0
fi
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 exec $python scripts/bench_transformers.py "$1"
