"""Reversing words of 3 to 8 letters: the tasks, and what `springtide train sft` makes their base from.

    words.py OUT      tokenizer and training windows

A prompt is `abc>`, its answer `cba` and the end of the text. A hash of the word says whether the base
is trained on it, a run may draw it, or it is held out.
"""

import hashlib
import json
import pathlib
import random
import string
import sys

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SHORTEST, LONGEST = 3, 8
#: Longest answer with its end, and one more.
MAX_TOKENS = LONGEST + 2
AFTER_WORD, END = ">", "<end>"
#: As byte-level tokenizers write it.
BLANK = "Ġ"
#: Tokens of a window: the longest word, `>`, the answer, without the last token.
WINDOW = 2 * LONGEST + 1
WINDOWS = {"train": 100_000, "held_out": 640}


def split_of(word: str) -> str:
    """`base` for six words of ten, `train` for three, `held_out` for one."""
    digit = hashlib.sha256(word.encode()).digest()[0] % 10
    return "base" if digit < 6 else "train" if digit < 9 else "held_out"


def words(split: str, count: int, seed: int) -> list[str]:
    """Different words of a split. Lengths are equally probable."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(SHORTEST, LONGEST)))
        if split_of(word) == split:
            found[word] = None
    return list(found)


def task(word: str) -> dict[str, str]:
    return {"prompt": word + AFTER_WORD, "answer": word[::-1]}


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    write_tokenizer(out, tokenizer)
    rows = {"train": words("base", WINDOWS["train"], 1), "held_out": words("held_out", WINDOWS["held_out"], 1)}
    for name, of_split in rows.items():
        write_windows(out / f"{name}.safetensors", [window(tokenizer, word) for word in of_split])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per letter. The trainer asks with a blank whether a version is served, so there is one."""
    vocabulary = {letter: number for number, letter in enumerate(string.ascii_lowercase + AFTER_WORD + BLANK)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def write_tokenizer(out: pathlib.Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The files that `springtide train sft` puts beside the weights."""
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.eos_token_id
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "model_max_length": 64}
    generation = {"eos_token_id": end, "pad_token_id": end, "do_sample": True, "temperature": 1.0}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def window(tokenizer: PreTrainedTokenizerFast, word: str) -> list[tuple[int, float]]:
    """`WINDOW` + 1 tokens. Those of the answer and its end weigh 1, the others nothing."""
    of = task(word)
    prompt, answer = (tokenizer.encode(of[part]) for part in ("prompt", "answer"))
    slots = [(token, 0.0) for token in prompt] + [(token, 1.0) for token in [*answer, tokenizer.eos_token_id]]
    return slots + [(tokenizer.eos_token_id, 0.0)] * (WINDOW + 1 - len(slots))


def write_windows(path: pathlib.Path, windows: list[list[tuple[int, float]]]) -> None:
    slots = np.array(windows)  # [windows, WINDOW + 1, 2]
    ids, weights = slots[:, :, 0].astype(np.uint16), slots[:, :, 1].astype(np.float32)
    tensors = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights[:, 1:]}
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, path)


if __name__ == "__main__":
    main()
