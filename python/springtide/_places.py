"""Where an engine keeps the weights of a checkpoint, as the engine's own loader says.

The loader gets tensors without values. Each copy of a part of one into a parameter is noted, and not done: so it is
known where each weight lies, also in fused, sliced and transposed parameters and in experts. A patch then becomes
positions in this worker's memory before anything is written. A loader that does more than copy takes no patch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from springtide._artifact import ArtifactError, Patch

if TYPE_CHECKING:
    import torch

#: Weights that are copied to a device at once.
WRITTEN_AT_ONCE = 1 << 22


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


class _Part(NamedTuple):
    """A part of a checkpoint's tensor, which is a parameter or a part of one."""

    #: The whole memory of the parameter, flat.
    memory: torch.Tensor
    #: The part's first weight, in the tensor and in `memory`, and its last one in the tensor.
    first: int
    at: int
    last: int
    #: Size, and the distance of neighbors in the tensor and in `memory`; the tensor's largest distance first.
    axes: tuple[tuple[int, int, int], ...]

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> Write | None:
        """What the tensor's new values are here. The indices ascend."""
        import torch

        ends = torch.searchsorted(indices, torch.tensor([self.first, self.last + 1]))
        some = slice(int(ends[0]), int(ends[1]))
        rest = indices[some] - self.first
        values = values[some]
        positions = torch.full_like(rest, self.at)
        inside = torch.ones_like(rest, dtype=torch.bool)
        for size, there, here in self.axes:
            step = rest.div(there, rounding_mode="floor")
            inside &= step < size
            positions += step * here
            rest -= step * there
        inside &= rest == 0
        if not bool(inside.all()):
            positions, values = positions[inside], values[inside]
        if len(positions) == 0:
            return None
        if values.dtype != self.memory.dtype:
            values = values.to(self.memory.dtype)
        # bits are copied: no dtype is too narrow for `index_copy_`, and no NaN changes
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.memory.itemsize]
        return Write(self.memory.view(bits), positions, values.view(bits).clone())


class Places:
    """The parameters of one worker's model, a module that has `load_weights`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parts: dict[str, list[_Part]] = {}

    def writes(self, patch: Patch) -> tuple[list[Write], set[str]]:
        """What a patch changes in this worker, and the names of which this worker has nothing. Nothing is written
        yet.

        Raises `ArtifactError` if the loader does more than copy: only a folder of all weights can be loaded then.
        """
        new = [name for name in patch if name not in self._parts]
        if new:
            self._parts |= _trace(self._model, patch, new)
        writes, absent = [], set()
        for name in patch:
            if not self._parts[name]:
                absent.add(name)
                continue
            changes = patch[name]
            indices, values = changes.indices.torch(), changes.values.torch()
            found = (part.write(indices, values) for part in self._parts[name])
            writes += [write for write in found if write is not None]
        return writes, absent


def _trace(model: Any, patch: Patch, names: list[str]) -> dict[str, list[_Part]]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    parts: dict[str, list[_Part]] = {name: [] for name in names}
    tensors = [(name, torch.empty(patch[name].shape, dtype=patch[name].values.torch().dtype, device="meta")) for name in names]
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
                parts[name].append(_part(written, args[1]))
                return written
            if function in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default) and not any(args[1:]):
                return written  # what a vocabulary is filled up with is zero already
            raise ArtifactError(f"it computes ({function})")

    try:
        with torch.no_grad(), Noting():
            model.load_weights(iter(tensors))
    except Exception as error:
        raise ArtifactError(f"the engine's loader takes no patch: {error}. Load a folder") from error
    kept = [weakref.ref(tensor) for _, tensor in tensors]
    tensors.clear()
    if any(tensor() is not None for tensor in kept):
        raise ArtifactError("the engine's loader keeps weights for later and takes no patch. Load a folder")
    return parts


def _part(target: torch.Tensor, source: torch.Tensor) -> _Part:
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
    first, reach = source.storage_offset(), sum((size - 1) * there for size, there, _ in axes)
    memory = torch.empty(0, dtype=target.dtype, device=target.device).set_(target.untyped_storage())
    last = first + reach if source.numel() > 0 else first - 1
    return _Part(memory, first, target.storage_offset(), last, tuple(axes))
