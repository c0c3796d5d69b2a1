"""What is one FSDP unit, in which dtype; loading and wrapping unit by unit; clipping; gathering one unit.

The decoder layer is the unit. Modules that must stay fp32 (GLM's router) are units of their own inside it, because one flat parameter has
one dtype. The root holds embeddings, final norm and head. A unit is sharded as soon as it is loaded, so no device and no host ever holds
more than one whole unit. Nothing outside this file knows FSDP types.

Never `no_sync()`: it would keep the whole model's gradient on every rank. Every micro-batch reduce-scatters into the shard's gradient.
FSDP averages over ranks: a loss that is a share of a global sum must be multiplied by the world size.
"""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from common import dist
from common.logprobs import LogpModel
from common.weights import Converter, Loader, Unit

log = logging.getLogger(__name__)

_WRAPPER_PARTS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(\.|$)")


@dataclass(frozen=True)
class Precision:
    """Dtypes of a trained unit: parameters that the optimizer updates, forward and backward, sums of gradients over ranks."""

    master: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one parameter: `tensor` holds elements offset .. offset + tensor.numel() of the flattened parameter."""

    name: str  # as in the Hugging Face model
    shape: torch.Size  # of the whole parameter
    parameter: nn.Parameter  # the object that the optimizer knows
    tensor: torch.Tensor  # [n], a view of the local flat shard
    offset: int


def model_name(wrapped: str) -> str:
    """A parameter's or module's name in the Hugging Face model, given its name under FSDP's and checkpointing's wrappers."""
    return _WRAPPER_PARTS.sub("", wrapped).removeprefix("model.").rstrip(".")


def _wrap(module: nn.Module, precision: Precision | None) -> FullyShardedDataParallel:
    """One unit. `precision=None`: no casting, for modules that compute in their parameters' own dtype."""
    mixed = None
    if precision is not None:
        mixed = MixedPrecision(param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_root_forward_inputs=False)
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy.FULL_SHARD if dist.world_size() > 1 else ShardingStrategy.NO_SHARD,
        mixed_precision=mixed,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,  # without it the CPU runs ahead and gathers several layers at once
        use_orig_params=True,
        device_id=dist.device(),
    )


def parameter_dtype(skeleton: nn.Module, precision: Precision) -> Callable[[str], torch.dtype]:
    """The dtype in memory of each parameter by name: the master dtype, except modules that the model itself keeps in fp32."""
    declared = {name: parameter.dtype for name, parameter in skeleton.named_parameters()}
    main_dtype = skeleton.config.dtype

    def dtype_of(name: str) -> torch.dtype:
        if name not in declared:  # a buffer: its own dtype
            return skeleton.get_buffer(name).dtype
        return torch.float32 if declared[name] == torch.float32 != main_dtype else precision.master

    return dtype_of


def _kept_float32(layer: nn.Module, main_dtype: torch.dtype) -> list[str]:
    """Submodules whose own parameters the model keeps in fp32 although it is in another dtype (GLM's router)."""
    if main_dtype == torch.float32:
        return []
    return [
        name
        for name, module in layer.named_modules()
        if name and any(p.dtype == torch.float32 for p in module.parameters(recurse=False))
    ]


class ShardedModel:
    """A causal language model whose parameters live sharded over all ranks.

    Call it like `LogpModel`: `outputs = model(inputs, targets)`. Every call is a collective: all ranks call equally often.
    """

    def __init__(self, root: FullyShardedDataParallel, units: list[Unit], config):
        self.root = root
        self.units = units
        self.config = config
        owner = {name: index for index, unit in enumerate(units) for name in unit.model_names}
        # {unit index: [(prefix of the names, FSDP module)]}: a layer with nested units has several.
        self._parts: dict[int, list[tuple[str, FullyShardedDataParallel]]] = {index: [] for index in range(len(units))}
        for path, module in root.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                first = model_name(f"{path}.{module._handle.flat_param._fqns[0]}" if path else module._handle.flat_param._fqns[0])
                self._parts[owner[first]].append((path, module))

    def __call__(self, *args, **kwargs):
        return self.root(*args, **kwargs)

    def train(self, mode: bool = True) -> None:
        self.root.train(mode)

    def _names(self, path: str, module: FullyShardedDataParallel) -> list[str]:
        return [model_name(f"{path}.{fqn}" if path else fqn) for fqn in module._handle.flat_param._fqns]

    def local_shards(self) -> Iterator[LocalShard]:
        """This rank's part of every parameter that has elements here, unit by unit. No communication, no copy."""
        for parts in self._parts.values():
            for path, module in parts:
                flat = module._handle.flat_param
                shard = getattr(flat, "_local_shard", flat)  # set at the first forward; before it `flat` itself is the shard
                rows = zip(self._names(path, module), flat._shapes, flat._params, flat._shard_param_infos, strict=True)
                for name, shape, parameter, info in rows:
                    if info.in_shard:
                        tensor = shard.detach()[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                        yield LocalShard(name, torch.Size(shape), parameter, tensor, info.intra_param_start_idx)

    def trained_shards(self) -> list[LocalShard]:
        return [shard for shard in self.local_shards() if shard.parameter.requires_grad]

    def trained_names(self) -> set[str]:
        """Names of all parameters that train, the same on every rank."""
        names = set()
        for parts in self._parts.values():
            for path, module in parts:
                flat = module._handle.flat_param
                names |= {n for n, p in zip(self._names(path, module), flat._params, strict=True) if p.requires_grad}
        return names

    @torch.no_grad()
    def gather_unit(self, index: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Whole parameters of one unit by name, on this rank's device: a collective. Persistent buffers are included.

        `dtype`: cast the shard before the gather, so that network and memory carry e.g. bf16 instead of fp32 masters. Parts that the model
        keeps in another dtype than the masters (an fp32 router) are not cast.
        """
        named = {}
        for path, module in self._parts[index]:
            handle = module._handle
            flat = handle.flat_param
            shard = getattr(flat, "_local_shard", flat).detach()
            if dtype is not None and handle._fwd_bwd_param_dtype != torch.float32:
                shard = shard.to(dtype)
            whole = torch.empty(shard.numel() * handle.world_size, dtype=shard.dtype, device=shard.device)
            dist.all_gather_flat(whole, shard.contiguous(), handle.process_group)
            views = handle._get_unflat_views(whole[: flat._unpadded_unsharded_size.numel()])
            named |= dict(zip(self._names(path, module), views, strict=True))
        named |= {name: buffer for name, buffer in self._buffers() if name in set(self.units[index].model_names)}
        return named

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
    never_trained: tuple[str, ...] = (),
) -> ShardedModel:
    """Fills the meta `model` from its checkpoint and shards it, unit by unit. A collective.

    `wrap_root` puts the loaded model into the module whose forward the loop calls.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in never_trained))
    main_dtype = model.config.dtype
    kept = {unit.name: _kept_float32(model.get_submodule(unit.module_path), main_dtype) for unit in converter.units if unit.name}
    loader = Loader(converter, dtype_of=parameter_dtype(model, precision))
    bar = dist.progress(len(converter.units), "loading", "unit")
    for unit in converter.units:
        loader.load_unit(unit)
        bar.update()
        if not unit.name:
            continue
        layer = model.get_submodule(unit.module_path)
        for path in kept[unit.name]:
            _replace(layer, path, _wrap(layer.get_submodule(path), None))
        if compile_layers:
            layer.compile()  # inside checkpointing: a graph break inside a compiled checkpoint leaves the whole layer uncompiled
        if gradient_checkpointing:
            layer = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False)
        _replace(model, unit.module_path, _wrap(layer, precision))
    loader.finish()
    bar.close()
    root = _wrap(wrap_root(model), precision)
    sharded = ShardedModel(root, converter.units, model.config)
    layers = sum(1 for unit in converter.units if unit.name)
    elements = torch.tensor([sum(s.tensor.numel() for s in sharded.local_shards())], dtype=torch.int64, device=dist.device())
    log.info(
        "sharded %d layers and the root over %d ranks: %.3f B parameters, %s masters, %s compute",
        layers, dist.world_size(), dist.all_sum(elements).item() / 1e9, precision.master, precision.compute,
    )  # fmt: skip
    return sharded


def _replace(parent: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(parent.get_submodule(owner), leaf, module)
