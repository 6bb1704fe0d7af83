#!/usr/bin/env bash
# Installs what examples/trainers needs into FOLDER: torch, transformers, pyarrow, TRL from PyPI (2 GB to download, 6 GB on
# disk, because torch's wheel includes CUDA), and the wheel of python/. Does nothing but build the wheel if it is complete.
# Usage: trainers-venv.sh FOLDER
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1")
pip="$folder/bin/pip --quiet --disable-pip-version-check"
complete=$folder/complete-torch-2.15.0
if [ ! -f "$complete" ]; then
  echo "installing torch and transformers into $folder (2 GB to download, 6 GB on disk)"
  python3 -m venv "$folder"
  $pip install torch==2.15.0 transformers==5.24.0 pyarrow==26.0.1 trl==1.16.0 httpx maturin==1.16.0 pytest==9.2.0
  touch "$complete"
fi
rm -rf "$folder/wheels"
"$folder/bin/maturin" build --quiet --locked --profile dev --manifest-path "$(dirname "$0")/../python/Cargo.toml" \
  --out "$folder/wheels" --interpreter "$folder/bin/python"
$pip install --no-deps --force-reinstall "$folder"/wheels/*.whl
