"""GRPO's objectives, corrections and advantages against reference values, TRL's own loss and finite differences."""

import math
import sys
import types

import numpy as np
import pytest
import torch

from grpo import objectives
from grpo.advantages import compute_advantages, compute_gdpo_advantages, is_collapsed
from grpo.objectives import ObjectiveArguments
from tests.conftest import ROOT

# Worked example: rewards 1,0,0,1; lengths 4,2,3,4; new - old, old and reference log-probabilities.
LENGTHS = [4, 2, 3, 4]
ADVANTAGE = 0.86587543
LOG_RATIO = [0.30, -0.10, 0.05, -0.40, 0.25, -0.30, -0.35, 0.10, 0.02, 0.15, 0.05, -0.05, 0.10]
OLD = [-1.0, -0.5, -2.0, -0.7, -0.3, -1.2, -0.9, -0.4, -1.5, -0.6, -1.1, -0.8, -0.2]
REFERENCE = [-1.1, -0.4, -1.8, -0.9, -0.5, -1.0, -1.0, -0.6, -1.4, -0.6, -1.0, -0.9, -0.3]
MAX_LENGTH = 8


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


ROW = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
ADVANTAGES = tensor([ADVANTAGE, -ADVANTAGE, -ADVANTAGE, ADVANTAGE])
ALL = torch.ones(13, dtype=torch.bool)


def total(logps, args, *, mask=ALL, kl_mask=None, split=None, weights=None):
    """The objective on the worked example; `split`: as micro-batches of these rows, with the window's counts."""
    old, reference = tensor(OLD), tensor(REFERENCE)
    kl_mask = mask if kl_mask is None else kl_mask
    weights = torch.ones_like(old) if weights is None else weights
    parts = [torch.tensor(rows) for rows in (split or [[0, 1, 2, 3]])]
    windows = [sum(objectives.counts(m[torch.isin(ROW, part)], renumber(part), len(part)) for part in parts) for m in (mask, kl_mask)]
    result = 0
    for part in parts:
        inside = torch.isin(ROW, part)
        row = renumber(part)
        scales = [
            objectives.token_scales(m[inside], row, len(part), window, args.loss_type, MAX_LENGTH)
            for m, window in zip((mask, kl_mask), windows, strict=True)
        ]
        losses = objectives.policy_losses(logps[inside], old[inside], ADVANTAGES[part], row, args)
        result = result + (scales[0] * weights[inside] * losses.loss).sum()
        if args.beta:
            kl = objectives.kl_estimates(logps[inside], reference[inside], old[inside] if args.use_bias_correction_kl else None)
            result = result + args.beta * (scales[1] * kl).sum()
    return result


def renumber(part):
    return torch.cat([torch.full((LENGTHS[p],), i) for i, p in enumerate(part.tolist())])


def value_and_gradient(args, **options):
    logps = (tensor(OLD) + tensor(LOG_RATIO)).requires_grad_()
    loss = total(logps, args, **options)
    loss.backward()
    return loss.item(), logps.grad


CASES = {
    # name: (arguments, loss, |gradient|, loss and |gradient| with the last answer masked)
    "grpo symmetric": (dict(loss_type="grpo", epsilon_high=0.2), -0.00148211, 0.226848, None, None),
    "grpo": (dict(loss_type="grpo"), -0.00581149, 0.226848, 0.30032302, 0.260061),
    "dapo": (dict(loss_type="dapo"), -0.21090971, 0.219551, 0.10611487, 0.241177),
    "dr_grpo": (dict(loss_type="dr_grpo"), -0.08568207, 0.089193, 0.03979308, 0.067831 * 4 / 3),
    "gspo": (dict(loss_type="gspo"), 0.00775079, 0.104251, 0.22430624 * 4 / 3, 0.104251 * 4 / 3),
    "gspo wide": (dict(loss_type="gspo", epsilon=0.2, epsilon_high=0.28), -0.02731413, 0.244599, 0.20311577 * 4 / 3, 0.215764 * 4 / 3),
    "gspo token mean": (
        dict(loss_type="gspo_token_mean", epsilon=0.2, epsilon_high=0.28),
        -0.22523019,
        0.237546,
        0.08432066,
        0.275280,
    ),
    "luspo": (dict(loss_type="luspo", epsilon=0.2, epsilon_high=0.28), -0.73199812, 0.772025, 0.18972148 * 4 / 3, 0.619380 * 4 / 3),
    "cispo": (dict(loss_type="cispo"), 0.19469665, 0.246828, 0.03630869, 0.291047),
    "cispo low cap": (dict(loss_type="cispo", cispo_cap=0.28), 0.04140217, 0.067242, -0.00619582, 0.080815),
    "sapo": (dict(loss_type="sapo"), -0.06394766, 0.253184, 0.51140075, 0.225308 * 4 / 3),
    "grpo kl": (dict(loss_type="grpo", beta=0.04), -0.00397706, 0.228303, 0.22699685 * 4 / 3, 0.196979 * 4 / 3),
    "grpo kl ratio": (
        dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=True),
        -0.00401475,
        0.228934,
        0.22694989 * 4 / 3,
        0.197766 * 4 / 3,
    ),
    "dapo kl": (dict(loss_type="dapo", beta=0.04), -0.20945931, 0.220347, 0.10806794, 0.243309),
}


@pytest.mark.parametrize("name", CASES)
def test_worked_example(name):
    options, loss, norm, masked_loss, masked_norm = CASES[name]
    args = ObjectiveArguments(**options)
    value, gradient = value_and_gradient(args)
    assert value == pytest.approx(loss, abs=2e-8)
    assert gradient.norm().item() == pytest.approx(norm, abs=1e-6)
    if masked_loss is not None:
        value, gradient = value_and_gradient(args, mask=ROW != 3)
        assert value == pytest.approx(masked_loss, abs=3e-8)
        assert gradient.norm().item() == pytest.approx(masked_norm, abs=2e-6)


def test_gradient_of_each_token():
    expected = {"grpo": (0, -0.048967, -0.056892, -0.036276), "dapo": (0, -0.060267, -0.070021, -0.044647)}
    for loss_type, values in expected.items():
        _, gradient = value_and_gradient(ObjectiveArguments(loss_type=loss_type))
        assert gradient[:4].tolist() == pytest.approx(values, abs=1e-6)  # the first token is clipped: r = 1.35, A > 0
    losses = objectives.policy_losses(tensor(OLD) + tensor(LOG_RATIO), tensor(OLD), ADVANTAGES, ROW, ObjectiveArguments())
    assert losses.clipped.double().mean().item() == pytest.approx(3 / 13)
    gspo = objectives.policy_losses(tensor(OLD) + tensor(LOG_RATIO), tensor(OLD), ADVANTAGES, ROW, ObjectiveArguments(loss_type="gspo"))
    assert gspo.ratio[[0, 4, 6, 9]].tolist() == pytest.approx([0.96319442, 0.97530991, 0.92619854, 1.06449446], abs=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_value_does_not_depend_on_how_rows_are_spread(name):
    args = ObjectiveArguments(**CASES[name][0])
    whole, gradient = value_and_gradient(args, mask=ROW != 1)
    for split in ([[0], [1], [2], [3]], [[0, 3], [1, 2]]):
        value, other = value_and_gradient(args, mask=ROW != 1, split=split)
        assert value == pytest.approx(whole, abs=1e-12)
        assert torch.allclose(gradient, other, atol=1e-12)


@pytest.mark.parametrize("name", [*CASES, "dual clip"])
def test_finite_differences(name):
    args = ObjectiveArguments(**CASES[name][0]) if name in CASES else ObjectiveArguments(dual_clip=1.5)
    if args.loss_type == "cispo":  # its loss is no integral of its gradient: the weight is detached
        weight = tensor(LOG_RATIO).exp().clamp(max=args.cispo_cap)
        _, gradient = value_and_gradient(args)
        assert torch.allclose(gradient, -weight * ADVANTAGES[ROW] / 13, atol=1e-12)
        return
    logps = tensor(OLD) + tensor(LOG_RATIO)
    _, gradient = value_and_gradient(args)
    step = 1e-6
    for i in range(13):
        up, down = logps.clone(), logps.clone()
        up[i] += step
        down[i] -= step
        assert ((total(up, args) - total(down, args)) / (2 * step)).item() == pytest.approx(gradient[i].item(), abs=1e-7)


def test_dual_clip_bounds_the_loss_of_bad_answers():
    for loss_type in ("dapo", "grpo"):
        args = ObjectiveArguments(loss_type=loss_type, dual_clip=3.0)
        log_ratio, row = tensor([math.log(5.0), math.log(5.0), math.log(2.0)]), torch.tensor([0, 1, 2])
        losses = objectives.policy_losses(log_ratio, torch.zeros_like(log_ratio), tensor([-1.0, 1.0, -1.0]), row, args)
        assert losses.loss.tolist() == pytest.approx([3.0, -1.28, 2.0])
        assert losses.clipped.tolist() == [True, True, False]


def test_kl_estimate():
    logps = tensor([0.0, 0.0, 0.0]).requires_grad_()
    estimate = objectives.kl_estimates(logps, tensor([-0.5, 0.5, 2.0]))
    assert estimate.tolist() == pytest.approx([0.106531, 0.148721, 4.389056], abs=1e-6)
    estimate.sum().backward()
    assert logps.grad.tolist() == pytest.approx([0.393469, -0.648721, -6.389056], abs=1e-6)


def test_kl_has_its_own_count():
    """Answers that the policy term leaves out still pull towards the reference, and each term is divided by its own tokens."""
    args = ObjectiveArguments(beta=0.04)
    policy, _ = value_and_gradient(ObjectiveArguments(), mask=ROW != 3)
    both, _ = value_and_gradient(args, mask=ROW != 3, kl_mask=ALL)
    k3 = objectives.kl_estimates(tensor(OLD) + tensor(LOG_RATIO), tensor(REFERENCE)).mean().item()
    assert k3 == pytest.approx(0.03626, abs=1e-5)
    assert both == pytest.approx(policy + 0.04 * k3, abs=1e-12)


def test_the_documented_way_to_add_an_objective(monkeypatch):
    """The lines in grpo/README.md, applied to grpo/objectives.py."""
    readme, path = (ROOT / "grpo" / "README.md").read_text(), ROOT / "grpo" / "objectives.py"
    diff = readme.split("### Adding an objective")[1].split("```diff\n")[1].split("```")[0].splitlines()
    source, old, new = path.read_text(), [], []
    for line, following in zip(diff, [*diff[1:], "-"], strict=True):
        (old if line.startswith("-") else new).append(line[1:])
        if line.startswith("+") and following.startswith("-"):
            before, after = "\n".join(old), "\n".join(new)
            assert source.count(before) == 1, before
            source, old, new = source.replace(before, after), [], []
    module = types.ModuleType("objectives_with_reinforce")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(source, str(path), "exec"), module.__dict__)
    monkeypatch.setattr(sys.modules[__name__], "objectives", module)
    value, gradient = value_and_gradient(module.ObjectiveArguments(loss_type="reinforce"))
    logps = tensor(OLD) + tensor(LOG_RATIO)
    assert value == pytest.approx(-(ADVANTAGES[ROW] * logps).mean().item())
    assert torch.allclose(gradient, -ADVANTAGES[ROW] / 13)


# ---- correction

DELTA = tensor([0.10, -0.05, 0.90, 0.02, -0.80, 0.03, -0.02, 1.80, -0.30])
DELTA_ROW = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
W = [1.105171, 0.951229, 2.459603, 1.020201, 0.449329, 1.030455, 0.980199, 6.049647, 0.740818]


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(rollout_correction="none"), [1.0] * 9),
        (dict(rollout_correction="token_tis"), [*W[:2], 2.0, *W[3:7], 2.0, W[8]]),
        (dict(rollout_correction="token_mis", rollout_correction_high=3.0), [*W[:7], 0.0, W[8]]),
        (dict(rollout_correction="icepop"), [*W[:4], 0.0, *W[5:7], 0.0, W[8]]),
        (dict(rollout_correction="seq_tis"), [2.0] * 4 + [0.453845] * 3 + [2.0] * 2),
        (dict(rollout_correction="seq_mis", rollout_correction_high=3.0), [2.637944] * 4 + [0.453845] * 3 + [0.0] * 2),
        (dict(rollout_correction="geo_mask", rollout_correction_low=0.7, rollout_correction_high=1.3), [1.0] * 7 + [0.0] * 2),
        (dict(rollout_correction="geo_mask"), [0.0] * 9),
    ],
)
def test_correction(options, expected):
    weights = objectives.correction_weights(DELTA, DELTA_ROW, 3, ObjectiveArguments(**options))
    assert weights.tolist() == pytest.approx(expected, abs=1e-6)


def test_product_and_geometric_mean_are_different_forms():
    product = objectives.correction_weights(
        DELTA, DELTA_ROW, 3, ObjectiveArguments(rollout_correction="seq_tis", rollout_correction_high=100.0)
    )
    assert product[[0, 4, 7]].tolist() == pytest.approx([2.637944, 0.453845, 4.481689], abs=1e-6)
    geometric = objectives.row_means(DELTA, DELTA_ROW, 3).exp()
    assert geometric.tolist() == pytest.approx([1.274431, 0.768486, 2.117000], abs=1e-6)


def test_distance_of_engine_and_trainer():
    absolute, k3, count = objectives.mismatch(DELTA).tolist()
    assert absolute / count == pytest.approx(DELTA.abs().mean().item())
    assert k3 / count == pytest.approx(0.456295, abs=1e-6)


def test_rejected_tokens_leave_both_sums():
    args = ObjectiveArguments(rollout_correction="icepop")
    weights = torch.ones(13, dtype=torch.float64)
    weights[3] = 0.0
    value, _ = value_and_gradient(args, mask=weights > 0, weights=weights)
    logps = tensor(OLD) + tensor(LOG_RATIO)
    losses = objectives.policy_losses(logps, tensor(OLD), ADVANTAGES, ROW, args).loss
    assert value == pytest.approx(((losses.sum() - losses[3]) / 12).item(), abs=1e-12)


# ---- advantages


@pytest.mark.parametrize(
    "rewards, expected, dr_grpo",
    [
        ([1, 0, 0, 1], [0.86587543, -0.86587543, -0.86587543, 0.86587543], [0.5, -0.5, -0.5, 0.5]),
        ([1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 0, 0, 0], [1.49970006, -0.49990002, -0.49990002, -0.49990002], [0.75, -0.25, -0.25, -0.25]),
        ([0.05, 1.05, 0.55, 0.05], [-0.78318585, 1.30530975, 0.26106195, -0.78318585], [-0.375, 0.625, 0.125, -0.375]),
        ([None, 1, 0, 1], [0, 0.57725, -1.15450, 0.57725], [0, 1 / 3, -2 / 3, 1 / 3]),
        ([0.05] * 7 + [0], [0.351565] * 7 + [-2.460952], [0.00625] * 7 + [-0.04375]),
        (
            [0.05, 1.05, 0.716667, 0.05, 0, 1.05, 0.85, 0.05],
            [-0.885480, 1.187839, 0.496733, -0.885480, -0.989146, 1.187839, 0.773175, -0.885480],
            None,
        ),
    ],
)
def test_advantage_tables(rewards, expected, dr_grpo):
    groups = ["q"] * len(rewards)
    assert compute_advantages(rewards, groups).values.tolist() == pytest.approx(expected, abs=1.1e-6)
    if dr_grpo:
        assert compute_advantages(rewards, groups, "none").values.tolist() == pytest.approx(dr_grpo, abs=1e-12)


def test_batch_scaling():
    result = compute_advantages([1, 0, 0, 1, 1, 0, 0, 0], list("aaaabbbb"), "batch").values
    a, b, c = 0.96590515, 1.44885773, 0.48295258
    assert result.tolist() == pytest.approx([a, -a, -a, a, b, -c, -c, -c], abs=1e-8)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("count", [3, 7, 8, 10])
@pytest.mark.parametrize("reward", [1.05, 0.05, 2 / 3, 0.8, 0.85, 0.9])
def test_equal_rewards_give_exactly_zero(scale, count, reward):
    result = compute_advantages([reward] * count + [0.0, 1.0], ["same"] * count + ["other"] * 2, scale)
    assert (result.values[:count] == 0.0).all() and not result.informative[:count].any() and result.informative[count:].all()
    assert is_collapsed([reward] * count) and not is_collapsed([0.0, 1.0])


def test_a_standard_deviation_of_zero_cannot_be_relied_on():
    """What the test above is about: equal rewards whose std is rounding, in float32 and float64."""
    assert torch.full((8,), 1.05).std() > 0 and np.full(7, 0.9).std() > 0


def test_groups_are_formed_by_id_whatever_the_order_and_size():
    mixed = compute_advantages([1, 5, 0, 5, None, 0], ["a", "b", "a", "b", "c", "a"])
    assert mixed.values.tolist() == pytest.approx([1.1545005, 0, -0.5772503, 0, 0, -0.5772503], abs=1e-4)
    assert mixed.informative.tolist() == [True, False, True, False, False, True]
    assert is_collapsed([None, None]) and is_collapsed([None, 5]) and not is_collapsed([None, 5, 4])


# Two groups of four answers, rewards (right, format); weights; what comes out. With equal weights a right answer without format is punished.
FORMAT = [(1, 1), (1, 0), (0, 1), (0, 1), (1, 1), (1, 1), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    "weights, expected",
    [
        ((1.0, 1.0), [1.043243, -0.484145, -0.279549, -0.279549, 1.043243, 1.043243, -0.279549, -1.806937]),
        ((1.0, 0.05), [0.961112, 0.853249, -0.907181, -0.907181, 0.961112, 0.961112, -0.907181, -1.015044]),
    ],
)
def test_gdpo(weights, expected):
    components = [{"right": float(right), "format": float(form)} for right, form in FORMAT]
    result = compute_gdpo_advantages(components, weights, list("aaaabbbb"))
    assert result.values.tolist() == pytest.approx(expected, abs=1e-6) and result.informative.all()
    scaled = [{"right": 3 * c["right"], "format": 0.05 * c["format"]} for c in components]  # the weight counts, not the size of a reward
    assert compute_gdpo_advantages(scaled, weights, list("aaaabbbb")).values.tolist() == pytest.approx(expected, abs=1e-2)


def test_the_sum_of_two_rewards_is_another_objective():
    """The same rewards, added before they are normalised."""
    for weight, expected in (
        (1.0, [1.4997, -0.4999, -0.4999, -0.4999, 0.783268, 0.783268, -0.261089, -1.305446]),
        (0.05, [0.909677, 0.820928, -0.865303, -0.865303, 0.865365, 0.865365, -0.823152, -0.907577]),
    ):
        result = compute_advantages([right + weight * form for right, form in FORMAT], list("aaaabbbb"))
        assert result.values.tolist() == pytest.approx(expected, abs=1e-6)


def test_gdpo_of_groups_without_signal_and_answers_without_reward():
    components = [{"right": r, "format": f} for r, f in [(1.0, 0.85), (0.0, 0.85), (1.0, None), (1.05, 0.9), (1.05, 0.9), (None, None)]]
    result = compute_gdpo_advantages(components, [1.0, 1.0], list("aaabbb"))
    assert result.informative.tolist() == [True] * 3 + [False] * 3 and (result.values[3:] == 0.0).all()
    part = compute_advantages([1.0, 0.0, 1.0], list("aaa")).values
    total = np.append(part, [0.0, 0.0])  # the answer that nobody scored is in no statistic
    assert result.values[:3].tolist() == pytest.approx(((part - total.mean()) / (total.std(ddof=1) + 1e-4)).tolist(), abs=1e-12)
    only_format = compute_gdpo_advantages(components, [0.0, 1.0], list("aaabbb"))  # a reward without a weight gives no signal
    assert not only_format.informative.any()


def test_std_floor():
    floored = compute_advantages([0.05] * 7 + [0], ["q"] * 8, std_floor=0.1).values
    assert floored.tolist() == pytest.approx([0.00625 / 0.1001] * 7 + [-0.04375 / 0.1001])


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "grpo kl", "grpo kl ratio", "dapo kl"])
def test_equals_trl(name, tmp_path):
    """The same loss and gradient as GRPOTrainer._compute_loss where nothing is masked."""
    pytest.importorskip("trl")
    from trl import GRPOConfig, GRPOTrainer

    args = ObjectiveArguments(**CASES[name][0])
    sequence = args.loss_type in objectives.SEQUENCE_RATIO
    config = GRPOConfig(
        output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none", per_device_train_batch_size=4, num_generations=4,
        loss_type="grpo" if args.loss_type == "gspo" else args.loss_type, importance_sampling_level="sequence" if sequence else "token",
        epsilon=args.epsilon, epsilon_high=args.cispo_cap if args.loss_type == "cispo" else args.epsilon_high, beta=args.beta,
        max_completion_length=MAX_LENGTH, use_bias_correction_kl=args.use_bias_correction_kl,
    )  # fmt: skip
    logps = (tensor(OLD) + tensor(LOG_RATIO)).requires_grad_()
    mask = torch.zeros(4, 4, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1

    def padded(values):
        return torch.zeros(4, 4, dtype=torch.float64).masked_scatter(mask.bool(), values)

    trainer = oracle(GRPOTrainer, config, padded(logps))
    inputs = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.long), "prompt_mask": torch.ones(4, 1),
        "completion_ids": torch.zeros(4, 4, dtype=torch.long), "completion_mask": mask, "advantages": ADVANTAGES,
        "old_per_token_logps": padded(tensor(OLD)), "ref_per_token_logps": padded(tensor(REFERENCE)), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()
    value, gradient = value_and_gradient(args)
    tolerance = 1e-7 if name == "sapo" else 1e-12  # TRL keeps sapo's two temperatures in float32
    assert value == pytest.approx(expected.item(), abs=tolerance)
    assert torch.allclose(gradient, logps.grad, atol=tolerance)


def oracle(trainer_class, config, per_token_logps):
    """A GRPOTrainer that computes its loss from given log-probabilities; no model is built."""
    from collections import defaultdict
    from types import SimpleNamespace

    trainer = trainer_class.__new__(trainer_class)
    trainer.model = torch.nn.Linear(1, 1)
    names = ("loss_type", "beta", "max_completion_length", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold")
    for name in names:
        setattr(trainer, name, getattr(config, name))
    trainer.args, trainer.epsilon_low, trainer.epsilon_high = config, config.epsilon, config.epsilon_high
    trainer.use_vllm = trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = 1
    config.steps_per_generation = 1
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x.reshape(-1), gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, device="cpu"
    )
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (per_token_logps, torch.zeros(4, 4), None)
    return trainer
