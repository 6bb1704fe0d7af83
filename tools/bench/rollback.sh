# Rollbacks under load, three replicas, also while one is stopped: seconds until no user gets the bad version, requests
# that failed. 10 minutes; downloads vLLM, 3 GB. ARGS=
need stack vllm
tools/bench-stack.sh rollback "$springtide" "$(dirname "$vllm")/python" "${args[@]}"
