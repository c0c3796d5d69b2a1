"""Loading and sharding unit by unit; clipping; this rank's shards; gathering one unit. What is a unit is decided in common/units.py.

A unit is sharded as soon as it is loaded, so no device and no host ever holds more than one whole unit. Nothing outside this file knows FSDP
types.

Never `no_sync()`: it would keep the whole model's gradient on every rank. Every micro-batch reduce-scatters into the shard's gradient.
FSDP averages over ranks: a loss that is a share of a global sum must be multiplied by the world size.
"""

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _flat_param
from torch.distributed.fsdp._flat_param import FlatParamHandle

from common import dist, fp8, freeze, lora
from common.experts import SplitExperts
from common.families import family_of
from common.logprobs import LogpModel
from common.tensor_files import bytes_of, sha256_of_tensor
from common.units import Kind, Options, Plan, Precision, make_plan
from common.weights import Converter, Loader

__all__ = ["LocalShard", "Options", "Precision", "ShardedModel", "load_and_shard", "model_name"]

log = logging.getLogger(__name__)

_WRAPPER_PARTS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(\.|$)")


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one parameter: `tensor` holds elements offset .. offset + tensor.numel() of the flattened parameter."""

    name: str  # as in the Hugging Face model
    shape: torch.Size  # of the whole parameter; where only some experts train, of those experts' rows
    parameter: nn.Parameter  # the object that the optimizer knows
    tensor: torch.Tensor  # [n], a view of the local flat shard
    offset: int
    experts: tuple[int, ...] | None = None  # the experts whose rows `shape` counts; None: all of the parameter


@dataclass(frozen=True)
class Gathered:
    """One whole parameter, or the rows of it that one unit holds."""

    name: str
    tensor: torch.Tensor
    experts: tuple[int, ...] | None  # ids of the rows; None: all of the parameter
    scale: torch.Tensor | None  # of a parameter that is FP8
    trained: bool


def model_name(wrapped: str) -> str:
    """A parameter's or module's name in the Hugging Face model, given its name under FSDP's and checkpointing's wrappers."""
    return _WRAPPER_PARTS.sub("", wrapped).removeprefix("model.").rstrip(".")


class _NestedUnit(FullyShardedDataParallel):
    """A unit inside a checkpointed layer. What the layer's recomputation gathers stays gathered until the unit's backward is over.

    FSDP would free it in between and gather it a third time. Not for experts that were cut into units to be gathered one at a time.
    """

    stays_gathered = True

    @torch.compiler.disable(recursive=False)  # of a compiled layer; what the unit wraps is compiled
    def forward(self, *args, **kwargs):
        handle = self._handle
        if handle.uses_sharded_strategy:
            recomputing = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
            keep = recomputing and self.stays_gathered
            handle._sharding_strategy = _strategy("SHARD_GRAD_OP" if keep else "FULL_SHARD")
        return super().forward(*args, **kwargs)


def _strategy(name: str):
    return getattr(_flat_param.HandleShardingStrategy, name)


def _wrap(
    module: nn.Module,
    kind: Kind,
    precision: Precision,
    *,
    frozen_group: ProcessGroup | None = None,
    replicated: list[nn.Parameter] = (),
    nested: bool = False,
) -> FullyShardedDataParallel:
    """One unit of parameters of one kind."""
    mixed = None
    if not kind.exact:
        mixed = MixedPrecision(
            param_dtype=precision.compute,
            reduce_dtype=precision.reduce,
            cast_root_forward_inputs=False,
            cast_forward_inputs=not nested,  # inside a layer activations have the right dtype; GLM's fp32 routing weights must keep it
        )
    group = None if kind.trained else frozen_group
    ranks = dist.world_size() if group is None else group.size()
    return (_NestedUnit if nested else FullyShardedDataParallel)(
        module,
        process_group=group,
        sharding_strategy=ShardingStrategy.FULL_SHARD if ranks > 1 else ShardingStrategy.NO_SHARD,
        mixed_precision=mixed,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,  # without it the CPU runs ahead and gathers several layers at once
        use_orig_params=True,
        device_id=dist.device(),
        ignored_states=list(replicated),
    )


def patch_fp8_padding() -> None:
    """Makes FSDP able to shard float8 parameters; calling it again changes nothing. RuntimeError on a torch where FSDP's internals differ.

    FSDP pads parameters to 16 bytes with ones * 42, but float8 has no multiplication. And gloo, which carries tests on CPUs, has no float8.
    """
    padding, gather = _flat_param._construct_padding_tensor, FlatParamHandle._all_gather_flat_param
    if hasattr(padding, "is_patched"):
        return
    found = [list(inspect.signature(function).parameters) for function in (padding, gather)]
    if found != [["padding_numel", "dtype", "requires_grad", "device"], ["self", "padded_unsharded_flat_param"]]:
        raise RuntimeError(
            f"FSDP of torch {torch.__version__} pads and gathers in another way ({found}): FP8 weights cannot be sharded with it."
        )

    def construct_padding_tensor(padding_numel, dtype, requires_grad, device):
        if dtype == fp8.DTYPE:
            return torch.zeros(padding_numel, dtype=torch.bfloat16, device=device).to(dtype)
        return padding(padding_numel, dtype, requires_grad, device)

    def all_gather_flat_param(self, padded_unsharded_flat_param):
        shard = self.flat_param.data
        if shard.dtype != fp8.DTYPE or not shard.is_cpu:
            return gather(self, padded_unsharded_flat_param)
        dist.all_gather_flat(padded_unsharded_flat_param.view(torch.uint8), shard.view(torch.uint8), self.process_group)
        return padded_unsharded_flat_param

    construct_padding_tensor.is_patched = True
    _flat_param._construct_padding_tensor = construct_padding_tensor
    FlatParamHandle._all_gather_flat_param = all_gather_flat_param


class ShardedModel:
    """A causal language model whose parameters live sharded over all ranks.

    Call it like `LogpModel`: `outputs = model(inputs, targets)`. Every call is a collective: all ranks call equally often.
    """

    def __init__(self, root: FullyShardedDataParallel, converter: Converter, config, plan: Plan, replicated: dict[str, nn.Parameter]):
        self.root = root
        self.converter = converter
        self.units = converter.units
        self.config = config
        self.plan = plan
        self.replicated = replicated  # frozen parameters that every rank holds whole, by name
        owner = {name: index for index, unit in enumerate(self.units) for name in unit.model_names}
        # {unit index: [(prefix of the names, FSDP module)]}: a layer with nested units has several.
        self._parts: dict[int, list[tuple[str, FullyShardedDataParallel]]] = {index: [] for index in range(len(self.units))}
        for path, module in root.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                first = self._names(path, module)[0]
                first = lora.weight_name(first) or first
                self._parts[owner[plan.origins[first].name if first in plan.origins else first]].append((path, module))
        self._frozen_hashes: dict[str, str] = {}
        self.adapters = plan.adapters

    def __call__(self, *args, **kwargs):
        output = self.root(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._free_root()
        return output

    def _free_root(self) -> None:
        """FSDP keeps the root's parameters whole for a backward that does not come: they would hold memory, and the next forward would
        not see what a resume has meanwhile written into the shards."""
        handle = self.root._handle
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(True)
            handle.post_reshard()

    def train(self, mode: bool = True) -> None:
        self.root.train(mode)

    def _names(self, path: str, module: FullyShardedDataParallel) -> list[str]:
        return [model_name(f"{path}.{fqn}" if path else fqn) for fqn in module._handle.flat_param._fqns]

    def local_shards(self) -> Iterator[LocalShard]:
        """This rank's part of every sharded parameter that has elements here, unit by unit. No communication, no copy."""
        for parts in self._parts.values():
            for path, module in parts:
                flat = module._handle.flat_param
                shard = getattr(flat, "_local_shard", flat)  # set at the first forward; before it `flat` itself is the shard
                rows = zip(self._names(path, module), flat._shapes, flat._params, flat._shard_param_infos, strict=True)
                for name, shape, parameter, info in rows:
                    if not info.in_shard:
                        continue
                    tensor = shard.detach()[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                    offset, origin = info.intra_param_start_idx, self.plan.origins.get(name)
                    if origin is None:
                        yield LocalShard(name, torch.Size(shape), parameter, tensor, offset)
                    else:
                        offset += origin.first * torch.Size(shape[1:]).numel()
                        whole = torch.Size([len(origin.experts), *shape[1:]])
                        yield LocalShard(origin.name, whole, parameter, tensor, offset, origin.experts)

    def trained_shards(self) -> list[LocalShard]:
        return [shard for shard in self.local_shards() if shard.parameter.requires_grad]

    def _trained_inner_names(self) -> Iterator[str]:
        for parts in self._parts.values():
            for path, module in parts:
                names, parameters = self._names(path, module), module._handle.flat_param._params
                yield from (name for name, parameter in zip(names, parameters, strict=True) if parameter.requires_grad)

    def trained_experts(self) -> dict[str, tuple[int, ...] | None]:
        """Names of the model's tensors that training changes -> ids of the experts that do, or None: all of the tensor. The same on all ranks.

        Where adapters train, these are the weights that they belong to."""
        return {lora.weight_name(name) or name: experts for name, experts in self.trained_parameters().items()}

    def trained_parameters(self) -> dict[str, tuple[int, ...] | None]:
        """Names of all parameters that the optimizer updates -> ids of the experts that train, or None: all of the parameter."""
        origins = self.plan.origins
        return {
            (origins[name].name if name in origins else name): (origins[name].experts if name in origins else None)
            for name in self._trained_inner_names()
        }

    @torch.no_grad()
    def gather_parts(self, index: int, dtype: torch.dtype | None = None, trained_only: bool = False) -> Iterator[Gathered]:
        """Whole parameters of one unit, one of its FSDP units in memory at a time, on this rank's device: a collective.

        FP8 parameters come as they are, with their scales. `dtype`: shards are cast before the gather, so that network and memory carry
        e.g. bf16 instead of fp32 masters; parameters that compute in their own dtype (an fp32 router, FP8 weights) and adapters are not.
        """
        for path, module in self._parts[index]:
            handle = module._handle
            flat = handle.flat_param
            if trained_only and not flat.requires_grad:
                continue
            shard = getattr(flat, "_local_shard", flat).detach()
            names = self._names(path, module)
            if dtype is not None and module.mixed_precision.param_dtype is not None and not lora.weight_name(names[0]):
                shard = shard.to(dtype)
            whole = torch.empty(shard.numel() * handle.world_size, dtype=shard.dtype, device=shard.device)
            dist.all_gather_flat(bytes_of(whole), bytes_of(shard.contiguous()), handle.process_group)
            views = handle._get_unflat_views(whole[: flat._unpadded_unsharded_size.numel()])
            for name, view, info in zip(names, views, flat._param_infos, strict=True):
                origin = self.plan.origins.get(name)
                scale = getattr(info.module, info.param_name + fp8.SCALE_SUFFIX) if view.dtype == fp8.DTYPE else None
                yield Gathered(origin.name if origin else name, view, origin and origin.ids, scale, flat.requires_grad)

    @torch.no_grad()
    def gather_trained(self, index: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Of one unit, whole parameters that train, by name; of those of which some experts train, those experts' rows. A collective.

        Weights that adapters belong to come with them merged. For `dtype` see `gather_parts`."""
        if self.adapters is not None:
            whole, changed = self.gather_unit(index, dtype), self.trained_experts()
            return {name: tensor for name, tensor in whole.items() if name in changed}
        parts: dict[str, list[Gathered]] = {}
        for part in self.gather_parts(index, dtype, trained_only=True):
            if part.trained:
                parts.setdefault(part.name, []).append(part)
        return {
            name: several[0].tensor if len(several) == 1 else torch.cat([part.tensor for part in several])
            for name, several in parts.items()
        }

    @torch.no_grad()
    def gather_unit(self, index: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Whole parameters of one unit by name, on this rank's device: a collective. Persistent buffers are included, adapters merged.

        FP8 parameters are dequantised to bf16, or to `dtype`; for the rest of what `dtype` means see `gather_parts`.
        """
        named: dict[str, torch.Tensor] = {}
        for part in self.gather_parts(index, dtype):
            tensor = part.tensor
            if part.scale is not None:
                tensor = fp8.dequantise(tensor, part.scale, self.converter.block, dtype or torch.bfloat16)
            if part.experts is None:
                named[part.name] = tensor
                continue
            whole = named.get(part.name)
            if whole is None:
                whole = tensor.new_empty(self.converter.shape(part.name))
            whole = whole.to(torch.promote_types(whole.dtype, tensor.dtype))
            whole[list(part.experts)] = tensor.to(whole.dtype)
            named[part.name] = whole
        wanted = set(self.units[index].model_names)
        for name, parameter in self.replicated.items():
            if name in wanted:
                named[name] = parameter.detach().to(dtype or self.converter.dtype(name))
        adapters = {name: named.pop(name) for name in list(named) if lora.weight_name(name)}
        for name in {lora.weight_name(name) for name in adapters}:
            named[name] = lora.merge(named[name], adapters, name, self.adapters.scale)
        return named | {name: buffer for name, buffer in self._buffers() if name in wanted}

    @torch.no_grad()
    def gather_adapters(self) -> dict[str, torch.Tensor]:
        """All adapters' parameters, whole, in their own dtype: a collective."""
        parts = (part for index in self._parts for part in self.gather_parts(index, trained_only=True))
        return {part.name: part.tensor.clone() for part in parts}

    def _frozen_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in self.local_shards():
            if not shard.parameter.requires_grad:
                yield f"{shard.name} from element {shard.offset}{'' if shard.experts is None else ' of the frozen experts'}", shard.tensor
        yield from self.replicated.items()
        for path, module in self.root.named_modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and leaf not in module._non_persistent_buffers_set:
                    yield model_name(f"{path}.{leaf}"), buffer

    def remember_frozen(self) -> None:
        """Takes the fingerprints that `check_frozen` compares with: sha256 of all that does not train on this rank, buffers included."""
        self._frozen_hashes = {name: sha256_of_tensor(tensor) for name, tensor in self._frozen_tensors()}

    def check_frozen(self) -> tuple[int, int]:
        """Compares what does not train with `remember_frozen`. Returns (tensors, bytes) on this rank; RuntimeError names what changed.

        Calls no collective, so that it can run wherever a run ends; every rank checks its own shards."""
        changed, count, size = [], 0, 0
        for name, tensor in self._frozen_tensors():
            count, size = count + 1, size + tensor.numel() * tensor.element_size()
            if self._frozen_hashes.get(name) != sha256_of_tensor(tensor):
                changed.append(name)
        if changed or count != len(self._frozen_hashes):
            raise RuntimeError(
                f"rank {dist.rank()}: {len(changed)} tensors that must not train are not what was loaded: {', '.join(changed[:20])}. "
                "Do not use this run's checkpoints."
            )
        return count, size

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in self.root.named_buffers():
            yield model_name(name), buffer

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scales gradients down to global norm `max_norm` (0: leaves them) and returns the norm before, a scalar on the device.

        Every parameter element lives on exactly one rank, so the global norm is the root of the sum of the local squares.
        Not finite on any rank means not finite here on all ranks.
        """
        gradients = [p.grad for p in self.root.parameters() if p.grad is not None and p.grad.numel()]
        squares = torch.zeros((), dtype=torch.float32, device=dist.device())
        if gradients:
            squares += torch.stack([norm.float() for norm in torch._foreach_norm(gradients, 2)]).square().sum()
        norm = dist.all_sum(squares).sqrt()
        if max_norm > 0 and gradients:
            torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


def load_and_shard(
    model: nn.Module,
    converter: Converter,
    precision: Precision,
    *,
    wrap_root: Callable[[nn.Module], LogpModel],
    gradient_checkpointing: bool = True,
    compile_layers: bool = False,
    options: Options | None = None,
) -> ShardedModel:
    """Fills the meta `model` from its checkpoint and shards it, unit by unit. A collective.

    `wrap_root` puts the loaded model into the module whose forward the loop calls. `options`: what trains and how the rest is kept; without
    it everything trains that the family allows.
    """
    if options is None:
        family = family_of(model.config)
        options = Options(freeze.select(model, family), family)
    plan = make_plan(model, converter, precision, options)
    if any(parameter.dtype == fp8.DTYPE for parameter in model.parameters()):
        patch_fp8_padding()
    frozen_group = _frozen_group(options.frozen_shard_ranks)
    if options.frozen_shard_ranks is not None:
        check_fit(model, plan, options.frozen_shard_ranks, precision)
    replicated: dict[str, nn.Parameter] = {}
    loader = Loader(converter)
    bar = dist.progress(len(converter.units), "loading", "unit")
    for number, unit in enumerate(converter.units):
        loader.load_unit(unit)
        bar.update()
        if not unit.name:
            continue
        layer = model.get_submodule(unit.module_path)
        lora.initialise(layer, unit.module_path, dist.device())
        replicated |= {name: model.get_parameter(name) for name in plan.replicated if name.startswith(unit.module_path + ".")}
        layer = _shard_layer(layer, number, unit.name, plan, precision, options, frozen_group, gradient_checkpointing, compile_layers)
        _replace(model, unit.module_path, layer)
    loader.finish()
    bar.close()
    root_replicated = {name: model.get_parameter(name) for name in plan.replicated - set(replicated)}
    replicated |= root_replicated
    root = _wrap(wrap_root(model), plan.kinds[""], precision, frozen_group=frozen_group, replicated=replicated.values())
    sharded = ShardedModel(root, converter, model.config, plan, replicated)
    _log_summary(sharded, precision)
    return sharded


def _shard_layer(layer, number, name, plan, precision, options, frozen_group, gradient_checkpointing, compile_layers) -> nn.Module:
    """One loaded decoder layer, ready to be called: units nested in it, what backward leaves out, checkpointing, its own unit."""
    selection = options.selection
    below = selection.lowest_layer is None or number < selection.lowest_layer
    checkpointed = gradient_checkpointing and not below
    for module in layer.modules():
        if isinstance(module, fp8.Fp8Experts):
            module.keeps_fp8_for_backward = not checkpointed
    moe_path = options.family.experts.rpartition(".")[0]
    if options.detach_moe_output and getattr(getattr(layer, moe_path, None), "experts", None) is not None:
        # Inside the unit: a hook outside of it would leave all its gathers in backward.
        freeze.run_without_graph(layer.get_submodule(moe_path))
    if below:
        freeze.run_without_graph(layer)
    replicated = [parameter for parameter_name, parameter in layer.named_parameters() if f"{name}.{parameter_name}" in plan.replicated]
    for path, kind in plan.nested[name]:
        unit = _wrap(layer.get_submodule(path), kind, precision, frozen_group=frozen_group, replicated=replicated, nested=True)
        owner = layer.get_submodule(path.rpartition(".")[0])
        unit.stays_gathered = not (plan.cut_experts and isinstance(owner, SplitExperts))
        _replace(layer, path, unit)
    if compile_layers:
        layer.compile()  # inside checkpointing: a graph break inside a compiled checkpoint leaves the whole layer uncompiled
    if checkpointed:
        drops_out = options.adapters is not None and options.adapters.dropout > 0  # the same again when it is recomputed
        layer = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT, preserve_rng_state=drops_out)
    wrapped = _wrap(layer, plan.kinds[name], precision, frozen_group=frozen_group, replicated=replicated)
    if number == selection.lowest_layer and not selection.embeddings:
        freeze.stop_gradient_at_input(wrapped)
    return wrapped


def _frozen_group(ranks: int | None) -> ProcessGroup | None:
    """The group of `ranks` neighbouring ranks that this rank is in; None: all ranks. A collective."""
    if ranks is None or ranks == dist.world_size():
        return None
    if ranks < 1 or dist.world_size() % ranks:
        raise ValueError(f"frozen_shard_group: {ranks} ranks do not divide the {dist.world_size()} ranks of this run")
    return dist.group_of_neighbours(ranks)


def check_fit(model: nn.Module, plan: Plan, ranks: int, precision: Precision, capacity: int | None = None) -> None:
    """ValueError, with figures, when frozen weights sharded over `ranks` ranks leave no room on a device of `capacity` bytes.

    Counted are what stays in memory: frozen weights, trained ones with gradient and moments, the largest layer gathered. Activations are not.
    """
    if capacity is None:
        capacity = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else _host_memory() // dist.local_world_size()
    frozen, trained, layers = 0, 0, {}
    state_bytes = 4 + 4 + 8 if precision.master == torch.float32 else 2 + 2 + 4
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained += parameter.numel() * state_bytes
        else:
            frozen += parameter.numel() * parameter.element_size()
        layer = re.match(r".*?\.\d+\.", name)
        layers[layer and layer[0]] = layers.get(layer and layer[0], 0) + parameter.numel() * precision.compute.itemsize
    needed = {
        f"frozen weights over {ranks} ranks": frozen / ranks,
        f"trained weights, gradients and moments over {dist.world_size()} ranks": trained / dist.world_size(),
        "the largest gathered layer": max(layers.values()),
    }
    if sum(needed.values()) > capacity:
        figures = " + ".join(f"{size / 2**30:.1f} GiB {what}" for what, size in needed.items())
        raise ValueError(
            f"frozen_shard_group: {ranks} does not fit: {figures} = {sum(needed.values()) / 2**30:.1f} GiB before activations, a device has "
            f"{capacity / 2**30:.1f} GiB. Shard frozen weights over more ranks (frozen_shard_group: world)."
        )


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _log_summary(sharded: ShardedModel, precision: Precision) -> None:
    layers = sum(1 for unit in sharded.units if unit.name)
    nested = sum(len(units) for units in sharded.plan.nested.values())
    counts = torch.zeros(2, dtype=torch.float64, device=dist.device())  # trained, frozen bytes
    for shard in sharded.local_shards():
        counts[0] += shard.tensor.numel() if shard.parameter.requires_grad else 0
        counts[1] += 0 if shard.parameter.requires_grad else shard.tensor.numel() * shard.tensor.element_size()
    trained, frozen = dist.all_sum(counts).tolist()
    log.info(
        "sharded %d layers, %d units nested in them and the root over %d ranks: %.3f B parameters train (%s masters, %s compute), "
        "frozen ones take %.2f GiB on all ranks together",
        layers, nested, dist.world_size(), trained / 1e9, precision.master, precision.compute, frozen / 2**30,
    )  # fmt: skip


def _replace(parent: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(parent.get_submodule(owner), leaf, module)
