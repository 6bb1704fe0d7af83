#!/usr/bin/env python3
"""Compare the engine's greedy text with that of Hugging Face transformers, on the same folder.

Needs `pip install torch transformers` and a running `springtide serve`. The model that answers is addressed as
POLICY@base, so that the comparison is with the committed folder and not with what was learnt since.

usage: scripts/transformers_greedy.py [--model models/demo-base] [--serve http://127.0.0.1:8000] [--policy demo]
"""
import argparse
import json
import sys
import urllib.request

import torch
import transformers

PROMPTS = [
    "use std::collections::HashMap;\n\nfn main() {\n    let mut map = HashMap::<|cut|>",
    "impl Default for Options {\n    fn default() <|cut|>",
    "    /// Returns the number of elements.\n    pub fn len(&self) -> <|cut|>",
    "#[derive(Debug, Clone, <|cut|>",
    "    match self {\n        Some(value) => <|cut|>",
    "pub struct Error {\n    kind: ErrorKind,\n}\n\nimpl std::fmt::<|cut|>",
    "fn read(path: &Path) -> io::Result<Vec<u8>> {\n    let mut file = File::<|cut|>",
    "#[cfg(test)]\nmod tests {\n    use <|cut|>",
]


def engine(url, model, prompt):
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["token_ids"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/demo-base")
    parser.add_argument("--serve", default="http://127.0.0.1:8000")
    parser.add_argument("--policy", default="demo")
    args = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    differ = 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=16, do_sample=False)
        theirs = out[0, ids.shape[1] :].tolist()
        ours = engine(args.serve, f"{args.policy}@base", prompt)
        same = ours == theirs
        differ += not same
        print(("same  " if same else "DIFFER"), repr(tokenizer.decode(ours)))
        if not same:
            print("       transformers:", repr(tokenizer.decode(theirs)))
    print(f"{len(PROMPTS) - differ} of {len(PROMPTS)} greedy continuations equal")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
