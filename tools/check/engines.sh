# The tests of python/ with torch, and the contract tests against a real vLLM and a real SGLang (API only, stubbed
# kernels): do they still answer as recorded. 3 minutes; downloads vLLM, 3 GB. RECORD=1 records them anew
need sglang
packages curl
tools/test-engines.sh "$vllm" "$sglang" $model ${RECORD:+record}
