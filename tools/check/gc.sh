# Garbage collection killed after every single step, and beside publishers in many histories. HISTORIES=200
need libtorch
SPRINGTIDE_GC_EVERY=1 SPRINGTIDE_GC_HISTORIES=${HISTORIES:-200} \
  cargo test --locked --package store --lib gc:: -- --nocapture
