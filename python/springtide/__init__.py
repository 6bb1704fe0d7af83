"""Springtide for Python: a client, and the bytes of versions as arrays.

    client = springtide.Client()
    choice = client.complete("fn main() {", user="ada").choices[0]
    client.feedback(choice, "accept", True)

`Client` and `AsyncClient` talk to a running stack. `Run` gives your agent the tasks of a training
run, `Trainer` gives a training loop of yours the cohorts of one, `Conversation` sums up when its context is full, and `springtide.verifiers` runs environments of
`verifiers`. `Checkpoint` and `Patch` read what its trainer makes. `springtide.vllm` and
`springtide.sglang` are the plugins that those engines load by themselves.
"""

from springtide._artifact import ArtifactError, Changes, Checkpoint, Patch, Tensor
from springtide._async_client import AsyncClient
from springtide._client import Client
from springtide._conversation import SUMMARIES, AsyncConversation, Conversation, Summaries
from springtide._errors import (
    AuthenticationError,
    ConflictError,
    ConnectionFailed,
    NotFoundError,
    ProblemError,
    RequestError,
    SpringtideError,
    StreamError,
    UnavailableError,
)
from springtide._reference import reference
from springtide._retry import Retries, uuid7
from springtide._runs import Lease, NoReward, Run
from springtide._trainer import Cohort, Trainer, TrainingSample, bundles
from springtide._types import Choice, Chunk, Completion, EpisodeEnd, Feedback, Message, Retraction, Usage

__all__ = [
    "SUMMARIES",
    "ArtifactError",
    "AsyncClient",
    "AsyncConversation",
    "AuthenticationError",
    "Changes",
    "Checkpoint",
    "Choice",
    "Chunk",
    "Client",
    "Cohort",
    "Completion",
    "ConflictError",
    "ConnectionFailed",
    "Conversation",
    "EpisodeEnd",
    "Feedback",
    "Lease",
    "Message",
    "NoReward",
    "NotFoundError",
    "Patch",
    "ProblemError",
    "RequestError",
    "Retraction",
    "Retries",
    "Run",
    "SpringtideError",
    "StreamError",
    "Summaries",
    "Tensor",
    "Trainer",
    "TrainingSample",
    "UnavailableError",
    "Usage",
    "bundles",
    "reference",
    "uuid7",
]
