#!/usr/bin/env bash
# RUSTC_WORKSPACE_WRAPPER of `make fuzz NAME=ingest` and `make fuzz NAME=policy`: compiles the crate and its
# fuzz program with LLVM's coverage for libFuzzer. This includes the code that serde and prost
# generate and the generic code of serde_json. Other crates are built as always, so that few crates
# are built twice.
set -euo pipefail
flags=()
case " $* " in
  *" --crate-name event_log "* | *" --crate-name ingest "* | *" --crate-name fuzz "* | *" --crate-name artifact "* | *" --crate-name fuzz_policy "*)
    # rust-lld would drop the coverage tables, because only their start and stop symbols refer to
    # them.
    flags=(-Cpasses=sancov-module -Ccodegen-units=1 -Clinker-features=-lld)
    for option in level=4 inline-8bit-counters pc-table trace-compares; do
      flags+=("-Cllvm-args=-sanitizer-coverage-$option")
    done
    ;;
esac
exec "$@" ${flags[@]+"${flags[@]}"}
