# One of three vLLM servers is killed, then a release and a rollback under load: requests that failed, seconds. 5 minutes;
# downloads vLLM, 3 GB.
need stack vllm
python3 tools/dead_engine.py --springtide "$springtide" --vllm "$vllm" --base $model --cache .stack --json "$target/bench/dead-engine.json"
