"""Training parts: gradients equal those of full training, what is frozen stays as it is, backward does not enter what it need not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp._flat_param import FlatParamHandle

from common import attention, dist, fp8, freeze
from common.config import ModelArguments, TrainArguments
from common.families import family_of
from common.fsdp import Options, Precision, check_fit, load_and_shard
from common.logprobs import LogpModel
from common.optim import AdamW
from common.router import RouterStats
from common.skeleton import build_skeleton
from common.tensor_files import Checkpoint
from common.units import Kind, cut_into_units
from common.weights import Converter
from sft.train import forward_backward
from tests.test_fp8 import dequantised_dir
from tests.test_fsdp import WINDOW, Batch, _reference

UPPER = {"trainable": "attention", "trainable_layers": "2-"}
MASK = {1: [11, 2, 10], 2: [0]}
# Run -> (family, options of tiny.make, what trains, options of sharding)
RUNS = {
    "qwen3_moe attention": ("qwen3_moe", {}, UPPER, {}),
    "qwen3_next attention": ("qwen3_next", {}, UPPER, {}),
    "qwen3_5_moe attention": ("qwen3_5_moe", {}, UPPER, {}),
    "glm_moe_dsa attention": ("glm_moe_dsa", {}, UPPER, {}),
    "llama attention": ("llama", {}, UPPER, {}),
    "qwen3_moe experts": ("qwen3_moe", {}, {"trainable": "experts", "expert_mask": MASK}, {}),
    "qwen3_next experts": ("qwen3_next", {}, {"trainable": "experts", "expert_mask": MASK}, {}),
    "qwen3_5_moe experts": ("qwen3_5_moe", {}, {"trainable": "experts", "expert_mask": MASK}, {"gradient_checkpointing": False}),
    "glm_moe_dsa experts": ("glm_moe_dsa", {}, {"trainable": "experts", "expert_mask": MASK}, {}),
    "all but": ("glm_moe_dsa", {}, {"freeze_router": True, "expert_mask": MASK}, {}),
    "kept": ("qwen3_moe", {}, UPPER, {"gradient_checkpointing": False}),
    "in units": ("qwen3_moe", {}, {"trainable": "experts", "expert_mask": {1: [0, 1, 2, 3, 4, 5, 6, 9]}}, {"expert_units_per_layer": 3}),
    "fp8 attention": ("glm_moe_dsa", {"fp8": True}, {"trainable": "attention", "trainable_layers": "1-"}, {}),
    "fp8 experts": ("glm_moe_dsa", {"fp8": True}, {"trainable": "experts", "expert_mask": MASK}, {}),
    "fp8 kept": ("qwen3_moe", {"fp8": True}, {"trainable": "experts", "expert_mask": MASK}, {"gradient_checkpointing": False}),
    "fp8 units": ("qwen3_next", {"fp8": True}, {"trainable": "experts", "expert_mask": MASK}, {"expert_units_per_layer": 2}),
    "detached": ("qwen3_moe", {"mlp_only_layers": [3]}, {"trainable": "attention"}, {"detach_moe_output": True}),
    "detached kept": (
        "qwen3_moe", {"mlp_only_layers": [3]}, {"trainable": "attention"}, {"detach_moe_output": True, "gradient_checkpointing": False},
    ),
}  # fmt: skip


def build(path, selecting, compute=torch.float32, gradient_checkpointing=True, balance=False, **options):
    attention.register()
    skeleton = build_skeleton(path, attn_implementation="packed")
    attention.prepare(skeleton)
    family = family_of(skeleton.config)
    stats = RouterStats(skeleton, family, with_logits=balance)
    selection = freeze.select(skeleton, family, **selecting)
    return load_and_shard(
        skeleton,
        Converter(skeleton, Checkpoint(path)),
        Precision(torch.float32, compute),
        wrap_root=lambda model: LogpModel(model, router_stats=stats),
        gradient_checkpointing=gradient_checkpointing,
        options=Options(selection, family, **options),
    )


class Gathers:
    """Names of the first parameter of each flat parameter that is gathered while `backward` runs, and in the forward before it."""

    def __init__(self):
        self.names = {"forward": [], "backward": []}
        self.original = FlatParamHandle._all_gather_flat_param
        gathers = self

        def gather(handle, *args):
            phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            module = {id(module): name for name, module in gathers.root.named_modules()}[id(handle.flat_param._param_infos[0].module)]
            gathers.names[phase].append(f"{module}.{handle.flat_param._param_infos[0].param_name}")
            return gathers.original(handle, *args)

        FlatParamHandle._all_gather_flat_param = gather

    def close(self):
        from common.fsdp import model_name

        FlatParamHandle._all_gather_flat_param = self.original
        return {phase: [model_name(name) for name in names] for phase, names in self.names.items()}


def _step(path, selecting, options):
    model = build(path, selecting, **options)
    model.remember_frozen()
    gathers = Gathers()
    gathers.root = model.root
    batches = [Batch(lengths, seed) for seed, lengths in enumerate(WINDOW)]
    total = sum(batch.weights.sum().item() for batch in batches)
    nll, _, _ = forward_backward(model, batches[dist.rank() :: dist.world_size()], total, 0.0)
    gradients = [(s.name, s.offset, s.shape, s.experts, s.parameter.grad.flatten().clone()) for s in model.trained_shards()]
    seen = gathers.close()
    frozen_gradients = [s.name for s in model.local_shards() if not s.parameter.requires_grad and s.parameter.grad is not None]
    buffers = [
        name for name, m in model.root.named_modules() if (h := getattr(m, "_handle", None)) is not None
        and not h.flat_param.requires_grad and (h.flat_param.grad is not None or getattr(h.flat_param, "_saved_grad_shard", None) is not None)
    ]  # fmt: skip
    norm = model.clip_grad_norm(0.0).item()
    optimizer = AdamW(model.trained_shards(), ModelArguments(path), TrainArguments("o", weight_decay=0.1))
    optimizer.step(1e-2)
    state = sum(tensor.numel() for piece in optimizer.pieces for tensor in optimizer.moments(piece).values())
    checked = model.check_frozen()
    moved = {s.name for s in model.trained_shards() if s.parameter.grad is not None and s.parameter.grad.any()}
    return {
        "loss": nll / total, "norm": norm, "gradients": gradients, "gathers": seen, "frozen": frozen_gradients + buffers, "state": state,
        "checked": checked, "moved": moved, "experts": model.trained_experts(),
        "dtypes": {s.name: s.tensor.dtype for s in model.local_shards()},
    }  # fmt: skip


def _steps(paths):
    return {name: _step(paths[name], selecting, options) for name, (_, _, selecting, options) in RUNS.items()}


@pytest.fixture(scope="module")
def steps(tiny_dir, run_ranks):
    paths = {name: str(tiny_dir(family, **making)) for name, (family, making, _, _) in RUNS.items()}
    ranks = run_ranks(2, _steps, paths)
    return {name: [rank[name] for rank in ranks] for name in RUNS}


@pytest.fixture(scope="module")
def reference(tiny_dir, tmp_path_factory):
    """reference(family, **making) -> (loss, whole gradients) by plain transformers, FP8 checkpoints dequantised to fp32."""
    cache = {}

    def of(family, **making):
        key = json.dumps([family, making])
        if key not in cache:
            folder = tiny_dir(family, **making)
            if making.get("fp8"):
                folder = dequantised_dir(folder, tmp_path_factory.mktemp("dequantised") / "model")
                tensors, exact = load_file(folder / "model.safetensors"), load_file(tiny_dir(family, **making) / "model.safetensors")
                from tests.test_fp8 import by_loop

                quantised = {n: by_loop(t, exact[n + "_scale_inv"]) for n, t in exact.items() if t.dtype == fp8.DTYPE}
                save_file(tensors | quantised, folder / "model.safetensors", metadata={"format": "pt"})
            cache[key] = _reference(str(folder))
        return cache[key]

    return of


def whole(results):
    """{name: gradient [of the rows that train]} from the ranks' shards; every element from exactly one rank."""
    gradients = {}
    for result in results:
        for name, offset, shape, _, part in result["gradients"]:
            flat = gradients.setdefault(name, torch.full((shape.numel(),), float("nan")))
            assert flat[offset : offset + part.numel()].isnan().all()
            flat[offset : offset + part.numel()] = part
    return gradients


@pytest.mark.parametrize("run", [run for run in RUNS if not run.startswith("detached")])
def test_gradients_are_those_of_full_training(steps, reference, run):
    family, making, selecting, _ = RUNS[run]
    loss, expected = reference(family, **making)
    gradients = whole(steps[run])
    experts = steps[run][0]["experts"]
    layers = freeze.parse_layers(selecting.get("trainable_layers", "all"), 3 if family.startswith("glm") else 4)
    if selecting.get("trainable") == "attention":
        assert {name.split(".")[2] for name in gradients} == {str(layer) for layer in layers}
        assert all((".self_attn." in name or ".linear_attn." in name) and ".indexer." not in name for name in gradients)
    elif selecting.get("trainable") == "experts":
        wanted = {
            f"model.layers.{layer}.mlp.experts.{leaf}" for layer in selecting["expert_mask"] for leaf in ("gate_up_proj", "down_proj")
        }
        assert set(gradients) == wanted
    else:
        assert not [name for name in gradients if ".mlp.gate." in name or ".indexer." in name]
        assert {"lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"} <= set(gradients)
    squares = 0.0
    for name, gradient in gradients.items():
        full = expected[name]
        if experts[name] is not None:
            assert experts[name] == tuple(sorted(selecting["expert_mask"][int(name.split(".")[2])]))
            full = full.view(12, -1)[list(experts[name])].flatten()
        assert torch.allclose(gradient, full, rtol=1e-3, atol=3e-6), (name, (gradient - full).abs().max())
        squares += full.square().sum().item()
    for result in steps[run]:
        assert result["loss"] == pytest.approx(loss, rel=3e-6)
        assert result["norm"] == pytest.approx(squares**0.5, rel=1e-4)


@pytest.mark.parametrize("run", RUNS)
def test_frozen_is_frozen(steps, run):
    """No gradient, no optimizer state, no drift under weight decay; the optimizer's state is spread evenly."""
    results = steps[run]
    trained = sum(gradient.numel() for gradient in whole(results).values())
    assert sum(result["state"] for result in results) == 2 * trained
    for result in results:
        assert result["frozen"] == []
        assert result["checked"][0] > 5
        assert abs(result["state"] - trained) <= 2 * 16 * len(result["experts"]) + 0.02 * trained
    if "fp8" in run:
        kept = {str(dtype) for result in results for dtype in result["dtypes"].values()}
        assert "torch.float8_e4m3fn" in kept


def test_backward_gathers_only_what_it_needs(steps):
    micro_batches = len(WINDOW) // 2
    for run in ("qwen3_moe attention", "kept", "glm_moe_dsa attention", "fp8 attention"):
        gathers = steps[run][0]["gathers"]
        lowest = 1 if run == "fp8 attention" else 2
        below = [name for name in gathers["backward"] if name.startswith("model.layers.") and int(name.split(".")[2]) < lowest]
        assert below == []
        assert {int(n.split(".")[2]) for n in gathers["forward"] if n.startswith("model.layers.")} >= set(range(lowest))
        # Recomputation gathers nothing twice: once forward, once backward.
        for name in set(gathers["forward"]):
            assert gathers["forward"].count(name) == micro_batches, name
            assert gathers["backward"].count(name) <= micro_batches, name
    for run in ("detached", "detached kept"):
        gathers = steps[run][0]["gathers"]
        moe = [name for name in gathers["forward"] if ".mlp." in name and ".layers.3." not in name]
        assert len(moe) >= 3 * micro_batches
        assert [name for name in gathers["backward"] if ".mlp." in name and ".layers.3." not in name] == []
        assert any(".layers.0.self_attn." in name for name in gathers["backward"])


def test_experts_without_detaching_are_gathered_in_backward(steps):
    assert any(".mlp.experts." in name for name in steps["qwen3_moe experts"][0]["gathers"]["backward"])


@pytest.mark.parametrize("run", ["detached", "detached kept"])
def test_what_is_exact_and_what_is_not_with_detached_experts(steps, reference, run):
    """Layer 3 is dense: its attention's gradient is exact. Below it the paths through the experts are missing."""
    loss, expected = reference("qwen3_moe", mlp_only_layers=[3])
    gradients = whole(steps[run])
    assert steps[run][0]["loss"] == pytest.approx(loss, rel=2e-6)
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        if name.startswith("model.layers.3."):
            assert error < 1e-4, name
        else:
            assert error > 1e-2, name


# ----------------------------------------------------------------------------------------------------------------------------------


def _skeleton(path):
    skeleton = build_skeleton(path, attn_implementation="eager")
    return skeleton, family_of(skeleton.config)


@pytest.mark.parametrize(
    "text, expected", [("all", {0, 1, 2, 3}), ("0", {0}), ("1-2", {1, 2}), ("0,2-", {0, 2, 3}), (" 3 , 0 - 1 ", {0, 1, 3})]
)
def test_layer_lists(text, expected):
    assert freeze.parse_layers(text, 4) == expected


@pytest.mark.parametrize("text", ["4", "3-5", "2-1", "a", "", "1,,2", "-2"])
def test_wrong_layer_lists(text):
    with pytest.raises(ValueError, match="trainable_layers"):
        freeze.parse_layers(text, 4)


@pytest.mark.parametrize(
    "mask, message",
    [
        ('{"7": [0]}', "layer 7 has no routed experts .*0-3"),
        ('{"1": [12, 3]}', "layer 1 has experts 0-11, not 12"),
        ('{"1": [-1]}', "not -1"),
        ('{"1": []}', "selects no expert"),
        ("{}", "selects no expert"),
        ('{"1": [2, 2]}', "names an expert twice"),
        ('{"0": [1]}', "layer 0 is not in trainable_layers"),
        ('{"1": "2"}', "expected"),
        ("[1, 2]", "expected"),
        ('{"1": [2', "cannot read expert_mask"),
        (None, "cannot read expert_mask"),
    ],
)
def test_wrong_masks_are_errors(tiny_dir, tmp_path, mask, message):
    skeleton, family = _skeleton(tiny_dir("qwen3_moe"))
    file = tmp_path / "mask.json"
    if mask is not None:
        file.write_text(mask)
    with pytest.raises(ValueError, match=message):
        freeze.select(skeleton, family, trainable="experts", trainable_layers="1-", expert_mask=file)


def test_what_makes_no_sense_is_an_error(tiny_dir):
    llama, family = _skeleton(tiny_dir("llama"))
    with pytest.raises(ValueError, match="no routed experts"):
        freeze.select(llama, family, trainable="experts")
    glm, family = _skeleton(tiny_dir("glm_moe_dsa"))
    with pytest.raises(ValueError, match="selects no parameter"):
        freeze.select(glm, family, trainable="experts", trainable_layers="0")
    with pytest.raises(ValueError, match="layer 0 has no routed experts .*1-2"):
        freeze.select(glm, family, trainable="experts", expert_mask={0: [1]})
    with pytest.raises(ValueError, match="trains no experts"):
        freeze.select(glm, family, trainable="attention", expert_mask={1: [1]})
    with pytest.raises(ValueError, match="detach_moe_output"):
        ModelArguments("m", detach_moe_output=True)
    with pytest.raises(ValueError, match="frozen_shard_group"):
        ModelArguments("m", frozen_shard_group="rack")


def test_description_names_and_counts_what_trains(tiny_dir):
    skeleton, family = _skeleton(tiny_dir("qwen3_moe"))
    total = sum(p.numel() for p in skeleton.parameters())
    selection = freeze.select(skeleton, family, trainable="experts", expert_mask=MASK)
    text = freeze.describe(selection, skeleton)
    trained = 4 * (2 * 48 * 64 + 64 * 48)
    assert text.startswith(f"{trained:,} of {total:,} parameters train ({trained / total:.2%})")
    assert "model.layers.*.mlp.experts.gate_up_proj in layers 1-2" in text
    assert "model.layers.1.mlp.experts: experts 2, 10-11" in text
    everything = freeze.select(skeleton, family)
    assert freeze.describe(everything, skeleton).startswith(f"{total:,} of {total:,}")
    assert everything.embeddings and everything.lowest_layer == 0
    upper = freeze.select(skeleton, family, trainable_layers="2-")
    assert not {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} & upper.names
    assert upper.lowest_layer == 2 and not upper.embeddings
    assert "model.layers.2.input_layernorm.weight" in upper.names


def test_fewest_units():
    """A trained attention inside a frozen layer is one nested unit, not each frozen part of a trained layer."""
    with torch.device("meta"):
        layer = torch.nn.ModuleDict(
            {
                "attention": torch.nn.ModuleDict({"q": torch.nn.Linear(4, 4, False), "index": torch.nn.Linear(4, 4, False)}),
                "mlp": torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 2, False), "up": torch.nn.Linear(4, 8, False)}),
            }
        )
    layer.attention.__class__ = layer.mlp.__class__ = type("Block", (torch.nn.Module,), {})
    frozen, trained = Kind(False, torch.bfloat16, False), Kind(True, torch.float32, False)
    router = Kind(False, torch.float32, True)
    kinds = {"attention.q.weight": trained, "attention.index.weight": frozen, "mlp.gate.weight": router, "mlp.up.weight": frozen}
    kind, nested = cut_into_units(layer, kinds)
    assert kind == frozen
    assert nested == [("attention.q", trained), ("mlp.gate", router)]
    kind, nested = cut_into_units(layer, kinds, alone={"mlp"})
    assert nested == [("attention.q", trained), ("mlp.gate", router), ("mlp", frozen)]
    uniform = dict.fromkeys(kinds, trained)
    assert cut_into_units(layer, uniform) == (trained, [])


def test_more_than_fits_is_refused_with_figures(tiny_dir):
    skeleton, family = _skeleton(tiny_dir("qwen3_moe"))
    for name, parameter in skeleton.named_parameters():
        parameter.requires_grad_(".self_attn." in name)
    frozen = sum(2 * p.numel() for p in skeleton.parameters() if not p.requires_grad)
    trained = sum(16 * p.numel() for p in skeleton.parameters() if p.requires_grad)
    layer = sum(2 * p.numel() for n, p in skeleton.named_parameters() if n.startswith("model.layers.0."))
    check_fit(skeleton, None, 2, Precision(), capacity=frozen // 2 + trained + layer + 1)
    with pytest.raises(ValueError, match=r"frozen_shard_group: 2 does not fit: .*GiB frozen weights over 2 ranks"):
        check_fit(skeleton, None, 2, Precision(), capacity=frozen // 2 + trained + layer - 2)


def _drift(path):
    model = build(path, {"trainable": "attention"})
    model.remember_frozen()
    model.check_frozen()
    shard = next(s for s in model.local_shards() if not s.parameter.requires_grad and "experts" in s.name)
    before = shard.tensor[0].clone()
    shard.tensor[0] += 1
    try:
        model.check_frozen()
    except RuntimeError as error:
        changed = str(error)
    shard.tensor[0] = before
    buffer = next(b for n, b in model.root.named_buffers() if "e_score_correction_bias" in n)
    buffer[3] += 1e-3
    try:
        model.check_frozen()
    except RuntimeError as error:
        return changed, str(error), shard.name


def test_a_changed_byte_is_found(tiny_dir, run_ranks):
    shards, buffers, name = run_ranks(1, _drift, str(tiny_dir("glm_moe_dsa")))[0]
    assert "1 tensors that must not train" in shards and name in shards
    assert "1 tensors that must not train" in buffers and "model.layers.1.mlp.gate.e_score_correction_bias" in buffers


def _saved_bytes(path, upper=UPPER):
    """Bytes that autograd keeps for backward in one forward, by what trains; weights are not counted."""
    sizes = {}
    for name, selecting in {"all": {}, "attention": {"trainable": "attention"}, "upper": upper}.items():
        model = build(path, selecting, torch.bfloat16, gradient_checkpointing=False)
        batch, kept = Batch([40, 24], 0), {}
        flat = [module._handle.flat_param for module in model.root.modules() if getattr(module, "_handle", None) is not None]

        def pack(tensor, kept=kept, flat=flat):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in {parameter.data.untyped_storage().data_ptr() for parameter in flat}:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(batch.model_inputs(), batch.targets, num_tokens=batch.num_tokens)
        sizes[name] = sum(kept.values())
        del output
    return sizes


def test_lower_layers_keep_no_activations(tiny_dir, run_ranks):
    sizes = run_ranks(1, _saved_bytes, str(tiny_dir("qwen3_moe")))[0]
    assert sizes["upper"] < 0.62 * sizes["attention"] <= 0.62 * sizes["all"], sizes


def test_flops_of_parts(tiny_dir):
    """A frozen matrix above the lowest trained layer costs 4 a token, one below it 2; with everything trained 6."""
    from common.metrics import ModelFlops

    skeleton, family = _skeleton(tiny_dir("qwen3_moe"))
    # Active elements of a layer: attention, router, 2 of 12 experts; and the head.
    attention_size, router, experts, head = 4 * 32 * 64 * 2 + 2 * 2 * 32 * 64, 12 * 64, 2 * 3 * 48 * 64, 384 * 64
    pairs = 4 * (32 + 32)
    layer = attention_size + router + experts
    whole = ModelFlops(skeleton, family)
    assert whole.of(1, 0) == 6 * (4 * layer + head)
    assert whole.of(0, 2) == 4 * 6 * pairs
    upper = ModelFlops(skeleton, family, freeze.select(skeleton, family, **UPPER))
    assert upper.of(1, 0) == 2 * 2 * layer + 2 * (6 * attention_size + 4 * (router + experts)) + 4 * head
    assert upper.of(0, 2) == (2 * 2 + 2 * 6) * pairs
    detached = ModelFlops(skeleton, family, freeze.select(skeleton, family, **UPPER), detach_moe_output=True)
    assert detached.of(1, 0) == 2 * 2 * layer + 2 * (6 * attention_size + 2 * (router + experts)) + 4 * head
    nothing = ModelFlops(skeleton, family, freeze.select(skeleton, family, trainable="none"))
    assert nothing.of(1, 0) == 2 * (4 * layer + head)
