# Deltas in the memory of an NVIDIA GPU, beside the CPU. MIB=16384
need nvrtc
with_nvrtc cargo bench --locked --package artifact --features artifact/cuda --bench cuda -- --mib "${MIB:-16384}" --json "$target/bench/cuda.json"
