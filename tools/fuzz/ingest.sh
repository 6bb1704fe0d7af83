# libFuzzer on every decoder of ingest. SECONDS=60 for each, or RUNS=; TARGETS='event_json …'
need setup
SECONDS_EACH=${FOR:-60} RUNS=${RUNS:-} TARGETS=${TARGETS:-} tools/fuzz.sh ingest
