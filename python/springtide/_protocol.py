"""Requests and answers as plain data: what both clients share. No input or output here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from springtide._errors import ProblemError, SpringtideError, StreamError, of_status
from springtide._retry import MAY_SUCCEED_LATER, REFUSED_FOR_NOW, retry_after, uuid7
from springtide._types import Choice, Chunk, Completion, Usage, Value


@dataclass(frozen=True)
class Request:
    """One POST; one PUT if the body is bytes, or one GET where there is none."""

    url: str
    #: Texts of users.
    body: dict[str, Any] | bytes | None = field(repr=False)
    #: With the key.
    headers: dict[str, str] = field(repr=False)
    #: Statuses after which the same request is sent again.
    again: frozenset[int]
    #: Whether it may arrive twice.
    repeatable: bool

    @property
    def method(self) -> str:
        if isinstance(self.body, bytes):
            return "PUT"
        return "GET" if self.body is None else "POST"

    @property
    def content(self) -> dict[str, Any]:
        """The body as arguments of `httpx.Client.build_request`."""
        return {"content": self.body} if isinstance(self.body, bytes) else {"json": self.body}


@dataclass(frozen=True)
class Settings:
    """Where the stack is, and who asks."""

    serve_url: str
    ingest_url: str
    api_key: str | None = field(repr=False)
    model: str | None

    @staticmethod
    def of(serve_url: str | None, ingest_url: str | None, api_key: str | None, model: str | None) -> Settings:
        """The settings, with those that are not given from the environment."""
        return Settings(
            (serve_url or os.environ.get("SPRINGTIDE_SERVE", "http://127.0.0.1:8000")).rstrip("/"),
            (ingest_url or os.environ.get("SPRINGTIDE_INGEST", "http://127.0.0.1:8001")).rstrip("/"),
            api_key or os.environ.get("SPRINGTIDE_API_KEY"),
            model,
        )

    def sample(self, path: str, fields: Mapping[str, Any]) -> Request:
        """A request for an answer. Fields that are None are left out."""
        body = {name: value for name, value in fields.items() if value is not None}
        if body.setdefault("model", self.model) is None:
            raise ValueError('no model is named: give `model`, for example "demo", here or to the client')
        return self._post(self.serve_url + path, body, REFUSED_FOR_NOW, repeatable=False)

    def event(self, path: str, fields: Mapping[str, Any]) -> Request:
        """An event, which may be sent again until it is acknowledged."""
        body = {name: value for name, value in fields.items() if value is not None}
        return self._post(self.ingest_url + path, body, MAY_SUCCEED_LATER, repeatable=True)

    def _post(self, url: str, body: dict[str, Any], again: frozenset[int], *, repeatable: bool) -> Request:
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return Request(url, body, headers, again, repeatable)

    def feedback(
        self,
        about: Choice | UUID | str | None,
        metric_name: str,
        value: Value,
        *,
        episode_id: UUID | str | None,
        feedback_id: UUID | str | None,
        token: str | None,
        tags: Mapping[str, str] | None,
        time: datetime | None,
        source: str | None,
        dryrun: bool,
    ) -> Request:
        if (about is None) == (episode_id is None):
            raise ValueError("feedback is about an answer or about an episode: give `about` or `episode_id`")
        if isinstance(about, Choice):
            if about.generation_id is None:
                raise ValueError("the server did not log this answer, so no feedback on it is possible")
            about = about.generation_id
        fields = {
            # chosen here and once, so that a repetition is the same event
            "id": str(feedback_id or uuid7()),
            "generation_id": None if about is None else str(about),
            "episode_id": None if episode_id is None else str(episode_id),
            "metric_name": metric_name,
            "value": value,
            "token": token,
            "tags": None if tags is None else dict(tags),
            "time": _text(time),
            "source": source,
            "dryrun": dryrun or None,
        }
        return self.event("/v1/feedback", fields)

    def retraction(self, feedback_id: UUID | str, reason: str, retraction_id: UUID | str | None) -> Request:
        fields = {"id": str(retraction_id or uuid7()), "feedback_id": str(feedback_id), "reason": reason}
        return self.event("/v1/retractions", {**fields, "time": _text(None)})

    def episode_end(self, episode_id: UUID | str, time: datetime | None, source: str | None) -> Request:
        fields = {"episode_id": str(episode_id), "time": _text(time), "source": source}
        return self.event("/v1/episode-ends", fields)


def _text(time: datetime | None) -> str:
    """RFC 3339. A repetition has the time of the first attempt: when the user acted."""
    if time is None:
        time = datetime.now(timezone.utc)
    elif time.tzinfo is None:
        raise ValueError("`time` has no time zone: use datetime.now(timezone.utc)")
    return time.isoformat()


def problem(status: int, headers: Mapping[str, str], body: bytes) -> ProblemError:
    """The exception for an answer that is no success."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        # a proxy's page
        document = {"detail": body[:300].decode(errors="replace")}
    return of_status(status, document, retry_after(headers.get("retry-after")))


def decoded(body: str | bytes, *members: str) -> dict[str, Any]:
    """A JSON object with these members. Something else answers at many addresses, such as a proxy."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or any(name not in answer for name in members):
        raise SpringtideError("the answer is not one of Springtide's: check the addresses of the client")
    return answer


def completion(answer: dict[str, Any]) -> Completion:
    """A whole answer."""
    choices = [_choice(one, _text_of(one.get("message"), one)) for one in answer["choices"]]
    return Completion(answer["id"], answer["model"], choices, _usage(answer), answer)


def _text_of(message: dict[str, Any] | None, choice: dict[str, Any]) -> str:
    text = choice.get("text") if message is None else message.get("content")
    return text if isinstance(text, str) else ""


def _usage(answer: dict[str, Any]) -> Usage | None:
    usage = answer.get("usage")
    return None if usage is None else Usage(usage["prompt_tokens"], usage["completion_tokens"])


def _choice(choice: dict[str, Any], text: str) -> Choice:
    generation = choice.get("generation_id")
    return Choice(
        index=choice["index"],
        text=text,
        finish_reason=choice["finish_reason"],
        generation_id=None if generation is None else UUID(generation),
        feedback_token=choice.get("feedback_token"),
        version=choice.get("version"),
        root=choice.get("root"),
        arm=choice.get("arm"),
        declined=bool(choice.get("declined", False)),
        untrainable=choice.get("untrainable"),
        token_ids=choice.get("token_ids"),
        raw=choice,
    )


class Stream:
    """Makes chunks of the lines of server-sent events."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._failed = False
        #: Whether the server has said that the answer is whole.
        self.done = False

    def feed(self, line: str) -> Iterator[Chunk]:
        """Raises `StreamError` if the server says that it failed."""
        kind, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if kind == "event":
            self._failed = value == "error"
        if kind != "data":
            return
        if value == "[DONE]":
            self.done = True
            return
        event = decoded(value)
        if self._failed or "choices" not in event:
            detail = event.get("detail") or event.get("title") or "no reason was given"
            raise StreamError(f"the server ended the stream with an error: {detail}")
        for choice in event["choices"]:
            yield self._chunk(choice)

    def end(self) -> None:
        """The connection is at its end. Raises `StreamError` if the answer is not."""
        if not self.done:
            raise StreamError("the stream ended before the answer: ask again")

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        index = choice["index"]
        text = _text_of(choice.get("delta"), choice)
        self._texts[index] = self._texts.get(index, "") + text
        ids = self._token_ids.setdefault(index, [])
        ids.extend(choice.get("token_ids") or [])
        finished = None
        if choice.get("finish_reason") is not None:
            finished = _choice(choice, self._texts[index])
            if finished.token_ids is not None:
                finished = replace(finished, token_ids=ids)
        return Chunk(index, text, finished, choice)


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy that is plain JSON."""
    return [dict(message) for message in messages]
