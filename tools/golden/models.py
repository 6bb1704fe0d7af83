"""Small random models of every architecture as Hugging Face folders, with the results of transformers.

Run by tools/golden.sh. Writes policy/model/tests/golden/ARCHITECTURE/ and the README.md beside them.
"""
import dataclasses
import hashlib
import json
import math
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

SEQUENCES, LENGTH, PROMPT, NEW_TOKENS = 2, 40, 16, 12
# The least margin of a choice of an expert or a greedy token, so that rounding cannot decide it.
MARGIN_EXPERT, MARGIN_GREEDY = 0.01, 0.05

BASE = dict(vocab_size=96, bos_token_id=0, eos_token_id=1, pad_token_id=None, use_cache=True, initializer_range=0.02)


@dataclasses.dataclass
class Fixture:
    model: str  # class prefix
    what: str  # one line for the README
    config: dict
    dtype: torch.dtype = torch.bfloat16
    shard: str = "5GB"
    v4: dict = dataclasses.field(default_factory=dict)  # fields that transformers 4 wrote and 5 does not
    v4_without: tuple = ()  # fields that transformers 5 writes and 4 did not
    variants: dict = dataclasses.field(default_factory=dict)  # other configurations over the same weights


def rope(theta, kind="default", **more):
    return {"rope_theta": theta, "rope_type": kind, **more}


QWEN_WINDOW = dict(use_sliding_window=False, max_window_layers=2)
YARN_V3 = dict(factor=40.0, original_max_position_embeddings=256, beta_fast=32.0, beta_slow=1.0)

FIXTURES = {
    "llama": Fixture(
        "Llama",
        "Llama 3.x: `llama3` rotary scaling, untied head",
        dict(
            hidden_size=64, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters=rope(10000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=32),
        ),
        v4=dict(pretraining_tp=1, attention_bias=False, mlp_bias=False),
        v4_without=("head_dim",),
        variants={
            "plain": dict(rope_parameters=rope(10000.0)),
            "linear": dict(rope_parameters=rope(10000.0, "linear", factor=4.0)),
        },
    ),
    "qwen2": Fixture(
        "Qwen2",
        "Qwen2.5: biases on q, k and v, tied head",
        dict(
            hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=True,
            rope_parameters=rope(1000000.0), sliding_window=128, **QWEN_WINDOW,
        ),
        dtype=torch.float32,
        v4=dict(use_mrope=False, sliding_window=128),
        variants={"sliding": dict(use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types=None)},
    ),
    "qwen3": Fixture(
        "Qwen3",
        "Qwen3: q/k norm, tied head, heads wider than the residual stream",
        dict(
            hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False,
            rope_parameters=rope(1000000.0), **QWEN_WINDOW,
        ),
        v4=dict(sliding_window=None),
        variants={"yarn": dict(rope_parameters=rope(10000.0, "yarn", factor=4.0, original_max_position_embeddings=64))},
    ),
    "mistral": Fixture(
        "Mistral",
        "Mistral: a window of 12 in every layer, heads wider than the residual stream",
        dict(
            hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
            head_dim=24, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=12,
            rope_parameters=rope(10000.0),
        ),
        dtype=torch.float16,
        variants={"full": dict(sliding_window=None)},
    ),
    "qwen3_moe": Fixture(
        "Qwen3Moe",
        "Qwen3-MoE: softmax routing, 2 of 8 experts, one dense layer, in shards with an index",
        dict(
            hidden_size=48, intermediate_size=72, moe_intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-6,
            tie_word_embeddings=False, attention_bias=False, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[1], rope_parameters=rope(1000000.0), use_sliding_window=False,
        ),
        shard="60KB",
        v4=dict(sliding_window=None, max_window_layers=3),
        variants={"unnormalised": dict(norm_topk_prob=False)},
    ),
    "deepseek_v3": Fixture(
        "DeepseekV3",
        "DeepSeek-V3: latent attention with a low-rank q, yarn with mscale, interleaved rotary, groups, a shared expert",
        dict(
            hidden_size=48, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
            v_head_dim=10, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=1,
            first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5, max_position_embeddings=10240,
            # far from 1e-6, the fixed epsilon of the latent norms
            rms_norm_eps=1e-3, tie_word_embeddings=False, rope_interleave=True, num_mtp_layers=0, attention_bias=False,
            rope_parameters=rope(10000.0, "yarn", mscale=1.0, mscale_all_dim=1.0, **YARN_V3),
        ),
        v4=dict(
            aux_loss_alpha=0.001, ep_size=1, moe_layer_freq=1, num_nextn_predict_layers=1, pretraining_tp=1,
            scoring_func="sigmoid", seq_aux=True, topk_method="noaux_tc", torch_dtype="bfloat16",
        ),
        v4_without=("head_dim", "qk_head_dim", "rope_interleave", "output_router_logits"),
        variants={
            "mscale": dict(rope_parameters=rope(10000.0, "yarn", mscale=1.0, mscale_all_dim=0.5, **YARN_V3)),
            "halves": dict(rope_interleave=False),
            # as in Kimi K2: one group, and rotary frequencies whose blended range is one pair
            "kimi_k2": dict(
                n_group=1, topk_group=1, routed_scaling_factor=2.827, max_position_embeddings=8192,
                rope_parameters=rope(50000.0, "yarn", mscale=1.0, mscale_all_dim=1.0, factor=32.0,
                                     original_max_position_embeddings=256, beta_fast=1.0, beta_slow=1.0),
            ),
            "unnormalised": dict(norm_topk_prob=False),
        },
    ),
    "deepseek_v3_full_q": Fixture(
        "DeepseekV3",
        "the same as in Moonlight: `q_lora_rank` null, no rotary scaling, one group, two shared experts",
        dict(
            hidden_size=48, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
            v_head_dim=12, n_routed_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=2,
            first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.446, max_position_embeddings=256,
            rms_norm_eps=1e-5, tie_word_embeddings=False, rope_interleave=True, num_mtp_layers=0, attention_bias=False,
            rope_parameters=rope(50000.0),
        ),
        v4=dict(moe_layer_freq=1, num_nextn_predict_layers=0, scoring_func="sigmoid", topk_method="noaux_tc"),
        v4_without=("head_dim", "qk_head_dim", "rope_interleave", "output_router_logits"),
    ),
}


def initialize(model, generator):
    """Sets every value off its neutral element, so that logits vary by several nats."""
    tied = model.config.tie_word_embeddings
    state = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if "correction_bias" in n}
    for name, tensor in sorted(state.items()):
        noise = torch.empty_like(tensor, dtype=torch.float32)
        if tied and name == "model.norm.weight":
            value = noise.uniform_(1.0, 3.0, generator=generator)
        elif name.endswith("norm.weight"):
            value = noise.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("correction_bias"):
            # Many biased scores are below 0, so that masking a group with 0 instead of −∞ would show.
            value = noise.normal_(-0.4, 0.4, generator=generator)
        elif name.endswith("bias"):
            value = noise.normal_(0, 0.5, generator=generator)
        elif "embed_tokens" in name:
            value = noise.normal_(0, 0.2 if tied else 1.0, generator=generator)
        else:
            gain = 2.5 if "lm_head" in name else 2.0 if ".gate.weight" in name else 1.2
            value = noise.normal_(0, gain / math.sqrt(tensor.shape[-1]), generator=generator)
        tensor.data.copy_(value)


def load(folder, dtype):
    kwargs = {"experts_implementation": "eager"} if "moe" in folder.name or "deepseek" in folder.name else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **kwargs).eval()


class Routing:
    """The choices of a model's routers in its last forward pass."""

    def __init__(self, model):
        self.layers, self.seen = [], {}
        for i, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "experts"):
                self.layers.append(i)
                layer.mlp.gate.register_forward_hook(lambda gate, _, out, i=i: self.seen.__setitem__(i, (gate, out)))

    def experts(self):
        """Ids in rising order and their weights, [layers, tokens, k]."""
        ids, weights = [], []
        for i in self.layers:
            order = self.seen[i][1][2].argsort(-1)
            ids.append(self.seen[i][1][2].gather(-1, order))
            weights.append(self.seen[i][1][1].float().gather(-1, order))
        return torch.stack(ids), torch.stack(weights)

    def margins(self):
        """The margin of each token's choice, [tokens]: the least over layers, groups and experts."""
        least = None
        for i in self.layers:
            gate, (logits, _, _) = self.seen[i]
            if hasattr(gate, "e_score_correction_bias"):
                scores = logits.sigmoid() + gate.e_score_correction_bias
                gap = torch.full(scores.shape[:1], math.inf)
                if gate.topk_group < gate.num_group:
                    grouped = scores.view(len(scores), gate.num_group, -1)
                    groups = grouped.topk(2, -1)[0].sum(-1)
                    best, which = groups.topk(gate.topk_group + 1, -1)
                    gap = best[:, -2] - best[:, -1]
                    kept = torch.zeros_like(groups).scatter(1, which[:, :-1], 1).bool()
                    scores = grouped.masked_fill(~kept[..., None], -math.inf).flatten(1)
            else:
                scores, gap = logits, torch.full(logits.shape[:1], math.inf)
            best = scores.topk(gate.top_k + 1, -1)[0]
            gap = torch.minimum(gap, best[:, -2] - best[:, -1])
            least = gap if least is None else torch.minimum(least, gap)
        return least


@torch.no_grad()
def choose_ids(f32, low, generator, vocab):
    """Random tokens. With routers, f32 and `low` choose the same experts for them, by a margin."""
    routing, low_routing = Routing(f32), Routing(low)
    if not routing.layers:
        return torch.randint(vocab, (SEQUENCES, LENGTH), generator=generator)
    rows = []
    for _ in range(SEQUENCES):
        row = torch.empty(0, dtype=torch.long)
        while len(row) < LENGTH:
            candidates = torch.randint(vocab, (24, 1), generator=generator)
            tried = torch.cat([row.expand(24, -1), candidates], 1)
            f32(tried), low(tried)
            same = (routing.experts()[0] == low_routing.experts()[0]).all(-1).all(0)
            clear = (same & (routing.margins() > MARGIN_EXPERT)).view(24, -1)[:, -1].nonzero()
            if len(clear) == 0:
                row = row[:-1]  # no candidate fits after it
                continue
            row = tried[clear[0, 0]]
        rows.append(row)
    return torch.stack(rows)


@torch.no_grad()
def greedy(model, prompt):
    """The continuation, and the smallest margin of its choices."""
    model.generation_config.eos_token_id = None  # `generate` would stop at it
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    out = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), generation_config=config)[0]
    best = model(out[None, :-1]).logits[0, len(prompt) - 1 :].topk(2, -1)
    new = out[len(prompt) :]
    gap = (best.values[:, 0] - best.values[:, 1]).min().item()
    # Cached decoding and one whole forward pass agree, unless two tokens are equally good.
    assert len(new) == NEW_TOKENS and (torch.equal(new, best.indices[:, 0]) or gap < 1e-4)
    return new, gap


@torch.no_grad()
def expected(model, ids, prompt):
    routing = Routing(model)
    logits = model(ids).logits
    out = {
        "ids": ids,
        "logits_f32": logits,
        "logprobs_f32": logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0],
    }
    margin = math.inf
    if routing.layers:
        experts, weights = routing.experts()
        margin = routing.margins().min().item()
        shape = (len(routing.layers), *ids.shape, -1)
        out["experts"], out["expert_weights_f32"] = experts.view(shape), weights.view(shape)
        out["expert_layers"] = torch.tensor(routing.layers)
    out["prompt"] = prompt
    out["greedy"], gap = greedy(model, prompt)
    return out, margin, gap


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def v4_config(config, fixture):
    """The same configuration in the spelling of transformers 4."""
    out = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype", "layer_types", *fixture.v4_without)}
    scaling = dict(config["rope_parameters"])
    out["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    # DeepSeek's own configurations say `type`
    out["rope_scaling"] = None if kind == "default" else scaling | {"type" if kind == "yarn" else "rope_type": kind}
    if "num_local_experts" in out:
        out["num_experts"] = out.pop("num_local_experts")
    out["torch_dtype"] = config["dtype"]
    out["transformers_version"] = "4.51.0"
    return out | fixture.v4


def read_model(folder, config_file, dtype, scratch):
    """The folder's weights under another of its configurations."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder, scratch)
    shutil.copy(folder / config_file, scratch / "config.json")
    return load(scratch, dtype)


def make(name, fixture, folder, scratch):
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    cls = getattr(transformers, fixture.model + "ForCausalLM")
    config = getattr(transformers, fixture.model + "Config")(**BASE, **fixture.config)
    model = cls(config)
    initialize(model, generator)
    bias = {n: b.clone() for n, b in model.named_buffers() if "correction_bias" in n}
    model.to(fixture.dtype)
    for n, value in bias.items():  # stays f32, as transformers keeps it
        module, _, leaf = n.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Buffer(value))
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size=fixture.shard)

    # the second precision: bf16, of bf16 weights where the folder's are not
    f32, low = load(folder, torch.float32), load(folder, torch.bfloat16)
    ids = choose_ids(f32, low, generator, config.vocab_size)
    while True:
        prompt = torch.randint(config.vocab_size, (PROMPT,), generator=generator)
        out, margin, gap = expected(f32, ids, prompt)
        if gap > MARGIN_GREEDY and len(set(out["greedy"].tolist())) >= NEW_TOKENS // 2:
            break
    with torch.no_grad():
        out["logits_bf16"] = low(ids).logits
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "expected.safetensors")

    written = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.v4.json", v4_config(written, fixture))
    again = read_model(folder, "config.v4.json", torch.float32, scratch)
    with torch.no_grad():
        # where tensors lie in memory decides the last bits
        assert (again(ids).logits - out["logits_f32"]).abs().max() < 1e-5, f"{name}: config.v4.json means something else"

    for variant, changes in fixture.variants.items():
        changed = cls.config_class.from_dict({**written, **changes}).to_dict()
        write_json(folder / f"config.{variant}.json", {k: v for k, v in changed.items() if k in written})
        other = read_model(folder, f"config.{variant}.json", torch.float32, scratch)
        values, variant_margin, variant_gap = expected(other, ids[:1], prompt)
        assert min(variant_margin, variant_gap) > 1e-3, f"{name} {variant}: a near choice"
        assert (values["logits_f32"] - out["logits_f32"][:1]).abs().max() > 0.1, f"{name} {variant}: changes nothing"
        save_file({k: v.contiguous() for k, v in values.items()}, folder / f"expected.{variant}.safetensors")

    weights = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(file)
    return {
        "name": name,
        "parameters": sum(w.numel() for w in weights.values()),
        "spread": out["logits_f32"].std(-1).mean().item(),
        "bf16": (out["logits_bf16"].float() - out["logits_f32"]).abs().max().item(),
        "margin": margin,
        "gap": gap,
    }


README = """# Golden models

Small random models, made with transformers {transformers} and torch {torch} by `make golden`, which
writes this page too. No value is at its neutral element. Each folder has `save_pretrained`'s files:

- `config.v4.json`: the configuration in the spelling of transformers 4.
- `expected.safetensors`, with eager attention and eager experts: `ids` [{sequences}, {length}];
  `logits_f32` [{sequences}, {length}, V] and `logprobs_f32` [{sequences}, {length}−1] of the next token, with the weights in f32;
  `logits_bf16`; `greedy`, the {new} tokens after `prompt`, in f32; with routers `experts`
  [layers, {sequences}, {length}, k] in ascending order, `expert_weights_f32` (the factors of the experts' outputs)
  and `expert_layers`.
- `config.NAME.json` and `expected.NAME.safetensors`: another configuration over the same weights,
  for the first sequence, in f32.

f32 and bf16 choose the same experts. Margins are in logits for Qwen3-MoE, biased scores for
DeepSeek-V3, and nats for greedy tokens.

| folder | features | parameters | dtype | logits: standard deviation | max \\|bf16 − f32\\| | smallest expert margin | smallest greedy margin |
|---|---|---|---|---|---|---|---|
{rows}

| also | what | by `tools/golden/` |
|---|---|---|
| `qwen2/adapter/`, `qwen2/adapter_rslora/` | PEFT's LoRA adapters, and the merged model's results | `lora.py` |
| `policy/text/tests/golden/chat/` | chat templates, results of `apply_chat_template`, two tokenizers | `chat.py` |
| `defaults.json` | defaults of every supported `model_type` | `defaults.py` |
| `sampling.json` | results of logits processors on random logits | `sampling.py` |
| `policy/artifact/tests/golden/quantised.json` | fp8 codes of torch 2.11.0, int4 codes and scales of compressed-tensors 0.20.0 | `quant.py` |
"""


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    out, scratch = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    rows = []
    for name, fixture in FIXTURES.items():
        made = make(name, fixture, out / name, scratch / "variant")
        print(made, flush=True)
        near = "" if made["margin"] == math.inf else f"{made['margin']:.3f}"
        rows.append(
            f"| `{name}` | {fixture.what} | {made['parameters']:,} | {str(fixture.dtype)[6:]} | {made['spread']:.2f} "
            f"| {made['bf16']:.3f} | {near} | {made['gap']:.3f} |"
        )
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)
    (out / "README.md").write_text(README.format(
        transformers=transformers.__version__, torch=torch.__version__.split("+")[0], sequences=SEQUENCES, length=LENGTH,
        new=NEW_TOKENS, rows="\n".join(rows),
    ))


if __name__ == "__main__":
    main()
