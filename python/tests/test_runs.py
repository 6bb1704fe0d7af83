"""Leases of a run, against a server that answers what a test says. `tests/learning/trainer/environment.rs` has
the real one."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from faulty_server import Answer, Received, Server, serving

from springtide import ConflictError, Lease, NoReward, Retries, Run

SOON = Retries(attempts_max=4, first_delay_seconds=0.001)
NOTHING = Answer(204)
ENDED = Answer(409, {"type": "/problems/conflict", "title": "Conflict", "detail": "run r is succeeded"})
SUCCEEDED = Answer(200, {"id": "r", "status": "succeeded"})
DONE = Answer(200, {"object": "rollout"})


def lease(name: str = "a", seconds: float = 600) -> Answer:
    expires_at = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    return Answer(
        201,
        {
            "object": "lease",
            "id": name,
            "group_id": "6c84fb90-12c4-11e1-840d-7b25c5ee775a",
            "task": {"id": "1", "prompt": "2 + 2 =", "answer": "4"},
            "base_url": f"http://serve/lease/{name}/v1",
            "anthropic_base_url": f"http://serve/lease/{name}",
            "model": "demo@run-r",
            "expires_at": expires_at.isoformat().replace("+00:00", "Z"),
            "lease_seconds": seconds,
            "secret": f"secret of {name}",
        },
    )


def run_at(server: Server) -> Run:
    return Run("r", server.url, api_key="secret", retries=SOON)


def paths(server: Server) -> list[str]:
    return [received.path for received in server.received]


def test_a_harness_names_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINGTIDE_CLUSTER", "eu")
    with serving(ENDED, SUCCEEDED, ENDED, SUCCEEDED) as server:
        for cluster in (None, "us"):
            with Run("r", server.url, cluster=cluster, retries=SOON) as run:
                assert list(run.leases()) == []
    asked = [received.body["cluster"] for received in server.received if received.path == "/v1/runs/r/leases"]
    assert asked == ["eu", "us"]


def test_leases_are_handed_out_until_the_run_has_ended() -> None:
    with serving(NOTHING, lease("a"), DONE, lease("b"), DONE, ENDED, SUCCEEDED) as server, run_at(server) as run:
        seen = []
        for one in run.leases():
            with one:
                seen.append((one.id, one.task["prompt"], one.base_url, one.model))
                one.reward(1)
    assert seen == [(name, "2 + 2 =", f"http://serve/lease/{name}/v1", "demo@run-r") for name in "ab"]
    asked = "/v1/runs/r/leases"
    rewarded = [f"/v1/leases/{name}/reward" for name in "ab"]
    assert paths(server) == [asked, asked, rewarded[0], asked, rewarded[1], asked, "/v1/runs/r"]
    assert server.received[2].body == {"reward": 1.0, "secret": "secret of a"}
    assert all(received.headers["authorization"] == "Bearer secret" for received in server.received)


def test_a_run_without_an_environment_is_an_error_and_not_the_end() -> None:
    refused = Answer(409, {"type": "/problems/conflict", "title": "Conflict", "detail": "not leased"})
    with serving(refused, Answer(200, {"status": "running"})) as server, run_at(server) as run:
        with pytest.raises(ConflictError, match="not leased"):
            list(run.leases())


def test_a_reward_is_sent_until_the_server_has_it() -> None:
    with serving(lease(), Answer(hang_up=True), Answer(503, {}), DONE) as server, run_at(server) as run:
        with next(run.leases()) as one:
            one.reward(0.5)
    assert [received.body for received in server.received[1:]] == [{"reward": 0.5, "secret": "secret of a"}] * 3


def test_an_exception_fails_the_attempt_and_its_text_stays_here() -> None:
    with serving(lease(), DONE) as server, run_at(server) as run:
        with pytest.raises(ValueError, match="secret text"):
            with next(run.leases()):
                raise ValueError("secret text")
    assert paths(server)[1] == "/v1/leases/a/fail"
    assert server.received[1].body == {"reason": "ValueError", "timed_out": False, "secret": "secret of a"}


def test_a_time_out_has_its_own_code() -> None:
    with serving(lease(), DONE) as server, run_at(server) as run:
        with pytest.raises(TimeoutError):
            with next(run.leases()):
                raise TimeoutError
    assert server.received[1].body["timed_out"] is True


def test_a_lease_that_is_left_without_a_reward_has_failed() -> None:
    with serving(lease(), DONE) as server, run_at(server) as run:
        with pytest.raises(NoReward):
            with next(run.leases()):
                pass
    assert paths(server)[1] == "/v1/leases/a/fail"


def test_a_lease_in_a_coroutine_does_not_stop_the_loop_while_its_failure_is_sent() -> None:
    with serving(lease(), DONE) as server, run_at(server) as run:
        asked, went_on = threading.Event(), threading.Event()
        in_time = []
        take = server.take

        def held(received: Received) -> Answer:
            if received.path.endswith("/fail"):
                asked.set()
                in_time.append(went_on.wait(10))
            return take(received)

        server.take = held  # type: ignore[method-assign]

        async def goes_on() -> None:
            while not asked.is_set():
                await asyncio.sleep(0.01)
            went_on.set()

        async def attempt() -> None:
            async with next(run.leases()):
                raise KeyError("the task")

        async def both() -> None:
            other = asyncio.create_task(goes_on())
            with pytest.raises(KeyError):
                await attempt()
            await other

        asyncio.run(both())
    assert in_time == [True]
    assert server.received[-1].body["reason"] == "KeyError"


def test_a_lease_gets_one_reward() -> None:
    with serving(lease(), DONE) as server, run_at(server) as run:
        with next(run.leases()) as one:
            with pytest.raises(ValueError, match="not a finite number"):
                one.reward(float("nan"))
            one.reward(1)
            with pytest.raises(ValueError, match="has ended"):
                one.reward(0)
    assert [received.body for received in server.received[1:]] == [{"reward": 1.0, "secret": "secret of a"}]
    assert "secret of a" not in repr(one)


def test_a_lease_is_renewed_while_the_agent_works() -> None:
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    renewed = Answer(200, {"object": "rollout", "expires_at": later.isoformat()})
    with serving(lease(seconds=1.5), renewed, DONE) as server, run_at(server) as run:
        with next(run.leases()) as one:
            until = time.monotonic() + 20
            while one.expires_at != later and time.monotonic() < until:
                time.sleep(0.01)
            one.reward(1)
    assert paths(server)[1:] == ["/v1/leases/a/renew", "/v1/leases/a/reward"]


def test_a_lease_is_renewed_by_the_time_that_passes_and_not_by_a_clock_that_is_off() -> None:
    past = (datetime.now(timezone.utc) - timedelta(minutes=10)).isoformat()
    handed_out = lease(seconds=600)
    assert handed_out.body is not None
    handed_out.body["expires_at"] = past
    with serving(handed_out, DONE) as server, run_at(server) as run:
        with next(run.leases()) as one:
            time.sleep(0.3)
            one.reward(1)
    assert paths(server)[1:] == ["/v1/leases/a/reward"]


def test_a_lost_lease_is_not_renewed_again() -> None:
    lost = Answer(409, {"type": "/problems/conflict", "title": "Conflict", "detail": "the lease has expired"})
    with serving(lease(seconds=0.1), lost, lost) as server, run_at(server) as run:
        with pytest.raises(ConflictError):
            with next(run.leases()) as one:
                assert one._renewing is not None
                one._renewing.join(20)
                assert not one._renewing.is_alive()
                one.reward(1)
    assert paths(server)[1:] == ["/v1/leases/a/renew", "/v1/leases/a/reward"]


class Control:
    """A control role with so many leases, for several workers at a time."""

    def __init__(self, leases: int) -> None:
        self.left = leases
        self.rewards: dict[str, float] = {}
        self.failed: list[str] = []
        self._lock = threading.Lock()

    def take(self, received: Any) -> Answer:
        parts = received.path.split("/")
        with self._lock:
            if parts[-1] == "leases":
                self.left -= 1
                return lease(str(self.left)) if self.left >= 0 else ENDED
            if parts[-1] == "reward":
                self.rewards[parts[-2]] = received.body["reward"]
            elif parts[-1] == "fail":
                self.failed.append(parts[-2])
            else:
                return SUCCEEDED
            return DONE


def test_workers_share_the_leases_and_one_failure_costs_one_attempt() -> None:
    control = Control(12)

    def agent(one: Lease) -> float:
        if one.id == "5":
            raise RuntimeError
        return float(one.id)

    with serving() as server, run_at(server) as run:
        server.take = control.take  # type: ignore[method-assign]
        run.work(agent, workers=3)
    assert control.rewards == {str(n): float(n) for n in range(12) if n != 5}
    assert control.failed == ["5"]


def test_an_agent_that_always_fails_stops_the_work() -> None:
    control = Control(1000)

    def agent(_: Lease) -> float:
        raise RuntimeError("the tool is gone")

    with serving() as server, run_at(server) as run:
        server.take = control.take  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="the tool is gone"):
            run.work(agent, workers=2)
    assert control.left > 900 and not control.rewards


def test_a_run_is_created_once_and_then_leased() -> None:
    with serving(Answer(201, {"id": "r"}), ENDED, SUCCEEDED) as server:
        with Run.create({"kind": "grpo"}, server.url, retries=SOON) as run:
            assert (run.id, list(run.leases())) == ("r", [])
    assert paths(server)[0] == "/v1/runs" and server.received[0].body == {"kind": "grpo"}
