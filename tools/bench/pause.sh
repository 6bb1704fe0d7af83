# What a running vLLM does not answer for while its weights change, part by part, with 460 million weights, tensor
# parallel 1 and 2. 20 minutes; downloads vLLM, 3 GB. ARGS='--updates 10'
need vllm
python=$(dirname "$vllm")/python
model=.springtide/random-460
"$python" tools/random_llama.py demo/models/base $model 1536 16
for ranks in 1 2; do
  "$python" tools/bench_pause.py "$vllm" $model --tensor-parallel $ranks --json "$target/bench/pause-$ranks.json" "${args[@]}"
done
