"""Conversations whose context is full: what is asked, in which segment, and what is left of it. A model
that answers what a test says stands in for a server; `against_openai.py` has OpenAI's SDK."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest

from springtide import AsyncConversation, Conversation, SpringtideError, Summaries

CALL = {"id": "1", "type": "function", "function": {"name": "price", "arguments": "{}"}}


class Model:
    """Answers `0`, `1`, … or a call. A token is a word, and each message has one more."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.next: list[dict[str, Any] | Exception] = []
        self.usage = True
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def _create(self, **request: Any) -> Any:
        self.requests.append(copy.deepcopy(request))
        said = self.next.pop(0) if self.next else {"content": str(len(self.requests) - 1)}
        if isinstance(said, Exception):
            raise said
        message = {"role": "assistant", **said}
        total = sum(1 + len(str(one.get("content") or "").split()) for one in [*request["messages"], message])
        answer = SimpleNamespace(
            content=message.get("content"),
            tool_calls=message.get("tool_calls"),
            model_dump=lambda exclude_unset: message,
        )
        usage = SimpleNamespace(total_tokens=total) if self.usage else None
        return SimpleNamespace(choices=[SimpleNamespace(message=answer)], usage=usage)

    def said(self, number: int) -> list[str]:
        """The contents of a request's messages, a call as `call`."""
        return [message.get("content") or "call" for message in self.requests[number]["messages"]]

    def metadata(self) -> list[Any]:
        return [request.get("metadata") for request in self.requests]


def conversation(model: Model, summaries: Summaries = "trained", **options: Any) -> Conversation:
    """Two exchanges of `a b c d` fit: each has seven tokens."""
    options = {"context_tokens": 16, "instruction": "sum up", **options}
    return Conversation(model, "m", summaries=summaries, **options)


def test_a_full_context_is_summed_up_and_the_next_begins_with_the_summary() -> None:
    model = Model()
    talk = conversation(model, system="be brief", context_tokens=17, temperature=0.5)
    answers = [talk.say(text).content for text in ("a b c d", "e f g h", "i j k l", "m n o p")]
    assert answers == ["0", "1", "3", "5"]
    assert model.said(2) == ["be brief", "a b c d", "0", "e f g h", "1", "sum up"]
    assert model.said(3) == ["be brief", "sum up", "2", "i j k l"]
    # the summary of a summary
    assert model.said(4) == ["be brief", "sum up", "2", "i j k l", "3", "sum up"]
    assert model.said(5) == ["be brief", "sum up", "4", "m n o p"]
    assert model.metadata() == [None, None, None, {"segment": "1"}, {"segment": "1"}, {"segment": "2"}]
    assert talk.segment == 2
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert all(request["temperature"] == 0.5 and request["model"] == "m" for request in model.requests)


def test_only_a_masked_summary_is_kept_out_of_training() -> None:
    model = Model()
    talk = conversation(model, "masked")
    for text in ("a b c d", "e f g h", "i j k l"):
        talk.say(text)
    assert model.said(2)[-1] == "sum up" and model.said(3) == ["sum up", "2", "i j k l"]
    assert model.metadata() == [None, None, {"train": "false"}, {"segment": "1"}]


def test_without_summaries_the_oldest_messages_are_dropped() -> None:
    model = Model()
    talk = conversation(model, "none", context_tokens=24)
    for text in ("a b c d", "e f g h", "i j k l", "m n o p"):
        talk.say(text)
    # half of the context is left with the newest exchange and what is new
    assert model.said(3) == ["i j k l", "2", "m n o p"]
    assert model.metadata() == [None, None, None, {"segment": "1"}]
    talk.say("q " * 90)
    assert model.said(4) == ["q " * 90], "nothing fits beside it"
    assert talk.segment == 2


def test_results_of_tools_stay_with_their_call_and_the_users_message() -> None:
    model = Model()
    tools = [{"type": "function", "function": {"name": "price"}}]
    model.next = [{"content": None, "tool_calls": [CALL]}] * 2
    talk = conversation(model, context_tokens=12, tools=tools, max_tokens=9, summary_parameters={"max_tokens": 99})
    assert talk.say("what does it cost").tool_calls == [CALL]
    talk.say([{"role": "tool", "tool_call_id": "1", "content": "one two three"}])
    result = {"role": "tool", "tool_call_id": "1", "content": "four five six " * 3}
    assert talk.say([result]).content == "3"
    assert model.said(2) == ["what does it cost", "call", "one two three", "sum up"]
    assert model.said(3) == ["sum up", "2", "what does it cost", "call", "four five six " * 3]
    assert [request["max_tokens"] for request in model.requests] == [9, 9, 99, 9]
    assert all(request["tools"] == tools for request in model.requests)


def test_nothing_is_summed_up_that_would_not_get_shorter() -> None:
    model = Model()
    model.next = [{"content": None, "tool_calls": [CALL]}]
    talk = conversation(model)
    talk.say("a b c d " * 9)
    talk.say([{"role": "tool", "tool_call_id": "1", "content": "two"}])
    assert len(model.requests) == 2 and talk.segment == 0


def test_a_request_that_fails_says_nothing_and_a_summary_is_made_once() -> None:
    model = Model()
    talk = conversation(model)
    talk.say("a b c d")
    before = talk.messages
    model.next = [TimeoutError()]
    with pytest.raises(TimeoutError):
        talk.say("e f g h")
    assert talk.messages == before
    talk.say("e f g h")
    model.next = [{"content": "the sum"}, TimeoutError()]
    with pytest.raises(TimeoutError):
        talk.say("i j k l")
    talk.say("i j k l", max_tokens=3)
    assert [said[-1] for said in map(model.said, range(3, 6))] == ["sum up", "i j k l", "i j k l"]
    assert model.said(5) == ["sum up", "the sum", "i j k l"]
    assert model.requests[5] == {
        "model": "m",
        "messages": talk.messages[:-1],
        "max_tokens": 3,
        "metadata": {"segment": "1"},
    }


def test_metadata_of_the_caller_is_kept() -> None:
    model = Model()
    talk = conversation(model, "masked", metadata={"consent": "true"})
    for text in ("a b c d", "e f g h", "i j k l"):
        talk.say(text)
    assert model.metadata()[1:] == [
        {"consent": "true"},
        {"consent": "true", "train": "false"},
        {"consent": "true", "segment": "1"},
    ]


def test_the_same_with_a_client_for_asyncio() -> None:
    model, blocking = Model(), Model()

    async def create(**request: Any) -> Any:
        return model._create(**request)

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    texts = ("a b c d", "e f g h", "i j k l")

    async def talk() -> list[str]:
        one = AsyncConversation(client, "m", context_tokens=16, instruction="sum up")
        return [(await one.say(text)).content for text in texts]

    other = conversation(blocking)
    assert asyncio.run(talk()) == [other.say(text).content for text in texts]
    assert model.requests == blocking.requests


def test_what_cannot_work_is_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match="context_tokens"):
        conversation(model, context_tokens=0)
    with pytest.raises(ValueError, match="trained, masked, none"):
        conversation(model, "some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stream"):
        conversation(model, stream=True)
    with pytest.raises(ValueError, match="stream"):
        conversation(model).say("a", stream=True)
    with pytest.raises(ValueError, match="nothing is said"):
        conversation(model).say([])
    model.usage = False
    with pytest.raises(SpringtideError, match="usage"):
        conversation(model).say("a")
