# Rollouts and steps at the same time against one after the other, in an example environment. 14 minutes with
# ARGS='shop --seeds 3 --steps 20 --tasks-per-step 4'
need stack
tools/environments-venv.sh .springtide/environments-venv
[ -f .springtide/agent/model/model.safetensors ] || need model NAME=agent
tools/bench-environments.sh "$springtide" "$environments" .springtide/agent overlap overlap "${args[@]}"
