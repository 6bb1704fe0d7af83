"""TRL's GRPOTrainer on the cohorts of a GRPO run whose `trainer` is `external`.

    python trl_grpo.py --run RUN --model model --work work

The run's own rollouts take the place of TRL's: `rollout_func` returns them, with the log-probabilities that
the engine logged, and TRL computes advantages, loss and step. A step is committed before the next cohort is
leased, in TRL's hook for new weights. Three things of TRL 1.16 are set right here:

- It reads log-probabilities only with `use_vllm`, so a stand-in for its vLLM object is put in afterwards.
- Its default `sequence_mask` drops whole sequences silently; `token_truncate` weighs each token.
- Its batches have one size. Groups that the run dropped are filled up with rows that are not trained on.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import types

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import springtide


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", help="default: SPRINGTIDE_RUN")
    parser.add_argument("--model", required=True, help="the run's base version, as `springtide policy pull` wrote it")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--groups", type=int, default=4, help="the run's tasks_per_step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="the run's steps")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--shift", type=float, default=0.0, help="added to our log-probabilities, to see that they count")
    parser.add_argument("--record", type=pathlib.Path, help="write what TRL got and its losses, as lines of JSON")
    parser.add_argument("--replay", type=pathlib.Path, help="no run: take what --record wrote")
    return parser.parse_args()


class Cohorts:
    """Cohorts as `rollout_func` wants them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.held = args, None
        self.leases = iter(()) if args.replay else iter(springtide.Trainer(args.run))
        self.replayed = iter(args.replay.read_text().splitlines()) if args.replay else None

    def rollouts(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """One cohort. TRL asks with every prompt `group_size` times in a row; which, does not matter."""
        if self.replayed is not None:
            return json.loads(next(self.replayed))["rollouts"]
        self.held = next(self.leases)
        rows = self.rows(list(self.held.samples()))
        assert len(rows["prompt_ids"]) == len(prompts), "give --groups and --group-size as the run has them"
        if self.args.record:
            with self.args.record.open("a") as file:
                file.write(json.dumps({"rollouts": rows}) + "\n")
        return rows

    def rows(self, samples: list[springtide.TrainingSample]) -> dict[str, list]:
        rows: dict[str, list] = {key: [] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "our_reward")}

        def add(sample: springtide.TrainingSample, reward: float, trained: bool) -> None:
            rows["prompt_ids"].append(sample.token_ids[: sample.prompt_len])
            rows["completion_ids"].append(sample.token_ids[sample.prompt_len :])
            rows["logprobs"].append([value + self.args.shift for value in sample.logprobs[sample.prompt_len :]])
            rows["env_mask"].append([int(trained and one) for one in sample.loss_mask[sample.prompt_len :]])
            rows["our_reward"].append(reward)

        groups = list(springtide.bundles(samples))
        for group in groups[: self.args.groups]:
            mean = sum(sample.reward for sample in group) / len(group)
            for sample in group:
                add(sample, sample.reward, True)
            for _ in range(self.args.group_size - len(group)):
                add(group[0], mean, False)
        for _ in range((self.args.groups - len(groups)) * self.args.group_size):
            add(samples[0], 0.0, False)
        return rows

    def commit(self, trainer: GRPOTrainer) -> None:
        """Commits the step that was made of the cohort that is held."""
        if self.held is None:
            return
        folder = self.args.work / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        state = trainer.model.state_dict()
        if trainer.model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        trainer.model.save_pretrained(folder, state_dict={name: value.to(torch.bfloat16) for name, value in state.items()})
        log = next((line for line in reversed(trainer.state.log_history) if "loss" in line), {})
        metrics = {name: float(log[key]) for name, key in (("loss", "loss"), ("gradient_norm", "grad_norm")) if key in log}
        self.held.commit(folder, metrics=metrics)
        self.held = None


def main() -> None:
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    cohorts = Cohorts(args)
    config = GRPOConfig(
        output_dir=str(args.work / "trl"),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=args.groups * args.group_size,
        num_generations=args.group_size,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=lambda completions, our_reward, **_: our_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(args.groups * args.steps)]}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        rollout_func=cohorts.rollouts,
    )
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: cohorts.commit(trainer))
    trainer.train()
    cohorts.commit(trainer)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    print(json.dumps({"losses": losses, "gradient_norms": norms}))


if __name__ == "__main__":
    main()
