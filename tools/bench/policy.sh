# Tokens per second of prefill, decoding and a training step, beside libtorch and (after `make golden`) transformers.
need libtorch
cargo bench --locked --profile dev --package autograd --bench model -- "${args[@]}"
tools/bench-transformers.sh "$target/bench/policy.json"
