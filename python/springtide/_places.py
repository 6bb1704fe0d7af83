"""Where an engine keeps the weights of a checkpoint, as the engine's own loader says.

The loader gets tensors without values. Each copy of a part of one into a parameter is noted, and not done: so it is
known where each weight lies, also in fused, sliced and transposed parameters and in experts. The follower is told, and
makes of a patch positions in this worker's memory before anything is written. A loader that does more than copy takes no
patch.
"""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from springtide._arrays import torch_dtype
from springtide._artifact import ArtifactError, Changes, Patch

if TYPE_CHECKING:
    import torch

#: Weights that are copied to a device at once.
WRITTEN_AT_ONCE = 1 << 22
#: Weights that are hashed at once.
HASHED_AT_ONCE = 1 << 24

Axes = tuple[tuple[int, int, int], ...]


class Write(NamedTuple):
    """New values for one parameter of this worker. They wait in the memory of the host."""

    #: The parameter's memory, flat, as integers of the weights' width.
    memory: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor

    def do(self) -> None:
        device = self.memory.device
        for positions, values in zip(self.positions.split(WRITTEN_AT_ONCE), self.values.split(WRITTEN_AT_ONCE)):
            self.memory.index_copy_(0, positions.to(device), values.to(device))


class Part(NamedTuple):
    """A part of a checkpoint's tensor, which is a parameter or a part of one."""

    tensor: str
    #: Of the checkpoint.
    dtype: torch.dtype
    #: The whole memory of the parameter, flat.
    memory: torch.Tensor
    #: The part's first weight, in the tensor and in `memory`.
    first: int
    at: int
    #: Size, and the distance of neighbors in the tensor and in `memory`; the tensor's largest distance first.
    axes: Axes

    def place(self) -> dict[str, Any]:
        """As the follower reads it (`artifact::patch::LocalPart`)."""
        memory = self.memory.numel()
        return {"tensor": self.tensor, "first": self.first, "axes": self.axes, "at": self.at, "memory": memory}

    def write(self, changes: Changes) -> Write:
        """What the follower found to change here."""
        values = changes.values.torch()
        if values.dtype != self.memory.dtype:
            values = values.to(self.memory.dtype)
        bits = _bits(self.memory)
        return Write(self.memory.view(bits), changes.indices.torch(), values.view(bits).clone())

    def sha256(self, stops: Callable[[], bool]) -> str:
        """Of the weights in the tensor's order. Raises `ArtifactError` once it `stops`."""
        import torch

        hasher = hashlib.sha256()
        for axes, at in _pieces(self.axes, self.at):
            if stops():
                raise ArtifactError("the weights are changed again")
            piece = self.memory.as_strided([size for size, _, _ in axes], [here for _, _, here in axes], at)
            piece = piece.contiguous().cpu().reshape(-1)
            weights = piece.to(self.dtype)
            if weights is not piece and not weights.to(piece.dtype).equal(piece):
                hasher.update(b"a weight that the checkpoint's dtype does not have")
            hasher.update(weights.view(torch.uint8).numpy())
        return hasher.hexdigest()

    def is_exact(self) -> bool:
        """Whether its memory can hold each value of the checkpoint's dtype."""
        import torch

        wide = (torch.float32, torch.float64)
        narrow = (torch.bfloat16, torch.float16)
        return self.memory.dtype == self.dtype or self.memory.dtype in wide and self.dtype in narrow


def _bits(memory: torch.Tensor) -> torch.dtype:
    """Bits are copied: no dtype is too narrow for `index_copy_`, and no NaN changes."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[memory.itemsize]


def _pieces(axes: Axes, at: int) -> Iterator[tuple[Axes, int]]:
    """Pieces in order, each of at most `HASHED_AT_ONCE` weights."""
    if math.prod(size for size, _, _ in axes) <= HASHED_AT_ONCE:
        yield axes, at
        return
    (size, there, here), *inner = axes
    within = math.prod(size for size, _, _ in inner)
    step = max(1, HASHED_AT_ONCE // within)
    for start in range(0, size, step):
        count = min(step, size - start)
        piece = ((count, there, here), *inner)
        yield from _pieces(tuple(inner) if count == 1 else piece, at + start * here)


class Places:
    """The parameters of one worker's model, a module that has `load_weights`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parts: dict[str, list[Part]] = {}
        self._lock = threading.Lock()

    def parts(self, tensors: dict[str, Any], names: Iterable[str]) -> list[Part]:
        """Where this worker has the weights of some tensors. `tensors`: dtype, shape and digest of all of them.

        Raises `ArtifactError` if the loader does more than copy: only all weights can be loaded then.
        """
        names = list(names)
        with self._lock:
            new = {name: tensors[name] for name in names if name not in self._parts}
            if new:
                self._parts |= _trace(self._model, new)
        return [part for name in names for part in self._parts[name]]

    def held(self, tensors: dict[str, Any], stops: Callable[[], bool]) -> list[dict[str, Any]]:
        """What this worker holds, with the digest of each part. Those that were rounded as they were loaded are left
        out."""
        parts = [part for part in self.parts(tensors, tensors) if part.is_exact()]
        return [{**part.place(), "sha256": part.sha256(stops)} for part in parts]


def writes(parts: list[Part], patch: Patch) -> list[Write]:
    """What a patch for these parts changes. Nothing is written yet."""
    return [parts[int(number)].write(patch[number]) for number in patch]


def _trace(model: Any, forms: dict[str, Any]) -> dict[str, list[Part]]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    parts: dict[str, list[Part]] = {name: [] for name in forms}
    tensors = [
        (name, torch.empty(shape, dtype=torch_dtype(dtype), device="meta")) for name, (dtype, shape, _) in forms.items()
    ]
    of_storage = {tensor.untyped_storage()._cdata: (name, tensor.dtype) for name, tensor in tensors}

    class Noting(TorchDispatchMode):  # type: ignore[misc]
        """Of this thread alone: others compute."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            written = args[0] if args and function._schema.is_mutable else None
            if not isinstance(written, torch.Tensor) or written.is_meta:
                return function(*args, **(kwargs or {}))
            if function is torch.ops.aten.copy_.default and args[1].is_meta:
                name, dtype = of_storage.get(args[1].untyped_storage()._cdata, (None, None))
                if name is None or args[1].dtype != dtype or written.untyped_storage().data_ptr() not in own:
                    raise ArtifactError("a weight is changed before it is copied")
                if written.numel() > 0:
                    parts[name].append(_part(name, written, args[1]))
                return written
            if function in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default) and not any(args[1:]):
                return written  # what a vocabulary is filled up with is zero already
            raise ArtifactError(f"it computes ({function})")

    try:
        with torch.no_grad(), Noting():
            model.load_weights(iter(tensors))
    except Exception as error:
        raise ArtifactError(f"the engine's loader takes no patch: {error}. Load all") from error
    kept = [weakref.ref(tensor) for _, tensor in tensors]
    tensors.clear()
    if any(tensor() is not None for tensor in kept):
        raise ArtifactError("the engine's loader keeps weights for later and takes no patch. Load all")
    return parts


def _part(name: str, target: torch.Tensor, source: torch.Tensor) -> Part:
    import torch

    same = target.dtype == source.dtype or target.is_floating_point() and source.is_floating_point()
    if target.shape != source.shape or not same:
        raise ArtifactError(f"it writes {tuple(source.shape)} over {tuple(target.shape)}")
    sizes = zip(source.shape, source.stride(), target.stride())
    axes = sorted((axis for axis in sizes if axis[0] != 1), key=lambda axis: -axis[1])
    within = 1
    for size, there, _ in reversed(axes):
        if there < within:
            raise ArtifactError("it reads a weight twice")
        within = there * size
    memory = torch.empty(0, dtype=target.dtype, device=target.device).set_(target.untyped_storage())
    return Part(name, source.dtype, memory, source.storage_offset(), target.storage_offset(), tuple(axes))
