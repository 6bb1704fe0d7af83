#!/usr/bin/env bash
# Installs NVRTC 12.9.86, which compiles the kernels for NVIDIA GPUs, under $1 (default .nvrtc),
# from the wheel that tools/pins/nvrtc pins by hash. 90 MB to download, 115 MB on disk. Needs neither a
# GPU nor a driver. Does nothing if it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(realpath -m "${1:-.nvrtc}")
stamp="$dir/.ok-12.9.86"
[ -e "$stamp" ] && exit 0
if [ "$(uname -m)" != x86_64 ]; then
  echo "NVRTC is pinned for x86-64 only: set NVRTC to the folder of this machine's libnvrtc.so.12" >&2
  exit 1
fi
python=.stack/venv/bin/python3 # made by tools/setup.sh where the system's Python has no pip
[ -x "$python" ] || python=python3
echo "Fetching NVRTC 12.9.86 (90 MB) …"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
  --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 \
  --dest "$tmp" --requirement tools/pins/nvrtc/requirements.txt
rm -rf "$dir"
mkdir -p "$dir"
python3 - "$tmp" "$dir" <<'PY'
import glob, os, shutil, sys, zipfile
src, dst = sys.argv[1:]
keep = {"libnvrtc.so.12", "libnvrtc-builtins.so.12.9", "License.txt"}
[wheel] = glob.glob(os.path.join(src, "*.whl"))
with zipfile.ZipFile(wheel) as z:
    for m in z.namelist():
        base = os.path.basename(m)
        if base in keep:
            with z.open(m) as packed, open(os.path.join(dst, base), "wb") as out:
                shutil.copyfileobj(packed, out)
PY
touch "$stamp"
