"""Expert load and the load-balancing term: known values, padding, layers, ranks, activation checkpointing, FSDP."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM

from common import tiny
from common.families import Family, family_of
from common.logprobs import LogpModel
from common.router import RouterStats

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [1.5, 0.5, 0.0, -0.5], [0.0, 2.0, 1.0, 0.0], [2.0, 0.0, 1.0, 0.5]])
BALANCED_ALIKE = 2.594775  # of LOGITS, top 2 of 4 experts; 2.770343 without the last token


class FixedRouter(nn.Module):
    """Gives the logits it was made with, and their top 2, as transformers' routers do: (logits, scores, indices)."""

    def __init__(self, logits, sigmoid=False):
        super().__init__()
        self.weight = nn.Parameter(logits.clone())
        if sigmoid:
            self.e_score_correction_bias = torch.zeros(logits.shape[1])

    def forward(self, rows):
        logits = self.weight[rows]
        scores, indices = logits.topk(2)
        return logits, scores, indices


class FixedModel(nn.Module):
    """One "mlp.gate" per layer."""

    def __init__(self, *logits, **kwargs):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.ModuleDict({"gate": FixedRouter(x, **kwargs)})}) for x in logits)

    def forward(self, rows):
        """The scores' sum stands for the last hidden state."""
        return sum(layer["mlp"]["gate"](rows)[1].sum() for layer in self.layers)


def run(model, rows, num_tokens=None):
    num_tokens = len(rows) if num_tokens is None else num_tokens
    stats = RouterStats(model, Family(), with_logits=True)
    with stats.recording(len(rows), num_tokens, torch.device("cpu")):
        hidden = model(rows)
    hidden, loss = stats.aux_loss(hidden, num_tokens)
    return stats, loss, hidden


def float64_gradient(num_tokens, sigmoid):
    """Of the term for LOGITS, by autograd."""
    logits = LOGITS.double().requires_grad_()
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    counts = torch.zeros(4, dtype=torch.float64).index_add_(
        0, LOGITS[:num_tokens].topk(2)[1].flatten(), torch.ones(2 * num_tokens).double()
    )
    probabilities = (scores / scores.sum(-1, keepdim=True))[:num_tokens].mean(0)
    (4 * counts / num_tokens * probabilities).sum().backward()
    return logits.grad


def test_known_value():
    stats, loss, _ = run(FixedModel(LOGITS), torch.arange(4))
    assert loss.item() == pytest.approx(BALANCED_ALIKE, abs=1e-6)
    assert stats.load().tolist() == [[3.0, 3.0, 2.0, 0.0]]


@pytest.mark.parametrize("num_tokens", [4, 3])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_gradient(sigmoid, num_tokens):
    model = FixedModel(LOGITS, LOGITS, sigmoid=sigmoid)
    _, loss, hidden = run(model, torch.arange(4), num_tokens)
    (0.3 * loss + 0 * hidden).backward()
    for layer in model.layers:  # the mean over two equal layers
        gradient = layer["mlp"]["gate"].weight.grad.double()
        torch.testing.assert_close(gradient, 0.15 * float64_gradient(num_tokens, sigmoid), atol=1e-7, rtol=1e-5)


def test_the_term_adds_to_the_gradient_of_the_scores():
    """Whatever of the two outputs the loss uses, and also with a term left over from an earlier step."""
    model = FixedModel(LOGITS)
    router = model.layers[0]["mlp"]["gate"]
    term, scores = float64_gradient(4, sigmoid=False), torch.zeros(4, 4).scatter(1, LOGITS.topk(2)[1], 1.0).double()
    for with_term, with_scores in ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
        router.weight.grad = None
        _, loss, hidden = run(model, torch.arange(4))
        total = [value for value, used in ((loss, with_term), (2 * hidden, with_scores)) if used]
        sum(total).backward()
        expected = with_term * term + 2 * with_scores * scores
        torch.testing.assert_close(router.weight.grad.double(), expected, atol=1e-6, rtol=1e-5)


def test_padding_is_left_out():
    stats, loss, _ = run(FixedModel(LOGITS), torch.arange(4), num_tokens=3)
    assert loss.item() == pytest.approx(2.770343, abs=1e-6)
    assert stats.load().sum().item() == 6.0


def test_layers_are_averaged_not_pooled():
    stats, loss, _ = run(FixedModel(LOGITS, LOGITS.flip(1)), torch.arange(4))
    assert loss.item() == pytest.approx(BALANCED_ALIKE, abs=1e-6)  # pooled over the layers it would be 1.948
    assert stats.load().tolist() == [[3.0, 3.0, 2.0, 0.0], [0.0, 2.0, 3.0, 3.0]]


def test_balanced_routing_gives_top_k():
    logits = torch.full((4, 4), -10.0)
    for token in range(4):
        logits[token, [token, (token + 1) % 4]] = 10.0
    assert run(FixedModel(logits), torch.arange(4))[1].item() == pytest.approx(2.0, abs=1e-5)


def test_sigmoid_routers_are_normalised():
    scores = torch.sigmoid(LOGITS.double())
    expected = 4 * (torch.tensor([0.75, 0.75, 0.5, 0.0]).double() * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
    _, loss, _ = run(FixedModel(LOGITS, sigmoid=True), torch.arange(4))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and abs(loss.item() - BALANCED_ALIKE) > 0.05


def test_only_the_recorded_forward_counts():
    model = FixedModel(LOGITS)
    stats, *_ = run(model, torch.arange(4))
    before = stats.load()
    model(torch.arange(4))  # the same length, as in recomputation
    model(torch.arange(2))  # another length, as in generation
    assert torch.equal(stats.load(), before)


def test_a_dense_model_has_no_load():
    stats = RouterStats(nn.Linear(2, 2), Family(), with_logits=True)
    assert stats.load() is None and not stats.with_logits


# ---- in real models ----------------------------------------------------------------------------------------------------------------------


def build(family, num_layers=3):
    torch.manual_seed(0)
    config = tiny.config(family, num_hidden_layers=num_layers)
    model = AutoModelForCausalLM.from_config(config.get_text_config(), dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.08)
    return model


def batch(rank=0, num_tokens=24):
    generator = torch.Generator().manual_seed(rank)
    input_ids = torch.randint(300, (1, num_tokens), generator=generator)
    targets = input_ids.roll(-1)
    targets[0, -1] = -100
    return {"input_ids": input_ids, "position_ids": torch.arange(num_tokens)[None], "use_cache": False}, targets


def loss_of(model, rank, world_size, num_valid):
    output = model(*batch(rank), num_tokens=num_valid[rank])
    return -output.logps[: num_valid[rank]].sum() / sum(num_valid[:world_size]) + output.aux_loss, output


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "glm_moe_dsa"])
def test_activation_checkpointing_counts_once_and_changes_no_gradient(family):
    results = []
    for checkpointing in (False, True):
        model = build(family, num_layers=4 if family == "qwen3_next" else 3)
        wrapped = LogpModel(model, router_stats=RouterStats(model, family_of(model.config), with_logits=True))
        if checkpointing:
            for index, layer in enumerate(model.model.layers):
                model.model.layers[index] = checkpoint_wrapper(layer)
        loss, output = loss_of(wrapped, 0, 1, [20])
        loss.backward()
        load = wrapped.router_stats.load()
        assert torch.equal(load, output.expert_load) and (load.sum(1) == 20 * model.config.num_experts_per_tok).all()
        results.append((loss.item(), load, {plain_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    assert results[0][2].keys() == results[1][2].keys()
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(results[1][2][name], gradient, atol=1e-7, rtol=1e-5, msg=name)


def sharded_gradients():
    """One of two ranks with uneven padding: full-shard FSDP over checkpointed layers."""
    rank, cpu = dist.get_rank(), torch.device("cpu")
    model = build("qwen3_moe")
    wrapped = LogpModel(model, router_stats=RouterStats(model, family_of(model.config), with_logits=True))
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FSDP(checkpoint_wrapper(layer), device_id=cpu, use_orig_params=True)
    root = FSDP(wrapped, device_id=cpu, use_orig_params=True)
    loss, output = loss_of(root, rank, 2, [20, 11])
    (loss * 2).backward()  # FSDP averages over the ranks
    with FSDP.summon_full_params(root, with_grads=True):
        gradients = {plain_name(name): parameter.grad.clone() for name, parameter in root.named_parameters()}
    return loss.item(), output.aux_loss.item(), output.expert_load, gradients


def plain_name(name):
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def test_two_ranks_equal_one_process(run_ranks):
    ranks = run_ranks(2, sharded_gradients)

    # One process, both rows: counts of both enter f, the probabilities of both enter P.
    model = build("qwen3_moe")
    wrapped = LogpModel(model, router_stats=RouterStats(model, family_of(model.config), with_logits=True))
    num_valid, counts, masses, nll = [20, 11], 0, 0, 0
    for rank in range(2):
        output = wrapped(*batch(rank), num_tokens=num_valid[rank])
        assert torch.equal(output.expert_load, ranks[rank][2])
        logits = model(**batch(rank)[0], output_router_logits=True).router_logits
        counts = counts + output.expert_load
        masses = masses + torch.stack([torch.softmax(x[: num_valid[rank]], -1).sum(0) for x in logits])
        nll = nll - output.logps[: num_valid[rank]].sum() / 31
    aux_loss = (12 * (counts / 31 * masses / 31).sum(1)).mean()
    (nll + aux_loss).backward()
    assert ranks[0][1] + ranks[1][1] == pytest.approx(aux_loss.item(), rel=1e-5)
    assert ranks[0][0] + ranks[1][0] == pytest.approx((nll + aux_loss).item(), rel=1e-5)
    for name, parameter in wrapped.named_parameters():
        for result in ranks:
            torch.testing.assert_close(result[3][name], parameter.grad, atol=2e-6, rtol=1e-4, msg=name)
