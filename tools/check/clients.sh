# SDKs, evaluators and coding agents against a running Springtide. PyPI and npm, 600 MB; evaluators share vLLM's torch,
# 3 GB. KINDS='sdk evaluators agents'
need stack vllm
packages curl
# shellcheck disable=SC2086 # one argument per kind
tools/test-clients.sh "$springtide" $model .springtide/clients "$vllm" ${KINDS:-}
