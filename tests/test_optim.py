"""Learning rates, decay groups, and what each master dtype does with small updates."""

import math

import pytest
import torch
from torch import nn

from common.config import ModelArguments, TrainArguments
from common.fsdp import LocalShard
from common.optim import BLOCK, AdamW, learning_rate


def shard(tensor: torch.Tensor, name: str = "w", shape: tuple[int, ...] | None = None) -> LocalShard:
    return LocalShard(name, torch.Size(shape or tensor.shape), nn.Parameter(tensor), tensor.view(-1), 0)


def optimizer(shards: list[LocalShard], master: str = "float32", **options) -> AdamW:
    return AdamW(shards, ModelArguments("m", master_dtype=master), TrainArguments("o", **options))


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 0, 0.25), ("cosine", 3, 1.0), ("cosine", 4, 1.0), ("cosine", 12, 0.5), ("cosine", 16, 0.5 * (1 + math.cos(math.pi * 0.75))),
        ("linear", 4, 1.0), ("linear", 12, 0.5), ("linear", 19, 1 / 16), ("constant", 0, 0.25), ("constant", 19, 1.0),
    ],
)  # fmt: skip
def test_learning_rates(schedule, step, expected):
    assert learning_rate(step, 20, 1.0, 4, schedule) == pytest.approx(expected)
    assert learning_rate(step, 20, 1.0, 0.2, schedule) == pytest.approx(expected)  # a share of the steps


def test_without_warmup_the_first_step_has_the_peak():
    assert learning_rate(0, 10, 3e-5, 0, "cosine") == 3e-5


def test_equals_torch_and_decays_matrices_only():
    torch.manual_seed(0)
    matrix, vector, gradient = torch.randn(8, 12), torch.randn(12), torch.randn(8, 12)
    shards = [shard(matrix.clone()), shard(vector.clone(), "norm")]
    ours = optimizer(shards, weight_decay=0.1)
    reference = nn.Parameter(matrix.clone())
    plain = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        shards[0].parameter.grad, shards[1].parameter.grad = gradient.clone(), torch.zeros(12)
        reference.grad = gradient.clone()
        ours.step(1e-2)
        plain.step()
        ours.zero_grad()
    assert torch.allclose(shards[0].tensor, reference.detach().view(-1), atol=1e-6)
    assert torch.equal(shards[1].tensor, vector)  # a zero gradient and no decay: not moved


def moved_share(master: str) -> tuple[float, float]:
    """Share of bf16 weights that 50 steps at 1e-6 change, and mean change over 50e-6, the change in exact arithmetic."""
    torch.manual_seed(0)
    start = (torch.randn(1024, 16) * 0.02).bfloat16().to(getattr(torch, master))
    part = shard(start.clone())
    adam = optimizer([part], master)
    for _ in range(50):
        part.parameter.grad = torch.ones_like(part.tensor).view_as(start)
        adam.step(1e-6)
    change = part.tensor.double() - start.view(-1).double()
    return (change != 0).double().mean().item(), -change.mean().item() / 50e-6


def test_fp32_masters_keep_what_bf16_loses():
    share, change = moved_share("float32")
    assert share == 1.0
    assert change == pytest.approx(1.0, rel=1e-3)
    torch.manual_seed(0)
    weights = nn.Parameter((torch.randn(1024, 16) * 0.02).bfloat16())
    start = weights.detach().clone()
    plain = torch.optim.AdamW([weights], lr=1e-6, weight_decay=0.0)
    for _ in range(50):
        weights.grad = torch.ones_like(weights)
        plain.step()
    assert (weights != start).float().mean().item() < 0.05  # why plain bf16 is not offered


def test_bf16_masters_round_stochastically_and_8bit_moments_are_kept():
    """One process for both: torchao compiles its step, which takes its time."""
    share, change = moved_share("bfloat16")
    assert 0.05 < share < 1.0
    assert change == pytest.approx(1.0, rel=0.1)  # right in the mean

    torch.manual_seed(0)
    n = 4096 + 100  # a piece of whole blocks and a rest that cannot be quantised
    start, gradient = torch.randn(n), torch.randn(n)
    part = shard(start.clone(), shape=(4, n // 4))
    adam = optimizer([part], optim="adamw_8bit")
    assert [piece.parameter.numel() for piece in adam.pieces] == [n - n % BLOCK, n % BLOCK]
    reference = nn.Parameter(start.clone())
    plain = torch.optim.AdamW([reference], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        part.parameter.grad, reference.grad = gradient.clone(), gradient.clone()
        adam.step(1e-3)
        plain.step()
    quantised = adam.moments(adam.pieces[0])["exp_avg"]
    assert quantised.codes.dtype == torch.uint8
    step = (reference.detach() - start).abs().mean()
    assert (part.tensor - reference.detach()).abs().mean() < 0.05 * step


def test_a_rank_without_elements_takes_part():
    empty = optimizer([])
    empty.step(1e-3)
    empty.zero_grad()
    assert empty.steps == 1
