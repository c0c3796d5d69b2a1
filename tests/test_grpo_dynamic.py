"""Dynamic sampling: what is to be expected against tables and a simulation, what carries signal, no group lost or used twice, whole runs."""

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import run
from common.checkpoint import TrainState
from common.config import DataArguments, ModelArguments
from common.data import Order
from grpo import sampling
from grpo.advantages import compute_gdpo_advantages
from grpo.batches import load_logps, make_mini_batches, read_logps, save_logps
from grpo.difficulty import read_measurement, summarise
from grpo.experience import (
    GRPOTrainArguments,
    Rollout,
    Setup,
    check_engine,
    distance_figures,
    on_policy_distance,
    resume_surplus,
    roll_out,
    start_ahead,
    write_unfinished,
)
from grpo.objectives import ObjectiveArguments
from grpo.rollout import Answer, Completion, Question, RolloutArguments, SyncReport, read_lines, rollout_path
from grpo.sampling import Prompts, announce, carries_signal, fill, read_pass_rates
from grpo.scoring import RewardArguments, Score
from tests.conftest import read_metrics

# ---- what the data let one expect


def test_collapse_table():
    table = {
        4: [0.92237, 0.81451, 0.65620, 0.32031, 0.12500],
        8: [0.85076, 0.66342, 0.43047, 0.10013, 0.00781],
        16: [0.72380, 0.44013, 0.18530, 0.01002, 0.00003],
    }
    for count, row in table.items():
        for p, expected in zip((0.02, 0.05, 0.1, 0.25, 0.5), row, strict=True):
            assert sampling.collapse_probability(p, count) == pytest.approx(expected, abs=5.1e-6)
            assert sampling.collapse_probability(1 - p, count) == pytest.approx(expected, abs=5.1e-6)


FILLS = {
    (32, 2): {0.3: 0.9997, 0.5: 0.5497, 0.6: 0.0671, 2 / 3: 0.0043, 0.7: 0.0006, 0.8: 0.0},
    (32, 3): {0.3: 1.0, 0.5: 0.9997, 0.6: 0.9260, 2 / 3: 0.5383, 0.7: 0.2708, 0.8: 0.0015},
    (32, 5): {0.3: 1.0, 0.5: 1.0, 0.6: 1.0, 2 / 3: 0.9999, 0.7: 0.9984, 0.8: 0.5315},
    (8, 3): {0.5: 0.9680, 0.6: 0.8081, 2 / 3: 0.5762, 0.7: 0.4353, 0.8: 0.0892},
}


def test_fill_table():
    for (size, rounds), row in FILLS.items():
        for collapse, expected in row.items():
            assert sampling.fill_probability(size, rounds, collapse) == pytest.approx(expected, abs=5.1e-5), (size, rounds, collapse)
    assert sampling.fill_probability(8, 3, 0.0) == 1.0 and sampling.fill_probability(8, 3, 1.0) == 0.0


def test_expected_collapse_of_measured_pass_rates():
    for count, row in {8: [0.4289, 0.1678, 0.0699, 0.0699, 0.1678, 0.4289], 16: [0.2727, 0.0652, 0.0150, 0.0150, 0.0652, 0.2727]}.items():
        assert [sampling.expected_collapse(k, 5, count) for k in range(6)] == pytest.approx(row, abs=5.1e-5)
    assert sampling.expected_collapse(500, 1000, 8) == pytest.approx(sampling.collapse_probability(0.5, 8), rel=0.05)


def made_up(name: str, accuracy: list[float | None], form=None, reasons=None, reward=None) -> list[Answer]:
    """A group with these accuracies; `form`: what a second reward says."""
    group = []
    for sample, value in enumerate(accuracy):
        rewards = {"right": value, "form": form[sample] if form else None}
        completion = Completion(name, sample, [1], [-1.0], reasons[sample] if reasons else "stop", [(0, 0, 1)])
        total = sum(v for v in rewards.values() if v is not None) if any(v is not None for v in rewards.values()) else None
        group.append(Answer(Question(name, "", [1], {}, ""), completion, "", rewards, total, informative=True))
    return group


def test_signal_is_judged_on_the_accuracy():
    assert carries_signal(made_up("a", [1.0, 0.0]), "right", True)
    assert not carries_signal(made_up("a", [0.0, 0.0], form=[0.05, 0.0]), "right", True)  # all wrong: only the form differs
    assert carries_signal(made_up("a", [0.0, 0.0], form=[0.05, 0.0]), "form", True)
    assert not carries_signal(made_up("a", [None, None]), "right", True)
    assert not carries_signal(made_up("a", [None, 1.0]), "right", True)
    cut = made_up("a", [1.0, 0.0], reasons=["length", "length"])  # nothing of it trains
    assert not carries_signal(cut, "right", True) and carries_signal(cut, "right", False)
    assert sampling.pass_rate(made_up("a", [1.05, 0.05, None, 1.0]), "right") == (2, 3)


@pytest.mark.parametrize("size, rounds, collapse", [(32, 3, 0.6), (32, 3, 0.7), (32, 2, 0.5), (8, 3, 2 / 3), (8, 3, 0.8)])
def test_success_rate_is_that_of_the_binomial(size, rounds, collapse):
    """From an empty store; what is kept between rollouts makes it better, and no group is lost or used twice."""
    rng = random.Random(0)
    groups = {True: made_up("a", [1.0, 0.0]), False: made_up("a", [0.0, 0.0])}

    def draw(number, without):
        return [groups[rng.random() >= collapse] for _ in range(size)]

    def carries(group):
        return carries_signal(group, "right", True)

    trials = 2000
    full = sum(len(fill(size, rounds, [], draw, carries).groups) == size for _ in range(trials))
    expected = FILLS[size, rounds][collapse]
    assert full / trials == pytest.approx(expected, abs=4 * (expected * (1 - expected) / trials) ** 0.5 + 1e-3)

    kept, full, totals = [], 0, Counter()
    for _ in range(trials):
        before = len(kept)
        filled = fill(size, rounds, kept, draw, carries)
        kept = filled.surplus
        full += len(filled.groups) == size
        totals += Counter(trained=len(filled.groups), filtered=len(filled.filtered), drawn=filled.rounds * size)
        assert len(kept) < size and filled.rounds <= rounds
        assert before + filled.rounds * size == len(filled.groups) + len(filled.filtered) + len(kept)
    assert totals["drawn"] == totals["trained"] + totals["filtered"] + len(kept)
    assert full / trials > expected - 0.03


def test_no_prompt_comes_twice_into_one_rollout():
    """Two epochs meet in it: what the first has brought is left out of the second's batch."""
    prompts = Prompts([Question(f"q{i}", "", [1], {}, "") for i in range(6)], Order(6, 3), 4)
    first, epoch, offset = prompts.next(0, 0)
    assert len({q.id for q in first}) == 4 and (epoch, offset) == (1, 0)
    ids = {q.id for q in first}
    second, _, _ = prompts.next(epoch, offset, ids)
    assert not ids & {q.id for q in second} and 0 < len(second) < 4
    assert len(prompts.next(epoch, offset)[0]) == 4


def test_pass_rates_from_a_file(tmp_path, caplog):
    caplog.set_level("INFO")
    file = tmp_path / "d.jsonl"
    file.write_text('{"id": "q0", "k": 4, "n": 5, "model_fingerprint": "x"}\n{"id": 1, "k": 1, "n": 5}\n')
    rates = read_pass_rates(str(file))
    assert rates == {"q0": (4, 5), "1": (1, 5)}
    questions = [Question(name, "", [1], {}, "") for name in ("q0", "1", "other")]
    expected = sampling.expected_collapse(4, 5, 8, sampling.fit_prior(rates.values()))
    args = RolloutArguments(num_prompts_per_step=1, num_generations=8, dynamic_sampling=True, max_resample_times=2)
    announce(questions, rates, args)
    assert f"2 of 3 prompts {expected:.3f} of the groups collapse" in caplog.text and "cannot fill" not in caplog.text
    args.max_resample_times = 1
    announce(questions, rates, args)
    assert f"{expected:.3f} of the groups are expected to collapse, 1 batches bear 0.000. Raise max_resample_times to 2" in caplog.text
    args.max_resample_times = 4
    announce(questions, rates, args)
    assert "3 prompts are fewer than 4 batches of 1" in caplog.text
    with pytest.raises(ValueError, match="none of the prompts' ids"):
        announce(questions, {"else": (1, 2)}, args)
    for line in ('{"id": "q", "k": 6, "n": 5}', '{"id": "q", "k": 1}', "[]", "{", '{"id": "q", "k": 0, "n": 0}'):
        file.write_text('{"id": "q0", "k": 5, "n": 5}\n' + line)
        with pytest.raises(ValueError, match=r"d.jsonl:2: needs id, k and n"):
            read_pass_rates(str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        read_pass_rates(str(tmp_path / "none.jsonl"))


def test_the_run_expects_what_the_report_says(tmp_path, caplog):
    """A strong model: most prompts are all right, and a prior that did not know would call half of their groups useful."""
    caplog.set_level("INFO")
    lines = [json.dumps({"id": f"q{i}", "k": 8 if i < 190 else 4, "n": 8}) + "\n" for i in range(200)]
    (tmp_path / "d.jsonl").write_text("".join(lines))
    measured = read_measurement(str(tmp_path / "d.jsonl"))
    found = summarise(measured, 8, 3, 32)
    assert found["collapse"]["fitted"] == pytest.approx(0.94, abs=5e-5) and not found["fills"]
    questions = [Question(f"q{i}", "", [1], {}, "") for i in range(200)]
    announce(questions, measured.rates, RolloutArguments(dynamic_sampling=True))
    assert f"0.940 of the groups collapse; a rollout is filled with probability {found['fill_probability']:.4f}" in caplog.text
    assert "cannot fill its rollouts: 0.940" in caplog.text and "Raise max_resample_times to 17" in caplog.text
    # Of a few levels only: the prior is that of all prompts that were measured.
    announce(questions[190:], measured.rates, RolloutArguments(dynamic_sampling=True))
    assert f"by the pass rates of 10 of 10 prompts {found['collapse_kept_2_5']:.3f} of the groups collapse" in caplog.text


# ---- rollouts without a model: an engine and rewards that are made up


class Engine:
    """Answers "right" or "wrong" by the prompt's own pass rate; after `budget` answers somebody asks for a stop.

    fixed: whether a prompt's answers differ depends on the prompt only, so also when a part of them is asked for again."""

    def __init__(self, stop_file: Path, budget: int, fixed: bool):
        self.stop_file, self.budget, self.fixed, self.version = stop_file, budget, fixed, None

    def sync(self, version):
        self.version = version
        return SyncReport()

    def generate(self, prompts, num_generations, *, seed, poll, **_):
        version, made = self.version, []
        for prompt in prompts:
            for sample in range(num_generations):
                if self.budget == 0:
                    self.stop_file.touch()
                if poll():
                    return made
                self.budget -= 1
                kind = int(prompt.id[1:]) % 3
                right = random.Random(f"{seed} {prompt.id} {sample}").random() < 0.08 * kind
                if self.fixed:
                    right = kind == 0 and sample == 0
                made.append(Completion(prompt.id, sample, [int(right)], [-1.0], "stop", [(version, 0, 1)]))
        return made


class Rewards:
    def score(self, groups):
        return [[Score({"right": float(text == "1")}, float(text == "1")) for text in texts] for _, _, texts, _ in groups]


SIZE, ROUNDS, GENERATIONS = 4, 3, 4


def attempt(output: Path, state: TrainState, *, lag: int, budget: int, steps: int, fixed: bool = False) -> tuple[TrainState, bool]:
    """One process of a run, as grpo/train.py drives it: (its last checkpoint, whether it was stopped)."""
    output.mkdir(exist_ok=True)
    (output / run.STOP).unlink(missing_ok=True)
    questions = [Question(f"q{i}", "", [1], {}, "") for i in range(50)]
    prompts = Prompts(questions, Order(len(questions), 0), SIZE)
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [str(i[0]) for i in ids])
    rollout_args = RolloutArguments(
        num_prompts_per_step=SIZE, num_generations=GENERATIONS, dynamic_sampling=True, max_resample_times=ROUNDS
    )
    rewards = RewardArguments(reward_funcs=["x:right"])
    args = GRPOTrainArguments(output_dir=str(output))
    setup = Setup(
        None, Engine(output / run.STOP, budget, fixed), tokenizer, Rewards(), None, ModelArguments(model_name_or_path=""),
        DataArguments(train_files=[]), rollout_args, rewards, ObjectiveArguments(), args, output,
    )  # fmt: skip
    setup.surplus = resume_surplus(setup, questions, state.step)
    while state.step < steps:
        made = None if (output / run.STOP).exists() else roll_out(setup, prompts, state)
        if made is None:
            if setup.ahead is not None:
                write_unfinished(setup, setup.ahead.take(), questions, setup.ahead_step)
            return state, True
        if lag and state.step + 1 < steps:
            start_ahead(setup, prompts, made, state.step + 2)
            setup.ahead.wait()
        state = TrainState(step=state.step + 1, epoch=made.epoch, offset=made.offset)
    return state, False


def groups_in(output: Path, kind: str, step: int) -> dict[str, list]:
    path, groups = rollout_path(output, kind, step), {}
    for line in read_lines(path):
        groups.setdefault(line["id"], []).append((line["sample"], line["completion_ids"], line["weight_versions"], line["reward"]))
    return groups


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr("grpo.rollout.StopPoll.__init__.__defaults__", (0.0, False))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_no_group_is_lost_or_used_twice(tmp_path, at_once, lag, seed):
    """Twelve rollouts, with a seed stopped at random moments (between batches, in one, in what is generated ahead) and resumed each time."""
    rng, steps, state, stops = random.Random(seed), 12, TrainState(), 0
    while True:
        state, stopped = attempt(tmp_path, state, lag=lag, budget=rng.randrange(10, 60) if seed else -1, steps=steps)
        stops += stopped
        if not stopped:
            break
    assert (stops > 4) == bool(seed) and not list((tmp_path / "rollouts").glob("unfinished*"))
    kept, full, aged = {}, 0, 0
    for step in range(1, steps + 1):
        trained, filtered, left = (groups_in(tmp_path, kind, step) for kind in ("step", "filtered", "kept"))
        assert all(len(group) == GENERATIONS for groups in (trained, filtered, left) for group in groups.values())
        assert len(trained) + len(filtered) + len(left) == len({*trained, *filtered, *left})
        # What the rollout before left over trains now, as it was, and first.
        assert [name for name in trained][: len(kept)] == list(kept) and all(trained[name] == group for name, group in kept.items())
        assert all(len({reward for *_, reward in group}) == 2 for group in (*trained.values(), *left.values()))
        assert all(len({reward for *_, reward in group}) == 1 for group in filtered.values())
        assert len(left) < SIZE and (len(trained) == SIZE or not left)
        for name, group in (*trained.items(), *filtered.items(), *left.items()):
            for _, _, [[version, _, _]], _ in group:
                assert step - 1 - version <= (lag if name not in kept else 1 + lag), (step, name)
                aged += version < step - 1
        full += len(trained) == SIZE
        kept = left
    assert full > 2 and aged  # some rollouts were filled, and some of it was left over from before


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stopped_run_draws_the_same_prompts(tmp_path, at_once, lag):
    """Stopped again and again, wherever it is, a run ends with the groups of one that never was."""
    attempt(tmp_path / "whole", TrainState(), lag=lag, budget=-1, steps=8, fixed=True)
    state, stops, budget = TrainState(), 0, 7
    while True:
        state, stopped = attempt(tmp_path / "parts", state, lag=lag, budget=budget, steps=8, fixed=True)
        stops, budget = stops + stopped, 5 + (budget + 11) % 37
        if not stopped:
            break
    assert stops > 8
    for step in range(1, 9):
        for kind in ("step", "filtered", "kept"):
            assert list(groups_in(tmp_path / "whole", kind, step)) == list(groups_in(tmp_path / "parts", kind, step)), (kind, step)


def test_a_rollout_that_is_not_filled_says_so(tmp_path, at_once, caplog):
    """A rollout that is not filled trains on what is there, and says so."""
    attempt(tmp_path, TrainState(), lag=0, budget=-1, steps=12)
    full = [len(groups_in(tmp_path, "step", step)) == SIZE for step in range(1, 13)]
    assert caplog.text.count("the rollout is not full") == full.count(False) > 0
    assert "batches bear 0.667" in caplog.text


def test_the_engine_is_judged_by_what_the_weights_of_now_have_sampled():
    answers = made_up("old", [1.0, 0.0]) + made_up("new", [1.0, 0.0])
    for answer in answers:
        answer.completion.weight_versions = [(3 if answer.question.id == "old" else 5, 0, 1)]
    options = dict(max_length=3, bins_per_row=1, packing=True, pad_to=None, mask_truncated=False, with_kl=False)
    mini_batches = make_mini_batches(answers, 2, **options)
    for batch in (batch for batches in mini_batches for batch in batches):
        old = torch.tensor([answers[index].question.id == "old" for index in batch.answers])[batch.row]
        batch.old, batch.weights = batch.sampled + 0.5 * old + 0.01, torch.ones_like(batch.sampled)
    rollout = Rollout(6, mini_batches, [], {}, 3)
    assert sum(len(batches) for batches in mini_batches) == 4
    distances = [on_policy_distance(rollout, answers, version) for version in (3, 5, 4)]
    assert distances[:2] == pytest.approx([0.51, 0.01], abs=1e-6) and distances[2] is None
    setup = SimpleNamespace(rollout_args=RolloutArguments(), model_args=ModelArguments("m", compute_dtype="bfloat16"), synced=4)
    assert not check_engine(setup, answers, rollout, first=True)  # the next rollout is looked at again
    rollout.figures = distance_figures([batch for batches in mini_batches for batch in batches])
    setup.synced = 5
    assert check_engine(setup, answers, rollout, first=False)
    setup.synced = 3
    with pytest.raises(RuntimeError, match="differ from the trainer's by 0.51"):
        check_engine(setup, answers, rollout, first=False)


def test_a_distance_of_no_tokens_is_no_agreement():
    assert distance_figures([]) == {}


def test_a_resume_names_what_it_cannot_take_from_the_disk(tmp_path, at_once):
    """Torn files, and groups that other rewards have scored: with gdpo their components would be another reward's."""
    attempt(tmp_path, TrainState(), lag=0, budget=-1, steps=12)
    step = next(step for step in range(1, 13) if groups_in(tmp_path, "kept", step))
    path = rollout_path(tmp_path, "kept", step)
    setup = SimpleNamespace(output_dir=tmp_path, updates=1, rollout_args=SimpleNamespace(dynamic_sampling=True))
    questions = [Question(f"q{i}", "", [1], {}, "") for i in range(50)]
    setup.reward_args = RewardArguments(["x:right"])
    assert resume_surplus(setup, questions, step)
    with pytest.raises(ValueError, match=r"kept-\d+.jsonl:1: there is no prompt 'q\d+' in the data"):
        resume_surplus(setup, questions[:1], step)
    for names in (["x:form", "x:right"], ["x:form"]):
        setup.reward_args = RewardArguments(names)
        with pytest.raises(ValueError, match=r"kept-\d+.jsonl:1: scored by right; now reward_funcs is form"):
            resume_surplus(setup, questions, step)
    text = path.read_text()
    path.write_text(text[:-20])
    with pytest.raises(ValueError, match=rf"{path}:{text.count(chr(10))}: not JSON .*Restore the file"):
        resume_surplus(setup, questions, step)

    answers = made_up("a", [1.0, 0.0])
    batch = make_mini_batches(answers, 1, max_length=8, bins_per_row=1, packing=True, pad_to=None, mask_truncated=False, with_kl=False)[0][
        0
    ]
    batch.old = torch.tensor([-1.0, -2.0])
    saved = tmp_path / "step-000001.npz"
    save_logps(saved, [batch], answers, {"grpo/reward": 0.5, "perf/seconds": 1.0})
    load_logps(saved, [batch], answers)
    assert batch.old.tolist() == [-1.0, -2.0] and read_logps(saved)[1] == {"grpo/reward": 0.5}
    with pytest.raises(ValueError, match="step-000001.npz holds 2 log-probabilities, the answers beside it have 1 tokens"):
        load_logps(saved, [batch], answers[:1])
    for content in (saved.read_bytes()[:-40], b""):
        saved.write_bytes(content)
        with pytest.raises(ValueError, match="step-000001.npz cannot be read"):
            load_logps(saved, [batch], answers)


# ---- whole runs

REWARDS = """
def right(prompts, completions, kind, **_):
    return [0.0 if kind[0] == "hopeless" else float(len(text) % 2) for text in completions]

def form(prompts, completions, **_):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]
"""
OPTIONS = (
    "--max_length=96", "--max_completion_length=10", "--num_prompts_per_step=4", "--num_generations=4", "--learning_rate=1e-3",
    "--warmup_steps=0", "--reward_funcs", "my_rewards:form", "my_rewards:right", "--reward_weights", "0.1", "1", "--accuracy_reward=right",
    "--reward_workers=1", "--mask_truncated_completions=False", "--dynamic_sampling=True", "--num_minibatches=2", "--save_steps=3",
    "--scale_rewards=gdpo",
)  # fmt: skip


def test_a_run_and_its_resume(tiny_dir, launch, tmp_path):
    """Two ranks; a third of the prompts is hopeless. Three and three steps, stopped inside a rollout, are six: surplus groups come from the disk."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    rows = [
        {"id": f"p{i}", "prompt": [{"role": "user", "content": f"story {i}"}], "kind": ["hopeless", "open", "open"][i % 3]}
        for i in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"id": f"p{i}", "k": 4 * bool(i % 3), "n": 8}) + "\n" for i in range(40)))

    def train(output, steps, *more, **kwargs):
        data = (f"--model_name_or_path={tiny_dir('llama')}", f"--train_files={tmp_path / 'train.jsonl'}", f"--output_dir={output}")
        data += (f"--difficulty_file={tmp_path / 'd.jsonl'}", f"--max_steps={steps}")
        done = launch("grpo.train", *data, *OPTIONS, *more, env={"PYTHONPATH": str(tmp_path)}, **{"ranks": 2} | kwargs)
        assert "[rank 1] WARNING" not in done.stderr  # what all ranks know is said once
        return read_metrics(output) if done.returncode == 0 else done.stderr

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "parts", 3)
    refused = train(tmp_path / "parts", 6, "--allow_batch_change=True", "--reward_weights", "1", "0", ranks=1, check=False)
    assert "trained with reward_weights = [0.1, 1.0]; now it is [1.0, 0.0]. Answers that this run still has to train on" in refused
    assert train(tmp_path / "parts", 6) == whole and [line["step"] for line in whole] == [1, 2, 3, 4, 5, 6]
    kept: dict = {}
    for line in whole[::2]:
        step = line["step"]
        for kind in ("step", "filtered", "kept"):
            name = f"rollouts/{kind}-{step:06d}.jsonl"
            assert (tmp_path / "whole" / name).read_text() == (tmp_path / "parts" / name).read_text()
        trained, filtered, left = (groups_in(tmp_path / "whole", kind, step) for kind in ("step", "filtered", "kept"))
        new = len(trained) - len(kept) + len(filtered) + len(left)
        assert line["grpo/collapse_rate"] == pytest.approx(len(filtered) / new) and line["grpo/batches"] == new / 4
        assert line["grpo/groups"] == len(trained) and line["grpo/surplus"] == len(left) and (len(trained) == 4 or not left)
        assert line["grpo/trained"] == 1.0 and line["grpo/collapse_bound"] == pytest.approx(2 / 3)
        lines = read_lines(rollout_path(tmp_path / "whole", "step", step))
        advantages = compute_gdpo_advantages([entry["rewards"] for entry in lines], [0.1, 1.0], [entry["id"] for entry in lines])
        assert [entry["advantage"] for entry in lines] == pytest.approx(advantages.values.tolist(), abs=1e-12)
        assert {f"p{i}" for i in range(0, 40, 3)} & {*trained, *left} == set()  # `form` differs there too, and does not count
        names = [*filtered, *left, *(name for name in trained if name not in kept)]
        prior = sampling.fit_prior((4 * bool(i % 3), 8) for i in range(40))
        expected = [sampling.expected_collapse(4 * bool(int(name[1:]) % 3), 8, 4, prior) for name in names]
        assert line["grpo/collapse_expected"] == pytest.approx(sum(expected) / len(expected))
        kept = left
    assert any(line["grpo/surplus"] for line in whole) and any(line["grpo/batches"] > 1 for line in whole)
    log = (tmp_path / "whole" / "run.log").read_text()
    assert "dynamic_sampling (the groups that are left over) trains on answers of weights one rollout old" in log
    assert "fills it up to a collapse rate of 0.667" in log and "by the pass rates of 40 of 40 prompts" in log
