"""vLLM weight-transfer backend: applies Springtide's patches to a running server.

Start the server with `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "springtide"}'`.
`springtide serve` then sends `/update_weights` with one of these as `update_info`:

    {"patch": FILE, "from": HASH, "to": HASH}   a file of `artifact::patch`
    {"folder": FOLDER, "to": HASH}              a Hugging Face folder: all weights

Hashes are content hashes of versions, in hex. A patch is refused, before anything changes, unless the
server holds the version that it starts from. So a server that was restarted, or whose last update
failed, takes a folder first.
"""

import glob
import json
import os
import time
from dataclasses import dataclass

FORMAT = "springtide-patch-1"


def register():
    """Called by vLLM in each of its processes."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM packs weights for oneDNN and drops the originals: nothing would be left to patch, and a
        # tied lm_head would keep its old packed copy.
        import vllm._custom_ops as ops

        ops._supports_onednn = False
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "springtide" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("springtide", "springtide_vllm", "SpringtideEngine")


def read_patch(path, holds, start, end):
    """The tensors of a patch and the shapes of what they change.

    Raises ValueError if it is not a patch from `start` to `end`, or if `start` is not what the server
    holds.
    """
    from safetensors import safe_open

    if holds != start:
        raise ValueError(f"the server holds version {holds}, and the patch starts from {start}: load a folder first")
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} has the format {metadata.get('format')}, not {FORMAT}")
        if (metadata.get("from"), metadata.get("to")) != (start, end):
            raise ValueError(f"{path} leads from {metadata.get('from')} to {metadata.get('to')}")
        shapes = json.loads(metadata["shapes"])
        tensors = {name: (file.get_tensor(f"{name}|i"), file.get_tensor(f"{name}|v")) for name in shapes}
    for name, (indices, values) in tensors.items():
        size = 1
        for extent in shapes[name]:
            size *= extent
        in_range = bool(indices.numel()) and 0 <= int(indices.min()) and int(indices.max()) < size
        if indices.shape != values.shape or not in_range:
            raise ValueError(f"{path}: the patch of {name} does not fit its shape {shapes[name]}")
    return tensors, shapes


def _engine():
    """The class that vLLM asks for. Made late, so that `register` stays cheap."""
    import torch
    from safetensors import safe_open
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
    class Init(WeightTransferInitInfo):
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):
        to: str = ""
        patch: str | None = None
        folder: str | None = None
        # `from` is a keyword
        start: str = ""

    class SpringtideEngine(WeightTransferEngine[Init, Update]):
        init_info_cls, update_info_cls, supports_draft_weight_update = Init, Update, False
        # Content hash of the version in memory; None: unknown.
        holds = None

        def init_transfer_engine(self, init_info):
            pass

        def start_weight_update(self):
            pass

        def finish_weight_update(self):
            pass

        def shutdown(self):
            pass

        def update_weights(self, update_info):
            # the base class synchronizes an accelerator, which a CPU does not have
            update_info = dict(update_info)
            if "from" in update_info:
                update_info["start"] = update_info.pop("from")
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        @torch.no_grad()
        def receive_weights(self, update):
            started = time.perf_counter()
            if update.patch:
                tensors, shapes = read_patch(update.patch, self.holds, update.start, update.to)
                # until the last write the weights are neither version
                self.holds = None
                patches = [
                    CheckpointWeightPatch(name, tuple(shapes[name]), values.dtype, values, indices)
                    for name, (indices, values) in tensors.items()
                ]
                load_checkpoint_weight_patches(self.model, patches)
                changed = sum(values.numel() for _, values in tensors.values())
            elif update.folder:
                self.holds = None
                changed = self._load_folder(update.folder)
            else:
                raise ValueError("update_info needs `patch` or `folder`")
            self.holds = update.to
            log.info("version %s: %d weights in %.3f s", update.to[:12], changed, time.perf_counter() - started)

        def _load_folder(self, folder):
            files = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
            if not files:
                raise ValueError(f"{folder} has no *.safetensors")
            count = 0

            def weights():
                nonlocal count
                for path in files:
                    with safe_open(path, "pt") as file:
                        for name in file.keys():
                            tensor = file.get_tensor(name)
                            count += tensor.numel()
                            yield name, tensor

            self.model.load_weights(weights())
            return count

    return SpringtideEngine


def __getattr__(name):
    if name != "SpringtideEngine":
        raise AttributeError(name)
    globals()[name] = _engine()
    return globals()[name]
