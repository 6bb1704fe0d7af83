"""What the clients return. `raw` has the whole answer, also fields that have no name here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict, Union
from uuid import UUID


class Message(TypedDict, total=False):
    """A message of a chat, as the version's chat template reads it."""

    role: str
    content: Any
    name: str
    tool_calls: list[Any]
    tool_call_id: str


@dataclass(frozen=True)
class Usage:
    """Tokens of a request and its answer."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Choice:
    """A finished answer. It is in the log, so feedback on it counts."""

    index: int
    #: Show nothing if `declined`.
    text: str
    #: `stop`, `length` or `tool_calls`.
    finish_reason: str
    #: What feedback refers to. None: the server did not log the answer, and feedback is impossible.
    generation_id: UUID | None
    #: Lets a key that may only give feedback give it on this answer.
    feedback_token: str | None
    #: Serial of the version that sampled it; None if the server does not say.
    version: int | None
    #: Content hash of that version, in hex.
    root: str | None
    #: The arm that the user is in.
    arm: str | None
    #: There is nothing to show: the policy declined, or its text was too improbable.
    declined: bool
    #: Why it will not be trained on, a code; None if nothing speaks against it yet.
    untrainable: str | None
    #: Only with `return_token_ids=True`.
    token_ids: list[int] | None
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Completion:
    """The answer to one request."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage | None
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Chunk:
    """A part of a streamed answer."""

    #: Which choice it belongs to.
    index: int
    #: The text since the previous chunk of the choice.
    text: str
    #: In the last chunk of a choice: all of it, with `text` from the first chunk on.
    choice: Choice | None
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Feedback:
    """An acknowledged feedback event."""

    feedback_id: UUID
    #: In dry runs: what would have happened.
    dryrun: dict[str, Any] | None = None


@dataclass(frozen=True)
class Retraction:
    """An acknowledged retraction."""

    retraction_id: UUID


@dataclass(frozen=True)
class EpisodeEnd:
    """An acknowledged end of an episode."""

    episode_id: UUID


#: The value of a feedback event.
Value = Union[bool, float, int, str]
