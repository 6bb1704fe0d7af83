# Planted versions as canaries on the demo's live traffic: decisions, seconds, users who got a bad one. 5 of each of 9
# kinds; 21 canaries take 21 minutes; downloads vLLM, 3 GB. ARGS='--each 1 --kinds silent'; --shadow answers unseen first
need stack vllm
tools/bench-stack.sh release "$springtide" "$(dirname "$vllm")/python" "${args[@]}"
