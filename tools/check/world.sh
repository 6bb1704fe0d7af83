# MicroVM worlds: forks diverge, limits hold, escapes fail, nothing outlives its owner. ACCELERATOR=tcg
need world-image
packages qemu-system-x86_64 bwrap
SPRINGTIDE_WORLD_IMAGE=$PWD/.springtide/world-image SPRINGTIDE_WORLD_ACCELERATOR=$(accelerator) \
  cargo test --locked --package world --test worlds -- --ignored --nocapture
