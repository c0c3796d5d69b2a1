"""The configs that train parts, as tiny runs of the command line: training, stopping, resuming, exporting."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from common import fp8
from tests.conftest import ROOT, read_metrics

# What a run on two CPU ranks needs other than a run on 96 GPUs.
SMALL = ["--max_length", 96, "--data_workers", 1, "--gradient_accumulation_steps", 1, "--num_train_epochs", 1, "--save_steps", 2]
SMALL += ["--learning_rate", 1e-2, "--compile", "false", "--seed", 3]

RUNS = {
    "glm5_fp8": ("glm_moe_dsa", {"fp8": True, "mtp": True, "max_shard_bytes": 1_000_000}, ["--frozen_shard_group", "node"]),
    "qwen3_235b_experts": ("qwen3_moe", {}, []),
    "qwen3_235b_attention": ("qwen3_moe", {}, ["--trainable_layers", "2-", "--detach_moe_output", "true"]),
}


def tensors_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("config", RUNS)
def test_config_trains_exactly_its_part(tiny_dir, launch, tmp_path, config):
    """The export changes what trained and nothing else; two steps and two more after a resume equal four."""
    family, making, options = RUNS[config]
    base = tiny_dir(family, **making)
    mask = tmp_path / "mask.json"
    mask.write_text('{"1": [2, 10], "3": [11]}')
    common = ["--config", ROOT / f"sft/configs/{config}.yaml", "--model_name_or_path", base, "--train_files", ROOT / "env/demo.jsonl"]
    common += [*SMALL, *options, "--max_steps", 4, *(["--expert_mask", mask] if "experts" in config else [])]
    launch("sft.train", *common, "--output_dir", tmp_path / "a", ranks=2)
    log = (tmp_path / "a/run.log").read_text()
    assert re.search(r"[\d,]+ of [\d,]+ parameters train \(", log)
    assert "frozen weights and buffers are unchanged" in log
    assert ("the gradient is an approximation" in log) == (config == "qwen3_235b_attention")

    before, after = tensors_of(base), tensors_of(tmp_path / "a/final")
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    changed = {n for n, t in before.items() if not torch.equal(t.view(torch.uint8), after[n].view(torch.uint8))}
    if config == "qwen3_235b_experts":
        assert changed == {
            f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            for layer, expert in ((1, 2), (1, 10), (3, 11))
            for part in ("gate", "up", "down")
        }
    else:
        assert all(".self_attn." in name and ".indexer." not in name and ".layers.78." not in name for name in changed)
        layers = {int(name.split(".")[2]) for name in changed}
        assert layers == ({2, 3} if family == "qwen3_moe" else {0, 1, 2})
    if config == "glm5_fp8":
        assert {before[n].dtype for n in changed if n.endswith("_proj.weight")} == {fp8.DTYPE}
        assert "trained tensors were quantised to FP8: relative error" in log
        assert (tmp_path / "a/final/config.json").read_bytes() == (base / "config.json").read_bytes()

    # The same run, ended after two steps and resumed, beside one that was not.
    common += ["--lr_scheduler_type", "constant", "--warmup_steps", 0, "--export_final", "false"]
    if config == "qwen3_235b_experts":  # one resume is enough: the others' differ in nothing that resume touches
        launch("sft.train", *common, "--output_dir", tmp_path / "b", "--max_steps", 2, ranks=2)
        launch("sft.train", *common, "--output_dir", tmp_path / "b", ranks=2)
        launch("sft.train", *common, "--output_dir", tmp_path / "c", ranks=2)
        assert read_metrics(tmp_path / "b") == read_metrics(tmp_path / "c")
        content = json.loads((tmp_path / "b/checkpoint-000004/parameters.json").read_text())
        assert content["experts"]["model.layers.1.mlp.experts.down_proj"] == [2, 10]
        assert content["parameters"]["model.layers.1.mlp.experts.down_proj"][0] == [2, 64, 48]
