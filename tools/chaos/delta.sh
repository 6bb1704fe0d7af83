# Damaged stores, wrong bases, broken deltas, replicas killed during a sync. TRIALS=100000 KILLS=1000
need stack
SPRINGTIDE_FAULTS_TRIALS=${TRIALS:-100000} SPRINGTIDE_DELTA_TENSORS=${TRIALS:-100000} \
  cargo test --locked --package store --package artifact --lib -- --nocapture tests::faults delta::tests
cargo test --locked --package serving --lib -- trust
SPRINGTIDE_SYNC_KILLS=${KILLS:-1000} it serving sync_kills
