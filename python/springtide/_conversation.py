"""Conversations that go on when their context is full: the policy sums up, and a new context begins.

    client = OpenAI(base_url=lease.base_url, api_key=lease.api_key)
    conversation = springtide.Conversation(client, lease.model, context_tokens=3000, max_tokens=500)
    answer = conversation.say("How many bolts are in box 7?")

    segment 0   system  user  assistant  user  assistant  instruction  summary
    segment 1   system  instruction  summary  user  assistant …

The reward of the rollout reaches every sampled token of all segments. Nothing here counts tokens
exactly: the server's `usage` says how long the context was, and what is new is estimated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal

from springtide._errors import SpringtideError

#: `trained`: a summary's tokens are trained on like all others. `masked`: they are not. `none`: there
#: are no summaries, and the oldest messages are dropped.
Summaries = Literal["trained", "masked", "none"]
SUMMARIES: tuple[Summaries, ...] = ("trained", "masked", "none")
#: How the policy is asked for a summary, without other wish.
INSTRUCTION = (
    "Your context is full. Summarize this conversation for yourself: you will go on with your summary and "
    "my next message alone. Keep every fact that may still be needed, what has been done, and what is left to do."
)
#: Without summaries, this share of the context is left with the newest messages.
SHARE_KEPT = 1 / 2

Message = dict[str, Any]


class _Conversation:
    """What both conversations share. It asks by yielding requests, and gets their answers."""

    def __init__(
        self,
        client: Any,
        model: str,
        *,
        context_tokens: int,
        summaries: Summaries = "trained",
        system: str | None = None,
        instruction: str = INSTRUCTION,
        summary_parameters: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> None:
        """`client` is of OpenAI's SDK, or has its `chat.completions.create`.

        A new context begins before a prompt would have more than `context_tokens`. Leave room in the
        model's context for an answer, the instruction and a summary.

        `parameters` are those of each request, such as `max_tokens` and `tools`; `summary_parameters`
        replace some of them when a summary is asked for.
        """
        if context_tokens < 1:
            raise ValueError("context_tokens must be at least 1")
        if summaries not in SUMMARIES:
            raise ValueError(f"summaries is {summaries!r}: give one of {', '.join(SUMMARIES)}")
        _check(parameters)
        #: Contexts before this one.
        self.segment = 0
        self._client = client
        self._model = model
        self._context_tokens = context_tokens
        self._summaries = summaries
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._instruction: Message = {"role": "user", "content": instruction}
        self._parameters = parameters
        self._summary_parameters = dict(summary_parameters or {})
        self._messages: list[Message] = []
        #: Messages at the beginning that were carried over: an instruction and its summary, or none.
        self._carried = 0
        #: Of the prompt and the answer of the last request. None: no answer yet in this context.
        self._tokens: int | None = None

    @property
    def messages(self) -> list[Message]:
        """The present context: the system's message, what was carried over, and what was said since."""
        return [*self._system, *self._messages]

    def _turn(self, said: str | Sequence[Mapping[str, Any]], parameters: dict[str, Any]) -> Generator[Message, Any, Any]:
        """Yields the requests of one turn, and returns the message that answers `said`."""
        _check(parameters)
        new: list[Message]
        new = [{"role": "user", "content": said}] if isinstance(said, str) else [dict(message) for message in said]
        if not new:
            raise ValueError("nothing is said: give a text, or at least one message")
        if self._tokens is not None and self._tokens + self._estimate(new) > self._context_tokens:
            yield from self._begin_anew(new)
        answer = yield self._request([*self._messages, *new], {**self._parameters, **parameters})
        if answer.usage is None:
            raise SpringtideError("the answer has no `usage`, which says how full the context is: let the server send it")
        message = answer.choices[0].message
        self._messages += [*new, message.model_dump(exclude_unset=True)]
        self._tokens = answer.usage.total_tokens
        return message

    def _begin_anew(self, new: list[Message]) -> Generator[Message, Any, None]:
        """Replaces what was said before `new` by a summary of it. Results of tools stay with their call,
        and the call with the user's last message."""
        answers_a_call = new[0].get("role") == "tool"
        old, call = (self._messages[:-1], self._messages[-1:]) if answers_a_call else (self._messages, [])
        if len(old) <= self._carried + 1:
            return  # a summary would be no shorter
        asked = [message for message in old if message.get("role") == "user"][-1:] if answers_a_call else []
        if self._summaries == "none":
            self._messages = [*(self._newest(old, [*call, *new]) or asked), *call]
        else:
            parameters = {**self._parameters, **self._summary_parameters}
            trained = self._summaries == "trained"
            answer = yield self._request([*old, self._instruction], parameters, trained=trained)
            summary = {"role": "assistant", "content": answer.choices[0].message.content or ""}
            self._messages = [self._instruction, summary, *asked, *call]
            self._carried = 2
        self.segment += 1
        self._tokens = None

    def _newest(self, old: list[Message], new: list[Message]) -> list[Message]:
        """The newest of the old messages, from a user's on, that leave room beside the new ones."""
        for at, message in enumerate(old):
            fits = self._estimate([*old[at:], *new]) <= SHARE_KEPT * self._context_tokens
            if message.get("role") == "user" and fits:
                return old[at:]
        return []

    def _request(self, messages: list[Message], parameters: dict[str, Any], *, trained: bool = True) -> Message:
        """The arguments of `create`. Only Springtide knows this metadata, so none is sent without need."""
        metadata = dict(parameters.get("metadata") or {})
        if self.segment > 0:
            metadata["segment"] = str(self.segment)
        if not trained:
            metadata["train"] = "false"
        request = {**parameters, "model": self._model, "messages": [*self._system, *messages]}
        return {**request, "metadata": metadata} if metadata else request

    def _estimate(self, messages: list[Message]) -> int:
        """How many tokens these messages have, if they have as many per byte as the present context."""
        known = _size([*self.messages, *self._parameters.get("tools", [])])
        return math.ceil(_size(messages) * (self._tokens or 0) / max(known, 1))


class Conversation(_Conversation):
    """The messages of one rollout, over a client of OpenAI's SDK. Not to be shared by threads."""

    def say(self, said: str | Sequence[Mapping[str, Any]], **parameters: Any) -> Any:
        """Says something as the user, or other messages such as results of tools, and returns the message
        of the answer as the client gives it. It has `content`, and `tool_calls`.

        If the context is full, a new one begins before that. `parameters` are of this request alone. What
        the client raises leaves the conversation as if nothing had been said, but a summary that was made
        before stays.
        """
        turn = self._turn(said, parameters)
        try:
            request = next(turn)
            while True:
                request = turn.send(self._client.chat.completions.create(**request))
        except StopIteration as ended:
            return ended.value


class AsyncConversation(_Conversation):
    """The same over an `AsyncOpenAI`."""

    async def say(self, said: str | Sequence[Mapping[str, Any]], **parameters: Any) -> Any:
        """As `Conversation.say`."""
        turn = self._turn(said, parameters)
        try:
            request = next(turn)
            while True:
                request = turn.send(await self._client.chat.completions.create(**request))
        except StopIteration as ended:
            return ended.value


def _check(parameters: Mapping[str, Any]) -> None:
    if parameters.get("stream"):
        raise ValueError("a conversation needs whole answers: leave out stream")


def _size(messages: list[Message]) -> int:
    """Bytes of JSON."""
    return len(json.dumps(messages, ensure_ascii=False, default=str).encode())
