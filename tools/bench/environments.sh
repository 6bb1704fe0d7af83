# GRPO in the example environments beside TRL's, with base and supervised bound. Hours; downloads vLLM, 3 GB.
# ARGS='shop --seeds 1 --steps 4 --every 2'
need stack vllm
tools/environments-venv.sh .springtide/environments-venv "$vllm"
[ -f .springtide/agent/model/model.safetensors ] || need model NAME=agent
tools/bench-environments.sh "$springtide" "$environments" .springtide/agent bench environments "${args[@]}"
