"""What logged answers say about a version before users get it, beside what those users give then.
`make bench NAME=offpolicy` runs it beside a stack, once per seed.

The demo's policy learns. Every `--every` seconds learner's version becomes a canary and gets all of champion's users for
`--measured` seconds: their mean reward is the truth. What the users of `learner` did in the `--logged` seconds before the
canary was proposed is a dataset, on which an evaluation estimates the version's reward (docs/guide-research.md). All
evaluations run after the demo.

Every canary that was measured is in the report, and every estimate that was refused. Runs are added to those that the
report has.
"""

import argparse
import json
import math
import pathlib
import signal
import sys
import time
from datetime import datetime, timedelta

from bench_release import Stack, arguments, cell, machine, signed

#: Of a normal distribution, 95%.
Z = 1.959964
RUN_ENDED = ("succeeded", "failed", "cancelled")
POLL_SECONDS = 0.5
#: Ways to guess the version's reward, with their interval: the first is the mean of what was logged.
WAYS = ("logged", "self_normalized", "doubly_robust")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--every", type=float, default=75.0, help="seconds between two canaries")
    parser.add_argument("--measured", type=int, default=60, help="seconds of a canary")
    parser.add_argument("--logged", type=float, default=60.0, help="seconds before a canary whose answers are read")
    args = parser.parse_args()
    # so that the developers are stopped too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stack = Stack(args)
    canaries = let_learn(stack, args)
    versions = [compare(stack, args, number, canary) for number, canary in enumerate(canaries)]
    earlier = json.loads(args.json.read_text())["runs"] if args.json.exists() else []
    runs = [*earlier, {"options": options(args), "versions": versions}]
    report = {"machine": machine(), "summary": summary(runs), "runs": runs}
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(line(version) for version in versions))
    print(table(report["summary"]))


def options(args: argparse.Namespace) -> dict:
    return {name: getattr(args, name) for name in ("seed", "minutes", "every", "measured", "logged", "rate", "developers")}


def let_learn(stack: Stack, args: argparse.Namespace) -> list[dict]:
    """The canaries of one demo, as they ended."""
    steps = {"steps": [{"setWeight": 100}, {"pause": {"duration": f"{args.measured}s"}}], "prepare": "30s"}
    made = []
    developers = stack.developers(args, args.minutes)
    try:
        begun = time.monotonic()
        # the last one needs its time
        while (left := args.minutes * 60 - (time.monotonic() - begun)) > args.measured + 15:
            time.sleep(args.every if left > args.every else left)
            aliases = {alias["alias"]: alias["version"] for alias in stack.get("/v1/aliases")["aliases"]}
            if aliases["learner"] == aliases["champion"] or left < args.every + args.measured:
                continue
            made.append(stack.propose(aliases["learner"], steps, "measured"))
        developers.wait()
    finally:
        developers.terminate()
        developers.wait()
    # the last rewards
    time.sleep(10)
    return [stack.get(f"/v1/canaries/{canary}") for canary in made]


def compare(stack: Stack, args: argparse.Namespace, number: int, canary: dict) -> dict:
    """What users gave, and what was estimated."""
    (truth,) = stack.query(GIVEN, {"version": canary["version"], "from": canary["created_at"]})
    created = datetime.fromisoformat(canary["created_at"])
    window = {"sampled_from": (created - timedelta(seconds=args.logged)).isoformat(), "sampled_until": created.isoformat()}
    query = {"arms": ["learner"], "purposes": ["production"], "version_max": canary["version"] - 1, **window}
    dataset = stack.post("/v1/datasets", {"name": f"before-{number}", "query": query})
    body = {"kind": "evaluate", "dataset": f"{dataset['name']}@{dataset['version']}", "base_version": canary["version"]}
    run = stack.post("/v1/runs", body)
    while (run := stack.get(f"/v1/runs/{run['id']}"))["status"] not in RUN_ENDED:
        time.sleep(POLL_SECONDS)
    if run["status"] != "succeeded":
        raise SystemExit(f"the evaluation of version {canary['version']} {run['status']}: {run.get('reason')}")
    result = run["result"]
    (logged,) = stack.query(LOGGED, {"version": canary["version"], "from": window["sampled_from"], "until": window["sampled_until"]})
    estimate = result.get("estimate") or {}
    robust = estimate.get("doubly_robust") or {}
    return {
        "version": canary["version"],
        "state": canary["state"],
        "given": truth,
        "trajectories": result["trajectories"],
        "effective": estimate.get("effective", result["effective_sample_size"]),
        "refused": result.get("estimate_refused"),
        "logged": logged,
        "self_normalized": guess(estimate),
        "doubly_robust": guess(robust),
    }


def guess(estimate: dict) -> dict | None:
    if not estimate:
        return None
    low, high = estimate["interval"]
    return {"reward": estimate["reward"], "error": (high - low) / (2 * Z)}


#: Mean reward and its standard error, by user: a ratio's linearized variance.
MEAN = """
    with answer as (
        select g.user_key, t.reward
        from generation g join trajectory t on t.generation_id = g.id
        where {where} and t.reward is not null and g.purpose = 'production'
    ), mean as (select avg(reward) as reward, count(*) as answers, count(distinct user_key) as users from answer
    ), residual as (
        select sum(answer.reward - mean.reward) as r from answer, mean group by user_key
    )
    select mean.reward::float as reward, mean.answers, mean.users,
           (sqrt(sum(r * r) * mean.users / greatest(mean.users - 1, 1)) / mean.answers)::float as error
    from mean, residual group by mean.reward, mean.answers, mean.users"""
GIVEN = MEAN.format(where="g.arm = 'canary' and g.version = :'version' and g.sampled_at >= :'from'")
LOGGED = MEAN.format(
    where="g.arm = 'learner' and g.version < :'version' and g.sampled_at >= :'from' and g.sampled_at < :'until'"
)


def summary(runs: list[dict]) -> dict:
    versions = [version for run in runs for version in run["versions"]]
    return {
        "runs": len(runs),
        "versions": len(versions),
        "refused": sum(version["refused"] is not None for version in versions),
        "effective_share": [version["effective"] / version["trajectories"] for version in versions],
        **{way: errors([version for version in versions if version[way]], way) for way in WAYS},
    }


def errors(versions: list[dict], way: str) -> dict | None:
    """Of guesses, against what users gave. Both have an error."""
    if not versions:
        return None
    differences = [version[way]["reward"] - version["given"]["reward"] for version in versions]
    expected = [math.hypot(version[way]["error"], version["given"]["error"]) for version in versions]
    return {
        "versions": len(versions),
        "bias": sum(differences) / len(versions),
        "root_mean_square": rms(differences),
        # what the two standard errors alone would give
        "expected_root_mean_square": rms(expected),
        "covered": sum(abs(difference) <= Z * error for difference, error in zip(differences, expected)),
    }


def rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def line(version: dict) -> str:
    guesses = ", ".join(f"{way} {signed(version[way]['reward'])}" for way in WAYS if version[way])
    given = version["given"]
    return (
        f"version {version['version']} ({version['state']}): given {signed(given['reward'])} ± {given['error']:.3f} by {given['answers']} "
        f"answers; {guesses}; {version['effective']:.0f} of {version['trajectories']} effective; {version['refused'] or ''}"
    )


def table(found: dict) -> str:
    rows = [
        f"{found['runs']} runs, {found['versions']} versions, {found['refused']} estimates refused",
        "| guess | versions | bias | root mean square of the error | of the two standard errors | covered |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        if not (of := found[way]):
            continue
        cells = [signed(of["bias"]), cell(of["root_mean_square"], 3), cell(of["expected_root_mean_square"], 3)]
        rows.append(f"| {way} | {of['versions']} | {' | '.join(cells)} | {of['covered']} of {of['versions']} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
