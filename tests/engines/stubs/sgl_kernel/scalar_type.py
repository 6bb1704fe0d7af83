"""Names of number formats. SGLang's kernels have vLLM's file."""

from vllm.scalar_type import ScalarType, scalar_types

__all__ = ["ScalarType", "scalar_types"]
