"""A training loop of your own: cohorts of a run, and the steps that are made of them.

    trainer = springtide.Trainer(run_id)
    for cohort in trainer:
        for sample in cohort.samples():
            ...
        save(model, folder)
        cohort.commit(folder, metrics={"loss": loss})

A cohort is leased to one trainer at a time. The server verifies the weights, signs them, and writes the
step once, whatever dies meanwhile. With several ranks, give each its number and a `gather`; `distributed`
does so for torch.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Union
from uuid import UUID

import httpx

from springtide import _protocol
from springtide._errors import ConflictError, ProblemError, SpringtideError, UnavailableError
from springtide._retry import MAY_SUCCEED_LATER, Retries, uuid7
from springtide._runs import ENDED, RENEW_AFTER, WAIT_SECONDS, _Control, _member

#: Every piece of an uploaded file but the last has so many bytes.
PIECE_BYTES = 16 << 20
#: Every part of a cohort is read by each rank, unless there are so many parts for each.
PARTS_PER_RANK_MIN = 8
#: The factors in a folder that PEFT saved.
ADAPTER_FILE = "adapter_model.safetensors"

log = logging.getLogger(__name__)

#: Instead of a lease. A text, because ranks get a copy.
ENDED_RUN = "ended"
#: A rank's value, or why it has none.
Answered = tuple[Any, Union[Exception, None]]

#: Gives every rank the values of all, in the order of ranks: `torch.distributed.all_gather_object`.
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class TrainingSample:
    """One generation: the fields of torchtitan's `TrainingSample` and prime-rl's, and what we know besides.

    Lists have one value per token of `token_ids`, the prompt included.
    """

    #: Prompt, then what was sampled.
    token_ids: list[int]
    #: Whether the token is trained on: False in the prompt.
    loss_mask: list[bool]
    #: log μ of each sampled token as the engine logged it, nats; 0 in the prompt.
    logprobs: list[float]
    #: Of the whole generation. Of a DPO run 1 for the chosen one and −1 for the other; of a KTO run the weight,
    #: with its sign.
    advantage: float
    #: Factor of the advantage, for exploration that was not the policy's own.
    weight: float
    reward: float
    turn_reward: float | None
    prompt_len: int
    #: The rollouts of one task, or the turns of one trajectory, have the same number.
    bundle: int
    generation_id: UUID
    episode_id: UUID
    #: The task's group, of offline runs.
    group_id: str | None
    turn: int
    #: Serials of the oldest and newest version that sampled a token.
    min_policy_version: int
    max_policy_version: int
    temperature: float
    #: All columns, as docs/FORMAT.md describes them.
    row: Mapping[str, Any] = field(repr=False)

    @property
    def trajectory_id(self) -> UUID:
        """What has one reward: the generation, or the session or rollout that it is a turn of."""
        return self.generation_id if self.row["episode_turns"] is None else self.episode_id

    @property
    def experts(self) -> tuple[int, memoryview] | None:
        """The experts that the engine chose, if it logged them: the position of the first token that has some,
        and their ids `[tokens, layers, experts per token]`. Needs no numpy, and numpy takes it without a copy."""
        logged = self.row.get("experts")
        if logged is None:
            return None
        magic, version, tokens, first, layers, per_layer, count = struct.unpack_from("<8s3I3H", logged)
        if (magic, version) != (b"SPTEXPRT", 1):
            raise SpringtideError("the logged experts have an unknown form: use a newer `springtide`")
        ids = memoryview(logged)[32:]
        return first, ids.cast("B" if count <= 256 else "H", (tokens, layers, per_layer))

    @staticmethod
    def of(row: Mapping[str, Any]) -> TrainingSample:
        """The sample of a row of `Cohort.rows`."""
        prompt, tokens = row["prompt_ids"] or [], row["token_ids"]
        if row["prompt_missing"]:
            raise SpringtideError(f"the prompt of generation {row['generation_id']} is gone: {row['prompt_missing']}")
        mask = row["train_mask"] or [True] * len(tokens)
        return TrainingSample(
            token_ids=[*prompt, *tokens],
            loss_mask=[*[False] * len(prompt), *mask],
            logprobs=[*[0.0] * len(prompt), *row["logprobs"]],
            advantage=row["advantage"],
            weight=row["weight"],
            reward=row["reward"],
            turn_reward=row["turn_reward"],
            prompt_len=len(prompt),
            bundle=row["bundle"],
            generation_id=_uuid(row["generation_id"]),
            episode_id=_uuid(row["episode_id"]),
            group_id=row["group_id"],
            turn=row["turn"],
            min_policy_version=row["version_oldest"],
            max_policy_version=row["version"],
            temperature=row["temperature"],
            row=row,
        )


class Trainer:
    """The cohorts of a run whose `trainer` is `external`, one after another until the run has ended.

    What is not given comes from `SPRINGTIDE_CONTROL`, `SPRINGTIDE_API_KEY` and, for the run,
    `SPRINGTIDE_RUN`; without a run it is the realtime run. The key needs the scopes `train` and `read`.
    `open_cohorts`: samples are handed out while a cohort is still filling. `lease_seconds` is how long the
    server waits for a trainer that has died before another may go on.
    """

    def __init__(
        self,
        run_id: str | None = None,
        control_url: str | None = None,
        *,
        api_key: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        gather: Gather | None = None,
        open_cohorts: bool = False,
        lease_seconds: int = 60,
        progress: bool | None = None,
        retries: Retries = Retries(),
        http: httpx.Client | None = None,
    ) -> None:
        if world_size > 1 and gather is None:
            raise ValueError("several ranks need `gather`; with torch, use Trainer.distributed")
        self.rank, self.world_size = rank, world_size
        self._gather: Gather = gather or (lambda value: [value])
        self._open, self._lease_seconds = open_cohorts, lease_seconds
        self._progress = sys.stderr.isatty() if progress is None else progress
        self._control = _Control(control_url, api_key, retries, http)
        self.run_id = run_id or os.environ.get("SPRINGTIDE_RUN") or self._realtime()
        #: Names this attempt. A job that is started again is another one, and gets a lease of its own.
        self._attempt = str(uuid7())
        self._replaces: str | None = None
        self._launcher: int | None = None
        if job := os.environ.get("TORCHELASTIC_RUN_ID"):
            restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            # a job's name may return, its agent does not
            agent = f"{socket.gethostname()}-{os.getppid()}-{_started(os.getppid())}"
            job = f"{job[-40:]}/{agent[-70:]}"
            self._attempt = f"{job}/{restart}"
            self._replaces = f"{job}/{restart - 1}" if restart > 0 else None
            self._launcher = os.getppid()

    @staticmethod
    def distributed(run_id: str | None = None, control_url: str | None = None, **settings: Any) -> Trainer:
        """The same for the ranks of `torch.distributed`, which is initialized."""
        import torch.distributed as dist

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(values, value)
            return values

        ranks: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "gather": gather}
        return Trainer(run_id, control_url, **ranks, **settings)

    def __iter__(self) -> Iterator[Cohort]:
        """Waits while there is no cohort, or another trainer holds it."""
        while True:
            leased = self._first(self._lease)
            if leased is ENDED_RUN:
                return
            with Cohort(leased, self) as cohort:
                yield cohort

    def _first(self, ask: Callable[[], Any]) -> Any:
        """What rank 0 was answered, on every rank; an error of rank 0 is one of all. `ask` returns None if it has
        to be asked again: no rank waits longer for the others than it takes once."""
        while True:
            mine: Answered = (None, None)
            if self.rank == 0:
                try:
                    mine = (ask(), None)
                except Exception as failed:
                    mine = (None, failed)
            answer = self._agreed(self._gather(mine)[:1])[0]
            if answer is not None:
                return answer

    def _agreed(self, gathered: list[Answered]) -> list[Any]:
        """The values of the ranks, unless one has failed: then all fail."""
        for _, failed in gathered:
            if failed is not None:
                raise failed
        return [value for value, _ in gathered]

    def _lease(self) -> Any:
        if self._is_orphaned():
            raise SpringtideError("the launcher of this worker has died")
        wanted = {
            "client_token": self._attempt,
            "replaces": self._replaces,
            "lease_seconds": self._lease_seconds,
            "wait_seconds": WAIT_SECONDS,
            "open": self._open,
        }
        self._say("waiting for a cohort")
        try:
            return self._control.post(f"/v1/runs/{self.run_id}/cohorts", wanted, repeatable=True)
        except ConflictError:
            run = _protocol.decoded(self._control.get(f"/v1/runs/{self.run_id}"), "status")
            if run["status"] in ENDED:
                self._say(f"the run is {run['status']}\n")
                return ENDED_RUN
            raise

    def _realtime(self) -> str:
        runs = _protocol.decoded(self._control.get("/v1/runs?kind=realtime&limit=1"), "data")["data"]
        if not runs:
            raise SpringtideError("there is no realtime run yet: start `springtide train`, or name a run")
        return str(runs[0]["id"])

    def _is_orphaned(self) -> bool:
        # torchrun's workers outlive it: one that renews says nothing about the job
        return self._launcher is not None and os.getppid() != self._launcher

    def _say(self, what: str) -> None:
        if self._progress and self.rank == 0:
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


class Cohort:
    """The cohort of one step, leased until `commit`, `abort` or the end of the `with` block."""

    def __init__(self, leased: Mapping[str, Any], trainer: Trainer) -> None:
        self.id = str(_member(dict(leased), "id"))
        #: The step that is to be made of it, from 1.
        self.step = int(leased["step"])
        #: The version that it begins from: what the weights must be made from.
        self.parent = int(leased["parent"])
        self.parent_root = str(leased["parent_root"])
        self.line = str(leased["line"])
        #: What the commit before said with `state`.
        self.state: Any = leased["trainer_state"]
        self.fence = int(leased["fence"])
        self._seconds = float(leased["lease_seconds"])
        #: Of a cohort that is not filling any more; else 0.
        self._parts = int(leased["parts"]) if leased["state"] != "filling" else 0
        self._trainer = trainer
        self._token = str(uuid7())
        self._dropped: dict[str, str] = {}
        self._ended = False
        self._lost: SpringtideError | None = None
        self._left = threading.Event()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row of this rank, with all columns. Needs `pyarrow`."""
        from pyarrow import parquet

        rank, ranks = self._trainer.rank, self._trainer.world_size
        # Many parts go to ranks as a whole; else each rank reads all and takes every n-th bundle. By the lease, which
        # is the same on all ranks.
        whole = self._parts >= PARTS_PER_RANK_MIN * ranks
        part = rank if whole else 0
        while (data := self._part(part)) is not None:
            for batch in parquet.ParquetFile(io.BytesIO(data)).iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    if whole or row["bundle"] % ranks == rank:
                        yield row
            part += ranks if whole else 1

    def samples(self) -> Iterator[TrainingSample]:
        """Every sample of this rank: what belongs together is on one rank. Waits while the cohort fills."""
        return map(TrainingSample.of, self.rows())

    def drop(self, sample: TrainingSample | UUID | str, code: str) -> None:
        """A generation is not trained on; `code` says why, such as `too_long`."""
        generation = sample.generation_id if isinstance(sample, TrainingSample) else sample
        self._dropped[str(generation)] = code

    def upload(self, folder: str | Path) -> dict[str, int]:
        """Uploads this rank's files of new weights; `commit` does so by itself. Returns their sizes.

        With several ranks these are the files that `HuggingFaceStorageWriter(save_distributed=True)` names
        by the rank.
        """
        rank, ranks = self._trainer.rank, self._trainer.world_size
        return self._upload(folder, "*.safetensors" if ranks == 1 else f"shard-{rank + 1:05d}-*.safetensors")

    def _upload(self, folder: str | Path, pattern: str) -> dict[str, int]:
        files = sorted(Path(folder).glob(pattern))
        if not files:
            raise SpringtideError(f"{folder} has no {pattern}: save the weights there first")
        for path in files:
            with path.open("rb") as file:
                for piece, data in enumerate(iter(lambda: file.read(PIECE_BYTES), b"")):
                    self._put(f"/v1/cohorts/{self.id}/files/{path.name}/{piece}?fence={self.fence}", data)
        return {path.name: path.stat().st_size for path in files}

    def _put(self, at: str, data: bytes) -> None:
        # many ranks upload at once, and the server takes as much as it has room for: while the lease lives
        while True:
            self._check()
            try:
                return self._trainer._control.put(at, data, {"content-digest": _digest(data)})
            except UnavailableError as busy:
                log.warning("cohort %s: %s", self.id, busy)

    def commit(
        self,
        folder: str | Path,
        *,
        metrics: Mapping[str, float] | None = None,
        state: Any = None,
        reference: Mapping[str, Any] | None = None,
    ) -> int:
        """Makes a step of the cohort: uploads the weights and waits until they are published. Returns the
        version's serial. Every rank calls it.

        If rank 0 finds PEFT's `adapter_config.json` in `folder`, the version is that adapter: of the parent, or
        of what the parent adapts. Only rank 0 uploads it.

        `state` is what the next cohort's `state` says, such as where the optimizer's state lies. `reference` is
        what `springtide.reference` computed, for a model that Springtide does not compute. Raises
        `RequestError` if the weights cannot be published, with what to change; the lease goes on.
        """
        adapter = self._trainer._first(lambda: (_adapter(folder),))[0]
        mine: Answered = (None, None)
        try:
            if adapter is None:
                uploaded = self.upload(folder)
            else:
                uploaded = self._upload(folder, ADAPTER_FILE) if self._trainer.rank == 0 else {}
            mine = ((uploaded, self._dropped), None)
        except Exception as failed:
            mine = (None, failed)
        files: dict[str, int] = {}
        dropped: dict[str, str] = {}
        for one, codes in self._trainer._agreed(self._trainer._gather(mine)):
            files.update(one)
            dropped.update(codes)
        body = {
            "parent_root": self.parent_root,
            "files": files,
            "adapter": adapter,
            "metrics": dict(metrics or {}),
            "dropped": dropped,
            "state": state,
            "reference": reference,
        }
        version = int(_member(self._committed(body), "version"))
        self._trainer._say(f"step {self.step}: version {version}, {len(dropped)} dropped\n")
        return version

    def drop_all(self, code: str) -> None:
        """Nothing of the cohort is trained on; `code` says why. The next one is for the same step. Every rank
        calls it."""
        self._committed({"parent_root": self.parent_root, "dropped_all": code})

    def _committed(self, body: dict[str, Any]) -> dict[str, Any]:
        held = {"fence": self.fence, "client_token": self._token, "wait_seconds": WAIT_SECONDS}

        def ask() -> dict[str, Any] | None:
            self._check()
            answer = self._trainer._control.post(f"/v1/cohorts/{self.id}/commit", {**body, **held}, repeatable=True)
            done = answer is not None and answer.get("state") in ("committed", "dropped")
            return answer if done else None

        answer: dict[str, Any] = self._trainer._first(ask)
        self._ended = True
        return answer

    def abort(self, reason: str = "") -> None:
        """Gives the lease up: another trainer may take the cohort at once."""
        self._ended = True
        if self._trainer.rank == 0:
            body = {"fence": self.fence, "reason": reason}
            self._trainer._control.post(f"/v1/cohorts/{self.id}/abort", body, repeatable=True)

    def __enter__(self) -> Cohort:
        if self._trainer.rank == 0:
            threading.Thread(target=self._renew, name=f"cohort-{self.id}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        if self._ended or self._lost is not None:
            return
        try:
            self.abort("it was left without a commit" if kind is None else kind.__name__)
        except SpringtideError as refused:
            log.warning("cohort %s was not given back: %s", self.id, refused)

    def _renew(self) -> None:
        wait = self._seconds * RENEW_AFTER
        while not self._left.wait(wait):
            if self._trainer._is_orphaned():
                self._lost = SpringtideError("the launcher of this worker has died: it gives its lease up")
                return
            try:
                body = {"fence": self.fence}
                self._trainer._control.post(f"/v1/cohorts/{self.id}/renew", body, repeatable=True)
                wait = self._seconds * RENEW_AFTER
            except SpringtideError as error:
                if isinstance(error, ProblemError) and error.status not in MAY_SUCCEED_LATER:
                    self._lost = error
                    return
                log.warning("cohort %s is not renewed: %s", self.id, error)
                wait = min(wait, self._seconds / 20)

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _part(self, part: int) -> bytes | None:
        """A file of samples; None after the last."""
        while True:
            self._check()
            at = f"/v1/cohorts/{self.id}/samples/{part}?fence={self.fence}&wait_seconds={WAIT_SECONDS}"
            try:
                answer = self._trainer._control.fetch(at)
            except ProblemError as error:
                if error.status == 404:
                    return None
                raise
            if answer.status_code == 204:
                continue
            if answer.headers.get("content-digest") == _digest(answer.content):
                return answer.content
            log.warning("part %d of cohort %s arrived damaged: read again", part, self.id)
            time.sleep(1)


def _adapter(folder: str | Path) -> Any:
    """What the factors in a folder mean; None if it is none of PEFT's."""
    try:
        return json.loads((Path(folder) / "adapter_config.json").read_bytes())
    except FileNotFoundError:
        return None


def _digest(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine did; nothing where /proc is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _uuid(value: Any) -> UUID:
    return UUID(bytes=value) if isinstance(value, bytes) else UUID(str(value))


def bundles(samples: Iterable[TrainingSample]) -> Iterator[list[TrainingSample]]:
    """Samples in groups that belong together: the rollouts of a task, the turns of a session, a DPO pair."""
    held: dict[int, list[TrainingSample]] = {}
    for sample in samples:
        held.setdefault(sample.bundle, []).append(sample)
    return iter(held.values())
