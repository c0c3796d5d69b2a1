"""What a mixture of experts' routers did in one forward: load of each expert, and the load-balancing term.

The term is that of the Switch Transformer (Fedus et al. 2021, equations 4-6) per layer, averaged over the MoE layers:

    E * sum_e f_e P_e,   f_e = assignments to expert e / tokens,   P_e = mean probability of expert e

with f summed over all ranks and taken as a constant, so that balanced routing gives the number of experts a token uses, on any number of ranks.
transformers pools the layers before the product, which hides a layer that is unbalanced one way behind one that is unbalanced the other way.

Shapes: T tokens of the packed row, E experts, k experts a token, L MoE layers.
"""

from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint


def _count_assignments(router: nn.Module, _inputs, output) -> None:
    """Forward hook: adds the row's assignments to router.expert_counts.

    It does the same work in every call, also when activation checkpointing runs the layer a second time, because a compiled layer whose recomputation
    takes another path saves other tensors; RouterStats sets the weights to zero by then. One function for all layers and no Python state,
    so that layers share one compiled graph."""
    indices, weights = output[2], router.token_weights
    if len(indices) == len(weights):  # another length: a call that is not being recorded
        router.expert_counts.scatter_add_(0, indices.flatten(), weights[:, None].expand_as(indices).flatten())


def _softmax_mass(logits: Tensor) -> Tensor:
    return torch.softmax(logits.float(), dim=-1).sum(dim=0)


def _sigmoid_mass(logits: Tensor) -> Tensor:
    scores = torch.sigmoid(logits.float())
    return (scores / scores.sum(dim=-1, keepdim=True)).sum(dim=0)


class RouterStats:
    """Hooks on all routers of a model. Make it before the model is wrapped; a dense model simply has no routers.

    `with_logits` keeps the routers' logits too, which the load-balancing term needs; under `torch.compile` that costs a graph break at each router."""

    def __init__(self, model: nn.Module, family, *, with_logits: bool = False):
        self.routers = [module for name, module in model.named_modules() if name.endswith("." + family.router)]
        self.with_logits = with_logits and bool(self.routers)
        self._active = False
        self._logits: list[Tensor] = []
        for router in self.routers:
            router.num_counted_experts = router.weight.shape[0]
            router.token_weights = torch.zeros(0)
            router.expert_counts = torch.zeros(router.num_counted_experts)
            router.register_forward_hook(_count_assignments)
            if self.with_logits:
                router.register_forward_hook(torch.compiler.disable(self._keep_logits))

    def _keep_logits(self, _router, _inputs, output) -> None:
        # The logits only: a softmax taken here would be part of the checkpointed layer, and backward would need that layer's tensors
        # before FSDP has gathered its parameters.
        if self._active:
            self._logits.append(output[0])

    @contextmanager
    def recording(self, row_length: int, num_tokens: int, device: torch.device):
        """Counts within one forward of a row of `row_length` tokens; those from `num_tokens` on are padding and do not count."""
        weights = torch.zeros(row_length, device=device)
        weights[:num_tokens] = 1.0
        for router in self.routers:
            router.token_weights = weights
            router.expert_counts = torch.zeros(router.num_counted_experts, device=device)
        self._logits.clear()
        self._active = True
        try:
            yield self
        finally:
            self._active = False
            weights.zero_()  # what runs after this is recomputation and must not count twice

    def load(self) -> Tensor | None:
        """[L, E] fp32: assignments of the last recorded forward on this rank; None for a dense model."""
        return torch.stack([router.expert_counts for router in self.routers]) if self.routers else None

    def aux_loss(self, num_tokens: int, group=None) -> Tensor:
        """This rank's share, a scalar in fp32, of the last recorded forward's load-balancing term: the sum over the ranks of `group` is the term.

        Collective when a process group exists; call it once per forward, on every rank, outside the layers."""
        assert len(self._logits) == len(self.routers), f"{len(self._logits)} of {len(self.routers)} routers ran"
        counts = self.load()
        totals = torch.cat([counts.flatten(), counts.new_tensor([num_tokens])])
        if distributed.is_initialized():
            distributed.all_reduce(totals, group=group)
        total_tokens = totals[-1]
        frequencies = totals[:-1].view_as(counts) / total_tokens
        loss = torch.zeros((), device=counts.device)
        for router, logits, frequency in zip(self.routers, self._logits, frequencies, strict=True):
            mass = _sigmoid_mass if hasattr(router, "e_score_correction_bias") else _softmax_mass
            # checkpoint: keeps the logits, which exist anyway, and not the fp32 probabilities of every layer
            probability_mass = checkpoint(mass, logits[:num_tokens], use_reentrant=False, preserve_rng_state=False)
            loss = loss + len(frequency) * (frequency * probability_mass).sum()
        self._logits.clear()
        return loss / (len(self.routers) * total_tokens)
