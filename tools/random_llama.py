"""Writes a Llama with random weights (bf16) and another model's tokenizer, for benchmarks.

    random_llama.py TOKENIZER_FOLDER FOLDER [HIDDEN LAYERS]     with a Python that has torch and transformers

768 and 12 are 88 million weights, 1536 and 16 are 460 million.
"""

import json
import pathlib
import shutil
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

source, folder = map(pathlib.Path, sys.argv[1:3])
hidden, layers = map(int, sys.argv[3:] or (768, 12))
if (folder / "model.safetensors").exists():
    sys.exit(0)
torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=json.loads((source / "config.json").read_text())["vocab_size"],
    hidden_size=hidden,
    intermediate_size=hidden * 8 // 3,
    num_hidden_layers=layers,
    num_attention_heads=hidden // 64,
    num_key_value_heads=hidden // 64,
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
