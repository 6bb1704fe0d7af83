"""The environments by name: their tasks, how one attempt goes, and its score."""

import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from openai import OpenAI
from springtide import Summaries

import leap
from functions import grade
from functions import tasks as functions
from recall import agent as recall_agent
from recall import world as recall
from shop import agent as shop_agent
from shop import world as shop
from splits import Split, Task, distinct, draw
from tables import tasks as tables
from tables import world


@dataclass(frozen=True)
class Environment:
    """One environment, as the harness of a run and the measurements use it."""

    name: str
    #: `make`, and `demonstration`: the contexts of an attempt, each a conversation.
    world: Any
    #: Of the chat; None: none.
    tools: list[dict] | None
    #: What the model answered, after an attempt at a task.
    attempt: Callable[[OpenAI, str, Task], str]
    #: 0 to 1, from the task's answer and the model's.
    score: Callable[[str, str], float]
    #: Of the base's transcripts, see `CARE`.
    care: float
    #: The longest answer in tokens.
    max_tokens: int
    #: What the model says in a usual attempt, tokens. `WEIGHT` is divided by it.
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


#: The share of the base's transcripts in which the person makes no mistake. More care is more success of
#: the base, and less that a run can improve.
CARE = {"leap": 0.0, "shop": 0.4, "functions": 0.1, "recall": 0.5, "tables": 0.2}
#: How much an attempt's transcripts weigh in the base's training, beside those of the others. Copies,
#: of lists and of prices, are the hardest to learn.
WEIGHT = {"leap": 1.0, "shop": 2.0, "functions": 1.0, "recall": 1.5, "tables": 1.0}

ALL = {
    each.name: each
    for each in [
        Environment("leap", leap, None, one_answer(4), leap.score, CARE["leap"], 4, 2),
        Environment("shop", shop, shop.TOOLS, shop_agent.play, shop.score, CARE["shop"], 48, 50),
        Environment("functions", functions, None, one_answer(48), grade.score, CARE["functions"], 48, 19),
        Environment("recall", recall, None, recall_agent.play, recall.score, CARE["recall"], 24, 23),
        Environment("tables", tables, None, one_answer(48), world.score, CARE["tables"], 48, 16),
    ]
}
#: What runs if none is named: `tables` needs `springtide world`.
USUAL = [name for name in ALL if name != "tables"]


def named(name: str, summaries: Summaries = "trained") -> Environment:
    """An environment whose contexts begin anew with or without a summary. Only `recall` has several."""
    if name != "recall":
        return ALL[name]
    return replace(ALL[name], attempt=partial(recall_agent.play, summaries=summaries))
