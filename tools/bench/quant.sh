# Quantized copies: how much of them a step changes, and GB/s to make them. MIB=64 PAIRS=DIR
cargo bench --locked --package artifact --bench delta -- --quantized --mib "${MIB:-64}" --json "$target/bench/quantised.json" \
  ${PAIRS:+--pairs "$(realpath "$PAIRS")"}
