# Old weeks are dropped beside a long reader and honest traffic. 10⁷ rows: 20 minutes and 15 GB of disk. ROWS=10000000
need stack
SPRINGTIDE_EXPIRY_ROWS=${ROWS:-10000000} SPRINGTIDE_EXPIRY_JSON=$target/bench/expiry.json it log expiry::
