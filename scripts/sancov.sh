#!/usr/bin/env bash
# RUSTC_WORKSPACE_WRAPPER of `make fuzz-ingest` and `fuzz-policy`: compiles the crate, and its fuzzing program, with LLVM's coverage for libFuzzer. What
# serde and prost generate, and the generic code of serde_json that it uses, is compiled into it; other crates stay as
# every build has them, so that little is built twice.
set -euo pipefail
flags=()
case " $* " in
  *" --crate-name ingest "* | *" --crate-name fuzz "* | *" --crate-name artifact "* | *" --crate-name fuzz_policy "*)
    # rust-lld would drop the coverage tables, to which only their start and stop symbols refer.
    flags=(-Cpasses=sancov-module -Ccodegen-units=1 -Clinker-features=-lld)
    for option in level=4 inline-8bit-counters pc-table trace-compares; do
      flags+=("-Cllvm-args=-sanitizer-coverage-$option")
    done
    ;;
esac
exec "$@" ${flags[@]+"${flags[@]}"}
