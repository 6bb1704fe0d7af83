"""A stack of an older release, then this build on its state with a replica of that release beside it.

`make check NAME=upgrade OLD=FOLDER` runs it. Callers ask all the time, and say accept or reject: first the older stack, then
only the older replica. It must follow the versions that this build makes of its answers, and nothing may be lost.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import time

from restores import CONTROL, Load, Stack, answers, check, get, wait

REPLICA, PORT = "older", 8090


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("old", "springtide", "base", "cache", "work"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="with each of the two")
    args = parser.parse_args()
    args.seed = 0
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    new, args.springtide = args.springtide.resolve(), args.old.resolve()
    stack = Stack(args, work)
    print("before:", stack.command("--version").strip(), flush=True)
    before, replica = Load(), None
    try:
        stack.start()
        before.start()
        time.sleep(args.seconds)
        before.stop()
        stack.kill()

        old, stack.program[0] = stack.program[0], str(new)
        print("after: ", stack.command("--version").strip(), flush=True)
        stack.start()
        (head,) = stack.rows("select max(serial) from version")
        first = get(f"{CONTROL}/v1/ledger")["generations"]
        config = work / "older.toml"
        config.write_text(
            stack.config.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{PORT}")
            + f'\n[serve]\nreplica = "{REPLICA}"\nstate_dir = "{work}/older"\n'
        )
        with (work / "older.log").open("w") as log:
            replica = subprocess.Popen([old, "--config", config, "serve"], stdout=log, stderr=log)
        beside = Load(f"http://127.0.0.1:{PORT}")
        wait("the older replica answers", lambda: answers(beside.serve), stack)
        stack.command("sampler", "add", "--name", REPLICA, "--key", work / "older/sampler.key")
        beside.start()
        time.sleep(args.seconds)
        beside.stop()
        of_replica = f"from generation where replica = '{REPLICA}'"
        (served,) = stack.rows(f"select count(*) {of_replica}")
        (versions,) = stack.rows(f"select count(distinct version) {of_replica} and version > {head}")
        (trained,) = stack.rows(
            f"select count(*) from trajectory_use where purpose = 'trained' and generation_id in (select id {of_replica})"
        )
        beside.acknowledged += before.acknowledged
        beside.refused += before.refused
        report = {
            "generations_before": first,
            "of_older_replica": {"generations": int(served), "newer_versions": int(versions), "trained": int(trained)},
            **check(stack, beside),
        }
    finally:
        if replica is not None:
            replica.kill()
        stack.kill()
    print(json.dumps(report, indent=1))
    wrong = {name: report[name] for name in ("lost", "refused", "trained_twice") if report[name]}
    if wrong or not report["balanced"] or int(trained) == 0 or int(versions) < 2:
        raise SystemExit(f"wrong: {wrong}; the stack's files are in {work}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
