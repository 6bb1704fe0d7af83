"""What the plugins for engines share: what a worker asks its follower, and weights that are read and checked before any
is written."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from springtide._artifact import ArtifactError, Checkpoint, Patch

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

    def versions(self) -> dict[str, Any]:
        """The content hashes `from` and `to`, the names `changed`, and `tensors`: dtype and shape by name. From now on
        the follower waits for this worker."""
        said = self._send("", None, SOON)
        try:
            versions: dict[str, Any] = json.loads(said)
        except ValueError:
            versions = {}
        if versions.get("format") != FORMAT:
            raise ArtifactError(f"{self.url} is no follower of the format {FORMAT}: use the same release on both sides")
        return versions

    def patch(self, parts: list[dict[str, Any]], versions: dict[str, Any]) -> Patch:
        """What changes in these parts. Its tensors are named by their numbers."""
        patch = Patch.from_bytes(self._send("/patch", parts))
        if (patch.from_root, patch.to_root) != (versions["from"], versions["to"]):
            raise ArtifactError(f"the patch leads from {patch.from_root} to {patch.to_root}")
        return patch

    def end(self, failed: str | None = None) -> None:
        """The worker is ready, or why it is not."""
        self._send("/end", {"failed": failed})

    def held(self, parts: list[dict[str, Any]]) -> None:
        """What the worker holds: parts with the `sha256` of each."""
        self._send("/held", parts)

    def _send(self, what: str, body: Any, timeout: float = TIMEOUT) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + what + self._query, data, {"content-type": "application/json"})
            with self._opener.open(request, timeout=timeout) as answer:
                received: bytes = answer.read()
                return received
        except urllib.error.HTTPError as refused:
            raise ArtifactError(f"the follower refuses: {refused.read(1000).decode(errors='replace')}") from refused
        except (ValueError, http.client.HTTPException) as error:
            raise ArtifactError(f"{self.url} is no follower: {error}") from error


def check_start(holds: str | None, start: str | None) -> None:
    """Raises `ArtifactError` unless the version `holds` (None: unknown) is the one that a patch starts from."""
    if start is None or start != holds:
        raise ArtifactError(f"the server holds version {holds}, and the patch starts from {start}: load a folder first")


def stage_folder(path: str | os.PathLike[str], end: str | None = None) -> Checkpoint:
    """Opens a folder of all weights, and checks its content hash if the caller names it.

    Raises `ArtifactError` or `OSError`; then nothing has changed.
    """
    checkpoint = Checkpoint.open(path)
    if end is not None:
        checkpoint.verify(end)
    return checkpoint
