"""Reference log-probabilities: what engines that serve a version are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: As policy/artifact/src/reference.rs has them.
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, TEMPERATURE = 16, 24, 16, 0.8


def reference(logits: Callable[[list[list[int]]], Any], vocab: int, context: int) -> dict[str, Any]:
    """What a model says greedily to the fixed prompts, for `Cohort.commit` or `policy publish --reference`.

    `logits` gets token ids, all lists of one length, and returns the logits of what follows each: `[lists,
    vocab]`, as torch or NumPy has them, of the model as it is served: without dropout. `vocab` and `context`
    are those of `config.json`. Needed only for architectures that Springtide does not compute itself.
    """
    import numpy as np

    if context < 2:
        raise ValueError(f"a context of {context} tokens has no room for a prompt and an answer")
    tokens = min(PROMPT_TOKENS, context - 1)
    texts = [[_id(prompt * PROMPT_TOKENS + at, vocab) for at in range(tokens)] for prompt in range(PROMPTS)]
    answers: list[dict[str, Any]] = [{"token_ids": [], "logprobs": []} for _ in texts]
    for step in range(min(ANSWER_TOKENS, context - tokens)):
        found = logits(texts)
        # torch's tensors on a GPU, in bfloat16, or with a gradient are none of NumPy's
        after = np.asarray(found.detach().float().cpu() if hasattr(found, "detach") else found, dtype=np.float64)
        best = after.argmax(axis=-1)
        for row, answer in enumerate(answers):
            answer["token_ids"].append(int(best[row]))
            answer["logprobs"].append(_log_prob(after[row], int(best[row])))
            if step == 0:
                answer["first_logprob"] = _log_prob(after[row] / TEMPERATURE, int(best[row]))
            texts[row].append(int(best[row]))
    return {"vocab": vocab, "prompt_tokens": tokens, "answers": answers}


def _id(position: int, vocab: int) -> int:
    return (((position + 1) * 0x9E3779B9 % 2**64 >> 7) % 2**32) % vocab


def _log_prob(logits: Any, token: int) -> float:
    import numpy as np

    largest = logits.max()
    return round(min(0.0, float(logits[token] - largest - np.log(np.exp(logits - largest).sum()))), 5)
