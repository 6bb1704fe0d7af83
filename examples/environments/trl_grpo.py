"""TRL's GRPO on the tasks of an example environment: what Springtide's run is compared with.

    trl_grpo.py NAME --model DIR --out DIR [--seed 1] [--steps 30] [--every 10]

The same base, tasks, number of rollouts, learning rate, temperature and longest answer as harness.py's
run. TRL keeps its own defaults for the rest. Its checkpoints go to `--out`.
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from environments import ALL
from shop.agent import TURNS_MAX
from shop.world import World


class Shop:
    """The shop as TRL wants an environment: its public methods are the tools."""

    def reset(self, answer: str, **_: object) -> None:
        self._world = World({"answer": answer})

    def price(self, item: str) -> str:
        """The price of an item.

        Args:
            item: The item.
        """
        return self._world.call("price", json.dumps({"item": item}))

    def add(self, a: int, b: int) -> str:
        """The sum of two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return self._world.call("add", json.dumps({"a": a, "b": b}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # TRL has no contexts that begin anew
    parser.add_argument("name", choices=[name for name in ALL if name != "recall"])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tasks-per-step", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    environment = ALL[args.name]

    def reward(completions: list, answer: list[str], **_: object) -> list[float]:
        return [environment.score(right, last_words(made)) for made, right in zip(completions, answer)]

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.response_template = qwen3_template
    turns = TURNS_MAX if environment.tools else 1
    config = GRPOConfig(
        output_dir=str(args.out),
        seed=args.seed,
        max_steps=args.steps,
        save_steps=args.every,
        save_only_model=True,
        per_device_train_batch_size=args.group_size * args.tasks_per_step,
        num_generations=args.group_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        temperature=1.0,
        # of all turns together; a turn of the tools' results counts too
        max_completion_length=environment.max_tokens * turns,
        max_tool_calling_iterations=turns if environment.tools else None,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    rows = [
        {"prompt": [{"role": "user", "content": task["prompt"]}], "answer": task["answer"]}
        for task in environment.tasks("train", args.tasks)
    ]
    GRPOTrainer(
        model=str(args.model),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        environment_factory=Shop if environment.tools else None,
    ).train()


def last_words(completion: list[dict]) -> str:
    """What the model said last, unless that was a call."""
    last = completion[-1] if completion else {}
    return (last.get("content") or "") if last.get("role") == "assistant" and not last.get("tool_calls") else ""


if __name__ == "__main__":
    main()
