//! Answers recorded from vLLM 0.32.0 with `--enable-scale-out --logprobs-mode processed_logprobs`.
