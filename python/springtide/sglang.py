"""SGLang's loader: applies Springtide's patches to a running server.

SGLang calls `register` by itself once this package is in its environment. `POST
/update_weights_from_disk` with `"load_format": "springtide"` then takes as `model_path` the URL at which a
follower has a patch for each worker, or all weights. Other formats load as before.

Each worker gets and checks its patch before it writes the first weight. A patch is refused unless the worker
holds the version that it starts from. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from springtide._artifact import ArtifactError
from springtide._engine import Follower, check_start
from springtide._places import Places, writes

LOAD_FORMAT = "springtide"

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
        return False, f"the weights are neither version now ({error}): load all"


def update(model: Any, url: str) -> str:
    """Gives a model the weights that a follower has: all, or what changes. Returns what was done. The follower is told
    how it ended: SGLang passes on the answer of one worker alone.

    Raises `ArtifactError` or `OSError` if nothing has changed. After any other error the weights
    are neither version, and only all are taken.
    """
    import torch

    if getattr(model, "quant_config", None) is not None:
        raise ArtifactError("the server's weights are quantized, and these are not: start it without quantization")
    started = time.perf_counter()
    holds: str | None = getattr(model, "springtide_holds", None)
    with torch.no_grad():
        follower = Follower(url)
        with follower.ending():
            versions = follower.versions()
            root = versions["to"]
            if versions["from"] is None:
                changed = "all weights"
                model.springtide_holds = model.springtide_places = None
                _load(model, follower, versions)
            else:
                changed = _patch(model, follower, versions, holds)
    model.springtide_holds = root
    done = f"version {root[:12]}: {changed} in {time.perf_counter() - started:.3f} s"
    _log.info(done)
    return done


def _load(model: Any, follower: Follower, versions: dict[str, Any]) -> None:
    try:
        model.load_weights(follower.weights(versions))
    except (ArtifactError, OSError) as error:
        # some are written
        raise RuntimeError(str(error)) from error


def _patch(model: Any, follower: Follower, versions: dict[str, Any], holds: str | None) -> str:
    """Returns what was done."""
    check_start(holds, versions["from"])
    places: Places | None = getattr(model, "springtide_places", None)
    if places is None:
        places = model.springtide_places = Places(model)
    parts = places.parts(versions["tensors"], versions["changed"])
    patch = follower.patch([part.place() for part in parts], versions)
    changes = writes(parts, patch)
    model.springtide_holds = None
    for write in changes:
        write.do()
    return f"{patch.weights} weights"
