#!/usr/bin/env python3
"""Starts an offline GRPO run and follows it until it ends.

What it shows
    POST /v1/runs with tasks and a grader, GET /v1/runs/{id} and its events while it runs, and the version
    that it made. No user sees that version until somebody promotes it.

How to run it
    make up                              # in another terminal, until it says "Springtide is up."
    python3 examples/grpo_run.py         # about a minute on two idle cores; --steps 1 is shorter

What you see
    run 019aa5e6-2f40-7abc-8def-0123456789ab is queued
    2026-11-22T10:00:02Z  info   …       the run's events, oldest first
    succeeded: 2 steps on line run-…; its last version is 19
    to give it to users:
      springtide release promote 19 --reason "reads well"

    A step needs a group whose rollouts differ in reward. If the model always gets a task right, or never,
    the run draws other tasks, and ends as failed with that reason when no task is left that differs.

Needs Python 3.9 or newer; the standard library is enough.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request

CONTROL = os.environ.get("SPRINGTIDE_CONTROL", "http://127.0.0.1:8002")
API_KEY = os.environ.get("SPRINGTIDE_API_KEY")
ENDED = ("succeeded", "failed", "cancelled")

# Lines of Rust; <|cut|> marks the cursor of the demo's model. The answer is the rest of the line.
TASKS = [
    {"prompt": "    pub fn is_empty(&self) -> <|cut|>", "answer": "bool {"},
    {"prompt": "    pub fn len(&self) -> <|cut|>", "answer": "usize {"},
    {"prompt": "#[derive(Debug, <|cut|>", "answer": "Clone)]"},
    {"prompt": "impl Default for Options {\n    fn default() -> <|cut|>", "answer": "Self {"},
    {"prompt": "use std::collections::<|cut|>", "answer": "HashMap;"},
    {"prompt": "        match self {\n            Some(value) => <|cut|>", "answer": "value,"},
]


def call(method, path, body=None):
    """One JSON request to the control role."""
    headers = {"content-type": "application/json"}
    if API_KEY:
        headers["authorization"] = f"Bearer {API_KEY}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{CONTROL}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as problem:
        sys.exit(f"{path}: {problem.code} {problem.read().decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{CONTROL}: {error}; is the stack up?")


def main():
    parser = argparse.ArgumentParser(description="An offline GRPO run against a running stack.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=900, help="seconds to wait for the run")
    args = parser.parse_args()

    run = call("POST", "/v1/runs", {
        "kind": "grpo", "grader": "prefix_match", "group_size": args.group_size, "tasks_per_step": 2,
        "steps": args.steps, "max_tokens": 8, "tasks": TASKS,
    })
    print(f"run {run['id']} is {run['status']}")

    seen = set()
    deadline = time.monotonic() + args.timeout
    while True:
        status = call("GET", f"/v1/runs/{run['id']}")
        for event in reversed(call("GET", f"/v1/runs/{run['id']}/events?limit=100")["data"]):
            if event["id"] not in seen:
                seen.add(event["id"])
                print(f"{event['at'][:19]}Z  {event['level']:<5}  {event['message']}")
        if status["status"] in ENDED:
            break
        if status["status"] == "paused":
            sys.exit(f"paused: {status['reason']}; `springtide run resume {run['id']}` continues")
        if time.monotonic() > deadline:
            sys.exit(f"still {status['status']} after {args.timeout:.0f} s")
        time.sleep(1)

    if status["status"] != "succeeded":
        sys.exit(f"{status['status']}: {status['reason']}")
    version = status["head"]
    print(f"succeeded: {status['steps_done']} steps on line {status['line']}; its last version is {version}")
    print(f'to give it to users:\n  springtide release promote {version} --reason "reads well"')


if __name__ == "__main__":
    main()
