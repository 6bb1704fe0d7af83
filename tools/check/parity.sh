# The model beside transformers, and every way to compute a token beside every other: tables.
need libtorch
cargo test --locked --workspace --test parity -- --nocapture --test-threads 1
