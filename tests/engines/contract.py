"""What `serving::remote::vllm` asks of a vLLM server, and what a real one answered.

    contract.py record URL FOLDER FILE   sends every request and writes the answers to FILE
    contract.py check URL FOLDER FILE    sends the requests of FILE and compares the forms of the answers

The server must hold the model in FOLDER, models/demo-base, and run as docs/guide-serving.md says. `make
test` replays FILE to our client. The server is left with the weights of FOLDER.
"""

import json
import os
import shutil
import sys
import urllib.error
import urllib.request

COPY = "/dev/shm/springtide/contract.folder"
# Content hash of models/demo-base.
ROOT = "2a23c48fb6484018355c3f7b7ffd335fba043f8d5fc3b38dab4e987bb645d21a"
SAMPLING = {
    "max_tokens": 3,
    "temperature": 0.75,
    "top_p": 1.0,
    "top_k": 5,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {"9": -100.0},
    "logprobs": 2,
    "stop_token_ids": [1],
    "ignore_eos": True,
    "detokenize": False,
}


def generate(token_ids):
    body = {
        "token_ids": token_ids,
        "sampling_params": SAMPLING,
        "stream": True,
        "cache_salt": "tenant-default",
    }
    return ["POST", "/inference/v1/generate", body]


REQUESTS = {
    "weights": ["GET", "/weight_info", None],
    "context": ["GET", "/v1/models", None],
    "pause": ["POST", "/pause?mode=abort&clear_cache=true", None],
    "start": ["POST", "/start_weight_update", None],
    "patch from another version": [
        "POST",
        "/update_weights",
        {"update_info": {"patch": "/dev/shm/springtide/contract.safetensors", "from": "aa", "to": "bb"}},
    ],
    "start again": ["POST", "/start_weight_update", None],
    "folder": ["POST", "/update_weights", {"update_info": {"folder": COPY, "to": ROOT}}],
    "finish": ["POST", "/finish_weight_update", {"weight_version": "springtide-7-bb"}],
    "resume": ["POST", "/resume", None],
    "new weights": ["GET", "/weight_info", None],
    "generate": generate([5, 6, 7, 8]),
    "unknown token": generate([5, 6, 7, 1_000_000]),
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
        return {name: form(one) for name, one in value.items()}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return type(value).__name__


def form_of(text):
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line and line != "data: [DONE]"]
    return [form(json.loads(part)) for part in parts] if parts else []


def main():
    command, url, folder, path = sys.argv[1:]
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(folder, COPY)
    _, version = send(url, "GET", "/version", None)
    try:
        answers = {}
        for name, (method, route, body) in REQUESTS.items():
            status, answer = send(url, method, route, body)
            answer = answer.replace(os.path.abspath(folder), "/models/demo")
            answers[name] = {"method": method, "path": route, "request": body, "status": status, "answer": answer}
    finally:
        shutil.rmtree(COPY, ignore_errors=True)
    recorded = {"server": "vLLM", "version": json.loads(version)["version"], "exchanges": answers}
    if command == "record":
        with open(path, "w") as file:
            json.dump(recorded, file, indent=1)
            file.write("\n")
        return
    with open(path) as file:
        expected = json.load(file)
    faults = []
    for name, now in answers.items():
        then = expected["exchanges"][name]
        if now["status"] != then["status"] or form_of(now["answer"]) != form_of(then["answer"]):
            faults.append(f"{name}: {then['status']} {then['answer']}\n  is now {now['status']} {now['answer']}")
    if faults:
        sys.exit("\n".join([f"{recorded['version']} answers otherwise than {expected['version']}:", *faults]))
    print(f"vLLM {recorded['version']}: {len(answers)} answers as recorded from {expected['version']}")


main()
