# libFuzzer on every reader of artifact: delta, checkpoint, manifest, safetensors. SECONDS=60 for each, or RUNS=; TARGETS=
need setup
SECONDS_EACH=${FOR:-60} RUNS=${RUNS:-} TARGETS=${TARGETS:-} tools/fuzz.sh policy
