"""A follower for the workers of an engine, as `serving::remote::update::workers` is."""

import hashlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from springtide import ArtifactError, Checkpoint, Patch


class Exchange:
    """One update of an engine to `checkpoint`; with no `patch` to all its weights, or the proof that it holds them."""

    def __init__(self, patch: Patch | None, checkpoint: Checkpoint) -> None:
        self.patch, self.checkpoint = patch, checkpoint
        #: Of each worker that asked: its parts, and once it is done how it ended: "ready", why not, or wrong tensors.
        self.parts: dict[str, list[dict]] = {}
        self.ended: dict[str, str | list[str]] = {}
        #: Bytes of each worker's patch.
        self.bytes: dict[str, int] = {}
        self._changed = threading.Condition()

    def versions(self, worker: str) -> dict:
        self.parts[worker] = []
        tensors = {name: (one.dtype, one.shape, one.digest()) for name, one in ((name, self.checkpoint[name]) for name in self.checkpoint)}
        start = None if self.patch is None else self.patch.from_root
        changed = [] if self.patch is None else self.patch.keys()
        return {"format": "springtide-workers-1", "from": start, "to": self.checkpoint.root(), "changed": changed, "tensors": tensors}

    def own_patch(self, worker: str, parts: list[dict]) -> bytes:
        self.parts[worker] = parts
        own = self.patch.of_worker(json.dumps(parts))
        self.bytes[worker] = len(own)
        return own

    def all_weights(self) -> bytes:
        import numpy as np

        return b"".join(np.ascontiguousarray(self.checkpoint[name].numpy()).tobytes() for name in self.checkpoint)

    def held(self, worker: str, parts: list[dict]) -> None:
        import torch

        self.parts[worker] = parts
        wrong = set()
        for part in parts:
            whole = self.checkpoint[part["tensor"]].torch().contiguous()
            axes = part["axes"]
            own = whole.as_strided([axis[0] for axis in axes], [axis[1] for axis in axes], part["first"])
            bits = own.contiguous().reshape(-1).view(torch.uint8).numpy()
            if hashlib.sha256(bits).hexdigest() != part["sha256"]:
                wrong.add(part["tensor"])
        self.end(worker, sorted(wrong))

    def end(self, worker: str, how: str | list[str]) -> None:
        """What a worker holds counts more than that it is ready."""
        with self._changed:
            self.ended.setdefault(worker, how)
            self._changed.notify_all()

    def wait(self) -> list[str | list[str]]:
        """How each worker that has asked has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.parts.keys() <= self.ended.keys(), 120)
        return list(self.ended.values())


class Follower:
    """Listens until it is closed."""

    def __init__(self) -> None:
        self._open: dict[str, Exchange] = {}
        follower = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, body: object) -> None:
                url = urllib.parse.urlsplit(self.path)
                worker = urllib.parse.parse_qs(url.query)["worker"][0]
                _, token, *what = url.path.split("/")
                try:
                    status, answer = 200, follower._said(follower._open[token], what, worker, body)
                except (ArtifactError, KeyError) as refused:
                    status, answer = 404, str(refused).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _said(self, exchange: Exchange, what: list[str], worker: str, body: object) -> bytes:
        match what:
            case []:
                return json.dumps(exchange.versions(worker)).encode()
            case ["weights"]:
                return exchange.all_weights()
            case ["patch"]:
                return exchange.own_patch(worker, body)
            case ["held"]:
                exchange.held(worker, body)
            case ["end"]:
                exchange.end(worker, body["failed"] or "ready")
        return b""

    def open(self, exchange: Exchange) -> str:
        """The URL for the workers."""
        token = str(len(self._open))
        self._open[token] = exchange
        return f"http://127.0.0.1:{self._server.server_port}/{token}"

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
