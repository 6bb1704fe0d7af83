# Share of idle slots that rollouts use and what production notices, two replicas under TRACE=FILE.csv
# (AzureLLMInferenceTrace_conv of github.com/Azure/AzurePublicDataset), alone and beside rollouts; 5 pairs of 2 × 120 s.
# ARGS='--pairs 1 --seconds 30'; after `make vllm`, ARGS='--vllm .springtide/vllm-venv/bin/vllm --replicas 1'
[ -f "${TRACE:-}" ] || { echo "Name the trace: make bench NAME=tide TRACE=FILE.csv" >&2; exit 1; }
need stack
cargo build --locked --release --package springtide --package bench --bin springtide --bin bench-tide
"$target/release/bench-tide" --springtide "$target/release/springtide" --trace "$TRACE" --json "$target/bench/tide.json" "${args[@]}"
