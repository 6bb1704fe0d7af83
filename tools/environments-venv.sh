#!/usr/bin/env bash
# Installs what the example environments need into FOLDER: verifiers and reasoning-gym from PyPI, and the
# wheel of python/ (200 MB to download, 700 MB on disk). Does nothing but build the wheel if the
# environment is complete.
# With VLLM, also TRL; torch is that of vLLM's environment.
# Usage: environments-venv.sh FOLDER [VLLM]
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1") vllm=${2:-}
pip="$folder/bin/pip --quiet --disable-pip-version-check"
complete=$folder/complete-verifiers-0.4.0
if [ ! -f "$complete" ]; then
    echo "installing verifiers and reasoning-gym into $folder (200 MB to download, 700 MB on disk)"
    python3 -m venv "$folder"
    $pip install verifiers==0.4.0 reasoning-gym==0.1.25 maturin==1.16.0 pytest==9.2.0
    touch "$complete"
fi
rm -rf "$folder/wheels"
"$folder/bin/maturin" build --quiet --locked --profile dev --manifest-path "$(dirname "$0")/../python/Cargo.toml" \
    --out "$folder/wheels" --interpreter "$folder/bin/python"
$pip install --no-deps --force-reinstall "$folder"/wheels/*.whl
if [ -n "$vllm" ] && [ ! -f "$folder/complete-trl-1.16.0" ]; then
    echo "installing TRL into $folder (100 MB to download)"
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$(dirname "$vllm")/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/shared.pth"
    $pip install --no-deps trl==1.16.0 accelerate==1.15.0 datasets==4.8.0 pandas==2.3.3 pyarrow==26.0.1 dill==0.4.1 \
        multiprocess==0.70.19 xxhash==4.1.0 python-dateutil==4.0.0 six==1.17.0 tzdata==2026.6 pytz==2026.6 fsspec==2026.9.0
    touch "$folder/complete-trl-1.16.0"
fi
