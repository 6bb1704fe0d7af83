"""The losses and gradients of TRL's DPO and KTO trainers for random log-probabilities.

Run by tools/golden.sh. Writes trainer/tests/golden/preference.json. Calls the trainers' own
`_compute_loss`; the models are functions that return given log-probabilities. Needs trl 1.16.0.
"""
import json
import pathlib
import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

TOKENS = 6


def model(log_probs):
    """A model whose answer has these log-probabilities, [sequences, TOKENS]."""
    nothing = torch.zeros_like(log_probs)
    outputs = SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    return lambda **_: outputs


def trainer(**settings):
    """What `_compute_loss` reads of a trainer with default settings."""
    accelerator = MagicMock()
    accelerator.device = torch.device("cpu")
    accelerator.gather_for_metrics = lambda value: value
    accelerator.gather = lambda value: value
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def random_log_probs(sequences, spread):
    return -torch.rand(sequences, TOKENS) * spread


def sums(policy, reference):
    return [[float(p), float(r)] for p, r in zip(policy.double().sum(1), reference.double().sum(1))]


def inputs(sequences):
    ids = torch.ones(sequences, TOKENS + 1, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": ids.clone(), "completion_mask": ids.clone()}


def dpo_case(beta, pairs, spread):
    policy = random_log_probs(2 * pairs, spread).requires_grad_()
    reference = random_log_probs(2 * pairs, spread)
    this = trainer(
        beta=beta,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
        ref_model=model(reference),
    )
    loss = DPOTrainer._compute_loss(this, Callable(model(policy), True), inputs(2 * pairs), False)
    loss.backward()
    both = sums(policy.detach(), reference)
    gradient = policy.grad[:, 0].tolist()
    return {
        "beta": beta,
        "chosen": both[:pairs],
        "rejected": both[pairs:],
        "loss": loss.item(),
        "gradient_chosen": gradient[:pairs],
        "gradient_rejected": gradient[pairs:],
    }


class Callable:
    """A model that is trained."""

    def __init__(self, call, training):
        self.call = call
        self.training = training

    def __call__(self, **arguments):
        return self.call(**arguments)


def kto_case(beta, weights, desirable, spread):
    count = len(desirable)
    policy = random_log_probs(count, spread).requires_grad_()
    reference = random_log_probs(count, spread)
    mismatched = random_log_probs(count, spread), random_log_probs(count, spread)
    batch = inputs(count)
    batch |= {f"KL_{name}": value for name, value in inputs(count).items()}
    batch["label"] = torch.tensor(desirable)
    this = trainer(
        beta=beta,
        calculate_KL=True,
        loss_type="kto",
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        ref_model="reference",
    )
    policy_model, reference_model = Callable(model(policy), True), model(reference)
    this.ref_model = reference_model
    this._compute_kl_logps = lambda of, _: mismatched[0 if of is policy_model else 1].sum(1)
    loss = KTOTrainer._compute_loss(this, policy_model, batch, False)
    loss.backward()
    return {
        "beta": beta,
        "desirable_weight": weights[0],
        "undesirable_weight": weights[1],
        "completions": sums(policy.detach(), reference),
        "desirable": desirable,
        "mismatched": sums(*mismatched),
        "reference_point": this._metrics["train"]["kl"][0],
        "loss": loss.item(),
        "gradient": policy.grad[:, 0].tolist(),
    }


def main():
    torch.manual_seed(21)
    dpo = [
        dpo_case(beta, pairs, spread)
        for beta in (0.05, 0.1, 0.5)
        for pairs, spread in ((1, 1.0), (4, 3.0), (7, 10.0))
    ]
    kto = [
        kto_case(beta, weights, desirable, spread)
        for beta in (0.1, 0.4)
        for weights in ((1.0, 1.0), (1.0, 1.33), (0.5, 2.0))
        for desirable, spread in (([True, False, True, False], 2.0), ([True, True, True, False, True], 6.0))
    ]
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"dpo": dpo, "kto": kto}, indent=1) + "\n")
    print(f"preference: {len(dpo)} cases of DPO, {len(kto)} of KTO")


if __name__ == "__main__":
    main()
