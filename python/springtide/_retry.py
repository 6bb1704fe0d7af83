"""When to send a request again, and the ids that make it safe."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

#: The server has not done what was asked for, and may do it later.
REFUSED_FOR_NOW = frozenset({429, 503})
#: The same, or nobody knows what was done.
MAY_SUCCEED_LATER = frozenset({408, 429, 500, 502, 503, 504, 507})


@dataclass(frozen=True)
class Retries:
    """How often, and how long, a request is repeated.

    The delay before the n-th repetition is random, between 0 and `first_delay_seconds` · 2ⁿ⁻¹ or
    `delay_seconds_max`. So clients that failed together do not come back together. `Retry-After`
    of the server is added to it.
    """

    #: Requests in all. 1: no repetition.
    attempts_max: int = 8
    first_delay_seconds: float = 0.5
    delay_seconds_max: float = 20.0
    #: No repetition starts later than this after the first attempt.
    seconds_max: float = 120.0

    def delay(self, attempt: int, retry_after_seconds: float | None, random: Callable[[], float]) -> float:
        """Seconds to wait after attempt number `attempt`, from 1. `random` gives 0 to 1."""
        # a large power of two is no float
        longest = min(self.delay_seconds_max, self.first_delay_seconds * 2.0 ** min(attempt - 1, 60))
        jitter = longest * random()
        return jitter if retry_after_seconds is None else retry_after_seconds + jitter


class Attempts:
    """The attempts of one request."""

    def __init__(self, retries: Retries, clock: Callable[[], float] = time.monotonic) -> None:
        self._retries = retries
        self._clock = clock
        self._started = clock()
        self._made = 0

    def next_delay(self, retry_after_seconds: float | None) -> float | None:
        """Seconds to wait after an attempt that failed. None: do not try again."""
        self._made += 1
        if self._made >= self._retries.attempts_max:
            return None
        delay = self._retries.delay(self._made, retry_after_seconds, random.random)
        passed = self._clock() - self._started
        return None if passed + delay > self._retries.seconds_max else delay


def retry_after(value: str | None) -> float | None:
    """The seconds of a `Retry-After` header. Our servers send no dates; a date counts as none."""
    try:
        seconds = float(value) if value is not None else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < float("inf") else None


def uuid7() -> UUID:
    """A new UUIDv7 (RFC 9562): milliseconds since 1970, then random bits."""
    milliseconds = time.time_ns() // 1_000_000
    bits = int.from_bytes(os.urandom(10), "big")
    high, low = bits >> 62 & 0xFFF, bits & (1 << 62) - 1
    return UUID(int=milliseconds << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low)
