"""Environments of Prime Intellect's `verifiers` as they are, on the tasks of a run.

    env = springtide.verifiers.load("sums", split="train")
    run = springtide.Run.create({**spec, "tasks": springtide.verifiers.tasks(env)})
    springtide.verifiers.work(run, env, workers=4)

`verifiers` (0.4, from PyPI) keeps everything that it has: the taskset, the harness, its runtime, the
tools and the rewards. Only the endpoint of the model is the lease's. What its seats' traces are
rewarded with, on average, is the reward of the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

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
    asyncio.run(_work(run, env, by_key, workers, dict(sampling or {})))


async def _work(
    run: Run, env: vf.Env[Any], by_key: dict[str, Any], workers: int, sampling: dict[str, Any]
) -> None:
    failures = 0

    async def worker() -> None:
        nonlocal failures
        leases = run.leases()
        while (lease := await asyncio.to_thread(_next, leases)) is not None:
            try:
                await _attempt(lease, env, by_key, sampling)
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


async def _attempt(lease: Lease, env: vf.Env[Any], by_key: dict[str, Any], sampling: dict[str, Any]) -> None:
    with lease:
        task = by_key.get(lease.task["id"])
        if task is None:
            raise EpisodeFailed(f"the environment has no task {lease.task['id']}: load it with the run's options")
        value = await episode_reward(env, task, lease.base_url, lease.model, lease.api_key, sampling)
        await asyncio.to_thread(lease.reward, value)


async def episode_reward(
    env: vf.Env[Any], task: Any, base_url: str, model: str, api_key: str, sampling: Mapping[str, Any]
) -> float:
    """Runs one episode against an OpenAI-compatible endpoint, inside `env.serving()`."""
    os.environ[KEY_VARIABLE] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
    context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig(**sampling))
    episode = await env.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeFailed(", ".join(error.type for error in errors) or "the episode did not end well")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    if not rewards:
        raise EpisodeFailed("no trace of the episode is trainable, so nothing can be rewarded")
    return float(sum(rewards) / len(rewards))
