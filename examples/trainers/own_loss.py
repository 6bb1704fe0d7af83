"""A loss of your own on the answers that users judged: one process, plain PyTorch.

    pip install 'springtide[trainer]' torch transformers
    SPRINGTIDE_CONTROL=http://HOST:8002 SPRINGTIDE_API_KEY=… python own_loss.py

The program `springtide` must be on the PATH. Its options, such as `--config FILE` or `--store URL --keys DIR`,
come from `SPRINGTIDE_PULL`.
"""

import os
import shlex
import subprocess
import tempfile

import torch
from transformers import AutoModelForCausalLM

import springtide


def loss_of(logp, sample):
    """Yours: a number from log π of the trained tokens (a tensor) and a `springtide.TrainingSample`."""
    return -sample.advantage * sample.weight * logp.sum()


pull = ["springtide", "policy", "pull", *shlex.split(os.environ.get("SPRINGTIDE_PULL", ""))]
version = None
for cohort in springtide.Trainer():
    if version != cohort.parent:  # at the start, and when a release has moved the line
        subprocess.run([*pull, str(cohort.parent), "model"], check=True)
        model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    samples, total = [], 0.0
    for sample in cohort.samples():
        if sample.temperature > 0:
            samples.append(sample)
        else:  # a point mass has no gradient
            cohort.drop(sample, "greedy")
    if not samples:
        cohort.drop_all("greedy")
        continue
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        logits = model(ids).logits[0, :-1].float() / sample.temperature
        logp = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        loss = loss_of(logp[torch.tensor(sample.loss_mask[1:])], sample) / len(samples)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        rounded = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del rounded["lm_head.weight"]  # a version has a tied tensor once
        model.save_pretrained(folder, state_dict=rounded)
        version = cohort.commit(folder, metrics={"loss": total})
