# Events per second and latency from HTTP to rows, beside a bare producer and sink. ARGS='--rate 5000 --seconds 60'
need setup
cargo build --locked --release --package springtide --package bench
"$target/release/bench-ingest" --springtide "$target/release/springtide" --json "$target/bench/ingest.json" "${args[@]}"
