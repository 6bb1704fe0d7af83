#!/usr/bin/env python3
"""Charts docs/measurements/learning-hours.json: what versions can do and what users earn, against what was trained on.

usage: chart_learning_hours.py learning-hours.json learning-hours.svg TITLE…
One title for each run.
"""

import json
import sys

from chart_learning import line, text

WIDTH, LEFT, PANEL, HEIGHT, GAP, TOP = 1040, 70, 430, 170, 80, 84
RIGHT_COLOR, REWARD_COLOR, BASE_COLOR = "#4e79a7", "#0b6e4f", "#888"


class Panel:
    """Draws values against trajectories."""

    def __init__(self, left, top, trained_max, ends, ticks, digits):
        self.left, self.top, self.trained_max, self.ends = left, top, trained_max, ends
        self.out = [line(left, top + HEIGHT, left + PANEL, top + HEIGHT, "#888")]
        for tick in ticks:
            self.out.append(line(left, self.y(tick), left + PANEL, self.y(tick), "#e4e4e4"))
            self.out.append(text(left - 8, self.y(tick) + 4, f"{tick:.{digits}f}".replace("-", "−"), 10, "end", "#666"))
        for thousands in range(0, int(trained_max / 1000) + 1, 20 if trained_max > 50000 else 10):
            words = f"{thousands},000" if thousands else "0"
            self.out.append(text(self.x(1000 * thousands), top + HEIGHT + 16, words, 10, "middle", "#666"))

    def x(self, trained):
        return self.left + trained / self.trained_max * PANEL

    def y(self, value):
        low, high = self.ends
        return self.top + HEIGHT - (value - low) / (high - low) * HEIGHT

    def curve(self, points, color):
        path = " ".join(f"{self.x(trained):.1f},{self.y(value):.1f}" for trained, value in points)
        self.out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')

    def whisker(self, trained, low, high, color):
        self.out.append(line(self.x(trained), self.y(low), self.x(trained), self.y(high), color, 1.4))


def capability(run, left, top):
    versions = run["versions"]
    base = versions[0]["right_per_100"]["mean"] - versions[0]["right_minus_base"]["mean"]
    ends = (base - 2, base + 9.4)
    ticks = [tick for tick in range(0, 100, 2) if ends[0] < tick < ends[1]]
    panel = Panel(left, top, versions[-1]["trained"], ends, ticks, 0)
    panel.curve([(0, base), (versions[-1]["trained"], base)], BASE_COLOR)
    panel.curve([(0, base), *((one["trained"], one["right_per_100"]["mean"]) for one in versions)], RIGHT_COLOR)
    for one in versions:
        low, high = one["right_minus_base"]["ci95"]
        panel.whisker(one["trained"], base + low, base + high, RIGHT_COLOR)
    return [text(left, top - 12, "Greedy text right, of 100 pauses of other users", 12, color=RIGHT_COLOR), *panel.out]


def reward(run, left, top):
    periods = run["periods"]
    lowest = min(row["reward"][2] for row in periods)
    highest = max(row["reward_outside_base"] for row in periods)
    ticks = [tick / 20 for tick in range(-3, 5) if lowest - 0.03 < tick / 20 < highest + 0.03]
    panel = Panel(left, top, periods[-1]["trained"], (lowest - 0.02, highest + 0.02), ticks, 2)
    panel.curve([(row["trained"], row["reward"][2]) for row in periods], BASE_COLOR)
    panel.curve([(row["trained"], row["reward_outside_base"]) for row in periods], REWARD_COLOR)
    return [text(left, top - 12, "Reward per pause of all users outside base, by six minutes", 12, color=REWARD_COLOR), *panel.out]


def main(source, target, *titles):
    runs = json.load(open(source, encoding="utf-8"))
    bottom = TOP + 2 * HEIGHT + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 64}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{bottom + 64}" fill="white"/>',
        text(16, 26, "Two hours of accepts and rejects, against trajectories trained on", 16, weight="bold"),
        text(16, bottom + 54, "Gray: base. Bars: 95% intervals of the difference, clustered by user. Source: docs/measurements/learning-hours.json", 11, color="#666"),
    ]
    if len(titles) != len(runs):
        sys.exit(f"{source} has {len(runs)} runs: give as many titles")
    for place, (title, run) in enumerate(zip(titles, runs)):
        left = LEFT + place * (PANEL + GAP)
        out.append(text(left, 50, title, 13, weight="bold"))
        out += capability(run, left, TOP)
        out += reward(run, left, TOP + HEIGHT + GAP - 20)
    out.append("</svg>")
    with open(target, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
