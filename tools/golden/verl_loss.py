"""The advantages, losses and gradients of verl for random rewards and log-probabilities.

Run by tools/golden.sh. Writes trainer/tests/golden/verl.json. Calls verl's own functions
(verl/trainer/ppo/core_algos.py) in f64. Needs verl 0.9.1.

Each case has sequences without tokens, single tokens and whole sequences with extreme ratios, and a
group without variance. As in verl's trainer, the batch goes through the loss in micro-batches with the
denominators of the whole batch.
"""
import json
import pathlib
import sys

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

TOKENS = 7
LENGTHS = [7, 0, 3, 1, 5, 4, 2, 6, 7, 0, 5, 3]
GROUPS = np.repeat([0, 1, 2], 4)
MICRO_BATCHES = (slice(0, 5), slice(5, 12))
#: Of REINFORCE's weight, and of the ratio where the advantage is negative.
CAP, DUAL = 2.0, 3.0
#: The policy loss as verl registers it, with its bounds; the advantage; the aggregation.
METHODS = {
    "grpo": ("vanilla", 0.2, 0.2, "grpo", "seq-mean-token-mean"),
    "dr_grpo": ("vanilla", 0.2, 0.2, "dr_grpo", "seq-mean-token-sum-norm"),
    "dapo": ("vanilla", 0.2, 0.28, "grpo", "token-mean"),
    "ppo_clip": ("vanilla", 0.2, 0.2, None, "token-mean"),
    "gspo": ("gspo", 3e-4, 4e-4, "grpo", "seq-mean-token-mean"),
    "cispo": ("cispo", 1.0, 4.0, "grpo", "token-mean"),
    "rloo": ("reinforce", 0.2, 0.2, "rloo", "seq-mean-token-sum"),
}


def advantages_of(name, rewards, mask):
    """By token. `None`: random ones, as a critic might give."""
    if name is None:
        return torch.randn(len(LENGTHS), 1).double().expand(-1, TOKENS)
    # one score per sequence, also where no token counts
    scores = torch.zeros_like(mask)
    scores[:, 0] = rewards
    everywhere = torch.ones_like(mask)
    if name == "rloo":
        found, _ = core_algos.compute_rloo_outcome_advantage(scores, everywhere, GROUPS)
    else:
        by_std = name == "grpo"
        found, _ = core_algos.compute_grpo_outcome_advantage(scores, everywhere, GROUPS, norm_adv_by_std_in_grpo=by_std)
    return found


def loss_of(name, low, high, aggregation, policy, old, advantages, mask, whole):
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        use_dynamic_bsz=True,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=DUAL,
        global_batch_info=whole,
    )
    if name == "reinforce":
        weights = (policy.detach() - old).exp().clamp(max=CAP)
        loss, _ = core_algos.compute_policy_loss_reinforce(old, policy, advantages, mask, aggregation, config, weights)
    else:
        loss, _ = core_algos.get_policy_loss_fn(name)(old, policy, advantages, mask, aggregation, config)
    return loss


def case(method, spread):
    name, low, high, advantage, aggregation = METHODS[method]
    count = len(LENGTHS)
    mask = torch.tensor([[float(token < length) for token in range(TOKENS)] for length in LENGTHS], dtype=torch.float64)
    policy = -torch.rand(count, TOKENS) * 3
    old = policy + torch.randn(count, TOKENS) * spread
    if spread:
        old[2] -= 6.0
        old[7] += 6.0
        old[4, 1] -= 25.0
        old[8, 2] += 25.0
    policy, old = policy.double().requires_grad_(), old.double()
    rewards = torch.cat([torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.full((4,), 0.1), torch.randn(4)]).double()
    advantages = advantages_of(advantage, rewards, mask)
    whole = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": count}
    losses = []
    for rows in MICRO_BATCHES:
        loss = loss_of(
            name, low, high, aggregation, policy[rows], old[rows], advantages[rows], mask[rows], whole
        )
        loss.backward()
        losses.append(loss.item())
    kept = lambda rows: [row[:length] for row, length in zip(rows.tolist(), LENGTHS)]
    return {
        "method": method,
        "low": low,
        "high": CAP if name == "reinforce" else 1 + high if name == "cispo" else high,
        "dual": DUAL,
        "tokens_max": TOKENS,
        "group_size": 4,
        "rewards": rewards.tolist() if advantage else None,
        "policy": kept(policy.detach()),
        "old": kept(old),
        "advantages": advantages[:, 0].tolist(),
        "loss": sum(losses),
        "gradient": kept(policy.grad),
    }


def main():
    torch.manual_seed(12)
    cases = [case(method, spread) for method in METHODS for spread in (0.0, 1e-3, 0.3, 2.0)]
    lines = ",\n".join(json.dumps(one) for one in cases)
    pathlib.Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")
    print(f"verl: {len(cases)} cases")


main()
