"""A real HTTP server on this machine that fails on purpose. Each answer is used once, in order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What to do with one request."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    #: Read the request and close the connection without an answer.
    hang_up: bool = False
    #: Send these bytes as a stream of events, then close.
    stream: bytes | None = None
    #: Announce more bytes of the stream than are sent.
    cut_off: bool = False


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: Any


class Server:
    """Requests that came, and the answers that are left."""

    def __init__(self, answers: list[Answer]) -> None:
        self.received: list[Received] = []
        self.url = ""
        self._answers = list(answers)
        self._lock = threading.Lock()

    def take(self, received: Received) -> Answer:
        with self._lock:
            self.received.append(received)
            return self._answers.pop(0) if self._answers else Answer(500, {"title": "no answer is left"})


@contextmanager
def serving(*answers: Answer) -> Iterator[Server]:
    server = Server(list(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def do_PUT(self) -> None:
            self.answer(self.rfile.read(int(self.headers["content-length"])))

        def answer(self, body: Any) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = server.take(Received(self.path, headers, body))
            self.close_connection = True
            if answer.hang_up:
                return
            data = answer.stream if answer.stream is not None else json.dumps(answer.body).encode()
            if answer.status == 204:
                data = b""
            self.send_response(answer.status)
            self.send_header("connection", "close")
            self.send_header("content-length", str(len(data) + (100 if answer.cut_off else 0)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
