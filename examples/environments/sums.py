"""Sums of reasoning-gym as a `verifiers` environment. Nothing here knows of Springtide.

    PYTHONPATH=examples/environments eval sums …      # verifiers' own command runs it too

reasoning-gym makes the tasks (`chain_sum`) and scores the answers.
"""

import random
from collections.abc import Iterable

import reasoning_gym
import verifiers.v1 as vf
from reasoning_gym.factory import get_score_answer_fn

from splits import Split, Task, distinct, draw

NAME = "chain_sum"


def make(rng: random.Random) -> Task:
    """One task: two or three numbers of one digit."""
    gym = reasoning_gym.create_dataset(
        NAME, size=1, seed=rng.getrandbits(32), min_terms=2, max_terms=3, min_digits=1, max_digits=1
    )
    return {"prompt": gym[0]["question"], "answer": gym[0]["answer"]}


def score(answer: str, reply: str) -> float:
    """reasoning-gym's score, 0 to 1. Pure."""
    entry = {"answer": answer, "metadata": {"source_dataset": NAME}}
    return float(get_score_answer_fn(NAME)(reply.strip() or None, entry))


def demonstration(task: Task, rng: random.Random, care: float) -> list[list[dict]]:
    """How a person answers who is right with probability `care`, else wrong by a little."""
    answer = int(task["answer"])
    if rng.random() >= care:
        answer += rng.choice([-10, -2, -1, 1, 2, 10])
    return [[{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": str(answer)}]]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return score(self.data.answer, trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    split: Split = "train"
    seed: int = 1
    size: int = 512


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterable[Sum]:
        config = self.config
        for task in distinct(draw(config.split, config.seed, make), config.size):
            yield Sum(SumData(id=task["id"], prompt=task["prompt"], answer=task["answer"]), config.task)


__all__ = ["Sums"]
