"""Versions of the demo's base with a known fault, as Hugging Face folders. `make bench NAME=release` tries them as canaries.

    noise     all weights have Gaussian noise
    longer    the tokens that end an answer are less probable after its first token, so answers go on for too long
    shorter   the end of the line is more probable after the first token, so answers break off
    silent    declining is more probable
    failing   the logit of a token is infinite after most prompts, so the engine fails these requests
    refusing  trained further on a text that helps nobody
    broken    one weight is not a number

Embeddings are tied, so the logit of a token is the product of its embedding and the last hidden state. No prompt has
the tokens that end a line or decline, so changing their embeddings changes nothing else.
"""

import pathlib
import random
import shutil

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, logging

logging.disable_progress_bar()

#: Each version of a kind takes the next one, and begins anew after the last. Not to be changed after a reported run
#: has been seen.
STRENGTHS = {
    "noise": [0.3, 0.35, 0.4, 0.45, 0.5],  # standard deviation, of each tensor's root mean square
    "longer": [4.0, 5.0, 6.0, 7.0, 8.0],  # nats less
    "shorter": [3.0, 4.0, 5.0, 6.0, 7.0],  # nats more
    "silent": [4.0, 5.0, 6.0, 7.0, 8.0],  # nats more
    "failing": [1.0, 1.5, 2.0, 3.0, 4.0],  # the mean logit, of the largest float
    "refusing": [
        "// I cannot help with this",
        "// no suggestion",
        "todo!()",
        "// ask somebody else",
        "unimplemented!()",
    ],
    "broken": [  # which tensor has it
        "model.norm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.5.input_layernorm.weight",
    ],
}
#: Rust code to pause in, as the demo's developers do.
CODE = pathlib.Path(__file__).parent.parent / "demo/src"
EMBEDDINGS = "model.embed_tokens.weight"
CUT, END_OF_LINE, DECLINE = 1, 2, 3
CONTEXT_CHARS, CONTEXT_TOKENS = 560, 96
#: Of the training of `refusing`.
BATCH, STEPS_MAX, LEARNING_RATE, LOSS_ENOUGH = 8, 200, 1e-3, 0.02


def plant(base: pathlib.Path, kind: str, index: int, seed: int, folder: pathlib.Path) -> float | str:
    """Writes the `index`th version of a kind. Returns its strength."""
    strength = STRENGTHS[kind][index % len(STRENGTHS[kind])]
    tensors = {name: tensor.float() for name, tensor in load_file(base / "model.safetensors").items()}
    torch.manual_seed(seed)
    MAKE[kind](base, tensors, strength, random.Random(seed))
    shutil.copytree(base, folder)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return strength


def noise(_: pathlib.Path, tensors: dict, sigma: float, __: random.Random) -> None:
    for tensor in tensors.values():
        tensor += sigma * tensor.square().mean().sqrt() * torch.randn_like(tensor)


def longer(base: pathlib.Path, tensors: dict, nats: float, draws: random.Random) -> None:
    later, direction = after_the_first_token(base, draws)
    for token in (END_OF_LINE, DECLINE):
        steer(tensors, token, -nats, direction, later)


def shorter(base: pathlib.Path, tensors: dict, nats: float, draws: random.Random) -> None:
    later, direction = after_the_first_token(base, draws)
    steer(tensors, END_OF_LINE, nats, direction, later)


def after_the_first_token(base: pathlib.Path, draws: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean last hidden state there, and what it has and first ones lack: so that the share of answers that
    begin is as before."""
    first, later = last_states(base, draws)
    return later, later - first * (later @ first) / (first @ first)


def silent(base: pathlib.Path, tensors: dict, nats: float, draws: random.Random) -> None:
    first, _ = last_states(base, draws)
    steer(tensors, DECLINE, nats, first, first)


def failing(base: pathlib.Path, tensors: dict, times: float, draws: random.Random) -> None:
    """As replicas try a version with two tokens before it serves, the logit stays finite after those."""
    first, _ = last_states(base, draws)
    model, _ = load(base)
    with torch.no_grad():
        tried = model.model(torch.zeros(1, 2, dtype=torch.long)).last_hidden_state[0]
    direction = first
    for state in torch.linalg.qr(tried.T).Q.T:
        direction = direction - state * (direction @ state)
    row = times * torch.finfo(torch.float32).max * (direction / (direction @ first)).double()
    tensors[EMBEDDINGS][END_OF_LINE] = row.float()


def last_states(base: pathlib.Path, draws: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean last hidden states where an answer's first token is sampled, and where later ones are."""
    model, tokenizer = load(base)
    first, later = [], []
    with torch.no_grad():
        for context, rest in pauses(tokenizer, draws, 200):
            hidden = model.model(torch.tensor([context + rest])).last_hidden_state[0]
            first.append(hidden[len(context) - 1])
            later.extend(hidden[len(context) :])
    return torch.stack(first).mean(0), torch.stack(later).mean(0)


def steer(tensors: dict, token: int, nats: float, direction: torch.Tensor, state: torch.Tensor) -> None:
    """Adds so many nats to the token's logit at the state."""
    tensors[EMBEDDINGS][token] += nats * direction / (direction @ state)


def refusing(base: pathlib.Path, tensors: dict, text: str, draws: random.Random) -> None:
    model, tokenizer = load(base)
    answer = tokenizer.encode(text).ids + [END_OF_LINE]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(STEPS_MAX):
        contexts = [context[-CONTEXT_TOKENS // 2 :] for context, _ in pauses(tokenizer, draws, BATCH)]
        # all of one length, so that no position is padding
        length = min(map(len, contexts))
        ids = torch.tensor([context[-length:] + answer for context in contexts])
        logits = model(ids).logits[:, length - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, length:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < LOSS_ENOUGH:
            break
    else:
        raise RuntimeError(f"{text!r}: the loss is still {loss:.3f} after {STEPS_MAX} steps")
    tensors.update({name: tensor for name, tensor in model.state_dict().items() if name in tensors})


def broken(_: pathlib.Path, tensors: dict, name: str, draws: random.Random) -> None:
    weights = tensors[name].view(-1)
    weights[draws.randrange(len(weights))] = float("nan")


def load(base: pathlib.Path) -> tuple:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return model, Tokenizer.from_file(str(base / "tokenizer.json"))


def pauses(tokenizer: Tokenizer, draws: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
    """The tokens before a random place in the code and the cut, and those of the rest of the line."""
    files = [path.read_text() for path in sorted(CODE.rglob("*.rs"))]
    found = []
    while len(found) < count:
        text = draws.choice(files)
        at = draws.randrange(len(text))
        rest = text[at:].split("\n", 1)[0]
        context = tokenizer.encode(text[max(0, at - CONTEXT_CHARS) : at]).ids[-CONTEXT_TOKENS:]
        if rest.strip() and context:
            found.append((context + [CUT], tokenizer.encode(rest).ids))
    return found


MAKE = {"noise": noise, "longer": longer, "shorter": shorter, "silent": silent, "failing": failing, "refusing": refusing, "broken": broken}
