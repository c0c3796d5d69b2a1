"""A 4-bit base on one node: the arithmetic of NF4, memory plans, the model against dense weights and peft, runs as a user starts them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes import functional
from torch import nn
from transformers import Qwen3MoeConfig

from common import dist, lora, nf4, one_node, run
from common.config import ModelArguments
from common.lora import Adapters
from common.one_node import Work, plan_memory
from common.skeleton import build_skeleton
from grpo.one_node import OneNodeBackend
from grpo.rollout import Prompt
from tests.conftest import ROOT, read_metrics
from tests.test_grpo import tensors_of, write_colours

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
WORK = Work(row_tokens=64, answers=4, prompt_tokens=16, completion_tokens=16)


# ---- NF4


def restored(weight: torch.Tensor) -> torch.Tensor:
    """What single quantisation leaves, block by block in plain torch: the nearest of 16 values times the block's largest magnitude."""
    blocks = weight.float().reshape(-1, 64)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    values = functional.get_4bit_type("nf4", "cpu")
    nearest = ((blocks / scales)[..., None] - values).abs().argmin(dim=-1)
    return (values[nearest] * scales).view(weight.shape)


@pytest.mark.parametrize("shape", [(96, 64), (70, 96), (12, 96, 64), (12, 64, 48)])
def test_quantised_values(shape, monkeypatch):
    """Rows that end within a block too, and tensors that are quantised in parts; the second quantisation loses 0.2 % more at most."""
    monkeypatch.setattr(nf4, "PART_ELEMENTS", 7000)
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    stored, single = nf4.Nf4Tensor(weight), restored(weight)
    whole = stored.dequantise(torch.float32)
    assert whole.shape == weight.shape
    assert ((whole - single).norm() / single.norm()).item() < 0.004
    assert stored.error == pytest.approx(((whole - weight).norm() / weight.float().norm()).item(), rel=1e-5)
    assert 0.08 < stored.error < 0.1
    held = sum(buffer.numel() * buffer.element_size() for buffer in stored.buffers()) - 4 * 256  # the table of the second quantisation
    assert held == pytest.approx(weight.numel() * nf4.BYTES_PER_ELEMENT, abs=8)
    if len(shape) == 3:
        some = torch.tensor([1, 5, 11])
        assert torch.equal(stored.dequantise(torch.float32, some), whole[some])


def test_same_numbers_as_bitsandbytes():
    torch.manual_seed(0)
    weight = torch.randn(256, 128).bfloat16()
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert torch.equal(nf4.Nf4Tensor(weight).dequantise(torch.bfloat16), functional.dequantize_4bit(codes, state))


def moe_config(**fields) -> Qwen3MoeConfig:
    small = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96,
        moe_intermediate_size=48, num_experts=12, num_experts_per_tok=2, vocab_size=384, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3MoeConfig(**(small | fields))


def test_layer_equals_one_with_dequantised_weights():
    """Outputs, gradients of inputs, and a pass without gradients, which dequantises only the experts that are used."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    config = moe_config()
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
        parameter.requires_grad_(False)
    linear = nn.Linear(64, 128).requires_grad_(False)
    layer = nn.ModuleList([block, linear])
    dense = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    errors = dict(nf4.quantise(layer))
    assert set(errors) == {"0.experts.gate_up_proj", "0.experts.down_proj", "1.weight"}
    assert {name for name, _ in layer.named_parameters()} == {"0.gate.weight", "1.bias"}

    x = torch.randn(1, 5, 64, requires_grad=True)
    weight = torch.randn(1, 5, 128)
    out = layer[1](layer[0](x))
    (out * weight).sum().backward()
    with torch.no_grad():
        assert torch.allclose(layer[1](layer[0](x)), out, atol=1e-6)
    assert block.experts.num_experts == 12 and "gate_up_proj" not in vars(block.experts)

    experts, plain = block.experts, Qwen3MoeSparseMoeBlock(config)
    stored = {"experts.gate_up_proj": experts.nf4_gate_up_proj, "experts.down_proj": experts.nf4_down_proj}
    plain.load_state_dict({name: t.dequantise(torch.float32) for name, t in stored.items()} | {"gate.weight": dense["0.gate.weight"]})
    y = x.detach().clone().requires_grad_(True)
    expected = nn.functional.linear(plain(y), linear.nf4_weight.dequantise(torch.float32), linear.bias)
    (expected * weight).sum().backward()
    assert torch.allclose(out, expected, atol=1e-5) and torch.allclose(x.grad, y.grad, atol=1e-5)
    assert x.grad.abs().max() > 0.1


# ---- memory


def skeleton_of(config: Qwen3MoeConfig):
    model = build_skeleton(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    lora.add(model, Adapters(8, 16.0, 0.05, ATTENTION), "all", torch.float32)
    return model


def test_qwen3_235b_fits_eight_gpus_of_80_gb():
    config = moe_config(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, head_dim=128, num_key_value_heads=4, intermediate_size=12288,
        moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
    )  # fmt: skip
    model = skeleton_of(config)
    assert sum(p.numel() for p in model.parameters() if not p.requires_grad) == 235_093_634_560
    work = Work(row_tokens=8192, answers=32, prompt_tokens=2048, completion_tokens=4096)
    plan = plan_memory(model, work, [79.1 * 2**30] * 8)
    plan.check()
    assert plan.device_of == sorted(plan.device_of) and set(plan.device_of) == set(range(8))
    # 232.6 billion elements in 4.127 bits, 1.25 billion in 16, adapters of 16 bytes a parameter: 116 GiB altogether.
    assert sum(parts["weights"] for parts in plan.parts) / 2**30 == pytest.approx(115.9, abs=1.0)
    assert max(plan.needed) < 0.75 * 79.1 * 2**30  # room for longer answers
    # Keys and values of 32 answers of 6144 tokens: 2 * 4 heads * 128 * 2 bytes a token and layer.
    caches = sum(cost.cache for cost in one_node.layer_costs(model, work))
    assert caches == 94 * 32 * 6144 * 2 * 4 * 128 * 2
    with pytest.raises(ValueError, match=r"does not fit.*\n  device 0: layers 0-\d+; weights .* of 40.0 GiB free"):
        plan_memory(model, work, [40 * 2**30] * 8).check()
    unequal = plan_memory(model, work, [79.1 * 2**30] * 4 + [60 * 2**30] * 4)
    assert unequal.device_of.count(7) < unequal.device_of.count(1)


# ---- the model


@pytest.fixture
def one_process():
    dist.init(setup_timeout_minutes=3)
    yield
    dist.shutdown()


def inputs_of(ids: list[int]) -> tuple[dict, torch.Tensor]:
    count = torch.tensor([0, len(ids)], dtype=torch.int32)
    inputs = {
        "input_ids": torch.tensor([ids]), "position_ids": torch.arange(len(ids))[None], "use_cache": False, "cu_seq_lens_q": count,
        "cu_seq_lens_k": count, "max_length_q": len(ids), "max_length_k": len(ids), "seq_idx": torch.zeros(1, len(ids), dtype=torch.int32),
    }  # fmt: skip
    return inputs, torch.tensor([[*ids[1:], -100]])


def trained_model(folder: Path, **options) -> run.Model:
    """A model whose adapters do something."""
    args = ModelArguments(model_name_or_path=str(folder), compute_dtype="float32", lora_rank=4, quantization="nf4", **options)
    model = one_node.build_model(args, WORK)
    torch.manual_seed(1)
    for shard in model.sharded.trained_shards():
        if shard.name.endswith(".B"):
            shard.tensor.normal_(std=0.1)
    return model


def test_adapter_folder_is_the_live_adapter(tiny_dir, one_process, tmp_path):
    """peft, given the same base in 4 bits and the folder, computes what the live model computes."""
    from peft import PeftModel

    folder = tiny_dir("qwen3_moe")
    live = trained_model(folder, trainable_layers="1-")
    model = live.sharded
    lora.write_adapter(tmp_path / "adapter", model.gather_adapters(), model.adapters, str(folder))
    inputs, targets = inputs_of([5, 80, 200, 13, 7, 99, 301])
    model.train(False)
    with torch.no_grad():
        logps = model(inputs, targets).logps
    base = one_node.build_model(ModelArguments(str(folder), compute_dtype="float32", lora_rank=4, quantization="nf4"), WORK).sharded
    base.train(False)
    with torch.no_grad():
        fresh = base(inputs, targets).logps
    assert (fresh - logps).abs().max() > 0.01
    for module in base.root.modules():
        if isinstance(module, nf4.Nf4Linear):
            module._parameters["weight"] = nn.Parameter(torch.empty(0), requires_grad=False)  # peft asks for its device
    peft = PeftModel.from_pretrained(base.root.model, str(tmp_path / "adapter"))
    with torch.no_grad():
        again = base(inputs, targets).logps
    assert torch.allclose(again, logps, atol=1e-5), (again - logps).abs().max()
    assert {name for name, _ in peft.named_parameters() if "lora_" in name} == {
        f"{name.removesuffix('.weight')}.default.weight" for name in tensors_of(tmp_path / "adapter")
    }


def test_gradients_equal_those_of_the_formula(tiny_dir, one_process):
    """Against central differences of the loss, through checkpointing and 4-bit layers; and nothing but adapters has a gradient."""
    model = trained_model(tiny_dir("qwen3_moe"), lora_dropout=0.0).sharded
    inputs, targets = inputs_of([5, 80, 200, 13, 7, 99, 301])
    model.train()
    model(inputs, targets).logps.sum().backward()
    shards = {shard.name: shard for shard in model.trained_shards()}
    assert all(shard.parameter.grad is not None for shard in shards.values())
    for name in (
        "model.layers.0.self_attn.q_proj.lora.A",
        "model.layers.3.self_attn.o_proj.lora.B",
        "model.layers.1.self_attn.v_proj.lora.B",
    ):
        shard = shards[name]
        direction = shard.parameter.grad.flatten() / shard.parameter.grad.norm()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                shard.tensor.add_(direction, alpha=sign * 1e-3)
                values.append(model(inputs, targets).logps.double().sum().item())
                shard.tensor.sub_(direction, alpha=sign * 1e-3)
        slope = (values[0] - values[1]) / 2e-3
        assert slope == pytest.approx(shard.parameter.grad.norm().item(), rel=0.02), name
    norm = model.clip_grad_norm(0.5).item()
    assert norm > 0.5 and model.clip_grad_norm(0).item() == pytest.approx(0.5, rel=1e-4)


def test_dropout_only_where_gradients_are_taken(tiny_dir, one_process):
    model = trained_model(tiny_dir("qwen3_moe"), lora_dropout=0.5).sharded
    inputs, targets = inputs_of([5, 80, 200, 13, 7, 99, 301])
    model.train()
    with torch.no_grad():
        plain = [model(inputs, targets).logps for _ in range(2)]
    dropped = model(inputs, targets).logps
    assert torch.equal(*plain) and (dropped - plain[0]).abs().max() > 1e-3
    torch.manual_seed(3)  # recomputation draws the same mask again: the gradient is that of the loss that was computed
    model(inputs, targets).logps.sum().backward()
    shard = next(s for s in model.trained_shards() if s.name.endswith("layers.0.self_attn.q_proj.lora.B"))
    direction, values = shard.parameter.grad.flatten() / shard.parameter.grad.norm(), []
    for sign in (1, -1):
        shard.tensor.add_(direction, alpha=sign * 1e-3)
        torch.manual_seed(3)
        values.append(model(inputs, targets).logps.double().sum().item())
        shard.tensor.sub_(direction, alpha=sign * 1e-3)
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(shard.parameter.grad.norm().item(), rel=0.02)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_answers_have_the_log_probabilities_of_the_training_pass(family, tiny_dir, one_process):
    """Generation pads, keeps a cache and dequantises only the experts in use; the packed training pass does none of that."""
    model = trained_model(tiny_dir(family)).sharded
    backend = OneNodeBackend(SimpleNamespace(sharded=model), stop_ids=[379], pad_id=377, batch_size=3)
    prompts = {"a": [5, 80, 200, 13], "b": [7, 99]}
    model.train()
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 12}
    answers = backend.generate([Prompt(*item) for item in prompts.items()], 2, seed=1, poll=lambda: False, **sampling)
    assert model.root.training and model.config._attn_implementation == "packed"
    assert sorted((answer.id, answer.sample) for answer in answers) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    for answer in answers:
        inputs, targets = inputs_of([*prompts[answer.id], *answer.completion_ids])
        with torch.no_grad():
            logps = model(inputs, targets).logps[len(prompts[answer.id]) - 1 : -1]
        assert torch.allclose(logps, torch.tensor(answer.logps), atol=1e-4)


def test_a_changed_base_is_found(tiny_dir, one_process):
    model = trained_model(tiny_dir("qwen3_moe"))
    run.check_frozen(model)
    model.sharded.root.model.model.layers[2].mlp.experts.nf4_down_proj.codes[7, 3] ^= 1
    with pytest.raises(
        RuntimeError, match="1 tensors of the base are not what was loaded: model.model.layers.2.mlp.experts.nf4_down_proj.codes"
    ):
        model.sharded.check_frozen()


@pytest.mark.parametrize("options,message", [
    (dict(quantization="nf4"), "set lora_rank"),
    (dict(quantization="nf4", lora_rank=4, gradient_checkpointing=False), "gradient_checkpointing: true"),
    (dict(lora_rank=4, trainable="attention"), "adapters are all that trains"),
    (dict(lora_rank=4, lora_dropout=1.0), "below 1"),
])  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        ModelArguments("x", **options)


def test_wrong_models_and_targets(tiny_dir, one_process):
    args = dict(model_name_or_path=str(tiny_dir("qwen3_moe")), lora_rank=4, quantization="nf4")
    with pytest.raises(ValueError, match="no linear layer gate_proj. Linear layers: k_proj, o_proj, q_proj, v_proj"):
        one_node.build_model(ModelArguments(**args, lora_target_modules=["q_proj", "gate_proj"]), WORK)
    with pytest.raises(ValueError, match="does not fit"):
        one_node.build_model(ModelArguments(**args), Work(64, 10**6, 16, 10**5))
    with pytest.raises(ValueError, match="GLM's sparse attention"):
        one_node.build_model(ModelArguments(**args | {"model_name_or_path": str(tiny_dir("glm_moe_dsa"))}), WORK)
    with pytest.raises(ValueError, match=r"is for python -m grpo.train"):
        run.build_model(ModelArguments(**args))


# ---- runs as a user starts them

REWARDS = """
def vowels(prompts, completions, **_):
    return [sum(c in "aeiou" for c in text) for text in completions]
"""


@pytest.fixture
def files(tmp_path) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    with open(tmp_path / "train.jsonl", "w") as file:
        for i in range(8):
            file.write(json.dumps({"id": f"q{i}", "prompt": [{"role": "user", "content": f"story {i}"}]}) + "\n")
    return tmp_path


def command(model: Path, files: Path, output: Path, *options: str) -> tuple[list[str], dict]:
    small = "--max_length=96 --max_completion_length=8 --num_prompts_per_step=2 --num_generations=4 --learning_rate=1e-2 --warmup_steps=0"
    small += " --reward_funcs=my_rewards:vowels --reward_workers=1 --mask_truncated_completions=False --save_total_limit=9"
    config = ROOT / "grpo" / "configs" / "qlora_one_node.yaml"
    data = [f"--config={config}", f"--model_name_or_path={model}", f"--train_files={files / 'train.jsonl'}", f"--output_dir={output}"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{files}", "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-m", "grpo.train", *data, *small.split(), *options], environment


def grpo(*arguments: str | Path) -> list[dict]:
    line, environment = command(*arguments)
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "frozen weights and buffers are unchanged" in done.stderr
    return read_metrics(arguments[2], keep_perf=True)


def test_four_steps_are_two_and_two(tiny_dir, files, tmp_path):
    """With the shipped config, dropout included: figures and adapters to the bit. Checkpoints hold adapters only; phases and memory are logged."""
    model = tiny_dir("qwen3_moe")
    options = ("--num_iterations=2", "--beta=0.05", "--save_steps=2")
    whole = grpo(model, files, tmp_path / "whole", *options, "--max_steps=4")
    grpo(model, files, tmp_path / "parts", *options, "--max_steps=2")
    parts = grpo(model, files, tmp_path / "parts", *options, "--max_steps=4", "--export_final=True")

    def without_clock(lines):
        return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]

    assert without_clock(whole) == without_clock(parts) and [line["step"] for line in whole] == [1, 2, 3, 4]
    for name in ("rollout", "reward", "old_logps", "train"):
        assert whole[0][f"perf/{name}_seconds"] > 0
    assert whole[0]["perf/memory_gib"] > 0.05
    one, two = (tensors_of(tmp_path / run_name / "checkpoint-000004" / "adapter") for run_name in ("whole", "parts"))
    first = tensors_of(tmp_path / "whole" / "checkpoint-000002" / "adapter")
    assert one.keys() == two.keys() and len(one) == 2 * 4 * 4
    assert all(torch.equal(one[name], two[name]) for name in one) and any(not torch.equal(one[name], first[name]) for name in one)
    assert sum(file.stat().st_size for file in (tmp_path / "whole" / "checkpoint-000004").glob("*.distcp")) < 20_480 * 3 * 4 + 200_000

    # The export asked for: the base's own weights plus the adapter, in the base's dtype; everything else the base's bytes.
    exported, base = tensors_of(tmp_path / "parts" / "final"), tensors_of(model)
    assert exported.keys() == base.keys()
    merged = 0
    for name, tensor in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in one:
            merged += 1
            tensor = (tensor.float() + 16 / 8 * one[f"{key}.lora_B.weight"] @ one[f"{key}.lora_A.weight"]).to(tensor.dtype)
        assert torch.equal(exported[name], tensor), name
    assert merged == 16 and not (tmp_path / "whole" / "final").exists()


def test_stop_while_generating(tiny_dir, files, tmp_path):
    options = ("--max_length=900", "--max_completion_length=800", "--rollout_batch_size=1", "--max_steps=1")
    line, environment = command(tiny_dir("qwen3_moe"), files, tmp_path / "run", *options)
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        for text in process.stderr:
            if "tensors in 4 bits" in text:
                break
        time.sleep(2.0)
        (tmp_path / "run" / "STOP").touch()
        start = time.monotonic()
        rest = process.stderr.read()
        assert process.wait(timeout=120) == 0, rest[-3000:]
        assert time.monotonic() - start < 60
    finally:
        process.kill()
    assert "STOP found: saved at step 0" in rest and "frozen weights and buffers are unchanged" in rest
    assert (tmp_path / "run" / "checkpoint-000000" / "adapter" / "adapter_config.json").exists()
    assert (tmp_path / "run" / "rollouts" / "unfinished-000001.jsonl").exists()


def test_rewards_teach_through_a_4_bit_base(tiny_dir, launch, tmp_path):
    """The rule of tests/test_grpo.py, held-out combinations, with adapters alone. 12 steps teach it on one processor and not on another."""
    write_colours(tmp_path, 0.3)
    launch(
        "sft.train", "--config=sft/configs/tiny.yaml", f"--model_name_or_path={tiny_dir('qwen3_moe')}",
        f"--train_files={tmp_path / 'warm.jsonl'}", f"--output_dir={tmp_path / 'sft'}", "--max_length=512", "--max_steps=40", "--save_steps=0",
        "--per_device_train_batch_size=4",
    )  # fmt: skip
    launch(
        "grpo.train", "--config=grpo/configs/tiny.yaml", f"--model_name_or_path={tmp_path / 'sft' / 'final'}",
        f"--train_files={tmp_path / 'train.jsonl'}", f"--eval_files={tmp_path / 'eval.jsonl'}", f"--output_dir={tmp_path / 'grpo'}",
        "--max_steps=24", "--save_steps=0", "--eval_on_start=True", "--eval_num_generations=8", "--export_final=False",
        "--reward_funcs=grpo.rewards:choice_exact", "--quantization=nf4", "--lora_rank=8", "--learning_rate=1e-2", timeout=800,
    )  # fmt: skip
    lines = [line for line in read_metrics(tmp_path / "grpo") if "eval/reward" in line]
    assert [line["step"] for line in lines] == [0, 24]
    before, after = (line["eval/reward/choice_exact"] for line in lines)
    print(f"exact match {before:.3f} -> {after:.3f}")
    assert after >= before + 0.3
