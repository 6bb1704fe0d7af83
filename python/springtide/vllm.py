"""vLLM's weight-transfer backend: applies Springtide's patches to a running server.

vLLM loads it by itself once this package is in its environment. Start the server with
`VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "springtide"}'`. `springtide serve`
then sends `/update_weights` with one of these as `update_info`:

    {"stage": URL, "from": HASH, "to": HASH}   to get a patch while requests go on
    {"patch": URL, "from": HASH, "to": HASH}   the same patch, to be written into the weights
    {"all": URL, "to": HASH}                   to load all weights
    {"prove": URL, "to": HASH}                 to say what all weights are, while requests go on

Hashes are content hashes of versions, in hex. At a URL each worker asks the follower for all weights, or for what changes
in its own memory, and checks it (`serving::remote::update::workers`). Only if all workers of a data-parallel replica accept a
patch is its first weight written. A patch is refused unless the server holds the version that it starts from. So a
server that was restarted, or whose last update failed, loads all weights first.

After a refusal call `/finish_weight_update` (its answer does not matter) before the next update: vLLM
ends a refused update only in the worker that reported it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from springtide._artifact import ArtifactError
from springtide._engine import Follower, check_start
from springtide._places import Places, Write, writes

Result = TypeVar("Result")
Stops = Callable[[], bool]


class _Patched(NamedTuple):
    """A patch, ready to be written."""

    from_root: str
    #: How many weights of this worker change.
    weights: int
    writes: list[Write]
    #: Whether it changes what latent attention keeps a rearranged copy of.
    latent: bool


class _All(NamedTuple):
    """All weights, which the follower has."""

    follower: Follower
    versions: dict[str, Any]


class _Beside(threading.Thread):
    """Works for the follower beside the requests that the worker computes."""

    def __init__(self, update: Any, follower: Follower, work: Callable[[Follower, dict[str, Any], Stops], Any]) -> None:
        super().__init__(name="springtide", daemon=True)
        self.update = (follower.url, update.start, update.to)
        self.stopped = threading.Event()
        self._work, self._follower = work, follower
        self._made: Any = None
        self._failed: Exception | None = None
        # an error is told later: here it would be one of one worker
        try:
            self._versions = follower.versions(update.to)
            self.start()
        except Exception as error:
            self._failed = error
            self._end()

    def run(self) -> None:
        try:
            self._made = self._work(self._follower, self._versions, self.stopped.is_set)
        except Exception as error:
            self._failed = error
        self._end()

    def _end(self) -> None:
        reason = None if self._failed is None else str(self._failed)
        # the follower may need no answer any more
        with contextlib.suppress(ArtifactError, OSError):
            self._follower.end(reason)

    def made(self) -> Any:
        """Waits until it is ready."""
        if self.is_alive():
            self.join()
        if self._failed is not None:
            raise self._failed
        return self._made


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
        prove: str | None = None
        patch: str | None = None
        all: str | None = None
        # `from` is a keyword
        start: str = ""

    class SpringtideEngine(WeightTransferEngine[Init, Update]):  # type: ignore[misc]
        init_info_cls, update_info_cls, supports_draft_weight_update = Init, Update, False
        # Content hash of the version in memory; None: unknown.
        holds: str | None = None
        _places: Places | None = None
        _staging: _Beside | None = None
        _proving: _Beside | None = None

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
                self._staging = _Beside(update, self._ask(update.stage), self._patch)
                return
            if update.prove:
                self._proving = _Beside(update, self._ask(update.prove), self._prove)
                return
            if self._proving is not None:
                self._proving.stopped.set()
            self.receive_weights(update)
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
            self._staging = None
            changed = self._all_or_none(lambda: self._write(staged))
            if changed is None:
                return
            self.holds = update.to
            log.info("version %s: %d weights in %.3f s", update.to[:12], changed, time.perf_counter() - started)

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

        def _stage(self, update: Update) -> _Patched | _All:
            if update.all:
                follower = self._ask(update.all)
                return _All(follower, follower.versions(update.to))
            if not update.patch:
                raise ArtifactError("update_info needs `stage`, `prove`, `patch` or `all`")
            check_start(self.holds, update.start)
            staging, self._staging = self._staging, None
            if staging is None or staging.update != (update.patch, update.start, update.to):
                staging = _Beside(update, self._ask(update.patch), self._patch)
            staged: _Patched = staging.made()
            check_start(self.holds, staged.from_root)
            return staged

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def _patch(self, follower: Follower, versions: dict[str, Any], _: Stops) -> _Patched:
            check_start(self.holds, versions["from"])
            self._check_places()
            changed = versions["changed"]
            parts = self._where().parts(versions["tensors"], changed)
            patch = follower.patch([part.place() for part in parts], versions)
            latent = any("kv_b_proj" in name for name in changed)
            return _Patched(patch.from_root, patch.weights, writes(parts, patch), latent)

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def _prove(self, follower: Follower, versions: dict[str, Any], stops: Stops) -> None:
            if self.holds != versions["to"]:
                raise ArtifactError(f"the server holds version {self.holds}")
            self._check_places()
            follower.held(self._where().held(versions["tensors"], stops))

        def _check_places(self) -> None:
            if self.model_config.quantization is not None or self.parallel_config.enable_eplb:
                raise ArtifactError("the server quantizes its weights or moves its experts: load all")

        def _ask(self, url: str) -> Follower:
            config = self.parallel_config
            return Follower(url, config.data_parallel_rank, config.world_size)

        def _where(self) -> Places:
            if self._places is None:
                self._places = Places(self.model)
            return self._places

        def _write(self, staged: _Patched | _All) -> int:
            """Returns how many weights were written."""
            if isinstance(staged, _Patched):
                for write in staged.writes:
                    write.do()
                if staged.latent:
                    self._rearrange()
                return staged.weights
            self._places = None
            follower, versions = staged
            with follower.ending():
                self._load(follower.weights(versions))
            return sum(math.prod(shape) for _, shape, _ in versions["tensors"].values())

        def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            if self.model_config.quantization is None:
                self.model.load_weights(weights)
                self._rearrange()
                return
            # vLLM has packed the codes in its own way: it makes each layer again as it was before, loads and packs it
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)
            finalize_layerwise_reload(self.model, self.model_config)

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
