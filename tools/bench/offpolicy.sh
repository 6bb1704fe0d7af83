# What logged answers say about versions, beside what users gave them later: demos, one after another, 8 minutes each.
# Downloads vLLM, 3 GB. SEEDS='1 2 3 4 5' ARGS='--minutes 6'
need stack vllm
rm -f "$target/bench/offpolicy.json"
for seed in ${SEEDS:-1 2 3 4 5}; do
  tools/bench-stack.sh offpolicy "$springtide" "$(dirname "$vllm")/python" --seed "$seed" "${args[@]}"
done
