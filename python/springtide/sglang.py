"""SGLang's loader: applies Springtide's patches to a running server.

SGLang calls `register` by itself once this package is in its environment. `POST
/update_weights_from_disk` with `"load_format": "springtide"` then takes as `model_path` a patch
(`artifact::patch`), or a Hugging Face folder of all weights. Other formats load as before.

Each worker reads and checks the whole file before it writes the first weight; the model's own loader
then takes the part of its tensor-parallel rank. A patch is refused unless the worker holds the
version that it starts from. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from springtide._artifact import ArtifactError, Patch
from springtide._engine import stage_folder, stage_patch

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "springtide"
#: Bytes of whole tensors that are made at once. A larger tensor is made alone.
MADE_BYTES_MAX = 512 << 20

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
#: The ways into a model's weights that know nothing of versions.
_OTHER_WRITERS = ("load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc")
_log = logging.getLogger("sglang.springtide")


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.WeightUpdater.update_weights_from_disk", update_from_disk, HookType.AROUND)
    for writer in _OTHER_WRITERS:
        HookRegistry.register(f"{_UPDATER}.WeightUpdater.{writer}", forget, HookType.BEFORE)


def forget(updater: Any, *_: Any, **__: Any) -> None:
    """Before weights of no known version are written."""
    updater.get_model().springtide_holds = None


def update_from_disk(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    model_path: str,
    load_format: str,
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, str]:
    """`WeightUpdater.update_weights_from_disk`. Returns whether it worked, and why not."""
    if load_format != LOAD_FORMAT:
        forget(updater)
        return original(updater, model_path, load_format, *args, **kwargs)
    from sglang.srt.model_executor.model_runner_components import weight_updater

    updater._assert_weight_cache_inactive("update_weights_from_disk")
    model = updater.get_model()
    obstacle = weight_updater._unsupported_derived_weight_cache_error(model)
    if obstacle is not None:
        return False, obstacle
    try:
        return True, update(model, model_path)
    except (ArtifactError, OSError) as refused:
        return False, str(refused)
    except Exception as error:
        _log.exception("new weights failed")
        return False, f"the weights are neither version now ({error}): load a folder"


def update(model: Any, path: str | os.PathLike[str]) -> str:
    """Gives a model the weights of a folder, or those of a patch. Returns what was done.

    Raises `ArtifactError` or `OSError` if nothing has changed. After any other error the weights
    are neither version, and only a folder is taken.
    """
    import torch

    if getattr(model, "quant_config", None) is not None:
        raise ArtifactError("the server's weights are quantized, and these are not: start it without quantization")
    started = time.perf_counter()
    holds: str | None = getattr(model, "springtide_holds", None)
    with torch.no_grad():
        if os.path.isdir(path):
            checkpoint = stage_folder(path)
            root, changed = checkpoint.root(), "all weights"
            model.springtide_holds = None
            model.load_weights((name, checkpoint[name].torch()) for name in checkpoint)
        else:
            patch = stage_patch(path, holds)
            root, changed = patch.to_root, f"{patch.weights} weights"
            _refuse_nan(patch)
            model.springtide_holds = None
            _apply(model, patch)
    model.springtide_holds = root
    done = f"version {root[:12]}: {changed} in {time.perf_counter() - started:.3f} s"
    _log.info(done)
    return done


def _refuse_nan(patch: Patch) -> None:
    """A value that is not a number means "unchanged" below."""
    for name in patch:
        values = patch[name].values.torch()
        if not values.is_floating_point() or bool(values.isnan().any()):
            raise ArtifactError(f"`{name}` has new values that are not numbers: load a folder")


def _apply(model: Any, patch: Patch) -> None:
    with _only_numbers_are_written():
        for weights in _whole_tensors(patch):
            model.load_weights(weights)
    # a loader that writes by other means than `copy_` has written the gaps too
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and bool(parameter.isnan().any()):
            raise RuntimeError(f"the loader of {name} does not take patches")


def _whole_tensors(patch: Patch) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Tensors of their whole shape, with NaN where nothing changes, in lists of bounded size."""
    import torch

    made: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name in patch:
        changes = patch[name]
        values = changes.values.torch()
        whole = torch.full(changes.shape, float("nan"), dtype=values.dtype)
        whole.view(-1)[changes.indices.torch()] = values
        if made and size + whole.nbytes > MADE_BYTES_MAX:
            yield made
            made, size = [], 0
        made.append((name, whole))
        size += whole.nbytes
    if made:
        yield made


@contextlib.contextmanager
def _only_numbers_are_written() -> Iterator[None]:
    """`copy_` keeps what is there where the source is NaN. In all threads: loaders start some."""
    import torch

    copy = torch.Tensor.copy_

    def copy_numbers(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if target.shape != source.shape or not source.is_floating_point() or not target.is_floating_point():
            raise RuntimeError(f"a loader writes {tuple(source.shape)} over {tuple(target.shape)}, which no patch can")
        new = torch.empty_like(target)
        copy(new, source)
        return copy(target, torch.where(new.isnan(), target, new))

    torch.Tensor.copy_ = copy_numbers
    try:
        yield
    finally:
        torch.Tensor.copy_ = copy
