"""Coding agents that know nothing of Springtide, run in a scratch folder. What they ask is captured.

    agents.py URL INGEST_URL MODEL NODE_FOLDER PSQL DATABASE

Claude Code asks through Messages, Codex through Responses. The small model answers noise, so the
agents do nothing useful. Checked is that each ends without an error, that the log has its
generations with token ids and log-probabilities under the agent's session, and that feedback on them
is accepted. Prints one line per check; exits with 1 if one failed.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

URL, INGEST_URL, MODEL, NODE_FOLDER, PSQL, DATABASE = sys.argv[1:]
NODE = pathlib.Path(NODE_FOLDER)
TASK = "Say hello."
# Agents send their instructions and tools with every request.
PROMPT_TOKENS_MIN = 5_000
STORED_S_MAX = 60


def run(command, scratch, **environment):
    """Its standard output."""
    # its own home: no setting and no login of the user is read
    environment = {"PATH": os.environ["PATH"], "HOME": scratch, **environment}
    work = pathlib.Path(scratch) / "work"
    work.mkdir()
    done = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


def claude_code(scratch):
    """Returns the id of its session."""
    out = run(
        [NODE / "node_modules/.bin/claude", "-p", TASK, "--model", MODEL, "--output-format", "json"],
        scratch,
        ANTHROPIC_BASE_URL=URL,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="8000",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_TELEMETRY="1",
        DISABLE_ERROR_REPORTING="1",
        API_TIMEOUT_MS="500000",
    )
    result = json.loads(out)
    assert not result["is_error"] and result["stop_reason"] == "end_turn", out
    return result["session_id"]


def codex(scratch):
    """Returns the id of its session."""
    home = pathlib.Path(scratch) / "codex"
    home.mkdir()
    provider = f'{{name="springtide", base_url="{URL}/v1", wire_api="responses", request_max_retries=0}}'
    out = run(
        [
            *(NODE / "node_modules/.bin/codex", "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only"),
            *("-c", "model_provider=springtide", "-c", f"model_providers.springtide={provider}"),
            *("-c", "analytics.enabled=false", "-m", MODEL, TASK),
        ],
        scratch,
        CODEX_HOME=str(home),
    )
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert events[-1]["type"] == "turn.completed", out
    return events[0]["thread_id"]


def logged(session):
    """Generations of a session: (id, prompt tokens, tokens, log-probabilities, reason of the end)."""
    query = (
        "select id, cardinality(prompt_ids), cardinality(token_ids), cardinality(logprobs), finish_reason"
        " from generation where episode_id = :'session' order by id"
    )
    command = [PSQL, DATABASE, "--no-psqlrc", "--tuples-only", "--no-align", "--variable", f"session={session}"]
    waiting = time.monotonic()
    while True:
        done = subprocess.run(command, input=query, capture_output=True, text=True, check=True)
        rows = [line.split("|") for line in done.stdout.splitlines()]
        if rows or time.monotonic() - waiting > STORED_S_MAX:
            return rows
        time.sleep(0.5)


def send_feedback(generation):
    body = {"generation_id": generation, "metric_name": "accept", "value": True}
    request = urllib.request.Request(
        f"{INGEST_URL}/v1/feedback",
        json.dumps(body).encode(),
        {"content-type": "application/json", "idempotency-key": f"agents-{generation}"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200, response.status


def check(agent):
    """What was captured, in words."""
    with tempfile.TemporaryDirectory(dir=NODE) as scratch:
        session = agent(scratch)
    rows = logged(session)
    assert rows, f"the log has no generation of the session {session}"
    assert all(int(tokens) == int(logprobs) > 0 for _, _, tokens, logprobs, _ in rows), rows
    assert int(rows[0][1]) >= PROMPT_TOKENS_MIN, rows
    for row in rows:
        send_feedback(row[0])
    tokens = sum(int(row[2]) for row in rows)
    return f"{len(rows)} generations, first prompt {rows[0][1]} tokens, {tokens} sampled, feedback accepted"


def main():
    versions = json.loads((NODE / "package.json").read_text())["dependencies"]
    failed = False
    for package, agent in {"@anthropic-ai/claude-code": claude_code, "@openai/codex": codex}.items():
        try:
            outcome = f"ok ({check(agent)})"
        except Exception as error:  # every agent is reported
            failed, outcome = True, f"FAILED: {type(error).__name__}: {error}"
        print(f"{package} {versions[package]}: {outcome}", flush=True)
    sys.exit(failed)


main()
