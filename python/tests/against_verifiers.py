"""Environments of `verifiers` on a run's leases: the real package, and a server that plays control and
model. `make check NAME=environments` installs the package and runs this."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import verifiers.v1 as vf
from faulty_server import Answer, Server, serving
from two_plus import Duel, DuelConfig

from springtide import Run, verifiers

ENDED = Answer(409, {"type": "/problems/conflict", "title": "Conflict", "detail": "run r is succeeded"})


class Stack:
    """Leases each task once, and answers `4` to everything, except to the refused task."""

    def __init__(self, server: Server, tasks: list[dict[str, str]], refused: str | None = None) -> None:
        self.url = server.url
        self.left = list(tasks)
        self.refused = refused
        self.rewards: dict[str, float] = {}
        self.failed: list[str] = []
        self.reasons: list[str] = []
        self.asked: list[tuple[str, Any]] = []
        self._lock = threading.Lock()

    def take(self, received: Any) -> Answer:
        parts = received.path.split("/")
        with self._lock:
            if received.path.endswith("/leases"):
                return self.lease(self.left.pop(0)) if self.left else ENDED
            if received.path.endswith("/chat/completions"):
                self.asked.append((parts[2], received.body))
                return self.answer(received.body)
            if parts[-1] == "reward":
                self.rewards[parts[-2]] = received.body["reward"]
            elif parts[-1] == "fail":
                self.failed.append(parts[-2])
                self.reasons.append(received.body["reason"])
            else:
                return Answer(200, {"id": "r", "status": "succeeded"})
            return Answer(200, {"object": "rollout"})

    def lease(self, task: dict[str, str]) -> Answer:
        name = task["prompt"].replace(" ", "")
        expires_at = datetime.now(timezone.utc) + timedelta(minutes=10)
        lease = {"id": name, "task": task, "model": "demo@run-r", "expires_at": expires_at.isoformat(), "lease_seconds": 600, "secret": "s"}
        lease["group_id"] = str(UUID(int=int(name[2])))
        base_url = f"{self.url}/lease/{name}"
        return Answer(201, {**lease, "base_url": f"{base_url}/v1", "anthropic_base_url": base_url})

    def answer(self, body: Any) -> Answer:
        if body["messages"][-1]["content"] == self.refused:
            return Answer(400, {"error": {"message": "no"}})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        return Answer(200, whole)


def played(refused: str | None = None, env: vf.Env[Any] | None = None) -> Stack:
    env = env or verifiers.load("two_plus")
    tasks = verifiers.tasks(env)
    assert [task["prompt"] for task in tasks] == ["2 + 0 =", "2 + 1 =", "2 + 2 ="]
    with serving() as server, Run("r", server.url) as run:
        stack = Stack(server, tasks, refused)
        server.take = stack.take  # type: ignore[method-assign]
        verifiers.work(run, env, workers=2, sampling={"max_tokens": 8})
    return stack


def test_an_environment_plays_through_the_lease_and_its_reward_ends_it() -> None:
    stack = played()
    assert stack.rewards == {"2+0=": 0.0, "2+1=": 0.0, "2+2=": 1.0}
    assert not stack.failed
    assert sorted(lease for lease, _ in stack.asked) == ["2+0=", "2+1=", "2+2="]
    assert all(body["model"] == "demo@run-r" and body["max_tokens"] == 8 for _, body in stack.asked)


def test_an_episode_that_ends_with_an_error_fails_its_lease_alone() -> None:
    stack = played(refused="2 + 1 =")
    assert stack.rewards == {"2+0=": 0.0, "2+2=": 1.0}
    assert stack.failed == ["2+1="]


def duel(**options: Any) -> vf.Env[Any]:
    taskset = vf.taskset_config_type("two_plus")(id="two_plus")
    return Duel(DuelConfig(taskset=taskset, **options))


def test_each_attempt_trains_one_seat_with_its_own_reward_and_groups_take_turns() -> None:
    stack = played(env=duel())
    assert stack.rewards == {"2+0=": 1.0, "2+1=": -1.0, "2+2=": 1.0}
    for lease in stack.rewards:
        # in the order in which the seats play: white, black, and the frozen umpire
        masked = [body.get("metadata") == {"train": "false"} for asked, body in stack.asked if asked == lease]
        assert masked == ([True, False, True] if lease == "2+1=" else [False, True, True]), lease


def test_a_seat_whose_traces_have_different_rewards_has_no_reward_of_the_attempt() -> None:
    stack = played(env=duel(rounds=2))
    assert stack.rewards == {"2+1=": -1.0}, "black plays once"
    assert sorted(stack.failed) == ["2+0=", "2+2="] and stack.reasons == ["EpisodeFailed"] * 2


def test_a_seat_that_asks_for_another_model_on_the_lease_is_refused() -> None:
    stack = played(env=duel(umpire={"runtime": {"type": "subprocess"}, "model": "demo@champion"}))
    assert not stack.rewards and not stack.asked
    elsewhere = {"base_url": "http://127.0.0.1:1/v1", "api_key_var": verifiers.KEY_VARIABLE}
    env = duel(umpire={"runtime": {"type": "subprocess"}, "model": "demo@champion", "client": {"type": "eval", **elsewhere}})
    stack = played(env=env)
    assert len(stack.asked) == 6, "the umpire asks elsewhere"


def test_rewards_do_not_queue_behind_workers_that_wait_for_a_task() -> None:
    env = verifiers.load("two_plus")
    rewarded = threading.Event()
    in_time: list[bool] = []
    with serving() as server, Run("r", server.url) as run:
        stack = Stack(server, verifiers.tasks(env)[:1])

        def take(received: Any) -> Answer:
            answer = stack.take(received)
            if received.path.endswith("/reward"):
                rewarded.set()
            elif answer is ENDED:
                in_time.append(rewarded.wait(20))
            return answer

        server.take = take  # type: ignore[method-assign]
        verifiers.work(run, env, workers=40)
    assert len(in_time) == 40 and all(in_time)
