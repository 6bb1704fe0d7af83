# What the gateway adds to a real vLLM at 1 to 32 streams, and to recorded tokens at 50 and 200. 10 minutes; downloads
# vLLM, 3 GB. ARGS='--streams 4 --rounds 2'
need stack vllm
cargo build --locked --release --package springtide --package bench --bin springtide --bin bench-gateway
"$target/release/bench-gateway" --springtide "$target/release/springtide" --vllm "$vllm" --model $model \
  --json "$target/bench/gateway.json" "${args[@]}"
