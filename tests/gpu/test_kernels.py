"""What only a GPU runs: variable-length attention, Gated DeltaNet's Triton kernels, the head's chunks, compiled layers.

    python -m pytest -v -rs tests/gpu/test_kernels.py

One CUDA GPU that knows bfloat16, a few minutes, most of it compiling. The reference is float64, or float32 on the CPU; bfloat16 results
are allowed the error that PyTorch's own kernels make on the same input, times a small factor.
"""

import copy
from importlib.util import find_spec

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from test_attention import dense_attention, inputs_of, row
from test_logprobs import reference, relative_error
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from common import attention
from common.attention import prepare, register
from common.families import family_of
from common.logprobs import LogpModel, _add_outer_product, token_logps
from common.router import RouterStats

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = torch.device("cuda")
LENGTHS = (5, 170, 1, 64, 33, 127)


def gated_delta_problem(backward: bool = True) -> str:
    """Why Gated DeltaNet cannot run here; empty if it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if find_spec("fla") is None:
        return "fla-core is not installed"
    try:
        attention.check_gated_delta_kernels()
    except RuntimeError as error:
        return str(error) if backward else ""
    return ""


def peak_gib(function) -> float:
    """GiB that `function` takes beyond what is allocated when it starts."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def on_device(inputs: dict) -> dict:
    return {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in inputs.items()}


# ---- softmax attention -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("query_dim, value_dim", [(64, 64), (128, 128), (256, 256), (20, 12), (48, 32)])
def test_varlen_equals_masked_softmax(query_dim, value_dim, window):
    torch.manual_seed(0)
    tokens, module = sum(LENGTHS), nn.Module()
    module.is_causal = True
    shapes = [(1, 8, tokens, query_dim), (1, 2, tokens, query_dim), (1, 2, tokens, value_dim)]
    query, key, value = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    gradient = torch.randn(1, tokens, 8, value_dim, device=DEVICE)
    bounds = inputs_of(torch.zeros(1, tokens), LENGTHS)["cu_seq_lens_q"].to(DEVICE)

    def outcome(output):
        gradients = torch.autograd.grad((output.float() * gradient).sum(), (query, key, value))
        return [output.detach(), *gradients]

    options = {"scaling": 0.21, "sliding_window": window, "cu_seq_lens_q": bounds, "max_length_q": 170}
    ours = outcome(attention.packed_attention(module, query, key, value, **options)[0])
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(DEVICE)
    distance = torch.arange(tokens, device=DEVICE)[:, None] - torch.arange(tokens, device=DEVICE)
    mask = (segment[:, None] == segment) & (distance >= 0) & (distance < (window or tokens))
    stock = outcome(F.scaled_dot_product_attention(query, key, value, mask, scale=0.21, enable_gqa=True).transpose(1, 2))
    cpu = [tensor.detach().cpu().double().requires_grad_() for tensor in (query, key, value)]
    exact = dense_attention(*cpu, LENGTHS, 0.21, window=window)
    exact = [exact.detach(), *torch.autograd.grad((exact * gradient.cpu()).sum(), cpu)]
    for name, mine, other, truth in zip(("output", "query", "key", "value"), ours, stock, exact, strict=True):
        error, usual = (relative_error(x.cpu(), truth) for x in (mine, other))
        assert error < max(2 * usual, 4e-3), f"{name}: {error:.1e}, PyTorch's masked attention {usual:.1e}"


def test_float32_on_a_gpu_is_refused():
    module = nn.Module()
    module.is_causal = True
    tensors = [torch.randn(1, 2, 8, 16, device=DEVICE) for _ in range(3)]
    bounds = torch.tensor([0, 8], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="computes in bfloat16 or float16, got torch.float32"):
        attention.packed_attention(module, *tensors, cu_seq_lens_q=bounds, max_length_q=8)


# ---- whole models ------------------------------------------------------------------------------------------------------------------------


def build(path, implementation, dtype, device):
    register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=implementation).to(device)
    if implementation != "eager":
        prepare(model)
    return model


def logps_and_gradient(model, lengths, separate):
    """(log-probabilities [T], all gradients as one vector) on the CPU, of the packed row or of each segment alone."""
    input_ids, targets, coefficients = row(lengths)
    model.zero_grad()
    wrapped, device = LogpModel(model), model.device
    if separate:
        parts, begin = [], 0
        for length in lengths:
            one = {"input_ids": input_ids[:, begin : begin + length].to(device), "use_cache": False}
            parts.append(wrapped(one, targets[:, begin : begin + length].to(device)).logps)
            begin += length
        logps = torch.cat(parts)
    else:
        logps = wrapped(
            {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs_of(input_ids, lengths).items()}, targets.to(device)
        ).logps
    (logps * coefficients.to(device)).sum().backward()
    gradient = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])
    return logps.detach().float().cpu(), gradient


# fla-core 0.6.0's backward read outside of its tensors for the tiny models' heads of 32 and 64 (Triton 3.7.1); real ones have 128.
REAL_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
GLM_LONG = {"index_topk": 32}
GLM_SHORT = {"index_topk": 256}


@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", {}),
        ("qwen3_moe", {}),
        ("glm_moe_dsa", GLM_SHORT),
        ("glm_moe_dsa", GLM_LONG),
        ("qwen3_next", REAL_HEADS),
        ("qwen3_5_moe_text", REAL_HEADS),
    ],
    ids=str,
)
def test_packed_is_as_near_to_float32_as_separate(tiny_dir, family, options):
    """A leak moves log-probabilities by tenths; routing in bfloat16 flips now and then in either of the two."""
    if family.startswith("qwen3_") and family != "qwen3_moe" and (problem := gated_delta_problem()):
        pytest.skip(problem)
    path = tiny_dir(family, **options)
    # Where fla is installed transformers calls its kernels on any device, so Gated DeltaNet's float32 reference runs on the GPU.
    device = DEVICE if family.startswith("qwen3_") and family != "qwen3_moe" else "cpu"
    exact, exact_gradient = logps_and_gradient(build(path, "eager", torch.float32, device), LENGTHS, separate=True)
    model = build(path, "packed", torch.bfloat16, DEVICE)
    packed, packed_gradient = logps_and_gradient(model, LENGTHS, separate=False)
    del model
    stock, stock_gradient = logps_and_gradient(build(path, "eager", torch.bfloat16, DEVICE), LENGTHS, separate=True)
    error, usual = (packed - exact).abs().mean().item(), (stock - exact).abs().mean().item()
    assert error < 1.5 * usual + 2e-3, f"mean |d log p| {error:.1e}, each segment alone {usual:.1e}"
    error, usual = relative_error(packed_gradient, exact_gradient.double()), relative_error(stock_gradient, exact_gradient.double())
    assert error < 1.5 * usual + 2e-2, f"gradient: relative error {error:.1e}, each segment alone {usual:.1e}"


# ---- Gated DeltaNet ----------------------------------------------------------------------------------------------------------------------


def delta_rule_inputs():
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = {
        "query": (1, tokens, 2, 64),
        "key": (1, tokens, 2, 64),
        "value": (1, tokens, 4, 128),
        "g": (1, tokens, 4),
        "beta": (1, tokens, 4),
    }
    tensors = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    tensors["g"] = -F.softplus(tensors["g"])
    tensors["beta"] = tensors["beta"].sigmoid()
    return {name: (x if name == "g" else x.bfloat16()).requires_grad_() for name, x in tensors.items()}


def modeling_functions():
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    functions = getattr(modeling, attention.CONVOLUTION), getattr(modeling, attention.DELTA_RULE)
    return [attention.inspect.unwrap(function) for function in functions]


def repeated_heads(tensors):
    """transformers 5.17's rule wants as many key heads as value heads, that of 5.24 repeats them itself."""
    return tensors | {name: tensors[name].repeat_interleave(2, dim=2) for name in ("query", "key")}


def test_delta_rule_equals_the_torch_rule_per_segment():
    if problem := gated_delta_problem(backward=False):
        pytest.skip(problem)
    _, torch_rule = modeling_functions()
    packed_rule = attention._packed_delta_rule(torch_rule, torch_rule)
    tensors = delta_rule_inputs()
    bounds = inputs_of(torch.zeros(1, sum(LENGTHS)), LENGTHS)["cu_seq_lens_q"]
    options = {"use_qk_l2norm_in_kernel": True}
    exact = {name: x.detach().cpu().float().requires_grad_() for name, x in tensors.items()}
    expected, _ = packed_rule(**repeated_heads(exact), cu_seqlens=bounds, **options)  # on the CPU: segment by segment
    output, _ = packed_rule(**tensors, cu_seqlens=bounds.to(DEVICE), **options)
    assert relative_error(output.detach().cpu(), expected.detach().double()) < 1e-2
    if problem := gated_delta_problem():
        pytest.skip(f"forward is right; backward: {problem}")
    weight = torch.randn(expected.shape)
    (expected * weight).sum().backward()
    (output.float() * weight.to(DEVICE)).sum().backward()
    for name, x in tensors.items():
        assert relative_error(x.grad.cpu(), exact[name].grad.double()) < 2e-2, name


def test_convolution_equals_the_torch_convolution_per_segment():
    if problem := gated_delta_problem(backward=False):
        pytest.skip(problem)
    torch.manual_seed(0)
    torch_convolution, _ = modeling_functions()
    packed_convolution = attention._packed_convolution(torch_convolution, torch_convolution)
    bounds = inputs_of(torch.zeros(1, sum(LENGTHS)), LENGTHS)["cu_seq_lens_q"]
    hidden = torch.randn(1, sum(LENGTHS), 96, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).detach().requires_grad_()
    weight = torch.randn(96, 4, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    exact = [x.detach().cpu().float().requires_grad_() for x in (hidden, weight)]
    expected = packed_convolution(*exact, activation="silu", cu_seq_lens_q=bounds)
    output = packed_convolution(hidden, weight, activation="silu", cu_seq_lens_q=bounds.to(DEVICE))
    assert output.shape == expected.shape and relative_error(output.detach().cpu(), expected.detach().double()) < 5e-3
    gradient = torch.randn(expected.shape)
    (expected * gradient).sum().backward()
    (output.float() * gradient.to(DEVICE)).sum().backward()
    for mine, truth in zip((hidden, weight), exact, strict=True):
        assert relative_error(mine.grad.cpu(), truth.grad.double()) < 5e-3


# ---- GLM's sparse attention --------------------------------------------------------------------------------------------------------------


def glm_attention(**options):
    """One attention layer of GLM's proportions with random weights in bfloat16, on the GPU."""
    from transformers import GlmMoeDsaConfig

    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 128}
    sizes |= {
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "index_n_heads": 32,
        "index_head_dim": 64,
        "index_topk": 256,
    }
    config = GlmMoeDsaConfig(**(sizes | {"num_hidden_layers": 1} | options))
    config._attn_implementation = "packed"
    torch.manual_seed(0)
    layer = attention.glm.GlmMoeDsaAttention(config, 0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    layer.__class__ = attention.PackedGlmAttention
    layer.indexer.__class__ = attention.PackedGlmIndexer
    layer = layer.to(DEVICE, torch.bfloat16)
    rotary = attention.glm.GlmMoeDsaRotaryEmbedding(config).to(DEVICE)

    def run(hidden, lengths):
        bounds = inputs_of(torch.zeros(1, sum(lengths)), lengths)
        positions = rotary(hidden, bounds["position_ids"].to(DEVICE))
        return layer(hidden, positions, cu_seq_lens_q=bounds["cu_seq_lens_q"].to(DEVICE), max_length_q=max(lengths))

    return layer, run


def test_glm_selection_and_gradients_against_float32():
    lengths = (700, 100, 1200)
    layer, run = glm_attention()
    hidden = torch.randn(1, sum(lengths), 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1, sum(lengths), 512, device=DEVICE)
    output, _, indices = run(hidden, lengths)
    (output.float() * weight).sum().backward()

    exact = copy.deepcopy(layer).cpu().float()
    exact_hidden = hidden.detach().cpu().float().requires_grad_()
    bounds = inputs_of(torch.zeros(1, sum(lengths)), lengths)
    positions = attention.glm.GlmMoeDsaRotaryEmbedding(layer.config)(exact_hidden, bounds["position_ids"])
    options = {"cu_seq_lens_q": bounds["cu_seq_lens_q"], "max_length_q": max(lengths)}
    _, _, exact_indices = exact(exact_hidden, positions, **options)
    late = torch.cat([torch.arange(256, 700), torch.arange(800 + 256, 2000)])  # tokens that have more than 256 to choose from
    same = [len(set(a.tolist()) & set(b.tolist())) / 256 for a, b in zip(indices[0, late].cpu(), exact_indices[0, late], strict=True)]
    assert sum(same) / len(same) > 0.95, "the indexer's selection"

    exact.indexer = None  # the same selection for both, so that only the arithmetic differs
    expected, _, _ = exact(exact_hidden, positions, prev_topk_indices=indices.cpu(), **options)
    (expected * weight.cpu()).sum().backward()
    assert relative_error(output.detach().cpu(), expected.detach().double()) < 2e-2
    assert relative_error(hidden.grad.cpu(), exact_hidden.grad.double()) < 3e-2


def test_glm_memory_of_a_long_segment():
    """The scores of all 32 index heads at once would be 8.6 GB, attention probabilities of 8 heads 1.1 GB in bfloat16."""
    _, run = glm_attention()
    hidden = torch.randn(1, 8192, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    run(hidden, (8192,))[0].float().sum().backward()  # workspaces
    assert peak_gib(lambda: run(hidden, (8192,))[0].float().sum().backward()) < 2.5


# ---- log-probabilities -------------------------------------------------------------------------------------------------------------------


def head_example(tokens, hidden_size, vocab, share=0.7):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, hidden_size, device=DEVICE) * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=DEVICE)
    targets[torch.rand(tokens, device=DEVICE) > share] = -100
    return hidden, weight, targets, torch.randn(tokens, device=DEVICE)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 5.0, "temperature": 1.2}], ids=str)
def test_token_logps_equal_the_full_computation(options, compile):
    hidden, weight, targets, coefficients = head_example(1000, 256, 5000)
    expected = reference(hidden, weight, targets, coefficients, **options)
    logps, entropy = token_logps(hidden, weight, targets, chunk_tokens=128, with_entropy=True, compile=compile, **options)
    (logps * coefficients).sum().backward()
    for name, value, truth in zip(
        ("logps", "entropy", "hidden", "weight"), (logps.detach(), entropy, hidden.grad, weight.grad), expected, strict=True
    ):
        assert relative_error(value, truth) < 6e-3, name  # logits are rounded to bfloat16, as in the model's own forward


def test_token_logps_compile_once_for_any_number_of_targets():
    torch._dynamo.reset()
    for round_, share in enumerate((0.5, 0.9, 0.1, 0.0, 1.0)):
        hidden, weight, targets, _ = head_example(1000, 64, 500, share)
        with torch._dynamo.config.patch(error_on_recompile=round_ > 0):
            token_logps(hidden, weight, targets, compile=True).sum().backward()


def test_head_gradient_is_summed_in_float32():
    torch.manual_seed(0)
    left = torch.randn(4096, 1000, device=DEVICE).bfloat16()
    right = torch.randn(4096, 64, device=DEVICE).bfloat16()
    total = torch.zeros(1000, 64, device=DEVICE)
    for chunk in range(0, 4096, 64):
        _add_outer_product(total, left[chunk : chunk + 64], right[chunk : chunk + 64])
    assert relative_error(total, left.double().T @ right.double()) < 1e-5


def test_memory_of_a_real_vocabulary():
    """Full logits of 8,192 tokens are 5 GB in float32, and again for their gradient."""
    hidden, weight, targets, _ = head_example(8192, 1024, 151_936, share=1.0)

    def step():
        hidden.grad = weight.grad = None
        token_logps(hidden, weight, targets).sum().backward()

    step()
    assert peak_gib(step) < 2.5


# ---- compiled layers ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["no-checkpoint", "checkpoint-outside", "checkpoint-inside"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm_moe_dsa"])
def test_compiled_layers_are_one_graph_and_compile_once(tiny_dir, family, where):
    """Load and balancing term included. GLM: rows whose segments the indexer need not choose from."""
    torch._dynamo.reset()
    options = {"index_topk": 512, "first_k_dense_replace": 0} if family == "glm_moe_dsa" else {}
    path = tiny_dir(family, num_hidden_layers=2, **options)
    results = []
    for compiled in (False, True):
        model = build(path, "packed", torch.bfloat16, DEVICE)
        wrapped = LogpModel(model, router_stats=RouterStats(model, family_of(model.config), with_logits=True))
        for index, layer in enumerate(model.model.layers):
            if compiled and where != "checkpoint-inside":
                layer.compile(fullgraph=True)
            if where != "no-checkpoint":
                layer = checkpoint_wrapper(layer, preserve_rng_state=False)
            if compiled and where == "checkpoint-inside":
                layer.compile(fullgraph=True)
            model.model.layers[index] = layer
        losses = []
        for round_, lengths in enumerate(((200, 56), (256,), (100, 9, 147), (1,) * 256, (30, 226))):
            input_ids, targets, coefficients = row(lengths)
            inputs = on_device(inputs_of(input_ids, lengths) | {"max_length_q": 256, "max_length_k": 256})
            with torch._dynamo.config.patch(error_on_recompile=compiled and round_ > 1):
                output = wrapped(inputs, targets.to(DEVICE), num_tokens=250)
                ((output.logps * coefficients.to(DEVICE)).sum() + 10 * output.aux_loss).backward()
            losses.append(output.logps.sum().item())
            if family != "llama":
                assert (wrapped.router_stats.load().sum(1) == 500).all()
        gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
        results.append((torch.tensor(losses), gradient.cpu()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-2, atol=1.0)
    # Rounding flips a route now and then in the tiny router; a layer compiled wrongly is off by more than its own size.
    assert relative_error(results[1][1], results[0][1].double()) < 0.25
