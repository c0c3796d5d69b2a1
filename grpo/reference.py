"""The untrained model for the KL term, without a second model: a sharded copy of what trains, swapped in for the reference pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.fsdp import ShardedModel


class ReferenceWeights:
    """A copy of this rank's trained shards as they are now, in bf16 where that loses nothing (2 bytes a parameter, over all ranks)."""

    def __init__(self, model: ShardedModel):
        self.model = model
        self.copies = [_smallest(shard.tensor) for shard in model.trained_shards()]

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model is the untrained one. What trains waits on the same device; no gradients may be there."""
        shards = list(self.model.trained_shards())
        trained = [shard.tensor.clone() for shard in shards]
        try:
            for shard, copy in zip(shards, self.copies, strict=True):
                shard.tensor.copy_(copy)
            yield
        finally:
            for shard, tensor in zip(shards, trained, strict=True):
                shard.tensor.copy_(tensor)


def _smallest(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.to(torch.bfloat16)
    return half if torch.equal(half.to(tensor.dtype), tensor) else tensor.clone()
