"""Chunked log-probabilities against the full computation in float64, forward and backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from common import logprobs
from common.families import family_of
from common.logprobs import LogpModel, chunk_gradient, chunk_statistics, head_options, token_logps
from common.router import RouterStats

TOKENS, HIDDEN, VOCAB = 96, 16, 500


def example(dtype=torch.float32, seed=0, share_with_target=0.6):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[torch.rand(TOKENS, generator=generator) > share_with_target] = -100
    coefficients = torch.randn(TOKENS, generator=generator)  # a different gradient for each token
    return hidden.requires_grad_(), weight.requires_grad_(), targets, coefficients


def reference(hidden, weight, targets, coefficients, temperature=1.0, logit_scale=1.0, softcap=None):
    """Everything at once in float64: logps, entropy, gradients of sum(coefficients * logps)."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.T * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.log_softmax(logits / temperature, dim=-1)
    valid = targets != -100
    logps = torch.where(valid, distribution.gather(1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    (logps * coefficients).sum().backward()
    entropy = torch.where(valid, -(distribution.exp() * distribution).sum(-1), 0.0).detach()
    return logps.detach(), entropy, hidden.grad, weight.grad


def relative_error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


OPTIONS = [
    {},
    {"temperature": 0.7},
    {"softcap": 3.0, "temperature": 1.3},
    {"logit_scale": 0.25},
    {"logit_scale": 0.5, "softcap": 2.0, "temperature": 0.6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000, None])
def test_equals_the_full_computation(options, chunk_tokens):
    hidden, weight, targets, coefficients = example()
    expected = reference(hidden, weight, targets, coefficients, **options)
    logps, entropy = token_logps(hidden, weight, targets, chunk_tokens=chunk_tokens, with_entropy=True, **options)
    (logps * coefficients).sum().backward()
    assert logps.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
    for value, wanted in zip((logps.detach(), entropy, hidden.grad, weight.grad), expected, strict=True):
        assert relative_error(value, wanted) < 3e-6
    assert (logps[targets == -100] == 0).all() and (entropy[targets == -100] == 0).all()


def test_gradcheck_in_float64():
    hidden, weight, targets, _ = example(torch.float64)
    hidden, weight = hidden.detach()[:9, :5].requires_grad_(), weight.detach()[:11, :5].requires_grad_()
    targets = torch.tensor([3, -100, 0, 10, -100, 5, 5, 1, 2])
    torch.autograd.gradcheck(lambda h, w: token_logps(h, w, targets, temperature=0.8, softcap=4.0, chunk_tokens=2), (hidden, weight))


def test_bf16_head_gradient_is_summed_in_fp32_and_rounded_once():
    hidden, weight, targets, coefficients = example(torch.bfloat16, share_with_target=1.0)
    (token_logps(hidden, weight, targets, chunk_tokens=1) * coefficients).sum().backward()
    # The same bf16 logits and bf16 logit gradients as the chunks use, their outer product in float64.
    logits = (hidden.detach() @ weight.detach().T).double()
    one_hot = torch.nn.functional.one_hot(targets, VOCAB).double()
    grad_logits = (coefficients[:, None] * (one_hot - torch.softmax(logits, -1))).to(torch.bfloat16)
    exact = grad_logits.double().T @ hidden.detach().double()
    assert weight.grad.dtype == torch.bfloat16
    once = (exact.to(torch.bfloat16).double() - exact).norm()
    assert (weight.grad.double() - exact).norm() < 1.05 * once
    summed_in_bf16 = torch.zeros_like(weight)
    for row, state in zip(grad_logits, hidden.detach(), strict=True):
        summed_in_bf16 += torch.outer(row, state)
    assert (summed_in_bf16.double() - exact).norm() > 2 * once  # what the test protects against is visible at this size


@pytest.mark.parametrize("train_hidden, train_weight", [(True, False), (False, True), (False, False)])
def test_frozen_sides_get_no_gradient(train_hidden, train_weight):
    hidden, weight, targets, coefficients = example()
    _, _, grad_hidden, grad_weight = reference(hidden, weight, targets, coefficients)
    hidden.requires_grad_(train_hidden), weight.requires_grad_(train_weight)
    logps = token_logps(hidden, weight, targets, chunk_tokens=10)
    assert logps.requires_grad == (train_hidden or train_weight)
    if logps.requires_grad:
        (logps * coefficients).sum().backward()
    for tensor, trains, expected in ((hidden, train_hidden, grad_hidden), (weight, train_weight, grad_weight)):
        assert relative_error(tensor.grad, expected) < 3e-6 if trains else tensor.grad is None


def test_no_targets_give_zeros_that_still_reach_backward():
    hidden, weight, targets, _ = example()
    logps, entropy = token_logps(hidden, weight, torch.full_like(targets, -100), with_entropy=True)
    assert torch.equal(logps, torch.zeros(TOKENS)) and torch.equal(entropy, torch.zeros(TOKENS))
    logps.sum().backward()  # under FSDP a rank without targets must take part in every reduction
    assert torch.equal(hidden.grad, torch.zeros_like(hidden)) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_compiled_chunks_have_one_shape_for_any_number_of_targets(monkeypatch):
    """The compiled bodies are replaced by the plain ones: what counts is the shapes they would be compiled for."""
    shapes = set()

    def statistics(output, *args):
        shapes.add(tuple(output.shape))
        return chunk_statistics(output, *args)

    monkeypatch.setattr(logprobs, "_compiled_bodies", lambda: (statistics, chunk_gradient))
    for share in (0.0, 0.02, 0.5, 1.0):
        hidden, weight, targets, coefficients = example(share_with_target=share)
        expected = reference(hidden, weight, targets, coefficients)
        logps = token_logps(hidden, weight, targets, chunk_tokens=20, compile=True)
        (logps * coefficients).sum().backward()
        for value, wanted in zip((logps.detach(), hidden.grad, weight.grad), (expected[0], *expected[2:]), strict=True):
            torch.testing.assert_close(value.double(), wanted, atol=1e-5, rtol=1e-5)
    assert shapes == {(20, VOCAB)}


def test_temperature_must_be_positive():
    hidden, weight, targets, _ = example()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_logps(hidden, weight, targets, temperature=0.0)


class NoBigTensor(TorchDispatchMode):
    """Fails on any result of `limit` elements or more."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.limit:
                raise AssertionError(f"{function} made a tensor of shape {tuple(tensor.shape)}")
        return result


@pytest.mark.parametrize("share_with_target", [0.1, 0.5, 1.0])
def test_no_tensor_of_a_quarter_of_the_logits(share_with_target):
    hidden, weight, targets, _ = example(share_with_target=share_with_target)
    limit = TOKENS * VOCAB // 4
    with pytest.raises(AssertionError, match="made a tensor of shape"), NoBigTensor(limit):
        torch.log_softmax(hidden @ weight.T, dim=-1)
    with NoBigTensor(limit):
        logps, entropy = token_logps(hidden, weight, targets, with_entropy=True)
        logps.sum().backward()
    assert weight.grad.abs().sum() > 0 and entropy.sum() > 0


# ---- LogpModel ---------------------------------------------------------------------------------------------------------------------------


def tiny_moe(tied=False, seed=0):
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=160,
        hidden_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=12,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def row(num_tokens=40, vocab=160):
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(vocab, (1, num_tokens), generator=generator)
    targets = input_ids.roll(-1)
    targets[0, -1] = -100
    targets[0, :7] = -100
    return {"input_ids": input_ids, "position_ids": torch.arange(num_tokens)[None], "use_cache": False}, targets


@pytest.mark.parametrize("tied", [False, True])
def test_logp_model_equals_the_models_own_logits(tied):
    model = tiny_moe(tied)
    inputs, targets = row()
    logits = model(**inputs).logits[0] / 0.9
    expected = torch.log_softmax(logits.double(), -1)
    valid = targets[0] != -100
    loss = -expected[valid, targets[0][valid]].mean()
    loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    output = LogpModel(model)(inputs, targets, temperature=0.9, with_entropy=True)
    assert relative_error(output.logps[valid].detach(), expected[valid, targets[0][valid]].detach()) < 1e-5
    assert relative_error(output.entropy[valid], -(expected.exp() * expected).sum(-1)[valid].detach()) < 1e-5
    assert output.aux_loss.item() == 0.0 and output.expert_load is None
    (-output.logps.sum() / valid.sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-6, rtol=1e-4, msg=name)


def test_logp_model_gives_load_and_aux_loss():
    model = tiny_moe()
    inputs, targets = row()
    stats = RouterStats(model, family_of(model.config), with_logits=True)
    output = LogpModel(model, router_stats=stats)(inputs, targets, num_tokens=33)
    assert output.expert_load.shape == (2, 12) and output.expert_load.sum(1).tolist() == [66.0, 66.0]
    logits = model(**inputs, output_router_logits=True).router_logits
    expected = 0.0
    for layer, counts in zip(logits, output.expert_load, strict=True):
        expected += 12 * (counts / 33 * torch.softmax(layer[:33].double(), -1).mean(0)).sum() / 2
    assert output.aux_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    output.aux_loss.backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)


def test_logp_model_refuses_what_it_would_get_wrong():
    model = tiny_moe()
    with pytest.raises(ValueError, match="no language-model head"):
        LogpModel(model.model)
    model.lm_head = torch.nn.Linear(32, 160)
    with pytest.raises(ValueError, match="only a Linear without bias"):
        LogpModel(model)
    config = LlamaConfig()
    config.logits_scaling = 8.0
    with pytest.raises(ValueError, match="logits_scaling = 8.0"):
        head_options(config)


def test_softcap_and_scale_come_from_the_config():
    config = LlamaConfig()
    assert head_options(config) == {"logit_scale": 1.0, "softcap": None}
    config.final_logit_softcapping, config.logit_scale = 30.0, 0.0625
    assert head_options(config) == {"logit_scale": 0.0625, "softcap": 30.0}
