"""Environments of Prime Intellect's `verifiers` as they are, on the tasks of a run.

    env = springtide.verifiers.load("sums", split="train")
    run = springtide.Run.create({**spec, "tasks": springtide.verifiers.tasks(env)})
    springtide.verifiers.work(run, env, workers=4)

`verifiers` (0.4, from PyPI) keeps everything that it has: the taskset, the harness, its runtime, the
tools and the rewards. Only the endpoint of the model is the lease's. An attempt trains one seat with
that seat's reward; the answers of the other seats are not trained on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import verifiers.v1 as vf

from springtide._errors import SpringtideError
from springtide._runs import FAILURES_MAX, Lease, Run

#: The environment variable that `verifiers` reads the endpoint's key from.
KEY_VARIABLE = "SPRINGTIDE_LEASE_KEY"

log = logging.getLogger(__name__)


class EpisodeFailed(SpringtideError):
    """An episode of the environment ended with an error, so it has no reward."""


def load(taskset: str, *, environment: Mapping[str, Any] | None = None, **options: Any) -> vf.Env[Any]:
    """The environment of an installed taskset. `options` are the taskset's own, and `environment` are
    further fields of the environment's configuration.

    Without other wish its harness runs as a process of this machine: `runtime` is `subprocess`.
    """
    fields: dict[str, Any] = {"agent": {"runtime": {"type": "subprocess"}}, **(environment or {})}
    kind = vf.env_config_type(taskset, str(fields.get("id", "")))
    if "agent" not in kind.model_fields:
        fields.pop("agent", None)
    config = vf.taskset_config_type(taskset)(id=taskset, **options)
    return vf.load_environment(kind(taskset=config, **fields))


def tasks(env: vf.Env[Any], limit: int | None = None) -> list[dict[str, str]]:
    """What `tasks` of `POST /v1/runs` takes. The environment keeps the answers, so none is sent."""
    found = []
    for task in env.taskset if limit is None else env.taskset.take(limit):
        found.append({"id": task.key, "prompt": task.data.prompt_text, "answer": ""})
    return found


def work(
    run: Run,
    env: vf.Env[Any],
    *,
    workers: int = 4,
    sampling: Mapping[str, Any] | None = None,
) -> None:
    """Does tasks of the run until it has ended. `sampling` are fields of each request, such as
    `max_tokens`.

    An episode that ends with an error has failed and the next one begins; after 20 in a row the
    error leaves `work`.
    """
    by_key = {task.key: task for task in env.taskset}
    setup = env.setup

    async def with_seats(agents: Any) -> None:
        await setup(agents)
        _attempt_now.get().take_seats(env, agents)

    env.setup = with_seats
    # a thread for each worker: no reward queues behind workers that wait for a task
    try:
        with ThreadPoolExecutor(workers, "springtide-worker") as threads:
            asyncio.run(_work(run, env, by_key, workers, dict(sampling or {}), threads))
    finally:
        env.setup = setup


async def _work(
    run: Run, env: vf.Env[Any], by_key: dict[str, Any], workers: int, sampling: dict[str, Any], threads: ThreadPoolExecutor
) -> None:
    failures = 0

    async def blocking(call: Callable[..., Any], argument: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, call, argument)

    async def worker() -> None:
        nonlocal failures
        leases = run.leases()
        while (lease := await blocking(_next, leases)) is not None:
            try:
                async with lease:
                    value = await _Attempt(lease).reward(env, by_key, sampling)
                    await blocking(lease.reward, value)
                failures = 0
            except Exception as error:
                log.warning("attempt %s failed: %s", lease.id, error if isinstance(error, EpisodeFailed) else type(error).__name__)
                failures += 1
                if failures >= FAILURES_MAX:
                    raise

    async with env.serving():
        await asyncio.gather(*(worker() for _ in range(workers)))


def _next(leases: Iterator[Lease]) -> Lease | None:
    return next(leases, None)


@dataclass
class _Attempt:
    """One episode for one lease. A lease has one reward, so one seat is trained."""

    lease: Lease
    seat: str = ""
    refusal: EpisodeFailed | None = None

    def take_seats(self, env: vf.Env[Any], agents: Any) -> None:
        """Keeps the answers of all seats but the trained one out of training."""
        seats = {name: getattr(agents, name) for name, of in env.config if isinstance(of, vf.AgentConfig)}
        # a seat with a client of its own asks elsewhere
        seats = {name: agent for name, agent in seats.items() if agent.ctx.client.base_url == self.lease.base_url}
        trainable = [name for name, agent in seats.items() if agent.trainable]
        other = [name for name, agent in seats.items() if agent.ctx.model != self.lease.model]
        if other:
            self.refusal = EpisodeFailed(
                f"the seat {other[0]} has a `model`, but a lease answers with the run's alone: give the seat a `client` too"
            )
        elif not trainable:
            self.refusal = EpisodeFailed("no seat of the environment is trainable, so nothing can be rewarded")
        if self.refusal is not None:
            raise self.refusal
        # the attempts of a group are compared with each other: they train the same seat
        self.seat = trainable[UUID(self.lease.group_id).int % len(trainable)]
        for name, agent in seats.items():
            if name != self.seat:
                sampling = agent.ctx.sampling
                metadata = {**(getattr(sampling, "metadata", None) or {}), "train": "false"}
                agent.ctx = replace(agent.ctx, sampling=sampling.model_copy(update={"metadata": metadata}))

    async def reward(self, env: vf.Env[Any], by_key: dict[str, Any], sampling: dict[str, Any]) -> float:
        """Plays the episode, inside `env.serving()`."""
        task = by_key.get(self.lease.task["id"])
        if task is None:
            raise EpisodeFailed(f"the environment has no task {self.lease.task['id']}: load it with the run's options")
        os.environ[KEY_VARIABLE] = self.lease.api_key
        client = vf.EvalClientConfig(base_url=self.lease.base_url, api_key_var=KEY_VARIABLE)
        context = vf.ModelContext(model=self.lease.model, client=client, sampling=vf.SamplingConfig(**sampling))
        _attempt_now.set(self)
        episode = await env.run_episode(task, context)
        if self.refusal is not None:
            raise self.refusal
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EpisodeFailed(", ".join(error.type for error in errors) or "the episode did not end well")
        rewards = {float(trace.reward) for trace in episode.traces if trace.agent.name == self.seat}
        if len(rewards) != 1:
            raise EpisodeFailed(
                f"the seat {self.seat} has {len(rewards)} different rewards, and an attempt has one: let the seat "
                "play once per episode, and the run make the attempts (`group_size`)"
            )
        return rewards.pop()


#: Of the worker that runs.
_attempt_now: ContextVar[_Attempt] = ContextVar("attempt")
