"""How old the versions were that sampled what a run trained on, over many rollouts: none is more than
`staleness_max` steps behind. `make bench NAME=staleness` runs it beside a stack.

The model is random (base/tiny.py), so answers are long. The tasks are prompts whose completions a
string check grades, in groups of 128, so that rollouts and steps overlap as much as they may. A
turn's age is that of the oldest version of any of its tokens.
"""

import argparse
import json
import pathlib
import sys
import time
import urllib.request

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from bench import CONTROL
from overlap import get, steps

WORDS = "river stone winter garden paper window letter market bridge island".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--springtide", type=pathlib.Path, help="ignored: bench-environments.sh names it to all scripts")
    parser.add_argument("--base", type=pathlib.Path, help="likewise")
    parser.add_argument("--work", type=pathlib.Path, help="likewise")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--tasks-per-step", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--staleness-max", type=int, default=4)
    args = parser.parse_args()
    began = time.monotonic()
    run = post(
        "/v1/runs",
        {
            "kind": "grpo",
            "tasks": [{"prompt": f"The {word} and the", "answer": "th"} for word in WORDS],
            "grader": "contains",
            "group_size": args.group_size,
            "tasks_per_step": args.tasks_per_step,
            "steps": args.steps,
            "learning_rate": 1e-5,
            "max_tokens": args.max_tokens,
            "staleness_max": args.staleness_max,
        },
    )
    while (now := get(f"/v1/runs/{run['id']}"))["status"] not in ("succeeded", "failed", "cancelled", "paused"):
        time.sleep(2)
    if now["status"] != "succeeded":
        raise SystemExit(f"the run is {now['status']}: {now['reason']}")
    ages: dict[int, int] = {}
    tokens = 0
    made = steps(run["id"])
    for step in made:
        tokens += step["metrics"]["tokens"]
        for age, count in step["metrics"]["notes"]["staleness"].items():
            ages[int(age)] = ages.get(int(age), 0) + count
    beyond = sum(count for age, count in ages.items() if age > args.staleness_max)
    report = {
        "steps": len(made),
        "seconds": time.monotonic() - began,
        "turns": sum(ages.values()),
        "tokens": tokens,
        "turns_by_age": dict(sorted(ages.items())),
        "staleness_max": args.staleness_max,
        "turns_beyond": beyond,
    }
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    if beyond:
        raise SystemExit(f"{beyond} turns were older than {args.staleness_max} steps")


def post(path: str, body: dict) -> dict:
    request = urllib.request.Request(CONTROL + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
