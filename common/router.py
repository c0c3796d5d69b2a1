"""What a mixture of experts' routers did in one forward: load of each expert, and the load-balancing term.

The term is that of the Switch Transformer (Fedus et al. 2021, equations 4-6) per layer, averaged over the MoE layers:

    E * sum_e f_e P_e,   f_e = assignments to expert e / tokens,   P_e = mean probability of expert e

with f summed over all ranks and taken as a constant, so that balanced routing gives the number of experts a token uses, on any number of
ranks. transformers pools the layers before the product, which hides a layer that is unbalanced one way behind one that is unbalanced the
other way.

f is known only when the whole forward is over, but the routers' logits live inside layers that are recomputed, compiled, and whose FSDP
parameters are gone by then. So the term's value comes from sums over tokens that each router leaves behind, and its gradient with respect
to the logits, which needs of all this only f, is added where backward passes the router anyway.

Shapes: T tokens of the packed row, E experts, k experts a token, L MoE layers.
"""

from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn


def _probabilities(logits: Tensor, sigmoid: bool) -> Tensor:
    """[T, E] fp32: softmax (Qwen), or sigmoid normalised to sum 1 (GLM)."""
    if not sigmoid:
        return torch.softmax(logits.float(), dim=-1)
    scores = torch.sigmoid(logits.float())
    return scores / scores.sum(dim=-1, keepdim=True)


@torch.library.custom_op("plain_fsdp::attach_balance", mutates_args=())
def attach_balance(scores: Tensor, logits: Tensor, valid: Tensor, slope: Tensor, sigmoid: bool) -> Tensor:
    """The router's scores unchanged; in backward, valid [T] * slope [E], as it is *then*, is the gradient of the probabilities [T, E]."""
    return scores.clone()


@torch.library.custom_op("plain_fsdp::balance_gradient", mutates_args=())
def balance_gradient(grad_scores: Tensor, logits: Tensor, valid: Tensor, slope: Tensor, sigmoid: bool) -> Tensor:
    """Gradient [T, E] of sum_t valid_t sum_e slope_e p_te with respect to the logits.

    An operator of its own that takes grad_scores, so that a compiler cannot move it into the forward, where slope is not known yet."""
    probabilities = _probabilities(logits, sigmoid)
    gradient = slope - (probabilities * slope).sum(dim=-1, keepdim=True)
    if sigmoid:
        scores = torch.sigmoid(logits.float())
        gradient = gradient * scores * (1 - scores) / scores.sum(dim=-1, keepdim=True)
    else:
        gradient = gradient * probabilities
    return (gradient * valid.unsqueeze(-1)).to(logits.dtype)


attach_balance.register_fake(lambda scores, logits, valid, slope, sigmoid: torch.empty_like(scores))
balance_gradient.register_fake(lambda grad_scores, logits, valid, slope, sigmoid: torch.empty_like(logits))


def _save_for_backward(ctx, inputs, output):
    _, logits, valid, slope, ctx.sigmoid = inputs
    ctx.save_for_backward(logits, valid, slope)


def _attach_balance_backward(ctx, grad_scores):
    return grad_scores, balance_gradient(grad_scores, *ctx.saved_tensors, ctx.sigmoid), None, None, None


attach_balance.register_autograd(_attach_balance_backward, setup_context=_save_for_backward)


def _observe(router: nn.Module, _inputs, output):
    """Forward hook: adds the row's assignments, and for the balancing term its probabilities, to what the router has counted.

    It does the same work in every call, also when activation checkpointing runs the layer a second time, because a compiled layer whose
    recomputation takes another path saves other tensors; `counting` is zero by then. One function for all layers and no Python state, so
    that layers share one compiled graph."""
    logits, scores, indices = output
    if len(indices) != len(router.counting):  # a call that is not being recorded
        return None
    router.expert_counts.scatter_add_(0, indices.flatten(), router.counting[:, None].expand_as(indices).flatten())
    if not router.with_logits:
        return None
    with torch.no_grad():
        router.probability_mass.add_(router.counting @ _probabilities(logits, router.has_sigmoid))
    return logits, attach_balance(scores, logits, router.valid, router.slope, router.has_sigmoid), indices


class _SetSlopes(torch.autograd.Function):
    """Passes the last hidden state and the term's value through; in backward it tells every router the slope of the term.

    Hidden states and value leave one node, so that no layer's backward can run before the slopes are set."""

    @staticmethod
    def forward(ctx, hidden, value, slopes, routers):
        ctx.routers = routers
        ctx.save_for_backward(slopes)
        return hidden.view_as(hidden), value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_hidden, grad_value):
        (slopes,) = ctx.saved_tensors
        for router, slope in zip(ctx.routers, slopes * grad_value, strict=True):
            router.slope.data.copy_(slope)  # .data: autograd must not take this for a change of what forward saved
        return grad_hidden, None, None, None


class RouterStats:
    """Hooks on all routers of a model. Make it before the model is wrapped; a dense model simply has no routers.

    `with_logits` observes the routers' logits too, for the load-balancing term. Its gradient enters at the routers' scores: nothing
    arrives where the experts' output is detached. A recorded forward must be followed by its backward (or by none) before the next one is
    recorded."""

    def __init__(self, model: nn.Module, family, *, with_logits: bool = False):
        self.routers = [module for name, module in model.named_modules() if name.endswith("." + family.router)]
        self.with_logits = with_logits and bool(self.routers)
        for router in self.routers:
            router.num_counted_experts = router.weight.shape[0]
            router.with_logits = self.with_logits
            router.has_sigmoid = hasattr(router, "e_score_correction_bias")
            router.counting = torch.zeros(0)
            router.expert_counts = torch.zeros(router.num_counted_experts)
            if hasattr(router, "observer"):
                router.observer.remove()  # two hooks would count everything twice
            router.observer = router.register_forward_hook(_observe)

    @contextmanager
    def recording(self, row_length: int, num_tokens: int, device: torch.device):
        """Counts within one forward of a row of `row_length` tokens; those from `num_tokens` on are padding and do not count."""
        valid = torch.zeros(row_length, device=device)
        valid[:num_tokens] = 1.0
        counting = valid.clone()
        for router in self.routers:
            router.counting, router.valid = counting, valid
            for name in ("expert_counts", "probability_mass", "slope"):
                setattr(router, name, torch.zeros(router.num_counted_experts, device=device))
        try:
            yield self
        finally:
            counting.zero_()  # what runs after this is recomputation and must not count twice

    def load(self) -> Tensor | None:
        """[L, E] fp32: assignments of the last recorded forward on this rank; None for a dense model."""
        return torch.stack([router.expert_counts for router in self.routers]) if self.routers else None

    def aux_loss(self, hidden: Tensor, num_tokens: int, group=None) -> tuple[Tensor, Tensor]:
        """(hidden, this rank's share of the last recorded forward's load-balancing term, a scalar in fp32).

        The sum of the shares over the ranks of `group` is the term. Use the hidden states that come back, not those that went in: they
        carry the term's gradient. Collective when a process group exists: call it on every rank, once per forward, after the layers."""
        counts = self.load()
        totals = torch.cat([counts.flatten(), counts.new_tensor([num_tokens])])
        if distributed.is_initialized():
            distributed.all_reduce(totals, group=group)
        frequencies, total_tokens = totals[:-1].view_as(counts) / totals[-1], totals[-1]
        slopes = frequencies * (counts.shape[1] / (counts.shape[0] * total_tokens))
        mass = torch.stack([router.probability_mass for router in self.routers])
        return _SetSlopes.apply(hidden, (slopes * mass).sum(), slopes, self.routers)
