"""Compares transformers and PEFT with the engine, on folders that trainer/tests/saved.rs wrote.

Run by tools/saved.sh. Fails if greedy text differs, or if log-probabilities differ by more than the
rounding of f32 in another order of summation.
"""
import json
import pathlib
import sys
import warnings

import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

LOGPROB_MAX = 1e-4


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model, ids, tokens):
    model.generation_config.eos_token_id = None  # the engine's list continues after a stop token
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def compare(what, model, answers, exact=True):
    logit = logprob = 0.0
    texts = 0
    for answer in answers:
        ids = torch.tensor([answer["ids"]])
        theirs, ours = model(ids).logits[0], torch.tensor(answer["logits"])
        logit = max(logit, (theirs - ours).abs().max().item())
        logprob = max(logprob, (theirs.log_softmax(-1) - ours.log_softmax(-1)).abs().max().item())
        texts += greedy(model, ids, len(answer["greedy"])) == answer["greedy"]
    print(f"| {what} | {logit:.1e} | {logprob:.1e} | {texts} of {len(answers)} |", flush=True)
    return not exact or (texts == len(answers) and logprob < LOGPROB_MAX)


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    root = pathlib.Path(sys.argv[1])
    print("| folder, read by | logits apart | log-probabilities apart | greedy text equal |\n|---|---|---|---|")
    good = True
    for folder in sorted(root.iterdir()):
        answers = json.loads((folder / "answers.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        for answer in answers:
            assert tokenizer(answer["prompt"], add_special_tokens=False).input_ids == answer["ids"], folder
        good &= compare(f"{folder.name}: the model, transformers", load(folder / "model"), answers)
        if not (folder / "adapter").exists():
            continue
        # A separate adapter on a bf16 base is not rounded, but the merged version is.
        exact = "f32" in folder.name
        beside = PeftModel.from_pretrained(load(folder / "base"), folder / "adapter").eval()
        good &= compare(f"{folder.name}: the adapter beside the base, PEFT", beside, answers, exact)
        merged = beside.merge_and_unload()
        good &= compare(f"{folder.name}: the adapter merged by PEFT in f32", merged, answers, exact)
        version = dict(load(folder / "model").named_parameters())
        dtype = torch.float32 if exact else torch.bfloat16
        pairs = [(p.to(dtype).float(), version[n]) for n, p in merged.named_parameters()]
        differ, total = sum((a != b).sum().item() for a, b in pairs), sum(a.numel() for a, _ in pairs)
        apart = max((a - b).abs().max().item() for a, b in pairs)
        print(f"{folder.name}: of {total} weights that PEFT merges, {differ} differ from the version's once rounded to its dtype, by at most {apart:.1e}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
