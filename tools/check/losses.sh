# Losses, gradients and advantages beside those of TRL and verl (made by `make golden`): a table.
need libtorch
cargo test --locked --package trainer --lib golden:: -- --nocapture
