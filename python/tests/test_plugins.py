"""The plugins without their engines. `make check NAME=engines` has them inside."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import springtide.sglang
import springtide.vllm
from springtide import ArtifactError, Checkpoint, Patch
from springtide._engine import Follower as Asking
from springtide._places import Places, writes

sys.path.append(str(Path(__file__).parent.parent.parent / "tests/engines"))
from follower import Exchange, Follower  # type: ignore[import-not-found]  # noqa: E402


@pytest.fixture
def followers() -> Iterator[Follower]:
    with Follower() as follower:
        yield follower


def test_engines_find_the_plugins_and_importing_them_needs_no_engine() -> None:
    for group, module in [("vllm.general_plugins", springtide.vllm), ("sglang.srt.plugins", springtide.sglang)]:
        (found,) = entry_points(group=group, name="springtide")
        assert found.load() is module.register
    program = (
        "import sys, springtide.vllm, springtide.sglang; "
        "print({'vllm', 'sglang', 'torch', 'numpy'} & {*sys.modules})"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "set()"
    with pytest.raises(AttributeError, match="no attribute"):
        springtide.vllm.Other  # noqa: B018


class TiedLinear:
    """A module as SGLang's are: fused parameters, of which this rank has a half."""

    def __init__(self, checkpoint: Checkpoint, names: tuple[str, str], rank: int) -> None:
        import torch

        self.quant_config = None
        self.names = names
        self.rank = rank
        rows = checkpoint[names[0]].shape[0] // 2
        columns = checkpoint[names[0]].shape[1]
        self.fused = torch.zeros(2 * rows, columns)

    def parameters(self) -> list[Any]:
        return [self.fused]

    def buffers(self) -> list[Any]:
        return []

    def load_weights(self, weights: Any) -> set[str]:
        rows = self.fused.shape[0] // 2
        loaded = set()
        for name, weight in weights:
            if name in self.names:
                part = self.names.index(name)
                shard = weight.narrow(0, self.rank * rows, rows)
                self.fused.narrow(0, part * rows, rows).copy_(shard)
                loaded.add("fused")
        return loaded


def expected(checkpoint: Checkpoint, names: tuple[str, str], rank: int) -> Any:
    model = TiedLinear(checkpoint, names, rank)
    model.load_weights((name, checkpoint[name].torch()) for name in names)
    return model.fused


@pytest.fixture
def versions(base: Path, tmp_path: Path) -> Iterator[tuple[Checkpoint, Checkpoint, tuple[str, str], str]]:
    """Two versions, two matrices of one shape that differ, and where a follower has the patch."""
    import json
    import shutil
    import struct

    pytest.importorskip("torch")
    folder = tmp_path / "next"
    shutil.copytree(base, folder)
    path = folder / "model.safetensors"
    file = bytearray(path.read_bytes())
    (header_bytes,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + header_bytes])
    names = sorted(name for name in header if name.endswith(("0.mlp.gate_proj.weight", "0.mlp.up_proj.weight")))
    for name in names:
        start, end = header[name]["data_offsets"]
        for position in range(8 + header_bytes + start, 8 + header_bytes + end, 202):
            file[position] ^= 1
    path.write_bytes(file)
    old, new = Checkpoint.open(base), Checkpoint.open(folder)
    with Follower() as follower:
        patch = follower.open(Exchange(Patch.between(old, new), new))
        yield old, new, (names[0], names[1]), patch


def test_sglangs_loader_patches_the_part_of_each_rank_exactly(
    versions: tuple[Checkpoint, Checkpoint, tuple[str, str], str], followers: Follower
) -> None:
    old, new, names, patch = versions
    everything = followers.open(Exchange(None, old))
    for rank in (0, 1):
        model = TiedLinear(old, names, rank)
        with pytest.raises(ArtifactError, match="load all first"):
            springtide.sglang.update(model, patch)
        springtide.sglang.update(model, everything)
        assert model.fused.equal(expected(old, names, rank))
        springtide.sglang.update(model, patch)
        assert model.fused.equal(expected(new, names, rank)) and not model.fused.equal(expected(old, names, rank))
        # not twice
        with pytest.raises(ArtifactError, match="load all first"):
            springtide.sglang.update(model, patch)


def test_sglangs_loader_refuses_what_it_cannot_patch(
    versions: tuple[Checkpoint, Checkpoint, tuple[str, str], str], followers: Follower
) -> None:
    old, new, names, patch = versions
    everything = followers.open(Exchange(None, old))
    model = TiedLinear(old, names, 0)
    model.quant_config = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(ArtifactError, match="quantized"):
        springtide.sglang.update(model, everything)
    model.quant_config = None
    springtide.sglang.update(model, everything)

    class Damaged(Exchange):  # type: ignore[misc]
        def own_patch(self, worker: str, parts: list[dict[str, Any]]) -> bytes:
            own: bytes = super().own_patch(worker, parts)
            return own[:-1] + bytes([own[-1] ^ 1])

    class Other(Exchange):  # type: ignore[misc]
        def all_weights(self) -> bytes:
            all_weights: bytes = super().all_weights()
            return all_weights[:-1] + bytes([all_weights[-1] ^ 1])

    class Short(Exchange):  # type: ignore[misc]
        def all_weights(self) -> bytes:
            all_weights: bytes = super().all_weights()
            return all_weights[:-1]

    # some weights are written then, so no patch fits any more
    for kind, why in [(Other, "other bytes than"), (Short, "do not make a tensor")]:
        exchange: Any = kind(None, new)
        with pytest.raises(RuntimeError, match=why):
            springtide.sglang.update(model, followers.open(exchange))
        (failed,) = exchange.wait()
        assert why in failed
        with pytest.raises(ArtifactError, match="load all first"):
            springtide.sglang.update(model, patch)
    springtide.sglang.update(model, everything)

    before = model.fused.clone()
    with pytest.raises(ArtifactError, match="digest"):
        springtide.sglang.update(model, followers.open(Damaged(Patch.between(old, new), new)))
    assert model.fused.equal(before)
    springtide.sglang.update(model, patch)

    class Squaring(TiedLinear):
        def load_weights(self, weights: Any) -> set[str]:
            for name, weight in weights:
                if name == names[0]:
                    self.fused.narrow(0, 0, weight.shape[0] // 2).copy_((weight * weight).narrow(0, 0, weight.shape[0] // 2))
            return set()

    class Computing(TiedLinear):
        def load_weights(self, weights: Any) -> set[str]:
            loaded = super().load_weights(weights)
            self.fused.copy_(-self.fused.exp())
            return loaded

    class Keeping(TiedLinear):
        def load_weights(self, weights: Any) -> set[str]:
            self.kept = list(weights)
            return set()

    for kind, why in [
        (Squaring, "changed before it is copied"),
        (Computing, "computes"),
        (Keeping, "keeps weights for later"),
    ]:
        other = kind(old, names, 0)
        springtide.sglang.update(other, everything)
        before = other.fused.clone()
        with pytest.raises(ArtifactError, match=why):
            springtide.sglang.update(other, patch)
        assert other.fused.equal(before)


def test_a_follower_of_another_release_is_refused(base: Path, followers: Follower) -> None:
    class Other(Exchange):  # type: ignore[misc]
        def versions(self, worker: str) -> dict[str, Any]:
            return {**super().versions(worker), "format": "springtide-workers-2"}

    checkpoint = Checkpoint.open(base)
    assert Asking(followers.open(Exchange(None, checkpoint))).versions()["to"] == checkpoint.root()
    with pytest.raises(ArtifactError, match="the same release"):
        Asking(followers.open(Other(None, checkpoint))).versions()
    with pytest.raises(ArtifactError, match="refuses"):
        Asking("/".join([*followers.open(Exchange(None, checkpoint)).split("/")[:-1], "nothing"])).versions()


def test_a_patch_is_written_where_the_loader_has_put_the_weights_and_what_they_are_is_found(
    tmp_path: Path, followers: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each rank of two: rows, columns, experts, transposed, in another dtype, tied."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("springtide._places.HASHED_AT_ONCE", 5)
    save_file = pytest.importorskip("safetensors.torch").save_file
    shapes = {"rows": (6, 5), "columns": (6, 8), "experts": (4, 3, 2), "turned": (4, 6), "wide": (3, 7), "tied": (5, 3), "rounded": (2, 2)}
    generator = torch.Generator().manual_seed(1)
    versions = []
    old: dict[str, Any] = {}
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        made["rounded"] = made["rounded"].float()
        if number == 1:  # a part of the weights stays
            made = {name: torch.where(torch.rand(new.shape, generator=generator) < 0.5, new, old[name]) for name, new in made.items()}
        old = made
        save_file(made, folder / "model.safetensors")
        versions.append(Checkpoint.open(folder))
    patch = Patch.between(*versions)
    for rank in (0, 1):
        memory = {
            "rows": torch.zeros(4, 5).bfloat16(),
            "columns": torch.zeros(6, 4).bfloat16(),
            "experts": torch.zeros(2, 3, 2).bfloat16(),
            "turned": torch.zeros(6, 4).bfloat16(),
            "wide": torch.zeros(3, 7),
            "tied": torch.zeros(5, 3).bfloat16(),
            "rounded": torch.zeros(2, 2).bfloat16(),
        }

        def load(weights: Any, rank: int = rank, memory: Any = memory) -> set[str]:
            for name, weight in weights:
                into = memory[name]
                if name == "rows":
                    into.narrow(0, 1, 3).copy_(weight.narrow(0, 3 * rank, 3))
                elif name == "columns":
                    into.copy_(weight.narrow(1, 4 * rank, 4))
                elif name == "experts":
                    for expert in range(2):
                        into[1 - expert].copy_(weight[2 * rank + expert])
                elif name == "turned":
                    into.copy_(weight.t())
                elif name in ("wide", "rounded"):
                    into.copy_(weight)
                else:
                    into.copy_(weight)
                    into.copy_(weight)
            return set(memory)

        load((name, versions[0][name].torch()) for name in versions[0])
        model = SimpleNamespace(load_weights=load, parameters=memory.values, buffers=list)
        exchange = Exchange(patch, versions[1])
        follower = Asking(followers.open(exchange))
        asked, places = follower.versions(), Places(model)
        parts = places.parts(asked["tensors"], asked["changed"])
        received = follower.patch([part.place() for part in parts], asked)
        before = {name: tensor.clone() for name, tensor in memory.items()}
        for write in writes(parts, received):
            write.do()
        patched = {name: tensor.clone() for name, tensor in memory.items()}
        follower.held(places.held(asked["tensors"], bool))
        assert exchange.wait() == [[]]
        compared = {part["tensor"] for (parts,) in [exchange.parts.values()] for part in parts}
        assert compared == {*shapes} - {"rounded"}
        load((name, versions[1][name].torch()) for name in versions[1])
        for name, tensor in memory.items():
            assert tensor.equal(patched[name]) and not tensor.equal(before[name]), (rank, name)
        for name in compared:
            faulty = memory[name].view(torch.int32 if name == "wide" else torch.int16).view(-1)
            faulty[-1] ^= 1
            exchange = Exchange(patch, versions[1])
            follower = Asking(followers.open(exchange))
            follower.versions()
            follower.held(places.held(asked["tensors"], bool))
            assert exchange.wait() == [[name]]
            faulty[-1] ^= 1


def test_sglang_forgets_its_version_before_anything_else_writes_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    registry = SimpleNamespace(register=lambda target, hook, kind: registered.update({target: (hook, kind)}))
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.__dict__.update(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around", BEFORE="before"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    springtide.sglang.register()
    model = SimpleNamespace(springtide_holds="a version")
    updater = SimpleNamespace(get_model=lambda: model)

    def breaks(*_: Any) -> tuple[bool, str]:
        raise RuntimeError("midway")

    around, _ = registered.pop(next(target for target in registered if target.endswith("_from_disk")))
    with pytest.raises(RuntimeError, match="midway"):
        around(breaks, updater, "/models/other", "auto")
    assert model.springtide_holds is None
    assert len(registered) == 3
    for hook, kind in registered.values():
        model.springtide_holds = "a version"
        hook(updater, [], load_format=None)
        assert kind == "before" and model.springtide_holds is None


class Group:
    """A group of vLLM's workers, which are threads here."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.said: list[Any] = [None] * size

    def gather(self, into: list[Any], said: Any, rank: int) -> None:
        self.said[rank] = said
        self.barrier.wait(10)
        into[:] = self.said
        self.barrier.wait(10)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Stands in for vLLM and torch. Each thread sets the groups of the worker that it is."""
    here = threading.local()

    def gather(into: list[Any], said: Any, group: Any) -> None:
        group[0].gather(into, said, group[1])

    class Engine:
        def __class_getitem__(cls, _: Any) -> type[Engine]:
            return cls

    of_modules: dict[str, dict[str, Any]] = {
        "torch": {
            "no_grad": lambda: lambda function: function,
            "distributed": SimpleNamespace(all_gather_object=gather),
        },
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            f"get_{name}_group": lambda name=name: getattr(here, name) for name in ("tp", "pcp", "pp")
        },
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Engine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.logger": {"init_logger": lambda _: SimpleNamespace(error=lambda *_: None)},
    }
    for name, contents in of_modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return here


def test_all_vllm_workers_of_a_replica_write_or_none(vllm: threading.local) -> None:
    engine_class = springtide.vllm._engine()
    # one replica of two: two stages of two workers each, in vLLM's order
    tensor, pipeline = [Group(2), Group(2)], [Group(2), Group(2)]

    def work(worker: int, refuses: int | None) -> str | None:
        stage, rank = divmod(worker, 2)
        for name, (size, at, group) in {
            "tp": (2, rank, tensor[stage]),
            "pcp": (1, 0, None),
            "pp": (2, stage, pipeline[rank]),
        }.items():
            made = SimpleNamespace(world_size=size, rank_in_group=at, cpu_group=(group, at))
            setattr(vllm, name, made)
        engine = engine_class()
        engine.parallel_config = SimpleNamespace(world_size=4, data_parallel_size=2)

        def part() -> str:
            if worker == refuses:
                raise ArtifactError(f"worker {worker} refuses")
            return "staged"

        try:
            done: str | None = engine._all_or_none(part)
            return done
        except ArtifactError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        for refuses in (None, 0, 1, 2, 3):
            answers = list(threads.map(work, range(4), [refuses] * 4))
            if refuses is None:
                assert answers == ["staged"] * 4
            else:
                assert answers == [None, None, None, f"worker {refuses} refuses"]
