"""Rollbacks under load: how long users still get the bad version, and what fails meanwhile. `make bench NAME=rollback` runs it
beside a stack.

Three replicas answer callers without a pause, and the demo's developers ask the first one. `champion` gets a version with
noise in its weights, and a rollback takes it back, `--times` times with all replicas well, and `--stopped` times while the
third one is stopped (SIGSTOP) from a second before until `--stop-seconds` after.

Every rollback is in the report.
"""

import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from bench_release import BASE, Stack, arguments, cell, machine, publish

REPLICAS = 3
#: Callers of each replica, each with one request at a time.
CALLERS = 3
TOKENS = 16
PROMPT = "fn main() {\n    let mut "
#: Longer than a replica is stopped.
REQUEST_SECONDS_MAX = 120
PATIENCE_SECONDS = 120
#: With the bad version, before the rollback.
BAD_SECONDS = 5.0
#: Between SIGSTOP and the rollback.
STOPPED_BEFORE_SECONDS = 1.0
#: After the rollback, to see who still gets the version.
AFTER_SECONDS = 10.0
POLL_SECONDS = 0.05


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--times", type=int, default=10, help="rollbacks with all replicas well")
    parser.add_argument("--stopped", type=int, default=5, help="rollbacks while one replica is stopped")
    parser.add_argument("--stop-seconds", type=float, default=20.0, help="after the rollback")
    args = parser.parse_args()
    # so that all processes are stopped too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stack = Stack(args)
    developers = stack.developers(args)
    fleet = Fleet(stack, args)
    try:
        stack.wait_for_answers(BASE)
        _, bad = publish(stack, args, "noise", 0, args.seed, "bad")
        fleet.start()
        rollbacks = [rollback(stack, fleet, args, bad, is_stopped=False) for _ in range(args.times)]
        rollbacks += [rollback(stack, fleet, args, bad, is_stopped=True) for _ in range(args.stopped)]
    finally:
        fleet.stop()
        developers.terminate()
        developers.wait()
    report = {"machine": machine(), "options": options(args), "rollbacks": rollbacks}
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(table(rollbacks))


def options(args) -> dict:
    names = ("times", "stopped", "stop_seconds", "seed", "rate", "developers")
    return {name: getattr(args, name) for name in names} | {"replicas": REPLICAS, "callers": CALLERS}


@dataclass(frozen=True)
class Answer:
    replica: int
    began: float
    ended: float
    #: `None`: it failed.
    version: int | None
    failure: str | None


class Fleet:
    """Replicas beside that of the stack, and callers of all."""

    def __init__(self, stack: Stack, args) -> None:
        self.stack, self.args = stack, args
        host, port = "127.0.0.1", int(stack.control.rsplit(":", 1)[1]) - 2
        # the stack's own, then ports that it does not use
        self.ports = [port, port + 10, port + 11]
        self.host = host
        self.processes: list[subprocess.Popen] = []
        self.answers: list[Answer] = []
        self.over = threading.Event()
        self.callers: list[threading.Thread] = []

    def start(self) -> None:
        for number in range(1, REPLICAS):
            with (self.args.json.parent / f"rollback-replica-{number + 1}.log").open("w") as log:
                self.processes.append(subprocess.Popen(
                    [*self.stack.command, "serve"], env=self.environment(number), stdout=log, stderr=subprocess.STDOUT,
                ))
        self.wait_until(lambda: len(self.reports()) == REPLICAS, "all replicas report")
        for replica in range(REPLICAS):
            for caller in range(CALLERS):
                thread = threading.Thread(target=self.call, args=(replica, caller), daemon=True)
                thread.start()
                self.callers.append(thread)

    def environment(self, number: int) -> dict:
        return os.environ | {
            "SPRINGTIDE__LISTEN__SERVE": f"{self.host}:{self.ports[number]}",
            "SPRINGTIDE__SERVE__REPLICA": f"replica-{number + 1}",
            "SPRINGTIDE__SERVE__STATE_DIR": str(self.args.work / f"serve-{number + 1}"),
        }

    def call(self, replica: int, caller: int) -> None:
        """Asks one replica again and again, each time as another user."""
        draw = random.Random(self.args.seed * 1000 + replica * 100 + caller)
        while not self.over.is_set():
            began = time.monotonic()
            version, failure = self.ask(replica, f"caller-{draw.randrange(10_000)}")
            self.answers.append(Answer(replica, began, time.monotonic(), version, failure))
            if failure:
                time.sleep(0.1)

    def ask(self, replica: int, user: str) -> tuple[int | None, str | None]:
        connection = http.client.HTTPConnection(self.host, self.ports[replica], timeout=REQUEST_SECONDS_MAX)
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "user": user, "metadata": {"consent": False}}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return None, repr(error)
        finally:
            connection.close()
        if response.status != 200:
            return None, f"{response.status} {text[:200]}"
        return json.loads(text)["choices"][0]["version"], None

    def reports(self) -> list[dict]:
        return [replica for replica in self.stack.get("/v1/replicas")["replicas"] if replica["ready"]]

    def wait_until(self, holds, what: str) -> float:
        """Returns the moment."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                raise SystemExit(f"waited in vain: {what}")
            time.sleep(POLL_SECONDS)
        return time.monotonic()

    def served_at_last(self, version: int, answers: list[Answer]) -> set[int]:
        """The replicas whose newest answer is the version's."""
        newest = {answer.replica: answer for answer in answers if answer.version is not None}
        return {replica for replica, answer in newest.items() if answer.version == version}

    def stop(self) -> None:
        self.over.set()
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for thread in self.callers:
            thread.join(REQUEST_SECONDS_MAX)
        for process in self.processes:
            process.wait()


def rollback(stack: Stack, fleet: Fleet, args, bad: int, is_stopped: bool) -> dict:
    since = len(fleet.answers)
    stack.post("/v1/releases", {"kind": "pin", "alias": "champion", "version": bad, "reason": "bench"})
    everywhere = set(range(REPLICAS))
    fleet.wait_until(lambda: fleet.served_at_last(bad, fleet.answers[since:]) == everywhere, "all replicas serve the bad version")
    time.sleep(BAD_SECONDS)
    victim = fleet.processes[-1]
    well = everywhere - {REPLICAS - 1} if is_stopped else everywhere
    if is_stopped:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_BEFORE_SECONDS)
    asked = time.monotonic()
    epoch = stack.post("/v1/releases", {"kind": "rollback", "alias": "champion", "version": BASE, "reason": "bench"})["epoch"]
    names = {f"replica-{number + 1}" for number in well}
    has_it = lambda: names <= {replica["id"] for replica in fleet.reports() if replica["epoch"] >= epoch}
    reported = fleet.wait_until(has_it, "all replicas report the rollback") - asked
    silent = None
    continued = None
    if is_stopped:
        time.sleep(max(0.0, args.stop_seconds - reported))
        silent = any(replica["silent"] for replica in stack.get("/v1/replicas")["replicas"])
        continued = time.monotonic()
        victim.send_signal(signal.SIGCONT)
    time.sleep(AFTER_SECONDS)
    ended = time.monotonic()
    answers = fleet.answers[since:]
    late = [answer for answer in answers if answer.version == bad and answer.began > asked]
    of_well = [answer for answer in late if answer.replica in well]
    failed = [answer.failure for answer in answers if answer.failure]
    found = {
        "stopped": is_stopped,
        "reported_seconds": reported,
        # the last answer of the bad version by a replica that is well
        "begun_until_seconds": max((answer.began - asked for answer in of_well), default=0.0),
        "ended_until_seconds": max((answer.ended - asked for answer in answers if answer.version == bad and answer.replica in well), default=0.0),
        "late_answers": len(of_well),
        "requests": len(answers),
        "failed": len(failed),
        "failures": sorted(set(failed)),
        "requests_per_second": sum(answer.ended > asked - BAD_SECONDS for answer in answers) / (ended - asked + BAD_SECONDS),
        "silent_is_shown": silent,
        "after_continuing_seconds": after_continuing(late, continued),
    }
    print(json.dumps(found), flush=True)
    return found


def after_continuing(late: list[Answer], continued: float | None) -> float | None:
    """Until when the replica that was stopped began answers of the bad version, after it went on."""
    if continued is None:
        return None
    of_it = [answer.began - continued for answer in late if answer.replica == REPLICAS - 1 and answer.began > continued]
    return max(of_it, default=0.0)


def table(rollbacks: list[dict]) -> str:
    rows = [
        "| one replica stopped | rollbacks | all others report it, seconds: median, most | last answer of the bad version begun: median, most "
        "| ended | requests | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for stopped in (False, True):
        of = [rollback for rollback in rollbacks if rollback["stopped"] == stopped]
        if not of:
            continue
        both = lambda name: (lambda values: f"{cell(statistics.median(values), 2)}, {cell(max(values), 2)}")([one[name] for one in of])
        rows.append(
            f"| {'yes' if stopped else 'no'} | {len(of)} | {both('reported_seconds')} | {both('begun_until_seconds')} "
            f"| {both('ended_until_seconds')} | {sum(one['requests'] for one in of)} | {sum(one['failed'] for one in of)} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
