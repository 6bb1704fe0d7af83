"""Times the parts of an update of a vLLM server under load: what the server does not answer for, and why.

    bench_pause.py VLLM MODEL --tensor-parallel 2    with the Python of vLLM's environment

MODEL is a Hugging Face folder. Patches lead from its weights to others and back; the others differ in the last bit
of a part of all weights. An update is paused from `/pause` to the answer of `/resume`. As often, a patch that
changes nothing shows how much of that is vLLM's own. At the end the served log-probabilities are compared with
those after all weights of the same version were loaded.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from springtide import Checkpoint, Patch

sys.path.append(str(pathlib.Path(__file__).parent.parent / "tests/engines"))
from follower import Exchange, Follower  # noqa: E402
from patch import Vllm, send  # noqa: E402

PORT = 8130
MAX_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vllm", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--changed", type=float, default=0.01, help="part of all weights")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, Follower() as follower, server(args):
        report = measure(args, pathlib.Path(work), follower)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


@contextlib.contextmanager
def server(args: argparse.Namespace):
    binding = "auto" if args.tensor_parallel == 1 else "nobind"
    command = ["tools/vllm-server.sh", args.vllm, args.model, str(PORT), "--tensor-parallel-size", str(args.tensor_parallel)]
    log = tempfile.NamedTemporaryFile()
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": binding}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        while True:
            with contextlib.suppress(OSError):
                send(f"http://127.0.0.1:{PORT}/health", method="GET")
                break
            if process.poll() is not None:
                sys.exit(pathlib.Path(log.name).read_text()[-3000:])
            time.sleep(1)
        yield
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def changed(model: pathlib.Path, folder: pathlib.Path, part: float, seed: int) -> None:
    """The same weights, the last bit of some flipped."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    chosen = random.Random(seed)
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        at = 8 + length
        while at < path.stat().st_size:
            file.seek(at)
            block = bytearray(file.read(1 << 20))
            for _ in range(max(1, round(len(block) // 2 * part))):
                block[2 * chosen.randrange(len(block) // 2)] ^= 1
            file.seek(at)
            file.write(block)
            at += len(block)


def measure(args: argparse.Namespace, work: pathlib.Path, follower: Follower) -> dict:
    changed(args.model, work / "next", args.changed, args.seed)
    folders = [args.model, work / "next"]
    versions = [Checkpoint.open(folder) for folder in folders]
    roots = [version.root() for version in versions]
    pairs = [(0, 1), (1, 0), (0, 0), (1, 1)]
    patches = {pair: Patch.between(*(versions[at] for at in pair)) for pair in pairs}
    engine = Vllm(f"http://127.0.0.1:{PORT}")
    refused = engine.folder(args.model, roots[0], "0")
    if refused:
        sys.exit(refused)
    load, stop = Load(args), threading.Event()
    streams = [threading.Thread(target=load.run, args=(stop, number)) for number in range(args.streams)]
    for stream in streams:
        stream.start()
    rows, holds = [], 0
    for number in range(2 * args.updates):
        # an update, and one that changes nothing
        end = holds if number % 2 else 1 - holds
        exchange = Exchange(patches[holds, end], versions[end])
        times = update(engine.url, follower.open(exchange), exchange, roots[holds], roots[end], str(number))
        rows.append({"changes": end != holds, **times})
        holds = end
        time.sleep(0.5)
    stop.set()
    for stream in streams:
        stream.join()
    began, exchange = time.monotonic(), Exchange(None, versions[holds])
    wrong = engine.prove(follower.open(exchange), exchange, roots[holds])
    proof = {"seconds": time.monotonic() - began, "workers": len(wrong), "wrong": wrong}
    served = engine.logprobs()
    refused = engine.folder(folders[holds], roots[holds], "last")
    if refused:
        sys.exit(refused)
    fresh = engine.logprobs()
    pauses = [row["pause"] for row in rows if row["changes"]]
    own = [row["pause"] for row in rows if not row["changes"]]
    written = [row["update"] for row in rows if row["changes"]]
    report = {
        "tensor_parallel": args.tensor_parallel,
        "total_weights": sum(math.prod(versions[0][name].shape) for name in versions[0]),
        "changed_weights": patches[0, 1].weights,
        "patch_bytes": len(patches[0, 1].to_bytes()),
        "bytes_of_each_worker": rows[0]["bytes"],
        "proof": proof,
        "updates": args.updates,
        "pause_ms": spread(pauses),
        "pause_of_nothing_ms": spread(own),
        "update_ms": spread(written),
        "stage_ms": spread([row["stage"] for row in rows if row["changes"]]),
        "not_vllms_own": 1 - spread(own)["p50"] / spread(pauses)["p50"],
        "answers": load.answers,
        "failed": load.failed,
        "equal_to_all_weights_loaded": served == fresh,
        "largest_difference": max(abs(a - b) for (_, a), (_, b) in zip(served, fresh)),
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in report.items() if key != "rows"}, indent=1))
    return report


def update(url: str, patch: str, exchange: Exchange, start: str, end: str, name: str) -> dict:
    times = {}

    def timed(what: str, path: str, body=None) -> None:
        began = time.monotonic()
        send(f"{url}{path}", body)
        times[what] = 1e3 * (time.monotonic() - began)

    began = time.monotonic()
    send(f"{url}/start_weight_update")
    send(f"{url}/update_weights", {"update_info": {"stage": patch, "from": start, "to": end}})
    send(f"{url}/finish_weight_update", {})
    ended = exchange.wait()
    if {*ended} != {"ready"}:
        sys.exit(f"not ready: {ended}")
    times["stage"] = 1e3 * (time.monotonic() - began)
    began = time.monotonic()
    timed("command", "/pause?mode=keep&clear_cache=true")
    timed("start", "/start_weight_update")
    timed("update", "/update_weights", {"update_info": {"patch": patch, "from": start, "to": end}})
    timed("finish", "/finish_weight_update", {"weight_version": name})
    timed("resume", "/resume")
    times["pause"] = 1e3 * (time.monotonic() - began)
    return times | {"bytes": [*exchange.bytes.values()]}


class Load:
    """Callers that sample without a break."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
        self.answers = self.failed = 0

    def run(self, stop: threading.Event, number: int) -> None:
        chosen = random.Random(number)
        sampling = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
        while not stop.is_set():
            prompt = [chosen.randrange(self.vocabulary) for _ in range(32)]
            try:
                send(f"http://127.0.0.1:{PORT}/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
                self.answers += 1
            except (urllib.error.URLError, OSError):
                self.failed += 1


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = lambda part: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 1)  # noqa: E731
    return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0)}


if __name__ == "__main__":
    main()
