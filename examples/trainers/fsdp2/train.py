"""Trains a run of Springtide with FSDP2, on one machine or several.

    torchrun --standalone --nproc-per-node 8 --max-restarts 3 train.py --work /scratch/work

Each rank reads its part of a cohort, and writes and uploads its own shard of the new weights: nobody gathers
them. Masters and optimizer are float32; what is published has the dtype of the run's versions. A restart goes on
from the last commit: the weights are pulled from the policy store, and the optimizer's state is the one that the
commit named. `--work` is a folder that all nodes share. Written for GPUs (nccl); on a machine without one it runs
on gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import springtide

sys.path.append(str(Path(__file__).resolve().parent.parent))
import losses  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-id", help="default: SPRINGTIDE_RUN, or the realtime run")
    parser.add_argument("--work", type=Path, required=True, help="folder for weights and optimizer states, which all nodes share")
    parser.add_argument("--springtide", default="springtide", help="the program, for `policy pull`")
    parser.add_argument("--config", help="its configuration file")
    parser.add_argument("--loss", choices=["reinforce_is", "ppo_clip", "gspo", "verdicts"], default="reinforce_is")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=4096, help="padded tokens of a micro-batch, at most")
    parser.add_argument("--compute", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--lease-seconds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="end after so many")
    return parser.parse_args()


@contextlib.contextmanager
def without_values():
    """Parameters take no memory. Buffers do: no checkpoint has them."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, value: torch.nn.Parameter | None) -> None:
        if value is not None and not value.is_meta:
            value = torch.nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)
        register(module, name, value)

    torch.nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


class Job:
    """The sharded model and its optimizer, at one version."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.version: int | None = None

    def load(self, cohort: springtide.Cohort) -> None:
        """Loads the cohort's parent, and the optimizer's state if its commit named one."""
        folder = self.work / f"version-{cohort.parent}"
        if dist.get_rank() == 0:
            configured = ["--config", self.args.config] if self.args.config else []
            pull = [self.args.springtide, *configured, "policy", "pull", str(cohort.parent), str(folder)]
            subprocess.run(pull, check=True, stdout=subprocess.DEVNULL)
        dist.barrier()
        config = AutoConfig.from_pretrained(folder)
        self.dtype = config.dtype or torch.bfloat16
        with without_values():  # float32 masters
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model.tie_weights()
        self.model.train()
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, self.args.compute), reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=precision)
        fully_shard(self.model, mesh=self.mesh, mp_policy=precision)
        # each rank reads its part: nobody ever holds the whole model
        self.model._apply(lambda value: torch.empty_like(value, device=self.device) if value.is_meta else value.to(self.device))
        dcp.load(self._weights(), storage_reader=HuggingFaceStorageReader(path=str(folder)))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.args.learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        self.version = cohort.parent
        dist.barrier()  # all have read it
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        saved = cohort.state["optimizer"] if cohort.state else ""
        if self._max(float(bool(saved) and not (Path(saved) / ".metadata").exists())) == 0.0 and saved:
            self._restore(saved)

    def _weights(self) -> dict[str, torch.Tensor]:
        """This rank's part of the tensors that a checkpoint has."""
        tied = self.model.config.tie_word_embeddings
        return {name: value for name, value in self.model.state_dict().items() if not (tied and name == "lm_head.weight")}

    def _state(self) -> dict[str, object]:
        named = dict(self.model.named_parameters())
        moments = {
            f"{moment}.{name}": self.optimizer.state[value].setdefault(moment, torch.zeros_like(value))
            for name, value in named.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        masters = {f"master.{name}": value for name, value in named.items()}
        return {**masters, **moments}

    def _restore(self, folder: str) -> None:
        state = self._state()
        count = {"step": torch.zeros(())}
        dcp.load({**state, **count}, checkpoint_id=folder)
        for value in self.model.parameters():
            self.optimizer.state[value]["step"] = count["step"].clone()

    def step(self, cohort: springtide.Cohort) -> dict[str, float]:
        """One optimizer step on this rank's part of the cohort."""
        started = time.monotonic()
        samples = [sample for sample in cohort.samples() if any(sample.loss_mask)]
        trajectories = self._sum(len({sample.trajectory_id for sample in samples}))
        batches = list(self._batches(samples))
        # every rank makes as many passes, because each pass gathers weights from all
        passes = int(self._max(len(batches)))
        total = 0.0
        for number in range(passes):
            last = number == passes - 1
            self.model.set_requires_gradient_sync(last)
            loss = self._loss(batches[number]) if number < len(batches) else self._nothing()
            # FSDP averages gradients over ranks
            (loss * dist.get_world_size() / max(trajectories, 1)).backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = self._sum(total) / max(trajectories, 1)
        return {"loss": loss, "gradient_norm": float(norm), "seconds": time.monotonic() - started}

    def _batches(self, samples: list[springtide.TrainingSample]):
        """Samples of about one length, padded together."""
        batch: list[springtide.TrainingSample] = []
        for sample in sorted(samples, key=lambda sample: len(sample.token_ids)):
            if batch and len(sample.token_ids) * (len(batch) + 1) > self.args.tokens:
                yield batch
                batch = []
            batch.append(sample)
        if batch:
            yield batch

    def _nothing(self) -> torch.Tensor:
        """A pass without samples: the rank takes part in the passes of the others."""
        return self.model(torch.zeros((1, 2), dtype=torch.long, device=self.device)).logits.sum() * 0.0

    def _loss(self, batch: list[springtide.TrainingSample]) -> torch.Tensor:
        """The sum over the trained tokens."""
        length = max(len(sample.token_ids) for sample in batch)

        def rows(values, fill) -> torch.Tensor:
            padded = [list(value) + [fill] * (length - len(value)) for value in values]
            return torch.tensor(padded, device=self.device)

        ids = rows((sample.token_ids for sample in batch), 0)
        attention = rows(([1] * len(sample.token_ids) for sample in batch), 0)
        trained = rows((sample.loss_mask for sample in batch), False)[:, 1:]
        logprobs = rows((sample.logprobs for sample in batch), 0.0)[:, 1:][trained]
        own = self.args.loss == "verdicts"  # it asks for the policy's own distribution
        temperatures = [1.0 if own else sample.temperature for sample in batch]
        temperature = torch.tensor(temperatures, device=self.device)[:, None]
        advantage = torch.tensor([sample.advantage * sample.weight for sample in batch], device=self.device)
        logits = self.model(ids, attention_mask=attention).logits[:, :-1][trained].float()
        logits = logits / temperature.expand(-1, length - 1)[trained][:, None]
        logp = logits.log_softmax(-1).gather(1, ids[:, 1:][trained][:, None])[:, 0]
        advantage = advantage[:, None].expand(-1, length - 1)[trained].float()
        return getattr(losses, self.args.loss)(logp, logprobs, advantage, trained.sum(1).tolist()).sum()

    def save(self, cohort: springtide.Cohort) -> tuple[Path, Path]:
        """Writes this rank's shards: the new weights as bfloat16, and what a restart needs."""
        weights, optimizer = self.work / "weights", self.work / f"optimizer-{cohort.step}"
        if dist.get_rank() == 0:
            shutil.rmtree(weights, ignore_errors=True)
            shutil.rmtree(optimizer, ignore_errors=True)
            weights.mkdir(parents=True)
        dist.barrier()
        rounded = {name: value.to(self.dtype) for name, value in self._weights().items()}
        dcp.save(rounded, storage_writer=HuggingFaceStorageWriter(path=str(weights), save_distributed=True))
        count = next(iter(self.optimizer.state.values()))["step"]
        dcp.save({**self._state(), "step": count}, checkpoint_id=str(optimizer))
        return weights, optimizer

    def _sum(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.SUM)

    def _max(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: float, how: dist.ReduceOp) -> float:
        tensor = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how)
        return tensor.item()


def main() -> None:
    args = arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    trainer = springtide.Trainer.distributed(args.run_id, lease_seconds=args.lease_seconds)
    work = args.work.resolve() / trainer.run_id
    work.mkdir(parents=True, exist_ok=True)
    job = Job(args, work)
    for made, cohort in enumerate(trainer):
        # at the start, after a restart, and when a release has moved the line
        if job.version != cohort.parent:
            job.load(cohort)
        metrics = job.step(cohort)
        weights, optimizer = job.save(cohort)
        try:
            job.version = cohort.commit(weights, metrics=metrics, state={"optimizer": str(optimizer)})
        except springtide.ConflictError as lost:  # the line has moved, or the lease was taken over
            print(lost, flush=True)
            job.version = None
            continue
        if dist.get_rank() == 0:
            shutil.rmtree(work / f"optimizer-{cohort.step - 2}", ignore_errors=True)
            print(f"step {cohort.step}: version {job.version}, {metrics}", flush=True)
        if made + 1 >= args.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
