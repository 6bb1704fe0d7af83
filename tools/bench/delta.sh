# Sizes and speeds of deltas beside other codecs, on made pairs and on PAIRS=DIR of model folders. MIB=64
packages bsdiff xdelta3
cargo bench --locked --package artifact --bench delta -- --programs --mib "${MIB:-64}" --json "$target/bench/delta.json" \
  ${PAIRS:+--pairs "$(realpath "$PAIRS")"}
python3 tools/chart_delta.py "$target/bench/delta.json" "$target/bench/delta.svg"
