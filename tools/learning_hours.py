#!/usr/bin/env python3
"""Long runs of the demo as tables: by period, along the run, and the second half minus the first.

usage: learning_hours.py learning-hours.json REPORT…
The JSON gets the figures of the tables.
"""

import json
import math
import sys
from pathlib import Path

from learning_table import BEST, interval, signed, table

# Student's t, two-sided 95%, 18 degrees of freedom: two halves of ten periods.
T95 = 2.101
ARMS = ("learner", "champion", "base")


def number(value, digits):
    return "–" if value is None else signed(value, digits)


def steps_within(report, start, end):
    return [step for step in report["steps_taken"] if start <= step["at_seconds"] < end]


def entropy_of(steps):
    found = [step["entropy"] for step in steps if step["entropy"] is not None]
    return sum(found) / len(found) if found else None


def periods(report):
    """One row for each of the report's twenty periods."""
    trained = 0
    for period in report["timeline"]:
        steps = steps_within(report, period["from_seconds"], period["until_seconds"])
        trained += sum(step["trajectories"] or 0 for step in steps)
        yield {
            "minutes": [round(period[end] / 60, 1) for end in ("from_seconds", "until_seconds")],
            "reward": [period["arms"][arm]["reward_mean"] for arm in ARMS],
            "reward_outside_base": outside_base(period),
            "accepts_per_100": [period["arms"][arm]["accepts_per_100"] for arm in ARMS],
            "shown": [period["arms"][arm]["show_rate"] for arm in ARMS],
            "entropy": entropy_of(steps),
            "steps": len(steps),
            "trained": trained,
        }


def outside_base(period):
    """Mean reward of learner's and champion's answered pauses together."""
    arms = [period["arms"][arm] for arm in ("learner", "champion")]
    answered = sum(arm["n"] for arm in arms)
    return sum(arm["n"] * (arm["reward_mean"] or 0) for arm in arms) / answered if answered else None


def versions(report):
    """Capability along the run. Trajectories are those that the version was trained on."""
    references = report["headroom"]
    last = [references["capability"]] if references["capability"] else []
    for capability in [*references["earlier"], *last]:
        steps = [step for step in report["steps_taken"] if step["version"] <= capability["version"]]
        yield {
            "minute": round(capability["at_seconds"] / 60, 1),
            "version": capability["version"],
            "trained": sum(step["trajectories"] or 0 for step in steps),
            "entropy": steps[-1]["entropy"] if steps else None,
            "right_per_100": capability["version_right_per_100"],
            "right_minus_base": capability["right_per_100"],
            "reward_greedy_minus_base": capability["reward_greedy"],
            "reward_minus_best": capability["reward_minus_best"],
        }


def halves(values):
    """Second half minus first, with an interval over the periods as independent batches."""
    middle = len(values) // 2
    parts = [values[:middle], values[middle:]]
    means = [sum(part) / len(part) for part in parts]
    error = math.sqrt(
        sum(
            sum((value - mean) ** 2 for value in part) / (len(part) - 1) / len(part)
            for part, mean in zip(parts, means)
        )
    )
    difference = means[1] - means[0]
    return {
        "first": means[0],
        "second": means[1],
        "mean": difference,
        "ci95": [difference - T95 * error, difference + T95 * error],
    }


def summary(report):
    rows = list(periods(report))
    if len(rows) != 20:
        sys.exit(f"the report has {len(rows)} periods; the interval is for 20")
    found = list(versions(report))
    middle = report["seconds"] / 60 / 2
    capability = [
        [one["right_minus_base"]["mean"] for one in found if (one["minute"] >= middle) == later]
        for later in (False, True)
    ]
    base = ARMS.index("base")
    minus_base = [row["reward_outside_base"] - row["reward"][base] for row in rows]
    return {
        "users": report["parameters"]["users"],
        "corpus_files": report["parameters"]["files"],
        "seed": report["parameters"]["seed"],
        "periods": rows,
        "versions": found,
        "reward_outside_base": halves([row["reward_outside_base"] for row in rows]),
        "reward_outside_base_minus_base": halves(minus_base),
        "right_minus_base_by_half": [sum(half) / len(half) if half else None for half in capability],
        "minus_base_best_last_third": next(
            one["together"]["reward"] for one in report["headroom"]["shadows"] if one["name"] == BEST
        ),
        "trained": report["ledger"]["trained"],
        "shed": report["counts"]["shed"],
        "failed": report["counts"]["failed"],
        "balanced": report["ledger"]["balanced"] and report["roots_agree"],
        "alarms": len(report["alarms"]),
        "feedback_to_serving_seconds": report["feedback_to_serving_seconds"],
    }


def show(run):
    arms = ", ".join(ARMS)
    table(
        [
            "minutes",
            f"reward: {arms}",
            "accepts per 100",
            "shown",
            "entropy, nats a token",
            "steps",
            "trained on until then",
        ],
        [
            [
                "–".join(f"{end:g}" for end in row["minutes"]),
                ", ".join(number(value, 3) for value in row["reward"]),
                ", ".join("–" if value is None else f"{value:.1f}" for value in row["accepts_per_100"]),
                ", ".join("–" if value is None else f"{100 * value:.0f}%" for value in row["shown"]),
                "–" if row["entropy"] is None else f"{row['entropy']:.2f}",
                str(row["steps"]),
                f"{row['trained']:,}",
            ]
            for row in run["periods"]
        ],
    )
    table(
        [
            "minute",
            "version",
            "trained on",
            "entropy, nats a token",
            "greedy text right, of 100 pauses of other users",
            "minus base",
            "reward greedy, minus base greedy",
            "as champion is served, minus the base's best",
        ],
        [
            [
                f"{one['minute']:g}",
                str(one["version"]),
                f"{one['trained']:,}",
                "–" if one["entropy"] is None else f"{one['entropy']:.2f}",
                f"{one['right_per_100']['mean']:.1f}",
                interval(one["right_minus_base"], 1),
                interval(one["reward_greedy_minus_base"]),
                interval(one["reward_minus_best"]),
            ]
            for one in run["versions"]
        ],
    )
    for name, label in (
        ("reward_outside_base", "reward outside base"),
        ("reward_outside_base_minus_base", "reward outside base − base"),
    ):
        half = run[name]
        print(f"{label}, halves: {half['first']:.4f}, {half['second']:.4f}; difference {interval(half)}")
    print(f"right minus base, mean of the versions of each half: {run['right_minus_base_by_half']}")
    rest = ("minus_base_best_last_third", "trained", "shed", "failed", "balanced", "alarms", "feedback_to_serving_seconds")
    print(json.dumps({name: run[name] for name in rest}), "\n")


def main(target, *reports):
    runs = [summary(json.loads(Path(report).read_text(encoding="utf-8"))) for report in reports]
    for run in runs:
        print(f"{run['users']}, seed {run['seed']}, {run['corpus_files']} files\n")
        show(run)
    Path(target).write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
