"""Experts in parts compute what the whole computes; checkpoints and exports of some experts; frozen weights on fewer ranks; masks."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common import checkpoint, dist, experts, export
from common.checkpoint import Base, SavedParameters, TrainState
from common.config import ModelArguments, TrainArguments
from common.experts import SplitExperts, propose
from common.fsdp import Precision
from common.optim import AdamW
from common.skeleton import build_skeleton
from common.tensor_files import Checkpoint
from common.units import Options, make_plan
from common.weights import Converter, Loader
from sft.train import forward_backward
from tests.test_freeze import build, whole
from tests.test_fsdp import WINDOW, Batch


def split_copy(whole_experts, trained, num_units=1):
    split = SplitExperts(whole_experts, trained, num_units)
    for part, ids in split.parts():
        for leaf in part._parameters:
            part._parameters[leaf] = torch.nn.Parameter(getattr(whole_experts, leaf).detach()[list(ids)].clone())
    return split


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "glm_moe_dsa"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_parts_compute_what_the_whole_does(tiny_dir, family, implementation):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir(family), dtype=torch.float32, experts_implementation=implementation)
    block = model.model.layers[1].mlp.experts
    torch.manual_seed(0)
    hidden = torch.randn(7, 64, requires_grad=True)
    index = torch.stack([torch.randperm(12)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, requires_grad=True)
    expected = block(hidden, index, weights)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [hidden, weights, block.gate_up_proj, block.down_proj], gradient)
    unused = sorted(set(range(12)) - set(index.flatten().tolist()))
    assert unused  # a part of these only gets no token
    for trained, units in (((10, 2, 11), 1), (unused[:1], 1), ((0, 1, 2, 3, 4), 4), (range(12), 3), ((), 2)):
        split = split_copy(block, trained, units)
        assert max(len(ids) for ids in split.ids.values()) <= math.ceil(12 / units)
        output = split(hidden, index, weights)
        assert torch.allclose(output, expected, rtol=1e-5, atol=1e-6)
        parts = [part for part, _ in split.parts()]
        leaves = [p for part in parts for p in (part.gate_up_proj, part.down_proj)]
        got = torch.autograd.grad(output, [hidden, weights, *leaves], gradient)  # fails where a part is not in the graph
        assert torch.allclose(got[0], wanted[0], rtol=1e-4, atol=1e-6)
        assert torch.allclose(got[1], wanted[1], rtol=1e-4, atol=1e-6)
        for number, (_, ids) in enumerate(split.parts()):
            for offset in range(2):
                assert torch.allclose(got[2 + 2 * number + offset], wanted[2 + offset][list(ids)], rtol=1e-4, atol=1e-6)


def test_rows_of_parts():
    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.down_proj = torch.nn.Parameter(torch.empty(7, 4, 2, device="meta"))

    split = SplitExperts(Whole(), [6, 1, 3, 4], num_units=3)
    assert split.ids == {"frozen0": (0, 2, 5), "trained0": (1, 3, 4), "trained1": (6,)}
    assert split.rows("trained1") == ((1, 3, 4, 6), 3)
    assert split.rows("trained0") == ((1, 3, 4, 6), 0)
    assert split.rows("frozen0") == ((0, 2, 5), 0)


def test_loading_gives_each_part_its_rows(tiny_dir):
    from common import freeze
    from common.families import family_of

    folder = tiny_dir("qwen3_moe")
    skeleton = build_skeleton(folder, attn_implementation="eager")
    converter, family = Converter(skeleton, Checkpoint(folder)), family_of(skeleton.config)
    truth = converter.read(["model.layers.1.mlp.experts.gate_up_proj"])["model.layers.1.mlp.experts.gate_up_proj"]
    selection = freeze.select(skeleton, family, trainable="experts", expert_mask={1: [10, 2]})
    make_plan(skeleton, converter, Precision(), Options(selection, family))
    loader = Loader(converter)
    for unit in converter.units:
        loader.load_unit(unit)
    loader.finish()
    parts = dict(skeleton.get_submodule("model.layers.1.mlp.experts").named_children())
    assert parts["trained0"].gate_up_proj.dtype == torch.float32 and parts["trained0"].gate_up_proj.requires_grad
    assert torch.equal(parts["trained0"].gate_up_proj, truth[[2, 10]].float())
    assert parts["frozen0"].gate_up_proj.dtype == torch.bfloat16 and not parts["frozen0"].gate_up_proj.requires_grad
    assert torch.equal(parts["frozen0"].gate_up_proj, truth[[0, 1, 3, 4, 5, 6, 7, 8, 9, 11]])


# ----------------------------------------------------------------------------------------------------------------------------------
# Resume, export, frozen weights on fewer ranks

MASK = {1: [10, 2, 11], 3: [0]}
SELECTING = {"trainable": "experts", "expert_mask": MASK}


def _train(path, folder, steps, resume=False, save=False, selecting=None, rank_batches=True, **options):
    """Losses of `steps` steps, and the trained rows after them."""
    model = build(path, selecting or SELECTING, **options)
    model.remember_frozen()
    optimizer = AdamW(model.trained_shards(), ModelArguments(path), TrainArguments("o", weight_decay=0.1))
    base = Base(path, checkpoint.fingerprint(path))
    start = 0
    if resume:
        state, _ = checkpoint.load(checkpoint.find(Path(folder), "auto"), model, optimizer, base)
        start = state.step
    losses = []
    for step in range(start, start + steps):
        batches = [Batch(lengths, seed + 4 * step) for seed, lengths in enumerate(WINDOW)]
        total = sum(batch.weights.sum().item() for batch in batches)
        nll, _, _ = forward_backward(model, batches[dist.rank() :: dist.world_size()], total, 0.0)
        losses.append((nll / total, model.clip_grad_norm(1.0).item()))
        optimizer.step(1e-2)
        optimizer.zero_grad()
    model.check_frozen()
    if save:
        checkpoint.save(Path(folder), model, optimizer, TrainState(start + steps), base, {}, keep=1)
    rows = [(s.name, s.offset, s.shape, s.experts, s.tensor.clone()) for s in model.trained_shards()]
    gathered = {}
    for index in range(len(model.units)):
        gathered |= {name: tensor.clone() for name, tensor in model.gather_unit(index, torch.bfloat16).items()}
    return losses, {"gradients": rows}, gathered


def _four_ranks(path, fp8_path, folder):
    world = _train(path, f"{folder}/world", 4)
    halves = _train(path, f"{folder}/halves", 2, save=True, frozen_shard_ranks=2)
    resumed = _train(path, f"{folder}/halves", 2, resume=True, frozen_shard_ranks=2, expert_units_per_layer=3)
    alone = _train(path, f"{folder}/alone", 1, frozen_shard_ranks=1)
    quantised = [
        _train(fp8_path, f"{folder}/fp8", 1, selecting={"trainable": "attention"}, frozen_shard_ranks=ranks)[:2] for ranks in (None, 2)
    ]
    error = None
    try:
        build(path, SELECTING, frozen_shard_ranks=3)
    except ValueError as wrong:
        error = str(wrong)
    return world, halves, resumed, alone, quantised, error


@pytest.fixture(scope="module")
def four(tiny_dir, run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    path, fp8_path = str(tiny_dir("qwen3_moe")), str(tiny_dir("glm_moe_dsa", fp8=True))
    return folder, run_ranks(4, _four_ranks, path, fp8_path, str(folder), ranks_per_node=2)


def test_frozen_weights_on_fewer_ranks_change_nothing(four):
    """Frozen on groups of two ranks (or of one), trained on all four: losses, norms, weights and resume equal all-world."""
    _, results = four
    for world, halves, resumed, alone, quantised, error in results:
        assert [loss for loss, _ in halves[0] + resumed[0]] == pytest.approx([loss for loss, _ in world[0]], rel=1e-6)
        assert [norm for _, norm in halves[0] + resumed[0]] == pytest.approx([norm for _, norm in world[0]], rel=1e-5)
        assert alone[0][0] == pytest.approx(world[0][0], rel=1e-6)
        assert quantised[0][0][0] == pytest.approx(quantised[1][0][0], rel=1e-6)
        assert "3 ranks do not divide the 4 ranks" in error
    everything, again = (whole([result[i][1] for result in results]) for i in (0, 2))
    assert set(everything) == {f"model.layers.{layer}.mlp.experts.{leaf}" for layer in (1, 3) for leaf in ("gate_up_proj", "down_proj")}
    for name, rows in everything.items():
        assert torch.allclose(again[name], rows, rtol=1e-4, atol=1e-6), name


def test_gathered_units_hold_trained_and_frozen_experts(four, tiny_dir):
    folder = tiny_dir("qwen3_moe")
    converter = Converter(build_skeleton(folder, attn_implementation="eager"), Checkpoint(folder))
    truth = converter.read([name for unit in converter.units for name in unit.model_names])
    rows = whole([result[2][1] for result in four[1]])
    for result in four[1]:
        gathered = result[2][2]
        assert set(gathered) == set(truth)
        for name, tensor in gathered.items():
            expected = truth[name].clone()
            if name in rows:
                ids = sorted(MASK[int(name.split(".")[2])])
                expected[ids] = rows[name].view(len(ids), *expected.shape[1:]).bfloat16()
                assert not torch.equal(expected, truth[name])
            assert torch.equal(tensor, expected), name


def _other_mask(path, folder):
    messages = []
    for mask in ({1: [10, 2, 11], 3: [1]}, {1: [10, 2, 11]}):
        try:
            _train(path, folder, 1, resume=True, selecting={"trainable": "experts", "expert_mask": mask})
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_one_rank_resumes_and_exports(four, tiny_dir, run_ranks, tmp_path):
    """The checkpoint that four ranks wrote, in parts, is one rank's too; another mask is refused; only trained experts' bytes change."""
    folder, results = four
    path = tiny_dir("qwen3_moe")
    losses, rows, _ = run_ranks(1, _train, str(path), str(folder / "halves"), 2, True)[0]
    assert losses == [(pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)) for loss, norm in results[0][0][0][2:]]
    other = run_ranks(1, _other_mask, str(path), str(folder / "halves"))[0]
    assert "another expert_mask: other experts of ['model.layers.3" in other[0]
    assert "other trained parameters" in other[1]

    saved = SavedParameters(checkpoint.find(folder / "halves", "auto"))
    name = "model.layers.1.mlp.experts.down_proj"
    assert saved.experts(name) == (2, 10, 11)
    tensor = saved.read(name)
    assert tensor.shape == (3, 64, 48) and tensor.dtype == torch.float32
    export.export_checkpoint(saved.folder, tmp_path / "out")
    before, after = ({n: t for file in f.glob("*.safetensors") for n, t in load_file(file).items()} for f in (path, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {n for n, t in before.items() if not torch.equal(t, after[n])}
    assert changed == {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer, ids in MASK.items()
        for expert in ids
        for part in ("gate", "up", "down")
    }
    assert torch.equal(after["model.layers.1.mlp.experts.10.down_proj.weight"], tensor[1].bfloat16())
    assert torch.equal(after["model.layers.1.mlp.experts.2.up_proj.weight"], saved.read(name.replace("down", "gate_up"))[0, 48:].bfloat16())


def test_fused_base_gets_the_trained_rows(tiny_dir, tmp_path):
    folder = tiny_dir("qwen3_moe", experts="fused")
    converter = Converter(build_skeleton(folder, attn_implementation="eager"), Checkpoint(folder))
    name = "model.layers.2.mlp.experts.down_proj"
    exporter = export.Exporter(converter, converter.checkpoint, tmp_path / "out", trained={name: (3, 10)})
    rows = torch.randn(2, 64, 48)
    for index, unit in enumerate(converter.units):
        exporter.write_unit(index, {name: rows} if name in unit.model_names else {})
    exporter.finish()
    before, after = ({n: t for file in f.glob("*.safetensors") for n, t in load_file(file).items()} for f in (folder, tmp_path / "out"))
    expected = before[name].clone()
    expected[[3, 10]] = rows.bfloat16()
    assert torch.equal(after.pop(name), expected)
    assert all(torch.equal(t, before[n]) for n, t in after.items())
    with pytest.raises(ValueError, match="no place for these trained tensors"):
        export.Exporter(converter, converter.checkpoint, tmp_path / "b", trained={"model.layers.9.x": None})


# ----------------------------------------------------------------------------------------------------------------------------------
# Counts and masks

COUNTS = {
    "model": "m",
    "data": ["d"],
    "tokens": 10,
    "layers": {
        "1": {"count": [4, 9, 1, 6], "weight": [5.0, 1.0, 1.0, 1.0]},
        "12": {"count": [10, 0, 0, 10], "weight": [1.0, 1.0, 1.0, 1.0]},
    },
}


def test_masks_from_counts():
    by_layer = propose(COUNTS, 2, "layer", "count")
    assert by_layer.experts == {1: [1, 3], 12: [0, 3]}
    assert by_layer.covered(1) == pytest.approx(0.75)
    assert propose(COUNTS, 1, "layer", "weight").experts == {1: [0], 12: [0]}  # among equals the lower number
    assert propose(COUNTS, 3, "all", "count").experts == {1: [1], 12: [0, 3]}
    assert propose(COUNTS, 1, "all", "weight").experts == {1: [0]}
    with pytest.raises(ValueError, match="between 1 and the 4 experts of a layer"):
        propose(COUNTS, 5, "layer", "count")
    with pytest.raises(ValueError, match="between 1 and the 8 experts in all"):
        propose(COUNTS, 9, "all", "count")


def test_select_writes_mask_statistics_and_picture(tmp_path, capsys):
    counts, output = tmp_path / "counts.json", tmp_path / "new" / "mask.json"
    counts.write_text(json.dumps(COUNTS))
    arguments = ["select", "--counts", str(counts), "--top_k", "2", "--scope", "layer", "--by", "count", "--output", str(output)]
    assert experts.main(arguments) == 0
    assert json.loads(output.read_text()) == {"1": [1, 3], "12": [0, 3]}
    statistics = json.loads(output.with_suffix(".stats.json").read_text())
    assert statistics["covered"] == pytest.approx((0.75 + 1.0) / 2)
    assert statistics["layers"]["1"]["shares"] == [0.2, 0.45, 0.05, 0.3]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "4 experts in 2 layers, which receive 87.5% of the routing" in capsys.readouterr().out
    counts.write_text("[]")
    assert experts.main(arguments) == 2
    assert "is not a file of `count`" in capsys.readouterr().err


def test_counting_equals_the_routers_of_plain_transformers(tiny_dir, launch, tmp_path):
    """Two ranks, an uneven number of bins, a config for training whose mask does not exist yet; real tokens only."""
    folder, rows = tiny_dir("glm_moe_dsa"), tmp_path / "rows.jsonl"
    texts = [("one two three", "four five six seven"), ("red", "green blue"), ("What is it?", "A river in the north. " * 3)]
    rows.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in texts))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model_name_or_path: {folder}\ntrain_files: [{rows}]\nmax_length: 64\npacking: false\ntrainable: experts\ndata_workers: 1\n"
        f"expert_mask: {tmp_path}/none.json\nlearning_rate: 1e-5\ncompute_dtype: float32\n"
    )
    launch("common.experts", "count", "--config", config, "--output", tmp_path / "counts.json", ranks=2)
    counts = json.loads((tmp_path / "counts.json").read_text())

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = {layer: torch.zeros(2, 12) for layer in (1, 2)}
    for layer, table in expected.items():

        def hook(module, inputs, output, table=table):
            _, weights, indices = output
            table[0].scatter_add_(0, indices.flatten(), torch.ones(indices.numel()))
            table[1].scatter_add_(0, indices.flatten(), weights.flatten())

        model.model.layers[layer].mlp.gate.register_forward_hook(hook)
    tokens = 0
    for prompt, completion in texts:
        ids = [*tokenizer(prompt).input_ids, *tokenizer(completion).input_ids, tokenizer.eos_token_id]
        tokens += len(ids)
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
    assert counts["tokens"] == tokens
    assert list(counts["layers"]) == ["1", "2"]
    for layer, table in expected.items():
        assert counts["layers"][str(layer)]["count"] == table[0].int().tolist()
        assert counts["layers"][str(layer)]["weight"] == pytest.approx(table[1].tolist(), abs=1e-3)


def test_a_dense_model_has_no_experts_to_count(tiny_dir, launch, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    arguments = ["--model_name_or_path", tiny_dir("llama"), "--train_files", rows, "--data_workers", 1, "--output", tmp_path / "c.json"]
    done = launch("common.experts", "count", *arguments, check=False)
    assert done.returncode != 0
    assert "it has no experts to count" in done.stderr
