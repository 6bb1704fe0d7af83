# Trains a small model and keeps its last versions, for `make bench NAME=delta PAIRS=target/checkpoints`.
# RATES=1e-6,3e-6,1e-5 STEPS=200 KEEP=3
need libtorch
cargo bench --locked --profile dev --package trainer --bench checkpoints -- --out "$target/checkpoints" \
  --rates "${RATES:-1e-6,3e-6,1e-5}" --steps "${STEPS:-200}" --keep "${KEEP:-3}"
