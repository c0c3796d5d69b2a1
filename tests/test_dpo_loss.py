"""Preference losses against worked numbers, TRL's own code on the same tensors, and derivatives by hand."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from common import config
from dpo.loss import FIGURES, LossArguments, Pairs, figure_means, figure_sums, loss_scales, loss_sums, pair_losses

# Two pairs: log-probabilities token by token, and the sums of the reference.
CHOSEN = [[-0.4, -0.6, -0.5], [-0.9, -0.7]]
REJECTED = [[-1.0, -1.6], [-0.5, -0.6, -0.7, -0.8]]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-2.0, -1.5], [-2.2, -2.4]


def pairs_of(chosen, rejected, reference_chosen, reference_rejected, weights=None) -> Pairs:
    def double(values):
        return torch.tensor(values, dtype=torch.float64)

    answers = [answer for pair in zip(chosen, rejected, strict=True) for answer in pair]
    return Pairs.of(
        sums=double([sum(answer) for answer in answers]),
        reference=double([value for pair in zip(reference_chosen, reference_rejected, strict=True) for value in pair]),
        lengths=torch.tensor([len(answer) for answer in answers]),
        weights=double(weights or [1.0] * len(chosen)),
    )


@pytest.fixture
def pairs() -> Pairs:
    return pairs_of(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)


def mean_loss(pairs: Pairs, **options) -> float:
    args = LossArguments(**options)
    scales = loss_scales(args, pairs.weights.sum().item(), (pairs.weights * pairs.chosen_lengths).sum().item())
    return (loss_sums(pairs, args) * scales).sum().item()


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"loss_type": ["sigmoid"]}, 0.66865951),
        ({"loss_type": ["sigmoid"], "label_smoothing": 0.1}, 0.67365951),
        ({"loss_type": ["robust"], "label_smoothing": 0.1}, 0.66240951),
        ({"loss_type": ["ipo"]}, 23.23388889),
        ({"loss_type": ["sigmoid_norm"]}, 0.68406454),
        ({"loss_type": ["sigmoid_norm"], "beta": 5.0}, 0.42073176),
        ({"loss_type": ["hinge"]}, 0.95),
        ({"loss_type": ["sft"]}, 0.62),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}, 0.79265951),
    ],
)
def test_worked_values(pairs, options, expected):
    assert mean_loss(pairs, **options) == pytest.approx(expected, abs=5e-9)


def test_figures(pairs):
    means = figure_means(figure_sums(pairs, beta=0.1))
    expected = {"chosen": 0.02, "rejected": -0.03, "margin": 0.05, "accuracy": 1.0, "logps_chosen": -1.55, "logps_rejected": -2.6}
    expected |= {"length_chosen": 2.5, "length_rejected": 3.0, "drift": (0.5 + 0.4 + 0.1 + 0.2) / 11}
    assert set(means) == {*FIGURES, "drift"}
    assert means == pytest.approx(expected, abs=1e-12)


def test_a_tie_counts_as_wrong():
    equal = pairs_of(CHOSEN, REJECTED, [sum(a) for a in CHOSEN], [sum(a) for a in REJECTED])
    means = figure_means(figure_sums(equal, beta=0.1))
    assert means["accuracy"] == 0 and means["margin"] == 0
    assert mean_loss(equal) == pytest.approx(math.log(2), abs=1e-15)


def test_weights_of_rows_weigh_loss_and_count():
    weighted = pairs_of(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED, weights=[3.0, 1.0])
    losses = [math.log1p(math.exp(-0.09)), math.log1p(math.exp(-0.01))]
    assert mean_loss(weighted) == pytest.approx((3 * losses[0] + losses[1]) / 4)
    assert mean_loss(weighted, loss_type=["sft"]) == pytest.approx((3 * 1.5 + 1.6) / (3 * 3 + 2))


def test_pairs_of_weight_zero_count_nowhere():
    filler = pairs_of([*CHOSEN, []], [*REJECTED, []], [*REFERENCE_CHOSEN, -5.0], [*REFERENCE_REJECTED, -1.0], weights=[1.0, 1.0, 0.0])
    for loss_type in ("sigmoid", "ipo", "sigmoid_norm", "hinge", "sft"):
        whole = pairs_of(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)
        assert mean_loss(filler, loss_type=[loss_type]) == mean_loss(whole, loss_type=[loss_type]), loss_type
    assert figure_means(figure_sums(filler, 0.1)) == pytest.approx(figure_means(figure_sums(whole, 0.1)))


def test_gradient_of_sigmoid(pairs):
    chosen = pairs.chosen.requires_grad_()
    args = LossArguments()
    (loss_sums(pairs, args) * loss_scales(args, 2.0, 5.0)).sum().backward()
    # -beta s(-beta D) / 2 for the mean over two pairs, with D = 0.9 and 0.1
    assert chosen.grad.tolist() == pytest.approx([-0.02387576, -0.02487500], abs=5e-9)


@pytest.mark.parametrize("loss_type", ["sigmoid", "robust", "ipo", "sigmoid_norm", "hinge", "sft"])
def test_derivatives_agree_with_differences(loss_type):
    values = torch.tensor([-3.0, -4.0, -2.5, -6.0], dtype=torch.float64, requires_grad=True)
    reference, lengths = torch.tensor([-3.5, -3.0, -2.0, -7.0], dtype=torch.float64), torch.tensor([3, 4, 2, 5])

    def losses(sums):
        return pair_losses(loss_type, Pairs.of(sums, reference, lengths, torch.ones(2)), 0.3, 0.1)

    assert torch.autograd.gradcheck(losses, values)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_type": ["kto"]}, "kto"),
        ({"loss_type": []}, "loss_type"),
        ({"loss_type": ["sft", "sft"]}, "at most once"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "1 numbers for 2 losses"),
        ({"beta": 0.0}, "beta"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"loss_type": ["hinge"], "label_smoothing": 0.1}, "sigmoid and robust only"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        LossArguments(**options)


def test_lists_on_the_command_line_and_in_yaml(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\nbeta: 5\n")
    (args,) = config.parse(LossArguments, argv=["--config", str(file)])
    assert (args.loss_type, args.loss_weights, args.beta) == (["sigmoid", "sft"], [1.0, 0.2], 5.0)
    (args,) = config.parse(LossArguments, argv=["--config", str(file), "--loss_type", "ipo", "--loss_weights", "2"])
    assert (args.loss_type, args.loss_weights) == (["ipo"], [2.0])


# ---- TRL's code on the same tensors


def loss_by_trl(chosen, rejected, reference_chosen, reference_rejected, **options) -> tuple[float, dict]:
    """DPOTrainer._compute_loss of the installed trl on given per-token log-probabilities; (loss, its metrics)."""
    trainer_class = pytest.importorskip("trl").DPOTrainer
    answers = [*chosen, *rejected]
    width = 1 + max(map(len, answers))
    logps, mask = torch.zeros(len(answers), width - 1), torch.zeros(len(answers), width, dtype=torch.long)
    for row, answer in enumerate(answers):
        logps[row, : len(answer)] = torch.tensor(answer)
        mask[row, 1 : 1 + len(answer)] = 1
    outputs = SimpleNamespace(log_probs=logps, entropy=torch.zeros_like(logps), mean_logits=torch.zeros_like(logps), is_top1=logps > 0)
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, ld_alpha=None, precompute_ref_logps=True, use_weighting=False,
        f_divergence_type="reverse_kl", aux_loss_enabled=False, loss_types=options.get("loss_type", ["sigmoid"]),
        loss_weights=options.get("loss_weights") or [1.0] * len(options.get("loss_type", ["sigmoid"])), beta=options.get("beta", 0.1),
        label_smoothing=options.get("label_smoothing", 0.0), _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "ref_chosen_logps": torch.tensor(reference_chosen), "ref_rejected_logps": torch.tensor(reference_rejected),
    }  # fmt: skip
    loss = trainer_class._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    return loss.item(), {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": ["robust"], "label_smoothing": 0.2},
        {"loss_type": ["ipo"], "beta": 0.7},
        {"loss_type": ["sigmoid_norm"], "beta": 5.0},
        {"loss_type": ["hinge"], "beta": 0.9},
        {"loss_type": ["sft"]},
        {"loss_type": ["sigmoid", "ipo", "sft"], "loss_weights": [1.0, 0.5, 0.2]},
    ],
    ids=str,
)
def test_equal_to_trl(options):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (2, 7), generator=generator).tolist()
    chosen, rejected = ([(-3 * torch.rand(n, generator=generator)).tolist() for n in side] for side in lengths)
    reference = (-15 * torch.rand(2, 7, generator=generator)).tolist()
    expected, metrics = loss_by_trl(chosen, rejected, *reference, **options)
    pairs = pairs_of(chosen, rejected, *reference)
    assert mean_loss(pairs, **options) == pytest.approx(expected, rel=2e-6)
    means = figure_means(figure_sums(pairs, options.get("beta", 0.1)))
    ours = {"chosen": "rewards/chosen", "rejected": "rewards/rejected", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}
    ours |= {"logps_chosen": "logps/chosen", "logps_rejected": "logps/rejected"}
    expected = {name: metrics[theirs] for name, theirs in ours.items()}
    assert {name: means[name] for name in ours} == pytest.approx(expected, rel=2e-5, abs=1e-6)
