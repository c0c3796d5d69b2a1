"""What is sent to a vLLM server and under which names: those that it accepts most cheaply, closed over the modules that it fuses."""

from dataclasses import dataclass

import torch

from common import fp8, wire
from common.weights import Converter


@dataclass(frozen=True)
class WireTensor:
    """One tensor as it is sent: `model tensor[index]` under `name`, in `dtype`."""

    name: str
    model_name: str
    unit: int
    index: tuple
    shape: tuple[int, ...]
    dtype: torch.dtype
    narrowed: bool  # the checkpoint holds more than `dtype` keeps
    converted: bool = False  # comes out of Converter.to_checkpoint

    @property
    def size(self) -> int:
        return wire.tensor_bytes(self.shape, self.dtype)


def wire_tensors(converter: Converter, *, fused_experts: bool = True, tied_copies: bool = False) -> list[WireTensor]:
    """Everything the model has, unit by unit, under the checkpoint's names: vLLM reads those for every model it serves.

    fused_experts: the experts of a layer as one [E, ., .] tensor under transformers' name, which vLLM takes as well, much faster than three
    names for each expert. tied_copies: also send tied tensors under their second name (a CPU server keeps a copy of its own of the head).
    """
    tensors = []
    for number, unit in enumerate(converter.units):
        for name in unit.model_names:
            tensors += _wire_tensor(converter, name, name, number, fused_experts)
        if tied_copies:
            for name, source in converter.tied.items():
                if source in unit.model_names:
                    tensors += [WireTensor(_twin_name(converter, name, source), source, number, *_form(converter, source))]
    return tensors


def _form(converter: Converter, name: str) -> tuple:
    dtype, loaded = converter.dtype(name), converter.loaded_dtype(name)
    return (), tuple(converter.shape(name)), dtype, loaded.itemsize > dtype.itemsize


def _twin_name(converter: Converter, name: str, source: str) -> str:
    """A tied tensor has one name on disk; the head's is the same in every checkpoint."""
    return name if name.startswith("lm_head") else name.replace(source, converter.disk_names(source)[0])


def _wire_tensor(converter: Converter, name: str, model_name: str, unit: int, fused_experts: bool) -> list[WireTensor]:
    pieces = converter.pieces(name)
    index, shape, dtype, narrowed = _form(converter, name)
    if dtype == fp8.DTYPE:
        dtype = torch.bfloat16
    if not pieces:  # made by a conversion of transformers that is no placement: undone when it is sent
        names = converter.disk_names(name)
        checkpoint = converter.checkpoint
        return [WireTensor(disk, model_name, unit, (), tuple(checkpoint.shape(disk)), dtype, narrowed, True) for disk in names]
    if len(pieces) == 1:
        return [WireTensor(next(iter(pieces)), model_name, unit, (), shape, dtype, narrowed)]
    first = next(iter(pieces))
    if fused_experts:
        stem = first[: first.index(".experts.") + len(".experts.")]
        return [WireTensor(stem + name.rpartition(".")[2], model_name, unit, (), shape, dtype, narrowed)]
    empty = torch.empty(shape, device="meta")
    return [WireTensor(disk, model_name, unit, index, tuple(empty[index].shape), dtype, narrowed) for disk, index in pieces.items()]


def closure(tensors: list[WireTensor], modules: dict[str, set[str]], trained: set[str]) -> list[int]:
    """Indices of what must be sent when the model tensors `trained` have changed: all of every server module of which a part has.

    modules: name sent -> the server's modules that it is loaded into, as its workers reported.
    """
    touched = {module for tensor in tensors if tensor.model_name in trained for module in modules.get(tensor.name, ())}
    return [i for i, tensor in enumerate(tensors) if tensor.model_name in trained or touched & modules.get(tensor.name, set())]


def foreign_parts(converter: Converter) -> set[str]:
    """Parts of a server's model that the trainer has not and never sends: towers of other media, multi-token prediction; a head that is tied
    to the embeddings."""
    parts = {name.removeprefix("model.").split(".")[0] for name in converter.untouched} - {"layers"}
    return parts | {"lm_head" for name in converter.tied if name.startswith("lm_head")}


def some(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
