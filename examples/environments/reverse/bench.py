"""GRPO on reversed words, beside TRL's GRPOTrainer. `make bench NAME=reverse` runs it beside a stack.

Both trainers get the same weights, prompts in the same order, number of samples, loss, learning rate
and optimizer. Every checkpoint is measured by the same program: the probability of the right answer,
mean over held-out words, which is what sampling at temperature 1 gets right on average. A mean is over
seeds, with Student's 95% interval.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
import urllib.request
from datetime import datetime

import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

import words

HERE = pathlib.Path(__file__).parent
CONTROL = "http://127.0.0.1:8032"
CONFIG = HERE.parent / "springtide.toml"
POOL = 2000
HELD_OUT = 1000
#: The loss of GRPO as it was published, in a run's words.
GRPO = {
    "advantage": "grpo",
    "loss": {"name": "ppo_clip", "low": 0.2, "high": 0.2},
    "aggregation": "seq-mean-token-mean",
}
#: Student's t at 97.5% by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--springtide", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--base", type=pathlib.Path, required=True, help="its folder `model` has the weights")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="for checkpoints")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    # Not to be changed after a reported run has been seen.
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between points of a curve")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tasks-per-step", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = right_share(args.base / "model")
    print(f"base: {base:.1%}", flush=True)
    runs = []
    for seed in args.seeds:
        for trainer, train in (("Springtide", springtide), ("TRL", with_trl)):
            runs.append({"trainer": trainer, "seed": seed, **train(args, seed)})
            last = runs[-1]
            share, seconds = last["points"][args.steps], last["seconds_per_step"]
            print(f"{trainer}, seed {seed}: {share:.1%}, {seconds:.2f} s per step", flush=True)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    options = {name: value for name, value in vars(args).items() if not isinstance(value, pathlib.Path)}
    report = {"options": options, "versions": versions, "base": base, "runs": runs, "summary": summary(runs)}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    table(report)


def springtide(args: argparse.Namespace, seed: int) -> dict:
    """A GRPO run of the stack, whose rollouts its own engine samples."""
    pool = enumerate(words.words("train", POOL, 1))
    request = {
        "kind": "grpo",
        # a run has its tasks in the order of their ids
        "tasks": [{"id": f"{number:04}", **words.task(word)} for number, word in pool],
        **GRPO,
        "grader": "exact_match",
        "group_size": args.group_size,
        "tasks_per_step": args.tasks_per_step,
        "staleness_max": 0,  # as TRL, which samples each step with the weights of the step before
        "steps": args.steps,
        "learning_rate": args.learning_rate,
        "max_tokens": words.MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
    }
    run = call("/v1/runs", request)
    while (status := call(f"/v1/runs/{run['id']}"))["status"] in ("queued", "running"):
        time.sleep(1)
    if status["status"] != "succeeded":
        sys.exit(f"seed {seed}: {status['status']}: {status['reason']}")
    steps = checkpoints(run["id"])
    rollouts = call(f"/v1/runs/{run['id']}/rollouts")["by_state"]
    made = call(f"/v1/versions?line={status['line']}&limit=200")["data"]
    serials = {version["step"]: version["serial"] for version in made}
    folders = {}
    for step in points(args):
        folders[step] = args.work / f"springtide-{seed}-{step}"
        quiet(args.springtide, "--config", CONFIG, "policy", "pull", serials[step], folders[step])
    seconds = time_of(steps[-1]["committed_at"]) - time_of(status["started_at"])
    return {
        "seconds_per_step": seconds / args.steps,
        "rollouts": rollouts,
        "rewards": [step["metrics"]["notes"]["reward_mean"] for step in steps],
        "points": {step: right_share(folder) for step, folder in folders.items()},
    }


def checkpoints(run: str) -> list[dict]:
    """The steps of a run, the first one first."""
    found: list[dict] = []
    after = ""
    while True:
        page = call(f"/v1/runs/{run}/checkpoints?limit=200{after}")
        found += page["data"]
        if not page["has_more"]:
            return sorted(found, key=lambda step: step["step"])
        after = f"&after={found[-1]['step']}"


def with_trl(args: argparse.Namespace, seed: int) -> dict:
    pool = words.words("train", POOL, 1)
    drawn = [words.task(pool[index]) for index in drawn_by_run(seed, args.steps, args.tasks_per_step)]
    out = args.work / f"trl-{seed}"
    out.mkdir()
    names = ("steps", "every", "group_size", "tasks_per_step", "learning_rate")
    options = {name: getattr(args, name) for name in names}
    options |= {"seed": seed, "tasks": drawn, "max_tokens": words.MAX_TOKENS}
    options |= {"model": str(args.base / "model"), "out": str(out)}
    (out / "options.json").write_text(json.dumps(options))
    quiet(sys.executable, HERE / "trl_grpo.py", out / "options.json")
    log = json.loads((out / "log.json").read_text())
    return {
        "seconds_per_step": log["seconds"] / args.steps,
        "rewards": log["rewards"],
        "points": {step: right_share(out / f"checkpoint-{step}") for step in points(args)},
    }


def drawn_by_run(seed: int, steps: int, tasks_per_step: int) -> list[int]:
    """Which tasks a run of this seed draws, step after step: trainer/src/grpo/draws.rs, `choose`."""
    found = []
    for draw in range(steps):
        random = SplitMix64(SplitMix64(seed).draw() ^ draw)
        indices = list(range(POOL))
        for i in range(tasks_per_step):
            j = i + random.draw() % (POOL - i)
            indices[i], indices[j] = indices[j], indices[i]
        found += indices[:tasks_per_step]
    return found


class SplitMix64:
    """Steele et al. 2014; trainer/runs/src/random.rs."""

    def __init__(self, state: int) -> None:
        self.state = state

    def draw(self) -> int:
        limit = 2**64 - 1
        self.state = self.state + 0x9E3779B97F4A7C15 & limit
        z = self.state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & limit
        z = (z ^ z >> 27) * 0x94D049BB133111EB & limit
        return z ^ z >> 31


def right_share(folder: pathlib.Path) -> float:
    """The probability of the right answer and its end, mean over held-out words."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = 0.0
    for word in words.words("held_out", HELD_OUT, 2):
        of = words.task(word)
        prompt = tokenizer.encode(of["prompt"])
        answer = [*tokenizer.encode(of["answer"]), tokenizer.eos_token_id]
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        total += logits.log_softmax(-1).gather(1, torch.tensor([answer]).T).sum().exp().item()
    return total / HELD_OUT


def points(args: argparse.Namespace) -> list[int]:
    return sorted({*range(args.every, args.steps + 1, args.every), args.steps})


def call(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(CONTROL + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def quiet(*command: object) -> None:
    """Runs a program; its output is shown only if it fails."""
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{command[:3]} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")


def time_of(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def summary(runs: list[dict]) -> dict:
    found = {}
    for trainer in ("Springtide", "TRL"):
        of = [run for run in runs if run["trainer"] == trainer]
        steps = of[0]["points"]
        found[trainer] = {
            "points": {step: with_interval([run["points"][step] for run in of]) for step in steps},
            "seconds_per_step": with_interval([run["seconds_per_step"] for run in of]),
        }
    return found


def with_interval(values: list[float]) -> dict:
    spread = statistics.stdev(values) if len(values) > 1 else None
    half = STUDENT[len(values) - 1] * spread / len(values) ** 0.5 if spread is not None else None
    return {"mean": statistics.mean(values), "std": spread, "half": half}


def table(report: dict) -> None:
    of = report["summary"]
    print("\n| step | Springtide | TRL |\n|---|---|---|")
    print(f"| 0 | {100 * report['base']:.1f}% | {100 * report['base']:.1f}% |")
    for step in of["TRL"]["points"]:
        print(f"| {step} | {' | '.join(cell(of[trainer]['points'][step], 100, '%', 1) for trainer in of)} |")
    print(f"| seconds per step | {' | '.join(cell(of[trainer]['seconds_per_step'], 1, '', 2) for trainer in of)} |")


def cell(value: dict, scale: float, unit: str, digits: int) -> str:
    half = "" if value["half"] is None else f" ± {scale * value['half']:.{digits}f}"
    return f"{scale * value['mean']:.{digits}f}{half}{unit}"


if __name__ == "__main__":
    main()
