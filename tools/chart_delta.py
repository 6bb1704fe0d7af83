#!/usr/bin/env python3
"""Charts the results of `make bench NAME=delta`: the ratio for each pair of versions, and the ratio against
the speed of a verified apply.

usage: chart_delta.py delta.json delta.svg
"""

import json
import math
import sys
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1180, 520, 60, 56, 430
OURS = ["#0b6e4f", "#3a9d7c", "#7cc4a4"]
OTHERS = ["#4e79a7", "#f28e2b", "#e15759", "#b07aa1", "#9c755f", "#bab0ac", "#edc948", "#ff9da7", "#76b7b2"]


def scale(values, low, high):
    """A logarithmic scale from the range of the values to pixels, and its grid lines."""
    least, most = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05

    def place(value):
        return low + (math.log10(value) - least) / (most - least) * (high - low)

    ticks = [m * 10**e for e in range(-4, 5) for m in (1, 2, 5) if least <= math.log10(m * 10**e) <= most]
    return place, ticks


def text(x, y, words, size=11, anchor="start", color="#222", turn=0):
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{turned}>{escape(words)}</text>'


def short(way):
    if not way.startswith("ours"):
        return way.split(" (")[0]
    return way.split(",")[0] + "," + way.split(",")[1]


def main(source, target):
    report = json.load(open(source))
    rows = [{**row, "way": row["way"].replace("**", "")} for row in report["rows"]]
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    ours = iter(OURS)
    others = iter(OTHERS)
    color = {way: next(ours) if way.startswith("ours") else next(others, "#888") for way in ways}
    bounds = {bound["pair"]: bound for bound in report["bounds"]}
    machine = report["machine"]
    speeds = ", ".join(f"{speed['what']} {speed['gb_per_second']:.1f}" for speed in machine["speeds"])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, "Lossless deltas: bf16 bytes of the model ÷ bytes of the delta", 15),
        text(LEFT, 42, f"{machine['processor']}, {machine['cores']} cores; GB/s on one: {speeds}", 10, color="#666"),
    ]

    # Left: the ratios of each pair.
    right = 620
    values = [row["ratio"] for row in rows] + [bound["by_exponent"] for bound in bounds.values()]
    at, ticks = scale(values, BOTTOM, TOP + 10)
    step = (right - LEFT) / len(pairs)
    for tick in ticks:
        out.append(f'<line x1="{LEFT}" x2="{right}" y1="{at(tick):.1f}" y2="{at(tick):.1f}" stroke="#eee"/>')
        out.append(text(LEFT - 6, at(tick) + 4, f"{tick:g}×", 10, "end", "#666"))
    for n, pair in enumerate(pairs):
        x = LEFT + (n + 0.5) * step
        out.append(text(x + 4, BOTTOM + 14, pair, 10, "end", turn=-30))
        bound = at(bounds[pair]["by_exponent"])
        out.append(f'<line x1="{x - step * 0.4:.1f}" x2="{x + step * 0.4:.1f}" y1="{bound:.1f}" y2="{bound:.1f}" stroke="#c00" stroke-dasharray="4 2"/>')
        # Rows with "a patch" only differ from another row in how the delta is applied.
        own = [row for row in rows if row["pair"] == pair and "a patch" not in row["way"]]
        for row in own:
            x_row = x + (ways.index(row["way"]) - len(ways) / 2) * step * 0.07
            radius = 5 if row["way"].startswith("ours") else 3.5
            out.append(f'<circle cx="{x_row:.1f}" cy="{at(row["ratio"]):.1f}" r="{radius}" fill="{color[row["way"]]}"/>')
    out.append(text(right + 60, 470, "dashed: the limit of a coder that knows only the exponents of the base", 10, color="#c00"))

    # Right: ratio against speed, for one pair.
    pair = pairs[min(1, len(pairs) - 1)]
    own = [row for row in rows if row["pair"] == pair and row["apply_gb_per_second"]]
    place, ticks = scale([row["apply_gb_per_second"] for row in own], right + 60, WIDTH - 40)
    at, heights = scale([row["ratio"] for row in own], 300, TOP + 20)
    out.append(text(right + 60, TOP, f"{pair}: ratio against verified apply, GB/s a core", 12))
    for tick in ticks:
        out.append(f'<line x1="{place(tick):.1f}" x2="{place(tick):.1f}" y1="{TOP + 10}" y2="300" stroke="#eee"/>')
        out.append(text(place(tick), 314, f"{tick:g}", 10, "middle", "#666"))
    for tick in heights:
        out.append(f'<line x1="{right + 60}" x2="{WIDTH - 40}" y1="{at(tick):.1f}" y2="{at(tick):.1f}" stroke="#eee"/>')
        out.append(text(right + 54, at(tick) + 4, f"{tick:g}×", 10, "end", "#666"))
    for row in own:
        x, y = place(row["apply_gb_per_second"]), at(row["ratio"])
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color[row["way"]]}"/>')
    for n, way in enumerate(ways):
        x, y = right + 60 + n % 2 * 240, 340 + n // 2 * 18
        out.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{color[way]}"/>')
        out.append(text(x + 10, y, short(way), 10))
    out.append("</svg>\n")
    with open(target, "w") as file:
        file.write("\n".join(out))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
