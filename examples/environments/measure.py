"""How often a model does the held-out tasks, with a 95% interval: Wilson's, one attempt per task.

    measure.py --base-url http://127.0.0.1:8030/v1 --model agent [NAME…]      what a server answers
    measure.py --folder DIR [NAME…]                                           a Hugging Face folder
"""

import argparse
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from openai import OpenAI
from springtide import SUMMARIES

from environments import ALL, USUAL, Environment, named


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    share, square = successes / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return middle - half, middle + half


def measure(environment: Environment, client: OpenAI, model: str, count: int, workers: int) -> dict:
    """One attempt at each of `count` held-out tasks. A success is a score of 1."""

    def attempt(task: dict) -> bool:
        return environment.score(task["answer"], environment.attempt(client, model, task)) >= 1.0

    with ThreadPoolExecutor(workers) as pool:
        successes = sum(pool.map(attempt, environment.tasks("held_out", count)))
    return result(environment.name, successes, count)


def measure_folder(environment: Environment, folder: pathlib.Path, count: int, seed: int = 1) -> dict:
    """The same without a server."""
    from local_model import LocalModel

    model = LocalModel(folder, seed)
    return measure(environment, model, "", count, workers=1)  # type: ignore[arg-type]


def result(name: str, successes: int, count: int) -> dict:
    low, high = wilson(successes, count)
    return {"environment": name, "tasks": count, "success": successes / count, "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=USUAL, metavar="NAME", help=", ".join(ALL))
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url")
    where.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--model", default="agent")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--label", default="success")
    parser.add_argument("--summaries", choices=SUMMARIES, default="trained", help="of recall")
    args = parser.parse_args()
    for name in args.names:
        environment = named(name, args.summaries)
        if args.folder:
            each = measure_folder(environment, args.folder, args.tasks)
        else:
            client = OpenAI(base_url=args.base_url, api_key="unused", max_retries=5)
            each = measure(environment, client, args.model, args.tasks, args.workers)
        show(args.label, each)


def show(label: str, each: dict) -> None:
    print(
        f"{each['environment']:<10} {label:<24} {each['success']:6.1%} of {each['tasks']} held-out tasks "
        f"[{each['low']:.1%}, {each['high']:.1%}]",
        flush=True,
    )


if __name__ == "__main__":
    main()
