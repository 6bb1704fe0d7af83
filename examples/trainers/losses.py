"""Losses of `trainer/src/learn/loss.rs` in torch, each of one token's log-probability.

`logp` is log π of each trained token, `logprobs` log μ as it was logged, `advantage` that of its generation:
float32 tensors of one shape. Each returns one value per token, to be summed up and divided by the number of
trajectories (`seq-mean-token-sum`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def reinforce_is(logp: Tensor, logprobs: Tensor, advantage: Tensor, cap: float = 2.0) -> Tensor:
    """−sg(min(π/μ, cap)) · A · log π."""
    weight = torch.exp(logp.detach() - logprobs).clamp(max=cap)
    return -weight * advantage * logp


def ppo_clip(
    logp: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = None,
) -> Tensor:
    """−min(r A, clip(r, 1 − low, 1 + high) A) with r = π/μ; with `dual`, not above dual · |A| where A < 0."""
    ratio = torch.exp(logp - logprobs)
    term = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is not None:
        term = torch.where(advantage < 0, torch.maximum(term, dual * advantage), term)
    return -term
