"""vLLM's weight-transfer backend: applies Springtide's patches to a running server.

vLLM loads it by itself once this package is in its environment. Start the server with
`VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "springtide"}'`. `springtide serve`
then sends `/update_weights` with one of these as `update_info`:

    {"stage": FILE, "from": HASH, "to": HASH}   a file of `artifact::patch`, to be read while requests go on
    {"patch": FILE, "from": HASH, "to": HASH}   the same file, to be written into the weights
    {"folder": FOLDER, "to": HASH}              a Hugging Face folder: all weights

Hashes are content hashes of versions, in hex. Each worker reads and checks the whole file, and keeps what
changes in its own memory; while it does so it holds a shared lock (flock) on the file. Only if all workers
of a data-parallel replica accept it is its first weight written. A patch is refused unless the server holds
the version that it starts from. So a server that was restarted, or whose last update failed, takes a folder
first.

After a refusal call `/finish_weight_update` (its answer does not matter) before the next update: vLLM
ends a refused update only in the worker that reported it.
"""

from __future__ import annotations

import fcntl
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from springtide._artifact import ArtifactError, Checkpoint
from springtide._engine import stage_folder, stage_patch
from springtide._places import Places, Write

Result = TypeVar("Result")


class _Patched(NamedTuple):
    """A patch, ready to be written."""

    from_root: str
    #: How many weights change, those of other workers included.
    weights: int
    writes: list[Write]
    #: Of which tensors it changes this worker has nothing.
    absent: set[str]
    #: Whether it changes what latent attention keeps a rearranged copy of.
    latent: bool


class _Staging(threading.Thread):
    """Makes a patch ready beside the requests that the worker computes."""

    def __init__(self, path: str, start: str, to: str, make: Callable[[], _Patched]) -> None:
        super().__init__(name="springtide-stage", daemon=True)
        self.reads = (path, start, to)
        self._make = make
        self._made: _Patched | None = None
        self._failed: Exception | None = None
        # an error is told when the patch is to be written: here it would be one of one worker
        try:
            # released with the file: then whoever wrote it knows that it was read
            self._file = open(path, "rb")
            fcntl.flock(self._file, fcntl.LOCK_SH)
            self.start()
        except OSError as error:
            self._failed = error

    def run(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:
            self._failed = error
        finally:
            self._file.close()

    def patch(self) -> _Patched:
        """Waits until it is ready."""
        if self.is_alive():
            self.join()
        if self._made is None:
            raise self._failed or ArtifactError("the patch was not read")
        return self._made


def _refuse(nowhere: set[str]) -> bool:
    if nowhere:
        raise ArtifactError(f"no worker's loader copies {sorted(nowhere)[0]!r}: load a folder")
    return True


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

    log = init_logger("vllm.springtide")

    @dataclass
    class Init(WeightTransferInitInfo):  # type: ignore[misc]
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        to: str = ""
        stage: str | None = None
        patch: str | None = None
        folder: str | None = None
        # `from` is a keyword
        start: str = ""

    class SpringtideEngine(WeightTransferEngine[Init, Update]):  # type: ignore[misc]
        init_info_cls, update_info_cls, supports_draft_weight_update = Init, Update, False
        # Content hash of the version in memory; None: unknown.
        holds: str | None = None
        _places: Places | None = None
        _staging: _Staging | None = None

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
            update = self.parse_update_info(update_info)
            if update.stage:
                path = update.stage
                self._staging = _Staging(path, update.start, update.to, lambda: self._patch(path, update))
                return
            self.receive_weights(update)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def receive_weights(self, update: Update) -> None:
            started = time.perf_counter()
            staged = self._all_or_none(lambda: self._stage(update))
            if staged is None:
                return
            if isinstance(staged, _Patched):
                nowhere = self._on_no_worker(staged.absent)
                # all workers know the same, and do the same
                if self._all_or_none(lambda: _refuse(nowhere)) is None:
                    return
            # until the last write of the last worker the weights are neither version
            self.holds = None
            self._staging = None
            changed = self._all_or_none(lambda: self._write(staged))
            if changed is None:
                return
            self.holds = update.to
            log.info("version %s: %d weights in %.3f s", update.to[:12], changed, time.perf_counter() - started)

        def _on_no_worker(self, absent: set[str]) -> set[str]:
            for group in self._groups():
                said: list[set[str]] = [set()] * group.world_size
                torch.distributed.all_gather_object(said, absent, group=group.cpu_group)
                absent = set.intersection(*said)
            return absent

        def _groups(self) -> list[Any]:
            """They span the workers of this replica alone; the world has those of all replicas."""
            if self.parallel_config.world_size == 1:
                return []
            return [group for group in (get_tp_group(), get_pcp_group(), get_pp_group()) if group.world_size > 1]

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
            failures = [] if failure is None else [str(failure)]
            is_last = True
            for group in self._groups():
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

        def _stage(self, update: Update) -> _Patched | Checkpoint:
            if update.folder:
                return stage_folder(update.folder, update.to)
            if not update.patch:
                raise ArtifactError("update_info needs `stage`, `patch` or `folder`")
            staging, self._staging = self._staging, None
            if staging is None or staging.reads != (update.patch, update.start, update.to):
                now: _Patched = self._patch(update.patch, update)
                return now
            staged: _Patched = staging.patch()
            if staged.from_root != self.holds:
                raise ArtifactError(f"the server holds version {self.holds} since the patch was read")
            return staged

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def _patch(self, path: str, update: Update) -> _Patched:
            patch = stage_patch(path, self.holds, update.start, update.to)
            if self.model_config.quantization is not None or self.parallel_config.enable_eplb:
                raise ArtifactError("the server quantizes its weights or moves its experts: load a folder")
            places = self._places
            if places is None:
                places = self._places = Places(self.model)
            writes, absent = places.writes(patch)
            latent = any("kv_b_proj" in name for name in patch)
            return _Patched(patch.from_root, patch.weights, writes, absent, latent)

        def _write(self, staged: _Patched | Checkpoint) -> int:
            """Returns how many weights were written, those of other workers included."""
            if isinstance(staged, _Patched):
                for write in staged.writes:
                    write.do()
                if staged.latent:
                    self._rearrange()
                return staged.weights
            self._places = None
            self.model.load_weights((name, staged[name].torch()) for name in staged)
            self._rearrange()
            return sum(math.prod(staged[name].shape) for name in staged)

        def _rearrange(self) -> None:
            """Latent attention keeps a rearranged copy of `kv_b_proj`: makes it again. Its workers may exchange
            parts of it, so all of them do this or none."""
            for module in self.model.modules():
                if hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading"):
                    module.process_weights_after_loading(self.model_config.dtype)

    return SpringtideEngine


def __getattr__(name: str) -> type[Any]:
    if name != "SpringtideEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _engine()
    globals()[name] = made
    return made
