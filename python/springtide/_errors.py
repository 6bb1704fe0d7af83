"""What can go wrong with a request. Errors carry the members of the server's problem document."""

from __future__ import annotations

from typing import Any


class SpringtideError(Exception):
    """Any failure of a request."""


class ConnectionFailed(SpringtideError):
    """No answer: the server was not reached, or it did not answer in time. The cause says why.

    It is unknown whether the server has processed the request. Feedback, retractions and episode
    ends may be sent again.
    """


class StreamError(SpringtideError):
    """A stream broke off, or the server ended it with an error.

    What it brought until then is no finished answer: show it at your own risk, and do not give
    feedback on it.
    """


class ProblemError(SpringtideError):
    """The server refused the request with a problem document (RFC 9457)."""

    def __reduce__(self) -> tuple[Any, ...]:
        # between processes, such as the ranks of a trainer
        return type(self), (self.status, self.document, self.retry_after_seconds)

    def __init__(self, status: int, document: dict[str, Any], retry_after_seconds: float | None = None) -> None:
        self.status = status
        #: A slug to branch on, such as `conflict`.
        self.type = str(document.get("type", "about:blank")).removeprefix("/problems/")
        self.title = str(document.get("title", f"HTTP status {status}"))
        #: What happened this time, and what to do.
        self.detail: str | None = document.get("detail")
        #: The field of the request that breaks a rule.
        self.field: str | None = document.get("field")
        #: When the same request may succeed.
        self.retry_after_seconds = retry_after_seconds
        #: The whole document.
        self.document = document
        super().__init__(f"{status} {self.title}" + (f": {self.detail}" if self.detail else ""))


class RequestError(ProblemError):
    """The request breaks a rule (400, 405, 413, 415, 422). The same request will never succeed."""


class AuthenticationError(ProblemError):
    """No valid API key, or its scopes do not allow this (401, 403)."""


class NotFoundError(ProblemError):
    """There is no such path, model or version (404)."""


class ConflictError(ProblemError):
    """The same id was used before, with another body (409)."""


class UnavailableError(ProblemError):
    """The server cannot do it now (408, 429, 5xx). The client has already tried again."""


def of_status(status: int, document: dict[str, Any], retry_after_seconds: float | None) -> ProblemError:
    """The exception for a refusal."""
    kinds: dict[int, type[ProblemError]] = {
        401: AuthenticationError,
        403: AuthenticationError,
        404: NotFoundError,
        408: UnavailableError,
        409: ConflictError,
        429: UnavailableError,
    }
    kind = kinds.get(status, UnavailableError if status >= 500 else RequestError)
    return kind(status, document, retry_after_seconds)
