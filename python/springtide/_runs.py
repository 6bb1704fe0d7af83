"""Tasks of a training run for an agent of yours: leases, and the rewards that end them.

    run = springtide.Run.create({"kind": "grpo", "environment": {"kind": "pull"}, "tasks": [...]})
    run.work(lambda lease: play(lease.base_url, lease.model, lease.task), workers=8)

A lease is one attempt at one task. Its `base_url` is an address for any OpenAI or Anthropic SDK: what
the model answers there belongs to the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any

import httpx

from springtide import _protocol
from springtide._client import Client
from springtide._errors import ConflictError, ProblemError, SpringtideError
from springtide._protocol import Request
from springtide._retry import MAY_SUCCEED_LATER, REFUSED_FOR_NOW, Retries

#: How long the server waits for a task before it says that there is none.
WAIT_SECONDS = 20
ENDED = frozenset({"succeeded", "failed", "cancelled"})
#: A lease is renewed when this share of its time has passed.
RENEW_AFTER = 1 / 3
#: Failures of the agent in a row, over all workers, after which `Run.work` gives up.
FAILURES_MAX = 20

log = logging.getLogger(__name__)

#: Sends the failures of leases that a coroutine leaves. The loop's own threads may all wait for leases.
_failing = ThreadPoolExecutor(thread_name_prefix="springtide-fail")


class NoReward(SpringtideError):
    """A lease was left without a reward. Its attempt has failed."""


class Run:
    """A training run whose tasks an agent of yours does. May be shared by threads.

    What is not given comes from `SPRINGTIDE_CONTROL`, `SPRINGTIDE_API_KEY` and `SPRINGTIDE_CLUSTER`.
    Without those it is a stack on this machine that needs no keys. `cluster` names the cluster that the
    agent runs in, so that it asks the replicas there.
    """

    def __init__(
        self,
        run_id: str,
        control_url: str | None = None,
        *,
        api_key: str | None = None,
        cluster: str | None = None,
        retries: Retries = Retries(),
        http: httpx.Client | None = None,
    ) -> None:
        self.id = run_id
        self._cluster = cluster or os.environ.get("SPRINGTIDE_CLUSTER")
        self._control = _Control(control_url, api_key, retries, http)

    @staticmethod
    def create(
        spec: Mapping[str, Any],
        control_url: str | None = None,
        *,
        api_key: str | None = None,
        cluster: str | None = None,
        retries: Retries = Retries(),
        http: httpx.Client | None = None,
    ) -> Run:
        """Schedules a run. `spec` is the body of `POST /v1/runs`."""
        control = _Control(control_url, api_key, retries, http)
        # not repeated: a repetition would be a second run
        made = control.post("/v1/runs", dict(spec), repeatable=False)
        run_id = str(_member(made, "id"))
        return Run(run_id, control_url, api_key=api_key, cluster=cluster, retries=retries, http=http)

    def status(self) -> dict[str, Any]:
        """The run as `GET /v1/runs/{id}` shows it."""
        return _protocol.decoded(self._control.get(f"/v1/runs/{self.id}"), "status")

    def leases(self) -> Iterator[Lease]:
        """Leases until the run has ended. Waits while there is nothing to do.

        Each worker needs an iterator of its own. Enter a lease with `with` before you use it.
        """
        wanted: dict[str, Any] = {"wait_seconds": WAIT_SECONDS}
        if self._cluster is not None:
            wanted["cluster"] = self._cluster
        while True:
            try:
                # a lease whose answer is lost expires by itself
                answer = self._control.post(f"/v1/runs/{self.id}/leases", wanted, repeatable=True)
            except ConflictError:
                if self.status()["status"] in ENDED:
                    return
                raise
            if answer is not None:
                yield Lease._of(answer, self._control)

    def work(self, agent: Callable[[Lease], float | None], *, workers: int = 1) -> None:
        """Does tasks on several threads until the run has ended.

        `agent` returns the reward, or gives it with `lease.reward`. If it raises an exception, that
        attempt has failed and the next one begins; after 20 failures in a row the exception leaves
        `work`.
        """
        failures = _Failures()

        def loop() -> None:
            try:
                for lease in self.leases():
                    if failures.fatal is not None:
                        lease.fail("the harness stops")
                        return
                    attempt(lease)
            except Exception as error:
                failures.stop(error)

        def attempt(lease: Lease) -> None:
            try:
                with lease:
                    reward = agent(lease)
                    if reward is not None:
                        lease.reward(reward)
            except Exception as error:
                log.warning("attempt %s failed: %s", lease.id, type(error).__name__)
                failures.add(error)
            else:
                failures.reset()

        threads = [threading.Thread(target=loop, name=f"springtide-worker-{n}") for n in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures.fatal is not None:
            raise failures.fatal

    def close(self) -> None:
        """Closes the connections."""
        self._control.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class Lease:
    """One attempt at one task, for a limited time that `with` renews; in a coroutine, `async with`."""

    id: str
    #: The attempts of one task that are compared with each other.
    group_id: str
    #: The task as the run has it: `id`, `prompt`, and `answer` if there is one.
    task: dict[str, Any] = field(repr=False)
    #: For `OpenAI(base_url=…)`: what is asked for there are the turns of this attempt.
    base_url: str = field(repr=False)
    #: For `Anthropic(base_url=…)`.
    anthropic_base_url: str = field(repr=False)
    #: The `model` of requests.
    model: str
    expires_at: datetime
    #: How long it lasts from the answer that handed it out, and from each renewal.
    lease_seconds: float
    #: Sent with renewals and the reward. Keep it from the agent: who knows it sets the reward.
    secret: str = field(repr=False)
    _control: _Control = field(repr=False)
    _ended: bool = False
    _left: threading.Event = field(default_factory=threading.Event, repr=False)
    _renewing: threading.Thread | None = field(default=None, repr=False)

    @staticmethod
    def _of(answer: dict[str, Any], control: _Control) -> Lease:
        return Lease(
            id=str(_member(answer, "id")),
            group_id=str(_member(answer, "group_id")),
            task=dict(_member(answer, "task")),
            base_url=str(_member(answer, "base_url")),
            anthropic_base_url=str(_member(answer, "anthropic_base_url")),
            model=str(_member(answer, "model")),
            expires_at=_time(_member(answer, "expires_at")),
            lease_seconds=float(_member(answer, "lease_seconds")),
            secret=str(_member(answer, "secret")),
            _control=control,
        )

    @property
    def api_key(self) -> str:
        """For SDKs, which want one: the key of this client, if keys are required."""
        return self._control.api_key or "unused"

    def reward(self, value: float) -> None:
        """Ends the attempt with a reward. Sent again until the server has it.

        `ValueError` if it is not a finite number: the attempt goes on.
        """
        if not math.isfinite(value):
            raise ValueError(f"the reward is {value}, not a finite number")
        self._end("reward", {"reward": float(value)})

    def fail(self, reason: str, *, timed_out: bool = False) -> None:
        """Ends the attempt without a reward, which is not a reward of 0. Another is offered in its place.
        One that took too long (`timed_out`) gets the run's `failure_reward` instead.

        `reason` is shown to people; put no text of the task into it.
        """
        self._end("fail", {"reason": reason, "timed_out": timed_out})

    def renew(self) -> None:
        """Takes more time. `with` does this by itself."""
        answer = self._control.post(f"/v1/leases/{self.id}/renew", {"secret": self.secret}, repeatable=True)
        self.expires_at = _time(_member(answer, "expires_at"))

    def _end(self, how: str, body: dict[str, Any]) -> None:
        if self._ended:
            raise ValueError("this lease has ended: each gets one reward or one failure")
        self._ended = True
        self._control.post(f"/v1/leases/{self.id}/{how}", {**body, "secret": self.secret}, repeatable=True)

    def __enter__(self) -> Lease:
        self._renewing = threading.Thread(target=self._renew_until_left, name=f"lease-{self.id}", daemon=True)
        self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a renewal under way may be repeated for long: nobody waits for it
        self._left.set()
        if self._ended:
            return
        if kind is None:
            self.fail("no reward was given")
            raise NoReward(f"lease {self.id} was left without a reward: call lease.reward")
        try:
            # an exception's text may hold the task's
            self.fail(kind.__name__, timed_out=issubclass(kind, TimeoutError))
        except SpringtideError as refused:
            log.warning("lease %s: the failure was not accepted: %s", self.id, refused)

    async def __aenter__(self) -> Lease:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return self.__exit__(kind, error, trace)
        await asyncio.get_running_loop().run_in_executor(_failing, self.__exit__, kind, error, trace)

    def _renew_until_left(self) -> None:
        # by the time that passes here: this clock may differ from the server's
        wait = self.lease_seconds * RENEW_AFTER
        while not self._left.wait(wait):
            try:
                self.renew()
                wait = self.lease_seconds * RENEW_AFTER
            except SpringtideError as error:
                if self._left.is_set():
                    return
                log.warning("lease %s is not renewed: %s", self.id, error)
                if isinstance(error, ProblemError) and error.status not in MAY_SUCCEED_LATER:
                    return
                wait = min(wait, self.lease_seconds / 20)


class _Failures:
    """Failures in a row, and what ends the work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_a_row = 0
        self.fatal: Exception | None = None

    def add(self, error: Exception) -> None:
        with self._lock:
            self._in_a_row += 1
            if self._in_a_row >= FAILURES_MAX and self.fatal is None:
                self.fatal = error

    def stop(self, error: Exception) -> None:
        with self._lock:
            self.fatal = self.fatal or error

    def reset(self) -> None:
        with self._lock:
            self._in_a_row = 0


class _Control:
    """Requests to the control role."""

    def __init__(
        self, url: str | None, api_key: str | None, retries: Retries, http: httpx.Client | None
    ) -> None:
        self._url = (url or os.environ.get("SPRINGTIDE_CONTROL", "http://127.0.0.1:8002")).rstrip("/")
        self.api_key = api_key or os.environ.get("SPRINGTIDE_API_KEY")
        self._client = Client(api_key=self.api_key, retries=retries, http=http)

    def post(self, path: str, body: dict[str, Any], *, repeatable: bool) -> dict[str, Any] | None:
        """The answer; None if it has no content."""
        again = MAY_SUCCEED_LATER if repeatable else REFUSED_FOR_NOW
        answer = self._client._answer(self._request(path, body, again, repeatable), stream=False)
        return None if not answer.content else _protocol.decoded(answer.content)

    def get(self, path: str) -> bytes:
        return self.fetch(path).content

    def fetch(self, path: str) -> httpx.Response:
        """The same, with its status and headers."""
        return self._client._answer(self._request(path, None, MAY_SUCCEED_LATER, True), stream=False)

    def put(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        request = self._request(path, body, MAY_SUCCEED_LATER, True)
        request.headers.update(headers)
        self._client._answer(request, stream=False)

    def close(self) -> None:
        self._client.close()

    def _request(
        self, path: str, body: dict[str, Any] | bytes | None, again: frozenset[int], repeatable: bool
    ) -> Request:
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return Request(self._url + path, body, headers, again, repeatable)


def _member(answer: dict[str, Any] | None, name: str) -> Any:
    if answer is None or name not in answer:
        raise SpringtideError(f"the answer has no `{name}`: check the address of the control role")
    return answer[name]


def _time(text: Any) -> datetime:
    # Python 3.10 reads no `Z`
    return datetime.fromisoformat(str(text).replace("Z", "+00:00"))
