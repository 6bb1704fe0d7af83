"""Makes the tokenizer and the training windows of the agent model for `springtide train sft`.

`make model NAME=agent` runs it. The transcripts come from the environments beside this folder: how a
person does the tasks who is careful at a share of them only. So the model knows how, and does not
always do so, which is what a run can improve.

    build.py base OUT           transcripts of the split `base`, by a person of the given care
    build.py bound OUT NAME     right solutions of one environment's training tasks, for its bound
"""

import argparse
import json
import pathlib
import random
import struct
import sys
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from environments import ALL, WEIGHT
from splits import Split, draw

#: Tokens of a window, also a little more than the longest transcript.
CONTEXT = 256
#: Of what the assistant says in an attempt of usual length, times the environment's `WEIGHT`. Each token
#: of an environment weighs the same: else short mistakes would be learned before long work.
TRANSCRIPT_WEIGHT = 30.0
END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
#: An environment's name, a conversation, and whether it begins with a summary that another one ended with.
Transcript = tuple[str, list[dict], bool]
VOCABULARY = json.loads((HERE / "config.json").read_text())["vocab_size"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["base", "bound"])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("name", nargs="?", choices=list(ALL))
    parser.add_argument("--transcripts", type=int, default=75_000, help="attempts of the base, all environments together")
    parser.add_argument("--tasks", type=int, default=512, help="training tasks of a bound")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="folder of the base, for a bound")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)

    if args.what == "base":
        each = args.transcripts // len(ALL)
        train = [made for name in ALL for made in transcripts(name, "base", each, rng)]
        tokenizer = train_tokenizer(train)
    else:
        train = list(transcripts(args.name, "train", args.tasks, rng, care=1.0))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    names = list(ALL) if args.what == "base" else [args.name]
    held_out = [made for name in names for made in transcripts(name, "held_out", 200, rng, care=1.0)]
    rng.shuffle(train)
    write_tokenizer(args.out, tokenizer)
    for split, made in [("train", train), ("held_out", held_out)]:
        windows = pack(tokenizer, made)
        write_windows(args.out / f"{split}.safetensors", windows)
        print(f"{split}: {len(made)} conversations, {len(windows)} windows of {CONTEXT} tokens")


def transcripts(
    name: str, split: Split, count: int, rng: random.Random, care: float | None = None
) -> Iterator[Transcript]:
    """Conversations of `count` attempts in an environment. Those of a bound are at different tasks."""
    environment = ALL[name]
    tasks = draw(split, 1, environment.world.make)
    for task in environment.tasks(split, count) if split == "train" else (next(tasks) for _ in range(count)):
        contexts = environment.world.demonstration(task, rng, environment.care if care is None else care)
        for number, messages in enumerate(contexts):
            yield name, messages, number > 0


def train_tokenizer(made: list[Transcript]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with digits apart, as numbers are copied and compared."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in (END, START_TURN, END_TURN)]
    marks = [AddedToken(token, special=False, normalized=False) for token in (CALL, CALL_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(marks),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=specials,
    )
    wrapped = wrap(tokenizer)
    texts = (
        wrapped.apply_chat_template(messages, tools=ALL[name].tools, tokenize=False)
        for name, messages, _ in made[:: len(made) // 6000 or 1]
    )
    plain = (text.replace(CALL, " ").replace(CALL_END, " ") for text in texts)
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_tokens(marks)
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TURN, pad_token=END)
    wrapped.chat_template = (HERE / "chat_template.jinja").read_text()
    return wrapped


def write_tokenizer(out: pathlib.Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The files that `springtide train sft` puts beside the weights."""
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TURN,
        "pad_token": END,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
    }
    generation = {
        "eos_token_id": [tokenizer.convert_tokens_to_ids(END_TURN), tokenizer.convert_tokens_to_ids(END)],
        "pad_token_id": tokenizer.convert_tokens_to_ids(END),
        "do_sample": True,
        "temperature": 1.0,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def pack(tokenizer: PreTrainedTokenizerFast, made: list[Transcript]) -> list[list[tuple[int, float]]]:
    """Windows of `CONTEXT` + 1 tokens with the weight of each. Transcripts are not cut.

    What the assistant says weighs as its environment's share asks (`TRANSCRIPT_WEIGHT`). The other
    texts weigh nothing: the world decides them, or the context before.
    """
    end = tokenizer.convert_tokens_to_ids(END)
    windows: list[list[tuple[int, float]]] = [[]]
    for name, messages, carries_summary in made:
        encoded = tokenizer.apply_chat_template(
            messages, tools=ALL[name].tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        said = encoded["assistant_masks"]
        if carries_summary:
            begin = said.index(1)
            end_of_summary = said.index(0, begin)
            said = [0] * end_of_summary + said[end_of_summary:]
        weight = TRANSCRIPT_WEIGHT * WEIGHT[name] / ALL[name].usual_tokens
        slots = [(token, weight * by_model) for token, by_model in zip(encoded["input_ids"], said)]
        if len(slots) > CONTEXT:
            raise ValueError(f"a transcript has {len(slots)} tokens, more than {CONTEXT}")
        if len(windows[-1]) + len(slots) > CONTEXT + 1:
            windows.append([])
        windows[-1] += slots
    return [window + [(end, 0.0)] * (CONTEXT + 1 - len(window)) for window in windows]


def write_windows(path: pathlib.Path, windows: list[list[tuple[int, float]]]) -> None:
    """safetensors: `input_ids` and `labels` u16, `weights` f32, each `[N, CONTEXT]`."""
    parts = {
        "input_ids": ("U16", "H", [token for window in windows for token, _ in window[:-1]]),
        "labels": ("U16", "H", [token for window in windows for token, _ in window[1:]]),
        "weights": ("F32", "f", [weight for window in windows for _, weight in window[1:]]),
    }
    header, data = {}, b""
    for name, (dtype, letter, values) in parts.items():
        packed = struct.pack(f"<{len(values)}{letter}", *values)
        header[name] = {
            "dtype": dtype,
            "shape": [len(windows), CONTEXT],
            "data_offsets": [len(data), len(data) + len(packed)],
        }
        data += packed
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    main()
