"""Canaries on the demo's live traffic: which decisions are right, how soon, and how many users get a bad version.
`make bench NAME=release` runs it beside a stack.

Each planted version (tools/planted.py) is proposed with the same strategy, one after another, while the demo's
developers ask for suggestions. A version of `noise`, `silent`, `failing` or `refusing` should be rolled back. No replica
should load one of `broken`, so that it ends before it has a user. One of `shorter` or `longer` should be held for a
person, because its answers are not what they were, or rolled back, because rewards are lower: whichever is known first.
Of `better`, `champion` is held at a version with noise, and the base itself is the canary: it should become `champion`.
Of `hack` too, but the canary is one of `shorter`. Its rewards are higher because it says little: it should be held.

With `--shadow`, half of `champion`'s requests are answered unseen first. Then a bad version may also be refused before its
first user.

Every canary is in the report.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from planted import STRENGTHS, plant

KINDS = [*STRENGTHS, "better", "hack"]
#: What `champion` is held at instead of the base: the kind, and which version of it, by default the canary's index.
CONTROLS = {"better": ("noise", None), "hack": ("noise", 0)}
#: What the canary is, if no version of the kind.
CANARIES = {"better": None, "hack": "shorter"}
#: The first version of `shorter` that is a `hack`: the weaker ones are not surely shorter by the monitor's limit.
HACK_FROM = 3
#: The states that are right. `better` is the only one that should pass.
RIGHT = {kind: ["rolled_back"] for kind in STRENGTHS} | {
    "broken": ["aborted"],
    "longer": ["rolled_back", "held"],
    "shorter": ["rolled_back", "held"],
    "better": ["champion"],
    "hack": ["held"],
}
#: Before the first user, with `--shadow`.
SHADOW = {"percent": 50, "answers": 100, "timeout": "60s"}
#: How the reason of a canary begins that was refused for its unseen answers.
UNSEEN = "no user has seen it: "
BASE = 1
CPUS = pathlib.Path("/proc/cpuinfo")
LOOK_EVERY_SECONDS = 1.0
#: After a decision, to see who still gets the version.
AFTER_SECONDS = 20.0
#: Beside the timeout of the analysis, for replicas to load the version.
PATIENCE_SECONDS = 600.0


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--each", type=int, default=5, help="canaries of each kind")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--timeout", type=int, default=480, help="of the analysis, seconds")
    parser.add_argument("--shadow", action="store_true", help="each canary answers unseen first")
    args = parser.parse_args()
    # so that the developers are stopped too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stack = Stack(args)
    developers = stack.developers(args)
    try:
        stack.wait_for_answers(BASE)
        canaries = []
        planned = [(kind, index) for index in range(args.each) for kind in args.kinds]
        with ThreadPoolExecutor(1) as beside:
            ready = beside.submit(prepare, stack, args, *planned[0])
            for following in [*planned[1:], None]:
                prepared = ready.result()
                canary = decide(stack, args, prepared)
                # the next one is made while this one is measured
                if following:
                    ready = beside.submit(prepare, stack, args, *following)
                canaries.append(prepared.known | measured(stack, canary))
                print(line(canaries[-1]), flush=True)
                write(args, canaries)
                if developers.poll() is not None:
                    raise SystemExit(f"the demo ended before the last canary: see {args.json.parent}/demo.log")
    finally:
        developers.terminate()
        developers.wait()
    stack.save_answers(args.json.with_name("release-answers.csv"))
    print(table(canaries))


def arguments(about: str) -> argparse.ArgumentParser:
    """Those of every benchmark on a stack of its own."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--springtide", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--config", type=pathlib.Path, required=True, help="of the stack that runs")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder with the stack's state, s")
    parser.add_argument("--json", type=pathlib.Path, required=True, help="where the figures go")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=16.0, help="the developers' pauses per second")
    parser.add_argument("--developers", type=int, default=300)
    return parser


def strategy(args: argparse.Namespace) -> dict:
    """What every canary gets. The judge has its defaults."""
    analysis = {"successCondition": "better", "timeout": f"{args.timeout}s"}
    shadow = {"shadow": SHADOW} if args.shadow else {}
    return {"steps": [{"setWeight": 50}, {"analysis": analysis}], "prepare": "30s"} | shadow


@dataclass(frozen=True)
class Prepared:
    """A canary before it is proposed."""

    control: int
    version: int
    #: Of the report.
    known: dict


def prepare(stack: "Stack", args: argparse.Namespace, kind: str, index: int) -> Prepared:
    # another seed for each version
    seed = (args.seed * len(KINDS) + KINDS.index(kind)) * 1000 + index
    strength, control, version = None, BASE, BASE
    if kind in CONTROLS:
        fault, of_control = CONTROLS[kind]
        of_control = index if of_control is None else of_control
        strength, control = publish(stack, args, fault, of_control, seed, f"control-{kind}-{index}")
    if fault := CANARIES.get(kind, kind):
        of_kind = HACK_FROM + index % (len(STRENGTHS[fault]) - HACK_FROM) if kind == "hack" else index
        strength, version = publish(stack, args, fault, of_kind, seed, f"planted-{kind}-{index}")
    return Prepared(control, version, {"kind": kind, "index": index, "strength": strength, "seed": seed})


def decide(stack: "Stack", args: argparse.Namespace, prepared: Prepared) -> dict:
    """The canary as it was decided."""
    stack.hold(prepared.control)
    reason = f"{prepared.known['kind']} {prepared.known['strength']}"
    return stack.decided(stack.propose(prepared.version, strategy(args), reason), args)


def publish(stack: "Stack", args: argparse.Namespace, fault: str, index: int, seed: int, name: str) -> tuple:
    """Makes a planted version. Returns its strength and serial."""
    folder = args.work / name
    strength = plant(stack.base, fault, index, seed, folder)
    version = stack.publish(folder, name)
    shutil.rmtree(folder)
    return strength, version


def measured(stack: "Stack", canary: dict) -> dict:
    """From the decision and the tables."""
    decision = canary["transitions"][0]
    time.sleep(AFTER_SECONDS)
    values = {"version": canary["version"], "from": canary["created_at"], "at": decision["at"]}
    (row,) = stack.query(EXPOSED, values)
    # a canary that is held may do harm later
    later = stack.get(f"/v1/canaries/{canary['id']}")["state"]
    if later in ("paused", "held"):
        stack.post(f"/v1/canaries/{canary['id']}/abort", {"reason": "measured"})
    evidence = decision["evidence"] or {}
    sides = {side: evidence.get(side) for side in ("canary", "champion")}
    ended = canary["state"] not in ("paused", "held")
    return {
        "id": canary["id"],
        "version": canary["version"],
        "decision": canary["state"],
        "state_later": later,
        "reason": decision["reason"],
        "seconds": row["seconds"],
        "users_before": row["users_before"],
        "users_after": row["users_after"] if ended else None,
        "last_after_seconds": row["last_after_seconds"] if ended else None,
        **sides,
    }


#: `:at` is when the decision was written. An answer has the time at which it was begun.
EXPOSED = """
    select extract(epoch from :'at'::timestamptz - min(sampled_at))::float as seconds,
           count(distinct user_key) filter (where sampled_at <= :'at') as users_before,
           count(distinct user_key) filter (where sampled_at > :'at') as users_after,
           extract(epoch from max(sampled_at) filter (where sampled_at > :'at') - :'at'::timestamptz)::float as last_after_seconds
    from generation
    where arm = 'canary' and version = :'version' and sampled_at >= :'from'"""

#: What `make bench NAME=evidence` replays: what users thought of answers, without texts.
ANSWERS = """
    select md5(g.user_key) as user, extract(epoch from g.sampled_at)::float as at, g.version, g.arm, g.declined::int as declined,
           t.reward
    from generation g
    left join trajectory t on t.generation_id = g.id
    where g.purpose = 'production' and g.arm in ('champion', 'canary')
    order by g.sampled_at"""

ANSWERED = """
    select exists (select from generation
                   where arm = 'champion' and version = :'version' and sampled_at > now() - interval '5 s') as answered"""


class Stack:
    """The stack that runs, by its command, its API and its database."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = tomllib.loads(args.config.read_text())
        self.command = [str(args.springtide), "--config", str(args.config)]
        self.control = f"http://{config['listen']['control']}"
        self.base = (args.config.parent / config["policy"]["base"]).resolve()
        postgres = json.loads(self.run("stack", "fetch", "--json"))["postgres"]
        where = ["-h", str(args.work / "s/postgres"), "-p", str(config["postgres"]["port"]), "-U", "postgres"]
        self.psql = [f"{postgres}/bin/psql", *where, "-qAtX", "-v", "ON_ERROR_STOP=1", "springtide"]

    def run(self, *arguments: str) -> str:
        return subprocess.run([*self.command, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout

    def developers(self, args: argparse.Namespace, minutes: float = 100_000) -> subprocess.Popen:
        """The demo's users, for so long or until they are stopped."""
        who = ["--seed", str(args.seed), "--rate", str(args.rate), "--developers", str(args.developers)]
        how = ["--minutes", str(minutes), "--reference-pauses", "0", "--report", str(args.work / "demo.json")]
        with (args.json.parent / "demo.log").open("w") as log:
            return subprocess.Popen([*self.command, "demo", *who, *how], stdout=log, stderr=subprocess.STDOUT)

    def publish(self, folder: pathlib.Path, name: str) -> int:
        done = self.run("policy", "publish", str(folder), "--line", name, "--parent", str(BASE), "--json")
        return json.loads(done)["version"]

    def hold(self, version: int) -> None:
        """Keeps `champion` at the version, and waits until its users get it."""
        aliases = {alias["alias"]: alias for alias in self.get("/v1/aliases")["aliases"]}
        if aliases["champion"]["version"] != version or aliases["champion"]["follows"]:
            self.post("/v1/releases", {"kind": "pin", "alias": "champion", "version": version, "reason": "control"})
        self.wait_for_answers(version)

    def wait_for_answers(self, version: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.query(ANSWERED, {"version": version})[0]["answered"]:
            if time.monotonic() > deadline:
                raise SystemExit(f"no user of champion gets version {version}")
            time.sleep(LOOK_EVERY_SECONDS)

    def propose(self, version: int, steps: dict, reason: str) -> str:
        return self.post("/v1/canaries", {"version": version, "strategy": steps, "reason": reason})["id"]

    def decided(self, canary_id: str, args: argparse.Namespace) -> dict:
        """The canary as soon as it is not under way any more."""
        deadline = time.monotonic() + args.timeout + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            canary = self.get(f"/v1/canaries/{canary_id}")
            if canary["state"] not in ("proposed", "gated", "shadow", "canary"):
                return canary
            time.sleep(LOOK_EVERY_SECONDS)
        raise SystemExit(f"the canary {canary_id} is still {canary['state']}")

    def query(self, sql: str, values: dict) -> list[dict]:
        names = [part for name, value in values.items() for part in ("-v", f"{name}={value}")]
        text = f"select coalesce(json_agg(found), '[]') from ({sql}) found"
        done = subprocess.run([*self.psql, *names], input=text, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)

    def save_answers(self, file: pathlib.Path) -> None:
        """As CSV, with a header."""
        copy = f"copy ({ANSWERS}) to stdout with (format csv, header)"
        with file.open("w") as out:
            subprocess.run([*self.psql, "-c", copy], check=True, stdout=out)

    def get(self, path: str) -> dict:
        return self.call(urllib.request.Request(self.control + path))

    def post(self, path: str, body: dict) -> dict:
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        return self.call(urllib.request.Request(self.control + path, data, headers))

    def call(self, request: urllib.request.Request) -> dict:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{request.full_url}: {error.read().decode()}") from error


def write(args: argparse.Namespace, canaries: list[dict]) -> None:
    names = ("each", "kinds", "seed", "timeout", "rate", "developers", "shadow")
    options = {name: getattr(args, name) for name in names}
    kinds = [summary(kind, canaries) for kind in dict.fromkeys(canary["kind"] for canary in canaries)]
    report = {"machine": machine(), "options": options, "strategy": strategy(args), "canaries": canaries, "summary": kinds}
    args.json.write_text(json.dumps(report, indent=2) + "\n")


def machine() -> dict:
    names = [line.split(":", 1)[1].strip() for line in CPUS.read_text().splitlines() if line.startswith("model name")]
    return {"processor": names[0] if names else None, "cores": os.cpu_count()}


def summary(kind: str, canaries: list[dict]) -> dict:
    of_kind = [canary for canary in canaries if canary["kind"] == kind]
    seconds = [canary["seconds"] for canary in of_kind if canary["seconds"] is not None]
    before = [canary["users_before"] for canary in of_kind]
    return {
        "kind": kind,
        "canaries": len(of_kind),
        "right": sum(is_right(canary) for canary in of_kind),
        "held": sum(canary["decision"] == "held" for canary in of_kind),
        "difference": [difference(canary) for canary in of_kind],
        "seconds_median": statistics.median(seconds) if seconds else None,
        "seconds_max": max(seconds, default=None),
        "users_median": statistics.median(before),
        "users_max": max(before),
        "users_after_max": largest(canary["users_after"] for canary in of_kind),
        "last_after_seconds_max": largest(canary["last_after_seconds"] for canary in of_kind),
    }


def is_right(canary: dict) -> bool:
    if canary["kind"] != "better" and canary["reason"].startswith(UNSEEN):
        return True
    return canary["decision"] in RIGHT[canary["kind"]]


def difference(canary: dict) -> float | None:
    """Mean reward of the canary less that of `champion`, at the decision."""
    means = [(canary[side] or {}).get("mean_reward") for side in ("canary", "champion")]
    return None if None in means else means[0] - means[1]


def largest(values) -> float | None:
    return max((value for value in values if value is not None), default=None)


def line(canary: dict) -> str:
    return (
        f"{canary['kind']} {canary['strength']}: {canary['decision']} ({'right' if is_right(canary) else 'wrong'}) after "
        f"{cell(canary['seconds'])} s and {canary['users_before']} users, {cell(canary['users_after'])} users after it; "
        f"{canary['reason']}"
    )


def table(canaries: list[dict]) -> str:
    rows = [
        "| kind | right | held | reward less champion's | seconds: median, max | users before: median, max | after: users, seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(canary["kind"] for canary in canaries):
        of = summary(kind, canaries)
        known = [value for value in of["difference"] if value is not None]
        rows.append(
            f"| {kind} | {of['right']} of {of['canaries']} | {of['held']} | {signed(min(known, default=None))} to {signed(max(known, default=None))} "
            f"| {cell(of['seconds_median'])}, {cell(of['seconds_max'])} | {cell(of['users_median'])}, {of['users_max']} "
            f"| {cell(of['users_after_max'])}, {cell(of['last_after_seconds_max'], 1)} |"
        )
    return "\n".join(rows)


def cell(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


if __name__ == "__main__":
    main()
