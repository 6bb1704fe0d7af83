# What honest traffic notices of slow connections, floods, poison, wrong clocks and transactions. 8 minutes.
# SECONDS=20 RATE=100 CONNECTIONS=2000 CONNECTIONS_MAX=1000 CASES='slow bodies; random keys'
need stack
cargo build --locked --release --package springtide
SPRINGTIDE_ATTACKS_PROGRAM=$target/release/springtide SPRINGTIDE_ATTACKS_CASES=${CASES:-all} \
  SPRINGTIDE_ATTACKS_SECONDS=${FOR:-20} SPRINGTIDE_ATTACKS_RATE=${RATE:-100} SPRINGTIDE_ATTACKS_COMPLETIONS=5 \
  SPRINGTIDE_ATTACKS_CONNECTIONS=${CONNECTIONS:-2000} SPRINGTIDE_ATTACKS_CONNECTIONS_MAX=${CONNECTIONS_MAX:-1000} \
  SPRINGTIDE_ATTACKS_JSON=$target/bench/attacks.json it log attacks::
