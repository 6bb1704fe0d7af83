"""TRL's GRPO on the tasks of a Springtide run, in its order: what bench.py compares that run with.

    trl_grpo.py OPTIONS.json      as bench.py writes them

Everything that both have is set to what the run has; TRL keeps its own defaults for the rest.
"""

import json
import pathlib
import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    options = json.loads(pathlib.Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    config = GRPOConfig(
        output_dir=options["out"],
        seed=options["seed"],
        max_steps=options["steps"],
        save_steps=options["every"],
        save_only_model=True,
        shuffle_dataset=False,
        per_device_train_batch_size=options["group_size"] * options["tasks_per_step"],
        num_generations=options["group_size"],
        max_completion_length=options["max_tokens"],
        temperature=1.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        beta=0.0,
        learning_rate=options["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=options["model"],
        processing_class=AutoTokenizer.from_pretrained(options["model"]),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(options["tasks"]),
    )
    trainer.train()
    log = trainer.state.log_history
    rewards = [entry["reward"] for entry in log if "reward" in entry]
    seconds = next(entry["train_runtime"] for entry in log if "train_runtime" in entry)
    pathlib.Path(options["out"], "log.json").write_text(json.dumps({"rewards": rewards, "seconds": seconds}))


def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(made == right) for made, right in zip(completions, answer)]


if __name__ == "__main__":
    main()
