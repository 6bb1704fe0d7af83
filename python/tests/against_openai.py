"""`Conversation` over OpenAI's SDK, against a server that answers what a test says. `make check NAME=environments`
runs it where the SDK is installed."""

from __future__ import annotations

from typing import Any

from faulty_server import Answer, serving
from openai import OpenAI

from springtide import Conversation


def answer(content: str, total_tokens: int) -> Answer:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": total_tokens - 1, "completion_tokens": 1, "total_tokens": total_tokens}
    return Answer(
        200,
        {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage},
    )


def test_segments_and_the_mask_of_a_summary_reach_the_server() -> None:
    with serving(answer("one", 90), answer("all of it", 95), answer("two", 30)) as server:
        client = OpenAI(base_url=f"{server.url}/lease/l/v1", api_key="k", max_retries=0)
        talk = Conversation(
            client, "m", context_tokens=100, summaries="masked", system="s", instruction="sum up", max_tokens=8
        )
        assert [talk.say(text).content for text in ("first", "second")] == ["one", "two"]
        client.close()
    asked: list[Any] = [received.body for received in server.received]
    assert [received.path for received in server.received] == ["/lease/l/v1/chat/completions"] * 3
    assert [body.get("metadata") for body in asked] == [None, {"train": "false"}, {"segment": "1"}]
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "first"}]
    instruction = {"role": "user", "content": "sum up"}
    assert asked[1]["messages"] == [*first, {"role": "assistant", "content": "one"}, instruction]
    summary = {"role": "assistant", "content": "all of it"}
    assert asked[2]["messages"] == [first[0], instruction, summary, {"role": "user", "content": "second"}]
    assert all(body["max_tokens"] == 8 for body in asked)
