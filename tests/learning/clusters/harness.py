"""A harness with streamed turns. Arguments: the run, and the file to note turns and rewards in."""

import json
import pathlib
import sys
import time
from typing import TextIO

import httpx
import springtide

TURNS = 4
TOKENS = 16
WORKERS = 2


def turn(client: httpx.Client, lease: springtide.Lease, prompt: str) -> str:
    body = {"model": lease.model, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    text = ""
    with client.stream("POST", f"{lease.base_url}/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += choices[0]["text"] if choices else ""
    return text


def main() -> None:
    run, notes = sys.argv[1], pathlib.Path(sys.argv[2]).open("a", buffering=1)
    client = httpx.Client()

    def play(lease: springtide.Lease) -> float:
        text, seconds = lease.task["prompt"], []
        for _ in range(TURNS):
            began = time.monotonic()
            text += turn(client, lease, text) + "\n"
            seconds.append(time.monotonic() - began)
        note(notes, lease.id, seconds)
        letters = [letter for letter in text if letter.isalpha()]
        return sum(letter.lower() <= "m" for letter in letters) / max(len(letters), 1)

    springtide.Run(run).work(play, workers=WORKERS)


def note(notes: TextIO, rollout: str, seconds: list[float]) -> None:
    notes.write(json.dumps({"rollout": rollout, "turn_seconds": seconds}) + "\n")


main()
