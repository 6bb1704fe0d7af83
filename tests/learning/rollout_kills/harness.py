"""A harness that may be killed at any moment. Arguments: the file that names the runs, the newest
last, and the file to note rewards in that the control role has acknowledged.

A rollout has two turns. Its world is a program in a sandbox, which counts letters for the reward.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import TextIO

import httpx
import springtide

WORKERS = 3
#: The gateway and the control role may be away for so long.
PATIENCE_SECONDS = 60.0

#: The share of `a` to `m` among the letters, after a moment in which the world can be killed.
PROGRAM = """
import json, sys, time
text = "".join(json.load(sys.stdin))
time.sleep(0.2)
letters = [letter for letter in text if letter.isalpha()]
print(sum(letter.lower() <= "m" for letter in letters) / max(len(letters), 1))
"""


def world() -> list[str]:
    python = os.path.realpath(sys.executable)
    shown = sorted({path for path in (sys.base_prefix, "/usr", "/lib", "/lib64") if os.path.exists(path)})
    binds = [word for path in shown for word in ("--ro-bind", path, path)]
    return ["bwrap", "--unshare-all", "--die-with-parent", "--clearenv", *binds, python, "-I", "-S", "-c", PROGRAM]


def turn(lease: springtide.Lease, prompt: str) -> str:
    until = time.monotonic() + PATIENCE_SECONDS
    body = {"model": lease.model, "prompt": prompt, "max_tokens": 8}
    while True:
        try:
            answer = httpx.post(f"{lease.base_url}/completions", json=body, timeout=PATIENCE_SECONDS)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["text"])
        except httpx.HTTPError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def play(lease: springtide.Lease, notes: TextIO) -> None:
    first = turn(lease, lease.task["prompt"])
    second = turn(lease, f"{first}, and then?")
    scored = subprocess.run(
        world(), input=json.dumps([first, second]), capture_output=True, text=True, timeout=30, check=True
    )
    reward = float(scored.stdout)
    lease.reward(reward)
    notes.write(json.dumps({"rollout": lease.id, "reward": reward}) + "\n")


def main() -> None:
    runs, notes = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).open("a", buffering=1)
    patient = springtide.Retries(attempts_max=1000, delay_seconds_max=1.0, seconds_max=PATIENCE_SECONDS)
    done = ""
    while True:
        newest = runs.read_text().split()[-1]
        if newest == done:
            time.sleep(0.1)
            continue
        springtide.Run(newest, retries=patient).work(lambda lease: play(lease, notes), workers=WORKERS)
        done = newest


main()
