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
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import UUID

import httpx

from springtide import _protocol
from springtide._errors import ConflictError, ProblemError, SpringtideError
from springtide._retry import MAY_SUCCEED_LATER, Retries, uuid7
from springtide._runs import ENDED, RENEW_AFTER, WAIT_SECONDS, _Control, _member

#: Every piece of an uploaded file but the last has so many bytes.
PIECE_BYTES = 16 << 20
#: Every part of a cohort is read by each rank, unless there are so many parts for each.
PARTS_PER_RANK_MIN = 8

log = logging.getLogger(__name__)

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
            job = f"{job}-{os.environ.get('MASTER_PORT', '')}" if job == "none" else job
            self._attempt = f"{job}/{restart}"[-128:]
            self._replaces = f"{job}/{restart - 1}"[-128:] if restart > 0 else None
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
            if leased is None:
                return
            with Cohort(leased, self) as cohort:
                yield cohort

    def _first(self, ask: Callable[[], Any]) -> Any:
        """What rank 0 was answered, on every rank; an error of rank 0 is one of all."""
        mine: tuple[Any, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                mine = (ask(), None)
            except SpringtideError as refused:
                mine = (None, refused)
        answer, failed = self._gather(mine)[0]
        if failed is not None:
            raise failed
        return answer

    def _lease(self) -> dict[str, Any] | None:
        wanted = {
            "client_token": self._attempt,
            "replaces": self._replaces,
            "lease_seconds": self._lease_seconds,
            "wait_seconds": WAIT_SECONDS,
            "open": self._open,
        }
        while True:
            self._say("waiting for a cohort")
            try:
                answer = self._control.post(f"/v1/runs/{self.run_id}/cohorts", wanted, repeatable=True)
            except ConflictError:
                run = _protocol.decoded(self._control.get(f"/v1/runs/{self.run_id}"), "status")
                if run["status"] in ENDED:
                    self._say(f"the run is {run['status']}\n")
                    return None
                raise
            if answer is not None:
                return answer

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
        count = self._look()
        # few large parts go to ranks as a whole; else each rank reads all and takes every n-th bundle
        whole = count["state"] != "filling" and count["parts"] >= PARTS_PER_RANK_MIN * ranks
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
        pattern = "*.safetensors" if ranks == 1 else f"shard-{rank + 1:05d}-*.safetensors"
        files = sorted(Path(folder).glob(pattern))
        if not files:
            raise SpringtideError(f"{folder} has no {pattern}: save the weights there first")
        for path in files:
            with path.open("rb") as file:
                for piece, data in enumerate(iter(lambda: file.read(PIECE_BYTES), b"")):
                    self._check()
                    at = f"/v1/cohorts/{self.id}/files/{path.name}/{piece}?fence={self.fence}"
                    self._trainer._control.put(at, data, {"content-digest": _digest(data)})
        return {path.name: path.stat().st_size for path in files}

    def commit(
        self,
        folder: str | Path,
        *,
        metrics: Mapping[str, float] | None = None,
        state: Any = None,
    ) -> int:
        """Makes a step of the cohort: uploads the weights and waits until they are published. Returns the
        version's serial. Every rank calls it.

        `state` is what the next cohort's `state` says, such as where the optimizer's state lies. Raises
        `RequestError` if the weights cannot be published, with what to change; the lease goes on.
        """
        mine = (self.upload(folder), self._dropped)
        gathered = self._trainer._gather(mine)
        files: dict[str, int] = {}
        dropped: dict[str, str] = {}
        for one, codes in gathered:
            files.update(one)
            dropped.update(codes)
        body = {
            "fence": self.fence,
            "client_token": self._token,
            "parent_root": self.parent_root,
            "files": files,
            "metrics": dict(metrics or {}),
            "dropped": dropped,
            "state": state,
            "wait_seconds": WAIT_SECONDS,
        }
        answer = self._trainer._first(lambda: self._commit(body))
        self._ended = True
        version = int(_member(answer, "version"))
        self._trainer._say(f"step {self.step}: version {version}, {len(dropped)} dropped\n")
        return version

    def _commit(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check()
        while True:
            answer = self._trainer._control.post(f"/v1/cohorts/{self.id}/commit", body, repeatable=True)
            if answer is not None and answer.get("version") is not None:
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

    def _look(self) -> dict[str, Any]:
        return _protocol.decoded(self._trainer._control.get(f"/v1/cohorts/{self.id}"), "state")

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


def _digest(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def _uuid(value: Any) -> UUID:
    return UUID(bytes=value) if isinstance(value, bytes) else UUID(str(value))


def bundles(samples: Iterable[TrainingSample]) -> Iterator[list[TrainingSample]]:
    """Samples in groups that belong together: the rollouts of a task, the turns of a session, a DPO pair."""
    held: dict[int, list[TrainingSample]] = {}
    for sample in samples:
        held.setdefault(sample.bundle, []).append(sample)
    return iter(held.values())
