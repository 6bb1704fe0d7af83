"""Applies a patch to a running vLLM: exact afterwards, and refused where it does not fit.

    patch.py URL FOLDER    with the Python of an environment that has the wheel of python/

The server must hold the model in FOLDER and run as docs/guide-serving.md says. Compared are served
log-probabilities: after the patch, and after all weights of the same version were loaded. The server
is left with the weights of FOLDER.
"""

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


def update(url, info, name):
    """New weights, as `serving::remote::vllm` gives them. Returns why they were refused, or None."""
    send(f"{url}/pause?mode=abort&clear_cache=true")
    send(f"{url}/start_weight_update")
    try:
        send(f"{url}/update_weights", {"update_info": info})
        send(f"{url}/finish_weight_update", {"weight_version": name})
        return None
    except urllib.error.HTTPError as refused:
        return refused.read().decode()
    finally:
        send(f"{url}/resume")


def logprobs(url):
    """Of 24 greedy tokens: (id, log-probability)."""
    sampling = {"max_tokens": 24, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    answer = send(f"{url}/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling})
    choice = answer["choices"][0]
    return [(one["token_id"], one["logprob"]) for one in choice["logprobs"]["content"]]


def write_next(base, folder):
    """A copy of a model folder in which each fiftieth weight of a BF16 tensor moves by an eighth of itself."""
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
    url, base = sys.argv[1], Path(sys.argv[2])
    SHARED_MEMORY.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as work:
        old_folder, new_folder, file = Path(work) / "old", Path(work) / "new", Path(work) / "patch.safetensors"
        shutil.copytree(base, old_folder)
        write_next(base, new_folder)
        old, new = Checkpoint.open(old_folder), Checkpoint.open(new_folder)
        patch = Patch.between(old, new)
        patch.write(file)
        whole_old = {"folder": str(old_folder), "to": old.root()}
        whole_new = {"folder": str(new_folder), "to": new.root()}
        step = {"patch": str(file), "from": old.root(), "to": new.root()}

        def expect(reason, info):
            refused = update(url, info, "refused")
            assert refused is not None and reason in refused, (reason, refused)

        assert update(url, whole_old, "old") is None
        before = logprobs(url)
        expect("another version or damaged", {**whole_new, "to": old.root()})
        expect("leads from", {**step, "to": old.root()})
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        expect("do not match their digest", step)
        assert logprobs(url) == before, "a refused update changed the weights"
        file.write_bytes(good)
        assert update(url, step, "new") is None
        patched = logprobs(url)
        assert send(f"{url}/weight_info", method="GET")["weight_version"] == "new"
        expect("load a folder first", step)
        assert update(url, whole_new, "new") is None
        assert logprobs(url) == patched, "the patched weights answer otherwise than the loaded ones"
        difference = max(abs(a - b) for (_, a), (_, b) in zip(before, patched))
        assert difference > 1e-3, "the patch changed nothing"
        assert update(url, whole_old, "old") is None
        assert logprobs(url) == before
    print(f"vLLM: a patch of {patch.weights} weights is exact (moved log-probabilities by {difference:.3f}), 4 refused")


main()
