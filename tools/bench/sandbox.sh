# Sandboxes that start and end per second.
need setup
cargo run --locked --package world --example bench_sandbox -- "$target/bench/sandbox.json"
