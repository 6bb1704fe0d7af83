"""Makes a model of random weights with the agent model's tokenizer: `make bench NAME=staleness` samples a million tokens
from it in minutes. It hardly ever ends an answer, so answers are as long as they may be.

    tiny.py BASE OUT      BASE: the folder `model` of `make model NAME=agent`
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

SMALLER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}


def main() -> None:
    base, out = map(pathlib.Path, sys.argv[1:])
    config = json.loads((base / "config.json").read_text()) | SMALLER
    shutil.copytree(base, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    # the output layer is the embedding
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
