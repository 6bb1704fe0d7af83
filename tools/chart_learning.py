#!/usr/bin/env python3
"""Charts the runs of docs/measurements/learning.json: what users and a version gained over the base.

usage: chart_learning.py learning.json learning.svg
"""

import json
import sys
from html import escape

WIDTH, ROW, TOP, LEFT, PANEL, GAP = 1040, 24, 96, 120, 270, 26
# field, title, what it is, color, ends of the axis, ticks, digits
PANELS = [
    (
        "all_minus_greedy_thresholded",
        "Reward: all users outside base",
        "minus base greedy, best threshold; last third",
        "#0b6e4f",
        (-0.03, 0.06),
        (-0.02, 0, 0.02, 0.04),
        2,
    ),
    (
        "right_per_100_minus_base",
        "Greedy text right, of 100 pauses",
        "last version minus base; other users",
        "#4e79a7",
        (-2.5, 5.4),
        (-2, 0, 2, 4),
        0,
    ),
    (
        "champion_minus_base",
        "Reward: champion minus base",
        "as both are served; whole run",
        "#b4553a",
        (-0.03, 0.24),
        (0, 0.1, 0.2),
        1,
    ),
]


def text(x, y, words, size=12, anchor="start", color="#222", weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def line(x1, y1, x2, y2, color, width=1.0):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'


def main(source, target):
    runs = json.load(open(source, encoding="utf-8"))["runs"]
    bottom = TOP + ROW * len(runs) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 46}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{bottom + 46}" fill="white"/>',
        text(16, 26, "What ten minutes of accepts and rejects gain", 16, weight="bold"),
        text(16, bottom + 38, "Ten runs of ten minutes; bars are 95% intervals, clustered by user. Source: docs/measurements/learning.json", 11, color="#666"),
    ]
    for row, run in enumerate(runs):
        y = TOP + ROW * row + ROW / 2
        out.append(text(16, y + 4, f"{run['users']} users, {run['seed']}", 12))
    for place, (field, title, what, color, (low_end, high_end), ticks, digits) in enumerate(PANELS):
        left = LEFT + place * (PANEL + GAP)

        def x(value, left=left, low_end=low_end, high_end=high_end):
            return left + (value - low_end) / (high_end - low_end) * PANEL

        out += [text(left, 54, title, 13, color=color, weight="bold"), text(left, 72, what, 11, color="#666")]
        for tick in ticks:
            out.append(line(x(tick), TOP - 6, x(tick), bottom, "#888" if tick == 0 else "#e4e4e4", 1.2 if tick == 0 else 1))
            label = "0" if tick == 0 else f"{tick:+.{digits}f}".replace("-", "−")
            out.append(text(x(tick), bottom + 16, label, 10, "middle", "#666"))
        for row, run in enumerate(runs):
            value, low, high = run[field]
            y = TOP + ROW * row + ROW / 2
            out.append(line(x(low), y, x(high), y, color, 2.4))
            out.append(f'<circle cx="{x(value):.1f}" cy="{y:.1f}" r="4.2" fill="{color}"/>')
    out.append("</svg>")
    with open(target, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
