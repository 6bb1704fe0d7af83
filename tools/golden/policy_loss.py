"""The losses and gradients of TRL's GRPO and RLOO trainers for random log-probabilities.

Run by tools/golden.sh. Writes trainer/tests/golden/policy_loss.json. Calls the trainers' own `_compute_loss`; the model is
a function that returns given log-probabilities. Needs trl 1.16.0.

Each case has a sequence without tokens, one whose ratio is extreme, and one of a group without variance, whose advantage
is 0. That of RLOO is on policy: TRL clips its ratio, which REINFORCE does not have. There the gradients are equal, and the
losses are not, so there is none.
"""
import json
import pathlib
import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

SEQUENCES, TOKENS = 6, 7
LENGTHS = [7, 0, 3, 1, 5, 4]
#: As the trainer names them, with what they read of its settings.
METHODS = {
    "grpo": {"loss_type": "grpo", "level": "token", "low": 0.2, "high": 0.2, "delta": None},
    "dapo": {"loss_type": "dapo", "level": "token", "low": 0.2, "high": 0.28, "delta": 3.0},
    "cispo": {"loss_type": "cispo", "level": "token", "low": 0.2, "high": 5.0, "delta": None},
    "gspo": {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4, "delta": None},
    "dr_grpo": {"loss_type": "dr_grpo", "level": "token", "low": 0.2, "high": 0.2, "delta": None},
    "ppo_clip": {"loss_type": "bnpo", "level": "token", "low": 0.2, "high": 0.2, "delta": 3.0},
    "rloo": {"loss_type": None, "level": None, "low": 0.2, "high": 0.2, "delta": None},
}


def trainer(method, log_probs):
    """What `_compute_loss` reads of a trainer with default settings."""
    accelerator = MagicMock()
    accelerator.num_processes = 1
    accelerator.gather = lambda value: value
    nothing = torch.zeros_like(log_probs)
    return SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(delta=method["delta"], steps_per_generation=1, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, nothing, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=method["level"],
        loss_type=method["loss_type"],
        epsilon_low=method["low"],
        epsilon_high=method["high"],
        beta=0.0,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=TOKENS,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def case(name, spread):
    method = METHODS[name]
    mask = torch.tensor([[float(token < length) for token in range(TOKENS)] for length in LENGTHS])
    policy = (-torch.rand(SEQUENCES, TOKENS) * 3).requires_grad_()
    old = policy.detach() + torch.randn(SEQUENCES, TOKENS) * spread
    old[2] -= 6.0
    if name == "rloo":
        old = policy.detach().clone()
    advantages = torch.randn(SEQUENCES)
    advantages[4] = 0.0
    prompts = torch.ones(SEQUENCES, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.ones(SEQUENCES, TOKENS, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "num_items_in_batch": mask.sum(),
    }
    of = RLOOTrainer if name == "rloo" else GRPOTrainer
    loss = of._compute_loss(trainer(method, policy), None, inputs)
    loss.backward()
    kept = lambda rows: [row[:length] for row, length in zip(rows.tolist(), LENGTHS)]
    return {
        "method": name,
        "low": method["low"],
        "high": method["high"],
        "dual": method["delta"],
        "tokens_max": TOKENS,
        "policy": kept(policy.detach()),
        "old": kept(old),
        "advantages": advantages.tolist(),
        "loss": None if name == "rloo" else loss.item(),
        "gradient": kept(policy.grad),
    }


def main():
    torch.manual_seed(11)
    cases = [case(name, spread) for name in METHODS for spread in (0.0, 1e-3, 0.3, 2.0)]
    lines = ",\n".join(json.dumps(one) for one in cases)
    pathlib.Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")


main()
