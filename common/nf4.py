"""A frozen base in 4 bits: NormalFloat with double quantisation, linear layers and fused experts alike; bf16 only while a product needs it.

Dettmers et al. 2023 (https://arxiv.org/abs/2305.14314), section 3: blocks of 64 values share a scale, 256 scales (their mean taken off)
share a scale in 8 bits; 4.127 bits a value together. The kernels are those of bitsandbytes. transformers quantises with them too, but only
`nn.Linear`: its fused experts [E, M, N], 97 % of a large mixture of experts, stay in 16 bits. Here they are quantised as well.
"""

import importlib
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK, SCALE_BLOCK = 64, 256
BYTES_PER_ELEMENT = 0.5 + 1 / BLOCK + 4 / (BLOCK * SCALE_BLOCK)
# The kernels count elements in 32 bits, and fp32 copies of a part of this size are what quantising needs beside the tensor.
PART_ELEMENTS = 1 << 28


@cache
def kernels():
    """bitsandbytes' functions. ImportError that names the command where it is not installed."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise ImportError("quantization: nf4 needs bitsandbytes. Install it: bash env/setup.sh train --with bitsandbytes") from error


class Nf4Tensor(nn.Module):
    """A matrix, or experts [E, M, N], in 4 bits. Its parts are buffers, so that it moves between devices with the module that holds it."""

    def __init__(self, tensor: Tensor):
        """Quantises `tensor`, whose matrices must be whole blocks of 64 values. Sets `error`: norm of what is lost, as a share of its norm."""
        super().__init__()
        assert can_quantise(tensor), tensor.shape
        self.shape = tensor.shape
        rows = tensor.reshape(len(tensor) if tensor.dim() == 3 else 1, -1)  # [R, n], a matrix each
        functional = kernels()
        step = max(1, PART_ELEMENTS // rows.shape[1])
        packed, scales = [], []
        for part in rows.split(step):
            codes, state = functional.quantize_4bit(part.contiguous(), blocksize=BLOCK, quant_type="nf4")
            packed.append(codes.view(len(part), -1))
            scales.append(state.absmax)
        scales = torch.cat(scales)
        mean = scales.mean()
        codes, state = functional.quantize_blockwise(scales - mean, blocksize=SCALE_BLOCK)
        self.register_buffer("codes", torch.cat(packed))  # uint8 [R, n / 2]
        self.register_buffer("scales", codes)  # uint8 [R * n / 64]
        self.register_buffer("scale_scales", state.absmax)  # fp32
        self.register_buffer("scale_mean", mean)
        self.register_buffer("scale_code", state.code)  # fp32 [256], what the 8 bits stand for
        lost = whole = 0.0
        for part, numbers in zip(rows.split(step), torch.arange(len(rows), device=rows.device).split(step), strict=True):
            restored = self.dequantise(torch.float32, numbers).view(len(part), -1)
            lost += (restored - part).square().sum(dtype=torch.float64).item()
            whole += part.float().square().sum(dtype=torch.float64).item()
        self.error = (lost / whole) ** 0.5 if whole else 0.0

    def dequantise(self, dtype: torch.dtype, experts: Tensor | None = None) -> Tensor:
        """The tensor in `dtype`, or only the given experts [e, M, N].

        The kernels see matrices as rows of whole blocks: bitsandbytes' CPU kernel is wrong where a row ends within a block."""
        functional = kernels()
        scales = functional.dequantize_blockwise(self.scales, absmax=self.scale_scales, code=self.scale_code, blocksize=SCALE_BLOCK).add_(
            self.scale_mean
        )
        codes, scales = self.codes, scales.view(len(self.codes), -1)
        if experts is not None:
            codes, scales = codes[experts], scales[experts]
        result = torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)
        step = max(1, PART_ELEMENTS // result.shape[1])
        parts = zip(codes.split(step), scales.split(step), result.split(step), strict=True)
        for part_codes, part_scales, part in parts:
            state = functional.QuantState(
                part_scales.reshape(-1), shape=part.shape, code=_code(codes.device), blocksize=BLOCK, quant_type="nf4", dtype=dtype
            )
            if part.is_cuda:
                functional.dequantize_4bit(part_codes.reshape(-1, 1), state, out=part)
            else:  # the CPU's kernel knows no `out`
                part.copy_(functional.dequantize_4bit(part_codes.reshape(-1, 1), state))
        return result.view(-1, *self.shape[1:])


@cache
def _code(device: torch.device) -> Tensor:
    return kernels().get_4bit_type("nf4", device=device)


def can_quantise(tensor: Tensor) -> bool:
    """Whether a matrix, or each expert's, is whole blocks."""
    return tensor.dim() in (2, 3) and (tensor[0].numel() if tensor.dim() == 3 else tensor.numel()) % BLOCK == 0


class _Product(torch.autograd.Function):
    """x @ weight.T. Nothing dequantised is kept for backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return F.linear(x, weight.dequantise(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient @ ctx.weight.dequantise(gradient.dtype), None


class Nf4Linear(nn.Linear):
    """A linear layer whose frozen weight is `nf4_weight`; it computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        output = _Product.apply(x, self.nf4_weight)
        return output if self.bias is None else output + self.bias


class Nf4Experts:
    """Goes before a transformers class of fused experts. During the forward the attributes of the weights' names are dequantised tensors.

    Without gradients only those experts are dequantised that a token is routed to: few, when one token of each answer is computed. With
    gradients it must run under activation checkpointing, so that the dequantised weights live for one layer's backward.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        used, total = None, self.num_experts
        if not torch.is_grad_enabled():
            used = torch.unique(top_k_index)
            place = torch.zeros(total, dtype=top_k_index.dtype, device=used.device)
            place[used] = torch.arange(len(used), dtype=place.dtype, device=used.device)
            top_k_index = place[top_k_index]
        # Attributes of the instance are found before the class's own.
        self.__dict__ |= {name: getattr(self, f"nf4_{name}").dequantise(hidden_states.dtype, used) for name in self.nf4_names}
        self.num_experts = total if used is None else len(used)
        try:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        finally:
            self.num_experts = total
            for name in self.nf4_names:
                del self.__dict__[name]


@cache
def _experts_class(experts_class: type) -> type:
    return type(f"Nf4{experts_class.__name__}", (Nf4Experts, experts_class), {})


def quantisable(module: nn.Module) -> list[str]:
    """Names of the parameters of this module itself that `quantise` puts into 4 bits: a linear layer's weight, or fused experts."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if type(module) is nn.Linear:
        names = ["weight"]
    elif set(parameters) == {"gate_up_proj", "down_proj"} and all(p.dim() == 3 for p in parameters.values()):
        names = list(parameters)
    else:
        return []
    return names if all(can_quantise(parameters[name]) for name in names) else []


def quantise(layer: nn.Module) -> Iterator[tuple[str, float]]:
    """Quantises a loaded decoder layer in place, one tensor after the other; yields (name in the layer, relative error of the round trip).

    Adapters inside it stay what they are. Routers, norms and what is no whole number of blocks stay in 16 bits."""
    for path, module in list(layer.named_modules()):
        names = quantisable(module)
        if not names:
            continue
        if isinstance(module, nn.Linear):
            module.__class__ = Nf4Linear
        else:
            module.__class__, module.nf4_names = _experts_class(type(module)), tuple(names)
        for name in names:
            stored = Nf4Tensor(module._parameters[name].detach())
            setattr(module, f"nf4_{name}", stored)
            if isinstance(module, nn.Linear):
                module._parameters[name] = None  # the class expects the name
            else:
                del module._parameters[name]
            yield f"{path}.{name}", stored.error


def size(layer: nn.Module) -> tuple[float, int]:
    """Of a decoder layer on meta: (bytes once quantised, adapters not counted; elements of the largest module that is dequantised at a time)."""
    total, largest = 0.0, 0
    for path, module in layer.named_modules():
        if path.endswith(".lora"):
            continue
        names = quantisable(module)
        largest = max(largest, sum(module._parameters[name].numel() for name in names))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                total += parameter.numel() * (BYTES_PER_ELEMENT if name in names else parameter.element_size())
    return total, largest
