"""Writes a Hugging Face folder as a GGUF file in f32, for llama.cpp. Qwen3 and Llama only.

    gguf_of.py FOLDER FILE      with the Python of an environment that has `gguf`
"""

import json
import sys
from pathlib import Path

import gguf
import numpy
from gguf import MODEL_ARCH, GGUFWriter, TokenType
from gguf.tensor_mapping import get_tensor_name_map

ARCHITECTURES = {"qwen3": MODEL_ARCH.QWEN3, "llama": MODEL_ARCH.LLAMA}


def tensors(path):
    """Names and f32 arrays of a safetensors file in bf16 or f32."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            data = file.read(end - begin)
            if entry["dtype"] == "BF16":
                # the upper half of an f32
                array = (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
            elif entry["dtype"] == "F32":
                array = numpy.frombuffer(data, "<f4")
            else:
                sys.exit(f"{path} has {name} in {entry['dtype']}; give BF16 or F32")
            yield name, array.reshape(entry["shape"])


def interleaved(array, heads):
    """llama.cpp's Llama rotates neighbors; Hugging Face's rotates halves. Reorders the rows of q and k."""
    rows = array.shape[0] // heads
    return array.reshape(heads, 2, rows // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def main():
    folder, file = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        sys.exit(f"{folder} is a {kind}; this script writes {' and '.join(ARCHITECTURES)}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    if model["type"] != "BPE":
        sys.exit(f"{folder} has a tokenizer of the kind {model['type']}; this script writes BPE")
    ids = {id: token for token, id in model["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    ids |= special
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids.get(id, f"[unused {id}]") for id in range(size)])
    writer.add_token_types([TokenType.CONTROL if id in special else TokenType.NORMAL for id in range(size)])
    merges = model["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_add_bos_token(False)

    names = get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    for name, array in tensors(folder / "model.safetensors"):
        if kind == "llama" and name.endswith("q_proj.weight"):
            array = interleaved(array, heads)
        if kind == "llama" and name.endswith("k_proj.weight"):
            array = interleaved(array, kv_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
