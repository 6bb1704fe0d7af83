# What is learned from tokens that vLLM sampled, in f32, bf16 and with a KV cache in fp8, with and without corrections.
# 15 minutes; downloads vLLM, 3 GB. ARGS='--seeds 1 --steps 4'
# Not to be changed after a reported run has been seen.
need libtorch vllm
packages curl
cargo build --locked --workspace --bin bench-mismatch
tools/bench-mismatch.sh "$target/debug/bench-mismatch" "$vllm" $model "${args[@]}"
