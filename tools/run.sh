#!/usr/bin/env bash
# Runs tools/KIND/NAME.sh: run.sh bench ingest. Without a name it lists what there is, by the first comment of each.
# `make bench NAME=ingest RATE=…` calls it; variables given to make are in the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1 name=${2:-}
if [ -z "$name" ]; then
  echo "make $kind NAME=…, one of:"
  for script in tools/"$kind"/*.sh; do
    printf '\n  %s\n' "$(basename "$script" .sh)"
    sed -n '/^#/!q;s/^#/   /p' "$script"
  done
  exit 0
fi
script=tools/$kind/$name.sh
[ -f "$script" ] || { echo "$kind: there is no $name; \`make $kind\` lists what there is" >&2; exit 2; }
. tools/lib.sh
. "$script"
