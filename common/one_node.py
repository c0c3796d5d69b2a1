"""A model on one node without FSDP: a frozen base in 4 bits, its layers spread over the GPUs of one process, adapters that train.

Layer i lies on one device and its input is moved there; embeddings, final norm and head are on the first. One device works at a time, so
this is the way to train what would not fit otherwise, not a fast one. A layer exists in 16 bits only while it is loaded: it is read,
quantised on the first device, and moved to its own. `OneNodeModel` is used like common.fsdp.ShardedModel.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from common import attention, dist, freeze, lora, nf4, run
from common.checkpoint import Base, fingerprint
from common.config import ModelArguments
from common.families import family_of
from common.fsdp import LocalShard
from common.logprobs import CHUNK_ELEMENTS_CUDA, LogpModel
from common.lora import Adapters
from common.metrics import ModelFlops, free_memory
from common.skeleton import build_skeleton
from common.tensor_files import Checkpoint, sha256_of_tensor
from common.weights import Converter, Loader

log = logging.getLogger(__name__)

GIB = 2**30
# Of a device's free memory: what the allocator loses between blocks, and the kernels' own workspaces.
USABLE, RESERVED = 0.95, 1.0 * GIB


# ----------------------------------------------------------------------------------------------------------------------------------
# Will it fit, and what goes where


@dataclass(frozen=True)
class Work:
    """What is computed at a time; memory depends on it."""

    row_tokens: int  # of a packed row that trains
    answers: int  # generated at a time
    prompt_tokens: int  # of the longest prompt
    completion_tokens: int  # of the longest answer


@dataclass(frozen=True)
class LayerCost:
    """Bytes on the device of one decoder layer."""

    weights: float  # in 4 bits, with adapters, their gradients and moments
    cache: float  # keys and values of the answers that are generated at a time
    kept: float  # its input, kept for backward

    @property
    def total(self) -> float:
        return self.weights + max(self.cache, self.kept)


@dataclass(frozen=True)
class MemoryPlan:
    """Where each layer goes, and what every device then needs at most."""

    device_of: list[int]  # layer -> number of its device
    needed: list[float]  # bytes, by device
    parts: list[dict[str, float]]  # what they are for, by device
    capacities: list[float]

    def lines(self) -> list[str]:
        lines = []
        for number, (needed, parts, capacity) in enumerate(zip(self.needed, self.parts, self.capacities, strict=True)):
            layers = [layer for layer, device in enumerate(self.device_of) if device == number]
            what = f"layers {layers[0]}-{layers[-1]}" if layers else "no layers"
            figures = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
            lines.append(f"device {number}: {what}; {figures}; together {needed / GIB:.1f} of {capacity / GIB:.1f} GiB free")
        return lines

    def check(self) -> None:
        """ValueError, with figures, where a device has not enough."""
        if any(needed > USABLE * capacity - RESERVED for needed, capacity in zip(self.needed, self.capacities, strict=True)):
            raise ValueError(
                "quantization: nf4 does not fit (a device's last GiB and 5 % are left free):\n  "
                + "\n  ".join(self.lines())
                + "\nLower rollout_batch_size, max_length, max_completion_length or per_device_train_batch_size, or use more GPUs."
            )


def layer_costs(model: PreTrainedModel, work: Work) -> list[LayerCost]:
    """The cost of each decoder layer of a model on meta that has its adapters."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    length, itemsize = work.prompt_tokens + work.completion_tokens, model.dtype.itemsize
    costs = []
    for path, kind in zip(model.decoder_layer_paths, kinds, strict=True):
        layer = model.get_submodule(path)
        adapters = sum(parameter.numel() * (parameter.element_size() + 12) for parameter in layer.parameters() if parameter.requires_grad)
        if kind == "linear_attention":  # a state instead of a cache, in fp32
            cache = 4 * work.answers * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        else:
            cache = 2 * work.answers * length * config.num_key_value_heads * head_dim * itemsize
        costs.append(LayerCost(nf4.size(layer)[0] + adapters, cache, work.row_tokens * config.hidden_size * itemsize))
    return costs


def workspaces(model: PreTrainedModel, work: Work) -> dict[str, float]:
    """Bytes beside weights and caches that one layer needs while it computes, by phase. Estimates, on the high side."""
    config, itemsize = model.config, model.dtype.itemsize
    hidden, top_k = config.hidden_size, getattr(config, "num_experts_per_tok", None) or 0
    inner = top_k * getattr(config, "moe_intermediate_size", 0) if top_k else config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = config.num_attention_heads * head_dim
    layers = [model.get_submodule(path) for path in model.decoder_layer_paths]
    dequantised = max(nf4.size(layer)[1] for layer in layers) * itemsize
    largest_layer = max(sum(p.numel() for p in layer.parameters()) for layer in layers) * itemsize
    # A token's rows in the experts: input, gate and up, their product, output, weighted output; and as many gradients in backward.
    token_forward = itemsize * (4 * max(top_k, 1) * hidden + 4 * inner + 6 * heads + 8 * hidden)
    prompts = work.answers * work.prompt_tokens
    mask = prompts * (work.prompt_tokens + 1)  # a byte a pair, for sdpa
    # Whenever a token is added a layer's cache is copied, and its keys and values are repeated for all heads.
    growing = max(cost.cache for cost in layer_costs(model, work))
    growing += 2 * work.answers * (work.prompt_tokens + work.completion_tokens) * heads * itemsize
    return {
        "loading": largest_layer + 12 * nf4.PART_ELEMENTS if largest_layer > nf4.PART_ELEMENTS else 8 * largest_layer,
        "answers": dequantised + max(prompts * token_forward + mask, growing),
        "training": dequantised + 2.5 * work.row_tokens * token_forward,
    }


def plan_memory(model: PreTrainedModel, work: Work, capacities: list[float]) -> MemoryPlan:
    """Spreads the layers of a model on meta, in order, so that the fullest device is as empty as possible. Nothing is allocated."""
    costs, spaces = layer_costs(model, work), workspaces(model, work)
    inside = tuple(path + "." for path in model.decoder_layer_paths)
    root = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if not name.startswith(inside))
    vocabulary = model.config.vocab_size
    # Chunks of logits in backward; the distributions of one token of each answer.
    logits = {"training": 4 * 4 * CHUNK_ELEMENTS_CUDA, "answers": 4 * 4 * work.answers * vocabulary}

    def parts(number: int, layers: list[LayerCost]) -> dict[str, float]:
        first = number == 0
        weights = sum(cost.weights for cost in layers) + (root if first else 0)
        return {
            "weights": weights,
            "generating": sum(cost.cache for cost in layers) + spaces["answers"] + (logits["answers"] if first else 0),
            "training": sum(cost.kept for cost in layers) + spaces["training"] + (logits["training"] if first else 0),
        } | ({"loading": spaces["loading"]} if first else {})

    def needed(figures: dict[str, float]) -> float:
        return figures["weights"] + max(size for name, size in figures.items() if name != "weights")

    def fill(share: float) -> list[int] | None:
        """Layers in order, each device up to `share` of what it has; None where some are left."""
        device_of, number, held = [], 0, []
        for cost in costs:
            while needed(parts(number, [*held, cost])) > share * capacities[number]:
                number, held = number + 1, []
                if number == len(capacities):
                    return None
            held.append(cost)
            device_of.append(number)
        return device_of

    low, high = 0.0, 1.0
    while fill(high) is None:
        high *= 2
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fill(middle) is None else (low, middle)
    device_of = fill(high)
    figures = [parts(n, [c for c, device in zip(costs, device_of, strict=True) if device == n]) for n in range(len(capacities))]
    return MemoryPlan(device_of, [needed(figure) for figure in figures], figures, capacities)


# ----------------------------------------------------------------------------------------------------------------------------------
# Loading


def build_model(args: ModelArguments, work: Work) -> run.Model:
    """Plans, then loads the base in 4 bits with fresh adapters. ValueError, with figures and before anything is read, where it cannot fit."""
    if dist.world_size() > 1:
        raise ValueError("quantization: nf4 runs in one process that uses all visible GPUs: start python -m grpo.train without torchrun.")
    nf4.kernels()  # an error now, not after the first layer has been read
    devices = dist.use_all_devices()
    path, compute = args.model_name_or_path, getattr(torch, args.compute_dtype)
    attention.register()
    model = build_skeleton(
        path,
        attn_implementation=args.attn_implementation,
        num_layers=args.debug_num_layers,
        decoder_layer=args.decoder_layer,
        dtype=compute,
    )
    attention.prepare(model)
    if any(isinstance(module, attention.PackedGlmAttention) for module in model.modules()):
        raise ValueError("quantization: nf4: answers cannot be generated in process with GLM's sparse attention.")
    family, source = family_of(model.config), Checkpoint(path)
    converter = Converter(model, source)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters, selection = lora.add(model, Adapters.of(args), args.trainable_layers, getattr(torch, args.master_dtype))
    log.info("%s", freeze.describe(selection, model))
    flops = ModelFlops(model, family, selection)
    memory = plan_memory(model, work, [free_memory(device) for device in devices])
    memory.check()
    log.info(
        "memory, estimated for rows of %d tokens and %d answers of %d + %d tokens at a time:\n  %s",
        work.row_tokens, work.answers, work.prompt_tokens, work.completion_tokens, "\n  ".join(memory.lines()),
    )  # fmt: skip
    errors = _load(model, converter, [devices[number] for number in memory.device_of], selection.lowest_layer, adapters.dropout > 0)
    worst = max(errors, key=errors.get)
    log.info(
        "%d tensors in 4 bits (NF4, double quantisation): relative error %.2f %% on average, at most %.2f %% (%s)",
        len(errors), 100 * sum(errors.values()) / len(errors), 100 * errors[worst], worst,
    )  # fmt: skip
    split = OneNodeModel(LogpModel(model), converter, adapters)
    split.remember_frozen()
    return run.Model(split, converter, source, Base(str(Path(path).resolve()), fingerprint(path), args.debug_num_layers), flops, 0)


def _load(model: PreTrainedModel, converter: Converter, device_of: list[torch.device], lowest: int, random: bool) -> dict[str, float]:
    """Fills the meta model, layer by layer; returns the relative error of each tensor that is in 4 bits now."""
    first, errors = dist.device(), {}
    loader = Loader(converter)
    bar = dist.progress(len(converter.units), "loading", "unit")
    for number, unit in enumerate(converter.units):
        loader.load_unit(unit)
        bar.update()
        if not unit.name:
            continue
        layer = model.get_submodule(unit.module_path)
        errors |= {f"{unit.name}.{name}": error for name, error in nf4.quantise(layer)}
        lora.initialise(layer, unit.name, first)
        layer.to(device_of[number])
        if number < lowest:
            freeze.run_without_graph(layer)
        else:
            _recompute_in_backward(layer, random)
        layer.register_forward_pre_hook(_move_inputs(device_of[number]), with_kwargs=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what was in 16 bits on the first device
    loader.finish()
    bar.close()
    model.base_model.norm.register_forward_pre_hook(_move_inputs(first), with_kwargs=True)
    if not errors:
        raise ValueError(f"quantization: nf4: {type(model).__name__} has neither linear layers nor fused experts that can be quantised")
    return errors


def _recompute_in_backward(layer: nn.Module, random: bool) -> None:
    """Activation checkpointing, without a wrapper that `generate` would have to see through. random: the layer drops out."""
    forward = layer.forward

    def run_or_checkpoint(*args, **kwargs):
        if torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=random, **kwargs)
        return forward(*args, **kwargs)

    layer.forward = run_or_checkpoint


def _move_inputs(device: torch.device):
    def moved(value):
        if isinstance(value, Tensor):
            return value.to(device)
        return type(value)(map(moved, value)) if type(value) in (tuple, list) else value

    def hook(_module, args, kwargs):
        return moved(args), {name: moved(value) for name, value in kwargs.items()}

    return hook


# ----------------------------------------------------------------------------------------------------------------------------------
# The model


class OneNodeModel:
    """The language model with its layers on several devices; of common.fsdp.ShardedModel all that one process needs."""

    def __init__(self, root: LogpModel, converter: Converter, adapters: Adapters):
        self.root, self.converter, self.adapters = root, converter, adapters
        self.units, self.config = converter.units, root.model.config
        self._trained = {name.removeprefix("model."): parameter for name, parameter in root.named_parameters() if parameter.requires_grad}
        self._frozen_hashes: dict[str, str] = {}

    def __call__(self, *args, **kwargs):
        dist.beat()  # a step may take many minutes: one device works at a time
        return self.root(*args, **kwargs)

    def train(self, mode: bool = True) -> None:
        self.root.train(mode)

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The model ready for `generate`: attention that knows padding and a cache, nothing dropped out."""
        model, training = self.root.model, self.root.training
        implementation = model.config._attn_implementation
        self.root.eval()
        model.config._attn_implementation = "sdpa"
        try:
            with torch.no_grad():
                yield model
        finally:
            model.config._attn_implementation = implementation
            self.root.train(training)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the answers' caches come in all lengths

    def trained_shards(self) -> list[LocalShard]:
        """Every adapter, whole."""
        return [LocalShard(name, p.shape, p, p.detach().view(-1), 0) for name, p in self._trained.items()]

    def trained_parameters(self) -> dict[str, None]:
        """Names of what the optimizer updates; None: all of each."""
        return dict.fromkeys(self._trained)

    def trained_experts(self) -> dict[str, None]:
        """Names of the model's tensors that adapters change."""
        return dict.fromkeys(lora.weight_name(name) for name in self._trained)

    @torch.no_grad()
    def gather_adapters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    @torch.no_grad()
    def gather_trained(self, index: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Of one unit, the base checkpoint's own weights (not those in 4 bits) with their adapters merged, in `dtype` or the checkpoint's."""
        inside = set(self.units[index].model_names)
        names = [name for name in self.trained_experts() if name in inside]
        weights = lora.base_weights(self.converter, names)
        merged = {name: lora.merge(weights[name], self._trained, name, self.adapters.scale) for name in names}
        return merged if dtype is None else {name: weight.to(dtype) for name, weight in merged.items()}

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scales gradients down to global norm `max_norm` (0: leaves them); returns the norm before, on the first device."""
        gradients = [p.grad for p in self._trained.values() if p.grad is not None]
        squares = [gradient.float().square().sum().to(dist.device()) for gradient in gradients]
        norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros((), device=dist.device())
        if max_norm > 0:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))
        return norm

    def _hashes(self) -> dict[str, str]:
        """sha256 of all that does not train. Devices are read side by side."""
        tensors = {name: tensor for name, tensor in self.root.state_dict().items() if name.removeprefix("model.") not in self._trained}
        with ThreadPoolExecutor(max(8, len(dist.devices()))) as threads:
            return dict(zip(tensors, threads.map(sha256_of_tensor, tensors.values()), strict=True))

    def remember_frozen(self) -> None:
        """Takes the fingerprints that `check_frozen` compares with."""
        self._frozen_hashes = self._hashes()

    def check_frozen(self) -> tuple[int, int]:
        """Compares the base with `remember_frozen`. Returns (tensors, bytes); RuntimeError names what changed."""
        now = self._hashes()
        changed = [name for name in self._frozen_hashes.keys() | now.keys() if self._frozen_hashes.get(name) != now.get(name)]
        if changed:
            raise RuntimeError(
                f"{len(changed)} tensors of the base are not what was loaded: {', '.join(sorted(changed)[:20])}. Do not use this run's checkpoints."
            )
        tensors = self.root.state_dict()
        return len(now), sum(tensors[name].numel() * tensors[name].element_size() for name in now)
