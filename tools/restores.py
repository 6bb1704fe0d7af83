"""Restores the whole stack to random moments, under load. `make chaos NAME=restores` runs it.

In each round callers ask for completions and say accept or reject, the trainer makes versions, and `stack backup` runs three
times. Then everything is killed, and a random moment of the backup is restored, with the log and the files of this
machine. In every fifth round those are lost too, and the newest moment is restored: what was acknowledged before the last
backup began must be there. In the other rounds a user is erased after the last backup. At the end every acknowledged event
must be there, but what the lost machines had alone.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from datetime import datetime, timezone

BASE = "http://127.0.0.1:"
SERVE, INGEST, CONTROL, TRAIN = (f"{BASE}{port}" for port in (8080, 8081, 8082, 8083))
POSTGRES_PORT = 15474
CALLERS = 3
PROMPT = "fn main() {\n    let mut <|cut|>"
WAIT_SECONDS = 180.0
#: In every this-many-th round all files of the machine are lost.
LOSS_EVERY = 5
CONFIG = """
state_dir = "{work}/s"
policy.base = "{base}"
stack.cache = "{cache}"
postgres.port = {port}
kafka.port = 19506
kafka.controller_port = 19507

[listen]
serve = "127.0.0.1:8080"
ingest = "127.0.0.1:8081"
control = "127.0.0.1:8082"
train = "127.0.0.1:8083"

[[release.arm]]
alias = "learner"
weight = 0.5
[[release.arm]]
alias = "base"
weight = 0.5

[[ingest.surface]]
name = "completion"
horizon_seconds = 2.0

[trainer.realtime]
cohort_size = 16
staleness_max = 64
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("springtide", "base", "cache", "work", "json"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    args.seed = args.seed if args.seed is not None else random.randrange(1 << 32)
    print(f"seed {args.seed}", flush=True)
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    stack = Stack(args, work)
    load = Load()
    try:
        stack.start()
        load.start()
        rounds = [one_round(stack, load, number, args.rounds) for number in range(1, args.rounds + 1)]
        load.stop()
        report = {"seed": args.seed, **check(stack, load), "rounds": rounds}
    finally:
        load.stopped.set()
        stack.kill()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "rounds"}, indent=1))
    wrong = {name: report[name] for name in ("lost", "refused", "trained_twice", "of_erased_users") if report[name]}
    if wrong or not report["balanced"]:
        raise SystemExit(f"wrong: {wrong}; the stack's files are in {work}")
    shutil.rmtree(work)


class Stack:
    """`springtide up`, its backups, and what is done to it."""

    def __init__(self, args: argparse.Namespace, work: pathlib.Path) -> None:
        self.work, self.state, self.random = work, work / "s", random.Random(args.seed)
        self.config = work / "springtide.toml"
        paths = {"base": args.base.resolve(), "cache": args.cache.resolve()}
        self.config.write_text(CONFIG.format(work=work, port=POSTGRES_PORT, **paths))
        self.program = [str(args.springtide.resolve()), "--config", str(self.config)]
        parts = json.loads(self.command("stack", "fetch", "--json"))
        self.psql = pathlib.Path(parts["postgres"]) / "bin/psql"
        self.up: subprocess.Popen | None = None

    def command(self, *arguments: object) -> str:
        done = subprocess.run([*self.program, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, other_log: bool = False) -> None:
        environment = os.environ | ({"SPRINGTIDE__INGEST__ACCEPT_OTHER_LOG": "true"} if other_log else {})
        with (self.work / "up.log").open("a") as log:
            self.up = subprocess.Popen([*self.program, "up"], stdout=log, stderr=log, env=environment, start_new_session=True)
        wait("the roles answer", lambda: all(answers(url) for url in (SERVE, INGEST, CONTROL, TRAIN)), self)

    def kill(self) -> None:
        if self.up is not None:
            self.up.kill()
            self.up.wait()
            self.up = None
            # the kernel tells its children
            children = json.loads((self.state / "up.json").read_text()).values()
            wait("all of it has ended", lambda: not any(runs(child["pid"]) for child in children))

    def rows(self, query: str) -> list[str]:
        command = [self.psql, "-h", self.state / "postgres", "-p", str(POSTGRES_PORT), "-U", "postgres", "-Atc", query, "springtide"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


class Load:
    """Callers. `acknowledged`: kind, id, when, in seconds since 1970."""

    def __init__(self, serve: str = SERVE) -> None:
        self.serve = serve
        self.acknowledged: list[tuple[str, str, float]] = []
        self.failed = 0
        #: Answers that no outage explains.
        self.refused: list[str] = []
        self.erased: set[str] = set()
        self.user = "erase-1"
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.call, args=(number,), daemon=True) for number in range(CALLERS)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()

    def call(self, number: int) -> None:
        chosen = random.Random(number)
        while not self.stopped.is_set():
            # the first caller asks for the user who will be erased
            user = self.user if number == 0 else f"user-{number}-{chosen.randrange(20)}"
            try:
                body = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "user": user}
                generation = post(f"{self.serve}/v1/completions", body)["choices"][0]["generation_id"]
                self.acknowledged.append(("generation", generation, time.time()))
                body = {"generation_id": generation, "metric_name": "accept", "value": chosen.random() < 0.5}
                feedback = post(f"{INGEST}/v1/feedback", body | {"id": uuid7()})["feedback_id"]
                self.acknowledged.append(("feedback", feedback, time.time()))
            except urllib.error.HTTPError as error:
                if error.code not in (429, 500, 502, 503, 504):
                    self.refused.append(f"{error.code} {error.read().decode()[:300]}")
                self.failed += 1
                time.sleep(0.2)
            except (OSError, ValueError, KeyError):
                self.failed += 1
                time.sleep(0.2)


def one_round(stack: Stack, load: Load, number: int, rounds: int) -> dict:
    folder = stack.work / f"backup-{number}"
    began = time.monotonic()
    stack.command("stack", "backup", folder)
    first_backup = time.monotonic() - began
    for _ in range(2):
        time.sleep(stack.random.uniform(3, 8))
        kept_until = time.time()
        backup = json.loads(stack.command("stack", "backup", folder, "--json"))
    lost = number % LOSS_EVERY == 0
    if not lost:
        # its receipt is in the policy store of this machine, and not in the backup
        user, load.user = load.user, f"erase-{number + 1}"
        time.sleep(1)
        receipt = stack.work / f"receipt-{number}"
        stack.command("erase", "--user", user, "--reason", "restores", "--receipt", receipt, "--yes")
        stack.command("erase", "--verify", receipt)
        load.erased.add(user)
    time.sleep(stack.random.uniform(0, 3))
    killed = time.monotonic()
    stack.kill()
    shutil.rmtree(stack.state if lost else stack.state / "postgres")
    start, end = (datetime.fromisoformat(backup[name]) for name in ("from", "until"))
    to = end if lost else start + (end - start) * stack.random.random()
    began = time.monotonic()
    restored = json.loads(stack.command("stack", "restore", folder, "--to", to.isoformat().replace("+00:00", "Z"), "--json"))
    restore = time.monotonic() - began
    if lost:
        before = len(load.acknowledged)
        load.acknowledged = [one for one in load.acknowledged if one[2] < kept_until]
        excluded = before - len(load.acknowledged)
    answered = len(load.acknowledged)
    stack.start(other_log=lost)
    wait("a completion is acknowledged", lambda: len(load.acknowledged) > answered, stack)
    found = {
        "restore": number,
        "lost_machine": lost,
        "seconds_back": round(time.time() - to.timestamp(), 1),
        "newest_version": restored["newest_version"],
        "backup_seconds": round(first_backup, 2),
        "restore_seconds": round(restore, 2),
        "seconds_without_service": round(time.monotonic() - killed, 1),
        **({"excluded": excluded} if lost else {}),
    }
    stack.command("policy", "fsck")
    stack.command("audit", "verify")
    print(f"{number} of {rounds}: {found}", flush=True)
    shutil.rmtree(folder)
    return found


def check(stack: Stack, load: Load) -> dict:
    """What must hold once the tables have what the log has."""
    now = time.time()

    def stored() -> bool:
        (at,) = stack.rows(
            "select coalesce(extract(epoch from min(caught_up_to)), 0) from consumer_offset where consumer = 'sink' and"
            " cluster_id = (select cluster_id from consumer_offset where consumer = 'sink' order by updated_at desc limit 1)"
        )
        return float(at) > now

    wait("the tables have the log", stored, stack)
    lost = {}
    for kind in ("generation", "feedback"):
        there = set(stack.rows(f"select id from {kind}"))
        lost[kind] = [name for what, name, _ in load.acknowledged if what == kind and name not in there]
    users = ", ".join(f"'{user}'" for user in load.erased) or "''"
    (of_erased,) = stack.rows(f"select count(*) from generation where user_key in ({users})")
    (trained,) = stack.rows("select count(*) from trajectory_use where purpose = 'trained'")
    (twice,) = stack.rows("select count(*) - count(distinct generation_id) from trajectory_use where purpose = 'trained'")
    (versions,) = stack.rows("select count(*) from version")
    ledger = get(f"{CONTROL}/v1/ledger")
    stack.command("policy", "fsck", "--deep")
    return {
        "acknowledged": len(load.acknowledged),
        "failed_attempts": load.failed,
        "refused": sorted(set(load.refused)),
        "lost": sum(map(len, lost.values())),
        "lost_ids": lost,
        "balanced": ledger["balanced"],
        "ledger": ledger,
        "versions": int(versions),
        "trained": int(trained),
        "trained_twice": int(twice),
        "erased_users": len(load.erased),
        "of_erased_users": int(of_erased),
    }


def uuid7() -> str:
    """Version 7: milliseconds, then random bits."""
    number = (time.time_ns() // 1_000_000) << 80 | random.getrandbits(80)
    return str(uuid.UUID(int=number & ~(0xF << 76) & ~(0x3 << 62) | 7 << 76 | 2 << 62))


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait(what: str, condition, stack: Stack | None = None) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {WAIT_SECONDS} s: {what}")
        if stack is not None and stack.up is not None and stack.up.poll() is not None:
            raise SystemExit(f"`up` has ended: {stack.work}/up.log")
        time.sleep(0.2)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: exit(1))
    main()
