"""The environments by name: their tasks, how one attempt goes, and its score."""

import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from openai import OpenAI

import sums
from functions import grade
from functions import tasks as functions
from shop import agent
from shop import world as shop
from splits import Split, Task, distinct, draw
from tables import tasks as tables
from tables import world


@dataclass(frozen=True)
class Environment:
    """One environment, as the harness of a run and the measurements use it."""

    name: str
    #: `make`, `demonstration`.
    world: Any
    #: Of the chat; None: none.
    tools: list[dict] | None
    #: The model's last words, after an attempt at a task.
    attempt: Callable[[OpenAI, str, Task], str]
    #: 0 to 1, from the task's answer and the last words.
    score: Callable[[str, str], float]
    #: The share of the base's transcripts in which the person makes no mistake.
    care: float
    #: The longest answer in tokens.
    max_tokens: int
    #: What the model says in a usual attempt, tokens. The base's training weighs environments by it.
    usual_tokens: int

    def tasks(self, split: Split, count: int, seed: int = 1) -> list[Task]:
        """Different tasks of a split."""
        return distinct(draw(split, seed, self.world.make), count)


def one_answer(max_tokens: int) -> Callable[[OpenAI, str, Task], str]:
    def ask(client: OpenAI, model: str, task: Task) -> str:
        messages: Any = [{"role": "user", "content": task["prompt"]}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens)
        return answer.choices[0].message.content or ""

    return ask


ALL = {
    each.name: each
    for each in [
        Environment("sums", sums, None, one_answer(8), sums.score, 0.45, 8, 3),
        Environment("shop", shop, shop.TOOLS, agent.play, shop.score, 0.2, 48, 50),
        Environment("functions", functions, None, one_answer(48), grade.score, 0.2, 48, 19),
        Environment("tables", tables, None, one_answer(48), world.score, 0.2, 48, 16),
    ]
}
#: What runs if none is named: `tables` needs `springtide world`.
USUAL = [name for name in ALL if name != "tables"]
