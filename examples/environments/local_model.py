"""A Hugging Face folder behind the calls of OpenAI's client that the environments make. No server: it
measures any trainer's checkpoints in the same way, with transformers."""

import json
import pathlib
import re
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class LocalModel:
    """Samples at temperature 1, from a seed."""

    def __init__(self, folder: pathlib.Path, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def _create(self, *, model: str, messages: list, max_tokens: int, tools: list | None = None, **_: Any) -> Any:
        asked = [message if isinstance(message, dict) else message.model_dump() for message in messages]
        text = self._tokenizer.apply_chat_template(asked, tools=tools, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            whole = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0,
            )
        answer = self._tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        usage = SimpleNamespace(total_tokens=whole.shape[1])
        return SimpleNamespace(choices=[SimpleNamespace(message=read(answer))], usage=usage)


def read(answer: str) -> SimpleNamespace:
    """An answer as OpenAI's client gives it. A call that is no JSON stays text, as in `springtide serve`."""
    calls = []
    for number, body in enumerate(CALL.findall(answer)):
        try:
            call = json.loads(body)
            function = SimpleNamespace(name=call["name"], arguments=json.dumps(call["arguments"]))
        except (ValueError, KeyError, TypeError):
            return message(answer, [])
        calls.append(SimpleNamespace(id=str(number), function=function))
    return message(CALL.sub("", answer), calls)


def message(content: str, calls: list) -> SimpleNamespace:
    functions = [{"type": "function", "function": vars(call.function)} for call in calls]
    as_dict = {"role": "assistant", "content": content, **({"tool_calls": functions} if calls else {})}
    return SimpleNamespace(content=content, tool_calls=calls, model_dump=lambda **_: as_dict)
