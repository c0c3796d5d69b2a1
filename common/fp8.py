"""FP8 block weights that stay FP8: on the disk, in the shards and on the network; bf16 only between the all-gather and the product.

The form is that of DeepSeek-V3, GLM-5 and Qwen's FP8 checkpoints: `X.weight` in float8_e4m3fn [M, N] and `X.weight_scale_inv` in fp32, one
number for each block of 128 x 128, so weight = fp8 * scale. Edge blocks may be smaller: the grid is ceil(M / 128) x ceil(N / 128).

A frozen FP8 weight keeps the module and the name it has in transformers; its module's class becomes one that dequantises in its forward, and
its scales become a buffer `<name>_scale_inv` beside it (fp32, whole on every rank: 1/4096 of the weights' bytes). Fused experts [E, 2I, H]
have one grid for the gate rows and one for the up rows of each expert, [E, 2, ceil(I / 128), ceil(H / 128)], since I need not be a multiple
of 128. Trained weights are dequantised at load, and quantised again, if wanted, at export.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPE = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"
Block = tuple[int, int]


def block_size(raw: dict[str, Any], path: str | Path) -> Block | None:
    """Rows and columns of a block, from the content of config.json; None for a checkpoint that is not quantised.

    ValueError for every other method than FP8 blocks with dynamic activation scales.
    """
    section = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if section is None:
        return None
    method, block = section.get("quant_method"), section.get("weight_block_size")
    if method != "fp8" or block is None or section.get("fmt", "e4m3") != "e4m3" or section.get("activation_scheme", "dynamic") != "dynamic":
        shown = {key: section.get(key) for key in ("quant_method", "fmt", "weight_block_size", "activation_scheme")}
        raise ValueError(
            f"{path}: config.json has quantization_config {shown}. Only fp8 with e4m3 weights, a weight_block_size and dynamic activations "
            "(the form of DeepSeek-V3 and GLM-5) can be loaded. Use that checkpoint, or the bf16 one."
        )
    return tuple(block)


def without_quantization(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json's content for a model that transformers builds in bf16: its own FP8 layers cannot be trained or sharded."""
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    if raw.get("text_config"):
        raw["text_config"] = without_quantization(raw["text_config"])
    return raw


def grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., M, N]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


@torch.no_grad()
def quantise(weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """weight [..., M, N] -> (float8_e4m3fn [..., M, N], scales fp32 [..., ceil(M / rows), ceil(N / columns)]).

    A block's largest magnitude becomes 448, the largest of the format. A block of zeros has scale 1.
    """
    (M, N), (m, n) = weight.shape[-2:], grid(weight.shape, block)[-2:]
    blocks = F.pad(weight.float(), (0, n * block[1] - N, 0, m * block[0] - M))
    blocks = blocks.unflatten(-1, (n, block[1])).unflatten(-3, (m, block[0]))  # [..., m, rows, n, columns]
    largest = blocks.abs().amax((-3, -1))
    scale = torch.where(largest == 0, 1.0, largest / torch.finfo(DTYPE).max)
    limit = torch.finfo(DTYPE).max  # rounding of the division may pass it, which would become NaN
    blocks = (blocks / scale[..., :, None, :, None]).clamp_(-limit, limit).to(DTYPE)
    return blocks.flatten(-2).flatten(-3, -2)[..., :M, :N].contiguous(), scale


@torch.no_grad()
def dequantise(weight: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """float8 [..., M, N] with its scales -> [..., M, N] in `dtype`: the fp32 product, rounded once.

    Scales with one dimension more, [..., parts, m, n], belong to `parts` equal groups of rows, each with a grid of its own.
    """
    if scale.dim() == weight.dim() + 1:
        return dequantise(weight.unflatten(-2, (scale.shape[-3], -1)), scale, block, dtype).flatten(-3, -2)
    rows, columns = block
    M, N = weight.shape[-2:]
    result = weight.to(dtype)  # exact: every e4m3 number is a bf16 number
    by_row = scale.to(torch.float32).repeat_interleave(rows, dim=-2)[..., :M, :]
    whole = N // columns
    if whole:
        # A bf16 tensor times an fp32 one is computed in fp32. In place: no fp32 copy of the weight on a GPU.
        result[..., : whole * columns].unflatten(-1, (whole, columns)).mul_(by_row[..., :whole, None])
    if N % columns:
        result[..., whole * columns :].mul_(by_row[..., whole:])
    return result


def relative_error(weight: Tensor, quantised: Tensor, scale: Tensor, block: Block) -> float:
    """Frobenius norm of what quantising loses, as a share of the weight's own."""
    difference = dequantise(quantised, scale, block, torch.float32) - weight.float()
    return (difference.norm() / weight.float().norm().clamp(min=torch.finfo(torch.float32).tiny)).item()


# ----------------------------------------------------------------------------------------------------------------------------------
# Modules with frozen FP8 weights


class _Fp8Product(torch.autograd.Function):
    """x @ weight.T. What is kept for backward is the FP8 weight; it is dequantised again there."""

    @staticmethod
    def forward(ctx, x, weight, scale, block):
        ctx.save_for_backward(weight, scale)
        ctx.block = block
        return F.linear(x, dequantise(weight, scale, block, x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        weight, scale = ctx.saved_tensors
        return gradient @ dequantise(weight, scale, ctx.block, gradient.dtype), None, None, None


class Fp8Linear(nn.Linear):
    """A Linear with frozen `weight` float8 [M, N] and buffer `weight_scale_inv`; it computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        output = _Fp8Product.apply(x, self.weight, self.weight_scale_inv, self.fp8_block)
        return output if self.bias is None else output + self.bias


class Fp8Experts:
    """Goes before a transformers class of fused experts, whose parameters are then float8 [E, M, N] with scales beside them.

    During the forward the attributes of that name are dequantised tensors, so that all of transformers' implementations work.
    """

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        stored = {name: getattr(self, name) for name in self.fp8_names}
        scales = {name: getattr(self, name + SCALE_SUFFIX) for name in self.fp8_names}
        weights = {name: dequantise(stored[name], scales[name], self.fp8_block, hidden_states.dtype) for name in self.fp8_names}
        # Attributes of the instance are found before parameters. FSDP keeps its gathered view there too.
        hidden_attributes = {name: self.__dict__[name] for name in self.fp8_names if name in self.__dict__}
        self.__dict__.update(weights)
        try:
            if not self.keeps_fp8_for_backward or not torch.is_grad_enabled():
                return super().forward(hidden_states, *args, **kwargs)
            sources = {weights[name].untyped_storage().data_ptr(): (stored[name], scales[name]) for name in self.fp8_names}
            with torch.autograd.graph.saved_tensors_hooks(self._packer(sources), self._unpack):
                return super().forward(hidden_states, *args, **kwargs)
        finally:
            for name in self.fp8_names:
                del self.__dict__[name]
            self.__dict__.update(hidden_attributes)

    def _packer(self, sources: dict[int, tuple[Tensor, Tensor]]):
        def pack(tensor: Tensor):
            source = sources.get(tensor.untyped_storage().data_ptr())
            if source is None:
                return tensor
            return source, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

        return pack

    def _unpack(self, packed):
        if isinstance(packed, Tensor):
            return packed
        (stored, scale), dtype, shape, stride, offset = packed
        return dequantise(stored, scale, self.fp8_block, dtype).as_strided(shape, stride, offset)


@cache
def _fp8_class(experts_class: type) -> type:
    return type(f"Fp8{experts_class.__name__}", (Fp8Experts, experts_class), {})


def keep_fp8(module: nn.Module, names: list[str], scales: dict[str, Tensor], block: Block) -> None:
    """Turns a Linear, or fused experts, on meta into its FP8 form. `names`: its FP8 parameters; `scales`: meta tensors, the buffers' shapes."""
    if isinstance(module, nn.Linear):
        assert names == ["weight"] and type(module) is nn.Linear, module
        module.__class__ = Fp8Linear
    else:
        module.__class__ = _fp8_class(type(module))
        module.fp8_names = tuple(names)
        # Under activation checkpointing the dequantised weights live for one layer's backward, and these hooks would hide activations
        # from the checkpoint's own.
        module.keeps_fp8_for_backward = True
    module.fp8_block = block
    for name in names:
        module._parameters[name] = nn.Parameter(torch.empty_like(module._parameters[name], dtype=DTYPE), requires_grad=False)
        module.register_buffer(name + SCALE_SUFFIX, scales[name])


def can_keep_fp8(module: nn.Module, names: list[str]) -> bool:
    """Whether the module's forward is known to use these parameters in a way that the FP8 form can stand for."""
    if type(module) is nn.Linear:
        return names == ["weight"]
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    return all(module._parameters[name].dim() == 3 for name in own) and set(names) == set(own) == {"gate_up_proj", "down_proj"}
