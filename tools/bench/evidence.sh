# Simulated releases at continuous looks: false alarms, power, hours until a verdict by traffic. 6 minutes.
# ARGS='--releases 100 --releases-per-effect 20'; ANSWERS=FILE.csv replays logged answers with effects instead.
name=evidence
[ -z "${ANSWERS:-}" ] || name=replay args=(--answers "$(realpath "$ANSWERS")" "${args[@]}")
cargo bench --locked --profile dev --package evidence --bench simulate -- --json "$target/bench/$name.json" "${args[@]}"
