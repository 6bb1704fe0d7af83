#!/usr/bin/env python3
"""Derives models/arrivals/azure_code_2023.toml from AzureLLMInferenceDataset2023's code trace.

Counts arrivals per SLOT_SECONDS from the first one on (the last, partial slot is left out) and turns the counts into
rates relative to their mean. The trace is far burstier than two cores carry, so rates are scaled and clipped to
[CLIP_MIN, CLIP_MAX]; the scale is the one at which the clipped rates have a mean of exactly 1.

usage: scripts/arrivals.py AzureLLMInferenceTrace_code.csv > models/arrivals/azure_code_2023.toml
"""
import csv
import datetime
import sys

SLOT_SECONDS = 10
CLIP_MIN, CLIP_MAX = 0.5, 2.0

HEADER = """\
# How requests arrive at a real code-completion service: rate per slot, relative to the mean.
#
# Derived by scripts/arrivals.py from AzureLLMInferenceDataset2023 (code trace, {arrivals} arrivals on 2023-11-16 over
# {seconds:.0f} s), licensed CC-BY 4.0: Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase
# Splitting", ISCA 2024. Changes made: counted per slot, scaled and clipped to [{low}, {high}] with a mean of 1;
# no row of the trace is repeated here. Before the clipping {empty} of {slots} slots were empty and the busiest had
# {peak:.1f} times the mean.
slot_seconds = {slot}
clip = [{low}, {high}]
relative_rate = ["""


def arrival_seconds(path):
    with open(path, newline="") as file:
        stamps = [row["TIMESTAMP"][:26] for row in csv.DictReader(file)]
    times = sorted(datetime.datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S.%f") for stamp in stamps)
    return [(time - times[0]).total_seconds() for time in times]


def clipped(rates, scale):
    return [min(CLIP_MAX, max(CLIP_MIN, rate * scale)) for rate in rates]


def level(rates):
    """The clipped rates at the scale that gives them a mean of 1 (bisection; the mean rises with the scale)."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if sum(clipped(rates, middle)) < len(rates):
            low = middle
        else:
            high = middle
    return clipped(rates, high)


def main():
    seconds = arrival_seconds(sys.argv[1])
    slots = int(seconds[-1] // SLOT_SECONDS)
    counts = [0] * slots
    for second in seconds:
        if second < slots * SLOT_SECONDS:
            counts[int(second // SLOT_SECONDS)] += 1
    mean = sum(counts) / slots
    rates = level([count / mean for count in counts])
    print(HEADER.format(arrivals=len(seconds), seconds=seconds[-1], low=CLIP_MIN, high=CLIP_MAX, slot=SLOT_SECONDS,
                        empty=counts.count(0), slots=slots, peak=max(counts) / mean))
    for start in range(0, slots, 18):
        print("    " + " ".join(f"{rate:.3f}," for rate in rates[start:start + 18]))
    print("]")


if __name__ == "__main__":
    main()
