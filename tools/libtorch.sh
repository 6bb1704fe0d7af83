#!/usr/bin/env bash
# Installs libtorch 2.11.0 for the CPU under $1 (default .libtorch), from the wheels that
# tools/pins/libtorch pins by hash. About 500 MB to download and on disk. Does nothing if it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(realpath -m "${1:-.libtorch}")
stamp="$dir/.ok-2.11.0"
[ -e "$stamp" ] && exit 0
if [ "$(uname -m)" != x86_64 ]; then
  echo "libtorch is pinned for x86-64 only: set LIBTORCH to a libtorch 2.11 for this machine" >&2
  exit 1
fi
python=.stack/venv/bin/python3 # made by tools/setup.sh where the system's Python has no pip
[ -x "$python" ] || python=python3
echo "Fetching libtorch 2.11.0 (500 MB) …"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
  --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 --platform manylinux2014_x86_64 \
  --dest "$tmp" --requirement tools/pins/libtorch/requirements.txt
rm -rf "$dir"
mkdir -p "$dir"
python3 - "$tmp" "$dir" <<'PY'
import glob, os, sys, zipfile
src, dst = sys.argv[1:]
keep_torch = {"libc10.so", "libtorch_cpu.so", "libgomp.so.1"}
for wheel in glob.glob(os.path.join(src, "*.whl")):
    with zipfile.ZipFile(wheel) as z:
        for m in z.namelist():
            base = os.path.basename(m)
            if m.startswith("torch/include/") or (m.startswith("torch/lib/") and base in keep_torch) \
               or m.endswith(("lib/libcudart.so.13", "lib/libcupti.so.13")):
                z.extract(m, dst)
PY
# libtorch.so would link libtorch_cuda.so. This linker script replaces it without CUDA.
echo 'INPUT(libtorch_cpu.so libc10.so)' >"$dir/torch/lib/libtorch.so"
echo 2.11.0 >"$dir/torch/build-version" # lets torch-sys check the version
touch "$stamp"
