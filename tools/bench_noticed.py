"""Which faults in an engine's weights the reference log-probabilities notice: a share of planted faults by their
size, for each bound of `probe_error_max`. Compares as followers do: up to the first token that is another one.

    bench_noticed.py MODEL --json FILE     with a Python that has torch, transformers and the wheel
"""

import argparse
import json
import math
import pathlib

import torch
from transformers import AutoModelForCausalLM

import springtide

BOUNDS = [0.0001, 0.001, 0.01, 0.05]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--draws", type=int, default=40, help="faults of each kind")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    matrices = [value for name, value in model.named_parameters() if value.ndim == 2 and "embed" not in name]
    said = reference(model)
    rows = {}
    for kind, plant in FAULTS.items():
        differences = []
        for _ in range(args.draws):
            matrix = matrices[int(torch.randint(len(matrices), (1,), generator=generator))]
            kept = matrix.detach().clone()
            with torch.no_grad():
                plant(matrix, generator)
            differences.append(difference(said, reference(model)))
            with torch.no_grad():
                matrix.copy_(kept)
        found = {str(bound): sum(value > bound for value in differences) / len(differences) for bound in BOUNDS}
        median = sorted(differences)[len(differences) // 2]
        # null: too few tokens can be compared
        rows[kind] = {"noticed": found, "median": median if math.isfinite(median) else None}
        print(f"{kind:40} median {median:.1e} nats, noticed at {found}", flush=True)
    report = {"model": str(args.model), "draws": args.draws, "rows": rows}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def reference(model: torch.nn.Module) -> list[dict]:
    config = model.config

    @torch.no_grad()
    def logits(texts: list[list[int]]) -> torch.Tensor:
        return model(torch.tensor(texts)).logits[:, -1]

    return springtide.reference(logits, config.vocab_size, config.max_position_embeddings)["answers"]


def difference(before: list[dict], after: list[dict]) -> float:
    """The largest, or infinite if fewer than a quarter of the tokens can be compared."""
    largest, compared, total = 0.0, 0, 0
    for old, new in zip(before, after):
        total += len(old["token_ids"])
        for ids, logprobs in zip(zip(old["token_ids"], new["token_ids"]), zip(old["logprobs"], new["logprobs"])):
            if ids[0] != ids[1]:
                break
            largest = max(largest, abs(logprobs[0] - logprobs[1]))
            compared += 1
    return largest if compared * 4 >= total else float("inf")


def one(matrix, generator):
    row, column = (int(torch.randint(size, (1,), generator=generator)) for size in matrix.shape)
    return matrix[row, column : column + 1]


def last_bit(values, generator=None, part=1.0):
    """The last bit of bfloat16 of a part of the values is another one."""
    bits = values.bfloat16().view(torch.int16)
    chosen = torch.rand(bits.shape, generator=generator) < part
    values.copy_(torch.where(chosen, bits ^ 1, bits).view(torch.bfloat16).float())


FAULTS = {
    "one weight, last bit": lambda matrix, generator: last_bit(one(matrix, generator)),
    "one weight, sign": lambda matrix, generator: one(matrix, generator).neg_(),
    "one weight, 100 times": lambda matrix, generator: one(matrix, generator).mul_(100),
    "one row kept from a step before": lambda matrix, generator: last_bit(
        matrix[int(torch.randint(len(matrix), (1,), generator=generator))], generator, 0.05
    ),
    "one row of zeros": lambda matrix, generator: matrix[int(torch.randint(len(matrix), (1,), generator=generator))].zero_(),
    "two rows exchanged": lambda matrix, generator: matrix[:2].copy_(matrix[:2].flip(0).clone()),
    "half a matrix kept from a step before": lambda matrix, generator: last_bit(
        matrix[: len(matrix) // 2], generator, 0.05
    ),
    "a matrix kept from a step before": lambda matrix, generator: last_bit(matrix, generator, 0.05),
    "a matrix of half the scale": lambda matrix, generator: matrix.mul_(0.5),
    "half a matrix of zeros": lambda matrix, generator: matrix[: len(matrix) // 2].zero_(),
}

if __name__ == "__main__":
    main()
