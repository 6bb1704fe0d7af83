# Tokens per second and latency at 1 to 64 streams, ours beside vLLM on the CPU, llama.cpp's server, transformers serve
# and our kernels alone; the demo's model and a Llama of 88M. 15 minutes, and 10 once to build llama.cpp; downloads vLLM,
# 3 GB. SERVERS='ours vllm llama transformers' ARGS='--streams 16'
need stack vllm
packages curl
cargo build --locked --release --package springtide --package bench --bin springtide --bin bench-serving
tools/serving-others.sh .springtide/serving-others "$vllm"
"$(dirname "$vllm")/python" tools/random_llama.py $model .springtide/llama-88m
measure() { # model, and arguments of bench-serving
  tools/bench-serving.sh "$target/release/springtide" "$target/release/bench-serving" "$vllm" .springtide/serving-others \
    "$1" 2048 0,2,3 "$(nproc)" "${@:2}"
}
measure $model "${args[@]}"
measure .springtide/llama-88m --requests 16 "${args[@]}"
