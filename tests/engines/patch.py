"""Applies a patch to a running engine: exact afterwards, and refused where it does not fit. Then finds planted faults by
what vLLM's workers say that they hold.

    patch.py vllm|sglang URL FOLDER    with the Python of an environment that has the wheel of python/

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

from follower import Exchange, Follower

from springtide import Checkpoint, Patch

PROMPT = [262, 297, 1138, 312, 1218, 415, 1987, 17, 266, 452, 338, 1344, 360, 304, 12, 355, 224, 1]


def send(url, body=None, method="POST"):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read() or "null")


class Vllm:
    """A server as `serving::remote::vllm` uses it."""

    def __init__(self, url):
        self.url = url

    def all(self, url, root, name):
        """Why all weights were refused, or None."""
        return self._update({"all": url, "to": root}, name)

    def patch(self, url, exchange, start, end, name):
        self._send_update({"stage": url, "from": start, "to": end}, {})
        exchange.wait()
        return self._update({"patch": url, "from": start, "to": end}, name)

    def prove(self, url, exchange, to):
        """How each worker has ended: with the tensors of which it holds others, or why it says nothing."""
        self._send_update({"prove": url, "to": to}, {})
        return exchange.wait()

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

    def all(self, url, root, name):
        return self._update(url, name)

    def patch(self, url, exchange, start, end, name):
        return self._update(url, name)

    def _update(self, url, name):
        send(f"{self.url}/pause_generation", {"mode": "retract"})
        body = {"model_path": url, "load_format": "springtide", "weight_version": name}
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


class Damaged(Exchange):
    def own_patch(self, worker, parts):
        own = super().own_patch(worker, parts)
        return own[:-1] + bytes([own[-1] ^ 1])


class DamagedWeights(Exchange):
    def all_weights(self):
        all_weights = super().all_weights()
        return all_weights[:-1] + bytes([all_weights[-1] ^ 1])


class Mistaken(Exchange):
    """Compares with a version that the engine was not given, as after an update that went wrong unnoticed."""

    def __init__(self, checkpoint, root):
        super().__init__(None, checkpoint)
        self.root = root

    def versions(self, worker):
        return super().versions(worker) | {"to": self.root}


def with_fault(folder, faulty, name, places):
    """A copy of a model folder; these weights of a tensor have another last bit."""
    shutil.copytree(folder, faulty)
    path = faulty / "model.safetensors"
    with path.open("r+b") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(header_bytes))[name]
        start, end = entry["data_offsets"]
        width = (end - start) // Checkpoint.open(folder)[name].torch().numel()
        for place in places:
            file.seek(8 + header_bytes + start + place * width)
            (low,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([low ^ 1]))
    return Checkpoint.open(faulty)


def main():
    kinds = {"vllm": Vllm, "sglang": Sglang}
    engine, base = kinds[sys.argv[1]](sys.argv[2]), Path(sys.argv[3])
    with tempfile.TemporaryDirectory() as work, Follower() as follower:
        old_folder, new_folder = Path(work) / "old", Path(work) / "new"
        shutil.copytree(base, old_folder)
        write_next(base, new_folder)
        old, new = Checkpoint.open(old_folder), Checkpoint.open(new_folder)
        patch = Patch.between(old, new)
        refusals = 0

        def expect(reason, refused):
            nonlocal refusals
            assert refused is not None and reason in refused, (reason, refused)
            refusals += 1

        def give(kind=Exchange, end=new.root(), name="refused"):
            exchange = kind(patch, new)
            return engine.patch(follower.open(exchange), exchange, old.root(), end, name)

        def load(checkpoint, name, root=None, kind=Exchange):
            return engine.all(follower.open(kind(None, checkpoint)), root or checkpoint.root(), name)

        assert load(old, "old") is None
        before = engine.logprobs()
        if isinstance(engine, Vllm):  # SGLang is not told which version it should become
            expect("the follower has version", load(new, "refused", old.root()))
            expect("the follower has version", give(end=old.root()))
        expect("do not match their digest", give(Damaged))
        assert engine.logprobs() == before, "a refused update changed the weights"
        assert give(name="new") is None
        patched = engine.logprobs()
        assert engine.version() == "new"
        expect("load all first", give())
        assert load(new, "new") is None
        assert engine.logprobs() == patched, "the patched weights answer otherwise than the loaded ones"
        difference = max(abs(a - b) for (_, a), (_, b) in zip(before, patched))
        assert difference > 1e-3, "the patch changed nothing"
        found = find_faults(engine, follower, Path(work), new_folder, new) if isinstance(engine, Vllm) else 0
        expect("other bytes than", load(old, "refused", kind=DamagedWeights))
        expect("load all first", give())
        assert load(old, "old") is None
        assert engine.logprobs() == before
        if isinstance(engine, Vllm):  # also after another update
            exchange = Exchange(None, old)
            held = engine.prove(follower.open(exchange), exchange, old.root())
            assert held == [[]] * len(exchange.parts), held
    print(
        f"{sys.argv[1]}: a patch of {patch.weights} weights is exact (it moved log-probabilities by up to "
        f"{difference:.3f}); {refusals} other updates were refused; {found} planted faults were found by bytes"
    )


def find_faults(engine, follower, work, folder, new):
    """The engine holds `new`. Returns how many faults were found, each by its tensor and by no other one."""

    def proof(exchange):
        ended = engine.prove(follower.open(exchange), exchange, new.root())
        parts = [part for parts in exchange.parts.values() for part in parts]
        missing = {*new} - {part["tensor"] for part in parts}
        assert not missing, f"not compared: {missing} ({ended})"
        return sorted({name for wrong in ended for name in wrong})

    assert proof(Exchange(None, new)) == []
    name = next(name for name in new if name.endswith("0.self_attn.o_proj.weight"))
    rows, columns = new[name].shape
    faults = {"weight": [columns + 1], "row": range(columns), "rank": [row * columns + column for row in range(rows) for column in range(columns // 2)], "tensor": range(rows * columns)}
    for fault, places in faults.items():
        other = with_fault(folder, work / fault, name, places)
        assert proof(Mistaken(other, new.root())) == [name], fault
    return len(faults)


if __name__ == "__main__":
    main()
