"""A virtual machine for each attempt, from `springtide world` (docs/worlds.md).

`SPRINGTIDE_WORLD` is its address, `SPRINGTIDE_WORLD_KEY` its key if it has one.
"""

import contextlib
import functools
import os
import time
from typing import Any

import httpx

from tables import tasks

#: A world that this process does not end, because it was killed, lives this long.
TTL_SECONDS = 300
#: For one statement: much longer than any solution takes, also where processors are emulated.
WALL_MS_MAX = 30_000
#: While all worlds are in use.
WAIT_SECONDS_MAX = 120


class WorldError(Exception):
    """The world is lost or was refused, and so nothing is known about the statement."""


class World:
    """A fork of the snapshot, for as long as a `with` lasts. Its Postgres has the tables of tasks.py.

    A statement that takes too long raises `TimeoutError`: the machine may be what is slow.
    """

    def __enter__(self) -> "World":
        until = time.monotonic() + WAIT_SECONDS_MAX
        while True:
            try:
                made = client().post("/v1/worlds", json={"ttl_seconds": TTL_SECONDS})
            except httpx.ConnectError as error:
                raise WorldError(f"nothing answers at {client().base_url}: start `springtide world`") from error
            if made.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > until:
                break
            time.sleep(float(made.headers.get("retry-after", 1)))
        self._path = f"/v1/worlds/{self._answer(made)['id']}"
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(httpx.HTTPError):  # else it ends by itself
            client().delete(self._path)

    def psql(self, query: str) -> str | None:
        """What `psql` prints for a statement; None if it fails."""
        program = ["psql", "-XqAt", "-v", "ON_ERROR_STOP=1"]
        request = {"program": program, "stdin": query, "limits": {"wall_ms": WALL_MS_MAX}}
        ran = self._answer(client().post(f"{self._path}/run", json=request))
        if ran["ended"] == {"exceeded": "wall"}:
            raise TimeoutError(f"a statement took more than {WALL_MS_MAX} ms")
        # bytes that are no UTF-8 come as an object
        printed = ran["stdout"] if isinstance(ran["stdout"], str) else None
        return printed.removesuffix("\n") if printed is not None and ran["ended"] == {"exited": 0} else None

    @staticmethod
    def _answer(response: httpx.Response) -> dict[str, Any]:
        if response.is_error:
            raise WorldError(f"springtide world: {response.status_code} {response.text}")
        return response.json()


@functools.cache
def client() -> httpx.Client:
    key = os.environ.get("SPRINGTIDE_WORLD_KEY")
    return httpx.Client(
        base_url=os.environ.get("SPRINGTIDE_WORLD", "http://127.0.0.1:8006"),
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=WALL_MS_MAX / 1000 + 60,
        limits=httpx.Limits(max_connections=None),
    )


def score(answer: str, reply: str) -> float:
    """tasks.py's score of a reply, in a world of its own."""
    with World() as world:
        return tasks.score(answer, reply, world.psql)
