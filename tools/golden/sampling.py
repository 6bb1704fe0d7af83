"""The results of transformers' logits processors for random logits.

Run by tools/golden.sh. Writes policy/model/tests/golden/sampling.json: logits, previous ids,
parameters, and log-probabilities (null: filtered out), in the order of operations that
`model::sampling` documents.
"""
import json
import pathlib
import sys

import torch
from transformers.generation import logits_process as lp

VOCAB = 60
PARAMS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.02},
    {"min_p": 0.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.4, "min_p": 0.05, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.01, "top_k": 10, "top_p": 0.7, "repetition_penalty": 1.2},
]


def processed(logits, before, p):
    scores = logits[None]
    steps = lp.LogitsProcessorList()
    if "repetition_penalty" in p:
        steps.append(lp.RepetitionPenaltyLogitsProcessor(p["repetition_penalty"]))
    if "temperature" in p:
        steps.append(lp.TemperatureLogitsWarper(p["temperature"]))
    if "min_p" in p:
        steps.append(lp.MinPLogitsWarper(p["min_p"]))
    if "top_k" in p:
        steps.append(lp.TopKLogitsWarper(p["top_k"]))
    if "top_p" in p:
        steps.append(lp.TopPLogitsWarper(p["top_p"]))
    return steps(torch.tensor([before]), scores)[0].double().log_softmax(-1)


def main():
    torch.manual_seed(20)
    cases = []
    for spread in (0.5, 2.0, 6.0):
        for p in PARAMS:
            logits = torch.randn(VOCAB) * spread
            before = torch.randint(VOCAB, (12,)).tolist()
            log_probs = [None if v == float("-inf") else round(v, 9) for v in processed(logits, before, p).tolist()]
            cases.append({"logits": logits.tolist(), "before": before, "params": p, "log_probs": log_probs})
    pathlib.Path(sys.argv[1]).write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")
    print(f"sampling: {len(cases)} cases")


if __name__ == "__main__":
    main()
