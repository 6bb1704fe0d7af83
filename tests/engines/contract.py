"""What `serving::remote` asks of an engine, and what a real one answered.

    contract.py record KIND URL FOLDER FILE   sends every request and writes the answers to FILE
    contract.py check KIND URL FOLDER FILE    sends the requests and compares the forms of the answers with FILE

KIND is vllm or sglang. Run it with a Python that has the wheel of python/. The server must hold the
model in FOLDER, demo/models/base, and run as tools/vllm-server.sh or tools/sglang-server.sh does.
SGLang must be freshly started: it refuses a patch before it has loaded all weights. `make test` replays FILE to our
clients. The server is left with the weights of FOLDER.
"""

import json
import os
import sys
import urllib.error
import urllib.request

from follower import Exchange, Follower

from springtide import Checkpoint, Patch

# What is sampled may end earlier than what was recorded, and then has another form.
TRIES = 10
# Where a follower has the folder's weights, and the patch to the same ones. The recording names no port.
ALL, PATCH = "http://127.0.0.1/all", "http://127.0.0.1/patch"
# Content hash of demo/models/base.
ROOT = "ff1ed64868a21fcf60fdcaece55dc27426b83b925ea43c4ca94b0f0608361730"
PROMPT = [5, 6, 7, 8]
UNKNOWN = [5, 6, 7, 1_000_000]
NAME = "springtide-7-bb"
# temperature, filters and biases as `serving::remote` sends them
COMMON = {
    "temperature": 0.75,
    "top_p": 1.0,
    "top_k": 5,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {"9": -100.0},
    "stop_token_ids": [1],
}


def vllm_generate(token_ids):
    sampling = {**COMMON, "max_tokens": 3, "logprobs": 2, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": token_ids, "sampling_params": sampling, "stream": True, "cache_salt": "tenant-default"}
    return ["POST", "/inference/v1/generate", body]


def vllm_complete(token_ids):
    """The route of servers without `--enable-scale-out`."""
    body = {
        **COMMON,
        "prompt": token_ids,
        "max_tokens": 3,
        "logprobs": 2,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "cache_salt": "tenant-default",
    }
    return ["POST", "/v1/completions", body]


VLLM = {
    "weights": ["GET", "/weight_info", None],
    "context": ["GET", "/v1/models", None],
    "pause": ["POST", "/pause?mode=abort&clear_cache=true", None],
    "start": ["POST", "/start_weight_update", None],
    "patch from another version": [
        "POST",
        "/update_weights",
        {"update_info": {"patch": PATCH, "from": "aa", "to": "bb"}},
    ],
    "start again": ["POST", "/start_weight_update", None],
    "all": ["POST", "/update_weights", {"update_info": {"all": ALL, "to": ROOT}}],
    "finish": ["POST", "/finish_weight_update", {"weight_version": NAME}],
    "resume": ["POST", "/resume", None],
    "new weights": ["GET", "/weight_info", None],
    "generate": vllm_generate(PROMPT),
    "unknown token": vllm_generate(UNKNOWN),
    "complete": vllm_complete(PROMPT),
    "complete an unknown token": vllm_complete(UNKNOWN),
}


def sglang_generate(token_ids, **more):
    body = {
        "input_ids": token_ids,
        "sampling_params": {**COMMON, "max_new_tokens": 3, "ignore_eos": False},
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "cache_salt": "tenant-default",
        **more,
    }
    return ["POST", "/generate", body]


def sglang_update(url):
    body = {"model_path": url, "load_format": "springtide", "weight_version": NAME, "flush_cache": True}
    return ["POST", "/update_weights_from_disk", body]


SGLANG = {
    "weights": ["GET", "/model_info", None],
    "context": ["GET", "/v1/models", None],
    "pause": ["POST", "/pause_generation", {"mode": "abort"}],
    "patch before all": sglang_update(PATCH),
    "all": sglang_update(ALL),
    "patch": sglang_update(PATCH),
    "resume": ["POST", "/continue_generation", {}],
    "new weights": ["GET", "/model_info", None],
    "generate": sglang_generate(PROMPT),
    "generate with the kept tokens": sglang_generate(PROMPT, return_sampling_mask=True),
    # an id outside the vocabulary is not sent: the server dies of it
}

KINDS = {
    "vllm": ("vLLM", VLLM, "/version", "version"),
    "sglang": ("SGLang", SGLANG, "/server_info", "version"),
}


def send(url, method, path, body):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def form(value):
    """Names and kinds, without the values; a list has the form of its first entry."""
    if isinstance(value, dict):
        # ids as names are values
        return {name.partition(":")[0]: form(one) for name, one in value.items()}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return type(value).__name__


def form_of(text):
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line and line != "data: [DONE]"]
    return [form(json.loads(part)) for part in parts] if parts else []


def compare(then, ask, name):
    """What is different from the recorded exchange, or None."""
    if then is None:
        return f"{name} is not recorded"
    for _ in range(TRIES):
        now = ask(name)
        if now["status"] == then["status"] and form_of(now["answer"]) == form_of(then["answer"]):
            return None
        if not then["answer"].startswith("data: "):
            break
    return f"{name}: {then['status']} {then['answer']}\n  is now {now['status']} {now['answer']}"


def main():
    command, kind, url, folder, path = sys.argv[1:]
    server, requests, version_path, version_name = KINDS[kind]
    weights = Checkpoint.open(folder)
    follower = Follower()
    urls = {ALL: follower.open(Exchange(None, weights)), PATCH: follower.open(Exchange(Patch.between(weights, weights), weights))}
    _, version = send(url, "GET", version_path, None)
    version = json.loads(version)[version_name]

    def ask(name):
        method, route, body = requests[name]
        sent = json.dumps(body)
        for recorded, there in urls.items():
            sent = sent.replace(recorded, there)
        status, answer = send(url, method, route, json.loads(sent))
        answer = answer.replace(os.path.abspath(folder), "/models/demo")
        for recorded, there in urls.items():
            answer = answer.replace(there, recorded)
        return {"method": method, "path": route, "request": body, "status": status, "answer": answer}

    try:
        if command == "record":
            exchanges = {name: ask(name) for name in requests}
            for name, exchange in exchanges.items():
                # a whole answer, not one that the model ended early
                while '"finish_reason":' in exchange["answer"] and '"length"' not in exchange["answer"]:
                    exchange = exchanges[name] = ask(name)
            recorded = {"server": server, "version": version, "exchanges": exchanges}
            with open(path, "w") as file:
                json.dump(recorded, file, indent=1)
                file.write("\n")
            return
        with open(path) as file:
            expected = json.load(file)
        faults = [fault for name in requests if (fault := compare(expected["exchanges"].get(name), ask, name))]
    finally:
        follower.close()
    if faults:
        sys.exit("\n".join([f"{server} {version} answers otherwise than {expected['version']}:", *faults]))
    print(f"{server} {version}: {len(requests)} answers as recorded from {expected['version']}")


main()
