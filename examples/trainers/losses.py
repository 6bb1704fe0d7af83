"""The losses of trainer/src/learn/loss.rs in torch. `test_losses.py` compares them with the same golden vectors.

`logp` is log π of each trained token, with gradient; `logprobs` log μ as it was logged; `advantage` that of the
token's generation: float32, one value per token. `lengths`: how many of the tokens each generation has, one
after another. Each loss has one value per token: divide the sum by the number of trajectories of the cohort.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0
PROBABILITY_MAX = 1.0 - 1e-6


def reinforce_is(logp: Tensor, logprobs: Tensor, advantage: Tensor, lengths: list[int], cap: float = 2.0) -> Tensor:
    """−sg(min(ρ, cap)) · A · log π with ρ = exp(log π − log μ)."""
    return -(_ratio(logp.detach(), logprobs).clamp(max=cap) * advantage) * logp


def ppo_clip(
    logp: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    lengths: list[int],
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = None,
) -> Tensor:
    """L = max(−A r, −A clip(r, 1 − low, 1 + high)) with r = exp(log π − log μ). With `dual`, if A < 0, min(L, −A · dual)."""
    loss = _clip(_ratio(logp, logprobs), advantage, low, high)
    return loss if dual is None else torch.where(advantage < 0, torch.minimum(loss, -advantage * dual), loss)


def gspo(
    logp: Tensor, logprobs: Tensor, advantage: Tensor, lengths: list[int], low: float = 3e-4, high: float = 4e-4
) -> Tensor:
    """The same with one ratio for a generation: sg(exp(mean of log π − log μ)) · π / sg(π)."""
    constant = logp.detach()
    means = [part.mean().expand_as(part) for part in (constant - logprobs).split(lengths)]
    ratio = _clamped(torch.cat(means)).exp() * (logp - constant).exp()
    return _clip(ratio, advantage, low, high)


def verdicts(
    logp: Tensor, logprobs: Tensor, advantage: Tensor, lengths: list[int], weight_max: float = 20.0
) -> Tensor:
    """−log p(y) for an accepted generation y, −log(1 − p(y)) for a rejected one, as a weight of log π:
    sg(min(p / (1 − p), weight_max)). Of the policy's own distribution, at temperature 1."""
    p = torch.cat([part.sum().expand_as(part) for part in logp.detach().split(lengths)]).exp().clamp(max=PROBABILITY_MAX)
    weight = (advantage > 0).float() - (p / (1 - p)).clamp(max=weight_max) * (advantage < 0).float()
    return -(weight * logp)


def _clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def _ratio(logp: Tensor, reference: Tensor) -> Tensor:
    return _clamped(logp - reference).exp()


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
