"""CHORD: schedules and weights against reference values; mu 0 and 1 are GRPO and SFT to the bit; ranks, micro-batches, resume, gradient norms."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from common import config, run
from common.config import DataArguments, ModelArguments
from common.data import Bins
from common.optim import AdamW
from grpo import chord
from grpo.chord import ChordArguments, mu_at, sft_loss_sum
from grpo.experience import GRPOTrainArguments, Setup, prepare
from grpo.objectives import ObjectiveArguments
from grpo.rollout import RolloutArguments
from grpo.scoring import RewardArguments
from grpo.train import check_arguments, forward_backward, forward_backward_both
from tests.conftest import ROOT, read_metrics
from tests.test_grpo import synthetic_answers

ARGUMENTS = (
    ModelArguments, DataArguments, RolloutArguments, RewardArguments, ObjectiveArguments, GRPOTrainArguments, ChordArguments,
)  # fmt: skip

# ---- the formulas


def arguments(warmup, decay, peak, valley, schedule="cosine", **options):
    return ChordArguments(
        chord_mu_warmup_steps=warmup, chord_mu_decay_steps=decay, chord_mu_peak=peak, chord_mu_valley=valley, chord_mu_schedule=schedule,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "args, values",
    [
        (arguments(0, 200, 0.9, 0.05), {0: 0.9, 50: 0.775520, 100: 0.475, 150: 0.174480, 200: 0.05, 5000: 0.05}),
        (
            arguments(200, 400, 0.5, 0.02),
            {0: 0.0, 1: 0.0025, 100: 0.25, 200: 0.5, 300: 0.429706, 400: 0.26, 500: 0.090294, 600: 0.02, 601: 0.02},
        ),
        (arguments(0, 0, 0.1, 0.1), {0: 0.1, 1: 0.1, 1000: 0.1}),
        (arguments(0, 500, 0.1, 0.01), {125: 0.086820, 250: 0.055, 375: 0.023180, 500: 0.01}),
        (arguments(0, 500, 0.1, 0.01, "linear"), {125: 0.0775, 250: 0.055, 375: 0.0325, 500: 0.01}),
    ],
)
def test_schedule(args, values):
    for step, mu in values.items():
        assert mu_at(step, args) == pytest.approx(mu, abs=5.1e-7), step


P = [0.9, 0.5, 0.05, 0.99]


def test_phi():
    for phi, mean, gradient in (
        (False, 0.951073, [-0.25] * 4),
        (True, 0.081292, [-0.09 / 4, -0.25 / 4, -0.0475 / 4, -0.0099 / 4]),  # through phi the third would be positive
    ):
        logps = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
        loss = sft_loss_sum(logps, torch.ones(4, dtype=torch.float64), phi) / 4
        loss.backward()
        assert loss.item() == pytest.approx(mean, abs=5.1e-7)
        assert logps.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    expected = 0.09 * -math.log(0.9) + 2 * 0.0475 * -math.log(0.05)
    assert sft_loss_sum(torch.tensor(P, dtype=torch.float64).log(), weights, True).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(chord_mu_peak=1.1), "between 0 and 1"),
        (dict(chord_mu_valley=-0.1), "between 0 and 1"),
        (dict(chord_mu_decay_steps=-1), "cannot be negative"),
        (dict(chord_sft_per_device_train_batch_size=0), "at least 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        ChordArguments(**options)


def test_too_few_expert_rows_name_their_own_options(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = r"1 bins of chord_sft_files but one optimizer step needs 2 \(ranks x chord_sft_per_device_train_batch_size\): .* or chord_sft_per_device"
    with pytest.raises(ValueError, match=message):
        chord.Chord(ChordArguments(chord_sft_per_device_train_batch_size=1), None, Bins(np.arange(2), np.array([0, 2])), 0, 1, None)


def test_the_command_line_names_its_commands(capsys):
    assert chord.main(["make-dta"]) == 2 and "python -m grpo.chord make-data" in capsys.readouterr().err
    assert chord.main(["--help"]) == 0 and "make-data" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((ROOT / "grpo" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_read(path):
    tokens = [f"--config={path}", "--model_name_or_path=m", "--train_files=t", "--output_dir=o"]
    tokens += ["--vllm_servers=http://s:1"] * ("rollout_backend: vllm" in path.read_text())
    model_args, data_args, rollout_args, _, objective, args, chord_args = config.parse(*ARGUMENTS, argv=tokens)
    check_arguments(model_args, data_args, rollout_args, objective, chord_args, args)


def test_the_chord_config_mixes():
    path = ROOT / "grpo" / "configs" / "chord.yaml"
    tokens = [f"--config={path}", "--model_name_or_path=m", "--train_files=t", "--output_dir=o", "--vllm_servers=http://s:1"]
    args = config.parse(*ARGUMENTS, argv=tokens)[-1]
    assert args.chord_sft_files and mu_at(0, args) == 0.9 and mu_at(200, args) == 0.05


# ---- gradients of both terms in one process and over ranks


def write_experts(file: Path) -> None:
    with open(file, "w") as stream:
        for i in range(12):
            answer = " ".join(["river", "box", "apple"][: 1 + i % 3]) + f" {i}"
            messages = [{"role": "user", "content": f"story {i}"}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages, "weight": 1.0 + i % 2}) + "\n")


def terms(folder: str, file: str, per_rank: int, per_micro_batch: int, phi: bool, mu: float = 0.3):
    """(loss, gradient norm, figures) of one step of both terms, with the norm of each measured; the same of each alone."""
    model_args = ModelArguments(model_name_or_path=folder, compute_dtype="float32")
    data_args = DataArguments(train_files=[], max_length=64, data_cache_dir=f"{file}.cache", data_workers=1)
    args = GRPOTrainArguments(output_dir=f"{file}.out", per_device_train_batch_size=per_micro_batch)
    chord_args = ChordArguments(
        chord_sft_files=[file], chord_sft_per_device_train_batch_size=per_rank, chord_mu_peak=mu, chord_mu_valley=mu,
        chord_enable_phi_function=phi, chord_norm_steps=1,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    experts = chord.load_chord(chord_args, ["grpo.rewards:choice_f1"], tokenizer, data_args, model_args, args)
    model = run.build_model(model_args)
    optimizer = AdamW(model.sharded.trained_shards(), model_args, args)
    setup = Setup(
        model, None, None, None, None, model_args, data_args, RolloutArguments(max_completion_length=16), RewardArguments(),
        ObjectiveArguments(), args, Path(),
    )  # fmt: skip
    batches = prepare(setup, synthetic_answers(), {}, 1).mini_batches[0]
    rows = experts.micro_batches(0)

    def gradient():
        values = [shard.parameter.grad.clone() for shard in model.sharded.trained_shards() if shard.parameter.grad is not None]
        norm = model.sharded.clip_grad_norm(0).item()
        optimizer.zero_grad()
        return values, norm

    loss, figures, _, _ = forward_backward_both(setup, experts, batches, rows, 0, optimizer)
    both, norm = gradient()
    grpo_loss, *_ = forward_backward(setup, batches, 1 - mu)
    grpo, grpo_norm = gradient()
    sft_loss = experts.forward_backward(model.sharded, rows, mu, 0.0).loss
    sft, sft_norm = gradient()
    apart = max((total - a - b).abs().max().item() for total, a, b in zip(both, grpo, sft, strict=True))
    return {
        "loss": loss, "norm": norm, "figures": figures, "alone": [grpo_loss, grpo_norm, sft_loss, sft_norm], "apart": apart,
        "micro_batches": len(rows),
    }  # fmt: skip


def test_the_form_of_expert_answers_is_compared_with_the_reward(tiny_dir, tmp_path, caplog):
    caplog.set_level("INFO")
    file, folder = tmp_path / "experts.jsonl", tiny_dir("llama")
    write_experts(file)
    data_args = DataArguments(train_files=[], max_length=64, data_workers=1)
    how = (AutoTokenizer.from_pretrained(folder), data_args, ModelArguments(model_name_or_path=str(folder)))
    args = GRPOTrainArguments(output_dir=str(tmp_path / "out"), per_device_train_batch_size=2)
    experts = chord.load_chord(ChordArguments(chord_sft_files=[str(file)]), ["grpo.rewards:choice_f1"], *how, args)
    assert "[ans]" in caplog.text and str(file) in caplog.text  # the reward reads letters in a tag, the experts write none
    assert experts.bins_per_step == 1 and len(experts.bins) > 3
    assert [experts.window(step)[0] for step in range(len(experts.bins))] == experts.order.next(0, 0, len(experts.bins))[0].tolist()
    with pytest.raises(ValueError, match="3 must be a multiple of per_device_train_batch_size 2"):
        chord.micro_bins(ChordArguments(chord_sft_per_device_train_batch_size=3), args)


def all_layouts(folder: str, files: str, layouts):
    return [[terms(folder, f"{files}/experts.jsonl", *layout, phi) for layout in layouts] for phi in (False, True)]


def test_both_terms_do_not_depend_on_ranks_or_micro_batches(tiny_dir, run_ranks, tmp_path):
    """And the figures are those of each term alone: losses unweighted, norms of what each adds to the gradient."""
    write_experts(tmp_path / "experts.jsonl")
    folder = str(tiny_dir("qwen3_moe"))
    [one] = run_ranks(1, all_layouts, folder, str(tmp_path), [(2, 2), (2, 1)])
    two = run_ranks(2, all_layouts, folder, str(tmp_path), [(1, 1)])
    for index in range(2):
        first, second = one[index]
        assert (first["micro_batches"], second["micro_batches"]) == (1, 2)
        for other in (first, second, *(rank[index][0] for rank in two)):
            figures, (grpo_loss, grpo_norm, sft_loss, sft_norm) = other["figures"], other["alone"]
            assert figures["chord/mu"] == 0.3 and other["loss"] == 0.7 * grpo_loss + 0.3 * sft_loss
            assert (figures["chord/grpo_loss"], figures["chord/sft_loss"]) == (grpo_loss, sft_loss)
            assert (figures["chord/grpo_grad_norm"], figures["chord/sft_grad_norm"]) == (grpo_norm, sft_norm)
            assert other["apart"] < 1e-6 and min(grpo_norm, sft_norm) > 1e-3
            assert other["loss"] == pytest.approx(first["loss"], rel=1e-4) and other["norm"] == pytest.approx(first["norm"], rel=1e-4)
            assert other["alone"] == pytest.approx(first["alone"], rel=1e-4, abs=1e-6)
    assert one[1][0]["alone"][2] < one[0][0]["alone"][2] / 3  # phi weakens the SFT term


# ---- whole runs

REWARDS = """
def vowels(prompts, completions, **_):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]

def alike(prompts, completions, **_):
    return [1.0] * len(completions)
"""
TRAINING = (
    "--max_length=96", "--learning_rate=1e-3", "--lr_scheduler_type=constant", "--warmup_steps=0", "--data_workers=1",
)  # fmt: skip
ANSWERS = (
    "--max_completion_length=10", "--num_prompts_per_step=4", "--num_generations=4", "--reward_funcs=my_rewards:vowels",
    "--reward_workers=1", "--mask_truncated_completions=False",
)  # fmt: skip


@pytest.fixture
def train(tiny_dir, launch, tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    write_experts(tmp_path / "experts.jsonl")
    rows = [{"id": f"p{i}", "prompt": [{"role": "user", "content": f"story {i}"}]} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(module, output, data, *options, ranks=1):
        where = (f"--model_name_or_path={tiny_dir('qwen3_moe')}", f"--train_files={tmp_path / data}", f"--output_dir={tmp_path / output}")
        launch(module, *where, *TRAINING, *options, ranks=ranks, env={"PYTHONPATH": str(tmp_path)})
        return read_metrics(tmp_path / output)

    return start


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return tensors


def constant(tmp_path, mu: float) -> tuple[str, ...]:
    return (f"--chord_sft_files={tmp_path / 'experts.jsonl'}", f"--chord_mu_peak={mu}", f"--chord_mu_valley={mu}")


def test_mu_0_is_grpo_and_mu_1_is_sft_to_the_bit(train, tmp_path):
    """Three updates: each loss, and the weights at the end. Measuring the norms changes nothing."""
    steps = ("--max_steps=3", "--save_steps=0")
    sft = train("sft.train", "sft", "experts.jsonl", *steps)
    one = train("grpo.train", "one", "train.jsonl", *steps, *ANSWERS, *constant(tmp_path, 1.0), "--chord_norm_steps=1")
    assert [line["chord/sft_loss"] for line in one] == [line["loss"] for line in one] == [line["loss"] for line in sft]
    assert [line["grad_norm"] for line in one] == [line["grad_norm"] for line in sft] == [line["chord/sft_grad_norm"] for line in one]
    assert [line["chord/grpo_grad_norm"] for line in one] == [0.0] * 3 and all("chord/grpo_loss" in line for line in one)
    grpo = train("grpo.train", "grpo", "train.jsonl", *steps, *ANSWERS)
    zero = train("grpo.train", "zero", "train.jsonl", *steps, *ANSWERS, *constant(tmp_path, 0.0))
    assert [{k: v for k, v in line.items() if not k.startswith("chord/")} for line in zero] == grpo
    assert [line["chord/mu"] for line in zero] == [0.0] * 3 and not any("chord/sft_loss" in line for line in zero)
    for a, b in (("sft", "one"), ("grpo", "zero")):
        first, second = weights_of(tmp_path / a / "final"), weights_of(tmp_path / b / "final")
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], tensor) for name, tensor in weights_of(tmp_path / "sft" / "final").items())


def test_six_steps_are_three_and_three(train, tmp_path):
    """On two ranks, with a warm-up, inside a rollout; expert rows go on where they were."""
    options = (
        *ANSWERS, f"--chord_sft_files={tmp_path / 'experts.jsonl'}", "--chord_mu_warmup_steps=2", "--chord_mu_decay_steps=3",
        "--chord_norm_steps=2", "--num_minibatches=2", "--chord_enable_phi_function=True", "--save_steps=3",
    )  # fmt: skip
    whole = train("grpo.train", "whole", "train.jsonl", *options, "--max_steps=6", ranks=2)
    train("grpo.train", "parts", "train.jsonl", *options, "--max_steps=3", ranks=2)
    assert train("grpo.train", "parts", "train.jsonl", *options, "--max_steps=6", ranks=2) == whole
    assert [line["chord/mu"] for line in whole] == pytest.approx([0, 0.45, 0.9, 0.6875, 0.2625, 0.05])
    assert ["chord/sft_loss" in line for line in whole] == [False] + [True] * 5
    assert ["chord/sft_grad_norm" in line for line in whole] == [False, True] * 3
    for line in whole[1:]:
        mixed = (1 - line["chord/mu"]) * line["chord/grpo_loss"] + line["chord/mu"] * line["chord/sft_loss"]
        assert line["loss"] == pytest.approx(mixed, rel=1e-12)
    one, two = (weights_of(tmp_path / name / "final") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_experts_teach_where_answers_carry_no_signal(train, tmp_path):
    """Every group collapses: no step is skipped, and the loss is the SFT term's share."""
    lines = train(
        "grpo.train", "run", "train.jsonl", *ANSWERS, *constant(tmp_path, 0.5), "--reward_funcs=my_rewards:alike", "--max_steps=2",
        "--save_steps=0", "--export_final=False",
    )  # fmt: skip
    assert [line["skipped_steps"] for line in lines] == [0, 0] and all("grpo/ratio" not in line for line in lines)
    assert all(line["loss"] == 0.5 * line["chord/sft_loss"] > 0 and line["chord/grpo_loss"] == 0.0 for line in lines)
    assert all(line["grad_norm"] > 0.1 for line in lines)
