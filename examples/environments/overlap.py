"""What a run gains when rollouts and steps overlap: `staleness_max` 0 against 4, in one environment.
`make bench NAME=overlap` runs it beside a stack.

Both kinds get the same base, tasks and settings, and take turns. Reported for each: seconds per step,
rollouts and seconds until the mean reward of some steps in a row reaches the target, and how many
steps old the versions were that sampled what was trained on. A mean is over seeds, with Student's
95% interval.
"""

import argparse
import json
import pathlib
import statistics
import sys
import urllib.request
from datetime import datetime

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from bench import CONTROL, STUDENT, options, quiet
from environments import ALL

#: Synchronous, and the default.
KINDS = (0, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="functions", choices=list(ALL))
    parser.add_argument("--springtide", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--base", type=pathlib.Path, required=True, help="folder of `make model NAME=agent`")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="for the runs' ends")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tasks-per-step", type=int, default=4)
    parser.add_argument("--window", type=int, default=5, help="steps whose mean reward counts")
    parser.add_argument("--gain", type=float, default=0.1, help="reward above the first steps' mean to reach")
    args = parser.parse_args()
    runs = []
    for seed in range(1, args.seeds + 1):
        for staleness_max in KINDS if seed % 2 else reversed(KINDS):
            runs.append(run(args, seed, staleness_max))
            print(line(runs[-1]), flush=True)
    firsts = [mean(one["rewards"][: args.window]) for one in runs]
    target = mean(firsts) + args.gain
    for one in runs:
        one["reached"] = reached(one, target, args.window)
    report = {"options": options(args), "target": target, "runs": runs, "summary": summary(runs)}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    table(report)


def run(args: argparse.Namespace, seed: int, staleness_max: int) -> dict:
    log = args.work / f"overlap-{seed}-{staleness_max}.json"
    size = ["--steps", args.steps, "--tasks-per-step", args.tasks_per_step]
    kind = ["--seed", seed, "--staleness-max", staleness_max]
    quiet(sys.executable, HERE / "harness.py", args.name, *size, *kind, "--json", log)
    ended = json.loads(log.read_text())
    curve = get(f"/v1/runs/{ended['id']}/curve?limit=1000")["data"]
    ages: dict[str, int] = {}
    for step in steps(ended["id"]):
        for age, count in step["metrics"]["notes"]["staleness"].items():
            ages[age] = ages.get(age, 0) + count
    times = [datetime.fromisoformat(point["committed_at"].replace("Z", "+00:00")) for point in curve]
    began = datetime.fromisoformat(ended["started_at"].replace("Z", "+00:00"))
    return {
        "seed": seed,
        "staleness_max": staleness_max,
        "seconds": [(time - began).total_seconds() for time in times],
        "rewards": [point["reward_mean"] for point in curve],
        "rollouts": [point["trajectories"] for point in curve],
        "turns_by_age": dict(sorted(ages.items(), key=lambda item: int(item[0]))),
    }


def steps(run_id: str) -> list[dict]:
    found: list[dict] = []
    after = ""
    while True:
        page = get(f"/v1/runs/{run_id}/checkpoints?limit=200{after}")
        found += page["data"]
        if not page["has_more"]:
            return found
        after = f"&after={found[-1]['step']}"


def get(path: str) -> dict:
    with urllib.request.urlopen(CONTROL + path, timeout=60) as answer:
        return json.load(answer)


def reached(one: dict, target: float, window: int) -> dict | None:
    """Seconds and rollouts until the mean reward of `window` steps is at the target; None: never."""
    rewards = one["rewards"]
    for end in range(window, len(rewards) + 1):
        if mean(rewards[end - window : end]) >= target:
            return {"seconds": one["seconds"][end - 1], "rollouts": sum(one["rollouts"][:end])}
    return None


def summary(runs: list[dict]) -> list[dict]:
    found = []
    for kind in KINDS:
        of_kind = [one for one in runs if one["staleness_max"] == kind]
        there = [one["reached"] for one in of_kind if one["reached"]]
        ages: dict[str, int] = {}
        for one in of_kind:
            for age, count in one["turns_by_age"].items():
                ages[age] = ages.get(age, 0) + count
        found.append(
            {
                "staleness_max": kind,
                "seconds_per_step": with_interval([one["seconds"][-1] / len(one["seconds"]) for one in of_kind]),
                "last_reward": with_interval([mean(one["rewards"][-5:]) for one in of_kind]),
                "reached": f"{len(there)} of {len(of_kind)}",
                "seconds_to_target": with_interval([one["seconds"] for one in there]),
                "rollouts_to_target": with_interval([one["rollouts"] for one in there]),
                "turns_by_age": dict(sorted(ages.items(), key=lambda item: int(item[0]))),
            }
        )
    return found


def mean(values: list[float]) -> float:
    return statistics.mean(values) if values else float("nan")


def with_interval(values: list[float]) -> dict | None:
    if not values:
        return None
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.mean(values), "half": half}


def line(one: dict) -> str:
    rewards = one["rewards"]
    return (
        f"seed {one['seed']}, staleness_max {one['staleness_max']}: {len(rewards)} steps in {one['seconds'][-1]:.0f} s, "
        f"reward {mean(rewards[:5]):.3f} → {mean(rewards[-5:]):.3f}, turns by age {one['turns_by_age']}"
    )


def table(report: dict) -> None:
    print(f"\nTarget: {report['target']:.3f}, the mean of the first steps and {report['options']['gain']}")
    print("| staleness_max | s per step | last reward | reached | s to target | rollouts to target | turns by age |")
    print("|---|---|---|---|---|---|---|")
    for kind in report["summary"]:
        names = ["seconds_per_step", "last_reward", "reached", "seconds_to_target", "rollouts_to_target"]
        cells = [cell(kind[name]) for name in names]
        print(f"| {kind['staleness_max']} | {' | '.join(cells)} | {kind['turns_by_age']} |")


def cell(value: dict | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    half = "" if value["half"] is None else f" ± {value['half']:.3g}"
    return f"{value['mean']:.3g}{half}"


if __name__ == "__main__":
    main()
