"""An agent with tools, as one writes it for OpenAI's API. Nothing here knows of Springtide.

    OPENAI_API_KEY=… python shop/agent.py
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from openai import OpenAI

from shop.world import TOOLS, World, make, score
from splits import draw

TURNS_MAX = 6


def play(client: OpenAI, model: str, task: dict) -> str:
    """The agent's last words, after as many calls of tools as it likes."""
    world = World(task)
    messages: list = [{"role": "user", "content": task["prompt"]}]
    for _ in range(TURNS_MAX):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=48)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = world.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    for _, task in zip(range(10), draw("held_out", 1, make)):
        client = OpenAI()
        reply = play(client, "gpt-5-mini", task)
        print(score(task["answer"], reply))
