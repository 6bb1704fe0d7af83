"""Applies a patch to a running engine: exact afterwards, and refused where it does not fit.

    patch.py vllm|sglang URL FOLDER    with the Python of an environment that has the wheel of python/

The server must hold the model in FOLDER and run as docs/guide-serving.md says. Compared are served
log-probabilities: after the patch, and after all weights of the same version were loaded. The server
is left with the weights of FOLDER.
"""

import fcntl
import json
import shutil
import struct
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from springtide import Checkpoint, Patch

PROMPT = [262, 297, 1138, 312, 1218, 415, 1987, 17, 266, 452, 338, 1344, 360, 304, 12, 355, 224, 1]
SHARED_MEMORY = Path("/dev/shm/springtide")


def send(url, body=None, method="POST"):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read() or "null")


class Vllm:
    """A server as `serving::remote::vllm` uses it."""

    def __init__(self, url):
        self.url = url

    def folder(self, folder, root, name):
        """Why a folder of all weights was refused, or None."""
        return self._update({"folder": str(folder), "to": root}, name)

    def patch(self, file, start, end, name):
        self._send_update({"stage": str(file), "from": start, "to": end}, {})
        with open(file, "rb") as read:
            fcntl.flock(read, fcntl.LOCK_EX)  # its readers have a shared one
        return self._update({"patch": str(file), "from": start, "to": end}, name)

    def _send_update(self, info, name):
        send(f"{self.url}/start_weight_update")
        send(f"{self.url}/update_weights", {"update_info": info})
        send(f"{self.url}/finish_weight_update", name)

    def _update(self, info, name):
        send(f"{self.url}/pause?mode=abort&clear_cache=true")
        try:
            self._send_update(info, {"weight_version": name})
            return None
        except urllib.error.HTTPError as refused:
            try:  # of several workers, vLLM ends the update in the one that failed
                send(f"{self.url}/finish_weight_update", {})
            except urllib.error.HTTPError:
                pass
            return refused.read().decode()
        finally:
            send(f"{self.url}/resume")

    def version(self):
        return send(f"{self.url}/weight_info", method="GET")["weight_version"]

    def logprobs(self):
        """Of 24 greedy tokens: (id, log-probability)."""
        sampling = {"max_tokens": 24, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        answer = send(f"{self.url}/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling})
        content = answer["choices"][0]["logprobs"]["content"]
        return [(one["token_id"], one["logprob"]) for one in content]


class Sglang:
    """SGLang with the plugin of python/."""

    def __init__(self, url):
        self.url = url

    def folder(self, folder, root, name):
        return self._update(folder, name)

    def patch(self, file, start, end, name):
        return self._update(file, name)

    def _update(self, path, name):
        send(f"{self.url}/pause_generation", {"mode": "retract"})
        body = {"model_path": str(path), "load_format": "springtide", "weight_version": name}
        try:
            answer = send(f"{self.url}/update_weights_from_disk", body)
            return None if answer["success"] else answer["message"]
        except urllib.error.HTTPError as refused:
            return refused.read().decode()
        finally:
            send(f"{self.url}/continue_generation", {})

    def version(self):
        return send(f"{self.url}/model_info", method="GET")["weight_version"]

    def logprobs(self):
        # a cached prefix is added up in another order
        flush = urllib.request.Request(f"{self.url}/flush_cache", b"", method="POST")
        urllib.request.urlopen(flush, timeout=120).close()
        sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        answer = send(f"{self.url}/generate", body)
        return [(one[1], one[0]) for one in answer["meta_info"]["output_token_logprobs"]]


def write_next(base, folder):
    """A copy of a model folder; each fiftieth weight of its BF16 tensors has another bit."""
    shutil.copytree(base, folder)
    path = folder / "model.safetensors"
    file = bytearray(path.read_bytes())
    (header_bytes,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + header_bytes])
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "BF16":
            start, end = entry["data_offsets"]
            for position in range(8 + header_bytes + start, 8 + header_bytes + end, 100):
                file[position] ^= 0x10
    path.write_bytes(file)


def main():
    kinds = {"vllm": Vllm, "sglang": Sglang}
    engine, base = kinds[sys.argv[1]](sys.argv[2]), Path(sys.argv[3])
    SHARED_MEMORY.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as work:
        old_folder, new_folder, file = Path(work) / "old", Path(work) / "new", Path(work) / "patch.safetensors"
        shutil.copytree(base, old_folder)
        write_next(base, new_folder)
        old, new = Checkpoint.open(old_folder), Checkpoint.open(new_folder)
        patch = Patch.between(old, new)
        patch.write(file)
        step = (file, old.root(), new.root())
        refusals = 0

        def expect(reason, refused):
            nonlocal refusals
            assert refused is not None and reason in refused, (reason, refused)
            refusals += 1

        assert engine.folder(old_folder, old.root(), "old") is None
        before = engine.logprobs()
        if isinstance(engine, Vllm):  # SGLang is not told which version it should become
            expect("another version or damaged", engine.folder(new_folder, old.root(), "refused"))
            expect("leads from", engine.patch(file, old.root(), old.root(), "refused"))
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        expect("do not match their digest", engine.patch(*step, "refused"))
        assert engine.logprobs() == before, "a refused update changed the weights"
        file.write_bytes(good)
        assert engine.patch(*step, "new") is None
        patched = engine.logprobs()
        assert engine.version() == "new"
        expect("load a folder first", engine.patch(*step, "refused"))
        assert engine.folder(new_folder, new.root(), "new") is None
        assert engine.logprobs() == patched, "the patched weights answer otherwise than the loaded ones"
        difference = max(abs(a - b) for (_, a), (_, b) in zip(before, patched))
        assert difference > 1e-3, "the patch changed nothing"
        assert engine.folder(old_folder, old.root(), "old") is None
        assert engine.logprobs() == before
    print(
        f"{sys.argv[1]}: a patch of {patch.weights} weights is exact (it moved log-probabilities by up to "
        f"{difference:.3f}); {refusals} other updates were refused"
    )


if __name__ == "__main__":
    main()
