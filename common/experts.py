"""Training some experts of a layer exactly: trained and frozen experts as parts with weights of their own; and which experts to train.

    python -m common.experts count --config sft/configs/qwen3_235b_experts.yaml --output counts.json      (under torchrun for a large model)
    python -m common.experts select --counts counts.json --top_k 8 --scope layer --by count --output mask.json

`count` runs the base model over the config's training data and writes how many tokens, and with how much weight, each expert received.
`select` proposes a mask from it: mask.json `{"layer": [expert, ...]}` for `expert_mask`, mask.stats.json with what was chosen and how much of
the routing it covers, and mask.png, a heat map. Exit codes: 0 good, 2 wrong use.
"""

import argparse
import copy
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

# ----------------------------------------------------------------------------------------------------------------------------------
# Experts in parts


class SplitExperts(nn.Module):
    """Fused experts [E, ...] cut into parts that are modules (and FSDP units) of their own; computes what the whole would.

    Each part is an instance of the model's own experts class with fewer experts. A part receives just the (token, expert) pairs that are
    routed to it, one row each, so that nothing is computed twice; the results are brought back into the tokens' order, weighted and summed
    as transformers does it.
    """

    def __init__(self, experts: nn.Module, trained: Iterable[int], num_units: int = 1):
        """trained: ids of the experts that train. num_units: into how many units all E experts would be cut."""
        super().__init__()
        tensors = {name: parameter for name, parameter in experts._parameters.items() if parameter is not None}
        self.num_experts = next(iter(tensors.values())).shape[0]
        trained = sorted(trained)
        size = -(-self.num_experts // num_units)
        self.ids: dict[str, tuple[int, ...]] = {}  # name of the part -> experts in it
        frozen = sorted(set(range(self.num_experts)) - set(trained))
        for kind, ids in (("frozen", frozen), ("trained", trained)):
            for number, first in enumerate(range(0, len(ids), size)):
                self.ids[f"{kind}{number}"] = tuple(ids[first : first + size])
        for name, ids in self.ids.items():
            part = copy.copy(experts)  # class, activation, config are shared
            part._parameters, part._buffers, part._modules = {}, {}, dict(experts._modules)
            for leaf, tensor in tensors.items():
                shape = (len(ids), *tensor.shape[1:])
                part._parameters[leaf] = nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device="meta"), name.startswith("trained"))
            part.num_experts = len(ids)
            setattr(self, name, part)
        self._tables: tuple[Tensor, Tensor] | None = None

    def parts(self) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
        return ((getattr(self, name), ids) for name, ids in self.ids.items())

    def rows(self, part: str) -> tuple[tuple[int, ...], int]:
        """(ids of all experts that are trained, or frozen, like this part's; position of this part's first expert among them).

        The weights of these experts one below the other are the tensor that a checkpoint holds, however it is cut into units."""
        kind = part.rstrip("0123456789")
        alike = tuple(expert for name, ids in self.ids.items() if name.startswith(kind) for expert in ids)
        return alike, alike.index(self.ids[part][0])

    def _lookup(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[E] each: the part that an expert is in, and its number there."""
        if self._tables is None or self._tables[0].device != device:
            part_of, place = torch.empty(2, self.num_experts, dtype=torch.long)
            for number, ids in enumerate(self.ids.values()):
                part_of[list(ids)], place[list(ids)] = number, torch.arange(len(ids))
            self._tables = part_of.to(device), place.to(device)
        return self._tables

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]."""
        num_tokens, top_k = top_k_index.shape
        part_of, place = self._lookup(hidden_states.device)
        experts = top_k_index.reshape(-1)
        pairs_part = part_of[experts]
        order = torch.argsort(pairs_part, stable=True)  # pairs, part by part
        counts = torch.bincount(pairs_part, minlength=len(self.ids)).tolist()
        outputs = []
        for name, pairs in zip(self.ids, order.split(counts), strict=True):
            rows, index = hidden_states[pairs // top_k], place[experts[pairs]]
            if not len(pairs):  # a part without a token takes part in backward too: its gradient is reduced over all ranks
                rows, index = hidden_states[:1], place[:1] * 0
            weights = torch.ones(len(rows), 1, dtype=top_k_weights.dtype, device=rows.device)
            outputs.append(getattr(self, name)(rows, index[:, None], weights)[: len(pairs)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        by_token = torch.cat(outputs)[back].view(num_tokens, top_k, -1)
        return (by_token * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def split_experts(model: nn.Module, paths: dict[str, tuple[int, ...]], num_units: int = 1) -> None:
    """Replaces the experts at each path of a model on meta by SplitExperts; `paths`: path -> experts that train (may be none or all)."""
    for path, trained in paths.items():
        owner, _, leaf = path.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, leaf, SplitExperts(getattr(parent, leaf), trained, num_units))


def destinations(model: nn.Module, name: str) -> list[tuple[nn.Module, str, tuple[int, ...] | None]]:
    """Where a model tensor lives: (module, parameter or buffer there, the experts it holds or None for the whole tensor)."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, SplitExperts):
        return [(part, leaf, ids) for part, ids in module.parts()]
    return [(module, leaf, None)]
