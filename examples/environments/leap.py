"""Which years are leap years, of reasoning-gym, as a `verifiers` environment. Nothing here knows of
Springtide.

    PYTHONPATH=examples/environments eval leap …      # verifiers' own command runs it too

reasoning-gym makes the tasks (`calendar_arithmetic`) and scores the answers.
"""

import random
from collections.abc import Iterable

import reasoning_gym
import verifiers.v1 as vf
from reasoning_gym.factory import get_score_answer_fn

from splits import Split, Task, distinct, draw

NAME = "calendar_arithmetic"


def make(rng: random.Random) -> Task:
    """One task: a year within a thousand of 2022. A quarter of them are leap years."""
    gym = reasoning_gym.create_dataset(
        NAME, size=1, seed=rng.getrandbits(32), tasks=["is_leap_year"], leap_year_range=2000
    )
    return {"prompt": gym[0]["question"], "answer": gym[0]["answer"]}


def score(answer: str, reply: str) -> float:
    """reasoning-gym's score, 0 to 1. Pure."""
    entry = {"answer": answer, "metadata": {"source_dataset": NAME, "task": "is_leap_year"}}
    return float(get_score_answer_fn(NAME)(reply.strip() or None, entry))


def demonstration(task: Task, rng: random.Random, care: float) -> list[list[dict]]:
    """How a person answers who knows with probability `care`, and else says "Yes" twice as often as "No"."""
    answer = task["answer"] if rng.random() < care else rng.choice(["Yes", "Yes", "No"])
    return [[{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": answer}]]


class QuestionData(vf.TaskData):
    answer: str


class Question(vf.Task[QuestionData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return score(self.data.answer, trace.last_reply)


class QuestionsConfig(vf.TasksetConfig):
    split: Split = "train"
    seed: int = 1
    size: int = 512


class Questions(vf.Taskset[Question, QuestionsConfig]):
    def load(self) -> Iterable[Question]:
        config = self.config
        for task in distinct(draw(config.split, config.seed, make), config.size):
            yield Question(QuestionData(id=task["id"], prompt=task["prompt"], answer=task["answer"]), config.task)


__all__ = ["Questions"]
