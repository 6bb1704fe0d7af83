"""Whether runs improve the agent model: base, supervised bound, and the curves of Springtide's GRPO and
of TRL's on held-out tasks. `make bench NAME=environments` runs it beside a stack.

Both trainers get the same base, tasks, number of rollouts, learning rate and temperature. Every
checkpoint is measured by the same program, without a server. A point of a curve is the mean over
seeds with Student's 95% interval; that of one seed has none.

Of `recall`, Springtide's GRPO is compared with itself: summaries trained, masked, and none. Its point
at step 0 is the base with or without summaries.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from functools import partial

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from springtide import SUMMARIES, Summaries

from environments import ALL, USUAL, Environment, named
from measure import measure_folder, show

CONTROL = "http://127.0.0.1:8032"
CONFIG = HERE / "springtide.toml"
#: Folders of checkpoints by step, of a name and a seed.
Train = Callable[[argparse.Namespace, str, int], dict[int, pathlib.Path]]
#: Student's t at 97.5% by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=USUAL, metavar="NAME")
    parser.add_argument("--springtide", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--base", type=pathlib.Path, required=True, help="folder of `make model NAME=agent`")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="for checkpoints")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between points of a curve")
    parser.add_argument("--tasks-per-step", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--held-out", type=int, default=200, help="tasks")
    parser.add_argument("--bound-steps", type=int, default=60, help="optimizer steps of the supervised bound")
    args = parser.parse_args()
    results = []
    for name in args.names:
        result = {"environment": name, "base": measured(args, ALL[name], args.base / "model", "base")}
        result["bound"] = measured(args, ALL[name], bound(args, name), "supervised bound")
        result["curves"] = {}
        for label, (environment, train) in compared(name).items():
            curves = []
            for seed in range(1, args.seeds + 1):
                started = time.monotonic()
                folders = train(args, name, seed)
                seconds = time.monotonic() - started
                points = {
                    step: measured(args, environment, folder, f"{label} {seed}, step {step}")
                    for step, folder in folders.items()
                }
                curves.append({"seed": seed, "seconds": seconds, "points": points})
            base = result["base"]
            if environment is not ALL[name]:
                base = measured(args, environment, args.base / "model", f"{label}, base")
            result["curves"][label] = {"base": base, "seeds": curves, "mean": means(curves)}
        results.append(result)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"options": options(args), "environments": results}, indent=2) + "\n")
    table(results)


def compared(name: str) -> dict[str, tuple[Environment, Train]]:
    """The curves of an environment by label: how they are measured, and who trains."""
    if name != "recall":
        return {"Springtide": (ALL[name], springtide), "TRL": (ALL[name], trl)}
    # masked summaries are measured as trained ones: they differ in training alone
    environments = {summaries: ALL[name] if summaries != "none" else named(name, summaries) for summaries in SUMMARIES}
    return {
        f"summaries {summaries}": (environment, partial(springtide, summaries=summaries))
        for summaries, environment in environments.items()
    }


def measured(args: argparse.Namespace, environment: Environment, folder: pathlib.Path, label: str) -> dict:
    each = measure_folder(environment, folder, args.held_out)
    show(label, each)
    return each


def bound(args: argparse.Namespace, name: str) -> pathlib.Path:
    """The base, trained on right solutions of the training tasks."""
    data, out = args.work / f"{name}-bound-data", args.work / f"{name}-bound"
    quiet(sys.executable, HERE / "base/build.py", "bound", data, name, "--tokenizer", args.base / "model")
    rates = ["--matrix-rate", "0.005", "--vector-rate", "0.0005"]
    steps = ["--steps", args.bound_steps, "--batch", 8]
    command = [args.springtide, "--config", CONFIG, "train", "sft", "--from", args.base / "model"]
    quiet(*command, "--data", data, "--out", out, *steps, *rates)
    return out


def springtide(
    args: argparse.Namespace, name: str, seed: int, summaries: Summaries = "trained"
) -> dict[int, pathlib.Path]:
    """Folders of the run's versions, by step."""
    log = args.work / f"{name}-{summaries}-{seed}.json"
    size = ["--steps", args.steps, "--tasks-per-step", args.tasks_per_step]
    # without summaries all rollouts may be equally bad: then the base stays as it is
    how = ["--summaries", summaries, "--learning-rate", args.learning_rate, "--may-end-early"]
    quiet(sys.executable, HERE / "harness.py", name, "--seed", seed, *size, *how, "--json", log)
    run = json.loads(log.read_text())
    if run["status"] != "succeeded":
        print(f"seed {seed}: {run['status']} after {run['steps_done']} of {args.steps} steps: {run['reason']}", flush=True)
    serials = {version["step"]: version["serial"] for version in versions(run["line"])}
    folders = {}
    for point in points(args):
        # a run that ends early keeps its last version
        step = max((step for step in serials if step <= point), default=None)
        if step is None:
            folders[point] = args.base / "model"
            continue
        folders[point] = args.work / f"{name}-{summaries}-{seed}-step-{step}"
        if not folders[point].exists():
            quiet(args.springtide, "--config", CONFIG, "policy", "pull", serials[step], folders[point])
    return folders


def versions(line: str) -> list[dict]:
    with urllib.request.urlopen(f"{CONTROL}/v1/versions?line={line}&limit=200", timeout=60) as answer:
        return json.load(answer)["data"]


def trl(args: argparse.Namespace, name: str, seed: int) -> dict[int, pathlib.Path]:
    """Folders of TRL's checkpoints, by step."""
    out = args.work / f"{name}-{seed}-trl"
    size = ["--steps", args.steps, "--every", args.every, "--tasks-per-step", args.tasks_per_step]
    how = ["--learning-rate", args.learning_rate, "--seed", seed]
    quiet(sys.executable, HERE / "trl_grpo.py", name, "--model", args.base / "model", "--out", out, *how, *size)
    return {step: out / f"checkpoint-{step}" for step in points(args)}


def points(args: argparse.Namespace) -> list[int]:
    return sorted({*range(args.every, args.steps + 1, args.every), args.steps})


def means(curves: list[dict]) -> dict[int, dict]:
    """Mean over seeds and half its 95% interval, by step."""
    found = {}
    for step in curves[0]["points"]:
        values = [curve["points"][step]["success"] for curve in curves]
        half = STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        found[step] = {"success": statistics.mean(values), "half": half}
    return found


def quiet(*command: object) -> None:
    """Runs a program; its output is shown only if it fails."""
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{command[:3]} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")


def options(args: argparse.Namespace) -> dict:
    return {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(args).items()}


def table(results: list[dict]) -> None:
    for result in results:
        base, most, curves = result["base"], result["bound"], result["curves"]
        print(f"\n{result['environment']}: base {base['success']:.1%}, supervised bound {most['success']:.1%}")
        print(row("step", curves), row("---", ["---"] * len(curves)), sep="\n")
        print(row(0, [f"{100 * curve['base']['success']:.1f} %" for curve in curves.values()]))
        for step in next(iter(curves.values()))["mean"]:
            print(row(step, [cell(curve["mean"][step]) for curve in curves.values()]))


def row(first: object, rest: Iterable[str]) -> str:
    return f"| {' | '.join([str(first), *rest])} |"


def cell(point: dict) -> str:
    half = "" if point["half"] is None else f" ± {100 * point['half']:.1f}"
    return f"{100 * point['success']:.1f}{half} %"


if __name__ == "__main__":
    main()
