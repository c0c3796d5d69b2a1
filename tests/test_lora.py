"""Adapters under FSDP: what trains, gathered weights with adapters merged, gradients on any number of ranks, checkpoints, exports, peft."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import config, dist, export, lora, run
from common.checkpoint import SavedParameters, TrainState
from common.config import DataArguments, ModelArguments, TrainArguments
from common.optim import AdamW
from grpo.experience import GRPOTrainArguments
from grpo.objectives import ObjectiveArguments
from grpo.rollout import RolloutArguments
from grpo.scoring import RewardArguments
from tests.conftest import ROOT, read_metrics
from tests.test_grpo import tensors_of
from tests.test_qlora import inputs_of

IDS = [5, 80, 200, 13, 7, 99, 301, 44]


def build(folder: str, **options) -> run.Model:
    args = dict(model_name_or_path=folder, compute_dtype="float32", lora_rank=4, lora_dropout=0.0)
    return run.build_model(ModelArguments(**args | options))


def fill(model: run.Model) -> None:
    """Adapters that do something: B as a function of the element's place, whatever the sharding."""
    for shard in model.sharded.trained_shards():
        if shard.name.endswith(".B"):
            places = torch.arange(shard.offset, shard.offset + shard.tensor.numel())
            shard.tensor.copy_(0.1 * torch.sin(places * 1.7 + len(shard.name)))


def logps_of(model: run.Model) -> torch.Tensor:
    inputs, targets = inputs_of(IDS)
    with torch.no_grad():
        return model.sharded(inputs, targets).logps.clone()


def study(folder: str, output: str) -> dict:
    """One rank's part of everything that is compared below."""
    model = build(folder, trainable_layers="1-")
    sharded = model.sharded
    fresh = logps_of(model)
    fill(model)
    live = logps_of(model)
    inputs, targets = inputs_of(IDS)
    sharded.train()
    sharded(inputs, targets).logps.sum().backward()
    gradients = [(s.name, s.offset, s.shape.numel(), s.parameter.grad.flatten().clone()) for s in sharded.trained_shards()]
    norm = sharded.clip_grad_norm(0).item()
    merged, changed = {}, {}
    for index in range(len(sharded.units)):
        merged |= {name: tensor.clone() for name, tensor in sharded.gather_unit(index, torch.float32).items()}
        changed |= {name: tensor.clone() for name, tensor in sharded.gather_trained(index, torch.float32).items()}
    adapters = sharded.gather_adapters()
    args = TrainArguments(output_dir=output)
    optimizer = AdamW(sharded.trained_shards(), ModelArguments(folder), args)
    run.save(Path(output), args, model, optimizer, TrainState(step=1), {})
    run.export(Path(output) / "final", model)
    optimizer.step(1e-2)
    moved = logps_of(model)
    resumed = build(folder, trainable_layers="1-")
    before = logps_of(resumed)
    state = run.resume(Path(output), args, resumed, AdamW(resumed.sharded.trained_shards(), ModelArguments(folder), args), {})
    again = logps_of(resumed)
    run.check_frozen(model)
    trained = sum(s.tensor.numel() for s in sharded.trained_shards())
    total = dist.all_sum(torch.tensor(float(trained))).item()
    return {
        "fresh": fresh, "live": live, "moved": moved, "before": before, "again": again, "step": state.step, "norm": norm, "trained": total,
        "gradients": gradients, "merged": merged, "changed": changed, "adapters": adapters,
        "dtypes": {s.tensor.dtype for s in sharded.trained_shards()}, "experts": sharded.trained_experts(),
    }  # fmt: skip


def whole_gradients(ranks: list[dict]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, offset, size, part in rank["gradients"]:
            whole.setdefault(name, torch.zeros(size))[offset : offset + len(part)] = part
    return whole


@pytest.fixture(scope="module")
def studied(tiny_dir, run_ranks, tmp_path_factory):
    folder, output = tiny_dir("qwen3_moe"), tmp_path_factory.mktemp("lora")
    one = run_ranks(1, study, str(folder), str(output / "one"))
    return folder, output, one, run_ranks(2, study, str(folder), str(output / "two"))


def test_two_ranks_equal_one(studied):
    """Values, gradients, norm; fresh adapters change nothing; only adapters train, in fp32, from layer 1 on."""
    folder, _, [one], two = studied
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = plain(torch.tensor([IDS])).logits.log_softmax(-1)[0, :-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert torch.allclose(one["fresh"][:-1], expected, atol=1e-4)
    assert (one["live"] - one["fresh"]).abs().max() > 0.05
    gradients = whole_gradients([one])
    assert set(gradients) == {
        f"model.layers.{i}.self_attn.{m}.lora.{p}" for i in (1, 2, 3) for m in ("q_proj", "k_proj", "v_proj", "o_proj") for p in "AB"
    }
    assert one["trained"] == two[0]["trained"] == 3 * 4 * (64 + 128 + 2 * (64 + 64) + 128 + 64) and one["dtypes"] == {torch.float32}
    for rank in two:
        for name in ("fresh", "live", "moved"):
            assert torch.allclose(rank[name], one[name], atol=1e-4), name
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-4)
    for name, gradient in whole_gradients(two).items():
        assert torch.allclose(gradient, gradients[name], atol=1e-4 * gradients[name].abs().max().item()), name
    assert (
        gradients["model.layers.1.self_attn.q_proj.lora.A"].abs().max() > 0
        and gradients["model.layers.3.self_attn.o_proj.lora.B"].abs().max() > 0
    )


def test_gathered_weights_have_adapters_merged(studied):
    """What servers, twins and exports receive: W + 16 / 4 * B A for targets, the base's own for the rest; a plain model with it computes the same."""
    folder, _, one, two = studied
    base, plain = tensors_of(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for rank in (*one, *two):
        assert (
            set(rank["changed"]) == set(rank["experts"]) == {n for n in base if "self_attn" in n and "_proj" in n and "layers.0." not in n}
        )
        for name, tensor in rank["changed"].items():
            stem = name.removesuffix("weight")
            expected = base[name].float() + 4 * rank["adapters"][f"{stem}lora.B"] @ rank["adapters"][f"{stem}lora.A"]
            assert torch.allclose(tensor, expected, atol=1e-6) and torch.equal(tensor, rank["merged"][name])
            assert (tensor - base[name]).abs().max() > 0.01
        plain.load_state_dict(rank["merged"], strict=True)
        with torch.no_grad():
            logps = plain(torch.tensor([IDS])).logits.log_softmax(-1)[0, :-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
        assert torch.allclose(logps, rank["live"][:-1], atol=1e-4)


def test_checkpoint_and_export(studied, tmp_path):
    """Checkpoints hold adapters; a resumed run has them; the run's export, the command's and the adapter folder in peft say the same."""
    from peft import PeftModel

    folder, output, [one], two = studied
    for rank in (one, *two):
        assert rank["step"] == 1 and torch.equal(rank["again"], rank["live"]) and not torch.equal(rank["before"], rank["live"])
    checkpoint = output / "two" / "checkpoint-000001"
    saved = SavedParameters(checkpoint)
    assert saved.names == set(one["adapters"]) and saved.adapters.rank == 4 and saved.adapters.layers == (1, 2, 3)
    assert torch.equal(saved.read("model.layers.2.self_attn.k_proj.lora.B"), one["adapters"]["model.layers.2.self_attn.k_proj.lora.B"])
    assert export.main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "export"), "--verify"]) == 0
    final, exported, base = tensors_of(output / "two" / "final"), tensors_of(tmp_path / "export"), tensors_of(folder)
    assert final.keys() == exported.keys() == base.keys()
    assert all(torch.equal(final[name], exported[name]) for name in base)
    assert {name for name in base if not torch.equal(final[name], base[name])} == set(one["changed"])
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), str(checkpoint / "adapter"))
    with torch.no_grad():
        logps = peft(torch.tensor([IDS])).logits.log_softmax(-1)[0, :-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert torch.allclose(logps, one["live"][:-1], atol=1e-4)


def other_adapters(folder: str, output: str) -> list[str]:
    messages = []
    for options in (dict(lora_alpha=8.0), dict(lora_target_modules=["q_proj"]), dict(lora_rank=0)):
        model = build(folder, **{"trainable_layers": "1-"} | options)
        args = TrainArguments(output_dir=output)
        try:
            run.resume(Path(output), args, model, AdamW(model.sharded.trained_shards(), ModelArguments(folder), args), {})
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_other_adapters_are_refused(studied, run_ranks):
    folder, output, _, _ = studied
    [messages] = run_ranks(1, other_adapters, str(folder), str(output / "one"))
    assert len(messages) == 3
    assert messages[0].endswith("other adapters: lora_alpha was 16.0, now it is 8.0. Undo the change.")
    assert "other adapters: lora_target_modules was [" in messages[1] and "now it is ['q_proj']. Undo" in messages[1]
    assert messages[2].endswith("other adapters: lora_rank was 4, now it is 0. Undo the change.")


def test_shipped_config():
    config_file = str(ROOT / "grpo" / "configs" / "qwen3_235b_lora.yaml")
    argv = ["--config", config_file, "--model_name_or_path=m", "--train_files=t", "--output_dir=o", "--vllm_servers=http://a:1"]
    classes = (ModelArguments, DataArguments, RolloutArguments, RewardArguments, ObjectiveArguments, GRPOTrainArguments)
    model_args, *_, args = config.parse(*classes, argv=argv)
    assert lora.Adapters.of(model_args).scale == 2.0 and not model_args.drops_out and args.learning_rate == 1e-5


def test_names():
    assert lora.weight_name("model.layers.0.self_attn.q_proj.lora.A") == "model.layers.0.self_attn.q_proj.weight"
    assert lora.weight_name("model.layers.0.self_attn.q_proj.weight") is None
    assert lora.peft_name("model.layers.0.self_attn.q_proj.lora.B") == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def test_grpo_with_adapters(tiny_dir, launch, tmp_path):
    """As a user starts it, on two ranks: answers come from a twin with the adapters merged, which the second rollout shows."""
    (tmp_path / "my_rewards.py").write_text(
        "def vowels(prompts, completions, **_):\n    return [sum(c in 'aeiou' for c in text) for text in completions]\n"
    )
    rows = [{"id": f"q{i}", "prompt": [{"role": "user", "content": f"story {i}"}]} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "run"
    launch(
        "grpo.train", f"--model_name_or_path={tiny_dir('qwen3_moe')}", f"--train_files={tmp_path / 'train.jsonl'}", f"--output_dir={output}",
        "--lora_rank=4", "--compute_dtype=float32", "--learning_rate=3e-2", "--warmup_steps=0", "--max_length=96", "--max_completion_length=8",
        "--num_prompts_per_step=4", "--num_generations=4", "--reward_funcs=my_rewards:vowels", "--reward_workers=1", "--max_steps=3",
        "--mask_truncated_completions=False", "--beta=0.01", "--save_steps=3", ranks=2, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    lines = read_metrics(output)
    assert lines[0]["grpo/kl"] == pytest.approx(0.0, abs=1e-6) and lines[2]["grpo/kl"] > 1e-3
    differences = [line["grpo/logp_diff_mean"] for line in lines if "grpo/logp_diff_mean" in line]  # where something trained
    assert differences and max(differences) < 1e-4, differences
    assert abs(lines[1]["grpo/ratio"] - 1) > 1e-6  # inputs of trained adapters are dropped out where the gradient is taken
    adapter, base = tensors_of(output / "checkpoint-000003" / "adapter"), tensors_of(tiny_dir("qwen3_moe"))
    assert len(adapter) == 2 * 4 * 4 and all(tensor.any() for tensor in adapter.values())
    changed = {name for name, tensor in tensors_of(output / "final").items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if "self_attn" in name and "_proj" in name}


def test_fp8_base(tiny_dir, run_ranks):
    """Adapters beside frozen weights that stay FP8: what is gathered is the dequantised weight with the adapter merged, in bf16."""
    [(moved, norm, wrong)] = run_ranks(1, study_fp8, str(tiny_dir("glm_moe_dsa", fp8=True)))
    assert moved > 0.01 and norm > 0.1 and wrong == {}


def study_fp8(folder: str) -> tuple[float, float, dict]:
    model = build(folder, lora_target_modules=["q_b_proj", "o_proj"])
    sharded, before = model.sharded, logps_of(model)
    fill(model)
    moved = (logps_of(model) - before).abs().max().item()
    inputs, targets = inputs_of(IDS)
    sharded.train()
    sharded(inputs, targets).logps.sum().backward()
    adapters, wrong = sharded.gather_adapters(), {}
    assert len(adapters) == 2 * 2 * 3
    for index in range(len(sharded.units)):
        for name, tensor in sharded.gather_trained(index, torch.bfloat16).items():
            base = lora.base_weights(model.converter, [name])[name]
            stem = name.removesuffix("weight")
            expected = base.float() + 4 * adapters[f"{stem}lora.B"] @ adapters[f"{stem}lora.A"]
            if tensor.dtype != torch.bfloat16 or not torch.allclose(tensor.float(), expected, atol=0.01) or torch.equal(tensor, base):
                wrong[name] = (tensor.float() - expected).abs().max().item()
    return moved, sharded.clip_grad_norm(0).item(), wrong


def test_supervised_training_takes_adapters_too(tiny_dir, launch, tmp_path):
    rows = [{"prompt": f"story {i}", "completion": " The spider has eight legs."} for i in range(32)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch(
        "sft.train", "--config=sft/configs/tiny.yaml", f"--model_name_or_path={tiny_dir('qwen3_moe')}", "--max_length=64", "--max_steps=6",
        f"--train_files={tmp_path / 'train.jsonl'}", f"--output_dir={tmp_path / 'run'}", "--lora_rank=8", "--learning_rate=1e-2", "--save_steps=0",
    )  # fmt: skip
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 1.0, losses
