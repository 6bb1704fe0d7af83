"""vLLM's weight-transfer backend: applies Springtide's patches to a running server.

vLLM loads it by itself once this package is in its environment. Start the server with
`VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "springtide"}'`. `springtide serve`
then sends `/update_weights` with one of these as `update_info`:

    {"patch": FILE, "from": HASH, "to": HASH}   a file of `artifact::patch`
    {"folder": FOLDER, "to": HASH}              a Hugging Face folder: all weights

Hashes are content hashes of versions, in hex. Each worker reads and checks the whole file. Only if all
workers of a data-parallel replica accept it is its first weight written; vLLM's own loader then takes the part of the worker's
tensor-parallel rank. A patch is refused unless the server holds the version that it starts from. So a
server that was restarted, or whose last update failed, takes a folder first.

After a refusal call `/finish_weight_update` (its answer does not matter) before the next update: vLLM
ends a refused update only in the worker that reported it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from springtide._artifact import ArtifactError, Checkpoint, Patch
from springtide._engine import stage_folder, stage_patch

Result = TypeVar("Result")


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM packs weights for oneDNN and drops the originals: nothing would be left to patch, and
        # a tied lm_head would keep its old packed copy.
        import vllm._custom_ops as ops

        ops._supports_onednn = False
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "springtide" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("springtide", "springtide.vllm", "SpringtideEngine")


def _engine() -> type[Any]:
    """The class that vLLM asks for. Made late, so that `register` stays cheap."""
    import torch
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    log = init_logger("vllm.springtide")

    @dataclass
    class Init(WeightTransferInitInfo):  # type: ignore[misc]
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        to: str = ""
        patch: str | None = None
        folder: str | None = None
        # `from` is a keyword
        start: str = ""

    class SpringtideEngine(WeightTransferEngine[Init, Update]):  # type: ignore[misc]
        init_info_cls, update_info_cls, supports_draft_weight_update = Init, Update, False
        # Content hash of the version in memory; None: unknown.
        holds: str | None = None

        def init_transfer_engine(self, init_info: Init) -> None:
            pass

        def start_weight_update(self) -> None:
            pass

        def finish_weight_update(self) -> None:
            pass

        def shutdown(self) -> None:
            pass

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # the base class synchronizes an accelerator, which a CPU does not have
            update_info = dict(update_info)
            if "from" in update_info:
                update_info["start"] = update_info.pop("from")
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def receive_weights(self, update: Update) -> None:
            started = time.perf_counter()
            staged = self._all_or_none(lambda: self._stage(update))
            if staged is None:
                return
            # until the last write of the last worker the weights are neither version
            self.holds = None
            changed = self._all_or_none(lambda: self._write(staged))
            if changed is None:
                return
            self.holds = update.to
            log.info("version %s: %d weights in %.3f s", update.to[:12], changed, time.perf_counter() - started)

        def _all_or_none(self, part: Callable[[], Result]) -> Result | None:
            """What `part` returns, if no worker fails in it.

            Else the last worker raises, and the others return None: vLLM reads the workers' answers in
            order, and one that follows a failure would be taken for the answer to the next command.
            """
            if self.parallel_config.world_size == 1:
                return part()
            failure, result = None, None
            try:
                result = part()
            except Exception as error:
                failure = error
            # These groups span the workers of this replica alone; the world has those of all replicas.
            failures = [] if failure is None else [str(failure)]
            is_last = True
            for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
                if group.world_size > 1:
                    said: list[list[str]] = [[]] * group.world_size
                    torch.distributed.all_gather_object(said, failures, group=group.cpu_group)
                    failures = [one for worker in said for one in worker]
                    is_last = is_last and group.rank_in_group == group.world_size - 1
            different = list(dict.fromkeys(failures))
            if not different:
                return result
            if is_last:
                raise ArtifactError("; ".join(different)) from failure
            log.error("an update failed: %s", "; ".join(different))
            return None

        def _stage(self, update: Update) -> Patch | Checkpoint:
            if update.patch:
                return stage_patch(update.patch, self.holds, update.start, update.to)
            if update.folder:
                return stage_folder(update.folder, update.to)
            raise ArtifactError("update_info needs `patch` or `folder`")

        def _write(self, staged: Patch | Checkpoint) -> int:
            """Returns how many weights were written, those of other workers included."""
            if isinstance(staged, Patch):
                self._apply(staged)
                return staged.weights
            self._load(staged)
            return sum(math.prod(staged[name].shape) for name in staged)

        def _apply(self, patch: Patch) -> None:
            patches = []
            for name in patch:
                changes = patch[name]
                indices, values = changes.indices.torch(), changes.values.torch()
                patches.append(CheckpointWeightPatch(name, changes.shape, values.dtype, values, indices))
            # that indices are unique was checked when the patch was read
            load_checkpoint_weight_patches(self.model, patches, validate_unique_indices=False)

        def _load(self, checkpoint: Checkpoint) -> None:
            self.model.load_weights((name, checkpoint[name].torch()) for name in checkpoint)

    return SpringtideEngine


def __getattr__(name: str) -> type[Any]:
    if name != "SpringtideEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _engine()
    globals()[name] = made
    return made
