"""What is one FSDP unit: a plan made on the meta model, before anything is loaded.

The decoder layer is the unit. One flat parameter has one dtype, one buffer of gradients and one precision, so inside a layer what differs in
that gets a unit of its own: frozen parts of a partly trained layer, FP8 weights, a router in fp32. Frozen vectors (norms, biases) are not
sharded at all: together they are a few MB, and a unit of their own would cost a gather each.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from common import fp8
from common.experts import SplitExperts, split_experts
from common.families import Family
from common.freeze import Selection
from common.lora import Adapters
from common.weights import Converter


@dataclass(frozen=True)
class Precision:
    """Dtypes of a trained unit: parameters that the optimizer updates, forward and backward, sums of gradients over ranks."""

    master: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32


@dataclass(frozen=True)
class Kind:
    """What parameters of one unit have in common."""

    trained: bool
    dtype: torch.dtype  # in memory
    exact: bool  # they compute in that dtype: FP8 weights, modules that the model keeps in fp32


@dataclass(frozen=True)
class Options:
    """How a model is cut into units and where they live."""

    selection: Selection
    family: Family
    detach_moe_output: bool = False
    expert_units_per_layer: int = 1
    frozen_shard_ranks: int | None = None  # frozen units are sharded over groups of so many neighbouring ranks; None: over all
    adapters: Adapters | None = None


@dataclass
class Origin:
    """Where a parameter of split experts comes from: rows of the fused tensor `name`.

    `experts` are all experts of the layer that train (or, of a frozen part, do not); this part's are among them from position `first` on.
    """

    name: str
    experts: tuple[int, ...]
    first: int
    ids: tuple[int, ...]


@dataclass
class Plan:
    """For each unit of the converter by name: the kind of its own parameters, and units nested inside it (inner ones first)."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    nested: dict[str, list[tuple[str, Kind]]] = field(default_factory=dict)  # path within the unit
    replicated: set[str] = field(default_factory=set)  # parameters that are not sharded
    origins: dict[str, Origin] = field(default_factory=dict)  # parameter in memory -> where it comes from, for split experts
    cut_experts: bool = False
    adapters: Adapters | None = None


def make_plan(model: PreTrainedModel, converter: Converter, precision: Precision, options: Options) -> Plan:
    """Prepares the meta model for loading, so that its parameters have the dtype and the requires_grad that they will have in memory:
    splits experts, gives modules with frozen FP8 weights their FP8 form. Returns how its units will be made.
    """
    selection, family = options.selection, options.family
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in selection.names)
    plan = Plan(cut_experts=options.expert_units_per_layer > 1, adapters=options.adapters)
    _split(model, options)
    for path, module in model.named_modules():
        if isinstance(module, SplitExperts):
            for part, ids in module.ids.items():
                experts, first = module.rows(part)
                for leaf in getattr(module, part)._parameters:
                    plan.origins[f"{path}.{part}.{leaf}"] = Origin(f"{path}.{leaf}", experts, first, ids)
    kinds = _set_kinds(model, converter, precision, plan, family)
    for unit in converter.units:
        inside = {name.removeprefix(unit.module_path + "."): kind for name, kind in kinds.items() if _unit_of(converter, name) == unit.name}
        module = model.get_submodule(unit.module_path) if unit.name else model
        skip = {other.module_path for other in converter.units if other.name} if not unit.name else set()
        alone = set()
        if options.detach_moe_output:
            alone.add(family.experts.rpartition(".")[0])
        if plan.cut_experts:
            alone |= {f"{family.experts}.{part}" for part in getattr(_submodule(module, family.experts), "ids", ())}
        plan.kinds[unit.name], plan.nested[unit.name] = cut_into_units(module, inside, alone, skip)
    return plan


def _split(model: PreTrainedModel, options: Options) -> None:
    selection, units = options.selection, options.expert_units_per_layer
    paths = dict(selection.experts)
    if units > 1:
        for layer in model.decoder_layer_paths:
            path = f"{layer}.{options.family.experts}"
            if path in paths or (experts := _submodule(model, path)) is None:
                continue
            trains = any(name.startswith(path + ".") for name in selection.names)
            paths[path] = tuple(range(experts.num_experts)) if trains else ()
        if not paths:
            raise ValueError(f"expert_units_per_layer is {units}, but {type(model).__name__} has no routed experts")
    split_experts(model, paths, units)


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _unit_of(converter: Converter, name: str) -> str:
    return next((unit.name for unit in converter.units if unit.name and name.startswith(unit.module_path + ".")), "")


def _set_kinds(model: PreTrainedModel, converter: Converter, precision: Precision, plan: Plan, family: Family) -> dict[str, Kind | None]:
    """The kind of each parameter by its name in memory (None: not sharded); gives the meta parameters the dtype of that kind."""
    main_dtype = model.config.dtype
    kinds: dict[str, Kind | None] = {}
    for path, module in list(model.named_modules()):
        prefix = path + "." if path else ""
        own = {leaf: parameter for leaf, parameter in module._parameters.items() if parameter is not None}
        sources = {leaf: plan.origins[prefix + leaf].name if prefix + leaf in plan.origins else prefix + leaf for leaf in own}
        quantised = [
            leaf
            for leaf, parameter in own.items()
            if not parameter.requires_grad
            and sources[leaf] not in converter.tied
            and converter.loaded_dtype(sources[leaf]) == fp8.DTYPE
            and _unit_of(converter, sources[leaf])  # the head's weight is used in ways that its module does not see
            # GLM's indexer: some rows do not need it, but all ranks must gather the same units, so it has to be one unit, of one dtype.
            and not any(re.search(pattern, sources[leaf]) for pattern in family.never_trained)
        ]
        if quantised and fp8.can_keep_fp8(module, quantised):
            fp8.keep_fp8(module, quantised, {leaf: _meta_scale(converter, sources[leaf], own[leaf]) for leaf in quantised}, converter.block)
        else:
            quantised = []
        for leaf, parameter in own.items():
            kept = parameter.dtype == torch.float32 != main_dtype
            if parameter.requires_grad:
                kind = Kind(True, torch.float32 if kept else precision.master, kept)
            elif leaf in quantised:
                kind = Kind(False, fp8.DTYPE, True)
            elif parameter.dim() >= 2:
                kind = Kind(False, parameter.dtype, kept)
            else:
                kind = None
                plan.replicated.add(prefix + leaf)
            kinds[prefix + leaf] = kind
            dtype = kind.dtype if kind is not None else torch.float32 if kept else precision.compute
            if module._parameters[leaf].dtype != dtype:
                module._parameters[leaf] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
    return kinds


def _meta_scale(converter: Converter, name: str, parameter: torch.Tensor) -> torch.Tensor:
    shape = converter.scale_shape(name)
    if parameter.shape != converter.shape(name):  # a part of split experts
        shape = (parameter.shape[0], *shape[1:])
    return torch.empty(shape, device="meta")


def cut_into_units(
    module: nn.Module, kinds: dict[str, Kind | None], alone: Iterable[str] = (), skip: Iterable[str] = ()
) -> tuple[Kind, list[tuple[str, Kind]]]:
    """The fewest units for a module whose parameters have these `kinds` (by name within it): (kind of its own unit, nested units).

    A nested unit is a submodule (path within `module`); its parameters, without those of units nested in it, are of one kind. Inner units
    come first. `alone`: submodules that get a unit in any case; `skip`: submodules that are not looked into.
    """
    everything = sorted({kind for kind in kinds.values() if kind is not None}, key=str)
    alone, skip = set(alone), set(skip)

    def cut(module: nn.Module, path: str) -> dict[Kind, list[tuple[str, Kind]]]:
        """For each kind that the surrounding unit may have: the units nested inside this module."""
        prefix = path + "." if path else ""
        own = {kinds.get(prefix + leaf) for leaf, parameter in module._parameters.items() if parameter is not None} - {None}
        if len(own) > 1:
            raise ValueError(f"{type(module).__name__} {path} has parameters of {len(own)} kinds ({own}), which cannot share a unit")
        ways: dict[Kind, list[tuple[str, Kind]]] = {kind: [] for kind in (own or everything)}
        for name, child in module._modules.items():
            child_path = prefix + name
            if child is None or child_path in skip:
                continue
            inside = cut(child, child_path)
            callable_ = not isinstance(child, (nn.ModuleList, nn.ModuleDict, SplitExperts))
            has_parameters = any(kinds.get(f"{child_path}.{leaf}") for leaf, _ in child.named_parameters())
            apart = None
            if callable_ and has_parameters:
                kind = min(inside, key=lambda kind: len(inside[kind]))
                apart = [*inside[kind], (child_path, kind)]
            for kind in list(ways):
                choices = [] if apart is None else [apart]
                if kind in inside and not (child_path in alone and apart is not None):
                    choices.append(inside[kind])
                if not choices:
                    del ways[kind]
                    continue
                ways[kind] = ways[kind] + min(choices, key=len)
        return ways

    ways = cut(module, "")
    kind = min(ways, key=lambda kind: len(ways[kind]))
    return kind, ways[kind]
