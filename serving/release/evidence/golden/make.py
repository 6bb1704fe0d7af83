#!/usr/bin/env python3
"""Writes golden values for the statistics of this crate.

Needs mpmath (1.3 or later) alone. Everything has 20 digits and follows the papers' definitions
rather than the closed forms of the Rust code where there is a choice: mixtures are integrated
numerically over their prior, boundaries are found by root finding, rates by enumeration of
likelihoods with fractions.

    python3 serving/release/evidence/golden/make.py
"""

import json
from fractions import Fraction
from pathlib import Path

from mpmath import diff, exp, findroot, log, mp, mpf, npdf, quad, sqrt

mp.dps = 20
HERE = Path(__file__).resolve().parent


def write(name, cases):
    text = json.dumps(cases, indent=1, default=lambda number: float(number))
    (HERE / name).write_text(text + "\n", encoding="utf-8")


# --- sequence: the normal mixture, integrated over the prior ---


def mixture(s, information, tau, one_sided):
    """∫ exp(λ s − λ² I / 2) dF(λ), with F normal, or half normal on one side."""
    spread = 1 / sqrt(information + 1 / tau**2)
    centre = spread**2 * s
    points = sorted({mpf(0), centre, *(centre + k * spread for k in (-12, -4, 4, 12))})
    if one_sided:
        points = [point for point in points if point >= 0]

    def likelihood(effect):
        return exp(effect * s - effect**2 * information / 2) * npdf(effect, 0, tau)

    return quad(likelihood, points) * (2 if one_sided else 1)


def sequence():
    cases = []
    for alpha, soonest, one_sided in [
        ("0.05", "0.02", False),
        ("0.05", "0.02", True),
        ("0.01", "0.1", False),
        ("0.01", "0.1", True),
        ("0.001", "0.5", True),
    ]:
        alpha, soonest = mpf(alpha), mpf(soonest)
        level = 2 * alpha if one_sided else alpha
        # The information at which two-sided bounds are `soonest` wide, as a function of k = I / ρ.
        needed = lambda k: (1 + 1 / k) * log((1 + k) / level**2) / soonest**2
        k = findroot(lambda k: diff(needed, k), -2 * log(level) + 2)
        tau = sqrt(k / needed(k))
        for share in ("0.05", "1", "50"):
            information = needed(k) * mpf(share)
            target = -log(alpha)
            guess = sqrt(2 * (information + tau**-2) * target)
            boundary = findroot(lambda s: log(mixture(s, information, tau, one_sided)) - target, guess, tol=1e-13, solver="secant")
            for z in ("-1", "0.5", "3.2"):
                difference = mpf(z) / sqrt(information)
                cases.append(
                    {
                        "alpha": alpha,
                        "soonest": soonest,
                        "sides": "lower" if one_sided else "both",
                        "information": information,
                        "difference": difference,
                        "scale": tau,
                        "planned": needed(k),
                        "half_width": boundary / information,
                        "p": min(mpf(1), 1 / mixture(difference * information, information, tau, one_sided)),
                    }
                )
    write("sequence.json", cases)


# --- rates: likelihoods with fractions, observation by observation ---


def bernoulli(rate, outcome):
    return rate if outcome else 1 - rate


def rates():
    cases = []
    for block, priors, candidate, baseline in [
        ((1, 1), (("1/5", "1/5"), ("1/20", "19/20")), "1011010011", "0000100000"),
        ((1, 3), (("9/50", "9/50"), ("9/50", "9/50")), "110101", "001000000100000000"),
        ((2, 1), (("1/2", "1/2"), ("2", "98")), "0001101000111011", "00000000"),
        ((1, 1), (("1/5", "1/5"), ("1/20", "19/20")), "0000000000", "0110101001"),
    ]:
        seen = [[Fraction(number) for number in prior] for prior in priors]
        arms = [[int(digit) for digit in arm] for arm in (candidate, baseline)]
        e, path = Fraction(1), []
        for start in range(len(arms[0]) // block[0]):
            parts = [arms[g][start * block[g] : (start + 1) * block[g]] for g in (0, 1)]
            theta = [ones / (ones + zeros) for ones, zeros in seen]
            if theta[0] > theta[1]:
                common = (block[0] * theta[0] + block[1] * theta[1]) / sum(block)
                for g in (0, 1):
                    for outcome in parts[g]:
                        e *= bernoulli(theta[g], outcome) / bernoulli(common, outcome)
            for g in (0, 1):
                seen[g][0] += sum(parts[g])
                seen[g][1] += len(parts[g]) - sum(parts[g])
            path.append(log(mpf(e.numerator) / e.denominator))
        cases.append(
            {
                "block": block,
                "priors": [[float(Fraction(number)) for number in prior] for prior in priors],
                "candidate": arms[0],
                "baseline": arms[1],
                "log_e": path,
            }
        )
    write("rates.json", cases)


# --- ratio: the predictive probabilities of users, one after the other ---


def ratio():
    cases = []
    for weights, concentration, counts in [
        ((1, 1), 100, (523, 477)),
        ((9, 1), 100, (9100, 800)),
        ((95, 5), 10, (940, 61)),
        ((2, 1, 1), 1, (10, 0, 4)),
        ((1, 1), 1000, (50, 50)),
    ]:
        shares = [mpf(weight) / sum(weights) for weight in weights]
        concentration = mpf(concentration)
        total, seen, value = sum(counts), [0] * len(counts), mpf(0)
        # The Bayes factor does not depend on the order of users.
        order = [arm for arm, count in enumerate(counts) for _ in range(count)]
        for n, arm in enumerate(order):
            value += log((concentration * shares[arm] + seen[arm]) / (concentration + n) / shares[arm])
            seen[arm] += 1
        assert sum(seen) == total
        cases.append({"weights": weights, "concentration": concentration, "users": counts, "log_bayes_factor": value})
    write("ratio.json", cases)


# --- offpolicy: sums over users, written out ---


def clustered(groups, centre, denominator):
    """m / (m − 1) · Σ_users (Σ_rows residual)² / denominator²"""
    m = len(groups)
    return mpf(m) / (m - 1) * sum(sum(centre(row) for row in group) ** 2 for group in groups) / denominator**2


def offpolicy():
    state = 12345

    def digit(n):  # a fixed pseudo-random sequence (Lehmer)
        nonlocal state
        state = state * 48271 % 2147483647
        return state % n

    cases = []
    for users in (12, 40):
        groups = []
        for user in range(users):
            group = []
            for _ in range(1 + digit(6)):
                logged, candidate = mpf(2 + digit(8)) / 10, mpf(1 + digit(9)) / 10
                reward = mpf(digit(13) - 2) / 10
                group.append((user, reward, logged, candidate, mpf(digit(9)) / 10, mpf(digit(9)) / 10))
            groups.append(group)
        rows = [row for group in groups for row in group]
        n = len(rows)
        weight = lambda row: row[3] / row[2]
        sum_w = sum(weight(row) for row in rows)
        ips = sum(weight(row) * row[1] for row in rows) / n
        snips = sum(weight(row) * row[1] for row in rows) / sum_w
        robust_of = lambda row: row[5] + weight(row) * (row[1] - row[4])
        robust = sum(robust_of(row) for row in rows) / n
        cases.append(
            {
                "rows": rows,
                "ips": [ips, clustered(groups, lambda row: weight(row) * row[1] - ips, n)],
                "self_normalized": [snips, clustered(groups, lambda row: weight(row) * (row[1] - snips), sum_w)],
                "doubly_robust": [robust, clustered(groups, lambda row: robust_of(row) - robust, n)],
                "effective_rows": sum_w**2 / sum(weight(row) ** 2 for row in rows),
                "weight_share": max(weight(row) for row in rows) / sum_w,
                "weight_mean": sum_w / n,
            }
        )
    write("offpolicy.json", cases)


if __name__ == "__main__":
    sequence()
    rates()
    ratio()
    offpolicy()
