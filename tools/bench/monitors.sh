# Simulated monitors of a learning arm's answers: false alarms, delay by effect, two policies that avoid being scored.
# 3 minutes. ARGS='--streams 40 --streams-per-effect 40 --policies 20'
cargo bench --locked --profile dev --package evidence --bench monitors -- --json "$target/bench/monitors.json" "${args[@]}"
