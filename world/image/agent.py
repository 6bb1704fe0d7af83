#!/usr/bin/python3 -SE
"""The agent in a world: the only program that speaks with the host.

It is the first process of the machine. It starts the world's services, then answers the host's
requests on a virtio-serial port, one at a time. Each message is four bytes of length, big-endian,
and that many bytes of JSON. Bytes in JSON are base64.

    {"do": "hello"}                          -> {"ok": true}, once the services answer
    {"do": "begin", "id", "seed", "now_ns"}  -> {"ok": true}: a fork gets its own name, clock, entropy
    {"do": "run", "program", "stdin", "files", "limits"} -> {"ended", "stdout", "stderr", "wall_ms"}

A request that cannot be done answers {"error": text}. The host does not trust this program: what
runs in the world may have taken it over.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time

START, READY = "/etc/springtide/start", "/etc/springtide/ready"
WORK = "/work"
CGROUPS = "/sys/fs/cgroup"
USER = 1000
MESSAGE_BYTES_MAX = 64 << 20
READY_SECONDS_MAX = 120
# Room that programs leave for the kernel, the services and this agent.
RESERVED_BYTES = 96 << 20
POLL_SECONDS = 0.02
# How long a session in Postgres may take to roll back before it is killed.
SESSIONS_SECONDS = 5
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
ENVIRONMENT = {
    "PATH": "/usr/lib/postgres/bin:/usr/bin:/bin",
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "PGHOST": "/run/postgresql",
    "PGUSER": "world",
    "PGDATABASE": "world",
}


class Refused(Exception):
    """A request that cannot be done; the text says what to do."""


def prepare():
    """What the services and programs find."""
    for path in ("/tmp", "/run", "/dev/shm", WORK):
        os.makedirs(path, exist_ok=True)
    for path in ("/tmp", "/dev/shm"):
        os.chmod(path, 0o1777)
    os.chown(WORK, USER, USER)
    run("mount", "-t", "cgroup2", "cgroup2", CGROUPS)
    write(f"{CGROUPS}/cgroup.subtree_control", "+memory +pids +cpu")
    run("ip", "link", "set", "lo", "up")
    subprocess.run([START], env=ENVIRONMENT, stdin=subprocess.DEVNULL, check=True)
    ready = ready_until(time.monotonic() + READY_SECONDS_MAX)
    if not ready:
        raise SystemExit("the services of the world do not answer")


def run(*words):
    subprocess.run(["busybox", *words], check=True, stdin=subprocess.DEVNULL)


def ready_until(deadline):
    while time.monotonic() < deadline:
        if subprocess.run([READY], env=ENVIRONMENT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
            return True
        time.sleep(0.02)
    return False


def write(path, text):
    with open(path, "w") as file:
        file.write(str(text))


def read(path):
    with open(path) as file:
        return file.read()


def field(path, name):
    for line in read(path).splitlines():
        key, value = line.split()
        if key == name:
            return int(value)
    return 0


def begin(request):
    """A fork has the memory of its snapshot. Here it gets what must not be shared."""
    seed = base64.b64decode(request["seed"])
    with open("/dev/urandom", "wb", buffering=0) as device:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(device, RNDRESEEDCRNG)
    time.clock_settime_ns(time.CLOCK_REALTIME, request["now_ns"])
    socket.sethostname(request["id"])
    write("/etc/machine-id", request["id"].replace("-", "") + "\n")
    return {"ok": True}


def put_files(files):
    for name, text in files.items():
        parts = name.split("/")
        if not name or any(part in ("", ".", "..") for part in parts):
            raise Refused(f"{name!r} is no path inside the working directory: give a relative path without ..")
        folder = WORK
        for part in parts[:-1]:
            folder = os.path.join(folder, part)
            if not os.path.isdir(folder):
                os.mkdir(folder, 0o755)
        path = os.path.join(WORK, name)
        # A link that an earlier program left is replaced, not followed.
        if os.path.lexists(path):
            os.unlink(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64decode(text))


def as_user(work):
    """Calls `work` in a process of the programs' user, so that it can do no more than they can."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
            work()
            status = 0
        except BaseException as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return status == 0


class Group:
    """The control group of one command."""

    count = 0

    def __init__(self, limits):
        Group.count += 1
        self.path = f"{CGROUPS}/run-{Group.count}"
        os.mkdir(self.path)
        total = int(read("/proc/meminfo").split()[1]) << 10
        write(f"{self.path}/memory.max", min(limits["memory_bytes"], max(total - RESERVED_BYTES, 16 << 20)))
        write(f"{self.path}/memory.oom.group", 1)
        write(f"{self.path}/pids.max", limits["processes"])

    def enter(self):
        write(f"{self.path}/cgroup.procs", os.getpid())
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)

    def cpu_ms(self):
        return field(f"{self.path}/cpu.stat", "usage_usec") / 1000

    def out_of_memory(self):
        return field(f"{self.path}/memory.events", "oom_kill") > 0

    def end(self):
        """Kills what is left and removes the group."""
        write(f"{self.path}/cgroup.kill", 1)
        while field(f"{self.path}/cgroup.events", "populated"):
            reap()
            time.sleep(0.001)
        os.rmdir(self.path)
        end_sessions()


def end_sessions():
    """Ends what programs left running in Postgres. Its processes are in no command's control group."""
    deadline = time.monotonic() + SESSIONS_SECONDS
    while sessions := [pid for pid in os.listdir("/proc") if pid.isdigit() and is_session(pid)]:
        stop = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), stop)
        time.sleep(0.001)


def is_session(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(64).startswith(b"postgres: world ")
    except OSError:
        return False


def reap(wanted=None):
    """Buries the dead. Returns the status of the process `wanted`, if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == wanted:
            found = status


def perform(request):
    limits = request["limits"]
    if not request["program"]:
        raise Refused("program is empty: give a program and its arguments")
    if request["files"] and not as_user(lambda: put_files(request["files"])):
        raise Refused("a file could not be written: give relative paths without .., and leave room on the disk")
    group = Group(limits)
    try:
        return watch(request, limits, group)
    finally:
        group.end()


def watch(request, limits, group):
    stdin = memoryview(base64.b64decode(request["stdin"]))
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            request["program"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=WORK, env=ENVIRONMENT, preexec_fn=group.enter, start_new_session=True, bufsize=0,
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise Refused(f"{request['program'][0]!r} could not be started: {error}") from error
    texts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    out, err = texts
    into = process.stdin.fileno()
    open_pipes = {out, err}
    for pipe in (out, err, into):
        os.set_blocking(pipe, False)
    status, ended = None, None
    while ended is None:
        writable = [into] if into is not None else []
        readers, writers, _ = select.select(list(open_pipes), writable, [], POLL_SECONDS if status is None else 0)
        if writers:
            try:
                stdin = stdin[os.write(into, stdin[:65536]):]
            except BrokenPipeError:
                stdin = stdin[:0]
            if not stdin:
                process.stdin.close()
                into = None
        for pipe in readers:
            data = os.read(pipe, 65536)
            if not data:
                open_pipes.discard(pipe)
            texts[pipe] += data
            if len(texts[pipe]) > limits["output_bytes"]:
                ended = {"exceeded": "output"}
        if ended is not None:
            break
        if status is not None and not readers:
            # What it wrote before its end has been read. A process that it left may hold the pipes.
            ended = {"signalled": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"exited": os.WEXITSTATUS(status)}
        elif (time.monotonic() - began) * 1000 > limits["wall_ms"]:
            ended = {"exceeded": "wall"}
        elif group.cpu_ms() > limits["cpu_ms"]:
            ended = {"exceeded": "cpu"}
        elif status is None:
            status = reap(process.pid)
            if status is None and not open_pipes:
                time.sleep(0.001)
    wall_ms = (time.monotonic() - began) * 1000
    if group.out_of_memory():
        ended = {"exceeded": "memory"}
    for file in (process.stdin, process.stdout, process.stderr):
        file.close()
    process.returncode = 0  # reaped by `reap`
    shown = [base64.b64encode(texts[pipe][: limits["output_bytes"]]).decode() for pipe in (out, err)]
    return {"ended": ended, "stdout": shown[0], "stderr": shown[1], "wall_ms": wall_ms}


def answer(request):
    match request["do"]:
        case "hello":
            return {"ok": True}
        case "begin":
            return begin(request)
        case "run":
            return perform(request)
        case other:
            raise Refused(f"unknown request {other!r}")


def port():
    """The virtio-serial port that the host named `agent`."""
    base = "/sys/class/virtio-ports"
    for name in os.listdir(base):
        if read(f"{base}/{name}/name").strip() == "agent":
            return os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
    raise SystemExit("the machine has no port named agent")


def read_exactly(descriptor, size):
    data = bytearray()
    while len(data) < size:
        part = os.read(descriptor, min(size - len(data), 1 << 20))
        if not part:
            time.sleep(0.001)  # nobody is connected on the host's side
        data += part
    return bytes(data)


def write_all(descriptor, data):
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[: 1 << 16]):]


def main():
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    prepare()
    descriptor = port()
    while True:
        (size,) = struct.unpack(">I", read_exactly(descriptor, 4))
        if size > MESSAGE_BYTES_MAX:
            raise SystemExit("the host sent a message that is too long")
        request = json.loads(read_exactly(descriptor, size))
        try:
            reply = answer(request)
        except Refused as refused:
            reply = {"error": str(refused)}
        except OSError as error:
            reply = {"error": f"the world could not do it: {error}"}
        text = json.dumps(reply).encode()
        write_all(descriptor, struct.pack(">I", len(text)) + text)


if __name__ == "__main__":
    sys.exit(main())
