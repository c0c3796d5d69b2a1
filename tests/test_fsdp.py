"""Sharded training equals plain training: loss, gradients, gathered weights, on any number of ranks and micro-batches."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from common import attention, dist
from common.checkpoint import FlatShard
from common.families import family_of
from common.fsdp import Precision, ShardedModel, load_and_shard, model_name
from common.logprobs import LogpModel
from common.router import RouterStats
from common.skeleton import build_skeleton
from common.tensor_files import Checkpoint
from common.weights import Converter
from sft.train import forward_backward

FAMILIES = ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm_moe_dsa", "llama"]


def build(path: str, compute: torch.dtype = torch.float32, master: torch.dtype = torch.float32, **options) -> ShardedModel:
    attention.register()
    skeleton = build_skeleton(path, attn_implementation="packed")
    attention.prepare(skeleton)
    family = family_of(skeleton.config)
    stats = RouterStats(skeleton, family, with_logits=True)
    return load_and_shard(
        skeleton,
        Converter(skeleton, Checkpoint(path)),
        Precision(master, compute),
        wrap_root=lambda model: LogpModel(model, router_stats=stats),
        **options,
    )


class Batch:
    """A packed row as forward_backward needs it."""

    def __init__(self, lengths: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        self.input_ids = torch.randint(5, 250, (1, total), generator=generator)
        self.targets = self.input_ids.roll(-1, 1)
        ends = torch.tensor(lengths).cumsum(0)
        self.targets[0, ends - 1] = -100
        self.targets[0, ends[0] // 2 : ends[0]] = -100  # very uneven counts of learned tokens
        self.weights = torch.where(self.targets == -100, 0.0, 1.0 + seed % 3)
        self.cu_seq_lens = torch.cat([torch.zeros(1, dtype=torch.long), ends]).int()
        self.num_tokens, self.longest = total, max(lengths)
        self.positions = torch.cat([torch.arange(n) for n in lengths])[None]
        self.seq_idx = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].int()

    def to(self, device):
        return self

    def model_inputs(self) -> dict:
        return {
            "input_ids": self.input_ids,
            "position_ids": self.positions,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
            "seq_idx": self.seq_idx,
            "use_cache": False,
        }


WINDOW = [[3], [40, 9], [17, 2, 30], [5, 4]]  # one micro-batch each; 2 to 46 learned tokens


# One run of one rank and one of two, over all families: starting processes is what takes time.
RUNS = {family: (family, {}) for family in FAMILIES} | {"kept": ("qwen3_moe", {"gradient_checkpointing": False})}


def _step(path: str, options: dict):
    """Loss and whole gradients of the window, split over the ranks there are."""
    model = build(path, **options)
    batches = [Batch(lengths, seed) for seed, lengths in enumerate(WINDOW)]
    total = sum(batch.weights.sum().item() for batch in batches)
    mine = batches[dist.rank() :: dist.world_size()]
    nll, _, load = forward_backward(model, mine, total, 0.0)
    gradients = {s.name: (s.offset, s.shape, s.parameter.grad.flatten().clone()) for s in model.trained_shards()}
    norm = model.clip_grad_norm(0.0).item()
    load = dist.all_sum(load) if load is not None else None
    return nll / total, norm, gradients, load


def _steps(paths: dict[str, str]) -> dict[str, tuple]:
    return {name: _step(paths[name], options) for name, (_, options) in RUNS.items()}


@pytest.fixture(scope="module")
def steps(tiny_dir, run_ranks):
    """steps[ranks][run] -> what each rank returned."""
    paths = {name: str(tiny_dir(family)) for name, (family, _) in RUNS.items()}
    results = {ranks: run_ranks(ranks, _steps, paths) for ranks in (1, 2)}
    return {ranks: {name: [part[name] for part in parts] for name in RUNS} for ranks, parts in results.items()}


def _assemble(results: list) -> dict[str, torch.Tensor]:
    whole = {}
    for _, _, gradients, _ in results:
        for name, (offset, shape, part) in gradients.items():
            flat = whole.setdefault(name, torch.full((shape.numel(),), float("nan")))
            flat[offset : offset + part.numel()] = part
    return whole


def _reference(path: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The same loss by plain transformers, every conversation alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    batches = [Batch(lengths, seed) for seed, lengths in enumerate(WINDOW)]
    total = sum(batch.weights.sum() for batch in batches)
    loss = 0.0
    for batch in batches:
        bounds = batch.cu_seq_lens.tolist()
        for a, b in zip(bounds, bounds[1:], strict=False):
            logits = model(input_ids=batch.input_ids[:, a:b], use_cache=False).logits[0]
            nll = torch.nn.functional.cross_entropy(logits, batch.targets[0, a:b], ignore_index=-100, reduction="none")
            loss = loss + (nll * batch.weights[0, a:b]).sum() / total
    loss.backward()
    return loss.item(), {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_packed_step_equals_plain_transformers(tiny_dir, steps, family):
    loss, gradients = _reference(str(tiny_dir(family)))
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    one, two = steps[1][family], steps[2][family]
    for results in (one, two):
        for result in results:
            assert result[0] == pytest.approx(loss, rel=2e-6)
            assert result[1] == pytest.approx(norm, rel=1e-5)
        whole = _assemble(results)
        assert set(whole) == {name for name in gradients if ".indexer." not in name}
        for name, gradient in whole.items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-3, atol=2e-6), (name, (gradient - gradients[name]).abs().max())
    if one[0][3] is not None:  # expert counts do not depend on the ranks, nor on recomputation
        assert torch.equal(one[0][3], two[0][3])
        assert one[0][3].sum(1).tolist() == [2.0 * sum(map(sum, WINDOW))] * len(one[0][3])


def test_checkpointing_changes_nothing(steps):
    recomputed, kept = steps[2]["qwen3_moe"], steps[2]["kept"]
    assert kept[0][0] == recomputed[0][0]
    first, second = _assemble(kept), _assemble(recomputed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _e5():
    """Figures of facts E5: (sum of NLL, tokens) of each micro-batch."""
    micro = [[(2.0, 4), (3.0, 2)], [(1.0, 1), (6.0, 9)]][dist.rank()]
    parameter = torch.nn.Parameter(torch.ones(()))

    class Stub:
        def __init__(self, total, tokens):
            self.total, self.tokens, self.num_tokens = total, tokens, tokens
            self.weights, self.targets = torch.ones(1, tokens), None

        def to(self, device):
            return self

        def model_inputs(self):
            return self

    def model(batch, targets, num_tokens):
        from common.logprobs import LogpOutput

        return LogpOutput(-parameter * torch.full((batch.tokens,), batch.total / batch.tokens), None, torch.zeros(()), None)

    nll, _, _ = forward_backward(model, [Stub(*m) for m in micro], 16.0, 0.0)
    return nll / 16.0, dist.all_sum(parameter.grad).item() / dist.world_size()  # what FSDP's average makes of it


def test_uneven_tokens_give_the_global_mean(run_ranks):
    for loss, gradient in run_ranks(2, _e5):
        assert loss == pytest.approx(0.75, abs=1e-7)
        assert gradient == pytest.approx(0.75, abs=1e-7)


def _gathered(path: str):
    model = build(path, compute=torch.bfloat16)
    named, casted = {}, {}
    for index in range(len(model.units)):
        named |= {name: tensor.clone() for name, tensor in model.gather_unit(index).items()}
        casted |= {name: tensor.dtype for name, tensor in model.gather_unit(index, torch.bfloat16).items()}
    return named, casted


@pytest.mark.parametrize("family", ["qwen3_moe", "glm_moe_dsa"])
def test_gathered_units_are_the_checkpoint(tiny_dir, run_ranks, family):
    path = str(tiny_dir(family))
    skeleton = build_skeleton(path, attn_implementation="eager")
    converter = Converter(skeleton, Checkpoint(path))
    truth = converter.read([name for unit in converter.units for name in unit.model_names])
    for named, casted in run_ranks(2, _gathered, path):
        assert set(named) == set(truth)
        for name, tensor in named.items():
            assert torch.equal(tensor.float(), truth[name].float()), name
        kept = {name for name, dtype in casted.items() if dtype == torch.float32}
        assert kept == {name for name in truth if family == "glm_moe_dsa" and ".mlp.gate." in name}


def test_names_are_those_of_the_model():
    wrapped = "_fsdp_wrapped_module.model.model.layers.3._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.gate._fsdp_wrapped_module.weight"
    assert model_name(wrapped) == "model.layers.3.mlp.gate.weight"
    assert model_name("model.lm_head.weight") == "lm_head.weight"


def test_flat_shard_shares_memory_and_tells_its_place():
    tensor = torch.arange(4.0)
    shard = FlatShard(tensor, offset=6, total=20)
    assert shard.size() == torch.Size([20])
    chunk = shard.__create_chunk_list__()[0]
    assert (chunk.offsets, chunk.sizes) == (torch.Size([6]), torch.Size([4]))
    more = torch.zeros(2)
    shard.add(more, 14)
    assert [(c.offsets[0], c.sizes[0]) for c in shard.__create_chunk_list__()] == [(6, 4), (14, 2)]
    assert [item.index.offset for item in shard.__create_write_items__("x", None)] == [torch.Size([6]), torch.Size([14])]
    shard.__get_tensor_shard__(MetadataIndex("x", torch.Size([6]))).fill_(7.0)
    shard.__get_tensor_shard__(MetadataIndex("x", torch.Size([14]))).fill_(8.0)
    assert tensor.tolist() == [7.0] * 4
    assert more.tolist() == [8.0] * 2
