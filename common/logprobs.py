"""Per-token log-probabilities straight from hidden states; the logits exist one chunk of tokens at a time.

The full logits of a packed row of 32,768 tokens and a vocabulary of 151,936 take 20 GB in fp32 and as much again for their gradient. Here
a chunk's logits are computed, reduced to two numbers a token (log-probability and log-sum-exp) and dropped; backward computes them again.
Only positions that have a target are computed at all.

Shapes: T tokens of the packed row, N of them with a target, H hidden size, V vocabulary size.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from common.router import RouterStats

NO_TARGET = -100
# 2**26 fp32 logits are 256 MiB; on a CPU smaller chunks stay in the caches.
CHUNK_ELEMENTS_CUDA = 2**26
CHUNK_ELEMENTS_CPU = 2**22


class LogpOutput(NamedTuple):
    """What one forward of LogpModel gives."""

    logps: Tensor  # [T] fp32, log-probability of each target, 0 where there is none
    entropy: Tensor | None  # [T] fp32, detached, 0 where there is no target; None unless asked for
    aux_loss: Tensor  # scalar fp32, this rank's share of the load-balancing term, not scaled by its coefficient; 0 when off
    expert_load: Tensor | None  # [MoE layers, experts] fp32, assignments counted on this rank; None for a dense model


class HeadOptions(NamedTuple):
    """How the head's output becomes logits: softcap * tanh(logit_scale * x / softcap) / temperature."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def chain(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Gradient with respect to the head's own output, from that with respect to `logits = apply(output)`."""
        if self.softcap is not None:
            gradient = gradient * (1.0 - (logits * (self.temperature / self.softcap)) ** 2)
        scale = self.logit_scale / self.temperature
        return gradient if scale == 1.0 else gradient * scale


def chunk_statistics(output: Tensor, targets: Tensor, options: HeadOptions, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, log-sum-exp, entropy), each [n], of the head's output [n, V]; in fp32, or float64 if the output is."""
    logits = options.apply(output.to(_statistics_dtype(output)))
    normaliser = torch.logsumexp(logits, dim=-1)
    logps = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    if not with_entropy:
        return logps, normaliser, torch.zeros_like(normaliser)
    # Not normaliser - sum(p * logits): that is a difference of large numbers where one token has almost all the probability.
    log_probabilities = logits - normaliser[:, None]
    return logps, normaliser, -(log_probabilities.exp() * log_probabilities).sum(dim=-1)


def chunk_gradient(output: Tensor, targets: Tensor, normaliser: Tensor, gradient: Tensor, options: HeadOptions) -> Tensor:
    """Gradient [n, V] (in the output's dtype) with respect to the head's output, given that of the log-probabilities [n]."""
    logits = options.apply(output.to(_statistics_dtype(output)))
    vocabulary = torch.arange(output.shape[-1], device=output.device)
    one_hot = (vocabulary == targets[:, None]).to(logits.dtype)
    gradient = gradient[:, None] * (one_hot - torch.exp(logits - normaliser[:, None]))
    return options.chain(logits, gradient).to(output.dtype)


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_outer_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [V, H] += left [n, V].T @ right [n, H], with the sum kept in total's fp32.

    A product rounded to bf16 chunk by chunk loses the small contributions of rare tokens, always in the same direction."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    elif left.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads():
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))


class ChunkedLogps(torch.autograd.Function):
    """Log-probabilities [N] and entropies [N] of N hidden states; logits are recomputed in backward.

    Both loops walk the tokens in chunks of `chunk_tokens`. `statistics` and `gradient` are chunk_statistics and chunk_gradient, compiled
    or not."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, options, chunk_tokens, with_entropy, statistics, gradient):
        dtype = _statistics_dtype(hidden)
        logps, normaliser, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            output = hidden[chunk] @ weight.T
            logps[chunk], normaliser[chunk], entropy[chunk] = statistics(output, targets[chunk], options, with_entropy)
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.options, ctx.chunk_tokens, ctx.gradient = options, chunk_tokens, gradient
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logps, _grad_entropy):
        hidden, weight, targets, normaliser = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_statistics_dtype(weight)) if need_weight else None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            output = hidden[chunk] @ weight.T
            grad_output = ctx.gradient(output, targets[chunk], normaliser[chunk], grad_logps[chunk], ctx.options)
            if need_hidden:
                grad_hidden[chunk] = grad_output @ weight
            if need_weight:
                _add_outer_product(grad_weight, grad_output, hidden[chunk])
        if need_weight:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def default_chunk_tokens(num_tokens: int, vocab_size: int, device: torch.device) -> int:
    """Tokens of a chunk: bounded by memory, and always fewer than a quarter of the row."""
    elements = CHUNK_ELEMENTS_CUDA if device.type == "cuda" else CHUNK_ELEMENTS_CPU
    return max(1, min(elements // vocab_size, (num_tokens - 1) // 4))


def token_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    compile: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of every target under the head `weight`.

    hidden [T, H] and weight [V, H] of one dtype; targets [T] int64, -100 where there is none. Gives logps [T] fp32, 0 where there is no
    target, and with `with_entropy` also the entropy [T] fp32 of the distribution at those positions, detached. Both belong to logits /
    temperature. With no target at all the result is zero and still depends on hidden and weight, so that backward reaches every sharded
    layer on every rank. `compile` fuses the passes over a chunk's logits; every chunk then has the same number of rows, so that nothing
    is compiled twice.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    index = torch.nonzero(targets != NO_TARGET).squeeze(-1)
    num_targets = len(index)
    chunk_tokens = chunk_tokens or default_chunk_tokens(len(hidden), len(weight), hidden.device)
    # Rows beyond num_targets repeat token 0; they are cut off below, which gives them a zero gradient.
    rows = max(num_targets, 1)
    rows = -(-rows // chunk_tokens) * chunk_tokens if compile else rows
    index = F.pad(index, (0, rows - num_targets))
    picked_targets = targets.index_select(0, index).clamp(min=0)

    statistics, gradient = _compiled_bodies() if compile else (chunk_statistics, chunk_gradient)
    options = HeadOptions(float(temperature), float(logit_scale), softcap)
    logps, entropy = ChunkedLogps.apply(
        hidden.index_select(0, index), weight, picked_targets, options, chunk_tokens, with_entropy, statistics, gradient
    )
    index, empty = index[:num_targets], torch.zeros(len(targets), dtype=logps.dtype, device=logps.device)
    logps = empty.index_copy(0, index, logps[:num_targets])
    return (logps, empty.index_copy(0, index, entropy[:num_targets])) if with_entropy else logps


@cache
def _compiled_bodies():
    return torch.compile(chunk_statistics, dynamic=False), torch.compile(chunk_gradient, dynamic=False)


def head_options(config) -> dict:
    """logit_scale and softcap of a model, as token_logps takes them, from its config.

    Raises ValueError where the model scales its logits in a way that is not known here: its log-probabilities would be silently wrong."""
    config = config.get_text_config()
    for name in ("logits_scaling", "output_multiplier", "logit_scale_factor"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{type(config).__name__}.{name} = {getattr(config, name)}: this model scales its logits "
                "in its own way; teach head_options in common/logprobs.py"
            )
    return {"logit_scale": getattr(config, "logit_scale", None) or 1.0, "softcap": getattr(config, "final_logit_softcapping", None)}


class LogpModel(nn.Module):
    """A causal language model whose forward gives log-probabilities of targets instead of logits.

    This is the module that becomes FSDP's root: the head's weight is whole only inside the root's forward, so everything that needs the
    head happens in one call. No floating tensor may be an input, because mixed precision would round it to bf16 on the way in.

    `router_stats` counts the experts' load and, if made with `with_logits`, also gives the load-balancing term over the ranks of `group`.
    """

    def __init__(
        self, model, *, router_stats: RouterStats | None = None, chunk_tokens: int | None = None, compile: bool = False, group=None
    ):
        super().__init__()
        if model.base_model is model:
            raise ValueError(f"{type(model).__name__} has no language-model head; build it with AutoModelForCausalLM")
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(f"the head of {type(model).__name__} is {head}; only a Linear without bias is supported")
        self.model = model
        self.router_stats = router_stats
        self.chunk_tokens, self.compile_chunks, self.group = chunk_tokens, compile, group
        self.head_options = head_options(model.config)

    def forward(
        self, inputs: dict, targets: Tensor, *, temperature: float = 1.0, num_tokens: int | None = None, with_entropy: bool = False
    ) -> LogpOutput:
        """inputs: what PackedBatch.model_inputs() gives; targets [1, T], -100 where there is none; num_tokens: T less the padding."""
        num_tokens = targets.numel() if num_tokens is None else num_tokens
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if name in inputs:  # compiled layers must not be compiled again for every other number of segments
                torch._dynamo.maybe_mark_dynamic(inputs[name], 0)
        aux_loss, expert_load = torch.zeros((), dtype=torch.float32, device=targets.device), None
        if self.router_stats is None:
            hidden = self._hidden(inputs)
        else:
            with self.router_stats.recording(targets.numel(), num_tokens, targets.device):
                hidden = self._hidden(inputs)
            expert_load = self.router_stats.load()
            if self.router_stats.with_logits:
                hidden, aux_loss = self.router_stats.aux_loss(hidden, num_tokens, self.group)
        result = token_logps(
            hidden.flatten(0, 1),
            self.model.get_output_embeddings().weight,
            targets.flatten(),
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
            compile=self.compile_chunks,
            **self.head_options,
        )
        logps, entropy = result if with_entropy else (result, None)
        return LogpOutput(logps, entropy, aux_loss, expert_load)

    def _hidden(self, inputs: dict) -> Tensor:
        return self.model.base_model(**inputs).last_hidden_state  # [1, T, H], after the final norm
