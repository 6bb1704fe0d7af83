"""Cohorts, against a server that answers what a test says. `tests/learning/trainer/door.rs` has the real one."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from faulty_server import Answer, Server, serving

from springtide import (
    ConflictError,
    RequestError,
    Retries,
    SpringtideError,
    Trainer,
    TrainingSample,
    bundles,
    reference,
)
from springtide import _trainer as trainers

SOON = Retries(attempts_max=4, first_delay_seconds=0.001)
NOTHING = Answer(204)
ENDED = Answer(409, {"type": "/problems/conflict", "title": "Conflict", "detail": "run r is succeeded"})
SUCCEEDED = Answer(200, {"id": "r", "status": "succeeded"})
DONE = Answer(200, {"object": "cohort"})


def cohort(**more: Any) -> dict[str, Any]:
    leased = {
        "object": "cohort",
        "id": "c",
        "run_id": "r",
        "line": "realtime",
        "step": 3,
        "state": "full",
        "fence": 7,
        "parent": 12,
        "parent_root": "ab",
        "trainer_state": {"at": 2},
        "lease_seconds": 600,
        "parts": 1,
    }
    return {**leased, **more}


def trainer_at(server: Server, **settings: Any) -> Trainer:
    return Trainer("r", server.url, api_key="secret", retries=SOON, progress=False, **settings)


def row(**more: Any) -> dict[str, Any]:
    names = "prompt_missing train_mask turn_reward group_id episode_turns".split()
    known = {
        "generation_id": bytes(range(16)),
        "episode_id": bytes(16),
        "prompt_ids": [1, 2],
        "token_ids": [3, 4, 5],
        "logprobs": [-0.5, -1.0, -2.0],
        "advantage": -0.25,
        "weight": 2.0,
        "reward": 0.75,
        "bundle": 4,
        "turn": 1,
        "version": 9,
        "version_oldest": 8,
        "temperature": 0.5,
    }
    return {**dict.fromkeys(names), **known, **more}


def test_logged_experts_are_read_by_token_layer_and_rank() -> None:
    def logged(count: int, ids: bytes) -> tuple[int, memoryview] | None:
        header = struct.pack("<8s3I3H6x", b"SPTEXPRT", 1, 3, 1, 2, 2, count)
        return TrainingSample.of(row(experts=header + ids)).experts

    assert TrainingSample.of(row()).experts is None
    first, small = logged(256, bytes(range(12))) or (0, memoryview(b""))
    last: Any = small.tolist()[2]
    assert (first, last) == (1, [[8, 9], [10, 11]])
    _, large = logged(300, struct.pack("<12H", *range(288, 300))) or (0, memoryview(b""))
    ids: Any = large.tolist()
    assert (len(ids), ids[0]) == (3, [[288, 289], [290, 291]])


def test_a_cohort_is_committed_with_its_files_and_what_was_dropped(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    committed = Answer(200, cohort(state="committed", version=13, root="cd"))
    verifying = Answer(202, cohort(state="submitted", version=None))
    answers = (NOTHING, Answer(201, cohort()), NOTHING, verifying, committed, ENDED, SUCCEEDED)
    with serving(*answers) as server:
        versions = []
        for one in trainer_at(server):
            assert (one.step, one.parent, one.state, one.fence) == (3, 12, {"at": 2}, 7)
            one.drop("11111111-1111-7111-8111-111111111111", "too_long")
            versions.append(one.commit(tmp_path, metrics={"loss": 0.5}, state={"at": 3}))
    assert versions == [13]
    paths = [received.path for received in server.received]
    asked = "/v1/runs/r/cohorts"
    commit = "/v1/cohorts/c/commit"
    assert paths == [asked, asked, "/v1/cohorts/c/files/model.safetensors/0?fence=7", commit, commit, asked, "/v1/runs/r"]
    upload = server.received[2]
    digest = base64.b64encode(hashlib.sha256(b"weights").digest()).decode()
    assert (upload.body, upload.headers["content-digest"]) == (b"weights", f"sha-256=:{digest}:")
    body = server.received[3].body
    assert body == server.received[4].body, "the same token"
    assert body["files"] == {"model.safetensors": 7}
    assert (body["fence"], body["parent_root"]) == (7, "ab")
    assert body["dropped"] == {"11111111-1111-7111-8111-111111111111": "too_long"}
    assert (body["metrics"], body["state"]) == ({"loss": 0.5}, {"at": 3})


def test_the_adapter_that_rank_0_finds_is_committed_by_it_alone(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"factors")
    committed = Answer(200, cohort(state="committed", version=13, root="cd"))
    with serving(Answer(201, cohort()), NOTHING, committed, ENDED, SUCCEEDED) as server:
        for one in trainer_at(server):
            one.commit(tmp_path)
    body = server.received[2].body
    assert (body["files"], body["adapter"]) == ({"adapter_model.safetensors": 7}, config)
    answers = [[(cohort(), None)], [((config,), None)], [(({"adapter_model.safetensors": 7}, {}), None), (({}, {}), None)]]
    answers.append([({"state": "committed", "version": 13}, None)])
    with serving() as server:  # rank 1 has no folder, and sends nothing
        second = iter(trainer_at(server, rank=1, world_size=2, gather=lambda _: answers.pop(0)))
        assert next(second).commit(tmp_path / "elsewhere") == 13
    assert (server.received, answers) == ([], [])


def test_a_cohort_that_is_left_goes_back_and_a_lost_one_does_not(tmp_path: Path) -> None:
    with serving(Answer(201, cohort()), DONE) as server:
        with pytest.raises(ZeroDivisionError):
            for _ in trainer_at(server):
                1 / 0
    assert server.received[1].path == "/v1/cohorts/c/abort"
    # not the text, which may hold a user's
    assert server.received[1].body == {"fence": 7, "reason": "GeneratorExit"}
    refused = Answer(422, {"type": "about:blank", "title": "Not published", "detail": "`a` has values that are not finite"})
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with serving(Answer(201, cohort()), NOTHING, refused, DONE) as server:
        with pytest.raises(RequestError, match="not finite"):
            for one in trainer_at(server):
                one.commit(tmp_path)


def test_a_cohort_may_be_dropped_as_a_whole() -> None:
    dropped = Answer(200, cohort(state="dropped", version=None))
    with serving(Answer(201, cohort()), Answer(503, {}), dropped, ENDED, SUCCEEDED) as server:
        for one in trainer_at(server):
            one.drop_all("too_old")
    assert server.received[2].body["dropped_all"] == "too_old"
    assert "files" not in server.received[2].body


def test_ranks_get_the_lease_of_rank_0_or_its_error_and_upload_their_own_shards(tmp_path: Path) -> None:
    for rank in (1, 2):
        (tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors").write_bytes(b"x" * rank)
    not_yet: list[Any] = [(None, None)]
    files = [(({"shard-00001-model-00001-of-00001.safetensors": 1}, {}), None), (({}, {"g": "code"}), None)]
    refused = pickle.loads(pickle.dumps(ConflictError(409, {"detail": "leased"})))
    whole: list[Any] = [((None,), None)]
    shared = iter([not_yet, [(cohort(), None)], whole, files, not_yet, [({"version": 13}, None)], [(None, refused)]])
    with serving(NOTHING) as server:
        trainer = trainer_at(server, rank=1, world_size=2, gather=lambda value: next(shared))
        with pytest.raises(ConflictError, match="leased"):
            for one in trainer:
                assert one.commit(tmp_path) == 13
    paths = [received.path for received in server.received]
    assert paths == ["/v1/cohorts/c/files/shard-00002-model-00001-of-00001.safetensors/0?fence=7"]
    with pytest.raises(ValueError, match="gather"):
        Trainer("r", world_size=2)


def test_an_attempt_of_torchrun_takes_over_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with serving(ENDED, SUCCEEDED) as server:
        trainer = trainer_at(server)
        assert list(trainer) == []
        monkeypatch.setattr(os, "getppid", lambda: 1)
        with pytest.raises(SpringtideError, match="launcher"):
            list(trainer)
    body = server.received[0].body
    assert body["client_token"].startswith("job/") and body["client_token"].endswith("/2")
    assert body["replaces"] == body["client_token"][:-1] + "1"


def test_a_sample_has_a_value_for_each_token() -> None:
    sample = TrainingSample.of(row(train_mask=[True, False, True]))
    assert sample.token_ids == [1, 2, 3, 4, 5]
    assert sample.loss_mask == [False, False, True, False, True]
    assert sample.logprobs == [0.0, 0.0, -0.5, -1.0, -2.0]
    assert (sample.prompt_len, sample.min_policy_version, sample.max_policy_version) == (2, 8, 9)
    assert sample.trajectory_id == sample.generation_id
    assert TrainingSample.of(row(episode_turns=2)).trajectory_id == sample.episode_id
    with pytest.raises(Exception, match="parent_missing"):
        TrainingSample.of(row(prompt_missing="parent_missing", prompt_ids=None))
    turns = [TrainingSample.of(row(bundle=bundle)) for bundle in (1, 2, 1)]
    assert [len(bundle) for bundle in bundles(turns)] == [2, 1]


def test_parts_are_read_again_if_they_arrive_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    good = f"sha-256=:{base64.b64encode(hashlib.sha256(b'[1]').digest()).decode()}:"
    damaged = Answer(200, [1], {"content-digest": "sha-256=:AA==:"})
    gone = Answer(404, {"title": "Not found"})
    with serving(damaged, NOTHING, Answer(200, [1], {"content-digest": good}), gone) as server:
        one = trainers.Cohort(cohort(), trainer_at(server))
        assert one._part(0) == b"[1]"
        assert one._part(1) is None
    assert server.received[3].path == "/v1/cohorts/c/samples/1?fence=7&wait_seconds=20"


def test_a_reference_is_what_a_model_says_greedily() -> None:
    def logits(texts: list[list[int]]) -> list[list[float]]:
        # the next id is the most probable one
        return [[2.0 if token == (text[-1] + 1) % 50 else 0.0 for token in range(50)] for text in texts]

    found = reference(logits, vocab=50, context=26)
    assert (found["prompt_tokens"], len(found["answers"])) == (24, 16)
    # the last id of the first prompt, as policy/artifact/src/reference.rs makes it
    last = ((24 * 0x9E3779B9) >> 7) % 50
    assert found["answers"][0]["token_ids"] == [(last + 1) % 50, (last + 2) % 50]
    cold, warm = (2.0 / at - math.log(math.exp(2.0 / at) + 49) for at in (1.0, 0.8))
    assert found["answers"][0]["logprobs"] == [round(cold, 5)] * 2
    assert found["answers"][0]["first_logprob"] == round(warm, 5)
