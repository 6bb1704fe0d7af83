#!/usr/bin/env bash
# Builds what a release ships into DIR (default target/dist): the archives of both programs, the wheel with the program
# springtide, SBOMs (CycloneDX) and SHA256SUMS. For x86-64 Linux with glibc 2.35 or newer.
# SIGN_KEY=FILE, an SSH key, signs SHA256SUMS:
#   ssh-keygen -Y verify -f allowed_signers -I release -n springtide -s SHA256SUMS.sig < SHA256SUMS
# Usage: dist.sh [DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
out=$(realpath -m "${1:-target/dist}")
tools/setup.sh patchelf
rm -rf "$out"
mkdir -p "$out/state" # an empty folder, for the image
SPRINGTIDE_COMMIT=${SPRINGTIDE_COMMIT:-$(git rev-parse --short=12 HEAD)}
export SPRINGTIDE_COMMIT
cargo build --locked --release --package springtide --package springtide-trainer
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) # not before: it would build C libraries again
version=$("$target/release/springtide" --version | awk '{ print $2 }')

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
# Archives of the same commit and machine are equal.
pack() { # pack FILE FOLDER: FOLDER/springtide is what the archive holds
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$2" -c springtide | gzip -n >"$1"
}
base=$tree/base/springtide trainer=$tree/trainer/springtide
mkdir -p "$base/bin" "$base/share" "$trainer/bin" "$trainer/lib"
cp LICENSE-* CHANGELOG.md "$base"
cp -r springtide.toml demo/*.toml demo/models deploy examples "$base/share"
mkdir "$base/share/demo"
mv "$base"/share/{completion,canary,session}.toml "$base/share/models" "$base/share/demo"
# The code that the demo replays, with the licenses of its crates.
"$target/release/springtide" corpus export --out "$base/share/demo/corpus"
for crate in "$base/share/demo/corpus"/*; do
  cp "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"${crate##*/}"/{LICENSE*,COPYING*,Cargo.toml} "$crate" 2>/dev/null || true
done
# The build's RUNPATH points into the source tree.
strip -o "$base/bin/springtide" "$target/release/springtide"
patchelf --remove-rpath "$base/bin/springtide"
strip -o "$trainer/bin/springtide-trainer" "$target/release/springtide-trainer"
patchelf --set-rpath '$ORIGIN/../lib' "$trainer/bin/springtide-trainer"
libtorch=${LIBTORCH:-.libtorch/torch}/lib
for library in libtorch_cpu.so libc10.so libgomp.so.1; do cp "$libtorch/$library" "$trainer/lib"; done
find "${LIBTORCH:-.libtorch/torch}/.." -name 'libcudart.so.*' -o -name 'libcupti.so.*' | while read -r library; do cp "$library" "$trainer/lib"; done
pack "$out/springtide-$version-x86_64-linux.tar.gz" "$tree/base"
pack "$out/springtide-trainer-$version-x86_64-linux.tar.gz" "$tree/trainer"

# The wheel: maturin takes programs from python/springtide._artifact.data/scripts.
python=$target/python/bin/python
[ -x "$python" ] || tools/python-test.sh "$target/python" >/dev/null
mkdir -p python/springtide._artifact.data/scripts
trap 'rm -rf "$tree" python/springtide._artifact.data' EXIT
cp "$base/bin/springtide" python/springtide._artifact.data/scripts/
"$target/python/bin/maturin" build --quiet --locked --release --manifest-path python/Cargo.toml --out "$out" \
  --interpreter "$python" --compatibility manylinux_2_35 # that of the program

# What is in the programs. cargo-cyclonedx writes beside every Cargo.toml.
cyclonedx=$target/tools/bin/cargo-cyclonedx
[ -x "$cyclonedx" ] || cargo install --quiet --locked --root "$target/tools" cargo-cyclonedx@0.5.9
"$cyclonedx" cyclonedx --quiet --format json --spec-version 1.5 --describe binaries
mv springtide_bin.cdx.json "$out/springtide-$version.cdx.json"
mv trainer/program/springtide-trainer_bin.cdx.json "$out/springtide-trainer-$version.cdx.json"
git ls-files --others --exclude-standard '*.cdx.json' | xargs rm -f

(cd "$out" && sha256sum -- *.tar.gz *.whl *.json >SHA256SUMS)
if [ -n "${SIGN_KEY:-}" ]; then
  ssh-keygen -q -Y sign -f "$SIGN_KEY" -n springtide "$out/SHA256SUMS"
else
  echo "SHA256SUMS is not signed: SIGN_KEY names an SSH key"
fi
(cd "$out" && ls -l -- *.tar.gz *.whl *.json SHA256SUMS*)
