# Kills the gateway, a vLLM server, the updater and springtide follow under load; compares callers, log and exact model.
# About 45 minutes; downloads vLLM, 3 GB. KILLS=50 of each, ARGS='--engines 3'
need stack vllm
build bench --bin chaos-engines
"$target/debug/chaos-engines" --springtide "$springtide" --vllm "$vllm" --model $model --kills "${KILLS:-50}" \
  --json "$target/bench/chaos-engines.json" "${args[@]}"
