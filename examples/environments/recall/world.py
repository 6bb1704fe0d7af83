"""Guests to remember. A task's prompt has what the user says, a line for each message."""

import random
import re
from types import SimpleNamespace
from typing import Any

from recall.agent import INSTRUCTION, play
from splits import Task

NAMES = (
    "Ada Amy Ben Bob Dan Dora Emma Eva Finn Hugo Ian Ivy Jack Joe Kim Leo Lily Max Mia Nina Otto Pat Rosa Ruth Sam Tim "
    "Uma Zoe"
).split()
GUESTS = (4, 5)
QUESTION = "Who?"
#: The share of the guests that a careless person's summary keeps.
KEPT = 0.5


def make(rng: random.Random) -> Task:
    """Guests, then the question who they were."""
    guests = rng.sample(NAMES, rng.choice(GUESTS))
    return {"prompt": "\n".join([*guests, QUESTION]), "answer": "\n".join(guests)}


def score(answer: str, reply: str) -> float:
    """The share of the guests that were named; names too many count against it. Pure."""
    guests, named = answer.split("\n"), reply.strip().split("\n")
    return len(set(guests) & set(named)) / max(len(guests), len(named))


def demonstration(task: Task, rng: random.Random, care: float) -> list[list[dict]]:
    """The contexts of an attempt by a person whose summaries have everything with probability `care`, else
    a share of it. The person plays in the place of the model."""
    person = Person(rng, careful=rng.random() < care)
    play(person, "", task)
    return person.contexts


class Person:
    """Answers requests as OpenAI's client does."""

    def __init__(self, rng: random.Random, careful: bool) -> None:
        self._rng = rng
        self._careful = careful
        #: The messages of each context so far.
        self.contexts: list[list[dict]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def _create(self, *, messages: list[dict], metadata: dict | None = None, **_: Any) -> Any:
        reply = self._reply(messages)
        message = {"role": "assistant", "content": reply}
        del self.contexts[int((metadata or {}).get("segment", 0)) :]
        self.contexts.append([*messages, message])
        answer = SimpleNamespace(content=reply, model_dump=lambda **_: message)
        usage = SimpleNamespace(total_tokens=sum(map(tokens, self.contexts[-1])))
        return SimpleNamespace(choices=[SimpleNamespace(message=answer)], usage=usage)

    def _reply(self, messages: list[dict]) -> str:
        known, said = guests_of(messages), messages[-1]["content"]
        if said == QUESTION:
            return "\n".join(known)
        if said == INSTRUCTION:
            kept = [name for name in known if self._careful or self._rng.random() < KEPT]
            return "\n".join(kept or [self._rng.choice(known)])
        return "ok"


def guests_of(messages: list[dict]) -> list[str]:
    """Who was named in a context. Pure."""
    lines = "\n".join(message["content"] for message in messages).split("\n")
    return [line for line in lines if line in NAMES]


def tokens(message: dict) -> int:
    """About how many the agent model's tokenizer makes of a message: words, signs, and five around it."""
    return 5 + len(re.findall(r"\w+|\W", message["content"]))
