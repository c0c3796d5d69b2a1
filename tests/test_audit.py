"""The audit: rewards that belong to other answers are caught, at the start of a run and afterwards; figures beside a baseline."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from common.data import Order
from common.paired_tests import mean_interval
from grpo import audit
from grpo.advantages import compute_advantages
from grpo.audit_figures import compare_marks, curve
from grpo.rollout import Answer, Completion, Question, RolloutArguments
from grpo.sampling import Prompts
from grpo.scoring import RewardArguments, Score
from tests.conftest import ROOT

REWARDS = """
def vowels(prompts, completions, scale, **_):
    return [s * sum(c in "aeiou" for c in text) for s, text in zip(scale, completions)]
"""

# A trainer with a fault: the answers to each prompt get the rewards of the prompt before.
SHIFTED = """
import sys
from grpo import audit, experience, train

def shifted(setup, answers, score=experience.score):
    score(setup, answers)
    size = setup.rollout_args.num_generations
    values = [(answer.rewards, answer.reward) for answer in answers]
    for answer, (rewards, reward) in zip(answers, values[-size:] + values[:-size]):
        answer.rewards, answer.reward = rewards, reward

experience.score = shifted
if "--unchecked" in sys.argv:
    sys.argv.remove("--unchecked")
    audit.check_first_rewards = lambda setup, answers: None
train.main()
"""
COMMAND = (
    "--max_length=96", "--max_completion_length=12", "--num_prompts_per_step=4", "--num_generations=3", "--learning_rate=1e-3",
    "--warmup_steps=0", "--reward_funcs", "my_rewards:vowels", "--reward_workers=1", "--mask_truncated_completions=False",
    "--max_steps=2", "--save_steps=0", "--export_final=False", "--eval_on_start=True", "--eval_num_generations=2", "--baseline_prompts=5",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data and reward functions; on the path, because the audit calls them too."""
    folder = tmp_path_factory.mktemp("audit")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "shifted.py").write_text(SHIFTED)
    for name, count in (("train", 10), ("eval", 3)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for i in range(count):
                row = {"id": f"q{i}", "prompt": [{"role": "user", "content": f"story river {i}"}], "scale": 1.0 + i, "answer": "a"}
                file.write(json.dumps(row) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield folder


def train(folder: Path, model: Path, name: str, *options: str, module=("-m", "grpo.train")) -> subprocess.CompletedProcess:
    data = [f"--model_name_or_path={model}", f"--train_files={folder / 'train.jsonl'}", f"--eval_files={folder / 'eval.jsonl'}"]
    command = [sys.executable, *module, *data, f"--output_dir={folder / name}", *COMMAND, *options]
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def honest(folder, tiny_dir) -> Path:
    done = train(folder, tiny_dir("llama"), "honest")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reward check: 12 answers scored again with the data's own rows, all rewards agree" in done.stderr
    return folder / "honest"


@pytest.fixture
def run(honest, tmp_path) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(honest, tmp_path / "run"))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def audited(run: Path, *options) -> tuple[int, dict]:
    code = audit.main([str(run), *map(str, options)])
    return code, json.loads((run / "audit.json").read_text())


def test_an_honest_run_passes(run, capsys):
    code, report = audited(run)
    assert code == 0 and report["problems"] == [] and report["other_columns"] == []
    assert report["answers"] == 2 * 12 + 2 * 6 + 15  # two rollouts, evaluations before and after, baseline
    assert "all rewards are those of their answers" in capsys.readouterr().out

    # The figures, from the files.
    steps = [lines_of(run / "rollouts" / f"step-00000{step}.jsonl") for step in (1, 2)]
    assert [row["reward"] for row in report["rollouts"]] == pytest.approx([sum(line["reward"] for line in s) / 12 for s in steps])

    def means(lines):
        return {name: sum(line["reward"] for line in lines if line["id"] == name) / sum(line["id"] == name for line in lines) for name in {line["id"] for line in lines}}  # fmt: skip

    before = means(lines_of(run / "rollouts" / "baseline-000000.jsonl"))
    assert len(before) == report["baseline"]["prompts"] == 5 and before.keys() <= {line["id"] for s in steps for line in s}
    for row, step in zip(report["rollouts"], steps, strict=True):
        pairs = [value - before[name] for name, value in means(step).items() if name in before]
        assert row["paired_prompts"] == len(pairs) >= 2 and row["difference"] == pytest.approx(sum(pairs) / len(pairs))
    first, last = (means(lines_of(run / "rollouts" / f"eval-00000{step}.jsonl")) for step in (0, 2))
    assert report["evaluations"][1]["difference"] == pytest.approx(sum(last[name] - first[name] for name in first) / 3)


def test_shifted_rewards_end_a_run_before_its_first_step(folder, tiny_dir):
    done = train(folder, tiny_dir("llama"), "stopped", module=(str(folder / "shifted.py"),))
    assert done.returncode == 1 and "rewards do not match the answers of the first rollout" in done.stderr
    assert "4 of 4 prompts have the rewards of the prompt 1 before: rewards are shifted" in done.stderr
    assert [json.loads(line)["step"] for line in (folder / "stopped" / "metrics.jsonl").read_text().splitlines()] == [0]


def test_shifted_rewards_of_a_whole_run_fail_the_audit(folder, tiny_dir, capsys):
    done = train(folder, tiny_dir("llama"), "shifted", "--unchecked", module=(str(folder / "shifted.py"),))
    assert done.returncode == 0, done.stderr[-3000:]
    code, report = audited(folder / "shifted", "--show", 3)
    assert code == 1
    assert [s for s in report["shifts"] if s.startswith("step")] == [
        f"step-00000{step}.jsonl: 4 of 4 prompts have the rewards of the prompt 1 before: rewards are shifted" for step in (1, 2)
    ]
    # Every disagreement is there, with what is stored and what it should be.
    expected = set()
    for name in ("step-000001", "step-000002", "eval-000000", "eval-000002", "baseline-000000"):
        for line in lines_of(folder / "shifted" / "rollouts" / f"{name}.jsonl"):
            right = (1 + int(line["id"][1:])) * sum(c in "aeiou" for c in line["completion"])
            expected |= {(f"{name}.jsonl", line["id"], line["sample"], line["reward"], right)} if line["reward"] != right else set()
    found = {(p["file"], p["id"], p["sample"], p["stored"], p["found"]) for p in report["problems"] if p["what"] == "reward"}
    assert found == expected and len(found) > 30
    out = capsys.readouterr().out
    assert f"FAILED: {len(report['problems'])} disagreements" in out and f"... {len(report['problems']) - 3} more in audit.json" in out
    # A component that costs is not called; the sum of what is stored is still looked at.
    (folder / "my_rewards.py").rename(folder / "away")
    try:
        assert audited(folder / "shifted", "--skip", "vowels")[0] == 0
        assert audit.main([str(folder / "shifted")]) == 2 and "cannot import my_rewards" in capsys.readouterr().err
    finally:
        (folder / "away").rename(folder / "my_rewards.py")


def test_each_fault_is_named(run, folder):
    path = run / "rollouts" / "step-000002.jsonl"
    good = lines_of(path)

    def problems(change) -> list[tuple]:
        lines = json.loads(json.dumps(good))
        change(lines)
        write(path, lines)
        code, report = audited(run)
        assert code == (1 if report["problems"] else 0)
        return [(p["file"], p["id"], p["sample"], p["what"].partition(",")[0]) for p in report["problems"]]

    name = good[0]["id"]
    assert problems(lambda lines: lines[1].update(reward=lines[1]["reward"] + 0.5, advantage=9.0))[0] == (path.name, name, 1, "reward")
    # A reward that is there once only proves nothing by itself; that a sum was made of it does.
    assert problems(lambda lines: lines[1].update(rewards={"vowels": None})) == [(path.name, name, 1, "reward")]
    assert problems(lambda lines: lines[1].update(rewards={"vowels": None}, reward=None, advantage=0.0)) == []
    assert audited(run)[1]["not_compared"] == 1
    assert problems(lambda lines: lines[1].update(completion_ids=lines[2]["completion_ids"])) == [(path.name, name, 1, "text")]
    low, high = (f(range(3), key=lambda i: good[i]["reward"]) for f in (min, max))
    assert good[low]["reward"] < good[high]["reward"]

    def swap(lines):
        lines[low]["advantage"], lines[high]["advantage"] = lines[high]["advantage"], lines[low]["advantage"]

    assert {what for *_, what in problems(swap)} == {"advantage"}
    # What the run saved of the row decides nothing, and is noted where the data say something else.
    assert problems(lambda lines: lines[0]["columns"].update(scale=7.0)) == []
    assert audited(run)[1]["other_columns"] == [f"{path.name} {name}"]


def test_gold_is_read_from_the_data_file(run, folder, tmp_path):
    rows = lines_of(folder / "train.jsonl")
    rows[3]["scale"] = 100.0
    write(tmp_path / "moved.jsonl", rows)
    code, report = audited(run, "--data", tmp_path / "moved.jsonl")
    assert code == 1 and {p["id"] for p in report["problems"]} == {"q3"}
    assert {row.split()[1] for row in report["other_columns"]} == {"q3"}


def test_wrong_use(run, folder, tmp_path, capsys):
    def error(*options) -> str:
        assert audit.main([str(run), *map(str, options)]) == 2
        return capsys.readouterr().err

    write(tmp_path / "few.jsonl", lines_of(folder / "train.jsonl")[:3])
    assert "are not in the data" in error("--data", tmp_path / "few.jsonl")
    assert "nowhere.jsonl does not exist: give the run's data with --data" in error("--data", tmp_path / "nowhere.jsonl")
    assert "leave out --skip" in error("--skip", "vowels", "--baseline")
    assert "--skip judge: the run's rewards are vowels" in error("--skip", "judge")
    assert "go with --baseline" in error("--server", "http://node7:8000")
    write(tmp_path / "bare.jsonl", [{k: v for k, v in row.items() if k != "scale"} for row in lines_of(folder / "train.jsonl")])
    assert audit.main([str(run), "--data", str(tmp_path / "bare.jsonl")]) == 1
    assert "failed on prompt" in (err := capsys.readouterr().err) and "--skip NAME leaves" in err and "on_reward_error" not in err
    (run / "audit.json").unlink(missing_ok=True)
    (run / "audit.json").symlink_to(folder / "train.jsonl")
    assert "audit.json would be written, but it is what is read as" in error("--data", folder / "train.jsonl")
    (run / "audit.json").unlink()
    (run / "rollouts" / "step-000002.jsonl").write_text('{"step": 2')
    assert "step-000002.jsonl is no file of answers" in error()
    shutil.rmtree(run / "rollouts")
    assert "holds no step-*.jsonl" in error()
    (run / "config.yaml").unlink()
    assert "is no run's folder: it has no config.yaml" in error()


def test_a_baseline_afterwards(run, tiny_dir):
    """The untrained model's answers to the run's own prompts, with the run's sampling; made once."""
    (run / "rollouts" / "baseline-000000.jsonl").unlink()
    assert audited(run)[1]["baseline"] is None
    code, report = audited(run, "--baseline", "--baseline_prompts", 4)
    assert code == 0 and report["baseline"]["prompts"] == 4
    answers = lines_of(run / "baseline" / "answers.jsonl")
    assert len(answers) == 4 * 3 and len({line["completion"] for line in answers}) > 6
    meta = json.loads((run / "baseline" / "answers.jsonl.meta.json").read_text())
    assert meta["sampling"] | {"samples": 3, "temperature": 1.0, "max_new_tokens": 12} == meta["sampling"]
    rewards = [(1 + int(line["id"][1:])) * sum(c in "aeiou" for c in line["completion"]) for line in answers]
    assert report["baseline"]["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert audited(run, "--baseline", "--baseline_prompts", 4)[1] == report
    assert lines_of(run / "baseline" / "answers.jsonl") == answers


def test_a_stop_while_the_baseline_is_measured_keeps_what_is_finished(tmp_path, monkeypatch):
    questions = [Question(f"q{i}", "", [1, 2], {}, "") for i in range(8)]
    prompts = Prompts(questions, Order(8, 0), 2)
    setup = SimpleNamespace(
        output_dir=tmp_path, rollout_args=RolloutArguments(baseline_prompts=3, num_generations=2), args=SimpleNamespace(seed=0)
    )
    setup.ahead, calls = None, []

    def generate(setup, asked, num_generations, temperature, seed, kept):
        calls.append((len(kept), temperature))
        made = [Answer(q, Completion(q.id, s, [5], [-0.1], "stop", [(0, 0, 1)]), "x") for q in asked for s in range(num_generations)]
        return (made[:4], True) if len(calls) == 1 else (made, False)

    def score(setup, answers):
        for answer in answers:
            answer.rewards, answer.reward = {"r": 1.0}, 1.0

    monkeypatch.setattr(audit.experience, "generate", generate)
    monkeypatch.setattr(audit.experience, "score", score)
    monkeypatch.setattr(audit.experience, "sync", lambda setup, version: None)
    path = tmp_path / "rollouts" / "baseline-000000.jsonl"
    audit.measure_baseline(setup, prompts, 4)
    assert not path.exists() and len(lines_of(tmp_path / "rollouts" / "unfinished-000000.jsonl")) == 4
    audit.measure_baseline(setup, prompts, 4)
    assert calls == [(0, 1.0), (4, 1.0)] and len(lines_of(path)) == 6
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    audit.measure_baseline(setup, prompts, 4)
    assert len(calls) == 2  # it is there


# ---- the check on a first rollout


class Pool:
    """Scores by the answer's text; `noise` is added to every other call."""

    def __init__(self, noise=0.0, silent=False):
        self.noise, self.silent, self.calls = noise, silent, 0

    def score(self, groups):
        self.calls += 1
        extra = self.noise * (self.calls % 2)
        results = []
        for _, _, texts, columns in groups:
            values = [columns["scale"] * len(text) + extra for text in texts]
            results.append([Score({"length": None if self.silent else value}, value) for value in values])
        return results


def first_rollout(tiny_dir, tmp_path, pool):
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir("llama"))
    rows = [{"id": f"q{i}", "prompt": "x", "scale": 1.0 + i} for i in range(3)]
    write(tmp_path / "train.jsonl", rows)
    answers = []
    for row in rows:
        for sample, text in enumerate(("red", "red box", "river")):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            question = Question(row["id"], "x", [1], {"scale": row["scale"]}, "")
            value = row["scale"] * len(text)
            answers.append(Answer(question, Completion(row["id"], sample, ids, [], "stop", []), text, {"length": value}, value))
    for answer, value in zip(
        answers, compute_advantages([a.reward for a in answers], [a.question.id for a in answers]).values, strict=True
    ):
        answer.advantage = float(value)
    data = SimpleNamespace(train_files=[str(tmp_path / "train.jsonl")])
    return SimpleNamespace(pool=pool, data_args=data, reward_args=RewardArguments(["x:length"]), tokenizer=tokenizer), answers


def test_a_right_first_rollout_passes_and_a_wrong_one_does_not(tiny_dir, tmp_path):
    setup, answers = first_rollout(tiny_dir, tmp_path, Pool())
    audit.check_first_rewards(setup, answers)
    assert setup.pool.calls == 1
    answers[4].text, answers[4].question.columns["scale"] = "blue", 5.0  # the saved column is not what counts
    with pytest.raises(RuntimeError, match=r"1 of 9 answers, for instance prompt q1 sample 1: length 14 instead of 8\."):
        audit.check_first_rewards(setup, answers)
    setup, answers = first_rollout(tiny_dir, tmp_path, Pool())
    answers[0].advantage, answers[1].advantage = answers[1].advantage, answers[0].advantage
    with pytest.raises(RuntimeError, match="advantage, beside sample"):
        audit.check_first_rewards(setup, answers)


@pytest.mark.parametrize(
    "pool, message",
    [(Pool(noise=0.3), "reward length does not say the same of an answer twice"), (Pool(silent=True), "9 rewards were there once")],
)
def test_rewards_that_change_are_warned_about(tiny_dir, tmp_path, pool, message, caplog):
    """A judge without a cache, or one that does not answer the second time: no proof of a fault."""
    setup, answers = first_rollout(tiny_dir, tmp_path, pool)
    audit.check_first_rewards(setup, answers)
    assert message in caplog.text


# ---- figures


def test_exact_match_beside_f1():
    data = {
        "m": {"answer": ["a", "c"], "choices": list("vwxyz")},
        "s": {"answer": "b", "choices": list("vwxyz")},
        "n": {"answer": "#### 3"},
    }
    said = {"m": ["[ans]a,c[/ans]", "[ans]a[/ans]", "[ans]b[/ans]", "[ans]a,b,c[/ans]"], "s": ["[ans]a[/ans]", "?", "[ans]c[/ans]", "[ans]a,b[/ans]"], "n": ["3"]}  # fmt: skip
    lines = [{"step": 1, "id": name, "completion": text} for name, texts in said.items() for text in texts]
    found = compare_marks(lines, data)
    # m: exact 1 0 0 0, F1 1 2/3 0 0.8, ranks 0 2 2 2 against 0 2 3 1; s: exact 0 0 0 0, F1 0 0 0 2/3, ranks 1.5 everywhere against 2 2 2 0.
    assert (found["groups"], found["answers"]) == (2, 8)
    assert found["exact"] == pytest.approx(1 / 8) and found["f1"] == pytest.approx((1 + 2 / 3 + 0.8 + 2 / 3) / 8)
    assert (found["tied_exact"], found["tied_f1"]) == (0.5, 0.0)
    assert found["changed_ranks"] == 6 / 8 and found["too_many"] == 2 / 8
    assert found["paid_though_wrong"] == pytest.approx(3 / 7)  # means of F1: 0.617 and 0.167
    assert compare_marks(lines[-1:], data) is None


def test_curve_is_cut_into_stretches():
    rollouts = {step: [{"id": "a", "reward": float(step)}, {"id": "b", "reward": None}] for step in range(1, 46)}
    rows = curve(rollouts, {"a": 1.0, "b": 5.0})
    assert [(row["from"], row["to"]) for row in rows][:2] == [(1, 5), (6, 10)] and len(rows) == 9
    assert rows[1]["reward"] == 8.0 and rows[1]["paired_prompts"] == 5 and rows[1]["difference"] == pytest.approx(7.0)
    assert "low" not in rows[1]
    [row] = curve(rollouts, {"a": 1.0}, most=1)
    assert (row["difference"], row["low"], row["high"]) == pytest.approx(mean_interval([float(step - 1) for step in range(1, 46)]))
    assert "difference" not in curve({7: rollouts[7]}, {})[0]
    # 45 prompts of which all, or all but 9, have one difference: an interval of no width would be a false certainty.
    ones = [{"id": f"q{i}", "reward": float(i >= 9)} for i in range(45)]
    assert (
        "low" not in curve({1: ones}, {line["id"]: 0.0 for line in ones})[0]
        and "low" in curve({1: ones}, {f"q{i}": i % 2 for i in range(45)})[0]
    )
