"""Low-rank adapters (LoRA): beside a frozen linear layer W a small trained product, W x + alpha / rank * B (A dropout(x)).

Hu et al. 2021 (https://arxiv.org/abs/2106.09685), section 4.1. An adapter is a submodule `lora` of the linear layer that it adds to, so the
layer keeps its class, its weight its name, and FSDP can shard what trains apart from what does not. Servers, exports and the rollout's
twin get merged weights; the adapter folder is in the format of the package peft.

Shapes: rank r, W [M, N], A [r, N], B [M, r].
"""

import hashlib
import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from common import fp8, freeze
from common.config import ModelArguments
from common.freeze import Selection
from common.tensor_files import Spec, write_file
from common.weights import Converter

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PARAMETER = re.compile(r"(.*)\.lora\.([AB])")


@dataclass(frozen=True)
class Adapters:
    """What the adapters of a run are like."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]  # names of linear layers, like q_proj
    layers: tuple[int, ...] | None = None  # numbers of the decoder layers that have some; None: all
    quantization: str = "none"  # of the base

    @classmethod
    def of(cls, args: ModelArguments) -> "Adapters | None":
        if args.lora_rank == 0:
            return None
        return cls(args.lora_rank, args.lora_alpha, args.lora_dropout, tuple(args.lora_target_modules), None, args.quantization)

    @classmethod
    def from_dict(cls, content: dict | None) -> "Adapters | None":
        if content is None:
            return None
        layers = content["layers"]
        return cls(**content | {"targets": tuple(content["targets"]), "layers": None if layers is None else tuple(layers)})

    def to_dict(self) -> dict:
        return asdict(self) | {"targets": list(self.targets), "layers": None if self.layers is None else list(self.layers)}

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Lora(nn.Module):
    """What an adapter adds to the output of its linear layer."""

    def __init__(self, rows: int, columns: int, adapters: Adapters, dtype: torch.dtype):
        super().__init__()
        self.A = nn.Parameter(torch.empty(adapters.rank, columns, dtype=dtype, device="meta"))
        self.B = nn.Parameter(torch.empty(rows, adapters.rank, dtype=dtype, device="meta"))
        self.scale, self.dropout = adapters.scale, adapters.dropout

    def forward(self, x: Tensor) -> Tensor:
        """x [..., N] -> [..., M], in the dtype of x."""
        # A pass without gradients asks what the policy is: answers, old log-probabilities, checks. Only the pass that trains drops out.
        if self.dropout and self.training and torch.is_grad_enabled():
            x = F.dropout(x, self.dropout)
        return F.linear(F.linear(x, self.A.to(x.dtype)), self.B.to(x.dtype)) * self.scale


def _add_adapter(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + linear.lora(inputs[0])


def add(model: PreTrainedModel, adapters: Adapters, trainable_layers: str, dtype: torch.dtype) -> tuple[Adapters, Selection]:
    """Gives every target in the chosen layers of a model on meta its adapter: (adapters with the layers filled in, what trains).

    A and B have `dtype`, and no values before `initialise`. ValueError where a target names no linear layer.
    """
    paths = model.decoder_layer_paths
    layers = freeze.parse_layers(trainable_layers, len(paths))
    names, found, with_some, linears = [], set(), [], set()
    for number, path in enumerate(paths):
        for name, module in list(model.get_submodule(path).named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            leaf = name.rpartition(".")[2]
            linears.add(leaf)
            if leaf not in adapters.targets or number not in layers:
                continue
            module.lora = Lora(module.out_features, module.in_features, adapters, dtype)
            module.register_forward_hook(_add_adapter)
            names += [f"{path}.{name}.lora.A", f"{path}.{name}.lora.B"]
            found.add(leaf)
            with_some.append(number)
    if absent := [target for target in adapters.targets if target not in found]:
        raise ValueError(
            f"lora_target_modules: the layers of {type(model).__name__} that train have no linear layer {', '.join(absent)}. Linear layers: "
            f"{', '.join(sorted(linears))} (routed experts are no linear layers and get no adapters)."
        )
    number_of = tuple(sorted(set(with_some)))
    selection = Selection(frozenset(names), {}, number_of[0], embeddings=False)
    return replace(adapters, layers=None if len(number_of) == len(paths) else number_of), selection


def initialise(module: nn.Module, path: str, device: torch.device) -> None:
    """Gives the adapters inside `module`, whose name in the model is `path`, their first values on `device`.

    B is 0, so that the model starts as the base. A is uniform within 1 / sqrt(N), as in peft, drawn from a generator seeded with the
    adapter's name: the same on every rank and in every run.
    """
    for name, lora in module.named_modules():
        if not isinstance(lora, Lora):
            continue
        seed = int.from_bytes(hashlib.sha256(f"{path}.{name}".encode()).digest()[:8], "little") >> 1
        rank, columns = lora.A.shape
        bound = 1 / math.sqrt(columns)
        first = torch.rand(rank, columns, generator=torch.Generator().manual_seed(seed)) * (2 * bound) - bound
        lora.A = nn.Parameter(first.to(device, lora.A.dtype))
        lora.B = nn.Parameter(torch.zeros(lora.B.shape, dtype=lora.B.dtype, device=device))


# ----------------------------------------------------------------------------------------------------------------------------------
# Names, merging


def weight_name(name: str) -> str | None:
    """The weight that an adapter's parameter belongs to: `x.q_proj.lora.A` -> `x.q_proj.weight`. None for other parameters."""
    match = _PARAMETER.fullmatch(name)
    return f"{match[1]}.weight" if match else None


def merge(weight: Tensor, named: dict[str, Tensor], weight_of: str, scale: float) -> Tensor:
    """W + scale * B A, computed in fp32 and rounded once to the dtype of `weight` [M, N]. `named` holds A and B of the weight named `weight_of`."""
    stem = weight_of.removesuffix(".weight")
    A, B = (named[f"{stem}.lora.{letter}"].to(weight.device, torch.float32) for letter in "AB")
    return (weight.float() + scale * (B @ A)).to(weight.dtype)


def base_weights(converter: Converter, names: list[str]) -> dict[str, Tensor]:
    """Weights of the base checkpoint, on the CPU, in its dtype; FP8 ones in bf16."""
    weights = converter.read(names)
    for name, scale in converter.read_scales(names).items():
        name = name.removesuffix(fp8.SCALE_SUFFIX)
        weights[name] = fp8.dequantise(weights[name], scale, converter.block, torch.bfloat16)
    return weights


# ----------------------------------------------------------------------------------------------------------------------------------
# Files


def peft_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.lora.A` -> the key of peft's file."""
    match = _PARAMETER.fullmatch(name)
    return f"base_model.model.{match[1]}.lora_{match[2]}.weight"


def write_adapter(folder: Path, named: dict[str, Tensor], adapters: Adapters, base: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors (fp32), as `peft.PeftModel.from_pretrained(base model, folder)` reads them.

    named: all adapters' parameters under their names in the model. base: the base checkpoint's path, for the record. `folder` is made.
    """
    folder.mkdir()
    tensors = {peft_name(name): tensor.detach().to("cpu", torch.float32) for name, tensor in named.items()}
    specs = [Spec(name, torch.float32, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_file(folder / WEIGHTS_FILE, specs, tensors.get)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if float(adapters.alpha).is_integer() else adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": list(adapters.targets),
        "layers_to_transform": None if adapters.layers is None else list(adapters.layers),
        "layers_pattern": None if adapters.layers is None else "layers",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with open(folder / CONFIG_FILE, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
