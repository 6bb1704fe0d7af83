# Which faults in an engine's weights its probe notices: planted faults from one bit to half a matrix. 5 minutes.
tools/trainers-venv.sh .springtide/trainers-venv
.springtide/trainers-venv/bin/python tools/bench_noticed.py demo/models/base --json "$target/bench/noticed.json" "${args[@]}"
