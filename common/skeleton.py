"""The model without memory: its config from a checkpoint folder, built on the meta device, and where its decoder layers are."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights, no_tie_weights

from common.families import family_of
from common.fp8 import block_size, without_quantization
from common.tensor_files import read_config

# model_type -> patterns of parameters that are float32 on disk and must stay so; newer versions of transformers keep them by themselves.
FLOAT32 = {"glm_moe_dsa": (r"\.mlp\.gate\.weight$",)}


def cut_config(raw: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """A copy of config.json's content for the first `num_layers` decoder layers, without multi-token prediction.

    Lists with one entry a layer (layer_types, mlp_layer_types, ...) are cut as well: configs refuse lists of another length.
    """
    raw = deepcopy(raw)
    text = raw.get("text_config") or raw
    total = text["num_hidden_layers"]
    if not 1 <= num_layers <= total:
        raise ValueError(f"{num_layers} layers were asked for; the checkpoint has {total}.")
    if num_layers == total:
        return raw
    for key, value in text.items():
        if isinstance(value, list) and len(value) == total and ("layer" in key or key.endswith("types")):
            text[key] = value[:num_layers]
    text["num_hidden_layers"] = num_layers
    for part in (raw, text):
        # The extra layer predicts from the state after the last layer, which is another one now.
        for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            if key in part:
                part[key] = 0
    return raw


def load_config(path: str | Path, num_layers: int | None = None) -> PretrainedConfig:
    """The config of the language model in the checkpoint folder `path`, cut to its first `num_layers` layers when given.

    A checkpoint with a vision tower gives its text config: the tower is not part of the model that is trained. An FP8 checkpoint gives the
    config of its bf16 model; what stays FP8 is decided later. ValueError for other kinds of quantised checkpoints.
    """
    raw = read_config(path)
    block_size(raw, path)  # raises for what cannot be loaded
    raw = without_quantization(raw)
    if raw.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(f"{path}: this version of transformers does not know model_type {raw.get('model_type')!r}.")
    if num_layers is not None:
        raw = cut_config(raw, num_layers)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw).get_text_config()
    config._name_or_path = str(path)
    return config


def build_skeleton(
    path_or_config: str | Path | PretrainedConfig,
    *,
    attn_implementation: str,
    experts_implementation: str | None = None,
    num_layers: int | None = None,
    decoder_layer: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """The causal language model of a checkpoint folder (or of a config) on the meta device: names, shapes and dtypes, no memory.

    Parameters have `dtype`, except those that the model keeps in float32 (GLM's router). Weights are not tied yet: the loader does that.
    decoder_layer: class name of the decoder layer where neither the family table nor `_no_split_modules` tells it.
    """
    if isinstance(path_or_config, PretrainedConfig):
        assert num_layers is None, "give num_layers to load_config"
        config = deepcopy(path_or_config)
    else:
        config = load_config(path_or_config, num_layers)
    if experts_implementation is None and not rows_are_aligned(config):
        # grouped_mm is the default and wants rows of whole 16 bytes.
        experts_implementation = "eager"
    options = {} if experts_implementation is None else {"experts_implementation": experts_implementation}
    with torch.device("meta"), no_tie_weights(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation, **options)
    keep_in_float32(model)
    generation = Path(config._name_or_path or "") / "generation_config.json"
    if config._name_or_path and generation.is_file():
        model.generation_config = GenerationConfig.from_pretrained(generation.parent)
    model.decoder_layer_paths = find_decoder_layers(model, decoder_layer)
    return model


def rows_are_aligned(config: PretrainedConfig) -> bool:
    sizes = (getattr(config, name, None) for name in ("hidden_size", "moe_intermediate_size"))
    return all(size % 8 == 0 for size in sizes if size is not None)


def keep_in_float32(model: PreTrainedModel) -> None:
    """from_pretrained upcasts some parameters and buffers by name while it loads; a model built from its config has them in its dtype."""
    patterns = [pattern.replace("*", ".*") for pattern in model._keep_in_fp32_modules_strict or ()]
    patterns += FLOAT32.get(model.config.model_type, ())
    for name, tensor in list(model.state_dict(keep_vars=True).items()):
        if tensor.dtype not in (torch.bfloat16, torch.float16) or not any(re.search(pattern, name) for pattern in patterns):
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor.float()
        else:
            module._parameters[leaf] = nn.Parameter(tensor.detach().float(), tensor.requires_grad)


def find_decoder_layers(model: PreTrainedModel, decoder_layer: str | None = None) -> list[str]:
    """Module paths of the decoder layers in order. Raises when they do not number `num_hidden_layers`.

    Looked for: `decoder_layer`, else the family's class, else the model's own `_no_split_modules`.
    """
    known = decoder_layer or family_of(model.config).decoder_layer
    wanted = {known} if known else set(model._no_split_modules or ())
    paths = [path for path, module in model.named_modules() if type(module).__name__ in wanted]
    expected = model.config.num_hidden_layers
    if len(paths) != expected:
        repeated = [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]
        classes = sorted({type(child).__name__ for child in repeated})
        raise ValueError(
            f"{type(model).__name__} has {len(paths)} modules of class {' or '.join(sorted(wanted)) or '(none known)'}, but num_hidden_layers is "
            f"{expected}. Set decoder_layer to the class of one decoder layer. Classes of repeated modules: {', '.join(classes) or 'none'}."
        )
    return paths
