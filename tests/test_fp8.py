"""FP8 blocks: numbers, loading, sharded training that equals the dequantised model's, export."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import fp8, tiny
from common.export import Exporter
from common.skeleton import build_skeleton, load_config
from common.tensor_files import Checkpoint
from common.weights import Converter, Loader

BLOCK = (128, 128)


def by_loop(weight, scale):
    """The definition: one number at a time would be slow, one block at a time will do."""
    result = torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            result[place] = weight[place].float() * scale[i, j]
    return result


@pytest.mark.parametrize("shape", [(576, 192), (192, 7), (1, 300), (128, 128), (10, 129), (1001, 577)])
def test_blocks_of_any_shape(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1) * 10
    quantised, scale = fp8.quantise(weight, BLOCK)
    assert quantised.dtype == torch.float8_e4m3fn
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    expected = by_loop(quantised, scale)
    assert torch.equal(fp8.dequantise(quantised, scale, BLOCK, torch.float32), expected)
    assert torch.equal(fp8.dequantise(quantised, scale, BLOCK, torch.bfloat16), expected.bfloat16())  # one rounding
    # e4m3 has three bits behind the point: 1/16 of a number, or of the block's largest / 448 / 2**6 near zero.
    largest = torch.zeros(shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            largest[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = scale[i, j]
    assert ((expected - weight).abs() <= weight.abs() / 16 + largest * 2**-10).all()
    again, scale_again = fp8.quantise(expected, BLOCK)
    assert torch.equal(fp8.dequantise(again, scale_again, BLOCK, torch.float32), expected)


def test_zero_blocks_and_groups_of_rows():
    weight = torch.zeros(136, 192)
    weight[:128, :128] = 3.0
    quantised, scale = fp8.quantise(weight, BLOCK)
    assert scale.tolist() == [[pytest.approx(3 / 448), 1.0], [1.0, 1.0]]
    assert torch.equal(fp8.dequantise(quantised, scale, BLOCK, torch.float32), weight)
    # Gate and up rows of two experts, 136 rows each: their blocks end at row 136, not at 128 and 256.
    torch.manual_seed(1)
    parts = torch.randn(2, 2, 136, 192) * torch.tensor([1.0, 50.0])[:, None, None]
    pairs = [[fp8.quantise(part, BLOCK) for part in expert] for expert in parts]
    fused = torch.stack([torch.cat([pair[0].view(torch.uint8) for pair in expert]) for expert in pairs]).view(fp8.DTYPE)
    scales = torch.stack([torch.stack([pair[1] for pair in expert]) for expert in pairs])
    expected = torch.stack([torch.cat([by_loop(*pair) for pair in expert]) for expert in pairs])
    assert torch.equal(fp8.dequantise(fused, scales, BLOCK, torch.float32), expected)


def test_linear_gradient_and_what_it_keeps():
    torch.manual_seed(0)
    linear = torch.nn.Linear(192, 136, bias=True)
    weight, scale = fp8.quantise(linear.weight, BLOCK)
    dense = fp8.dequantise(weight, scale, BLOCK, torch.float32)
    quantised = torch.nn.Linear(192, 136, device="meta")
    fp8.keep_fp8(quantised, ["weight"], {"weight": torch.empty(2, 2, device="meta")}, BLOCK)
    quantised._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)
    quantised.weight_scale_inv, quantised._parameters["bias"] = scale, linear.bias
    x = torch.randn(5, 192, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = quantised(x)
    assert {t.dtype for t in kept if t.numel() >= weight.numel()} == {fp8.DTYPE}
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    expected = torch.nn.functional.linear(x, dense, linear.bias)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    assert torch.equal(y, expected)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-6)


def changed(folder, tmp_path, change) -> str:
    """A copy of a one-file checkpoint with `change(tensors, config)` made to it."""
    copy = tmp_path / "changed"
    shutil.copytree(folder, copy)
    tensors, config = load_file(copy / "model.safetensors"), json.loads((copy / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


PROJECTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, c: t.pop(PROJECTION + "_scale_inv"), f"missing: {PROJECTION}_scale_inv"),
        (lambda t, c: t.update({PROJECTION + "_scale_inv": torch.ones(1, 1)}), r"_scale_inv is \[1, 1\], .* needs \[1, 2\]"),
        (lambda t, c: t.update({PROJECTION: t[PROJECTION].float().bfloat16()}), f"unexpected: {PROJECTION}_scale_inv"),
        (lambda t, c: t.update({PROJECTION: t[PROJECTION].to(torch.float8_e5m2)}), "float8_e5m2, which is not supported"),
        (lambda t, c: c["quantization_config"].update(quant_method="compressed-tensors"), "Only fp8 with e4m3"),
        (lambda t, c: c["quantization_config"].update(activation_scheme="static"), "Only fp8 with e4m3"),
        (lambda t, c: c["quantization_config"].pop("weight_block_size"), "Only fp8 with e4m3"),
        (lambda t, c: c.pop("quantization_config"), "no quantization_config"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tiny_dir, tmp_path, change, message):
    path = changed(tiny_dir("qwen3_moe", fp8=True, num_hidden_layers=1), tmp_path, change)
    with pytest.raises(ValueError, match=message):
        Converter(build_skeleton(path, attn_implementation="eager"), Checkpoint(path))


def dequantised_dir(folder, output):
    """The same checkpoint in bf16, made without our loader."""
    shutil.copytree(folder, output)
    tensors = {name: t for file in sorted(output.glob("*.safetensors")) for name, t in load_file(file).items()}
    for file in [*output.glob("*.safetensors"), *output.glob("*.index.json")]:
        file.unlink()
    for name in [name for name, t in tensors.items() if t.dtype == fp8.DTYPE]:
        tensors[name] = by_loop(tensors[name], tensors.pop(name + "_scale_inv")).bfloat16()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((output / "config.json").read_text())
    del config["quantization_config"]
    (output / "config.json").write_text(json.dumps(config))
    return output


@pytest.mark.parametrize("family", ["glm_moe_dsa", "qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_loaded_weights_equal_the_blocks(tiny_dir, tmp_path, family):
    """All weights trained: each is dequantised, whatever file its scales lie in."""
    folder = tiny_dir(family, fp8=True, max_shard_bytes=1_000_000)
    reference = dequantised_dir(folder, tmp_path / "bf16")
    loaded = []
    for path in (folder, reference):
        converter = Converter(build_skeleton(path, attn_implementation="eager"), Checkpoint(path))
        loader = Loader(converter)
        for unit in converter.units:
            loader.load_unit(unit)
        loader.finish()
        loaded.append(converter.model.state_dict())
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(index[name] != index[name.removesuffix("_scale_inv")] for name in index if name.endswith("_scale_inv"))
    assert loaded[0].keys() == loaded[1].keys()
    for name, tensor in loaded[0].items():
        assert torch.equal(tensor, loaded[1][name]), name


def test_untouched_weights_are_exported_byte_for_byte_and_trained_ones_twice(tiny_dir, tmp_path):
    """One expert and one projection trained: as FP8 again, or as bf16, with config.json to match."""
    folder = tiny_dir("glm_moe_dsa", fp8=True, mtp=True)
    experts, projection = "model.layers.1.mlp.experts", "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"
    base = load_file(folder / "model.safetensors")
    for trained_dtype in ("fp8", "bfloat16"):
        converter = Converter(build_skeleton(folder, attn_implementation="eager"), Checkpoint(folder))
        trained = {f"{experts}.down_proj": (10,), projection: None}
        exporter = Exporter(converter, converter.checkpoint, tmp_path / trained_dtype, trained=trained, trained_dtype=trained_dtype)
        torch.manual_seed(0)
        values = {f"{experts}.down_proj": torch.randn(1, 192, 136), projection: torch.randn(base[projection].shape)}
        hashes = {}
        for index, unit in enumerate(converter.units):
            hashes |= exporter.write_unit(index, {name: values[name] for name in unit.model_names if name in values})
        hashes |= exporter.copy_untouched()
        exporter.verify(hashes)
        exporter.finish()
        written = {n: t for file in (tmp_path / trained_dtype).glob("*.safetensors") for n, t in load_file(file).items()}
        touched = {f"{experts}.10.down_proj.weight": values[f"{experts}.down_proj"][0], projection: values[projection]}
        scales = {name + "_scale_inv" for name in touched}
        assert set(base) - set(written) == (scales if trained_dtype == "bfloat16" else set())
        for name, tensor in base.items():
            if name in set(written) - set(touched) - scales:
                assert written[name].dtype == tensor.dtype, name
                assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
        config = json.loads((tmp_path / trained_dtype / "config.json").read_text())
        for name, value in touched.items():
            module = name.removesuffix(".weight")
            if trained_dtype == "bfloat16":
                assert torch.equal(written[name], value.bfloat16())
                assert module in config["quantization_config"]["modules_to_not_convert"]
            else:
                assert written[name].dtype == fp8.DTYPE
                restored = by_loop(written[name], written[name + "_scale_inv"])
                error = (restored - value.bfloat16().float()).norm() / value.bfloat16().float().norm()
                assert exporter.errors[name] == pytest.approx(error.item(), rel=1e-4)
                assert 0.01 < error < 0.04
                assert (tmp_path / "fp8/config.json").read_bytes() == (folder / "config.json").read_bytes()
        # What was exported loads again, experts of two dtypes in one layer included.
        reloaded = Converter(build_skeleton(tmp_path / trained_dtype, attn_implementation="eager"), Checkpoint(tmp_path / trained_dtype))
        name = f"{experts}.down_proj"
        tensor = reloaded.read([name])[name]
        if trained_dtype == "bfloat16":
            assert reloaded.loaded_dtype(name) == torch.bfloat16
            assert torch.equal(tensor[10], values[name][0].bfloat16())
            other = by_loop(base[f"{experts}.3.down_proj.weight"], base[f"{experts}.3.down_proj.weight_scale_inv"]).bfloat16()
            assert torch.equal(tensor[3], other)
    assert load_config(tmp_path / "fp8").hidden_size == 192


def test_all_weights_in_bf16_leave_no_quantization_section(tiny_dir, tmp_path):
    folder = tiny_dir("qwen3_moe", fp8=True, num_hidden_layers=1)
    converter = Converter(build_skeleton(folder, attn_implementation="eager"), Checkpoint(folder))
    exporter = Exporter(converter, converter.checkpoint, tmp_path / "out", trained_dtype="bfloat16")
    for index, unit in enumerate(converter.units):
        exporter.write_unit(index, {name: torch.zeros(converter.shape(name)) for name in unit.model_names})
    exporter.finish()
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert {t.dtype for file in (tmp_path / "out").glob("*.safetensors") for t in load_file(file).values()} == {torch.bfloat16}


def test_padding_patch_is_refused_where_fsdp_is_another(monkeypatch):
    from torch.distributed.fsdp import _flat_param

    from common.fsdp import patch_fp8_padding

    original = getattr(_flat_param._construct_padding_tensor, "__wrapped__", _flat_param._construct_padding_tensor)
    monkeypatch.setattr(_flat_param, "_construct_padding_tensor", lambda size, dtype: None)
    with pytest.raises(RuntimeError, match="pads and gathers in another way.*FP8 weights cannot be sharded"):
        patch_fp8_padding()
    monkeypatch.setattr(_flat_param, "_construct_padding_tensor", original)
    monkeypatch.setattr(_flat_param.FlatParamHandle, "_all_gather_flat_param", _flat_param.FlatParamHandle._all_gather_flat_param)
    patch_fp8_padding()
    patched = _flat_param._construct_padding_tensor
    patch_fp8_padding()
    assert _flat_param._construct_padding_tensor is patched
    assert patched(3, fp8.DTYPE, False, torch.device("cpu")).tolist() == [0.0] * 3
    assert patched(2, torch.bfloat16, False, torch.device("cpu")).tolist() == [42.0] * 2


def test_tiny_fp8_needs_separate_experts(tmp_path):
    with pytest.raises(ValueError, match="per_expert"):
        tiny.make("qwen3_moe", tmp_path / "m", fp8=True, experts="fused")
