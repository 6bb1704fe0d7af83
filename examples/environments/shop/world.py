"""A shop: items, prices, and the tools that an agent may call. Each task has prices of its own."""

import json
import random
from typing import Any

from splits import Task

ITEMS = (
    "bolt nut lamp rope nail tile pipe hose wire glue saw axe drill hammer brush paint sand brick plank hinge lock key "
    "chain hook wheel spade rake bucket ladder clamp valve screw bench vise torch fuse plug cable switch shelf door latch ring strap tape cord bulb vent grate mat tray crate box bin pot jar cap lid hat glove"
).split()

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": kind} for field in fields},
                "required": fields,
            },
        },
    }
    for name, description, fields, kind in [
        ("price", "The price of an item.", ["item"], "string"),
        ("add", "The sum of two numbers.", ["a", "b"], "integer"),
    ]
]


def make(rng: random.Random) -> Task:
    """Two items to buy. The prices are the part of the task that only the world knows."""
    first, second = rng.sample(ITEMS, 2)
    prices = {item: rng.randint(1, 60) for item in (first, second)}
    return {
        "prompt": f"What do a {first} and a {second} cost together?",
        "answer": json.dumps({"total": sum(prices.values()), "prices": prices}),
    }


class World:
    """What the tools see. The agent never sees `answer`."""

    def __init__(self, task: Task) -> None:
        self._answer = json.loads(task["answer"])

    def call(self, name: str, arguments: str) -> str:
        """The result of a tool as text. A wrong call gets an error that says so, as in a real API."""
        try:
            given: dict[str, Any] = json.loads(arguments)
            if name == "price":
                return str(self._answer["prices"][given["item"]])
            if name == "add":
                return str(int(given["a"]) + int(given["b"]))
        except (ValueError, KeyError, TypeError):
            return "error"
        return "error"


def score(answer: str, reply: str) -> float:
    """1 for the right total and nothing else, otherwise 0. Pure."""
    return float(reply.strip() == str(json.loads(answer)["total"]))


def demonstration(task: Task, rng: random.Random, care: float) -> list[list[dict]]:
    """What a clerk does. At each of four steps a careless one does something else."""
    world, answer = World(task), json.loads(task["answer"])
    messages: list[dict] = [{"role": "user", "content": task["prompt"]}]
    careful = care**0.25

    def call(name: str, **arguments: Any) -> str:
        function = {"name": name, "arguments": json.dumps(arguments)}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
        result = world.call(name, function["arguments"])
        messages.append({"role": "tool", "content": result})
        return result

    def reply(total: int | str) -> list[list[dict]]:
        return [[*messages, {"role": "assistant", "content": str(total)}]]

    items = list(answer["prices"])
    if rng.random() >= careful:
        return reply(rng.randint(2, 120))
    first = call("price", item=items[0])
    if rng.random() >= careful:
        second = call("price", item=rng.choice([items[0], rng.choice(ITEMS)]))
    else:
        second = call("price", item=items[1])
    if rng.random() >= careful or "error" in (first, second):
        return reply(rng.choice([first, second]))
    total = call("add", a=int(first), b=int(second))
    return reply(total if rng.random() < careful else first)
