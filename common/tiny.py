"""Tiny random checkpoints of every model family, with a real tokenizer and a chat template. Nothing is downloaded.

    python -m common.tiny --family qwen3_moe --output models/tiny
    python -m common.tiny --family glm_moe_dsa --output models/glm --experts fused --mtp --set num_hidden_layers=6

They exist for tests, the demo and benchmarks, so their shapes are chosen to show mistakes: 12 experts (sorting "10" before "2" is seen),
hidden size and expert size differ (a transposed matrix does not fit), key and value heads of Gated DeltaNet differ in number and width.
Weights are uniform with a standard deviation of 1 / sqrt(fan in), so that every part of the model moves the output; transformers' own
initialisation (0.02 everywhere) makes attention and experts of a model this small all but invisible.

Each tensor is drawn from a generator seeded by (seed, name): the same seed gives the same bytes, whatever the sharding, and the same
weights per expert or fused. Uniform numbers need no logarithm or cosine, so they do not depend on the processor either.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig, PreTrainedModel

from common.fp8 import SCALE_SUFFIX, quantise

ARCHITECTURES = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
}
FAMILIES = list(ARCHITECTURES)

# transformers ignores GLM's extra layer under this number only (its real one has 78 layers), so tiny models use it too, however few
# layers they have. vLLM looks for it at num_hidden_layers: to load the extra layer there, make the model with num_hidden_layers=78.
GLM_MTP_LAYER = 78

# ----------------------------------------------------------------------------------------------------------------------------------
# Tokenizer

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# Ordinary tokens that are never split: they stay visible when special tokens are skipped in decoding.
MARKUP_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PAD_TOKEN, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
NUM_TOKENS = 384  # specials included; the model's vocabulary has the same size

# ASCII only: characters outside it stay split over several byte tokens, which is what the tests of masks need.
TOKENIZER_TEXT = """
You are a helpful assistant. The user asks a question and the assistant answers it in one or two sentences.
What is the capital of France? The capital of France is Paris. How many legs does a spider have? A spider has eight legs.
Tell me a story about a river. The river ran down from the mountain to the sea, and the children who lived near the water sang to it.
system user assistant tool answer question number result reason because therefore first second third then after before
Let me think about this step by step. There are three boxes with four apples in each box, so there are twelve apples in total.
She sold 48 clips in April and half as many in May. How many clips did she sell altogether? 48 + 24 = 72.
def add(first, second): return first + second. for index in range(10): print(index). if value is None: raise ValueError("no value")
{"name": "get_weather", "arguments": {"city": "London", "unit": "celsius"}} {"role": "user", "content": "hello"}
one two three four five six seven eight nine ten red green blue yellow black white small large warm cold morning evening
""".strip().splitlines()

CHAT_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nOne JSON object in <tool_call></tool_call> calls a function.\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".strip()


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE of NUM_TOKENS tokens, trained on the text above: any string goes there and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    assert tokenizer.get_vocab_size() == NUM_TOKENS
    return tokenizer


def write_tokenizer(output: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    build_tokenizer().save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": PAD_TOKEN,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (PAD_TOKEN, END_OF_TURN)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    write_json(output / "tokenizer_config.json", settings)
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def token_id(token: str) -> int:
    """The id of a special or markup token: they come last, in the order listed."""
    return NUM_TOKENS - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS) + (SPECIAL_TOKENS + MARKUP_TOKENS).index(token)


# ----------------------------------------------------------------------------------------------------------------------------------
# Configs

# Accepted by the configs through **kwargs, so they are not among their fields.
EXTRA_FIELDS = {
    "full_attention_interval",
    "index_topk_freq",
    "index_skip_topk_offset",
    "index_topk_pattern",
    "partial_rotary_factor",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
}


def default_fields(family: str) -> dict[str, Any]:
    """What a tiny config of `family` sets; for qwen3_5_moe these are the fields of its text part."""
    fields: dict[str, Any] = dict(
        vocab_size=NUM_TOKENS,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU build refuses less
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=token_id(PAD_TOKEN),
        bos_token_id=None,
        eos_token_id=token_id(END_OF_TURN),
        dtype="bfloat16",
    )
    if family == "llama":
        return fields | dict(intermediate_size=96)
    # grouped_mm wants rows of whole 16 bytes: expert sizes are multiples of 8.
    fields |= dict(moe_intermediate_size=48, num_experts_per_tok=2)
    if family == "glm_moe_dsa":
        del fields["head_dim"]  # the config derives it from qk_rope_head_dim
        return fields | dict(
            intermediate_size=96,
            num_hidden_layers=3,
            num_key_value_heads=4,
            n_routed_experts=12,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=24,
            kv_lora_rank=40,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=32,
            # With few heads all scores of a query can be zero (ReLU), and the choice among equals is not defined: 16 heads avoid it.
            index_n_heads=16,
            index_head_dim=32,
            index_topk=32,
        )
    fields |= dict(num_experts=12, norm_topk_prob=True)
    if family == "qwen3_moe":
        return fields | dict(intermediate_size=96)
    fields |= dict(
        shared_expert_intermediate_size=40,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
    )
    if family == "qwen3_next":
        return fields | dict(intermediate_size=96)
    del fields["norm_topk_prob"]  # Qwen3.5 always normalises
    rope = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[4, 2, 2], mrope_interleaved=True)
    return fields | dict(rope_parameters=rope)


def vision_fields() -> dict[str, Any]:
    """What the vision tower of a tiny qwen3_5_moe sets."""
    return dict(
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        num_position_embeddings=64,
    )


def config(family: str, **overrides: Any) -> PretrainedConfig:
    """The tiny config of `family` with `overrides`, which are field names of its (text) config.

    For qwen3_5_moe overrides go to the text part; `vision_config` takes a dict of overrides for the vision tower.
    Raises ValueError for an unknown family or field: transformers would keep a misspelt field and ignore it.
    """
    if family not in ARCHITECTURES:
        raise ValueError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    config_name, architecture = ARCHITECTURES[family]
    config_class = getattr(transformers, config_name)
    vision = vision_fields() | overrides.pop("vision_config", {}) if family == "qwen3_5_moe" else None
    text_class = transformers.Qwen3_5MoeTextConfig if vision else config_class
    known = {field.name for field in dataclasses.fields(text_class)} | set(text_class.attribute_map) | set(default_fields(family)) | EXTRA_FIELDS
    if unknown := sorted(set(overrides) - known):
        raise ValueError(f"{family} has no config field {', '.join(unknown)}: see {text_class.__name__} in transformers")
    fields = default_fields(family) | overrides
    if not vision:
        return config_class(architectures=[architecture], **fields)
    return config_class(
        architectures=[architecture],
        text_config=fields,
        vision_config=vision | {"out_hidden_size": fields["hidden_size"]},
        tie_word_embeddings=fields["tie_word_embeddings"],
        dtype=fields["dtype"],
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )


# ----------------------------------------------------------------------------------------------------------------------------------
# Tensors


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def meta_model(model_config: PretrainedConfig) -> PreTrainedModel:
    """The model of `model_config` without memory: only its names, shapes and dtypes are wanted."""
    model_class = getattr(transformers, model_config.architectures[0])
    with torch.device("meta"):
        return model_class._from_config(model_config, dtype=model_config.dtype)


def state_specs(model_config: PretrainedConfig) -> list[TensorSpec]:
    """Names as in memory, in the model's order, without a tied head."""
    tensors = meta_model(model_config).state_dict()
    if model_config.tie_word_embeddings:
        del tensors["lm_head.weight"]  # listed again under its own name, but it is the embedding
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    if model_config.model_type == "glm_moe_dsa":  # its router is float32 on disk; older transformers declare only the bias so
        specs = [dataclasses.replace(spec, dtype=torch.float32) if ".mlp.gate." in spec.name else spec for spec in specs]
    return specs


def mtp_specs(family: str, model_config: PretrainedConfig) -> list[TensorSpec]:
    """Tensors of one multi-token-prediction layer: a full decoder layer, norms and a projection [hidden, 2 * hidden].

    transformers does not load them; vLLM does, under these names.
    """
    hidden = model_config.get_text_config().hidden_size
    dtype = model_config.dtype
    if family == "glm_moe_dsa":
        one_layer = config_with(model_config, num_hidden_layers=1, mlp_layer_types=["sparse"], indexer_types=["full"])
        prefix, layer = "model.layers.0.", f"model.layers.{GLM_MTP_LAYER}."
        extra = {layer + "eh_proj.weight": (hidden, 2 * hidden)}
        extra |= {f"{layer}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    elif family in ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"):
        one_layer = config_with(model_config.get_text_config(), num_hidden_layers=1)
        one_layer.architectures = ["Qwen3NextForCausalLM" if family == "qwen3_next" else "Qwen3_5MoeForCausalLM"]
        prefix, layer = "model.layers.0.", "mtp.layers.0."
        extra = {"mtp.fc.weight": (hidden, 2 * hidden)}
        extra |= {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    else:
        raise ValueError(f"{family} has no multi-token-prediction layer")
    specs = [
        dataclasses.replace(spec, name=layer + spec.name.removeprefix(prefix))
        for spec in state_specs(one_layer)
        if spec.name.startswith(prefix)
    ]
    return specs + [TensorSpec(name, shape, dtype) for name, shape in extra.items()]


def config_with(model_config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    """A copy with other fields; one full-attention layer unless `changes` say otherwise."""
    fields = model_config.to_dict()
    fields["layer_types"] = [kind for kind in fields["layer_types"] if kind == "indexed_attention"][:1] or ["full_attention"]
    return type(model_config).from_dict(fields | changes)


def expert_specs(spec: TensorSpec) -> list[TensorSpec]:
    """A fused tensor `...experts.gate_up_proj` [E, 2 I, H] or `...experts.down_proj` [E, H, I] as per-expert tensors, as on the hub."""
    prefix, _, kind = spec.name.rpartition(".")
    num_experts, rows, columns = spec.shape
    names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
    shape = (rows // len(names), columns)
    return [TensorSpec(f"{prefix}.{expert}.{name}.weight", shape, spec.dtype) for expert in range(num_experts) for name in names]


# FP8 checkpoints: blocks of one scale, what stays bf16 (as in the published ones), and sizes for which edge blocks are ragged.
FP8_BLOCK = (128, 128)
NOT_FP8 = ("gate", "shared_expert_gate", "conv1d", "in_proj_ba", "in_proj_a", "in_proj_b", "weights_proj", "eh_proj", "fc")
FP8_SIZES = dict(hidden_size=192, moe_intermediate_size=136)


def is_fp8(spec: TensorSpec) -> bool:
    """Whether an FP8 checkpoint holds this tensor as FP8: matrices of Linear layers and experts inside decoder layers."""
    module, _, leaf = spec.name.rpartition(".")
    inside = ".layers." in spec.name and ".visual." not in spec.name
    return inside and leaf == "weight" and len(spec.shape) == 2 and module.rpartition(".")[2] not in NOT_FP8


def quantise_tensors(tensors: Iterator[tuple[str, torch.Tensor]], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, those in `names` as FP8 with scales after them."""
    for name, tensor in tensors:
        if name not in names:
            yield name, tensor
            continue
        weight, scale = quantise(tensor, FP8_BLOCK)
        yield name, weight
        yield name + SCALE_SUFFIX, scale


def is_fused(name: str) -> bool:
    """Whether `name` is a tensor of all experts of a layer."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def fill(spec: TensorSpec, seed: int, zero_centred_norms: bool) -> torch.Tensor:
    """The values of one tensor, a function of (seed, name, shape)."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()[:7], "big"))
    module, _, leaf = spec.name.rpartition(".")
    uniform = torch.rand(spec.shape, generator=generator).mul_(2).sub_(1)  # [-1, 1)
    # Gated DeltaNet's decay per token is exp(-exp(A_log) * softplus(a + dt_bias)). From these ranges the heads remember between
    # one token and about a hundred, so that a state leaking from one packed row into the next is seen.
    if leaf == "A_log":
        values = uniform.mul_(2).sub_(1)  # from -3 to 1
    elif leaf == "dt_bias":
        values = uniform.sub_(1)  # from -2 to 0
    elif len(spec.shape) == 1:  # norms and biases
        gated = ".linear_attn." in spec.name or ".visual." in spec.name  # these norms multiply by w, not by 1 + w
        is_norm = leaf == "weight" and "norm" in module.rpartition(".")[2]
        values = uniform.mul_(0.1).add_(1.0 if is_norm and (gated or not zero_centred_norms) else 0.0)
    else:
        values = uniform.mul_(math.sqrt(3 / math.prod(spec.shape[1:])))
    return values.to(spec.dtype)


def generate(specs: list[TensorSpec], seed: int, zero_centred_norms: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, values) of each tensor. A fused one is its experts one below the other, so both forms hold the same weights."""
    for spec in specs:
        if is_fused(spec.name):
            parts = [fill(part, seed, zero_centred_norms) for part in expert_specs(spec)]
            yield spec.name, torch.cat(parts).view(spec.shape)
        else:
            yield spec.name, fill(spec, seed, zero_centred_norms)


# ----------------------------------------------------------------------------------------------------------------------------------
# Writing


def make(
    family: str,
    output: str | Path,
    *,
    experts: str = "per_expert",
    mtp: bool = False,
    fp8: bool = False,
    seed: int = 0,
    max_shard_bytes: int | None = None,
    **overrides: Any,
) -> Path:
    """Writes a Hugging Face folder of a tiny random model and returns its path.

    experts: `per_expert` (one tensor an expert and matrix, as on the hub) or `fused` ([E, ...] tensors, as in memory).
    fp8: matrices inside layers as FP8 in blocks of 128 x 128 (DeepSeek's form); hidden and expert sizes are then 192 and 136 by default.
    mtp: adds a multi-token-prediction layer (`mtp.*`; GLM: `model.layers.78.*`).
    max_shard_bytes: several safetensors files and an index, each of at most this many bytes of tensors (or one tensor); None: one file.
    overrides: fields of the config, see `config`.

    Raises ValueError when the output is not empty or something is not known; memory needed is one shard.
    """
    output = Path(output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: choose another output or remove it")
    if experts not in ("per_expert", "fused"):
        raise ValueError(f"experts must be per_expert or fused, not {experts!r}")
    if fp8 and experts == "fused":
        raise ValueError("FP8 checkpoints hold one tensor an expert and matrix: experts must be per_expert")
    model_config = config(family, **((FP8_SIZES | overrides) if fp8 else overrides))
    specs = state_specs(model_config)
    if mtp:
        specs += mtp_specs(family, model_config)
        text = model_config.get_text_config()
        setattr(text, "mtp_num_hidden_layers" if family.startswith("qwen3_5") else "num_nextn_predict_layers", 1)
    if experts == "per_expert":
        specs = [part for spec in specs for part in (expert_specs(spec) if is_fused(spec.name) else [spec])]

    output.mkdir(parents=True, exist_ok=True)
    quantised = {spec.name for spec in specs if fp8 and is_fp8(spec)}
    if fp8:
        kept = sorted(spec.name.removesuffix(".weight") for spec in specs if len(spec.shape) >= 2 and spec.name not in quantised)
        model_config.quantization_config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(FP8_BLOCK),
            "modules_to_not_convert": kept,
        }
    write_weights(specs, output, seed, family.startswith(("qwen3_next", "qwen3_5")), max_shard_bytes, quantised)
    write_tokenizer(output)
    ends = [token_id(END_OF_TURN), token_id(PAD_TOKEN)]
    write_json(output / "generation_config.json", {"eos_token_id": ends, "pad_token_id": token_id(PAD_TOKEN)})
    model_config.save_pretrained(output)  # last: without config.json an interrupted folder cannot be taken for a model
    return output


def write_weights(
    specs: list[TensorSpec],
    output: Path,
    seed: int,
    zero_centred_norms: bool,
    max_shard_bytes: int | None,
    quantised: Iterable[str] = (),
) -> None:
    """Writes `specs` in their order, one shard in memory at a time. A layer may lie in two files, as it does on the hub.

    Names in `quantised` are written as FP8; the scales of a file's last weight lie in the next file, as can happen on the hub.
    """
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        full = max_shard_bytes is not None and sum(other.num_bytes for other in shards[-1]) + spec.num_bytes > max_shard_bytes
        if full and shards[-1]:
            shards.append([])
        shards[-1].append(spec)
    weight_map: dict[str, str] = {}
    waiting: dict[str, torch.Tensor] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if max_shard_bytes is None else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(quantise_tensors(generate(shard, seed, zero_centred_norms), set(quantised)))
        tensors |= waiting
        waiting = {}
        if number < len(shards):  # the scales of the last weight, which is what a cut between two files separates
            last = shard[-1].name + SCALE_SUFFIX
            waiting = {last: tensors.pop(last)} if last in tensors else {}
        save_file(tensors, output / file, metadata={"format": "pt"})
        total += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, file)
    if max_shard_bytes is not None:
        write_json(output / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m common.tiny", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--family", required=True, choices=FAMILIES)
    parser.add_argument("--output", required=True, help="a folder that is empty or does not exist")
    parser.add_argument("--experts", choices=["per_expert", "fused"], default="per_expert", help="how experts lie on disk")
    parser.add_argument("--fp8", action="store_true", help="weights inside layers as FP8 in blocks of 128 x 128")
    parser.add_argument("--mtp", action="store_true", help="add a multi-token-prediction layer")
    parser.add_argument("--max_shard_bytes", type=int, default=None, help="several files of at most this size")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="config fields, values in YAML")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        overrides = dict(setting.split("=", 1) for setting in args.set)
    except ValueError:
        parser.error(f"--set takes KEY=VALUE, not {' '.join(args.set)}")
    try:
        overrides = {key: yaml.safe_load(value) for key, value in overrides.items()}
        output = make(
            args.family,
            args.output,
            experts=args.experts,
            mtp=args.mtp,
            fp8=args.fp8,
            seed=args.seed,
            max_shard_bytes=args.max_shard_bytes,
            **overrides,
        )
    except (ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    print(f"{output}: {args.family}, {size / 2**20:.1f} MiB of weights, {NUM_TOKENS} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
