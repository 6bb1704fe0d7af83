"""Kills ranks and agents of torchrun that train a GRPO run from leases, on a stack of its own, and looks at what
became of steps and generations. `make chaos NAME=ranks` runs it.

`train` launches torchrun, which starts two ranks of examples/trainers/fsdp2/train.py. A rank that dies is started
again by its agent, an agent that dies by `train`. Each kill waits until a step was committed since the one before,
or 60 s.
"""

import argparse
import collections
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent.parent
CONTROL = "http://127.0.0.1:8032"
STEPS = 10_000
WAIT_SECONDS = 60
GRADER = {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "input": "{{ sample.output_text }}",
          "reference": "{{ item.answer }}"}  # fmt: skip
#: The restarts that torchrun makes before `train` starts it again.
RESTARTS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--springtide", type=pathlib.Path, required=True)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="the folder of torchrun")
    parser.add_argument("--psql", type=pathlib.Path, required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=HERE / ".springtide", prefix="r-") as work:
        report = run(args, pathlib.Path(work))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    if report["trained_twice"] or report["lost"] or not report["contiguous"] or not report["acknowledged"]:
        sys.exit("steps were lost or made twice")


def run(args: argparse.Namespace, work: pathlib.Path) -> dict:
    config = configure(args, work)
    program = [str(args.springtide.resolve()), "--config", str(config)]
    with (work / "up.log").open("wb") as log:
        stack = subprocess.Popen([*program, "up"], stdout=log, stderr=subprocess.STDOUT)
        try:
            while "Springtide is up" not in (work / "up.log").read_text():
                assert stack.poll() is None, (work / "up.log").read_text()
                time.sleep(0.5)
            return kills(args, work)
        finally:
            stack.send_signal(signal.SIGINT)
            stack.wait()


def configure(args: argparse.Namespace, work: pathlib.Path) -> pathlib.Path:
    examples = HERE / "examples/environments"
    text = (examples / "springtide.toml").read_text()
    text = text.replace('"../../.springtide/environments"', f'"{work}/s"').replace('"../../', f'"{HERE}/')
    config = work / "springtide.toml"
    torchrun = [str(args.bin.resolve() / "torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts"]
    train = [str(HERE / "examples/trainers/fsdp2/train.py"), "--work", f"{work}/w", "--lease-seconds", "20"]
    train += ["--springtide", str(args.springtide.resolve()), "--config", str(config), "--compute", "float32"]
    command = json.dumps([*torchrun, str(RESTARTS), *train])
    config.write_text(text + f'\n[[trainer.launcher]]\nname = "fsdp2"\ncommand = {command}\n')
    return config


def kills(args: argparse.Namespace, work: pathlib.Path) -> dict:
    chance = random.Random(args.seed)
    tasks = [{"id": f"{n:03}", "prompt": f"{n} + 1 = ", "answer": str(n + 1)} for n in range(50)]
    run = call(
        "/v1/runs",
        {"kind": "grpo", "tasks": tasks, "grader": GRADER, "group_size": 4, "tasks_per_step": 2, "steps": STEPS,
         "max_tokens": 8, "trainer": {"launcher": "fsdp2"}, "seed": 1},
    )["id"]  # fmt: skip
    counts, died = collections.Counter(), 0
    while sum(counts.values()) < args.kills:
        before, until = steps_of(run), time.monotonic() + WAIT_SECONDS
        while steps_of(run) == before and time.monotonic() < until:
            time.sleep(0.2)
        died += steps_of(run) == before
        time.sleep(chance.uniform(0, 4))
        kind = chance.choice(["rank", "rank", "agent"])
        found = processes(kind, work)
        if found:
            subprocess.run(["kill", "-9", str(chance.choice(found))], check=False)
            counts[kind] += 1
    last = steps_of(run)
    while steps_of(run) < last + 3:
        time.sleep(1)
    call(f"/v1/runs/{run}/cancel", {})
    time.sleep(5)
    said = {}
    for line in "".join(path.read_text() for path in (work / "s/launchers").glob("*.log")).splitlines():
        words = line.split()
        if line.startswith("step ") and "version" in words:
            said[int(words[1].rstrip(":"))] = int(words[3].rstrip(","))
    ask = lambda sql: sql_of(args, work, sql)  # noqa: E731
    made = {int(step): int(version) for step, version in ask(f"select step, version from step where run_id = '{run}'")}
    twice = ask(f"""select count(*) from (select generation_id from trajectory_use u where u.run_id = '{run}'
                    group by generation_id having count(*) > 1) t""")
    return {
        "seed": args.seed,
        "kills": counts,
        "steps": len(made),
        "contiguous": sorted(made) == list(range(1, len(made) + 1)),
        "acknowledged": len(said),
        "lost": sum(made.get(step) != version for step, version in said.items()),
        "trained_twice": int(twice[0][0]),
        "waits_without_a_step": died,
    }


def processes(kind: str, work: pathlib.Path) -> list[int]:
    """Ranks are the children of the agent."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    of = [line.split() for line in lines if f"fsdp2/train.py --work {work}/w" in line and "python" in line]
    agents = [int(words[0]) for words in of if any(word.endswith("/torchrun") for word in words)]
    ranks = [int(words[0]) for words in of if int(words[0]) not in agents]
    return agents if kind == "agent" else ranks


def steps_of(run: str) -> int:
    found = call(f"/v1/runs/{run}")
    assert found["status"] == "running", found["reason"]
    return found["steps_done"]


def call(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(CONTROL + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def sql_of(args: argparse.Namespace, work: pathlib.Path, sql: str) -> list[list[str]]:
    socket = f"{work}/s/postgres"
    command = [args.psql, "-h", socket, "-p", "15442", "-U", "postgres", "-At", "-F", "\t", "-c", sql, "springtide"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split("\t") for line in said.splitlines()]


if __name__ == "__main__":
    main()
