"""PEFT adapters of the golden `qwen2` (whose weights are f32), with the results of the merged model.

Run by tools/golden.sh after models.py. Writes policy/model/tests/golden/qwen2/NAME/.
"""
import json
import pathlib
import shutil
import sys
import warnings

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ADAPTERS = {
    "adapter": dict(r=4, lora_alpha=6, target_modules="all-linear"),
    "adapter_rslora": dict(
        r=4, lora_alpha=2, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True,
        rank_pattern={"q_proj": 2}, alpha_pattern={r"layers\.1\.mlp\.down_proj": 3},
    ),
}


def make(folder, name, settings):
    def load():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    ids = load_file(folder / "expected.safetensors")["ids"]
    torch.manual_seed(sum(name.encode()))
    model = get_peft_model(load(), LoraConfig(task_type="CAUSAL_LM", **settings))
    for parameter_name, parameter in sorted(model.named_parameters()):
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, 0, 0.1)
    out = folder / name
    shutil.rmtree(out, ignore_errors=True)
    model.eval().save_pretrained(out)
    (out / "README.md").unlink()
    config = json.loads((out / "adapter_config.json").read_text())
    config["target_modules"].sort()  # PEFT writes a set in any order
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in out.iterdir():
        file.chmod(0o644)
    with torch.no_grad():
        beside = model(ids).logits
        merged = model.merge_and_unload()(ids).logits
        base = load()(ids).logits
    assert (merged - beside).abs().max() < 5e-5 and (merged - base).abs().max() > 0.5
    save_file(
        {
            "ids": ids,
            "logits_f32": merged.contiguous(),
            "logprobs_f32": merged[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].contiguous(),
        },
        out / "expected.safetensors",
    )
    (out / "expected.safetensors").chmod(0o644)
    print(name, "moves logits by", (merged - base).abs().max().item(), "merging alone by", (merged - beside).abs().max().item())


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    folder = pathlib.Path(sys.argv[1]) / "qwen2"
    for name, settings in ADAPTERS.items():
        make(folder, name, settings)


if __name__ == "__main__":
    main()
