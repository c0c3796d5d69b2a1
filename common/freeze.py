"""Which parameters train: everything, attention, or experts; in all layers or in some; and what backward does not have to enter.

Frozen means frozen: no gradient, no optimizer state, no weight decay. Parameters that train and parameters that do not never share an FSDP
unit (common/fsdp.py), because one unit has one gradient buffer.
"""

import json
import logging
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from common.families import Family

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """What trains, under the names of the model as transformers builds it."""

    names: frozenset[str]  # parameters that train, whole or in part
    # Path of a layer's experts -> sorted ids of those that train, where not all of them do.
    experts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # Number of the lowest layer in which something trains; 0 where the embeddings do too; None: nothing trains.
    lowest_layer: int | None = 0
    embeddings: bool = True  # whether the embeddings train: then backward goes all the way down


def parse_layers(text: str, num_layers: int) -> set[int]:
    """Layer numbers of `all` or e.g. `0-9,12,40-` (both ends included). ValueError for what is no such list or names no layer."""
    if text == "all":
        return set(range(num_layers))
    layers: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(-\s*(\d*))?\s*", item)
        if match is None:
            raise ValueError(f"trainable_layers: {item!r} is neither a layer nor a range such as 0-9 or 40-")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else num_layers - 1
        if not first <= last < num_layers:
            raise ValueError(f"trainable_layers: {item.strip()} does not lie within the model's layers 0-{num_layers - 1}")
        layers |= set(range(first, last + 1))
    return layers


def read_expert_mask(path: str | Path) -> dict[int, list[int]]:
    """An expert mask: JSON `{"layer": [expert, ...], ...}`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read expert_mask {path}: {error}") from error
    if not isinstance(content, dict) or not all(
        re.fullmatch(r"\d+", layer) and isinstance(ids, list) and all(type(expert) is int for expert in ids)
        for layer, ids in content.items()
    ):
        raise ValueError(f'expert_mask {path}: expected {{"layer": [expert, ...], ...}} with whole numbers')
    return {int(layer): ids for layer, ids in content.items()}


def _check_mask(mask: dict[int, list[int]], layers: set[int], experts: dict[int, nn.Module], source: str) -> dict[int, tuple[int, ...]]:
    """The mask with sorted ids. ValueError that names every layer and expert that does not exist or does not train."""
    problems = []
    for layer, ids in mask.items():
        if layer not in experts:
            problems.append(f"layer {layer} has no routed experts (those that have: {_ranges(experts)})")
            continue
        if layer not in layers:
            problems.append(f"layer {layer} is not in trainable_layers")
        total = next(iter(experts[layer]._parameters.values())).shape[0]
        if wrong := sorted(expert for expert in ids if not 0 <= expert < total):
            problems.append(f"layer {layer} has experts 0-{total - 1}, not {', '.join(map(str, wrong))}")
        if len(set(ids)) != len(ids):
            problems.append(f"layer {layer} names an expert twice")
    if not any(mask.values()):
        problems.append("it selects no expert")
    if problems:
        raise ValueError(f"expert_mask {source}: {'; '.join(problems)}")
    return {layer: tuple(sorted(ids)) for layer, ids in mask.items() if ids}


def select(
    model: PreTrainedModel,
    family: Family,
    *,
    trainable: str = "all",
    trainable_layers: str = "all",
    expert_mask: str | Path | dict[int, list[int]] | None = None,
    freeze_router: bool = False,
) -> Selection:
    """What trains in `model`, which is still as transformers built it (on meta).

    trainable: `all`; `attention`: all of self_attn / linear_attn but GLM's indexer; `experts`: routed experts; `none`. With fewer than all
    layers, embeddings, final norm and head are frozen. expert_mask: a file or {layer: experts}: of routed experts only these train.
    ValueError where this selects nothing, or names what does not exist.
    """
    paths = model.decoder_layer_paths
    layers = parse_layers(trainable_layers, len(paths))
    experts_modules = {i: module for i, path in enumerate(paths) if (module := _find(model, f"{path}.{family.experts}")) is not None}
    mask = None
    if expert_mask is not None:
        if trainable not in ("all", "experts"):
            raise ValueError(f"expert_mask is given, but trainable: {trainable} trains no experts")
        content = expert_mask if isinstance(expert_mask, dict) else read_expert_mask(expert_mask)
        mask = _check_mask(content, layers, experts_modules, "" if isinstance(expert_mask, dict) else str(expert_mask))
    if trainable == "experts" and not experts_modules:
        raise ValueError(f"trainable: experts, but {type(model).__name__} has no routed experts")

    names, partly = set(), {}
    wanted = {"attention": family.attention, "experts": (family.experts,)}.get(trainable)
    for number, path in enumerate(paths):
        if number not in layers or trainable == "none":
            continue
        for name, _ in model.get_submodule(path).named_parameters():
            is_expert, is_router = (name.startswith(part + ".") for part in (family.experts, family.router))
            if wanted is not None and not name.startswith(tuple(part + "." for part in wanted)):
                continue
            if (is_router and freeze_router) or (is_expert and mask is not None and number not in mask):
                continue
            names.add(f"{path}.{name}")
        if mask is not None and number in mask and len(mask[number]) < _num_experts(experts_modules[number]):
            partly[f"{path}.{family.experts}"] = mask[number]
    whole_model = trainable == "all" and len(layers) == len(paths)
    if whole_model:
        names |= {name for name, _ in model.named_parameters() if not name.startswith(tuple(path + "." for path in paths))}
    names = {name for name in names if not any(re.search(pattern, name) for pattern in family.never_trained)}
    if not names and trainable != "none":
        raise ValueError(f"trainable: {trainable} with trainable_layers: {trainable_layers} selects no parameter of {type(model).__name__}")
    lowest = next((i for i, path in enumerate(paths) if any(name.startswith(path + ".") for name in names)), None)
    return Selection(frozenset(names), partly, lowest, whole_model)


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _num_experts(experts: nn.Module) -> int:
    return next(iter(experts._parameters.values())).shape[0]


def _ranges(numbers) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def describe(selection: Selection, model: nn.Module) -> str:
    """What trains, in a few lines: number and share of parameters, names with the layers' numbers drawn together, experts of each layer."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    trained = 0
    layers_of: dict[str, list[int]] = defaultdict(list)
    for name in sorted(selection.names):
        ids = selection.experts.get(name.rpartition(".")[0])
        shape = model.get_parameter(name).shape
        trained += sizes[name] if ids is None else sizes[name] // shape[0] * len(ids)
        match = re.fullmatch(r"(.*?\.)(\d+)(\..*)", name)
        layers_of[f"{match[1]}*{match[3]}" if match else name] += [int(match[2])] if match else []
    total = sum(sizes.values())
    lines = [f"{trained:,} of {total:,} parameters train ({trained / total:.2%})"]
    lines += [name + (f" in layers {_ranges(layers)}" if layers else "") for name, layers in layers_of.items()]
    lines += [f"{path}: experts {_ranges(ids)}" for path, ids in selection.experts.items()]
    return "\n  ".join(lines)


# ----------------------------------------------------------------------------------------------------------------------------------
# Where backward ends


def run_without_graph(layer: nn.Module) -> None:
    """The layer's forward keeps nothing for backward. For layers below the lowest one that trains."""
    layer.forward = torch.no_grad()(layer.forward)


def stop_gradient_at_input(layer: nn.Module) -> None:
    """Backward ends at this layer: its input is detached, whatever lies below. For the lowest layer that trains."""

    def detach(_module, args, kwargs):
        detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
        if "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": kwargs["hidden_states"].detach()}
        return tuple(detached), kwargs

    layer.register_forward_pre_hook(detach, with_kwargs=True)
