#!/usr/bin/env bash
# Runs a command and appends its duration to FILE: tools/timed.sh FILE "NAME" COMMAND…
# tools/timed.sh FILE --report prints the durations as a table.
set -euo pipefail
file=$1
if [ "$2" = --report ]; then
  awk -F '\t' '{ printf "%6.0f s  %s\n", $1, $2; total += $1 } END { printf "%6.0f s  in all\n", total }' "$file"
  exit
fi
name=$2
shift 2
mkdir -p "$(dirname "$file")"
started=$EPOCHREALTIME
"$@"
awk -v from="$started" -v to="$EPOCHREALTIME" -v name="$name" 'BEGIN { printf "%.1f\t%s\n", to - from, name }' >>"$file"
