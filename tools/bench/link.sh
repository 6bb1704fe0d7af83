# Share of a slow or lossy link of 1 Gb/s that a download through a relay fills, beside bare TCP. As root; 25 minutes.
# ARGS='--times 1'
need build
build bench --bin bench-link
"$target/debug/bench-link" --springtide "$springtide" --json "$target/bench/link.json" "${args[@]}"
