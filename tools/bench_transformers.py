#!/usr/bin/env python3
"""Measures transformers on PyTorch in f32 on one thread, and adds it to the f32 rows of a report.

The training step is the same micro-batch: logits at 16 positions of each sequence, and a backward
pass through all of it. Each figure is the median of 3 rounds of at least 0.3 s.

usage: tools/bench_transformers.py target/bench/policy.json
"""
import json
import re
import statistics
import sys
import time

import torch
import transformers

ROUNDS = 3


def rate(work):
    work()
    rounds = []
    for _ in range(ROUNDS):
        started, tokens = time.perf_counter(), 0
        while time.perf_counter() - started < 0.3:
            tokens += work()
        rounds.append(tokens / (time.perf_counter() - started))
    return statistics.median(rounds)


def row(model, ids, what, steps):
    numbers = [int(n) for n in re.findall(r"\d+", what)]
    half = len(ids) // 2
    prompt = torch.tensor([ids[:half]])

    def prefill():
        with torch.no_grad():
            model(prompt, use_cache=True, logits_to_keep=1)
        return half

    if what.startswith("prefill"):
        return rate(prefill)
    if what.startswith("decode"):
        batch = numbers[0]
        with torch.no_grad():
            cache = model(prompt.repeat(batch, 1), use_cache=True, logits_to_keep=1).past_key_values
        token = torch.full((batch, 1), 11)

        def decode():
            cache.crop(half - cache.get_seq_length())
            with torch.no_grad():
                for _ in range(steps):
                    model(token, past_key_values=cache, use_cache=True)
            return steps * batch

        return rate(decode)
    count = numbers[0]
    rows = torch.tensor([ids[:half]] * count)

    def step():
        logits = model(rows, use_cache=False, logits_to_keep=16).logits
        logits.log_softmax(-1)[..., 3].sum().backward()
        model.zero_grad()
        return count * half

    return rate(step)


def main():
    path = sys.argv[1]
    torch.set_num_threads(1)
    with open(path) as file:
        report = json.load(file)
    models = {}
    print("\n| model | what | exact, tokens/s | transformers f32, tokens/s | exact ÷ transformers |")
    print("|---|---|---|---|---|")
    for entry in report["rows"]:
        if entry["products"] != "f32":
            continue
        folder = entry["folder"]
        if folder not in models:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            context = 256 if "demo" in folder else 512
            vocabulary = model.config.vocab_size
            models[folder] = model.eval(), [i * 7919 % vocabulary for i in range(context)]
        model, ids = models[folder]
        theirs = row(model, ids, entry["what"], entry["steps"])
        entry["transformers_tokens_per_second"] = theirs
        entry["ratio_transformers"] = entry["exact_tokens_per_second"] / theirs
        print(
            f"| {entry['model']} | {entry['what']} | {entry['exact_tokens_per_second']:.0f} | {theirs:.0f} "
            f"| **{entry['ratio_transformers']:.2f}** |"
        )
    report["transformers"] = {"transformers": transformers.__version__, "torch": torch.__version__}
    with open(path, "w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()
