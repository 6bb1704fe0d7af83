"""Both clients against a server that fails on purpose. `tests/learning/spine.rs` has the real ones."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

import pytest
from faulty_server import Answer, Server, serving

import springtide
from springtide import AsyncClient, Client, Retries
from springtide._retry import Attempts, retry_after

GENERATION = UUID("019aa5e6-2f40-7abc-8def-0123456789ab")
FEEDBACK = UUID("019aa5e6-2f41-7abc-8def-0123456789ab")
ACCEPTED = Answer(200, {"feedback_id": str(FEEDBACK)})
SOON = Retries(attempts_max=4, first_delay_seconds=0.001)
CHOICE = {
    "index": 0,
    "finish_reason": "stop",
    "generation_id": str(GENERATION),
    "feedback_token": "token",
    "version": 17,
    "root": "ab",
    "arm": "learner",
    "declined": False,
}


def problem(status: int, slug: str, retry_after: str | None = None) -> Answer:
    document = {"type": f"/problems/{slug}", "title": "A title", "status": status, "detail": "what to do"}
    return Answer(status, document, {} if retry_after is None else {"retry-after": retry_after})


class Blocking:
    """Calls methods of `Client`."""

    def __init__(self, server: Server, retries: Retries) -> None:
        self.client = Client(server.url, server.url, api_key="secret", model="demo", retries=retries, timeout_seconds=5)

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self.client:
            return getattr(self.client, method)(*args, **kwargs)

    def stream(self, method: str, *args: Any, **kwargs: Any) -> list[springtide.Chunk]:
        with self.client:
            return list(getattr(self.client, method)(*args, **kwargs))


class Async:
    """Calls methods of `AsyncClient`."""

    def __init__(self, server: Server, retries: Retries) -> None:
        self.url, self.retries = server.url, retries

    def make(self) -> AsyncClient:
        return AsyncClient(
            self.url, self.url, api_key="secret", model="demo", retries=self.retries, timeout_seconds=5
        )

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        async def call() -> Any:
            async with self.make() as client:
                return await getattr(client, method)(*args, **kwargs)

        return asyncio.run(call())

    def stream(self, method: str, *args: Any, **kwargs: Any) -> list[springtide.Chunk]:
        async def call() -> list[springtide.Chunk]:
            async with self.make() as client:
                return [chunk async for chunk in getattr(client, method)(*args, **kwargs)]

        return asyncio.run(call())


Kind = Callable[[Server, Retries], Blocking | Async]
both = pytest.mark.parametrize("kind", [Blocking, Async])


@both
def test_feedback_is_sent_again_as_the_same_event_until_it_is_acknowledged(kind: Kind) -> None:
    with serving(
        Answer(hang_up=True), problem(503, "unavailable", "0"), problem(429, "too-many-requests"), ACCEPTED
    ) as server:
        accepted = kind(server, SOON)("feedback", GENERATION, "accept", True, tags={"place": "editor"})
    assert accepted.feedback_id == FEEDBACK
    assert len(server.received) == 4
    first = server.received[0]
    assert all(other.body == first.body for other in server.received)
    assert first.path == "/v1/feedback" and first.headers["authorization"] == "Bearer secret"
    sent_id = UUID(first.body.pop("id"))
    assert sent_id.version == 7 and sent_id.variant == "specified in RFC 4122"
    given = datetime.fromisoformat(first.body.pop("time"))
    assert abs((datetime.now(timezone.utc) - given).total_seconds()) < 600
    assert first.body == {
        "generation_id": str(GENERATION), "metric_name": "accept", "value": True, "tags": {"place": "editor"},
    }  # fmt: skip


@both
def test_an_id_and_a_time_of_the_caller_are_kept(kind: Kind) -> None:
    given = datetime(2026, 11, 25, 3, 0, tzinfo=timezone.utc)
    with serving(ACCEPTED) as server:
        kind(server, SOON)("feedback", None, "stars", 4, episode_id=GENERATION, feedback_id=FEEDBACK, time=given)
    body = server.received[0].body
    assert (body["id"], body["time"], body["episode_id"]) == (str(FEEDBACK), given.isoformat(), str(GENERATION))
    assert "generation_id" not in body


@both
def test_what_never_succeeds_is_not_sent_again(kind: Kind) -> None:
    refusals = {
        400: springtide.RequestError,
        401: springtide.AuthenticationError,
        403: springtide.AuthenticationError,
        404: springtide.NotFoundError,
        409: springtide.ConflictError,
        413: springtide.RequestError,
    }
    for status, expected in refusals.items():
        with serving(problem(status, "some-slug"), ACCEPTED) as server:
            with pytest.raises(expected, match="what to do") as caught:
                kind(server, SOON)("feedback", GENERATION, "accept", True)
        assert (caught.value.status, caught.value.type, len(server.received)) == (status, "some-slug", 1)
        assert "secret" not in str(caught.value) and "secret" not in repr(caught.value)


@both
def test_the_last_refusal_is_raised_when_attempts_run_out(kind: Kind) -> None:
    with serving(*[problem(503, "unavailable", "0")] * 9) as server:
        with pytest.raises(springtide.UnavailableError) as caught:
            kind(server, SOON)("feedback", GENERATION, "accept", True)
    assert (len(server.received), caught.value.retry_after_seconds) == (4, 0.0)
    with serving(*[Answer(hang_up=True)] * 9) as server:
        with pytest.raises(springtide.ConnectionFailed):
            kind(server, SOON)("retract", FEEDBACK)
    assert len(server.received) == 4
    with serving() as server:
        gone = server.url
    assert gone
    with pytest.raises(springtide.ConnectionFailed, match="does not answer"):
        kind(server, SOON)("end_episode", GENERATION)


@both
def test_retry_after_is_the_least_delay(kind: Kind) -> None:
    with serving(problem(429, "too-many-requests", "1"), ACCEPTED) as server:
        started = time.monotonic()
        kind(server, SOON)("feedback", GENERATION, "accept", True)
        assert time.monotonic() - started >= 1


@both
def test_an_answer_is_asked_for_again_only_if_none_was_sampled(kind: Kind) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    choices = [{**CHOICE, "text": "Vec::new();"}]
    completion = {"id": "cmpl-1", "model": "demo", "choices": choices, "usage": usage}
    with serving(
        problem(429, "too-many-requests", "0"), problem(503, "unavailable"), Answer(200, completion)
    ) as server:
        answer = kind(server, SOON)("complete", [1, 2, 3], user="ada", temperature=0.7)
    (choice,) = answer.choices
    assert (choice.text, choice.generation_id, choice.version) == ("Vec::new();", GENERATION, 17)
    assert answer.usage == springtide.Usage(3, 4)
    assert server.received[2].body == {"prompt": [1, 2, 3], "user": "ada", "temperature": 0.7, "model": "demo"}
    with serving(Answer(hang_up=True), Answer(200, completion)) as server:
        with pytest.raises(springtide.ConnectionFailed):
            kind(server, SOON)("complete", "x")
    assert len(server.received) == 1
    with serving(problem(500, "internal"), Answer(200, completion)) as server:
        with pytest.raises(springtide.UnavailableError):
            kind(server, SOON)("complete", "x")
    assert len(server.received) == 1


@both
def test_a_chat_has_its_message(kind: Kind) -> None:
    message = {"role": "assistant", "content": "Hello"}
    answer = {"id": "chatcmpl-1", "model": "demo", "choices": [{**CHOICE, "message": message}]}
    with serving(Answer(200, answer)) as server:
        made = kind(server, SOON)("chat", [{"role": "user", "content": "Hi"}], model="demo@champion")
    assert made.choices[0].text == "Hello" and made.usage is None
    assert server.received[0].path == "/v1/chat/completions"
    assert server.received[0].body == {"messages": [{"role": "user", "content": "Hi"}], "model": "demo@champion"}


def events(*choices: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    return "".join([": a comment\n\n", *lines, "data: [DONE]\n\n" if done else ""]).encode()


@both
def test_a_stream_comes_in_chunks_and_ends_with_the_whole_choice(kind: Kind) -> None:
    parts = [
        {"index": 0, "text": "Vec", "finish_reason": None, "token_ids": [5]},
        {"index": 0, "text": "::nüw", "finish_reason": None, "token_ids": [6, 7]},
        {**CHOICE, "text": ";", "token_ids": [8]},
    ]
    with serving(problem(503, "unavailable", "0"), Answer(stream=events(*parts))) as server:
        chunks = kind(server, SOON).stream("stream_complete", "let x = ", return_token_ids=True)
    assert server.received[1].body["stream"] is True
    assert [chunk.text for chunk in chunks] == ["Vec", "::nüw", ";"]
    assert [chunk.choice is None for chunk in chunks] == [True, True, False]
    last = chunks[-1].choice
    assert last is not None
    assert (last.text, last.token_ids, last.generation_id) == ("Vec::nüw;", [5, 6, 7, 8], GENERATION)
    deltas = [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}, {**CHOICE, "delta": {"content": None}}]
    with serving(Answer(stream=events(*deltas))) as server:
        chunks = kind(server, SOON).stream("stream_chat", [{"role": "user", "content": "Hi"}])
    assert chunks[-1].choice is not None and chunks[-1].choice.text == "a"


@both
def test_a_stream_that_ends_early_is_an_error(kind: Kind) -> None:
    part = {"index": 0, "text": "Vec", "finish_reason": None}
    failed = events(part, done=False) + b'event: error\ndata: {"title": "Away", "detail": "the log is away"}\n\n'
    for answer, reason in [
        (Answer(stream=events(part, done=False)), "ask again"),
        (Answer(stream=events(part, done=False), cut_off=True), "broke off"),
        (Answer(stream=failed), "the log is away"),
    ]:
        with serving(answer) as server:
            with pytest.raises(springtide.StreamError, match=reason):
                kind(server, SOON).stream("stream_complete", "x")
        assert len(server.received) == 1


@both
def test_a_page_of_a_proxy_is_an_error_with_its_text(kind: Kind) -> None:
    with serving(Answer(stream=b"<html>Bad gateway", status=502)) as server:
        with pytest.raises(springtide.UnavailableError, match="Bad gateway") as caught:
            kind(server, Retries(attempts_max=1))("feedback", GENERATION, "accept", True)
    assert caught.value.type == "about:blank"


@both
def test_an_answer_of_something_else_is_an_error(kind: Kind) -> None:
    for answer in (Answer(stream=b"<html>Welcome"), Answer(200, ["no object"]), Answer(200, {"other": 1})):
        with serving(answer) as server:
            with pytest.raises(springtide.SpringtideError, match="check the addresses"):
                kind(server, SOON)("complete", "x")


@both
def test_retractions_and_ends_of_episodes_are_acknowledged(kind: Kind) -> None:
    with serving(Answer(200, {"retraction_id": str(FEEDBACK)})) as server:
        assert kind(server, SOON)("retract", FEEDBACK, "by mistake").retraction_id == FEEDBACK
    assert server.received[0].body["reason"] == "by mistake"
    with serving(Answer(200, {"episode_id": str(GENERATION)})) as server:
        assert kind(server, SOON)("end_episode", GENERATION).episode_id == GENERATION
    assert server.received[0].path == "/v1/episode-ends"


def test_mistakes_of_the_caller_are_found_before_anything_is_sent() -> None:
    with Client() as client:
        with pytest.raises(ValueError, match="no model is named"):
            client.complete("x")
        with pytest.raises(ValueError, match="no model is named"):
            client.stream_complete("x")
        with pytest.raises(ValueError, match="give `about` or `episode_id`"):
            client.feedback(None, "accept", True)
        with pytest.raises(ValueError, match="no time zone"):
            client.feedback(GENERATION, "accept", True, time=datetime(2026, 1, 1))
        unlogged = springtide.Choice(0, "", "stop", None, None, None, None, None, False, None, None, {})
        with pytest.raises(ValueError, match="did not log"):
            client.feedback(unlogged, "accept", True)


def test_delays_double_are_random_and_end() -> None:
    retries = Retries(attempts_max=5, first_delay_seconds=0.5, delay_seconds_max=2.0, seconds_max=10.0)
    assert [retries.delay(attempt, None, lambda: 0.5) for attempt in (1, 2, 3, 4, 999)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert retries.delay(1, 3.0, lambda: 0.0) == 3.0
    now = 0.0
    attempts = Attempts(retries, lambda: now)
    assert attempts.next_delay(4.0) is not None
    now = 7.0
    assert attempts.next_delay(4.0) is None
    assert [retry_after(value) for value in ("2", "0.5", "-1", "nan", "inf", "Wed, 21 Oct 2015", None)] == [
        2.0, 0.5, None, None, None, None, None,
    ]  # fmt: skip


def test_ids_are_ordered_by_time_and_differ() -> None:
    made = [springtide.uuid7() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(one.version == 7 for one in made)
    milliseconds = [one.int >> 80 for one in made]
    assert milliseconds == sorted(milliseconds) and abs(milliseconds[0] / 1000 - time.time()) < 600


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, tuple[list[str], str | None]]:
        public = {name: made for name, made in vars(kind).items() if inspect.isfunction(made) and name[0] != "_"}
        return {name: (list(inspect.signature(made).parameters), made.__doc__) for name, made in public.items()}

    assert methods(Client) == methods(AsyncClient)
