"""Which tasks a model may learn from. A task belongs to one split for ever, by a hash of its prompt.

    base      the transcripts that `make model NAME=agent` trains on
    train     the tasks of a run, and of the supervised bound
    held_out  what success is measured on
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

Split = Literal["base", "train", "held_out"]
Task = dict[str, Any]

#: Of ten buckets of hashes.
BUCKETS: dict[Split, range] = {"held_out": range(1), "train": range(1, 4), "base": range(4, 10)}


def split_of(prompt: str) -> Split:
    bucket = hashlib.blake2b(prompt.encode(), digest_size=8).digest()[0] % 10
    return next(split for split, buckets in BUCKETS.items() if bucket in buckets)


def draw(split: Split, seed: int, make: Callable[[random.Random], Task]) -> Iterator[Task]:
    """Tasks of a split without end, the same for the same seed. `make` gives `prompt` and `answer`.

    A prompt may come again after all others of a small world have come.
    """
    rng = random.Random(f"{split} {seed}")
    number = 0
    while True:
        task = make(rng)
        if split_of(task["prompt"]) == split:
            yield {"id": f"{split}-{seed}-{number}", **task}
            number += 1


def distinct(tasks: Iterator[Task], count: int, tries: int = 200_000) -> list[Task]:
    """The first `count` tasks with different prompts."""
    found: dict[str, Task] = {}
    for _, task in zip(range(tries), tasks):
        found.setdefault(task["prompt"], task)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"there are only {len(found)} different tasks, fewer than {count}")
