#!/usr/bin/env python3
"""The runs of `make bench NAME=learn` as two tables, and their figures as JSON for the chart.

usage: learning_table.py FOLDER learning.json 'KIND…' SEED…
FOLDER has the reports, house-11.json and so on. It fails if one of these kinds and seeds is missing.
"""

import json
import sys
from pathlib import Path

BEST = "base, greedy, best threshold"


def signed(value, digits):
    return f"{value:+.{digits}f}".replace("-", "−")


def interval(of, digits=3):
    low, high = of["ci95"]
    return f"{signed(of['mean'], digits)} ({signed(low, digits)} … {signed(high, digits)})"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")


def outcome(users, seed, report):
    references = report["headroom"]
    best = next(one for one in references["shadows"] if one["name"] == BEST)
    capability = references["capability"] or sys.exit(f"{users}, seed {seed}: the report has no capability")
    return [
        users,
        str(seed),
        interval(best["together"]["reward"]),
        f"{capability['version_right_per_100']['mean']:.1f}, {capability['base_right_per_100']['mean']:.1f}",
        interval(capability["right_per_100"], 1),
        interval(capability["reward_minus_best"]),
        interval(report["following_difference"]),
        interval(report["difference"]),
        interval(report["following_difference_accepts_per_100"], 1),
    ]


def loop(users, seed, report):
    ledger, waits = report["ledger"], report["feedback_to_serving_seconds"]
    answered = ledger["generations"] - ledger["held_out"] - ledger["censored"]
    entropy = [step["entropy"] for step in report["steps_taken"] if step["entropy"] is not None]
    if not entropy:
        sys.exit(f"{users}, seed {seed}: the run made no step")
    tenth = max(len(entropy) // 10, 1)
    first, last = (sum(part) / len(part) for part in (entropy[:tenth], entropy[-tenth:]))
    shown = (f"{100 * report['arms'][arm]['show_rate']:.0f}%" for arm in ("learner", "champion", "base"))
    phases = report["feedback_to_serving_phases"]
    return [
        users,
        str(seed),
        f"{report['steps']}, {60 * report['steps'] / report['seconds']:.1f}",
        f"{ledger['trained']:,} of {answered:,} ({100 * ledger['trained'] / answered:.0f}%)",
        ", ".join(shown),
        f"{first:.2f}, {last:.2f}",
        f"{waits['p50']:.1f} s, {waits['p95']:.1f} s",
        ", ".join(f"{phase['p50']:.2f}" for phase in phases),
        f"{report['completion_latency_ms']['p50']:.0f} ms, {report['completion_latency_ms']['p95']:.0f} ms",
        "yes" if ledger["balanced"] and report["roots_agree"] else "**no**",
        str(report["counts"]["shed"] + report["counts"]["failed"]),
    ]


def figures(users, seed, report):
    references = report["headroom"]
    best = next(one for one in references["shadows"] if one["name"] == BEST)

    def three(of):
        return [round(value, 4) for value in (of["mean"], *of["ci95"])]

    return {
        "users": users,
        "seed": seed,
        "all_minus_greedy_thresholded": three(best["together"]["reward"]),
        "right_per_100_minus_base": three(references["capability"]["right_per_100"]),
        "champion_minus_base": three(report["following_difference"]),
    }


def main(folder, target, kinds, *seeds):
    kinds = sorted(kinds.split())
    runs = [(users, int(seed), Path(folder) / f"{users}-{seed}.json") for users in kinds for seed in seeds]
    missing = [path.name for _, _, path in runs if not path.exists()]
    if missing:
        sys.exit(f"{folder} lacks {', '.join(missing)}: run `make bench NAME=learn` again")
    runs = [(users, seed, json.loads(path.read_text(encoding="utf-8"))) for users, seed, path in runs]
    table(
        [
            "users",
            "seed",
            "last third: all users outside base, minus the base greedy with its best threshold",
            "greedy text right, of 100 pauses of other users: last version, base",
            "difference",
            "last version as champion is served, minus the base's best; other users",
            "champion − base, reward",
            "learner − base, reward",
            "champion − base, accepts per 100",
        ],
        [outcome(*run) for run in runs],
    )
    phases = ", ".join(phase["name"] for phase in runs[0][2]["feedback_to_serving_phases"])
    table(
        [
            "users",
            "seed",
            "steps, per minute",
            "trained, of what was sampled for learner and champion and not censored",
            "shown: learner, champion, base",
            "entropy, nats a token: first and last tenth of the steps",
            "feedback to serving p50, p95",
            f"medians of its phases, s: {phases}",
            "one completion p50, p95",
            "ledger balanced, content hashes agree",
            "pauses without an answer",
        ],
        [loop(*run) for run in runs],
    )
    about = {
        "source": f"docs/measurements/learning.md, {len(runs)} runs of {runs[0][2]['parameters']['minutes']:g} minutes, `make bench NAME=learn`",
        "unit": "reward per pause, or pauses of 100; value, low and high end of the 95% interval clustered by user",
    }
    members = [f" {json.dumps(name)}: {json.dumps(text)}" for name, text in about.items()]
    lines = ",\n".join(f"  {json.dumps(figures(*run))}" for run in runs)
    members.append(f' "runs": [\n{lines}\n ]')
    Path(target).write_text("{\n" + ",\n".join(members) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
