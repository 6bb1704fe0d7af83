"""The demo's base policy, and a version after it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

DEMO_BASE = Path(__file__).resolve().parents[2] / "demo/models/base"


@pytest.fixture(scope="session")
def base() -> Path:
    """The model folder in the repository. Rust wrote it."""
    return DEMO_BASE


@pytest.fixture(scope="session")
def after(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `base`; each thousandth weight of its first tensor has another lowest bit."""
    folder = tmp_path_factory.mktemp("after") / "model"
    shutil.copytree(DEMO_BASE, folder)
    path = folder / "model.safetensors"
    file = bytearray(path.read_bytes())
    (header_bytes,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + header_bytes])
    start, end = header[first_tensor(header)]["data_offsets"]
    for position in range(8 + header_bytes + start, 8 + header_bytes + end, 2000):
        file[position] ^= 1
    path.write_bytes(file)
    return folder


def first_tensor(header: dict[str, object]) -> str:
    return min(name for name in header if name != "__metadata__")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if a test is skipped, such as for lack of torch")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
