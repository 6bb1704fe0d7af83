#!/usr/bin/env bash
# Installs SGLang beside vLLM, whose torch and other packages it shares: 40 MB to download, 200 MB on
# disk. Its kernels are a stub (tests/engines/stubs), because PyPI has none for the CPU: good for tests
# of its API, not for measurements. Does nothing if the environment is complete.
# Usage: sglang-venv.sh FOLDER VLLM
set -euo pipefail
folder=$1 vllm=$2
version=0.5.23
stubs=$(cd "$(dirname "$0")/../tests/engines/stubs" && pwd)
[ ! -f "$folder/complete-$version" ] || exit 0
echo "installing sglang $version into $folder (40 MB to download, 200 MB on disk)"
rm -rf "$folder"
python3 -m venv "$folder"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
shared=$("$(dirname "$vllm")/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n%s\n' "$shared" "$stubs" >"$site/shared.pth"
# its own requirements are builds for GPUs
"$folder/bin/pip" --quiet --disable-pip-version-check install --no-deps "sglang==$version" orjson==3.13.0 \
    IPython==9.18.1 traitlets==5.16.1 gguf==0.19.0 soundfile==0.14.0
touch "$folder/complete-$version"
