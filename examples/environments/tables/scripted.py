"""The worlds of `tables` with answers from a script, without a model: `make bench NAME=tables`.

    scripted.py --springtide PROGRAM [--accelerator tcg] [--tasks 30] [--kills 3] [--json FILE]

It starts `springtide world`, measures how fast attempts get their worlds, and exits with an error
if one attempt notices another: by its changes, its `drop table`, or the death of its machine.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "python/tests")]

import httpx
from faulty_server import Answer, serving

import springtide
from environments import ALL
from harness import play_tables
from tables import tasks
from tables.world import World

READY = 2  # forks that wait; so many attempts go on beside each other
BOOT_SECONDS_MAX = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--springtide", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--accelerator", choices=["kvm", "tcg"], default="kvm")
    parser.add_argument("--tasks", type=int, default=30, help="each gets a right answer and a wrong one")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    # 127.0.0.1:8036 is beside the addresses of the examples' stack
    os.environ["SPRINGTIDE_WORLD"] = "http://127.0.0.1:8036"
    with service(args.springtide, args.accelerator) as (process, boot_s):
        print(f"{args.accelerator}: ready {boot_s:.1f} s after the start", flush=True)
        report = {
            "accelerator": args.accelerator,
            "boot_s": boot_s,
            "attempts": [attempts(args.tasks, workers) for workers in (1, READY)],
            "diverge": diverge(),
            "drop": drop(),
            "kills": [kill(process.pid, round_) for round_ in range(args.kills)],
        }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


@contextmanager
def service(program: pathlib.Path, accelerator: str) -> Any:
    """`springtide world` until the end of the `with`, and how long it took until worlds were ready."""
    settings = {"LISTEN": "127.0.0.1:8036", "READY": READY, "MACHINE__ACCELERATOR": accelerator}
    env = os.environ | {f"SPRINGTIDE__WORLD__{name}": str(value) for name, value in settings.items()}
    began = time.monotonic()
    process = subprocess.Popen([program, "--config", HERE.parent / "springtide.toml", "world"], env=env)
    try:
        while True:
            try:
                pool()
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() - began > BOOT_SECONDS_MAX:
                    sys.exit("springtide world did not start")
                time.sleep(0.1)
        yield process, time.monotonic() - began
    finally:
        process.terminate()
        process.wait()


def pool() -> dict[str, int]:
    return httpx.get(f"{os.environ['SPRINGTIDE_WORLD']}/v1/worlds", timeout=BOOT_SECONDS_MAX).json()


def attempts(count: int, workers: int) -> dict:
    """A right and a wrong answer to each task, in worlds of their own."""
    made = [
        (task, care, tasks.demonstration(task, random.Random(task["id"]), care)[0][-1]["content"])
        for task in ALL["tables"].tasks("held_out", count)
        for care in (1.0, 0.0)
    ]

    def attempt(which: tuple[dict, float, str]) -> tuple[float, float, float]:
        task, care, reply = which
        began, times = time.monotonic(), []
        with World() as world:
            times.append(time.monotonic() - began)

            def psql(query: str) -> str | None:
                printed = world.psql(query)
                times.append(time.monotonic() - began)
                return printed

            score = tasks.score(task["answer"], reply, psql)
        check(score == care, f"{reply!r} scored {score} for {task['answer']!r}")
        return times[0], times[1], time.monotonic() - began

    began = time.monotonic()
    with ThreadPoolExecutor(workers) as threads:
        times = list(threads.map(attempt, made))
    per_minute = 60 * len(made) / (time.monotonic() - began)
    result: dict[str, Any] = {"workers": workers, "n": len(made), "per_minute": per_minute}
    print(f"{len(made)} attempts, {workers} at a time: {per_minute:.1f} a minute; right 1, wrong 0 in all")
    for name, values in zip(("world_s", "first_query_s", "whole_s"), zip(*times)):
        middle, p95 = statistics.median(values), statistics.quantiles(values, n=20, method="inclusive")[-1]
        result[name] = {"median": middle, "p95": p95, "worst": max(values)}
        print(f"  {name:<14} median {middle:.2f}  p95 {p95:.2f}  worst {max(values):.2f}", flush=True)
    return result


def diverge() -> str:
    """Two worlds change the same row; each sees its own change, and a third neither."""
    price, first = "select price from item where name = 'lamp'", tasks.sqlite()(tasks.ROWS)
    with World() as one, World() as two:
        one.psql("update item set price = 1 where name = 'lamp'")
        two.psql("update item set price = 2 where name = 'lamp'")
        seen = [one.psql(price), two.psql(price)]
        check(seen == ["1", "2"], f"the two worlds see {seen}")
        with World() as third:
            check(third.psql(tasks.ROWS) == first, "a third world is changed")
    return said("two forks diverged: each saw its own price, a third the price of the snapshot")


def drop() -> str:
    """A world loses its tables; one that was there before and one that comes later have theirs."""
    whole = tasks.sqlite()(tasks.ROWS)
    with World() as before, World() as broken:
        check(broken.psql("drop table item, sale") == "", "the tables were not dropped")
        check(broken.psql(tasks.ROWS) is None, "the tables are still there")
        check(before.psql(tasks.ROWS) == whole, "another world lost rows")
        with World() as after:
            check(after.psql(tasks.ROWS) == whole, "a later world lost rows")
    return said("`drop table item, sale` in one fork: one from before and one from after it are whole")


class Stack:
    """Plays control and model: leases each task once, answers each rightly. Kills a machine as soon as
    each worker has asked the model, in a world of its own."""

    def __init__(self, url: str, leased: list[dict], service_pid: int) -> None:
        self._url, self._service_pid = url, service_pid
        self._tasks = {task["id"]: task for task in leased}
        self._left, self._asked, self._lock = list(leased), 0, threading.Lock()
        self._all_ask = threading.Barrier(READY, self._kill, timeout=60)
        self.rewards: dict[str, float] = {}
        self.failures: dict[str, str] = {}

    def take(self, received: Any) -> Answer:
        parts, body = received.path.split("/"), received.body
        if parts[-1] == "completions":
            with self._lock:
                self._asked += 1
                is_first = self._asked <= READY
            if is_first:
                self._all_ask.wait()
            return self._answer(tasks.solution(self._tasks[parts[2]]))
        with self._lock:
            if parts[-1] == "leases":
                return self._lease(self._left.pop(0)) if self._left else Answer(409, {"title": "Conflict"})
            if parts[-1] == "reward":
                self.rewards[parts[-2]] = body["reward"]
            elif parts[-1] == "fail":
                self.failures[parts[-2]] = body["reason"]
            return Answer(200, {"id": "r", "status": "succeeded"})

    def _kill(self) -> None:
        os.kill(oldest_machine(self._service_pid), signal.SIGKILL)

    def _lease(self, task: dict) -> Answer:
        url = f"{self._url}/lease/{task['id']}"
        expires_at = (datetime.now(timezone.utc) + timedelta(minutes=10)).isoformat()
        lease = {"id": task["id"], "task": task, "model": "scripted", "expires_at": expires_at}
        lease |= {"group_id": task["id"], "lease_seconds": 600, "secret": "s"}
        return Answer(201, {**lease, "base_url": f"{url}/v1", "anthropic_base_url": url})

    def _answer(self, content: str) -> Answer:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        whole = {"id": "c", "object": "chat.completion", "created": 0, "model": "scripted"}
        return Answer(200, {**whole, "choices": [choice]})


def kill(service_pid: int, seed: int) -> dict:
    """The harness plays four attempts, two at a time. The machine of one dies while it asks the model."""
    leased = ALL["tables"].tasks("train", 4, seed)
    # then both attempts take worlds that waited, which are older than those that wait after them
    while pool()["ready"] < READY:
        time.sleep(0.1)
    with serving() as server, springtide.Run("r", server.url) as run:
        stack = Stack(server.url, leased, service_pid)
        server.take = stack.take  # type: ignore[method-assign]
        play_tables(run, workers=READY)
    check(list(stack.rewards.values()) == [1.0] * 3, f"rewards {stack.rewards}")
    check(len(stack.failures) == 1 and len({*stack.rewards, *stack.failures}) == 4, f"failures {stack.failures}")
    said(f"a machine killed in mid-attempt: 1 attempt failed ({stack.failures}), 3 others got reward 1")
    return {"rewards": stack.rewards, "failures": stack.failures}


def oldest_machine(service_pid: int) -> int:
    """The process of QEMU below the service that was started first."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,comm=", "--sort=start_time"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in found.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}

    def below(pid: int) -> bool:
        return pid == service_pid or (pid in parents and below(parents[pid]))

    return next(int(pid) for pid, _, name in rows if name.startswith("qemu") and below(int(pid)))


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"failed: {otherwise}")


def said(text: str) -> str:
    print(text, flush=True)
    return text


if __name__ == "__main__":
    main()
