"""Attention for packed rows: conversations laid end to end in one row, none of which sees another.

`register()` makes attn_implementation="packed" known to transformers; `prepare(model)`, called on the built model before it is sharded,
makes the rest of the model respect the boundaries and refuses what would silently mix conversations:

- softmax attention: PyTorch's variable-length kernel on GPUs, one call per segment on CPUs;
- Gated DeltaNet (Qwen3-Next, Qwen3.5): short convolution and delta rule of flash-linear-attention on GPUs, transformers' own per segment
  on CPUs;
- GLM's sparse attention: dense where no segment is longer than what the indexer selects (the selection is then everything), otherwise the
  indexer and attention run over chunks of queries, so that the scores of a whole row never exist at once.

A packed row comes with cu_seq_lens_q / cu_seq_lens_k (int32 [N + 1], where segments begin and end) and max_length_q / max_length_k
(Python ints, upper bounds of the longest segment). Shapes: T tokens of the row, N segments, H heads, D head dimension, K keys of a
segment.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import cache, wraps
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

NAME = "packed"
# Fewer query chunks mean fewer kernels, larger ones a larger [queries, keys] mask.
QUERY_CHUNK = 1024
# fp32 scores of the indexer that exist at a time, [queries, heads, keys]: 512 MiB.
SCORE_ELEMENTS = 2**27
_VARLEN_OPTIONS = inspect.signature(varlen.varlen_attn).parameters


def register() -> None:
    """Makes "packed" a valid attn_implementation. No mask function goes with it, so transformers builds no [T, T] mask."""
    AttentionInterface.register(NAME, packed_attention)


def prepare(model: PreTrainedModel) -> None:
    """Makes a built model right for packed rows; call it before sharding, on meta or real tensors. Calling it again changes nothing.

    Raises ValueError for an attention implementation or a kind of layer that cannot keep packed conversations apart, and ImportError or
    RuntimeError where the kernels for it are missing or known to be wrong."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    if implementation not in (NAME, "sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        raise ValueError(f"attn_implementation {implementation!r} does not keep packed conversations apart; use {NAME!r}")
    modules = list(model.modules())
    delta_nets = [m for m in modules if type(m).__name__.endswith("GatedDeltaNet")]
    num_linear = list(getattr(config, "layer_types", None) or []).count("linear_attention")
    if num_linear != len(delta_nets) or (getattr(model, "_is_stateful", False) and not delta_nets):
        raise ValueError(
            f"{type(model).__name__} has recurrent layers ({num_linear} of linear attention), but {len(delta_nets)} Gated DeltaNet modules "
            "were found: only those are known to keep packed conversations apart"
        )
    if delta_nets:
        if torch.cuda.is_available():
            check_gated_delta_kernels()
        for modeling in {sys.modules[type(module).__module__] for module in delta_nets}:
            _patch_gated_delta_net(modeling, type(next(m for m in delta_nets if type(m).__module__ == modeling.__name__)))
    for module in modules:
        if getattr(module, "indexer", None) is None and not isinstance(module, glm.GlmMoeDsaAttention):
            continue
        if not isinstance(module, glm.GlmMoeDsaAttention):
            raise ValueError(
                f"{type(module).__name__} selects tokens with an indexer that is not known here: it cannot train on packed rows"
            )
        if implementation.startswith("flash_attention"):
            raise ValueError(f"{implementation} ignores which tokens GLM's indexer selects; use {NAME!r}")
        if implementation == NAME:
            module.__class__ = PackedGlmAttention
            if module.indexer is not None:
                module.indexer.__class__ = PackedGlmIndexer


def segments(cu_seq_lens: Tensor) -> Iterator[tuple[int, int]]:
    """(begin, end) of each segment. Reads the tensor on the host, which waits for a GPU."""
    bounds = cu_seq_lens.tolist()
    return zip(bounds[:-1], bounds[1:], strict=True)


# ---- softmax attention -------------------------------------------------------------------------------------------------------------------


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function. query [1, H, T, D], key and value [1, H_kv, T, D or D_v]; gives [1, T, H, D_v]."""
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("packed attention needs cu_seq_lens_q and max_length_q: pass what PackedBatch.model_inputs() gives")
    unsupported = {name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None}
    unsupported |= {"dropout"} if dropout else set()
    unsupported |= {"attention_mask"} if attention_mask is not None else set()
    if unsupported:
        raise ValueError(f"packed attention does not support {', '.join(sorted(unsupported))}, which {type(module).__name__} uses")
    causal = module.is_causal if is_causal is None else is_causal
    window = sliding_window if causal else None
    row = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]  # [T, H, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _has_varlen_kernel(query):
        output = _varlen_attention(*row, cu_seq_lens_q, max_length_q, scale, causal, window)
    else:
        parts = [[x[begin:end] for x in row] for begin, end in segments(cu_seq_lens_q)]
        output = torch.cat([_segment_attention(*part, scale, causal, window) for part in parts])
    return output.unsqueeze(0), None


def _has_varlen_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _varlen_attention(query, key, value, cu_seq_lens, max_length, scale, causal, window) -> Tensor:
    """[T, H, D] -> [T, H, D_v] on a GPU. The kernel takes one head dimension for all three, a multiple of 8, in half precision."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"packed attention on a GPU computes in bfloat16 or float16, got {query.dtype}; set the compute dtype to bfloat16")
    value_dim = value.shape[-1]
    width = -(-max(query.shape[-1], value_dim) // 8) * 8
    query, key, value = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (query, key, value))
    options = {"window_size": (-1 if window is None else window - 1, 0) if causal else (-1, -1)}
    if "scale" in _VARLEN_OPTIONS:
        options["scale"] = scale
    else:
        query = query * (scale * width**0.5)
    if "enable_gqa" in _VARLEN_OPTIONS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    output = varlen.varlen_attn(query, key, value, cu_seq_lens, cu_seq_lens, max_length, max_length, **options)
    return output[..., :value_dim]


def _segment_attention(query, key, value, scale, causal=True, window=None, mask=None) -> Tensor:
    """Attention of one segment, or of queries at its end: [n, H, D], [K, H_kv, D], [K, H_kv, D_v] -> [n, H, D_v].

    mask [n, K]: True where a query sees a key; needed where n is not K."""
    if window is not None and window < len(key):
        mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril_().triu_(1 - window)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=gqa)
    return output.squeeze(0).transpose(0, 1)


# ---- Gated DeltaNet ----------------------------------------------------------------------------------------------------------------------

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
INSTALL = "`bash env/setup.sh train --with fla-core` installs it"


@cache
def _gated_delta_kernels():
    """(causal_conv1d, chunk_gated_delta_rule) of flash-linear-attention. Both keep segments apart by cu_seqlens and have a backward."""
    if find_spec("fla") is None:
        raise ImportError(f"Gated DeltaNet on GPUs needs the package fla-core: {INSTALL}")
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # Both choose and launch Triton kernels from Python, which torch.compile cannot trace.
    return torch.compiler.disable(causal_conv1d), torch.compiler.disable(chunk_gated_delta_rule)


def check_gated_delta_kernels() -> None:
    """Raises where the delta rule's kernels are missing, or its backward is known to be wrong, before any weight is read."""
    _gated_delta_kernels()
    import triton
    from packaging.version import Version

    # flash-linear-attention refuses this combination too, but only in the first backward, an hour into the queue.
    hopper = torch.cuda.get_device_capability()[0] == 9
    if hopper and Version("3.4.0") <= Version(triton.__version__) < Version("3.7.1") and find_spec("tilelang") is None:
        raise RuntimeError(
            f"Triton {triton.__version__} computes wrong gradients of Gated DeltaNet on this GPU (Hopper): "
            "install Triton 3.7.1 or newer, or tilelang"
        )


def _patch_gated_delta_net(modeling, module_class: type) -> None:
    """Replaces the two functions of a transformers modeling file that its Gated DeltaNet calls; without cu_seq_lens they work as before."""
    called = inspect.unwrap(module_class.forward).__code__.co_names
    for name, make in ((CONVOLUTION, _packed_convolution), (DELTA_RULE, _packed_delta_rule)):
        function = getattr(modeling, name, None)
        if hasattr(function, "is_packed"):
            continue
        if not callable(function) or name not in called or inspect.unwrap(function).__name__ != name:
            raise RuntimeError(
                f"{module_class.__name__}.forward of this transformers version does not call {modeling.__name__}.{name}: packed "
                "conversations would not be kept apart. Adapt common/attention.py to it"
            )
        packed = make(function, inspect.unwrap(function))
        packed.is_packed = True
        setattr(modeling, name, packed)


def _packed_convolution(function, torch_function):
    @wraps(function)
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, cu_seq_lens_q=None, **kwargs):  # [1, channels, T]
        if cu_seq_lens_q is None:
            return function(hidden_states, weight, bias, activation=activation, **kwargs)
        if hidden_states.is_cuda:
            convolution, _ = _gated_delta_kernels()
            output, _ = convolution(hidden_states.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)
            return output.transpose(1, 2)
        parts = [hidden_states[:, :, begin:end] for begin, end in segments(cu_seq_lens_q)]
        return torch.cat([torch_function(part, weight, bias, activation=activation) for part in parts], dim=-1)

    return causal_conv1d_fn


def _packed_delta_rule(function, torch_function):
    @wraps(function)
    def torch_chunk_gated_delta_rule(query, key, value, *, g, beta, cu_seqlens=None, use_qk_l2norm_in_kernel=False, **kwargs):
        # query, key, value [1, T, H, D]; g, beta [1, T, H]
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if cu_seqlens is None:
            return function(query, key, value, g=g, beta=beta, **options, **kwargs)
        if kwargs.get("initial_state") is not None or kwargs.get("output_final_state"):
            raise ValueError("a packed row has no recurrent state to continue from; pass use_cache=False")
        if query.is_cuda:
            _, delta_rule = _gated_delta_kernels()
            return delta_rule(query, key, value, g=g, beta=beta, cu_seqlens=cu_seqlens, **options)
        outputs = []
        for begin, end in segments(cu_seqlens):
            part = [tensor[:, begin:end] for tensor in (query, key, value, g, beta)]
            outputs.append(torch_function(*part[:3], g=part[3], beta=part[4], **options)[0])
        return torch.cat(outputs, dim=1), None

    return torch_chunk_gated_delta_rule


# ---- GLM's sparse attention --------------------------------------------------------------------------------------------------------------


class PackedGlmAttention(glm.GlmMoeDsaAttention):
    """GlmMoeDsaAttention on a packed row; equals its eager implementation on each segment alone.

    The indices of selected tokens that go on to "shared" layers count from the segment's beginning, [1, T, index_topk]; None where
    nothing had to be selected. The indexer runs without gradients, as in transformers: attention trains through the selected tokens
    only."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **kwargs,
    ) -> tuple[Tensor, None, Tensor | None]:
        if cu_seq_lens_q is None or max_length_q is None:
            raise ValueError("packed attention needs cu_seq_lens_q and max_length_q: pass what PackedBatch.model_inputs() gives")
        query_latent, query, key, value = self._project(hidden_states, position_embeddings)
        indices = None
        select = max_length_q > self.config.index_topk
        if self.indexer is not None:
            # Called in any case: where it is a sharded unit of its own all ranks must gather it, whatever the length of their rows.
            with torch.no_grad():
                selection = self.indexer(hidden_states, query_latent, position_embeddings, cu_seq_lens_q if select else None)
        if not select:
            packing = {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
            dropout = self.attention_dropout if self.training else 0.0
            output, _ = packed_attention(self, query, key, value, scaling=self.scaling, dropout=dropout, **packing)
        else:
            indices = prev_topk_indices if self.indexer is None else selection
            if indices is None:
                raise ValueError(f"layer {self.layer_idx} shares the selection of an earlier layer, but there is none")
            row = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
            output = selected_attention(*row, indices.squeeze(0), cu_seq_lens_q, self.scaling)
        return self.o_proj(output.reshape(1, hidden_states.shape[1], -1)), None, indices

    def _project(self, hidden_states: Tensor, position_embeddings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Multi-head latent attention's projections: query latent [1, T, rank], query, key [1, H, T, D], value [1, H, T, D_v]."""
        query_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(query_latent).unflatten(-1, (self.num_heads, self.qk_head_dim)).transpose(1, 2)
        query_plain, query_rotated = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, key_rotated = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        query_rotated, key_rotated = glm.apply_rotary_pos_emb_interleave(query_rotated, key_rotated.unsqueeze(1), *position_embeddings)
        key_value = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key_plain, value = key_value.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        query = torch.cat((query_plain, query_rotated), dim=-1)
        key = torch.cat((key_plain, key_rotated.expand(-1, self.num_heads, -1, -1)), dim=-1)
        return query_latent, query, key, value


class PackedGlmIndexer(glm.GlmMoeDsaIndexer):
    """The indexer of PackedGlmAttention. It is called as a module, so that it can be sharded on its own."""

    def forward(self, hidden_states: Tensor, query_latent: Tensor, position_embeddings, cu_seq_lens: Tensor | None) -> Tensor | None:
        """See select_tokens; None where nothing has to be selected."""
        return None if cu_seq_lens is None else select_tokens(self, hidden_states, query_latent, position_embeddings, cu_seq_lens)


def _matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in fp32 without rounding the product; bf16 inputs on a GPU stay on the tensor cores."""
    if left.is_cuda and left.dtype == torch.bfloat16 and "dtype" in torch.ops.aten.mm.overloads():
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@torch.compiler.disable  # loops over segments, whose bounds are read on the host
@torch.no_grad()
def select_tokens(indexer: nn.Module, hidden_states: Tensor, query_latent: Tensor, position_embeddings, cu_seq_lens: Tensor) -> Tensor:
    """The indexer's choice: int32 [1, T, index_topk], the tokens of its own segment that each token attends to, counted from the
    segment's beginning.

    A token's score of another is sum over the index heads of weight * relu(query . key); the highest scores among earlier tokens win
    (DeepSeek-V3.2). Segments of at most index_topk tokens are left at 0: everything is selected there and nobody reads it."""
    split = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    query = indexer.wq_b(query_latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))  # [1, T, heads, D]
    key = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    (query_rotated, query_plain), (key_rotated, key_plain) = query.split(split, dim=-1), key.split(split, dim=-1)
    query_rotated, key_rotated = glm.apply_rotary_pos_emb_interleave(query_rotated, key_rotated, *position_embeddings, unsqueeze_dim=2)
    query = torch.cat((query_rotated, query_plain), dim=-1).squeeze(0)  # [T, heads, D]
    key = torch.cat((key_rotated, key_plain), dim=-1).flatten(0, 2)  # [T, D]
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).squeeze(0).float()  # [T, heads]
    weights = weights * indexer.n_heads**-0.5

    topk, num_heads = indexer.index_topk, indexer.n_heads
    indices = torch.zeros(len(key), topk, dtype=torch.int32, device=key.device)
    for begin, end in segments(cu_seq_lens):
        if end - begin <= topk:
            continue
        step = max(1, SCORE_ELEMENTS // (num_heads * (end - begin)))
        for first in range(begin, end, step):
            last = min(first + step, end)
            scores = _matmul_float32(query[first:last].flatten(0, 1), key[begin:last].T) * indexer.softmax_scale
            scores = scores.relu_().view(last - first, num_heads, -1)
            scores = torch.matmul(weights[first:last].unsqueeze(1), scores).squeeze(1)  # [queries, keys]
            scores.masked_fill_(~_causal_mask(first - begin, last - begin, scores.device), float("-inf"))
            count = min(topk, last - begin)
            indices[first:last, :count] = scores.topk(count, dim=-1).indices.to(torch.int32)
    return indices.unsqueeze(0)


def _causal_mask(first: int, last: int, device) -> Tensor:
    """[last - first, last] bool: what queries first .. last of a segment see of its keys 0 .. last."""
    return torch.arange(last, device=device) <= torch.arange(first, last, device=device).unsqueeze(1)


@torch.compiler.disable  # as select_tokens
def selected_attention(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, cu_seq_lens: Tensor, scale: float) -> Tensor:
    """Attention to the tokens that select_tokens chose: [T, H, D], [T, H, D], [T, H, D_v], [T, index_topk] -> [T, H, D_v]."""
    outputs = []
    for begin, end in segments(cu_seq_lens):
        segment_query, segment_key, segment_value, segment_indices = (x[begin:end] for x in (query, key, value, indices))
        if end - begin <= indices.shape[1]:
            outputs.append(_segment_attention(segment_query, segment_key, segment_value, scale))
            continue
        for first in range(0, end - begin, QUERY_CHUNK):
            last = min(first + QUERY_CHUNK, end - begin)
            chunk = segment_query[first:last], segment_key[:last], segment_value[:last], segment_indices[first:last]
            # checkpoint: otherwise backward keeps every chunk's mask, and where no fused kernel fits all probabilities
            outputs.append(checkpoint(_selected_chunk, *chunk, first, scale, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs)


def _selected_chunk(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, first: int, scale: float) -> Tensor:
    selected = torch.zeros(len(query), len(key), dtype=torch.bool, device=query.device)
    # Early tokens have fewer than index_topk tokens to choose from; what else stands in their list is later than they are.
    inside = indices.clamp(max=len(key) - 1).long()
    selected = selected.scatter_(1, inside, True) & _causal_mask(first, len(key), query.device)
    return _segment_attention(query, key, value, scale, mask=selected)
