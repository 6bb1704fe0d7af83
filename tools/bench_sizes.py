"""Runs the commands that move whole versions, each in a memory cgroup, on generated models.

A model has random bf16 weights in tensors of 64 MiB and one of an eighth of the model, in an architecture that
our exact model does not know. In the next version one weight in 10⁶ is another. Memory is what the cgroup counts:
`anonymous` is the highest of the samples taken every 50 ms, `with files` the kernel's own maximum, which includes
the page cache up to the limit. Needs cgroup v1 or v2, and root.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time

STEP = 1_000_000
TENSOR_BYTES = 64 << 20
RANKS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--springtide", type=pathlib.Path, required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--gb", type=float, nargs="+", required=True)
    parser.add_argument("--limit-mib", type=int, required=True)
    parser.add_argument("--kills", type=int, default=0, help="kill -9 of a pull, this often, at each size")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(".springtide"))
    args = parser.parse_args()
    group = Group(args.limit_mib << 20)
    rows = []
    for size in args.gb:
        with tempfile.TemporaryDirectory(dir=args.work.resolve(), prefix="sizes-") as work:
            rows += measure(args, group, size, pathlib.Path(work))
    group.remove()
    report = {"limit_bytes": args.limit_mib << 20, "cgroup": group.version, "rows": rows}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(args: argparse.Namespace, group: "Group", gigabytes: float, work: pathlib.Path) -> list[dict]:
    first, second = work / "first", work / "second"
    generate(first, int(gigabytes * 1e9))
    change(first, second)
    config = work / "springtide.toml"
    policy = f"sizes{int(gigabytes * 1000)}"
    config.write_text(
        f'state_dir = "{work}/s"\npolicy.name = "{policy}"\npolicy.base = "{first}"\n'
        f'postgres.url = "{os.environ["SPRINGTIDE_TEST_POSTGRES"]}"\nkafka.brokers = "{os.environ["SPRINGTIDE_TEST_KAFKA"]}"\n'
        f'kafka.librdkafka_file = "{os.environ["SPRINGTIDE_TEST_KAFKA_FILE"]}"\n'
        'listen.train = "127.0.0.1:8093"\n[trainer.realtime]\nenabled = false\n'
    )
    program = [str(args.springtide.resolve()), "--config", str(config)]
    subprocess.run([*program, "migrate"], check=True, stdout=subprocess.DEVNULL)
    rows = []

    def step(name: str, *command: object, until: str | None = None) -> None:
        row = group.run([*program, *map(str, command)], work / f"{name.replace('/', '-')}.log", until)
        rows.append({"gb": gigabytes, "what": name, **row})
        print(
            f"{gigabytes:5.1f} GB  {name:8} {row['seconds']:7.1f} s, {row['cpu_seconds']:6.1f} of the processor, "
            f"anonymous {row['anonymous_mib']:5.0f} MiB, with files {row['with_files_mib']:5.0f} MiB, "
            f"read {row['read_gb']:.1f} GB, wrote {row['written_gb']:.1f} GB",
            flush=True,
        )

    step("import", "train", until="the realtime line has a head")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", (work / "import.log").read_text())
    # versions are numbered over all policies of a database
    (base,) = re.findall(r"has a head.* head=([0-9]+)", plain)
    step("publish", "policy", "publish", second, "--line", "next", "--parent", base)
    shutil.rmtree(first)
    step("verify", "policy", "verify", int(base) + 1)
    step("pull", "policy", "pull", int(base) + 1, pulled := work / "pulled")
    assert digest(pulled) == digest(second), "other bytes were pulled"
    third = work / "third"
    change(second, third, seed=1)
    for rank in range(1, RANKS + 1):
        step(f"shard {rank}/{RANKS}", "policy", "shard", third, "--base", pulled, "--name", "third", "--shard", f"{rank}/{RANKS}")
    upload = ["--shards", "third", "--of", RANKS, "--base", pulled]
    step("publish shards", "policy", "publish", third, "--line", "next", "--parent", int(base) + 1, *upload)
    step("squash", "policy", "squash", "--span", 2, int(base) + 2)
    with control(program, work):
        release = ["release", "promote", "--alias", "served", "--reason", "sizes", str(int(base) + 2)]
        subprocess.run([*program, *release], check=True, stdout=subprocess.DEVNULL)
        follow = ["follow", "--engine", "folder", "--alias", "served", "--dir", work / "followed"]
        step("follow", *follow, until="assignment in force")
    assert digest(work / "followed" / "current") == digest(third), "a follower has other bytes"
    if args.kills:
        shutil.rmtree(work / "followed")
        rows.append({"gb": gigabytes, **kill(args.kills, program, work, int(base) + 2, digest(second), digest(third))})
    return rows


@contextlib.contextmanager
def control(program: list[str], work: pathlib.Path):
    with (work / "control.log").open("wb") as log:
        role = subprocess.Popen([*program, "control"], stdout=log, stderr=log)
        try:
            while subprocess.run([*program, "health", "control"], capture_output=True).returncode != 0:
                assert role.poll() is None, (work / "control.log").read_text()[-3000:]
                time.sleep(0.2)
            yield
        finally:
            role.terminate()
            role.wait()


def kill(kills: int, program: list[str], work: pathlib.Path, version: int, before: str, after: str) -> dict:
    """Kills a pull with -9 at any time and starts it again until it succeeds, half of them on top of the version
    before. Whatever is there in between must be the old bytes or the new ones."""
    chosen, folder = random.Random(1), work / "killed"
    done = wrong = succeeded = 0
    started = time.monotonic()

    def pull(serial: int, seconds: float | None = None) -> bool:
        child = subprocess.Popen([*program, "policy", "pull", str(serial), str(folder)], stdout=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert child.wait(seconds) == 0, "a pull failed"
            return True
        child.kill()
        child.wait()
        return False

    pull(version)
    whole = time.monotonic() - started
    while done < kills:
        shutil.rmtree(folder)
        allowed = {after}
        if chosen.random() < 0.5:
            pull(version - 1)
            allowed.add(before)
        while not pull(version, chosen.uniform(0, 1.2 * whole)):
            done += 1
            wrong += folder.exists() and digest(folder) not in allowed
        wrong += digest(folder) != after
        succeeded += 1
    print(f"{done} kills of pull, {succeeded} times to the end, {wrong} times other bytes", flush=True)
    return {"what": "kills", "kills": done, "succeeded": succeeded, "wrong": wrong, "seconds": time.monotonic() - started}


def generate(folder: pathlib.Path, size: int) -> None:
    """A model folder: one file of weights."""
    folder.mkdir()
    config = {"architectures": ["GeneratedForCausalLM"], "vocab_size": 32_000, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    sizes = [size // 8 & ~1] + [TENSOR_BYTES] * (size * 7 // 8 // TENSOR_BYTES)
    header, at = {}, 0
    for number, count in enumerate(sizes):
        header[f"layers.{number:05}"] = {"dtype": "BF16", "shape": [count // 2], "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # values of 0.0078 to 0.031 and their negatives
    high = bytes([0x3C, 0xBC][byte & 1] for byte in range(256))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, sum(sizes), TENSOR_BYTES):
            block = bytearray(os.urandom(min(TENSOR_BYTES, sum(sizes) - start)))
            block[1::2] = block[1::2].translate(high)
            file.write(block)


def change(old: pathlib.Path, new: pathlib.Path, seed: int = 0) -> None:
    """The same with the last bit of one weight of `STEP` flipped."""
    shutil.copytree(old, new)
    path = new / "model.safetensors"
    with path.open("r+b") as file:
        for at in range(data_of(path) + 2 * seed, path.stat().st_size, 2 * STEP):
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))


def data_of(path: pathlib.Path) -> int:
    """Where the weights of a safetensors file begin."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    return 8 + length


def digest(folder: pathlib.Path) -> str:
    """Of all weights, in the order of their names."""
    hasher = hashlib.blake2b()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            file.seek(data_of(path))
            while block := file.read(1 << 24):
                hasher.update(block)
    return hasher.hexdigest()


class Group:
    """A memory cgroup."""

    def __init__(self, limit: int) -> None:
        roots = [(1, pathlib.Path("/sys/fs/cgroup/memory")), (2, pathlib.Path("/sys/fs/cgroup"))]
        self.version, root = next(one for one in roots if one[1].exists())
        self.path = root / f"springtide-sizes-{os.getpid()}"
        self.path.mkdir()
        files = {1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"), 2: ("memory.max", "memory.peak")}
        maximum, self.peak = files[self.version]
        (self.path / maximum).write_text(str(limit))

    def remove(self) -> None:
        self.path.rmdir()

    def anonymous(self) -> int:
        name = "total_rss" if self.version == 1 else "anon"
        lines = (self.path / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == name)

    def run(self, command: list[str], log: pathlib.Path, until: str | None) -> dict:
        """Runs a command, or until its log has a word."""
        (self.path / self.peak).write_text("0") if self.version == 1 else None
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        highest, done = 0, threading.Event()

        def watch() -> None:
            nonlocal highest
            while not done.wait(0.05):
                highest = max(highest, self.anonymous())

        watching = threading.Thread(target=watch)
        watching.start()
        with log.open("wb") as file:
            enter = f"echo $$ > {self.path}/cgroup.procs; exec \"$@\""
            child = subprocess.Popen(["/bin/sh", "-c", enter, "sh", *command], stdout=file, stderr=subprocess.STDOUT)
            while child.poll() is None:
                time.sleep(0.05)
                if until and until in log.read_text(errors="replace"):
                    child.terminate()
                    child.wait()
        done.set()
        watching.join()
        if child.returncode != 0:
            sys.exit(f"{command} failed with {child.returncode}:\n{log.read_text()[-3000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {
            "seconds": time.monotonic() - started,
            "cpu_seconds": cpu,
            "anonymous_mib": highest / 2**20,
            "with_files_mib": int((self.path / self.peak).read_text()) / 2**20,
            "read_gb": (after.ru_inblock - before.ru_inblock) * 512 / 1e9,
            "written_gb": (after.ru_oublock - before.ru_oublock) * 512 / 1e9,
        }


if __name__ == "__main__":
    main()
