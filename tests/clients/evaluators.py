"""guidellm and lm-eval against a running Springtide. They download nothing.

    evaluators.py URL MODEL FOLDER     with the Python of their environment; FOLDER has MODEL's tokenizer

lm-eval gets a task whose answers are sampled, and one whose given answers are scored. Prints one line
per check; exits with 1 if one failed.
"""

import glob
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile

URL, MODEL, FOLDER = sys.argv[1:]
HERE = pathlib.Path(__file__).parent
BIN = pathlib.Path(sys.executable).parent
PROMPTS = 4
ANSWERS = 3


def run(*command):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def guidellm(api, stream):
    with tempfile.TemporaryDirectory() as work:
        report = f"{work}/report.json"
        run(
            BIN / "guidellm",
            "run",
            "--disable-console-interactive",
            *("--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={api},stream={stream}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={PROMPTS}"),
            *("--tokenizer", f"kind=hf_auto,model={FOLDER}"),
            *("--data", "kind=text_file,path=tasks/prompts.txt"),
            *("--output", f"kind=json,path={report}"),
        )
        (benchmark,) = json.loads(pathlib.Path(report).read_text())["benchmarks"]
    errors = [request["info"].get("error") for request in benchmark["requests"]["errored"]]
    assert benchmark["metrics"]["request_totals"]["successful"] == PROMPTS, errors


def lm_eval(kind, api, *more, task="springtide_colors"):
    with tempfile.TemporaryDirectory() as work:
        run(
            BIN / "lm_eval",
            "run",
            *("--model", kind),
            *("--model_args", f"model={MODEL},base_url={URL}{api},tokenizer={FOLDER},num_concurrent=2,max_retries=1"),
            *("--tasks", task, "--include_path", "tasks"),
            *("--output_path", work, "--log_samples", *more),
        )
        (samples,) = glob.glob(f"{work}/**/samples_*.jsonl", recursive=True)
        lines = [json.loads(line) for line in pathlib.Path(samples).read_text().splitlines()]
    assert len(lines) == ANSWERS, lines
    return lines


def sampled(*arguments):
    lines = lm_eval(*arguments)
    assert all(isinstance(line["resps"][0][0], str) for line in lines), lines


def scored():
    lines = lm_eval("local-completions", "/v1/completions", task="springtide_choices")
    for line in lines:
        for ((likelihood, greedy),) in line["resps"]:
            assert float(likelihood) < 0 and str(greedy) in ("True", "False"), line


CHECKS = {
    "guidellm": {
        "completions": lambda: guidellm("/v1/completions", "false"),
        "completion_streams": lambda: guidellm("/v1/completions", "true"),
        "chat_streams": lambda: guidellm("/v1/chat/completions", "true"),
    },
    "lm-eval": {
        "local_completions": lambda: sampled("local-completions", "/v1/completions"),
        "local_completions_log_likelihood": scored,
        "local_chat_completions": lambda: sampled(
            "local-chat-completions", "/v1/chat/completions", "--apply_chat_template"
        ),
    },
}


def main():
    failed = False
    for client, checks in CHECKS.items():
        version = importlib.metadata.version(client)
        for name, check in checks.items():
            try:
                check()
                outcome = "ok"
            except Exception as error:  # every check is reported
                failed, outcome = True, f"FAILED: {type(error).__name__}: {error}"
            print(f"{client} {version} {name}: {outcome}", flush=True)
    sys.exit(failed)


main()
