"""Runs the tests of a task on the function that a model wrote, away from everything else.

`bwrap` (bubblewrap) gives the program no network, no files of this machine but Python itself, no
other processes to see, and limits on time and memory.
"""

import functools
import os
import resource
import subprocess
import sys

SECONDS_MAX = 5
MEMORY_BYTES_MAX = 512 << 20

#: What the program prints after its last test.
PASSED = "passed"


def program(answer: str, reply: str) -> str:
    """The function, then its tests. Pure."""
    return f"{reply}\n{answer}\nprint({PASSED!r})\n"


def score(answer: str, reply: str) -> float:
    """1 if all tests pass, otherwise 0."""
    if PASSED in reply or not reply.startswith("def f("):
        return 0.0
    try:
        ended = subprocess.run(
            command(), input=program(answer, reply), capture_output=True, text=True, timeout=SECONDS_MAX, preexec_fn=limit
        )
    except subprocess.TimeoutExpired:
        return 0.0
    return float(ended.returncode == 0 and ended.stdout.strip() == PASSED)


@functools.cache
def command() -> tuple[str, ...]:
    """Python in a sandbox, reading its program from standard input."""
    python = os.path.realpath(sys.executable)
    # where this Python and its standard library are, and the system's shared libraries
    shown = {path for path in (sys.base_prefix, "/usr", "/lib", "/lib64") if os.path.exists(path)}
    binds = [word for path in sorted(shown) for word in ("--ro-bind", path, path)]
    return ("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", *binds, python, "-I", "-S", "-")


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS_MAX, SECONDS_MAX))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
