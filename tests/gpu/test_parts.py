"""Training parts on two GPUs: FP8 and split experts against everything trained in bf16, over NCCL.

    python -m pytest -v -rs tests/gpu/test_parts.py

Two CUDA GPUs, two minutes. The same functions run on two CPU ranks in tests/test_freeze.py, in fp32 and with tight limits; here the
reference is this trainer with everything trained, whose own gradients tests/test_fsdp.py holds against plain transformers.
"""

import pytest
import torch

from common import dist, fp8
from common.config import ModelArguments, TrainArguments
from common.optim import AdamW
from sft.train import forward_backward
from tests.test_fp8 import dequantised_dir
from tests.test_freeze import MASK, UPPER, Gathers, build, whole
from tests.test_fsdp import WINDOW, Batch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
COMPUTE = torch.bfloat16
EXPERTS = {"trainable": "experts", "expert_mask": MASK}
# Run -> (family, options of tiny.make, what trains, options of sharding)
RUNS = {
    "attention": ("qwen3_moe", {}, UPPER, {}),
    "detached": ("qwen3_moe", {}, {"trainable": "attention"}, {"detach_moe_output": True}),
    "experts": ("qwen3_moe", {}, EXPERTS, {}),
    "experts in units": ("qwen3_moe", {}, EXPERTS, {"expert_units_per_layer": 3}),
    "experts, frozen alone": ("qwen3_moe", {}, EXPERTS, {"frozen_shard_ranks": 1}),
    "fp8 attention": ("glm_moe_dsa", {"fp8": True}, {"trainable": "attention", "trainable_layers": "1-"}, {}),
    "fp8 experts": ("glm_moe_dsa", {"fp8": True}, EXPERTS, {}),
    "fp8 in units": ("glm_moe_dsa", {"fp8": True}, {"trainable": "attention"}, {"expert_units_per_layer": 2}),
    "fp8 kept": ("qwen3_moe", {"fp8": True}, EXPERTS, {"gradient_checkpointing": False}),
}


class OnDevice(Batch):
    """A packed row that moves to this rank's GPU."""

    def to(self, device):
        for name, value in vars(self).items():
            if torch.is_tensor(value):
                setattr(self, name, value.to(device))
        return self


def _step(path, selecting, options):
    model = build(path, selecting, compute=COMPUTE, **options)
    model.remember_frozen()
    gathers = Gathers()
    gathers.root = model.root
    batches = [OnDevice(lengths, seed) for seed, lengths in enumerate(WINDOW)]
    total = sum(batch.weights.sum().item() for batch in batches)
    nll, _, _ = forward_backward(model, batches[dist.rank() :: dist.world_size()], total, 0.0)
    gradients = [(s.name, s.offset, s.shape, s.experts, s.parameter.grad.flatten().cpu()) for s in model.trained_shards()]
    seen = gathers.close()
    optimizer = AdamW(model.trained_shards(), ModelArguments(path), TrainArguments("o", weight_decay=0.1))
    optimizer.step(1e-2)
    checked = model.check_frozen()
    dtypes = {s.tensor.dtype for s in model.local_shards()}
    return {
        "loss": nll / total,
        "gradients": gradients,
        "gathers": seen,
        "experts": model.trained_experts(),
        "checked": checked,
        "dtypes": dtypes,
    }


def _steps(runs):
    return {name: _step(*run) for name, run in runs.items()}


@pytest.fixture(scope="module")
def steps(tiny_dir, run_ranks, tmp_path_factory):
    runs, references = {}, {}
    for name, (family, making, selecting, options) in RUNS.items():
        folder = tiny_dir(family, **making)
        runs[name] = (str(folder), selecting, options)
        if (family, bool(making)) not in references:
            bf16 = dequantised_dir(folder, tmp_path_factory.mktemp("bf16") / "model") if making else folder
            references[family, bool(making)] = (str(bf16), {}, {})
    runs |= {f"reference {family} {quantised}": run for (family, quantised), run in references.items()}
    ranks = run_ranks(2, _steps, runs)
    return {name: [rank[name] for rank in ranks] for name in runs}


@pytest.mark.parametrize("run", [name for name in RUNS if name != "detached"])
def test_gradients_are_those_of_full_training(steps, run):
    family, making, selecting, _ = RUNS[run]
    reference = steps[f"reference {family} {bool(making)}"]
    assert steps[run][0]["loss"] == pytest.approx(reference[0]["loss"], rel=5e-3)
    gradients, expected, experts = whole(steps[run]), whole(reference), steps[run][0]["experts"]
    errors = {}
    for name, gradient in gradients.items():
        full = expected[name]
        if experts[name] is not None:
            assert experts[name] == tuple(sorted(MASK[int(name.split(".")[2])]))
            full = full.view(12, -1)[list(experts[name])].flatten()
        errors[name] = ((gradient - full).norm() / full.norm()).item()
    worst = max(errors, key=errors.get)
    print(f"{run}: largest relative difference of a gradient {errors[worst]:.3g} ({worst})")
    # Noise of bf16; routing that flips on a near-tie moves single experts' gradients more.
    assert sorted(errors.values())[len(errors) // 2] < 3e-2
    assert errors[worst] < 0.3
    assert (fp8.DTYPE in steps[run][0]["dtypes"]) == bool(making)
    assert steps[run][0]["checked"][0] > 5


def test_backward_gathers_only_what_it_needs(steps):
    below = [name for name in steps["attention"][0]["gathers"]["backward"] if name.startswith(("model.layers.0.", "model.layers.1."))]
    assert below == []
    for run in ("attention", "experts", "fp8 attention"):
        gathers = steps[run][0]["gathers"]
        for name in set(gathers["forward"]):
            assert gathers["backward"].count(name) <= gathers["forward"].count(name) == len(WINDOW) // 2, (run, name)
    detached = steps["detached"][0]["gathers"]
    assert any(".mlp." in name for name in detached["forward"])
    assert not any(".mlp." in name for name in detached["backward"])
