"""The client that blocks.

`_async_client` has the same for asyncio. What both send is in `_protocol`.
"""

from __future__ import annotations

import time as clock
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any
from uuid import UUID

import httpx

from springtide import _protocol
from springtide._errors import ConnectionFailed, ProblemError, StreamError
from springtide._protocol import Request, Settings, Stream
from springtide._retry import Attempts, Retries
from springtide._types import Choice, Chunk, Completion, EpisodeEnd, Feedback, Message, Retraction, Value

CONNECT_SECONDS_MAX = 5.0


class Client:
    """Asks for answers and reports what users did with them. May be shared by threads.

    What is not given comes from `SPRINGTIDE_SERVE`, `SPRINGTIDE_INGEST` and `SPRINGTIDE_API_KEY`.
    Without those it is a stack on this machine that needs no keys.

    `timeout_seconds` is the longest silence of the server. `http` may be an `httpx.Client` with
    proxies or certificates of yours, which you close; the API key goes to no other address than
    `serve_url` and `ingest_url`.

    Events are repeated until they are acknowledged, as `retries` says. Requests for answers are
    repeated only if the server refused them for now, or was not reached.
    """

    def __init__(
        self,
        serve_url: str | None = None,
        ingest_url: str | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 120.0,
        retries: Retries = Retries(),
        http: httpx.Client | None = None,
    ) -> None:
        self._settings = Settings.of(serve_url, ingest_url, api_key, model)
        self._retries = retries
        self._timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS_MAX)
        self._owns_http = http is None
        self._http = http if http is not None else httpx.Client()

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        user: str | None = None,
        session_id: str | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Completion:
        """Continues a text, or token ids. `user` decides the arm. `fields` are further fields of
        `POST /v1/completions`, such as `temperature`, `stop`, `n`, `surface` or `metadata`.
        """
        fields.update(
            prompt=prompt, model=model, user=user, session_id=session_id, max_tokens=max_tokens, stream=None
        )
        return self._sample("/v1/completions", fields)

    def stream_complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        user: str | None = None,
        session_id: str | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Iterator[Chunk]:
        """`complete`, chunk by chunk. Leaving the iterator early cancels the request."""
        fields.update(
            prompt=prompt, model=model, user=user, session_id=session_id, max_tokens=max_tokens, stream=True
        )
        return self._stream("/v1/completions", fields)

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        model: str | None = None,
        user: str | None = None,
        session_id: str | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Completion:
        """Answers the last message. `fields` are further fields of `POST /v1/chat/completions`."""
        messages = _protocol.chat_messages(messages)
        fields.update(
            messages=messages, model=model, user=user, session_id=session_id, max_tokens=max_tokens, stream=None
        )
        return self._sample("/v1/chat/completions", fields)

    def stream_chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        model: str | None = None,
        user: str | None = None,
        session_id: str | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Iterator[Chunk]:
        """`chat`, chunk by chunk. Leaving the iterator early cancels the request."""
        messages = _protocol.chat_messages(messages)
        fields.update(
            messages=messages, model=model, user=user, session_id=session_id, max_tokens=max_tokens, stream=True
        )
        return self._stream("/v1/chat/completions", fields)

    def feedback(
        self,
        about: Choice | UUID | str | None,
        metric_name: str,
        value: Value,
        *,
        episode_id: UUID | str | None = None,
        feedback_id: UUID | str | None = None,
        token: str | None = None,
        tags: Mapping[str, str] | None = None,
        time: datetime | None = None,
        source: str | None = None,
        dryrun: bool = False,
    ) -> Feedback:
        """Reports what a user did with an answer or with an episode. Returns once the log has it.

        `about` is the answer: the choice, or its generation id.

        `feedback_id` is a UUIDv7 of yours; sending the same again, also from another process, is
        the same event. `time` is when the user acted (default: now). `token` is the choice's
        `feedback_token`, which keys that may only give feedback need.
        """
        request = self._settings.feedback(
            about,
            metric_name,
            value,
            episode_id=episode_id,
            feedback_id=feedback_id,
            token=token,
            tags=tags,
            time=time,
            source=source,
            dryrun=dryrun,
        )
        answer = self._send(request, "feedback_id")
        return Feedback(UUID(answer["feedback_id"]), answer.get("dryrun"))

    def retract(
        self, feedback_id: UUID | str, reason: str = "", *, retraction_id: UUID | str | None = None
    ) -> Retraction:
        """Takes a feedback event back: if its trajectory is still open, it does not count."""
        answer = self._send(self._settings.retraction(feedback_id, reason, retraction_id), "retraction_id")
        return Retraction(UUID(answer["retraction_id"]))

    def end_episode(
        self, episode_id: UUID | str, *, time: datetime | None = None, source: str | None = None
    ) -> EpisodeEnd:
        """Says that an episode is over."""
        answer = self._send(self._settings.episode_end(episode_id, time, source), "episode_id")
        return EpisodeEnd(UUID(answer["episode_id"]))

    def close(self) -> None:
        """Closes the connections."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sample(self, path: str, fields: dict[str, Any]) -> Completion:
        return _protocol.completion(self._send(self._settings.sample(path, fields), "choices"))

    def _stream(self, path: str, fields: dict[str, Any]) -> Iterator[Chunk]:
        # checked now, not at the first chunk
        request = self._settings.sample(path, fields)
        return self._chunks(request)

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        response = self._answer(request, stream=True)
        stream = Stream()
        try:
            for line in response.iter_lines():
                yield from stream.feed(line)
        except httpx.TransportError as error:
            raise StreamError(f"the stream broke off: {error!r}") from error
        finally:
            response.close()
        stream.end()

    def _send(self, request: Request, member: str) -> dict[str, Any]:
        """The answer, which has this member."""
        return _protocol.decoded(self._answer(request, stream=False).content, member)

    def _answer(self, request: Request, *, stream: bool) -> httpx.Response:
        """The answer of the first attempt that succeeds. The body of a stream is not read yet."""
        attempts = Attempts(self._retries)
        while True:
            try:
                return self._attempt(request, stream=stream)
            except httpx.TransportError as error:
                unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                delay = attempts.next_delay(None) if unsent or request.repeatable else None
                if delay is None:
                    raise ConnectionFailed(f"{request.url} does not answer: {error!r}") from error
            except ProblemError as refused:
                delay = attempts.next_delay(refused.retry_after_seconds) if refused.status in request.again else None
                if delay is None:
                    raise
            clock.sleep(delay)

    def _attempt(self, request: Request, *, stream: bool) -> httpx.Response:
        sent = self._http.build_request(
            request.method, request.url, **request.content, headers=request.headers, timeout=self._timeout
        )
        response = self._http.send(sent, stream=stream, follow_redirects=False)
        if response.is_success:
            return response
        try:
            raise _protocol.problem(response.status_code, response.headers, response.read())
        finally:
            response.close()
