"""What the plugins for engines share: what a worker asks its follower."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import secrets
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from springtide._arrays import torch_dtype
from springtide._artifact import ArtifactError, Patch, Tensor

if TYPE_CHECKING:
    import torch

#: Seconds without a byte from the follower, and until it says which versions there are: a worker waits for that.
TIMEOUT = 60
SOON = 10
#: Version of the requests (`serving::remote::update::workers`).
FORMAT = "springtide-workers-1"
#: Of this process. Containers may share names of hosts.
WORKER = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Follower:
    """What one worker asks during one update. The follower (`serve` or `follow`) made the URL for it.

    `of` workers hold the model together, as the replica `replica`; 0: not known. Raises `ArtifactError` with the
    follower's reason, and `OSError` if it does not answer.
    """

    def __init__(self, url: str, replica: int = 0, of: int = 0) -> None:
        self.url = url
        self._query = "?" + urllib.parse.urlencode({"worker": WORKER, "replica": replica, "of": of})
        # it is in the cluster, never behind a proxy
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def versions(self, to: str | None = None) -> dict[str, Any]:
        """The content hashes `from` and `to`, the names `changed`, and `tensors`: dtype, shape and digest by name. From
        now on the follower waits for this worker. Raises `ArtifactError` if they do not lead `to` this version."""
        said = self._send("", None, SOON)
        try:
            versions: dict[str, Any] = json.loads(said)
        except ValueError:
            versions = {}
        if versions.get("format") != FORMAT:
            raise ArtifactError(f"{self.url} is no follower of the format {FORMAT}: use the same release on both sides")
        if to not in (None, versions["to"]):
            raise ArtifactError(f"the follower has version {versions['to']}, not {to}")
        return versions

    def patch(self, parts: list[dict[str, Any]], versions: dict[str, Any]) -> Patch:
        """What changes in these parts. Its tensors are named by their numbers."""
        patch = Patch.from_bytes(self._send("/patch", parts))
        if (patch.from_root, patch.to_root) != (versions["from"], versions["to"]):
            raise ArtifactError(f"the patch leads from {patch.from_root} to {patch.to_root}")
        return patch

    def weights(self, versions: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, in the order of their names, as a loader takes them. Each is compared with its digest."""
        with self._opened("/weights", None, TIMEOUT) as answer:
            for name, (dtype, shape, digest) in versions["tensors"].items():
                tensor = Tensor.from_bytes(dtype, shape, answer.read(math.prod(shape) * torch_dtype(dtype).itemsize))
                if tensor.digest() != digest:
                    raise ArtifactError(f"the follower sent other bytes than {name} has")
                yield name, tensor.torch()

    def end(self, failed: str | None = None) -> None:
        """The worker is ready, or why it is not."""
        self._send("/end", {"failed": failed})

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Tells the follower how this ends. It may need no answer any more."""
        failed = None
        try:
            yield
        except Exception as error:
            failed = str(error)
            raise
        finally:
            with contextlib.suppress(ArtifactError, OSError):
                self.end(failed)

    def held(self, parts: list[dict[str, Any]]) -> None:
        """What the worker holds: parts with the `sha256` of each."""
        self._send("/held", parts)

    def _send(self, what: str, body: Any, timeout: float = TIMEOUT) -> bytes:
        with self._opened(what, body, timeout) as answer:
            received: bytes = answer.read()
            return received

    @contextlib.contextmanager
    def _opened(self, what: str, body: Any, timeout: float) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + what + self._query, data, {"content-type": "application/json"})
            with self._opener.open(request, timeout=timeout) as answer:
                yield answer
        except ArtifactError:
            raise
        except urllib.error.HTTPError as refused:
            raise ArtifactError(f"the follower refuses: {refused.read(1000).decode(errors='replace')}") from refused
        except (ValueError, http.client.HTTPException) as error:
            raise ArtifactError(f"{self.url} is no follower: {error}") from error


def check_start(holds: str | None, start: str | None) -> None:
    """Raises `ArtifactError` unless the version `holds` (None: unknown) is the one that a patch starts from."""
    if start is None or start != holds:
        raise ArtifactError(f"the server holds version {holds}, and the patch starts from {start}: load all first")
