"""Runs the tests of a task on the function that a model wrote, away from everything else.

`bwrap` (bubblewrap) gives the program no network, no files of this machine but Python itself, no
other processes to see, and limits on time and memory.
"""

import ast
import functools
import json
import os
import resource
import subprocess
import sys

SECONDS_MAX = 5
MEMORY_BYTES_MAX = 512 << 20

#: Reads the function and the calls, and prints their results. It knows no expected result.
CALLS = """
import json, sys
given = json.load(sys.stdin)
names = {}
exec(given["source"], names)
print(json.dumps([eval(call, names) for call in given["calls"]]))
"""


def cases(answer: str) -> list[tuple[str, object]]:
    """The calls of the assertions, and their expected results. Pure."""
    asserted = [node.test for node in ast.parse(answer).body if isinstance(node, ast.Assert)]
    return [(ast.unparse(test.left), ast.literal_eval(test.comparators[0])) for test in asserted]


def score(answer: str, reply: str) -> float:
    """1 if all tests pass, otherwise 0. Results are compared here, where the reply cannot reach them."""
    if not reply.startswith("def f("):
        return 0.0
    calls, expected = zip(*cases(answer))
    try:
        ended = subprocess.run(
            command(),
            input=json.dumps({"source": reply, "calls": calls}),
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            preexec_fn=limit,
        )
        return float(json.loads(ended.stdout) == list(expected))
    except (subprocess.TimeoutExpired, ValueError):
        return 0.0


@functools.cache
def command() -> tuple[str, ...]:
    """Python in a sandbox, with `CALLS`."""
    python = os.path.realpath(sys.executable)
    # where this Python and its standard library are, and the system's shared libraries
    shown = {path for path in (sys.base_prefix, "/usr", "/lib", "/lib64") if os.path.exists(path)}
    binds = [word for path in sorted(shown) for word in ("--ro-bind", path, path)]
    return ("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", *binds, python, "-I", "-S", "-c", CALLS)


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS_MAX, SECONDS_MAX))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
