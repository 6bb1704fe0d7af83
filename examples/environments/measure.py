"""How often a model does the held-out tasks, with a 95% interval: Wilson's, one attempt per task.

    measure.py --base-url http://127.0.0.1:8000/v1 --model demo [--json FILE] [NAME…]
"""

import argparse
import json
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from openai import OpenAI

from environments import ALL, Environment


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    share, square = successes / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return middle - half, middle + half


def measure(environment: Environment, client: OpenAI, model: str, count: int, workers: int) -> dict:
    def attempt(task: dict) -> bool:
        return environment.score(task["answer"], environment.attempt(client, model, task)) >= 1.0

    with ThreadPoolExecutor(workers) as pool:
        successes = sum(pool.map(attempt, environment.tasks("held_out", count)))
    low, high = wilson(successes, count)
    return {"environment": environment.name, "tasks": count, "success": successes / count, "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(ALL), metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--label", default="success")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key="unused", max_retries=5)
    found = []
    for name in args.names:
        each = measure(ALL[name], client, args.model, args.tasks, args.workers)
        print(
            f"{name:<10} {args.label}: {each['success']:6.1%} of {each['tasks']} held-out tasks "
            f"[{each['low']:.1%}, {each['high']:.1%}]",
            flush=True,
        )
        found.append(each)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
