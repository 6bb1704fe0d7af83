#!/usr/bin/env python3
"""Charts the runs of bench/learning.json: the learning arm against three ways to serve its base.

usage: chart_learning.py learning.json learning.svg
"""

import json
import sys
from html import escape

WIDTH, ROW, TOP, LEFT, PANEL, GAP = 1040, 24, 96, 120, 270, 26
PANELS = [
    ("champion_minus_base", "the frozen arm, as served", "whole run", "#0b6e4f"),
    ("last_third_minus_thresholded", "the base with its best threshold", "last third, same temperature", "#4e79a7"),
    ("last_third_minus_greedy_thresholded", "the greedy base with its best threshold", "last third", "#b4553a"),
]
LOW, HIGH, TICKS = -0.12, 0.14, (-0.1, -0.05, 0.0, 0.05, 0.1)


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
        text(16, 26, "Reward per pause: the learning arm minus …", 16, weight="bold"),
        text(16, bottom + 38, "Ten runs of ten minutes; bars are 95% intervals, clustered by user. Source: bench/learning.json", 11, color="#666"),
    ]
    for row, run in enumerate(runs):
        y = TOP + ROW * row + ROW / 2
        out.append(text(16, y + 4, f"{run['users']} users, {run['seed']}", 12))
    for place, (field, title, when, color) in enumerate(PANELS):
        left = LEFT + place * (PANEL + GAP)

        def x(value, left=left):
            return left + (value - LOW) / (HIGH - LOW) * PANEL

        out += [text(left, 54, f"… {title}", 13, color=color, weight="bold"), text(left, 72, when, 11, color="#666")]
        for tick in TICKS:
            out.append(line(x(tick), TOP - 6, x(tick), bottom, "#888" if tick == 0 else "#e4e4e4", 1.2 if tick == 0 else 1))
            label = "0" if tick == 0 else f"{tick:+.2f}".replace("-", "−")
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
