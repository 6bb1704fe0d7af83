"""Lets the agents of the example environments play for a run until it has ended.

    harness.py NAME [--seed 1] [--steps 30] [--json FILE]      makes the run, then plays for it

`leap` goes through `verifiers`, `shop` is the agent of shop/agent.py with two lines changed,
`functions` asks once and runs the tests, and `recall` begins new contexts with summaries. `tables`
runs the answer in a world of the attempt's own.
"""

import argparse
import json
import os
import pathlib
import sys
import threading
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from openai import OpenAI

import springtide
from environments import ALL, Environment, named


def play_leap(run: springtide.Run, size: int, workers: int) -> None:
    """A `verifiers` environment as it is."""
    import springtide.verifiers

    env = springtide.verifiers.load("leap", size=size, environment=WITHOUT_A_PROCESS)
    springtide.verifiers.work(run, env, workers=workers, sampling={"max_tokens": 4})


#: What a run says that failed because the rewards of a group never differed.
NOTHING_TO_LEARN = "there is nothing to learn from"
POLL_SECONDS = 5
#: A process for each answer would take longer than the answer.
WITHOUT_A_PROCESS = {"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "one_answer"}}}


def play_shop(run: springtide.Run, workers: int) -> None:
    """The loop of shop/agent.py's main: other tasks, and two lines changed."""
    from shop.agent import play
    from shop.world import score

    def attempt(lease: springtide.Lease) -> None:
        client = OpenAI(base_url=lease.base_url, api_key=lease.api_key)
        reply = play(client, lease.model, lease.task)
        lease.reward(score(lease.task["answer"], reply))

    run.work(attempt, workers=workers)


def play(run: springtide.Run, environment: Environment, workers: int) -> None:
    """`functions`: one answer, whose tests run in a sandbox. `recall`: `springtide.Conversation`."""

    def attempt(lease: springtide.Lease) -> float:
        client = OpenAI(base_url=lease.base_url, api_key=lease.api_key)
        reply = environment.attempt(client, lease.model, lease.task)
        return environment.score(lease.task["answer"], reply)

    run.work(attempt, workers=workers)


def play_tables(run: springtide.Run, workers: int) -> None:
    """One statement in a world of tables/world.py, which lives as long as the attempt."""
    from tables.tasks import score
    from tables.world import World

    def attempt(lease: springtide.Lease) -> float:
        client = OpenAI(base_url=lease.base_url, api_key=lease.api_key)
        with World() as world:
            reply = ALL["tables"].attempt(client, lease.model, lease.task)
            return score(lease.task["answer"], reply, world.psql)

    run.work(attempt, workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(ALL))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tasks-per-step", type=int, default=8)
    parser.add_argument("--staleness-max", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--summaries", choices=springtide.SUMMARIES, default="trained", help="of recall")
    parser.add_argument(
        "--may-end-early", action="store_true", help="it is no error if rewards never differ or a guard pauses the run"
    )
    parser.add_argument("--json", type=pathlib.Path, help="where to write the run's end")
    args = parser.parse_args()
    os.environ.setdefault("SPRINGTIDE_CONTROL", "http://127.0.0.1:8032")
    run = springtide.Run.create(
        {
            "kind": "grpo",
            "environment": {"kind": "pull", "lease_seconds": 60},
            "tasks": tasks(args.name, args.tasks),
            "group_size": args.group_size,
            "tasks_per_step": args.tasks_per_step,
            "steps": args.steps,
            "learning_rate": args.learning_rate,
            "staleness_max": args.staleness_max,
            "max_tokens": ALL[args.name].max_tokens,
            "seed": args.seed,
        }
    )
    print(f"run {run.id}", flush=True)
    started = time.monotonic()
    if args.may_end_early:
        threading.Thread(target=end_with_a_pause, args=(run, started, args), daemon=True).start()
    if args.name == "leap":
        play_leap(run, args.tasks, args.workers)
    elif args.name == "shop":
        play_shop(run, args.workers)
    elif args.name == "tables":
        play_tables(run, args.workers)
    else:
        play(run, named(args.name, args.summaries), args.workers)
    sys.exit(told(run.status(), started, args))


def end_with_a_pause(run: springtide.Run, started: float, args: argparse.Namespace) -> None:
    """Ends this program when the run is paused: its workers would wait until somebody resumes it."""
    while (status := run.status())["status"] != "paused":
        time.sleep(POLL_SECONDS)
    told(status, started, args)
    sys.stdout.flush()
    os._exit(0)


def told(status: dict, started: float, args: argparse.Namespace) -> str | None:
    """Prints how the run went and writes it down. Returns why that is an error, if it is one."""
    seconds = time.monotonic() - started
    print(f"{status['status']} after {status['steps_done']} steps and {seconds:.0f} s on line {status['line']}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**status, "seconds": seconds}, indent=2) + "\n")
    reason = status.get("reason") or ""
    early = status["status"] == "paused" or NOTHING_TO_LEARN in reason
    if status["status"] == "succeeded" or (args.may_end_early and early):
        return None
    return f"{status['status']}: {reason}"


def tasks(name: str, count: int) -> list[dict]:
    """What the run gets. The environment of `verifiers` keeps its answers and names its tasks."""
    if name != "leap":
        return ALL[name].tasks("train", count)
    import springtide.verifiers

    return springtide.verifiers.tasks(springtide.verifiers.load("leap", size=count, environment=WITHOUT_A_PROCESS))


if __name__ == "__main__":
    main()
