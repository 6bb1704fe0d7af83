"""A trainer outside that may be killed at any moment. Arguments: the program, its configuration file, the file that
names the runs (the newest last), a folder of its own, and the file to note acknowledged commits in.

It computes nothing: each step changes a bit of some weights.
"""

import json
import pathlib
import random
import shutil
import subprocess
import sys
import time

import springtide

program, config, runs, work, notes = map(pathlib.Path, sys.argv[1:])
work.mkdir(exist_ok=True)


def newest() -> str:
    while not runs.exists():
        time.sleep(0.1)
    return runs.read_text().split()[-1]


def pulled(version: int) -> pathlib.Path:
    """The version's folder, whole whatever was killed meanwhile."""
    folder = work / f"version-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    pull = [program, "--config", config, "policy", "pull", str(version), folder]
    subprocess.run(pull, check=True, stdout=subprocess.DEVNULL, cwd=config.parent)
    return folder


def trained(folder: pathlib.Path) -> None:
    """Flips the last mantissa bit of a bf16 value in every 4 KiB."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    for at in range(first + 2 * random.randrange(2048), len(data), 4096):
        data[at & ~1] ^= 1
    path.write_bytes(data)


with notes.open("a") as noted:
    while True:
        run = newest()
        try:
            for cohort in springtide.Trainer(run, lease_seconds=10, progress=False):
                part = 0
                while cohort._part(part) is not None:
                    part += 1
                folder = pulled(cohort.parent)
                trained(folder)
                time.sleep(random.random())
                version = cohort.commit(folder, metrics={"loss": 0.0})
                noted.write(json.dumps({"run": run, "step": cohort.step, "version": version}) + "\n")
                noted.flush()
                shutil.rmtree(folder, ignore_errors=True)
        except (springtide.SpringtideError, subprocess.CalledProcessError) as error:
            print(f"{run}: {error}", file=sys.stderr, flush=True)
        time.sleep(0.2)
