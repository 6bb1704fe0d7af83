#!/usr/bin/env bash
# Builds the wheel of python/ and tests it: types and pytest. Installs maturin, mypy, pytest, NumPy
# and httpx from PyPI into VENV (60 MB to download, 250 MB on disk), pinned by hash. Building needs
# no libpython.
# Usage: python-test.sh VENV [PYTEST_ARGS…]
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
venv=$(realpath "$1")
shift
requirements=python/tests/requirements.txt
wheels=$venv/wheels
if ! cmp --silent "$requirements" "$venv/requirements.txt"; then
    echo "installing maturin, mypy, pytest, NumPy and httpx into $venv (PyPI, 60 MB)"
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check install --only-binary=:all: --require-hashes \
        --requirement "$requirements"
    cp "$requirements" "$venv/requirements.txt"
fi
rm -rf "$wheels"
"$venv/bin/maturin" build --quiet --locked --profile dev --manifest-path python/Cargo.toml --out "$wheels" \
    --interpreter "$venv/bin/python"
"$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps --force-reinstall "$wheels"/*.whl
cd python
"$venv/bin/mypy" --cache-dir "$venv/mypy"
# from its own folder, so that the tests import what was installed
cd tests
"$venv/bin/python" -m pytest -p no:cacheprovider --quiet -rs "$@"
