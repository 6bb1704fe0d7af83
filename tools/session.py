#!/usr/bin/env python3
"""Puts the reports of session demos into one file, and prints a table.

Usage: session.py OUT VARIANT=REPORT…
"""
import json
import sys


def cell(interval):
    if not interval:
        return "–"
    low, high = interval["ci95"]
    return f"{interval['mean']:+.3f} ({low:+.3f} … {high:+.3f})"


def pooled(intervals):
    """The mean over seeds, with an interval from theirs; seeds are independent draws."""
    if not all(intervals):
        return None
    count = len(intervals)
    mean = sum(interval["mean"] for interval in intervals) / count
    half = sum(((interval["ci95"][1] - interval["ci95"][0]) / 2) ** 2 for interval in intervals) ** 0.5 / count
    return {"mean": mean, "ci95": (mean - half, mean + half)}


def main(out, *named):
    runs = []
    for name in named:
        variant, path = name.split("=", 1)
        with open(path, encoding="utf-8") as file:
            runs.append({"variant": variant, **json.load(file)})
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"runs": runs}, file, indent=1, ensure_ascii=False)
    print("| variant | seed | start | learner, champion, base | learner − base | champion − base |"
          " 2nd half: learner − base | 2nd half: champion − base | turns per success: learner, base | steps |")
    print("|" + "---|" * 10)
    runs.sort(key=lambda run: (run["variant"], run["parameters"]["seed"]))
    for run in runs:
        arms, second = run["whole"]["arms"], run["halves"][1]
        share = [f"{100 * (arms[arm]['success'] or 0):.1f}" for arm in ("learner", "champion", "base")]
        turns = [f"{arms[arm]['turns_per_success'] or 0:.2f}" for arm in ("learner", "base")]
        cells = [run["variant"], run["parameters"]["seed"], f"{100 * run['start']['success']['mean']:.1f}%",
                 ", ".join(share) + "%", cell(run["whole"]["learner"]["success"]),
                 cell(run["whole"]["champion"]["success"]), cell(second["learner"]["success"]),
                 cell(second["champion"]["success"]), ", ".join(turns), run["steps"]]
        print("| " + " | ".join(map(str, cells)) + " |")
    for variant in sorted({run["variant"] for run in runs}):
        same = [run for run in runs if run["variant"] == variant]
        if len(same) > 1:
            differences = [cell(pooled([part(run)[arm]["success"] for run in same]))
                           for part in (lambda run: run["whole"], lambda run: run["halves"][1])
                           for arm in ("learner", "champion")]
            print("| " + " | ".join([variant, "all", "", "", *differences, "", ""]) + " |")


main(*sys.argv[1:])
