"""What transformers takes for fields that a config.json does not have.

Run by tools/golden.sh. Writes policy/model/tests/golden/defaults.json: for every supported model_type, the
fields of its configuration class with their declared defaults. A default that is null stands for another
value, which the class computes.
"""
import dataclasses
import json
import pathlib
import sys

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_TYPES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"]


def declared(model_type):
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = [f for f in dataclasses.fields(CONFIG_MAPPING[model_type]) if f.name not in common]
    return {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}


if __name__ == "__main__":
    defaults = {model_type: declared(model_type) for model_type in MODEL_TYPES}
    pathlib.Path(sys.argv[1]).write_text(json.dumps(defaults, indent=1, sort_keys=True) + "\n")
