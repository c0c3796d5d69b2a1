"""Names, tensors and loading: streamed load == from_pretrained, the way back == the files, and every mismatch is an error with names."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import Chunk, PrefixChange, WeightConverter
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from common import tensor_files, tiny
from common.skeleton import cut_config, find_decoder_layers
from common.tensor_files import read_header
from common.weights import Checkpoint, Converter, Loader, build_skeleton, load_config

MTP_FAMILIES = ("qwen3_next", "qwen3_5_moe", "glm_moe_dsa")
FORMS = [
    dict(experts="per_expert", tie_word_embeddings=False),
    dict(experts="per_expert", tie_word_embeddings=True, max_shard_bytes=150_000),
    dict(experts="fused", tie_word_embeddings=False, max_shard_bytes=150_000),
]


def prepare(folder, **options) -> Converter:
    model = build_skeleton(folder, attn_implementation="sdpa", **options)
    return Converter(model, Checkpoint(folder))


def load(folder, dtype_of=None, **options):
    """The converter of a checkpoint and its model, loaded unit by unit."""
    converter = prepare(folder, **options)
    loader = Loader(converter, dtype_of=dtype_of)
    for unit in converter.units:
        loader.load_unit(unit)
    loader.finish()
    return converter, converter.model.eval()


def reference(folder):
    """The model as transformers loads it; GLM's router in float32 also where transformers would round it to bfloat16."""
    if "e_score_correction_bias" in (GlmMoeDsaPreTrainedModel._keep_in_fp32_modules_strict or ()):
        GlmMoeDsaPreTrainedModel._keep_in_fp32_modules_strict = ["e_score_correction_bias", "gate.weight"]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")


def assert_same_tensors(model, expected) -> None:
    for kind in ("state_dict", "named_buffers"):
        ours, theirs = dict(getattr(model, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 60)[None], use_cache=False).logits


def change(source: Path, target: Path, edit) -> Path:
    """A copy of a one-file checkpoint with `edit(tensors)` applied to its {name: tensor}."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


# ----------------------------------------------------------------------------------------------------------------------------------
# Both ways, every family


@pytest.mark.parametrize("form", FORMS, ids=["per_expert", "per_expert-tied-sharded", "fused-sharded"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_load_equals_from_pretrained_and_way_back_equals_files(tiny_dir, family, form):
    if family == "llama" and form["experts"] == "fused":
        pytest.skip("dense")
    folder = tiny_dir(family, mtp=family in MTP_FAMILIES, **form)
    converter, model = load(folder)
    expected = reference(folder)
    assert_same_tensors(model, expected)
    assert torch.equal(logits(model), logits(expected))
    tied = form["tie_word_embeddings"]
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied

    on_disk = converter.checkpoint.read(converter.checkpoint.names)
    back, state = {}, dict(model.state_dict())
    for unit in converter.units:
        back |= converter.to_checkpoint({name: state[name] for name in unit.model_names})
    assert set(back) | set(converter.untouched) == set(on_disk) and set(back).isdisjoint(converter.untouched)
    for name, tensor in back.items():
        assert tensor.dtype == on_disk[name].dtype and torch.equal(tensor, on_disk[name]), name
    assert {name.split(".")[0] for name in converter.untouched} <= {"mtp", "model"}
    if family in MTP_FAMILIES:
        assert any("mtp." in name or "layers.78." in name for name in converter.untouched)
    if family == "qwen3_5_moe":
        assert any(name.startswith("model.visual.") for name in converter.untouched)

    again = converter.to_model({name: on_disk[name] for name in back})
    assert set(again) == {name for unit in converter.units for name in unit.model_names}
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.items())


def test_expert_ten_comes_after_nine(tiny_dir):
    folder = tiny_dir("qwen3_moe")
    converter = prepare(folder)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    fused = converter.read([name])[name]
    disk = load_file(folder / "model.safetensors")
    for expert in (1, 9, 10, 11):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(fused[expert, :48], disk[f"{prefix}.gate_proj.weight"])
        assert torch.equal(fused[expert, 48:], disk[f"{prefix}.up_proj.weight"])
    assert len(converter.disk_names(name)) == 24
    assert converter.disk_names("model.norm.weight") == ["model.norm.weight"]


def test_units_are_layers_then_root(tiny_dir):
    units = prepare(tiny_dir("qwen3_5_moe", mtp=True)).units
    assert [unit.name for unit in units] == [f"model.layers.{i}" for i in range(4)] + [""]
    assert units[-1].model_names == ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    assert all(name.startswith("model.layers.2.") for name in units[2].model_names)


def test_vision_checkpoint_keeps_its_prefix(tiny_dir):
    converter = prepare(tiny_dir("qwen3_5_moe"))
    name = "model.layers.0.input_layernorm.weight"
    assert converter.disk_names(name) == ["model.language_model.layers.0.input_layernorm.weight"]
    assert prepare(tiny_dir("qwen3_5_moe_text")).disk_names(name) == [name]


def test_glm_router_and_bias_are_float32(tiny_dir):
    converter, model = load(tiny_dir("glm_moe_dsa"))
    gate = model.get_submodule("model.layers.1.mlp.gate")
    assert gate.weight.dtype == torch.float32
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in converter.units[1].model_names


def test_what_a_model_class_keeps_in_float32(tiny_dir, monkeypatch):
    monkeypatch.setattr(LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", ["self_attn.o_*.weight"])
    _, model = load(tiny_dir("llama"))
    assert model.model.layers[2].self_attn.o_proj.weight.dtype == torch.float32
    assert_same_tensors(model, reference(tiny_dir("llama")))


def test_glm_layers_that_share_an_indexer_have_none_on_disk(tmp_path):
    folder = tiny.make("glm_moe_dsa", tmp_path / "model", num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    converter, model = load(folder)
    assert not any("indexer" in name for name in converter.units[1].model_names)
    assert any("indexer" in name for name in converter.units[2].model_names)
    assert_same_tensors(model, reference(folder))


# ----------------------------------------------------------------------------------------------------------------------------------
# Models that no table of ours knows

OTHER_MODELS = {
    # Renames `block_sparse_moe` to `mlp`, w1/w3/w2 to gate/up/down.
    "mixtral": dict(num_local_experts=12, num_experts_per_tok=2, intermediate_size=48, head_dim=16),
    # Splits a fused query_key_value: one checkpoint tensor, three model tensors.
    "sarvam_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, intermediate_size=96, head_dim=16),
    # Concatenates three convolutions; also experts of its own kind.
    "olmo_hybrid": dict(intermediate_size=96, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16),
    # Buffers that are computed by the model class itself (embedding scale, two kinds of rotary frequencies), tied by default.
    "gemma3_text": dict(intermediate_size=96, head_dim=16, sliding_window=8),
}  # fmt: skip


def make_other(model_type: str, folder: Path) -> Path:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    sizes = dict(vocab_size=96, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    config = CONFIG_MAPPING[model_type](**sizes, **OTHER_MODELS[model_type])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", OTHER_MODELS)
def test_other_models(tmp_path, model_type):
    make_other(model_type, tmp_path)
    converter, model = load(tmp_path)
    assert_same_tensors(model, reference(tmp_path))
    back, state = {}, dict(model.state_dict())
    for unit in converter.units:
        back |= converter.to_checkpoint({name: state[name] for name in unit.model_names})
    on_disk = converter.checkpoint.read(converter.checkpoint.names)
    assert back.keys() == on_disk.keys()
    assert all(torch.equal(back[name], on_disk[name]) for name in on_disk)


def test_only_conversions_that_matched_are_reverted(tiny_dir, tmp_path, monkeypatch):
    """A table that also knows the checkpoint under another prefix must not put that prefix into what is written."""

    def fuse(tensors):
        for i in range(4):
            parts = [tensors.pop(f"model.layers.{i}.mlp.{part}.weight") for part in ("gate_proj", "up_proj")]
            tensors[f"model.layers.{i}.mlp.fused.weight"] = torch.cat(parts)

    table = lambda model: [  # noqa: E731
        PrefixChange(prefix_to_remove="language_model", model_prefix="model"),
        WeightConverter("mlp.fused.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)]),
    ]
    monkeypatch.setattr("common.weights.get_model_conversion_mapping", table)
    source = tiny_dir("llama")
    converter, model = load(change(source, tmp_path / "fused", fuse))
    assert_same_tensors(model, reference(source))
    state, unit = dict(model.state_dict()), converter.units[2]
    back = converter.to_checkpoint({name: state[name] for name in unit.model_names})
    on_disk = load_file(tmp_path / "fused/model.safetensors")
    assert set(back) == {name for name in on_disk if ".layers.2." in name}
    assert all(torch.equal(tensor, on_disk[name]) for name, tensor in back.items())


def test_decoder_layer_is_named_in_the_error(tiny_dir):
    with pytest.raises(ValueError, match="0 modules of class Qwen9Layer.*num_hidden_layers is 4.*LlamaDecoderLayer"):
        build_skeleton(tiny_dir("llama"), attn_implementation="sdpa", decoder_layer="Qwen9Layer")
    model = build_skeleton(tiny_dir("llama"), attn_implementation="sdpa", decoder_layer="LlamaDecoderLayer")
    assert find_decoder_layers(model, "LlamaDecoderLayer") == [f"model.layers.{i}" for i in range(4)]


# ----------------------------------------------------------------------------------------------------------------------------------
# Tied embeddings, dtypes, cut models


def test_tied_head_under_either_name_or_both(tiny_dir, tmp_path):
    source = tiny_dir("llama", tie_word_embeddings=True)
    expected = reference(source)

    def only_head(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def both(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    for label, edit, names in (("head", only_head, ["lm_head.weight"]), ("both", both, ["model.embed_tokens.weight", "lm_head.weight"])):
        converter, model = load(change(source, tmp_path / label, edit))
        assert_same_tensors(model, expected)
        assert converter.disk_names("model.embed_tokens.weight") == converter.disk_names("lm_head.weight") == names
        assert set(converter.to_checkpoint({"model.embed_tokens.weight": model.lm_head.weight})) == set(names)

    def different(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(RuntimeError, match="ties lm_head.weight to model.embed_tokens.weight.*tie_word_embeddings to false"):
        load(change(source, tmp_path / "different", different))


def test_parameters_are_cast_once_and_keep_requires_grad(tiny_dir):
    folder = tiny_dir("glm_moe_dsa")
    converter = prepare(folder)
    frozen = "model.layers.1.self_attn.o_proj.weight"
    converter.model.get_parameter(frozen).requires_grad_(False)
    loader = Loader(converter, dtype_of=lambda name: torch.float32)
    for unit in converter.units:
        loader.load_unit(unit)
    loader.finish()
    expected = dict(reference(folder).state_dict())
    for name, tensor in converter.model.state_dict(keep_vars=True).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name].float()), name
        assert tensor.requires_grad == (name != frozen and isinstance(tensor, torch.nn.Parameter)), name


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "glm_moe_dsa"])
def test_first_layers_only(tiny_dir, family):
    folder = tiny_dir(family, mtp=family in MTP_FAMILIES)
    converter, model = load(folder, num_layers=2)
    whole = dict(reference(folder).state_dict())
    state = dict(model.state_dict())
    assert len(converter.units) == 3
    assert {name for name in whole if not any(f".layers.{i}." in name for i in (2, 3))} == set(state)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in state.items())
    assert {name for name in converter.cut if ".layers.2." in name} == {name for name in converter.checkpoint.names if ".layers.2." in name}
    assert not any("mtp." in name or "layers.78." in name for name in converter.untouched)
    assert any(name.startswith("model.visual.") for name in converter.untouched) == (family == "qwen3_5_moe")
    used = {disk for unit in converter.units for name in unit.model_names for disk in converter.disk_names(name)}
    assert used | set(converter.cut) | set(converter.untouched) == set(converter.checkpoint.names)


def test_cut_config_shortens_lists_and_switches_mtp_off(tiny_dir):
    raw = json.loads((tiny_dir("qwen3_5_moe", mtp=True) / "config.json").read_text())
    text = cut_config(raw, 3)["text_config"]
    assert text["num_hidden_layers"] == 3 and text["mtp_num_hidden_layers"] == 0
    assert text["layer_types"] == raw["text_config"]["layer_types"][:3] == ["linear_attention"] * 3
    assert raw["text_config"]["num_hidden_layers"] == 4
    assert text["rope_parameters"]["mrope_section"] == [4, 2, 2]
    assert cut_config(raw, 4) == raw
    with pytest.raises(ValueError, match="5 layers were asked for; the checkpoint has 4"):
        cut_config(raw, 5)


# ----------------------------------------------------------------------------------------------------------------------------------
# What does not fit


def test_everything_that_does_not_fit_is_one_error_before_any_read(tiny_dir, tmp_path, monkeypatch):
    def damage(tensors):
        del tensors["model.layers.1.mlp.experts.10.up_proj.weight"]
        del tensors["model.layers.2.input_layernorm.weight"]
        for expert in range(12):
            del tensors[f"model.layers.3.mlp.experts.{expert}.gate_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].T
        tensors["model.layers.0.mlp.experts.2.down_proj.weight"] = tensors["model.layers.0.mlp.experts.2.down_proj.weight"].T
        tensors["model.layers.0.mlp.experts.12.down_proj.weight"] = tensors["model.layers.0.mlp.experts.3.down_proj.weight"]
        tensors["model.layers.0.surprise.weight"] = torch.zeros(3)
        tensors["model.layers.4.input_layernorm.weight"] = torch.zeros(64)
        tensors["model.layers.2.mlp.experts.down_proj"] = torch.zeros(12, 64, 48)
        tensors["model.layers.1.mlp.experts.5.down_proj.weight"] = tensors["model.layers.1.mlp.experts.5.down_proj.weight"].float()

    folder = change(tiny_dir("qwen3_moe"), tmp_path / "damaged", damage)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("tensors were read"))
    with pytest.raises(ValueError) as error:
        prepare(folder)
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert f"{folder} does not fit Qwen3MoeForCausalLM" in lines[0]
    expected = [
        "missing: model.layers.1.mlp.experts.10.up_proj.weight",
        "missing: model.layers.2.input_layernorm.weight [64]",
        "missing: rows 0 to 48 of expert 7 of model.layers.3.mlp.experts.gate_up_proj",
        "shape: model.layers.0.self_attn.q_proj.weight is [64, 128], model.layers.0.self_attn.q_proj.weight needs [128, 64]",
        "shape: model.layers.0.mlp.experts.2.down_proj.weight is [48, 64], model.layers.0.mlp.experts.down_proj needs [64, 48]",
        "unexpected: model.layers.0.mlp.experts.12.down_proj.weight, but model.layers.0.mlp.experts.down_proj has 12 experts",
        "unexpected: model.layers.0.surprise.weight [3]",
        "unexpected: model.layers.4.input_layernorm.weight [64]",
        "mixed: the tensors of model.layers.1.mlp.experts.down_proj have dtypes torch.bfloat16, torch.float32",
    ]
    assert [line for line in expected if line not in lines] == []
    assert any(line.startswith("twice: model.layers.2.mlp.experts.down_proj is in ") for line in lines)
    assert len(lines) == 1 + len(expected) + 11 + 1  # the other 11 gate projections, and "twice"


def test_only_a_foreign_expert_is_on_disk(tiny_dir, tmp_path):
    def damage(tensors):
        last = tensors["model.layers.0.mlp.experts.11.down_proj.weight"]
        for expert in range(12):
            del tensors[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"]
        tensors["model.layers.0.mlp.experts.40.down_proj.weight"] = last

    with pytest.raises(ValueError) as error:
        prepare(change(tiny_dir("qwen3_moe"), tmp_path / "m", damage))
    assert "unexpected: model.layers.0.mlp.experts.40.down_proj.weight" in str(error.value)
    assert "missing: model.layers.0.mlp.experts.down_proj [12, 64, 48]" in str(error.value)


def test_conversion_that_lacks_a_part_names_it(tmp_path):
    folder = make_other("olmo_hybrid", tmp_path / "base")
    part = next(name for name in Checkpoint(folder).names if name.endswith("linear_attn.k_conv1d.weight"))
    damaged = change(folder, tmp_path / "damaged", lambda tensors: tensors.pop(part))
    with pytest.raises(ValueError) as error:
        prepare(damaged)
    target = part.replace("k_conv1d", "conv1d")
    q, v = part.replace("k_conv1d", "q_conv1d"), part.replace("k_conv1d", "v_conv1d")
    assert f"conversion: {q}, {v} cannot become {target}" in str(error.value)
    assert f"missing: {target}" in str(error.value)


def test_unreadable_folders_name_the_file(tiny_dir, tmp_path):
    with pytest.raises(ValueError, match="nothing/here is not a folder.*hf download"):
        Checkpoint(tmp_path / "nothing/here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        Checkpoint(tmp_path / "empty")

    sharded = tiny_dir("llama", max_shard_bytes=100_000)
    for label, message in {
        "bin": "has neither .*pytorch_model.bin",
        "shard": "names files that do not exist: model-00002-of",
        "cut": r"model-00002-of-\d+.safetensors has \d+ bytes, but its header describes \d+",
        "head": "model-00002-of-.* is not a complete safetensors file: it has 5 bytes",
        "text": "model-00002-of-.* is not a safetensors file: its header is not JSON",
        "index": r"names tensors that are in none of its files:\s+made.up.weight",
    }.items():
        folder = tmp_path / label
        shutil.copytree(sharded, folder)
        shard = next(folder.glob("model-00002*"))
        if label == "bin":
            for file in folder.glob("*.safetensors*"):
                file.unlink()
            (folder / "pytorch_model.bin").write_bytes(b"x")
        elif label == "shard":
            shard.unlink()
        elif label == "cut":
            os.truncate(shard, shard.stat().st_size - 10)
        elif label == "head":
            os.truncate(shard, 5)
        elif label == "text":
            shard.write_bytes((40).to_bytes(8, "little") + b"x" * 100)
        else:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            index["weight_map"]["made.up.weight"] = shard.name
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=message):
            Checkpoint(folder)


def test_configs_that_cannot_be_loaded(tiny_dir, tmp_path):
    for key, value, message in (
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
        ("model_type", "no_such_model", "does not know model_type 'no_such_model'"),
    ):
        folder = tmp_path / key
        shutil.copytree(tiny_dir("llama"), folder)
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {key: value}))
        with pytest.raises(ValueError, match=message):
            load_config(folder)


# ----------------------------------------------------------------------------------------------------------------------------------
# Reading


def test_neighbours_are_read_together(tiny_dir, monkeypatch):
    checkpoint = Checkpoint(tiny_dir("qwen3_moe"))
    expected = load_file(checkpoint.path / "model.safetensors")
    calls, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: calls.append(len(buffers)) or real(fd, buffers, offset))
    tensors = checkpoint.read(checkpoint.names)
    assert calls == [len(expected)]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    calls.clear()
    entries = read_header(checkpoint.path / "model.safetensors")
    order = sorted(entries, key=lambda name: entries[name].start)
    checkpoint.read([order[0], order[1], order[5]])
    assert calls == [2, 1]


def test_short_reads_are_continued(tiny_dir, monkeypatch):
    checkpoint = Checkpoint(tiny_dir("llama"))
    expected = load_file(checkpoint.path / "model.safetensors")

    def short(descriptor, buffers, offset):
        data = os.pread(descriptor, min(1000, sum(map(len, buffers))), offset)
        position = 0
        for buffer in buffers:
            part = data[position : position + len(buffer)]
            buffer[: len(part)] = part
            position += len(part)
        return len(data)

    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(tensor_files, "READ_BYTES", 3000)
    tensors = checkpoint.read(checkpoint.names)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_file_cut_after_opening(tiny_dir, tmp_path):
    shutil.copytree(tiny_dir("llama"), tmp_path / "m")
    checkpoint = Checkpoint(tmp_path / "m")
    os.truncate(tmp_path / "m/model.safetensors", 20_000)
    with pytest.raises(ValueError, match="m/model.safetensors ends before its last tensor"):
        checkpoint.read(checkpoint.names)


# ----------------------------------------------------------------------------------------------------------------------------------
# Ranks and threads


def load_on_rank(cases: list[tuple[str, int]]) -> list[dict]:
    """Loads each (folder, ranks per node): nodes are simulated."""
    result = []
    for folder, ranks_per_node in cases:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % ranks_per_node)
        read, real = [], Converter.read
        Converter.read = lambda self, names, stop, read=read, real=real: read.append(names) or real(self, names, stop)
        converter, model = load(folder)
        Converter.read = real
        sources = [i for i, unit in enumerate(converter.units) if unit.model_names in read]
        tensors = {name: tensor.clone() for name, tensor in (*model.state_dict().items(), *model.named_buffers())}
        tied = model.lm_head.weight is model.get_input_embeddings().weight
        result.append(dict(tensors=tensors, sources=sources, tied=tied))
    return result


def test_two_ranks_load_the_same_model(tiny_dir, run_ranks):
    folders = {family: str(tiny_dir(family, mtp=family in MTP_FAMILIES, **FORMS[1])) for family in tiny.FAMILIES}
    cases = [(folder, 1) for folder in folders.values()] + [(folders["qwen3_5_moe"], 2)]
    ranks = run_ranks(2, load_on_rank, cases)
    for i, (folder, ranks_per_node) in enumerate(cases):
        expected = reference(folder)
        expected = {**expected.state_dict(), **dict(expected.named_buffers())}
        for rank in ranks:
            assert rank[i]["tensors"].keys() == expected.keys() and rank[i]["tied"]
            assert all(torch.equal(tensor, expected[name]) for name, tensor in rank[i]["tensors"].items())
        units = len(prepare(folder).units)
        turns = [list(range(0, units, 2)), list(range(1, units, 2))]
        assert [rank[i]["sources"] for rank in ranks] == (turns if ranks_per_node == 1 else [list(range(units)), []])


def fail_on_rank(folder: str) -> tuple[str, int, list[str]]:
    """Two nodes of one rank; the file that holds unit 1 is cut after its header was read, so rank 1's reading thread fails."""
    from common import dist

    converter = prepare(folder)
    last = converter.checkpoint._entries[converter.disk_names(converter.units[1].model_names[-1])[-1]]
    dist.barrier()
    if dist.is_main():
        os.truncate(Path(folder) / last.file, last.stop - 1)
    dist.barrier()
    loader, loaded = Loader(converter), 0
    try:
        for unit in converter.units:
            loader.load_unit(unit)
            loaded += 1
    except RuntimeError as error:
        return str(error), loaded, [thread.name for thread in threading.enumerate()]
    return "no error", loaded, []


def test_error_of_a_reading_thread_reaches_all_ranks(tmp_path, run_ranks):
    folder = tiny.make("qwen3_moe", tmp_path / "model", max_shard_bytes=150_000)
    ranks = run_ranks(2, fail_on_rank, str(folder), ranks_per_node=1)
    for message, loaded, threads in ranks:
        assert message.startswith(f"rank 1 could not read model.layers.1 of {folder}: ValueError: ")
        assert "ends before its last tensor" in message
        assert loaded == 1
        assert "checkpoint-reader" not in threads


SLOW_LOAD = """
    import os, sys, threading, time
    sys.path.insert(0, {root!r})
    from tests.test_weights import Loader, prepare
    real = os.preadv
    def slow(descriptor, buffers, offset):
        print("reading", flush=True)
        time.sleep(0.2)
        return real(descriptor, buffers[:1], offset)
    os.preadv = slow
    loader = Loader(prepare({folder!r}))
    try:
        loader.load_unit(loader.converter.units[0])
    except KeyboardInterrupt:
        names = [thread.name for thread in threading.enumerate()]
        print("interrupted", "checkpoint-reader" in names, flush=True)
        raise
"""


def test_interrupt_ends_the_reading_thread(tiny_dir):
    root = str(Path(__file__).resolve().parents[1])
    program = textwrap.dedent(SLOW_LOAD).format(root=root, folder=str(tiny_dir("qwen3_moe")))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout.readline() == "reading\n"
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < 5
    assert process.returncode != 0
    assert out.splitlines()[-1] == "interrupted False"


def test_units_are_read_one_ahead_and_no_more(tiny_dir, monkeypatch):
    converter = prepare(tiny_dir("qwen3_moe"))
    started, real = [], Converter.read
    monkeypatch.setattr(Converter, "read", lambda self, names, stop: started.append(names) or real(self, names, stop))
    loader = Loader(converter)
    for i, unit in enumerate(converter.units):
        loader.load_unit(unit)
        assert started == [other.model_names for other in converter.units[: i + 2]]
    loader.finish()
    assert "checkpoint-reader" not in [thread.name for thread in threading.enumerate()]


def test_finish_refuses_a_model_that_is_not_loaded(tiny_dir):
    converter = prepare(tiny_dir("llama"))
    loader = Loader(converter)
    loader.load_unit(converter.units[0])
    with pytest.raises(AssertionError, match="1 of 5 units were loaded"):
        loader.finish()
