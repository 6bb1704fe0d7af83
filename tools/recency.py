#!/usr/bin/env python3
"""Computes how much smaller deltas could be if the receiver also knew which weights moved recently.
These are the bounds in docs/delta.md.

Usage: tools/recency.py DIR     (needs numpy)

DIR has consecutive versions in bf16, each a folder with a model.safetensors, as `make model NAME=checkpoints`
writes them. For the last two pairs of versions it prints the ratio of two perfect coders. The first
knows each weight's exponent. The second also knows in which direction the weight last moved, and how
many versions ago (up to 40, or only whether in the last version).
"""

import json
import pathlib
import struct
import sys

import numpy as np

# Ranges of ages, in versions, that the coder distinguishes. All older ages are one more class.
AGES = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 24), (25, 32), (33, 40)]
OLDEST = AGES[-1][1]
NEVER = 255


def weights(folder):
    """The bits of all tensors, by name."""
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = []
    for name in sorted(header):
        if header[name]["dtype"] != "BF16":
            sys.exit(f"{folder}: {name} is {header[name]['dtype']}, not BF16")
        begin, end = header[name]["data_offsets"]
        tensors.append(np.frombuffer(data[8 + length + begin : 8 + length + end], np.uint16))
    return np.concatenate(tensors)


def places(bits):
    """The rank of each value among all bf16 values in ascending order."""
    signed = bits.astype(np.int32)
    return np.where(signed & 0x8000, -(signed & 0x7FFF), signed & 0x7FFF)


def entropy(context, symbol):
    """Total bits of the symbols, each coded with the frequencies of its context."""
    contexts = int(context.max()) + 1
    counts = np.bincount(symbol * contexts + context)
    counts = np.pad(counts, (0, -len(counts) % contexts)).reshape(-1, contexts)
    totals = np.broadcast_to(counts.sum(0), counts.shape)
    seen = counts > 0
    return -(counts[seen] * np.log2(counts[seen] / totals[seen])).sum()


def bits_of(changed, steps, contexts, directions):
    """Bits for which weights change, and for how far each of them moves."""
    which = entropy(contexts, changed.astype(np.int64))
    how_far = entropy((contexts * 2 + directions)[changed], np.clip(steps[changed], -20, 20).astype(np.int64) + 20)
    return which + how_far


def main(folder):
    folders = sorted(path.parent for path in pathlib.Path(folder).glob("*/model.safetensors"))
    if len(folders) < 3:
        sys.exit(__doc__)
    before = weights(folders[0])
    age = np.full(len(before), NEVER, np.uint8)
    up = np.zeros(len(before), bool)
    for index in range(1, len(folders)):
        after = weights(folders[index])
        steps = places(after) - places(before)
        changed = after != before  # 0.0 and -0.0 have the same rank
        if index >= len(folders) - 2:
            exponents = (before >> 7 & 0xFF).astype(np.int64)
            ages = sum(((age >= low) & (age <= high)) * i for i, (low, high) in enumerate(AGES, 1))
            known = age <= OLDEST
            raw = 16 * len(before)
            alone = raw / bits_of(changed, steps, exponents, np.zeros_like(exponents))
            last = raw / bits_of(changed, steps, exponents * 2 + (age == 1), up & (age == 1))
            all_ages = raw / bits_of(changed, steps, exponents * (len(AGES) + 1) + ages, up & known)
            again = changed & known
            back = (again & ((steps > 0) != up)).sum() / max(again.sum(), 1)
            print(f"{folders[index - 1].name} to {folders[index].name}: {changed.mean():.2%} changed; by exponent {alone:.1f}x")
            print(f"  and whether it moved in the last version: {last:.1f}x, {last / alone - 1:.1%} more")
            print(f"  and when it moved in the last {OLDEST}: {all_ages:.1f}x, {all_ages / alone - 1:.1%} more")
            print(f"  of the changes {again.sum() / changed.sum():.1%} moved in the last {OLDEST}, {back:.1%} of these now back")
        age = np.where(age < NEVER, age + 1, age).astype(np.uint8)
        age[changed] = 1
        up = np.where(changed, steps > 0, up)
        before = after


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__))
