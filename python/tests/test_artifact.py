"""Checkpoints, patches and deltas as arrays."""

from __future__ import annotations

import gc
import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from springtide import ArtifactError, Checkpoint, Patch

# Computed from demo/models/base by a program of its own, as docs/FORMAT.md says.
DEMO_BASE_ROOT = "ff1ed64868a21fcf60fdcaece55dc27426b83b925ea43c4ca94b0f0608361730"


def address(array: npt.NDArray[np.generic]) -> int:
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def mapped_from(address: int) -> str:
    """The file that this process has mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line.split(maxsplit=5)[5] if line.count(" ") >= 5 else ""
    return ""


def values_in_file(folder: Path, name: str) -> npt.NDArray[np.uint16]:
    """A BF16 tensor, read without the extension."""
    file = (folder / "model.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", file[:8])
    entry = json.loads(file[8 : 8 + header_bytes])[name]
    assert entry["dtype"] == "BF16"
    start, end = entry["data_offsets"]
    values = np.frombuffer(file, "<u2", (end - start) // 2, 8 + header_bytes + start)
    return values.reshape(entry["shape"])


def test_a_checkpoint_has_the_content_hash_of_the_format(base: Path) -> None:
    checkpoint = Checkpoint.open(base)
    assert checkpoint.root() == DEMO_BASE_ROOT
    checkpoint.verify(DEMO_BASE_ROOT, threads=1)
    with pytest.raises(ArtifactError, match="another version or damaged"):
        checkpoint.verify("0" * 64)
    with pytest.raises(ArtifactError, match="no content hash"):
        checkpoint.verify("0")
    assert json.loads(checkpoint.files["config.json"])["model_type"]


def test_arrays_of_a_checkpoint_are_the_mapped_file(base: Path) -> None:
    checkpoint = Checkpoint.open(base)
    name = checkpoint.keys()[0]
    first, second = checkpoint[name].numpy(), checkpoint[name].numpy()
    assert address(first) == address(second)
    assert mapped_from(address(first)).endswith("models/base/model.safetensors")
    np.testing.assert_array_equal(first, values_in_file(base, name))
    assert checkpoint[name].shape == first.shape and checkpoint[name].nbytes == first.nbytes
    assert sum(checkpoint[name].nbytes for name in checkpoint) == checkpoint.nbytes


def test_arrays_are_read_only_and_outlive_what_they_come_from(base: Path) -> None:
    checkpoint = Checkpoint.open(base)
    name = checkpoint.keys()[0]
    array = checkpoint[name].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    with pytest.raises(ValueError):
        array.setflags(write=True)
    at = address(array)
    del checkpoint
    gc.collect()
    assert address(array) == at and mapped_from(at)
    np.testing.assert_array_equal(array, values_in_file(base, name))
    del array
    gc.collect()
    assert not mapped_from(at).endswith("models/base/model.safetensors")


def test_a_patch_holds_what_differs_and_makes_the_one_of_the_other(base: Path, after: Path, tmp_path: Path) -> None:
    old, new = Checkpoint.open(base), Checkpoint.open(after)
    path = tmp_path / "patch.safetensors"
    Patch.between(old, new).write(path)
    patch = Patch.read(path)
    assert (patch.from_root, patch.to_root) == (DEMO_BASE_ROOT, new.root())
    assert len(patch) == 1 and list(patch) == [old.keys()[0]]
    (name,) = patch
    changes = patch[name]
    assert changes.shape == old[name].shape
    assert patch.weights == len(changes) == -(-old[name].nbytes // 2000)
    made = np.array(old[name].numpy()).reshape(-1)
    made[changes.indices.numpy()] = changes.values.numpy()
    np.testing.assert_array_equal(made.reshape(changes.shape), values_in_file(after, name))
    # the values are the file that was read: two arrays that live at once share their memory
    values, again = changes.values.numpy(), patch[name].values.numpy()
    assert address(values) == address(again)
    assert changes.indices.numpy().dtype == np.int64 and not changes.indices.numpy().flags.writeable


def test_a_patch_in_memory_does_not_change_with_its_file(base: Path, after: Path, tmp_path: Path) -> None:
    path = tmp_path / "patch.safetensors"
    Patch.between(Checkpoint.open(base), Checkpoint.open(after)).write(path)
    patch = Patch.read(path)
    before = patch.to_bytes()
    path.write_bytes(bytes(len(before)))
    assert patch.to_bytes() == before


def test_a_delta_makes_the_next_version_and_shares_what_stays(base: Path, after: Path, tmp_path: Path) -> None:
    old, new = Checkpoint.open(base), Checkpoint.open(after)
    delta = old.delta_to(new)
    assert len(delta) < new.nbytes / 100
    made = old.apply_delta(delta)
    made.verify(new.root())
    changed, *others = old.keys()
    np.testing.assert_array_equal(made[changed].numpy(), new[changed].numpy())
    assert all(address(made[name].numpy()) == address(old[name].numpy()) for name in others)
    made.save(tmp_path / "made")
    Checkpoint.open(tmp_path / "made").verify(new.root())
    with pytest.raises(ArtifactError, match="applies to the version"):
        new.apply_delta(delta)


def test_damaged_files_are_refused(base: Path, after: Path, tmp_path: Path) -> None:
    old, new = Checkpoint.open(base), Checkpoint.open(after)
    good = Patch.between(old, new).to_bytes()
    path = tmp_path / "patch.safetensors"
    for position in [*range(0, 400, 7), len(good) // 2, len(good) - 1]:
        damaged = bytearray(good)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match="patch.safetensors"):
            Patch.read(path)
    path.write_bytes(good[:-1])
    with pytest.raises(ArtifactError, match="cut off"):
        Patch.read(path)
    delta = bytearray(old.delta_to(new))
    delta[-1] ^= 1
    with pytest.raises(ArtifactError):
        old.apply_delta(bytes(delta)).verify(new.root())
    with pytest.raises(ArtifactError, match="magic"):
        old.apply_delta(b"nonsense" * 40)


def test_what_is_missing_is_a_file_error_or_a_key_error(base: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Patch.read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="model.safetensors"):
        Checkpoint.open(tmp_path)
    checkpoint = Checkpoint.open(base)
    with pytest.raises(KeyError, match="no.such.tensor"):
        checkpoint["no.such.tensor"]
    assert "no.such.tensor" not in checkpoint and checkpoint.keys()[0] in checkpoint


def test_versions_of_another_form_have_no_patch(base: Path, after: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Checkpoint.open(after).save(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    with pytest.raises(ArtifactError, match="config.json"):
        Patch.between(Checkpoint.open(base), Checkpoint.open(other))


def test_torch_tensors_share_the_memory_in_their_own_dtype(base: Path) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = Checkpoint.open(base)
    name = checkpoint.keys()[0]
    tensor = checkpoint[name].torch()
    assert tensor.dtype == torch.bfloat16 and tuple(tensor.shape) == checkpoint[name].shape
    assert tensor.data_ptr() == address(checkpoint[name].numpy())
    del checkpoint
    gc.collect()
    bits = tensor.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits, values_in_file(base, name))
