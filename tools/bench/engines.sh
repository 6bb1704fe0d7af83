# Updates of a running vLLM under load: tokens of a wrong version, failed requests, gaps; then the same against a fresh
# server. 15 minutes; downloads vLLM, 3 GB. TENSOR_PARALLEL=2 ARGS='--updates 10'
need libtorch vllm
packages curl
cargo build --locked --release --package bench --bin bench-engines
tools/bench-engines.sh "$target/release/bench-engines" "$vllm" $model "${args[@]}"
