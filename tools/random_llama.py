"""Writes a Llama with 88 million random weights (bf16) and another model's tokenizer, for benchmarks.

    random_llama.py TOKENIZER_FOLDER FOLDER     with a Python that has torch and transformers
"""

import json
import pathlib
import shutil
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

source, folder = map(pathlib.Path, sys.argv[1:])
if (folder / "model.safetensors").exists():
    sys.exit(0)
torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=json.loads((source / "config.json").read_text())["vocab_size"],
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=0,
    rope_theta=10000.0,
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
model.save_pretrained(folder)
for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    shutil.copy(source / name, folder)
print(f"{folder}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million weights")
