#!/usr/bin/env python3
"""Asks for completions and gives feedback until SIGTERM, one request at a time, as one user after another. Then prints what
was acknowledged and what failed, as JSON. A request is tried again as the guide says: after 429, 5xx or no answer.

    load.py SERVE INGEST KEY_FILE OUT
"""
import json
import pathlib
import signal
import sys
import time
import urllib.error
import urllib.request
import uuid

serve, ingest, key_file, out = sys.argv[1:]
key = pathlib.Path(key_file).read_text().strip()
stopped = False
count = {"requests": 0, "refused": 0, "unreachable": 0, "failed": 0, "feedback": 0}
acknowledged = []


def uuid7():
    random = uuid.uuid4().int & (1 << 80) - 1
    return str(uuid.UUID(int=(time.time_ns() // 1_000_000) << 80 | random & ~(0xF << 76) & ~(3 << 62) | 7 << 76 | 2 << 62))


def stop(*_):
    global stopped
    stopped = True


def post(url, body):
    """The answer, or None if no try succeeded within a minute. Counts tries that were refused (503, 429) or not answered."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        request = urllib.request.Request(url, json.dumps(body).encode(), {
            "content-type": "application/json", "authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                print(f"{url}: {error.code} {error.read()[:300]!r}", file=sys.stderr)
                return None
            count["refused"] += 1
        except (OSError, ValueError):
            count["unreachable"] += 1
        time.sleep(0.2)
    return None


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
while not stopped:
    count["requests"] += 1
    answer = post(f"{serve}/v1/completions", {"model": "demo", "max_tokens": 16, "user": f"user-{count['requests'] % 50}",
                                              "prompt": "fn main() {\n    let x = <|cut|>"})
    if not answer:
        count["failed"] += 1
        continue
    generation = answer["choices"][0]["generation_id"]
    acknowledged.append(generation)
    feedback = {"id": uuid7(), "generation_id": generation, "metric_name": "accept", "value": True}
    if post(f"{ingest}/v1/feedback", feedback):
        count["feedback"] += 1
    else:
        count["failed"] += 1
    time.sleep(0.05)
pathlib.Path(out).write_text(json.dumps({**count, "acknowledged": acknowledged}))
print(json.dumps(count))
sys.exit(count["failed"] > 0 or not acknowledged)
