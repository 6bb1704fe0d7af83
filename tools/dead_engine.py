"""One vLLM dead while a release and a rollback reach users. `make bench NAME=dead-engine` runs it.

Three vLLM servers answer for `champion` and `base` under load. One is killed and stays dead. Then `champion` gets another version,
and gets back the one before. Says which requests failed, and after how many seconds users got each version.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

ARMS = ["demo@champion", "demo@base"]
CALLERS = 3
TOKENS = 16
PROMPT = "fn main() {\n    let mut "
STEADY_SECONDS = 15.0
PATIENCE_SECONDS = 300.0
CONFIG = """
state_dir = "{work}/s"
policy.base = "{base}"
stack.cache = "{cache}"
postgres.port = 15464
kafka.port = 19496
kafka.controller_port = 19497
trainer.realtime.enabled = false
serve.remote.vllm = [{engines}]
serve.remote.probe_error_max = 0.001

[listen]
serve = "127.0.0.1:8070"
ingest = "127.0.0.1:8071"
control = "127.0.0.1:8072"
train = "127.0.0.1:8073"

[[release.arm]]
alias = "champion"
weight = 0.5
[[release.arm]]
alias = "base"
weight = 0.5
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("springtide", "vllm", "base", "cache", "json"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    args = parser.parse_args()
    for name in ("springtide", "base", "cache"):
        setattr(args, name, getattr(args, name).resolve())
    work = pathlib.Path(".springtide/dead").resolve()
    shutil.rmtree(work, ignore_errors=True)
    (work / "patch").mkdir(parents=True, mode=0o700)
    ports = [8170, 8171, 8172]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    processes = []
    try:
        engines = [start(["tools/vllm-server.sh", args.vllm, args.base, port], work / f"vllm-{port}.log") for port in ports]
        processes += engines
        for port in ports:
            wait(lambda port=port: answers(f"http://127.0.0.1:{port}/health"))
        urls = ", ".join(f'{{ url = "http://127.0.0.1:{port}" }}' for port in ports)
        config = work / "springtide.toml"
        config.write_text(CONFIG.format(work=work, base=args.base, cache=args.cache, engines=urls))
        up = start([args.springtide, "--config", config, "up"], work / "up.log")
        processes.append(up)
        report = measure(args, config, work, engines)
    finally:
        for process in reversed(processes):
            end(process)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    shutil.rmtree(work, ignore_errors=True)


def measure(args, config: pathlib.Path, work: pathlib.Path, engines: list) -> dict:
    control = "http://127.0.0.1:8072"
    wait(lambda: all(ask(arm)[0] == 1 for arm in ARMS))
    # equal text under another serial: what is measured is which version answers
    other = work / "other"
    shutil.copytree(args.base, other)
    subprocess.run([sys.executable, "-c", CHANGE, other / "model.safetensors"], check=True)
    command = [args.springtide, "--config", config, "policy", "publish", other, "--line", "other", "--parent", "1", "--json"]
    serial = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["version"]
    load = Load()
    load.start()
    time.sleep(STEADY_SECONDS)
    os.killpg(engines[0].pid, signal.SIGKILL)
    load.mark("one engine killed")
    time.sleep(STEADY_SECONDS)
    moved = {}
    for name, body, version in (
        ("release", {"kind": "promote", "alias": "champion", "version": serial}, serial),
        ("rollback", {"kind": "rollback", "alias": "champion", "version": 1}, 1),
    ):
        load.mark(name)
        began = time.time()
        post(f"{control}/v1/releases", body | {"reason": "dead engine"})
        wait(lambda version=version: load.last("demo@champion") == version)
        time.sleep(STEADY_SECONDS)
        of_champion = [answer for answer in load.answers if answer[0] == "demo@champion" and answer[1] >= began]
        moved[name] = {
            "first_seconds": min(end - began for _, _, end, got, _ in of_champion if got == version),
            "last_of_the_one_before_seconds": max((at - began for _, at, _, got, _ in of_champion if got not in (version, None)), default=0.0),
        }
    load.stop()
    return {"engines": len(engines), "callers": CALLERS * len(ARMS), "phases": load.phases(), **moved}


#: One weight changes by the least that bf16 can.
CHANGE = """
import json, sys
path = sys.argv[1]
data = bytearray(open(path, "rb").read())
size = int.from_bytes(data[:8], "little")
header = json.loads(data[8:8 + size])
name = next(name for name in sorted(header) if name.endswith("norm.weight"))
data[8 + size + header[name]["data_offsets"][0]] ^= 1
open(path, "wb").write(data)
"""


class Load:
    """Callers without a pause, of each arm."""

    def __init__(self) -> None:
        #: arm, began, ended, version, failure
        self.answers: list[tuple] = []
        self.marks = [("steady", time.time())]
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.call, args=(arm,)) for arm in ARMS for _ in range(CALLERS)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()

    def call(self, arm: str) -> None:
        while not self.stopped.is_set():
            began = time.time()
            version, failure = ask(arm)
            self.answers.append((arm, began, time.time(), version, failure))
            if failure:
                time.sleep(0.2)

    def mark(self, name: str) -> None:
        self.marks.append((name, time.time()))

    def last(self, arm: str) -> int | None:
        return next((version for of, _, _, version, _ in reversed(self.answers) if of == arm), None)

    def phases(self) -> list[dict]:
        ends = [at for _, at in self.marks[1:]] + [float("inf")]
        found = []
        for (name, begins), ends_at in zip(self.marks, ends):
            for arm in ARMS:
                of = [answer for answer in self.answers if answer[0] == arm and begins <= answer[1] < ends_at]
                failures = [failure for *_, failure in of if failure]
                found.append({"phase": name, "arm": arm, "requests": len(of), "failed": len(failures), "failures": sorted(set(failures)),
                              "slowest_seconds": round(max((end - at for _, at, end, _, _ in of), default=0.0), 2)})
        return found


def ask(arm: str) -> tuple[int | None, str | None]:
    body = {"model": arm, "prompt": PROMPT, "max_tokens": TOKENS}
    try:
        choice = post("http://127.0.0.1:8070/v1/completions", body)["choices"][0]
        return choice["version"], None
    except urllib.error.HTTPError as error:
        return None, f"{error.code} {error.read().decode()[:200]}"
    except (OSError, ValueError) as error:
        return None, repr(error)


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def wait(condition) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("it took too long")
        time.sleep(0.2)


def start(command: list, log: pathlib.Path) -> subprocess.Popen:
    with log.open("w") as out:
        return subprocess.Popen([str(part) for part in command], stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


main()
