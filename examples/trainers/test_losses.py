"""losses.py against what TRL and verl compute, by the golden vectors of trainer/tests/golden: losses and gradients."""

import json
from pathlib import Path

import losses
import pytest
import torch

GOLDEN = Path(__file__).resolve().parents[2] / "trainer/tests/golden"
CASES = [case for name in ("policy_loss", "verl") for case in json.loads((GOLDEN / f"{name}.json").read_text())]


def loss_of(case, logp, old, advantage, lengths):
    clip = {"low": case["low"], "high": case["high"]}
    match case["method"]:
        case "gspo":
            return losses.gspo(logp, old, advantage, lengths, **clip)
        case "cispo":
            return losses.reinforce_is(logp, old, advantage, lengths, cap=case["high"])
        case "rloo":
            return losses.reinforce_is(logp, old, advantage, lengths)
        case _:
            return losses.ppo_clip(logp, old, advantage, lengths, **clip, dual=case["dual"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["method"])
def test_losses_and_gradients_are_those_of_trl_and_verl(case):
    lengths = [len(row) for row in case["policy"]]
    logp = torch.tensor(sum(case["policy"], []), requires_grad=True)
    old = torch.tensor(sum(case["old"], []))
    per_token = case["method"] in ("grpo", "gspo")  # the mean over a sequence's tokens
    scaled = [value / (max(length, 1) if per_token else 1) for value, length in zip(case["advantages"], lengths)]
    advantage = torch.tensor([value for value, length in zip(scaled, lengths) for _ in range(length)])
    denominator = sum(lengths) if case["method"] in ("dapo", "ppo_clip", "cispo") else len(lengths)
    if case["method"] == "dr_grpo":
        denominator *= case["tokens_max"]
    loss = loss_of(case, logp, old, advantage, lengths).sum() / denominator
    loss.backward()
    want = torch.tensor(sum(case["gradient"], []))
    torch.testing.assert_close(logp.grad, want, atol=1e-6, rtol=1e-4)
    if case["loss"] is not None:
        assert loss.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-5)


def test_verdicts_are_the_likelihood_of_what_users_decided():
    logp = torch.tensor([0.5, 0.8, 0.9]).log().requires_grad_()
    loss = losses.verdicts(logp, logp.detach(), torch.tensor([1.0, 1.0, -1.0]), [2, 1])
    loss.sum().backward()
    # accepted: −d log p = −1 a token; rejected: d log(1 − p) by log p is −p / (1 − p)
    torch.testing.assert_close(logp.grad, torch.tensor([-1.0, -1.0, 9.0]), atol=1e-5, rtol=1e-5)
    logp = torch.tensor([0.9999]).log().requires_grad_()
    losses.verdicts(logp, logp.detach(), torch.tensor([-1.0]), [1], weight_max=5.0).sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([5.0]))
