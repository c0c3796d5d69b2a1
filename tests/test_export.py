"""Exports: the base's names, form, dtypes and files; what was trained is changed, everything else is the base's bytes."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common import export, tiny
from common.checkpoint import fingerprint
from common.export import CheckFailed, Exporter
from common.tensor_files import Spec, write_file
from common.weights import Checkpoint, Converter, Loader, build_skeleton
from tests.test_weights import reference

MTP_FAMILIES = ("qwen3_next", "qwen3_5_moe", "glm_moe_dsa")


def load(folder, num_layers=None) -> Converter:
    model = build_skeleton(folder, attn_implementation="sdpa", num_layers=num_layers)
    converter = Converter(model, Checkpoint(folder))
    loader = Loader(converter, dtype_of=lambda name: torch.float32)  # as masters are
    for unit in converter.units:
        loader.load_unit(unit)
    loader.finish()
    return converter


def unit_tensors(converter: Converter, index: int) -> dict[str, torch.Tensor]:
    state = converter.model.state_dict()
    return {name: state[name] for name in converter.units[index].model_names}


def write(converter: Converter, output: Path) -> dict[str, str]:
    exporter = Exporter(converter, converter.checkpoint, output)
    hashes = {}
    for index in range(len(converter.units)):
        hashes |= exporter.write_unit(index, unit_tensors(converter, index))
    hashes |= exporter.copy_untouched()
    exporter.verify(hashes)
    exporter.finish()
    return hashes


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None], use_cache=False).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("experts", ["per_expert", "fused"])
def test_export_of_trained_model_reloads_to_it(tiny_dir, tmp_path, family, experts):
    if family == "llama" and experts == "fused":
        pytest.skip("dense")
    base = tiny_dir(family, experts=experts, mtp=family in MTP_FAMILIES, tie_word_embeddings=experts == "fused")
    converter = load(base)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in converter.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    hashes = write(converter, tmp_path / "out")

    before, after = all_tensors(base), all_tensors(tmp_path / "out")
    assert {name: (t.dtype, t.shape) for name, t in after.items()} == {name: (t.dtype, t.shape) for name, t in before.items()}
    assert {name: hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest() for name, t in after.items()} == hashes
    assert all(same_bytes(before[name], after[name]) for name in converter.untouched)
    changed = {name for name in after if not same_bytes(before[name], after[name])}
    assert len(changed) > 0.9 * (len(after) - len(converter.untouched))

    live = reference(base)
    for name, tensor in live.state_dict().items():
        tensor.copy_(converter.model.state_dict()[name])
    reloaded = reference(tmp_path / "out")
    assert all(same_bytes(tensor, reloaded.state_dict()[name]) for name, tensor in live.state_dict().items())
    assert torch.equal(logits(live), logits(reloaded))

    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(tensor.numel() * tensor.itemsize for tensor in before.values())
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == AutoTokenizer.from_pretrained(base).chat_template


def test_one_shard_a_unit(tiny_dir, tmp_path):
    converter = load(tiny_dir("qwen3_next", mtp=True))
    write(converter, tmp_path / "out")
    weight_map = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map["model.layers.2.mlp.experts.10.up_proj.weight"] == "model-00003-of-00006.safetensors"
    assert weight_map["lm_head.weight"] == weight_map["model.embed_tokens.weight"] == "model-00005-of-00006.safetensors"
    assert weight_map["mtp.fc.weight"] == "model-00006-of-00006.safetensors"
    assert sorted(set(weight_map.values())) == sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert not (tmp_path / "out.incomplete").exists()


def test_files_that_are_copied(tiny_dir, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_dir("llama"), base)
    for name in ("LICENSE", "modeling_x.py", "README.md", ".gitattributes", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        (base / name).write_text(name)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tool.jinja").write_text("x")
    converter = load(base)
    exporter = Exporter(converter, converter.checkpoint, tmp_path / "out")
    for index in range(len(converter.units)):
        exporter.write_unit(index, unit_tensors(converter, index))
    exporter.finish({"run.json": "{}"})
    present = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"LICENSE", "modeling_x.py", "additional_chat_templates/tool.jinja", "run.json"} < present
    assert present.isdisjoint({"README.md", ".gitattributes", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors"})


@pytest.mark.parametrize("family", ["qwen3_5_moe", "glm_moe_dsa"])
def test_cut_model(tiny_dir, tmp_path, family):
    base = tiny_dir(family, mtp=True)
    converter = load(base, num_layers=2)
    write(converter, tmp_path / "out")
    after = all_tensors(tmp_path / "out")
    assert not any(part in name for name in after for part in (".layers.2.", ".layers.3.", "mtp.", ".layers.78."))
    assert any(name.startswith("model.visual.") for name in after) == (family == "qwen3_5_moe")
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["architectures"] == json.loads((base / "config.json").read_text())["architectures"]
    assert raw.get("text_config", raw)["num_hidden_layers"] == 2
    reloaded = reference(tmp_path / "out")
    state = converter.model.state_dict()
    assert all(torch.equal(tensor.float(), state[name].float()) for name, tensor in reloaded.state_dict().items())
    again = Converter(build_skeleton(tmp_path / "out", attn_implementation="sdpa"), Checkpoint(tmp_path / "out"))
    assert len(again.units) == 3 and not again.cut


def test_output_that_is_not_empty_and_leftovers(tiny_dir, tmp_path):
    converter = load(tiny_dir("llama"))
    (tmp_path / "used").mkdir()
    (tmp_path / "used/x").write_text("mine")
    with pytest.raises(ValueError, match="used exists and is not empty"):
        Exporter(converter, converter.checkpoint, tmp_path / "used")
    assert (tmp_path / "used/x").read_text() == "mine"
    (tmp_path / "out.incomplete").mkdir()
    (tmp_path / "out.incomplete/model-00001-of-00009.safetensors").write_text("of an attempt that was killed")
    (tmp_path / "out").mkdir()
    write(converter, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 5


def test_incomplete_export_never_gets_its_name(tiny_dir, tmp_path):
    converter = load(tiny_dir("llama"))
    exporter = Exporter(converter, converter.checkpoint, tmp_path / "out")
    for index in (0, 1, 3, 4):
        exporter.write_unit(index, unit_tensors(converter, index))
    with pytest.raises(CheckFailed, match="model-00003-of-00005.safetensors was not written"):
        exporter.finish()
    shutil.copy(exporter.partial / exporter.file_name(1), exporter.partial / exporter.file_name(2))
    with pytest.raises(CheckFailed, match="model-00003-of-00005.safetensors does not hold the tensors of its unit"):
        exporter.finish()
    assert not (tmp_path / "out").exists()
    exporter.write_unit(2, unit_tensors(converter, 2))
    exporter.finish()
    assert (tmp_path / "out/config.json").exists()


def test_wrong_tensors_are_refused(tiny_dir, tmp_path):
    converter = load(tiny_dir("llama"))
    exporter = Exporter(converter, converter.checkpoint, tmp_path / "out")
    named = unit_tensors(converter, 1)
    with pytest.raises(ValueError, match=r"unit model.layers.0: tensors missing: .*'model.layers.0.mlp.down_proj.weight'"):
        exporter.write_unit(0, named)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} has shape \[96, 64\], the model's is \[64, 96\]"):
        exporter.write_unit(1, named | {name: named[name].T})


def test_verify_finds_a_flipped_bit(tiny_dir, tmp_path):
    converter = load(tiny_dir("llama"))
    exporter = Exporter(converter, converter.checkpoint, tmp_path / "out")
    hashes = exporter.write_unit(0, unit_tensors(converter, 0))
    exporter.verify(hashes)
    file = exporter.partial / exporter.file_name(0)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckFailed, match="bytes on the disk differ from what was written:\n  model.layers.0"):
        exporter.verify(hashes)


def test_written_files_are_safetensors(tmp_path):
    """Mixed dtypes, a scalar, an empty tensor, a view: read back by the safetensors library."""
    torch.manual_seed(0)
    tensors = {
        "c.bool": torch.tensor([True, False, True]),
        "a.scale": torch.tensor(3.5),
        "b.view": torch.randn(6, 4).T,
        "d.bf16": torch.randn(5).bfloat16(),
        "e.empty": torch.empty(0, 3),
        "f.fp8": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "g.int": torch.tensor([2**40, -1]),
    }
    specs = [Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_file(tmp_path / "x.safetensors", specs, tensors.get)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            loaded = file.get_tensor(name)
            assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
            assert torch.equal(loaded.float(), tensor.float())


# ----------------------------------------------------------------------------------------------------------------------------------
# Ranks


def write_on_rank(base: str, output: str) -> dict[str, str]:
    from common import dist

    converter = load(base)
    exporter = Exporter(converter, converter.checkpoint, output)
    hashes = {}
    for index in range(len(converter.units)):
        if index % 2 == dist.rank():
            hashes |= exporter.write_unit(index, unit_tensors(converter, index))
    dist.barrier()
    with dist.main_rank_first() as mine:
        if mine:
            exporter.copy_untouched()
            exporter.finish()
    try:
        Exporter(converter, converter.checkpoint, output)
    except (ValueError, RuntimeError) as error:
        hashes["error"] = str(error)
    return hashes


def test_two_ranks_write_one_folder(tiny_dir, tmp_path, run_ranks):
    base = tiny_dir("qwen3_5_moe", mtp=True)
    first, second = run_ranks(2, write_on_rank, str(base), str(tmp_path / "out"))
    assert "exists and is not empty" in first.pop("error") and "exists and is not empty" in second.pop("error")
    assert first and second and first.keys().isdisjoint(second)
    before, after = all_tensors(base), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same_bytes(before[name], after[name]) for name in before)


# ----------------------------------------------------------------------------------------------------------------------------------
# Command line


class Saved:
    """A training checkpoint of which only some parameters were trained (+1)."""

    trained = ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.3.self_attn.q_norm.weight", "lm_head.weight")
    adapters = None

    def __init__(self, folder):
        content = json.loads((Path(folder) / "saved.json").read_text())
        self.base, self.fingerprint, self.num_layers = content["base"], content["fingerprint"], None
        self.names = set(content["names"])

    def experts(self, name):
        return None

    def read_many(self, names):
        converter = Converter(build_skeleton(self.base, attn_implementation="eager"), Checkpoint(self.base))
        return {name: tensor.float() + 1 for name, tensor in converter.read(names).items()}


def make_saved(folder: Path, base: Path, names) -> Path:
    folder.mkdir()
    (folder / "saved.json").write_text(json.dumps({"base": str(base), "fingerprint": fingerprint(base), "names": list(names)}))
    return folder


def test_command_line(tiny_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export, "SavedParameters", Saved)
    base = tiny_dir("qwen3_moe")
    saved = make_saved(tmp_path / "saved", base, Saved.trained)
    arguments = ["--checkpoint", str(saved), "--output", str(tmp_path / "out")]
    assert export.main([*arguments, "--verify"]) == 0
    before, after = all_tensors(base), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    expected = {name for name in before if ".layers.1.mlp.experts." in name and "down_proj" not in name}
    expected |= {"model.layers.3.self_attn.q_norm.weight", "lm_head.weight"}
    assert {name for name in before if not same_bytes(before[name], after[name])} == expected
    assert all(torch.equal(after[name], (before[name].float() + 1).bfloat16()) for name in expected)

    assert export.main(arguments) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")

    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    assert export.main([*arguments, "--base", str(moved)]) == 0
    shutil.rmtree(tmp_path / "out")
    assert export.main([*arguments, "--base", str(tiny_dir("qwen3_moe", seed=1))]) == 2
    assert "are not those that" in capsys.readouterr().err

    foreign = make_saved(tmp_path / "foreign", base, ["model.layers.9.mlp.gate.weight"])
    assert export.main(["--checkpoint", str(foreign), "--output", str(tmp_path / "out")]) == 2
    assert "model.layers.9.mlp.gate.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

    monkeypatch.setattr(export, "write_file", lambda file, specs, tensor_of: flip(file, write_file(file, specs, tensor_of)))
    assert export.main([*arguments, "--verify"]) == 1
    assert not (tmp_path / "out").exists() and "bytes on the disk differ" in capsys.readouterr().err


def flip(file: Path, hashes: dict[str, str]) -> dict[str, str]:
    with open(file, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    return hashes


def test_command_line_usage(capsys):
    with pytest.raises(SystemExit) as error:
        export.main(["--check", "x", "--output", "y"])
    assert error.value.code == 2
    assert export.main(["--checkpoint", "no/such/folder", "--output", "y"]) == 2
    assert "no/such/folder" in capsys.readouterr().err
