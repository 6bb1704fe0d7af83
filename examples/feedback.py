#!/usr/bin/env python3
"""A web backend that serves completions from Springtide and reports what its users did with them.

What it shows
    POST /complete  {"prompt": "…", "user": "ada"}           -> {"text", "generation_id", "show"}
    POST /outcome   {"generation_id": "…", "accepted": true}  -> {"feedback_id"}
                    with "kept": 12 if the user kept the first 12 characters alone

    The browser keeps the generation_id and sends it back with the user's decision. The backend names
    each feedback event with an idempotency key, so it can repeat the request until it is acknowledged.

How to run it
    make up                                   # in another terminal, until it says "Springtide is up."
    python3 examples/feedback.py --once       # one request and one feedback event, then exit
    python3 examples/feedback.py              # the backend on http://127.0.0.1:8080
    python3 examples/feedback.py --openai     # the same with OpenAI's client (pip install openai)

    curl -s http://127.0.0.1:8080/complete -d '{"prompt": "fn main() {\\n    let x = <|cut|>", "user": "ada"}'

What you see with --once
    shown by version 17 (champion): 'Vec::new();'
    feedback 019aa5e6-2f41-7abc-8def-0123456789ab is acknowledged
    or "the policy declined": then there is nothing to show, and no feedback to send.

Needs Python 3.9 or newer; the standard library is enough.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVE = os.environ.get("SPRINGTIDE_SERVE", "http://127.0.0.1:8000")
INGEST = os.environ.get("SPRINGTIDE_INGEST", "http://127.0.0.1:8001")
API_KEY = os.environ.get("SPRINGTIDE_API_KEY")

# Statuses after which the same request may succeed later.
TRY_AGAIN = (408, 429, 500, 502, 503, 507)
TRIES_MAX = 8


def post(url, body, headers=()):
    """Sends JSON until it is answered for good. The caller makes the request safe to repeat."""
    headers = {"content-type": "application/json", **dict(headers)}
    if API_KEY:
        headers["authorization"] = f"Bearer {API_KEY}"
    data = json.dumps(body).encode()
    for attempt in range(1, TRIES_MAX + 1):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as problem:
            detail = problem.read().decode(errors="replace")
            if problem.code not in TRY_AGAIN or attempt == TRIES_MAX:
                raise RuntimeError(f"{url}: {problem.code} {detail}") from problem
            time.sleep(float(problem.headers.get("retry-after") or 1))
        except OSError as error:  # the connection broke: it is unknown whether the request arrived
            if attempt == TRIES_MAX:
                raise RuntimeError(f"{url}: {error}") from error
            time.sleep(1)


def complete(prompt, user):
    """One choice. `user` decides the arm, so the same user always gets the same one."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "user": user}
    return post(f"{SERVE}/v1/completions", body)["choices"][0]


def complete_with_openai(prompt, user):
    """The same with OpenAI's client. Springtide's fields are attributes beside OpenAI's."""
    from openai import OpenAI  # optional: pip install openai

    client = OpenAI(base_url=f"{SERVE}/v1", api_key=API_KEY or "unused")
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=16, user=user)
    return answer.choices[0].model_dump()


def feed_back(generation_id, accepted, kept=None):
    """Reports the user's decision. Sending the same decision again is a no-op; another one is a 409."""
    said = {"kept_characters": kept} if kept is not None else {}
    said["accept"] = accepted  # last: some surfaces close with it
    for metric, value in said.items():
        body = {"generation_id": generation_id, "metric_name": metric, "value": value}
        answer = post(f"{INGEST}/v1/feedback", body, {"idempotency-key": f"{metric}-{generation_id}"})
    return answer["feedback_id"]


class Backend(BaseHTTPRequestHandler):
    ask = staticmethod(complete)

    def do_POST(self):
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
            if self.path == "/complete":
                choice = self.ask(body["prompt"], body["user"])
                show = not choice["declined"]
                self.reply(200, {"text": choice["text"], "generation_id": choice["generation_id"], "show": show})
            elif self.path == "/outcome":
                said = feed_back(body["generation_id"], bool(body["accepted"]), body.get("kept"))
                self.reply(200, {"feedback_id": said})
            else:
                self.reply(404, {"error": "POST /complete or /outcome"})
        except (KeyError, TypeError, ValueError) as error:
            self.reply(400, {"error": f"bad request: {error!r}"})
        except RuntimeError as error:
            self.reply(502, {"error": str(error)})

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass  # the default writes every request to standard error


def once(ask):
    choice = ask("    /// Returns the number of elements.\n    pub fn len(&self) -> <|cut|>", "ada")
    if choice["declined"]:
        print(f"the policy declined (version {choice['version']}, {choice['arm']}): nothing to show")
        return
    print(f"shown by version {choice['version']} ({choice['arm']}): {choice['text']!r}")
    accepted = choice["text"].strip().startswith("usize")  # a user would decide this
    print(f"feedback {feed_back(choice['generation_id'], accepted)} is acknowledged")


def main():
    parser = argparse.ArgumentParser(description="A backend that reports feedback to Springtide.")
    parser.add_argument("--once", action="store_true", help="one request and one feedback event, then exit")
    parser.add_argument("--openai", action="store_true", help="ask through OpenAI's client")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args()
    ask = complete_with_openai if args.openai else complete
    if args.once:
        once(ask)
        return
    Backend.ask = staticmethod(ask)
    print(f"listening on http://127.0.0.1:{args.port}; Ctrl-C stops it")
    ThreadingHTTPServer(("127.0.0.1", args.port), Backend).serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        sys.exit(f"feedback.py: {error}")
