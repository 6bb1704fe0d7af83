# How old the versions were that sampled what a run trained on, over a million tokens of a random model. 14 minutes.
# ARGS='--steps 20'
need stack
tools/environments-venv.sh .springtide/environments-venv
[ -f .springtide/agent/model/model.safetensors ] || need model NAME=agent
"$environments" examples/environments/base/tiny.py .springtide/agent/model .springtide/agent-tiny/model
tools/bench-environments.sh "$springtide" "$environments" .springtide/agent-tiny staleness staleness "${args[@]}"
