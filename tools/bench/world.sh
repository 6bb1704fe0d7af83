# Cold and warm starts per second of microVM worlds, memory per fork. ACCELERATOR=tcg ARGS='--cold 3 --warm 30 --alive 8'
need world-image
packages qemu-system-x86_64 bwrap
cargo bench --locked --profile dev --package world --bench world -- --image "$PWD/.springtide/world-image" \
  --accelerator "$(accelerator)" --json "$target/bench/world.json" "${args[@]}"
