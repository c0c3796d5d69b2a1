"""Packed rows equal their conversations run alone, in log-probabilities and gradients, for every family."""

import sys
from itertools import accumulate

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from common import attention
from common.attention import prepare, register
from common.families import family_of
from common.logprobs import LogpModel
from common.router import RouterStats

# Segments longer than Gated DeltaNet's 64-token chunks, of one token, and longer than GLM's index_topk (32 here).
LONG = (5, 70, 1, 33, 11)
SHORT = (9, 32, 1, 20)  # GLM selects everything
FAMILIES = ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "glm_moe_dsa", "llama"]


def load(path, implementation, **overrides):
    """The text model in fp32, prepared for packing unless it is the eager reference."""
    register()
    config = AutoConfig.from_pretrained(path).get_text_config()
    for name, value in overrides.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, attn_implementation=implementation)
    if implementation != "eager":
        prepare(model)
    return model


def inputs_of(input_ids, lengths):
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {
        "input_ids": input_ids,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int(),
        "use_cache": False,
    }


def row(lengths, seed=0):
    """(input_ids [1, T], targets [1, T], coefficients [T]): targets never cross a boundary, every token has a gradient of its own."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(384, (1, sum(lengths)), generator=generator)
    targets = input_ids.roll(-1)
    targets[0, torch.tensor(list(accumulate(lengths))) - 1] = -100
    return input_ids, targets, torch.randn(sum(lengths), generator=generator)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def packed(model, lengths, seed=0):
    input_ids, targets, coefficients = row(lengths, seed)
    model.zero_grad()
    logps = LogpModel(model)(inputs_of(input_ids, lengths), targets).logps
    (logps * coefficients).sum().backward()
    return logps.detach(), gradients(model)


def separate(model, lengths, seed=0):
    """transformers' own eager path on each segment alone, full logits."""
    input_ids, targets, coefficients = row(lengths, seed)
    model.zero_grad()
    logps = []
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        logits = model(input_ids=input_ids[:, end - length : end], use_cache=False).logits[0]
        wanted = targets[0, end - length : end]
        picked = torch.log_softmax(logits, -1).gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        logps.append(torch.where(wanted == -100, 0.0, picked))
    logps = torch.cat(logps)
    (logps * coefficients).sum().backward()
    return logps.detach(), gradients(model)


def assert_same(result, expected, tolerance=1e-5):
    torch.testing.assert_close(result[0], expected[0], atol=tolerance, rtol=tolerance)
    assert result[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (result[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
        # Gated DeltaNet's rule solves a triangular system in fp32: seen up to 1.1 times the tolerance of the log-probabilities.
        assert error < 3 * tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("implementation", ["packed", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(tiny_dir, family, implementation):
    expected = separate(load(tiny_dir(family), "eager"), LONG)
    model = load(tiny_dir(family), implementation)
    assert_same(packed(model, LONG), expected)
    prepare(model)  # again: nothing changes
    assert_same(packed(model, LONG), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_of_a_neighbour_changes_nothing(tiny_dir, family):
    """To the bit: a leak too small for the comparison above would still be seen."""
    model = load(tiny_dir(family), "packed")
    input_ids, targets, _ = row(LONG)
    changed = input_ids.clone()
    changed[0, 10] = (changed[0, 10] + 7) % 384  # in the second segment, 5 .. 74
    with torch.no_grad():
        before = LogpModel(model)(inputs_of(input_ids, LONG), targets).logps
        after = LogpModel(model)(inputs_of(changed, LONG), targets).logps
    # Experts see the row's tokens in another order, so that their products may round differently.
    torch.testing.assert_close(before[:5], after[:5], atol=2e-6, rtol=0)
    torch.testing.assert_close(before[75:], after[75:], atol=2e-6, rtol=0)
    assert not torch.allclose(before[10:75], after[10:75], atol=1e-3)


# ---- GLM's sparse attention --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_chunk, score_elements", [(1024, 2**27), (16, 16 * 70 * 7), (7, 1)], ids=str)
def test_glm_chunks_equal_eager(tiny_dir, monkeypatch, query_chunk, score_elements):
    monkeypatch.setattr(attention, "QUERY_CHUNK", query_chunk)
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", score_elements)
    lengths = (40, 12, 90, 32, 33)
    assert_same(packed(load(tiny_dir("glm_moe_dsa"), "packed"), lengths), separate(load(tiny_dir("glm_moe_dsa"), "eager"), lengths))


def test_glm_selects_at_all(tiny_dir):
    """The comparison with eager means something only if dense attention would give other values."""
    sparse = packed(load(tiny_dir("glm_moe_dsa"), "packed"), LONG)[0]
    dense = packed(load(tiny_dir("glm_moe_dsa"), "packed", index_topk=128), LONG)[0]
    assert torch.allclose(sparse[:5], dense[:5], atol=1e-5)  # shorter than index_topk
    assert (sparse - dense)[40:75].abs().max() > 1e-3


def test_glm_short_segments_skip_the_indexer(tiny_dir, monkeypatch):
    model = load(tiny_dir("glm_moe_dsa"), "packed")
    monkeypatch.setattr(attention, "select_tokens", lambda *args: pytest.fail("nothing has to be selected"))
    assert_same(packed(model, SHORT), separate(load(tiny_dir("glm_moe_dsa"), "eager"), SHORT))


@pytest.mark.parametrize("lengths", [LONG, SHORT], ids=["long", "short"])
def test_glm_shared_layers_reuse_the_selection(tiny_dir, lengths):
    path = tiny_dir("glm_moe_dsa", num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"])
    model = load(path, "packed")
    assert [layer.self_attn.indexer is None for layer in model.model.layers] == [False, True, False, True]
    assert_same(packed(model, lengths), separate(load(path, "eager"), lengths))


def test_glm_first_layer_cannot_share(tiny_dir):
    model = load(tiny_dir("glm_moe_dsa"), "packed")
    model.model.layers[0].self_attn.indexer = None
    with pytest.raises(ValueError, match="layer 0 shares the selection of an earlier layer"):
        packed(model, LONG)


def test_glm_under_activation_checkpointing(tiny_dir):
    path = tiny_dir("glm_moe_dsa", num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"])
    model = load(path, "packed")
    expected = packed(model, LONG)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    logps, wrapped = packed(model, LONG)
    assert_same(
        (logps, {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in wrapped.items()}), expected, tolerance=1e-6
    )


class BiggestTensor(TorchDispatchMode):
    """The largest number of elements of a result."""

    biggest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, torch.Tensor)]
        self.biggest = max([self.biggest, *(tensor.numel() for tensor in tensors)])
        return result


def test_glm_never_scores_a_whole_row(tiny_dir, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_CHUNK", 32)
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", 2**15)
    lengths, heads = (256, 128), 16
    with BiggestTensor() as ours:
        packed(load(tiny_dir("glm_moe_dsa"), "packed"), lengths)
    with torch.no_grad(), BiggestTensor() as stock:
        load(tiny_dir("glm_moe_dsa"), "sdpa")(**inputs_of(row(lengths)[0], lengths))
    assert stock.biggest >= heads * sum(lengths) ** 2
    assert ours.biggest < stock.biggest / 10


# ---- the attention function --------------------------------------------------------------------------------------------------------------


def dense_attention(query, key, value, lengths, scale, causal=True, window=None):
    """[1, H, T, D] with a full [T, T] mask, in float64."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(segment))
    distance = position[:, None] - position[None]
    mask = segment[:, None] == segment[None]
    mask = mask & (distance >= 0) if causal else mask
    mask = mask & (distance < window) if window else mask
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query.double() @ key.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(
    "options",
    [{}, {"scaling": 0.3}, {"sliding_window": 4}, {"sliding_window": 1000}, {"is_causal": False}],
    ids=lambda options: str(options),
)
def test_packed_attention_equals_a_masked_softmax(options):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 6, sum(LONG), 16, generator=generator)
    key = torch.randn(1, 2, sum(LONG), 16, generator=generator)
    value = torch.randn(1, 2, sum(LONG), 24, generator=generator)
    module = nn.Module()
    module.is_causal = True
    bounds = inputs_of(torch.zeros(1, sum(LONG)), LONG)
    output, _ = attention.packed_attention(module, query, key, value, cu_seq_lens_q=bounds["cu_seq_lens_q"], max_length_q=70, **options)
    expected = dense_attention(
        query, key, value, LONG, options.get("scaling", 0.25), options.get("is_causal", True), options.get("sliding_window")
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_what_packed_attention_does_not_do_is_an_error():
    module = nn.Module()
    module.is_causal = True
    tensors = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="needs cu_seq_lens_q"):
        attention.packed_attention(module, *tensors)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32), "max_length_q": 8}
    for option in ({"softcap": 30.0}, {"dropout": 0.1}, {"s_aux": torch.zeros(2)}, {"attention_mask": torch.ones(1, 1, 8, 8)}):
        with pytest.raises(ValueError, match=f"does not support {next(iter(option))}"):
            attention.packed_attention(module, *tensors, **bounds, **option)


@torch.library.custom_op("plain_fsdp_tests::varlen", mutates_args=())
def varlen_stand_in(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """The GPU kernel's place in the graph: one opaque call on the whole row."""
    assert longest >= bounds.diff().max()
    parts = [attention._segment_attention(*(x[a:b] for x in (query, key, value)), scale) for a, b in attention.segments(bounds)]
    return torch.cat(parts)


@varlen_stand_in.register_fake
def _(query, key, value, bounds, longest, scale):
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.scale = inputs[5]


@torch.library.custom_op("plain_fsdp_tests::varlen_backward", mutates_args=())
def varlen_stand_in_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    groups = query.shape[1] // key.shape[1]
    results = [torch.empty_like(x, dtype=torch.float32) for x in (query, key, value)]
    for a, b in attention.segments(bounds):
        q, k, v, g = (x[a:b].float().transpose(0, 1) for x in (query, key, value, gradient))  # [H, n, D]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        future = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        p = (q @ k.mT * scale).masked_fill(future, float("-inf")).softmax(-1)
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        for result, grad in zip(results, (ds @ k, ds.mT @ q, p.mT @ g), strict=True):
            result[a:b] = grad.unflatten(0, (result.shape[1], -1)).sum(1).transpose(0, 1)
    return [result.to(x.dtype) for result, x in zip(results, (query, key, value), strict=True)]


@varlen_stand_in_backward.register_fake
def _(gradient, query, key, value, bounds, scale):
    return [torch.empty_like(x) for x in (query, key, value)]


varlen_stand_in.register_autograd(
    lambda ctx, gradient: (*varlen_stand_in_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None, None), setup_context=_save
)


@pytest.fixture
def varlen(monkeypatch):
    """Takes the path of a GPU with the stand-in as its kernel."""

    def kernel(query, key, value, bounds, _bounds, longest, _longest, *, window_size, scale, enable_gqa=False):
        assert window_size == (-1, 0)
        return varlen_stand_in(query, key, value, bounds, longest, scale)

    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda tensor: True)
    monkeypatch.setattr(attention.varlen, "varlen_attn", kernel)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def half_precision_model(tiny_dir, family):
    options = {"first_k_dense_replace": 0, "index_topk": 64} if family == "glm_moe_dsa" else {}
    register()
    path = tiny_dir(family, num_hidden_layers=2, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="packed")
    prepare(model)
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "glm_moe_dsa", "llama"])
def test_a_compiled_layer_is_one_graph_for_any_number_of_segments(tiny_dir, varlen, family):
    """As on a GPU, with another kernel: fullgraph fails on any graph break."""
    model = half_precision_model(tiny_dir, family)
    stats = RouterStats(model, family_of(model.config))
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    wrapped, compiled = LogpModel(model, router_stats=stats), []
    for lengths in ((20, 12), (32,), (3, 9, 20), (1,) * 32, (30, 2)):
        inputs, targets = inputs_of(row(lengths)[0], lengths), row(lengths)[1]
        with torch.no_grad():
            output = wrapped(inputs | {"max_length_q": 32, "max_length_k": 32}, targets)
        compiled.append(len(graphs))
        if family != "llama":
            assert (output.expert_load.sum(1) == 64).all()
    assert compiled == [1] * 5, "graphs after each row"  # both layers share one


@pytest.mark.parametrize("with_logits", [False, True], ids=["load", "load-and-term"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm_moe_dsa"])
def test_compiled_checkpointed_layers_equal_plain_ones(tiny_dir, varlen, family, with_logits):
    results = []
    for compiled in (False, True):
        model = half_precision_model(tiny_dir, family)
        wrapped = LogpModel(model, router_stats=RouterStats(model, family_of(model.config), with_logits=with_logits))
        if compiled:
            for index, layer in enumerate(model.model.layers):
                model.model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
                # the partitioner as with the real back-end, the kernels uncompiled
                model.model.layers[index].compile(backend="aot_eager_decomp_partition", fullgraph=True)
        losses, loads = [], []
        for lengths in ((20, 12), (3, 9, 20)):
            input_ids, targets, coefficients = row(lengths)
            output = wrapped(inputs_of(input_ids, lengths) | {"max_length_q": 32, "max_length_k": 32}, targets, num_tokens=30)
            loss = (output.logps * coefficients).sum() + 10 * output.aux_loss
            loss.backward()
            losses.append(loss.item())
            loads.append(wrapped.router_stats.load())
        assert all((load.sum(1) == 60).all() for load in loads), "recomputation counts again"
        gradient = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients(model).items()}
        results.append((torch.tensor(losses), gradient))
    torch.testing.assert_close(results[0][0], results[1][0], atol=0.3, rtol=1e-2)
    for name, gradient in results[0][1].items():  # bf16 noise; a term that is lost or counted twice is far above it
        error = (results[1][1][name] - gradient).norm() / gradient.norm()
        assert error < 0.1, f"{name}: relative error {error:.1e}"


# ---- what is refused at start ------------------------------------------------------------------------------------------------------------


def test_unknown_implementation_is_refused(tiny_dir):
    model = load(tiny_dir("llama"), "eager")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'flex_attention' does not keep packed conversations apart"):
        prepare(model)


def test_glm_with_flash_attention_is_refused(tiny_dir):
    model = load(tiny_dir("glm_moe_dsa"), "eager")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="ignores which tokens GLM's indexer selects"):
        prepare(model)


def test_unknown_recurrent_layers_are_refused(tiny_dir):
    model = load(tiny_dir("qwen3_next"), "eager")
    model.model.layers[0].linear_attn = nn.Identity()
    with pytest.raises(ValueError, match=r"3 of linear attention\), but 2 Gated DeltaNet modules"):
        prepare(model)


def test_unknown_indexer_is_refused(tiny_dir):
    model = load(tiny_dir("llama"), "eager")
    model.model.layers[1].self_attn.indexer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="selects tokens with an indexer that is not known here"):
        prepare(model)


def test_changed_names_in_transformers_are_an_error(tiny_dir, monkeypatch):
    """A patch that nobody calls would leave the convolution leaking three tokens over every boundary."""
    model = load(tiny_dir("qwen3_next"), "eager")
    modeling = sys.modules[type(model).__module__]
    original = getattr(modeling, attention.CONVOLUTION)
    monkeypatch.setattr(modeling, attention.CONVOLUTION, getattr(original, "__wrapped__", original))
    monkeypatch.setattr(attention, "CONVOLUTION", "causal_convolution")
    with pytest.raises(RuntimeError, match="does not call .*modeling_qwen3_next.causal_convolution"):
        prepare(model)


def test_gated_delta_net_without_boundaries_is_as_before(tiny_dir):
    """Generation in the same process uses the same functions, with a cache and no boundaries."""
    model = load(tiny_dir("qwen3_next"), "sdpa")
    input_ids = row((40,))[0]
    with torch.no_grad():
        expected = load(tiny_dir("qwen3_next"), "eager")(input_ids=input_ids, use_cache=False).logits
        torch.testing.assert_close(model(input_ids=input_ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
        generated = model.generate(input_ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, use_cache=True)
        again = model.generate(input_ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, use_cache=False)
    assert torch.equal(generated, again) and generated.shape[1] == 43


def test_gated_delta_net_packed_with_a_cache_is_refused(tiny_dir):
    model = load(tiny_dir("qwen3_next"), "sdpa")
    with pytest.raises(ValueError, match="use_cache=False"):
        model(**(inputs_of(row(LONG)[0], LONG) | {"use_cache": True}))
