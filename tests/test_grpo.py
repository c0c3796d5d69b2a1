"""GRPO as a user runs it: resume in the middle of a rollout, stop, records, reference, invariance, learning."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from common import run
from common.config import DataArguments, ModelArguments
from common.sync_server import SyncError, UnusableServer
from common.weight_sync import ServersLost
from dpo import train as dpo_train
from grpo import train
from grpo.chord import ChordArguments
from grpo.experience import GRPOTrainArguments, Setup, prepare
from grpo.objectives import ObjectiveArguments
from grpo.rollout import Answer, Completion, Question, RolloutArguments
from grpo.scoring import RewardArguments
from grpo.train import check_arguments, forward_backward, off_policy_warning
from sft import train as sft_train
from tests.conftest import ROOT, read_metrics

REWARDS = """
def vowels(prompts, completions, scale, **_):
    return [s * sum(c in "aeiou" for c in text) for s, text in zip(scale, completions)]

def nobody(prompts, completions, **_):
    return [None] * len(completions)

def alike(prompts, completions, **_):
    return [1.05] * len(completions)

def small_scales(prompts, completions, scale, **_):
    if scale[0] > 5:
        raise ValueError("a scale above 5")
    return [float(len(text)) for text in completions]

def short(prompts, completions, **_):
    return [None if len(text) > 60 else -float(len(text)) for text in completions]
"""
SMALL = (
    "--max_length=96", "--max_completion_length=12", "--num_prompts_per_step=4", "--num_generations=4", "--learning_rate=1e-3",
    "--warmup_steps=0", "--reward_funcs", "my_rewards:vowels", "my_rewards:short", "--reward_weights", "1", "0.1", "--reward_workers=1",
    "--mask_truncated_completions=False", "--per_device_train_batch_size=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    (folder / "my_rewards.py").write_text(REWARDS)
    for name, count in (("train", 12), ("eval", 3)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for i in range(count):
                prompt = [{"role": "user", "content": " ".join(["story", "river", "box"][: 1 + i % 3]) + f" {i}"}]
                file.write(json.dumps({"id": f"{name}-{i}", "prompt": prompt, "scale": 1.0 + i % 2}) + "\n")
    return folder


@pytest.fixture
def grpo(launch, files):
    """grpo(model, output, "--max_steps=3", ranks=2) trains and returns metrics.jsonl without wall-clock figures."""

    def start(model, output, *options, ranks: int = 2, **kwargs):
        data = (f"--model_name_or_path={model}", f"--train_files={files / 'train.jsonl'}", f"--output_dir={output}")
        done = launch("grpo.train", *data, *SMALL, *options, ranks=ranks, env={"PYTHONPATH": str(files)}, **kwargs)
        return read_metrics(output) if done.returncode == 0 else done

    return start


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return tensors


def test_six_steps_are_three_and_three_in_the_middle_of_a_rollout(tiny_dir, grpo, files, tmp_path):
    """A rollout takes four steps here, so step 3 is inside one: its answers, log-probabilities and reference come from the disk."""
    model = tiny_dir("qwen3_moe")
    options = (
        "--num_minibatches=2", "--num_iterations=2", "--beta=0.05", "--rollout_correction=token_tis", "--save_steps=3",
        f"--eval_files={files / 'eval.jsonl'}", "--eval_steps=3", "--eval_num_generations=2",
    )  # fmt: skip
    whole = grpo(model, tmp_path / "whole", *options, "--max_steps=6")
    grpo(model, tmp_path / "parts", *options, "--max_steps=3")
    parts = grpo(model, tmp_path / "parts", *options, "--max_steps=6")
    assert whole == parts and [line["step"] for line in whole] == [1, 2, 3, 4, 5, 6]
    one, two = tensors_of(tmp_path / "whole" / "final"), tensors_of(tmp_path / "parts" / "final")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], base) for name, base in tensors_of(model).items())
    for file in ("step-000001.jsonl", "step-000005.jsonl", "eval-000003.jsonl"):
        assert (tmp_path / "whole" / "rollouts" / file).read_text() == (tmp_path / "parts" / "rollouts" / file).read_text()

    # The numbers of each step: on policy before the first update, off it afterwards; KL from 0 on.
    assert whole[0]["grpo/ratio"] == pytest.approx(1.0, abs=1e-6) and whole[4]["grpo/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert whole[0]["grpo/kl"] == pytest.approx(0.0, abs=1e-6) and whole[3]["grpo/kl"] > 1e-5
    assert abs(whole[2]["grpo/ratio"] - 1) > 1e-6
    assert [line["grpo/weight_lag"] for line in whole] == [0, 1, 2, 3, 0, 1]
    assert [line["grpo/weight_version"] for line in whole] == [0, 0, 0, 0, 4, 4]
    assert {"eval/reward", "eval/reward/vowels"} <= set(whole[2]) and "eval/reward" not in whole[3]
    assert {"grpo/reward", "grpo/reward/short", "grpo/collapse_rate", "grpo/clip_share", "grpo/entropy", "grpo/logp_diff_max"} <= set(
        whole[0]
    )

    # The record: one line an answer, everything about it, before the step.
    lines = [json.loads(line) for line in (tmp_path / "whole" / "rollouts" / "step-000001.jsonl").read_text().splitlines()]
    assert len(lines) == 16 and len({(line["id"], line["sample"]) for line in lines}) == 16
    tokenizer = AutoTokenizer.from_pretrained(model)
    for line in lines:
        assert tokenizer.decode(line["completion_ids"], skip_special_tokens=True) == line["completion"]
        assert line["rewards"]["vowels"] == line["columns"]["scale"] * sum(c in "aeiou" for c in line["completion"])
        short = line["rewards"]["short"]
        assert line["reward"] == pytest.approx(line["rewards"]["vowels"] + (0.1 * short if short is not None else 0))
        assert len(line["logps"]) == len(line["completion_ids"]) and line["weight_versions"] == [[0, 0, len(line["logps"])]]
    for name in {line["id"] for line in lines}:
        assert sum(line["advantage"] for line in lines if line["id"] == name) == pytest.approx(0.0, abs=1e-9)


def test_stop_during_generation_is_honoured_and_resumed(tiny_dir, grpo, files, tmp_path):
    output = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "grpo.train"]
    long = ["--max_length=900", "--max_completion_length=800", "--save_steps=0", "--max_steps=1"]
    long.append("--rollout_batch_size=1")  # 16 answers one after the other: some are finished when STOP comes, not all
    data = [f"--model_name_or_path={tiny_dir('llama')}", f"--train_files={files / 'train.jsonl'}", f"--output_dir={output}"]
    environment = os.environ | {"PYTHONPATH": str(files)}
    process = subprocess.Popen([*command, *data, *SMALL, *long], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "sharded" in line:  # the model is loaded, the first rollout begins
                break
        time.sleep(2.0)
        (output / "STOP").touch()
        start = time.monotonic()
        rest = process.stderr.read()
        assert process.wait(timeout=120) == 0, rest[-3000:]
        assert time.monotonic() - start < 60
    finally:
        process.kill()
    assert "STOP found: saved at step 0" in rest and not (output / "DONE").exists()
    assert (output / "checkpoint-000000" / "COMPLETE").exists()
    assert (output / "rollouts" / "unfinished-000001.jsonl").exists() and not (output / "rollouts" / "step-000001.jsonl").exists()
    metrics = grpo(tiny_dir("llama"), output, *long, ranks=1)
    assert [line["step"] for line in metrics] == [1] and not (output / "rollouts" / "unfinished-000001.jsonl").exists()


def test_without_signal_nothing_is_trained(tiny_dir, grpo, files, tmp_path):
    """Answers that nobody scores, or all alike: the step is skipped and counted, the weights stay what they are to the bit."""
    model = tiny_dir("llama")
    options = ("--max_steps=2", f"--eval_files={files / 'eval.jsonl'}", "--save_steps=0")
    for name, reward in (("nobody", None), ("alike", 1.05)):
        ranks = 2 if name == "nobody" else 1
        metrics = grpo(model, tmp_path / name, *options, "--reward_funcs", f"my_rewards:{name}", "--reward_weights", "1", ranks=ranks)
        log = (tmp_path / name / "run.log").read_text()
        assert log.count("skipped: nothing in its mini-batch trains") == 2 and "2 of 2 steps were skipped: no weight was trained" in log
        assert f"of 16 answers 16 {'not scored' if name == 'nobody' else 'in groups of equal rewards'}" in log
        assert [line["skipped_steps"] for line in metrics] == [1, 2] and "loss" not in metrics[0]
        assert metrics[0]["grpo/collapse_rate"] == 1.0 and metrics[0]["grpo/trained"] == 0.0
        assert metrics[0].get("grpo/reward") == reward and metrics[1].get("eval/reward") == reward
        trained, base = tensors_of(tmp_path / name / "final"), tensors_of(model)
        assert all(torch.equal(trained[tensor], base[tensor]) for tensor in base)
    line = json.loads((tmp_path / "nobody" / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0])
    assert line["reward"] is None and line["rewards"] == {"nobody": None} and line["advantage"] == 0.0


def test_a_run_whose_servers_fail_keeps_its_steps():
    """What all ranks raise; after what one rank may raise alone, saving together would hang. Nothing is saved where nothing was trained."""
    for error, trained, count in (
        (ServersLost("gone"), True, 1), (SyncError("wrong"), True, 1), (UnusableServer("taken"), True, 1), (SyncError("wrong"), False, 0),
        (ValueError("a prompt"), True, 0),
    ):  # fmt: skip
        saved = []
        with pytest.raises(type(error)), train.saved_when_servers_fail(lambda: saved.append(1), trained):  # noqa: B023 - called at once
            raise error
        assert len(saved) == count


def test_an_evaluation_that_fails_leaves_the_steps_figures(tiny_dir, grpo, files, tmp_path):
    row = json.loads((files / "eval.jsonl").read_text().splitlines()[0])
    (tmp_path / "eval.jsonl").write_text(json.dumps(row | {"scale": 9.0}))
    options = ("--max_steps=2", "--eval_steps=2", f"--eval_files={tmp_path / 'eval.jsonl'}", "--save_steps=0", "--reward_weights", "1")
    done = grpo(tiny_dir("llama"), tmp_path / "run", *options, "--reward_funcs", "my_rewards:small_scales", ranks=1, check=False)
    assert done.returncode == 1 and "a scale above 5" in done.stderr
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2] and "grpo/reward" in lines[1] and "eval/reward" not in lines[1]


def test_what_data_and_rewards_lack_is_said_before_the_model_is_loaded(tiny_dir, grpo, tmp_path):
    for options, message in (
        (("--num_prompts_per_step=16",), "gives 12 prompts but one optimizer step needs 16 (num_prompts_per_step): add prompts, or lower"),
        (
            ("--reward_funcs=grpo.rewards:choice_f1", "--reward_weights=1"),
            "train.jsonl:1: id 'train-0' cannot be scored: grpo.rewards:choice_f1: column `answer` must hold letters, like 'a,c' or ['a', 'c']; "
            "it holds None. 12 of 12 rows are like that",
        ),
    ):
        done = grpo(tiny_dir("llama"), tmp_path / "run", *options, ranks=1, check=False)
        assert done.returncode == 1 and message in done.stderr and "sharded" not in done.stderr


# ---- one rollout ahead

SERVER = '''
import sys, time
from pathlib import Path
from grpo import train, twin

class Server(twin.HfBackend):
    """An engine of its own, as the trainer sees one: it holds the weights of the last sync, and generating calls no collective."""

    def __init__(self, servers, model, *, rollout_lag, probe_prompts, wait_minutes):
        assert servers == ["http://stand-in:1"] and probe_prompts and wait_minutes == 10
        args = train.config.parse(train.ModelArguments, argv=["--model_name_or_path", str(model.source.path)])[0]
        super().__init__(model, args, stop_ids=[379], pad_id=377, batch_size=16)

    def sync(self, version):
        self._fill = super()._fill
        self._fill()
        self._fill = self._free = lambda: None
        return super().sync(version)

    def generate(self, *args, **options):
        delay, *stop = sys.stdin.readline().split()
        if stop:  # somebody asks for it while these answers, which will all be finished, are on their way
            Path(stop[0]).touch()
            options["poll"] = lambda: False
        time.sleep(float(delay))  # either side may be the slow one
        return super().generate(*args, **options)

train.VllmBackend = Server
train.main()
'''


def lagged(model, files, output, *options, delays=(0,) * 20):
    command = [sys.executable, "-c", SERVER, f"--model_name_or_path={model}", f"--train_files={files / 'train.jsonl'}"]
    command += [f"--output_dir={output}", *SMALL, "--rollout_backend=vllm", "--vllm_servers=http://stand-in:1", "--rollout_lag=1", *options]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{files}", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
    try:
        text = process.communicate("".join(f"{delay}\n" for delay in delays), timeout=240)[0]
    finally:
        process.kill()
    assert process.returncode == 0, text[-4000:]
    return text


def test_one_rollout_ahead(tiny_dir, files, tmp_path):
    """The next rollout is generated while this one trains: one rollout old, the same whichever side is slow, kept when the run is stopped."""
    model = tiny_dir("llama")
    options = ("--rollout_correction=token_tis", "--max_steps=4", "--save_steps=0", "--num_generations=2", "--num_prompts_per_step=3")
    lagged(model, files, tmp_path / "a", *options)
    lagged(model, files, tmp_path / "b", *options, delays=(1, 2, 0, 2))
    one, two = read_metrics(tmp_path / "a"), read_metrics(tmp_path / "b")
    assert one == two
    assert [line["grpo/weight_version"] for line in one] == [0, 0, 1, 2]
    assert [line["grpo/weight_lag"] for line in one] == [0, 1, 1, 1]
    assert one[0]["grpo/logp_diff_mean"] < 0.05  # on policy
    assert all(line["grpo/ratio"] == pytest.approx(1.0, abs=1e-6) for line in one)

    # Stopped while step 1 trains and the answers for step 2 are on their way: they are kept and not generated again.
    text = lagged(model, files, tmp_path / "c", *options, delays=(0, f"0.5 {tmp_path / 'c' / 'STOP'}"))
    kept = (tmp_path / "c" / "rollouts" / "unfinished-000002.jsonl").read_text().splitlines()
    assert "STOP found: saved at step 1" in text
    lagged(model, files, tmp_path / "c", *options)
    lines = (tmp_path / "c" / "rollouts" / "step-000002.jsonl").read_text().splitlines()
    parts = [{(line["id"], line["sample"]): line["completion_ids"] for line in map(json.loads, part)} for part in (kept, lines)]
    assert parts[0] == parts[1] and len(lines) == 6
    assert [line["step"] for line in read_metrics(tmp_path / "c")] == [1, 2, 3, 4]


# ---- gradients do not depend on how answers are spread


def synthetic_answers() -> list[Answer]:
    rng, answers = random.Random(0), []
    for i in range(4):
        question = Question(f"q{i}", "", [rng.randrange(300) for _ in range(3 + 4 * i)], {}, "")
        for sample in range(3):
            ids = [rng.randrange(300) for _ in range(1 + (5 * i + 3 * sample) % 9)]
            reason = "length" if (i, sample) == (3, 0) else "stop"
            completion = Completion(question.id, sample, ids, [-5.0 + rng.random() for _ in ids], reason, [(0, 0, len(ids))])
            answers.append(Answer(question, completion, "", {"r": 1.0}, 1.0, rng.gauss(0, 1), i != 1))
    return answers


def gradients(folder: str, objective: dict, max_length: int, bins_per_row: int):
    model_args = ModelArguments(model_name_or_path=folder, compute_dtype="float32")
    model = run.build_model(model_args)
    args = GRPOTrainArguments(output_dir="", per_device_train_batch_size=bins_per_row)
    setup = Setup(
        model, None, None, None, None, model_args, DataArguments(train_files=[], max_length=max_length),
        RolloutArguments(max_completion_length=16, temperature=0.8), RewardArguments(), ObjectiveArguments(**objective), args, Path(),
    )  # fmt: skip
    rollout = prepare(setup, synthetic_answers(), {}, 1)
    for batch in rollout.mini_batches[0]:  # as after an update: ratios away from 1, a reference that differs
        ids = batch.of_targets(batch.packed.targets.flatten())
        batch.old = batch.old + 0.2 * torch.sin(ids.float())
        batch.reference = batch.old + 0.1 * torch.cos(ids.float())
    loss, figures, _, _ = forward_backward(setup, rollout.mini_batches[0])
    return loss, model.sharded.clip_grad_norm(0).item(), figures, [len(b.answers) for b in rollout.mini_batches[0]]


def many_gradients(folder: str, layouts):
    return [[gradients(folder, objective, *layout) for layout in layouts] for objective in OBJECTIVES]


OBJECTIVES = [
    {"loss_type": "dapo", "beta": 0.1, "rollout_correction": "icepop"},
    {"loss_type": "grpo"},
    {"loss_type": "gspo", "beta": 0.1, "epsilon": 0.1, "epsilon_high": 0.1, "rollout_correction": "seq_tis"},
    {"loss_type": "dr_grpo", "rollout_correction": "token_mis"},
]


def test_loss_and_gradient_do_not_depend_on_ranks_or_packing(tiny_dir, run_ranks):
    folder = str(tiny_dir("qwen3_moe"))
    [one] = run_ranks(1, many_gradients, folder, [(400, 1), (32, 1)])
    two = run_ranks(2, many_gradients, folder, [(40, 1)])
    for index, objective in enumerate(OBJECTIVES):
        (loss, norm, figures, sizes), *others = one[index]
        assert len(sizes) == 1 and norm > 1e-3 and abs(loss) > 1e-4
        for rank in two:
            others.append(rank[index][0])
        assert len(others[0][3]) > 2  # several micro-batches
        for other_loss, other_norm, other_figures, _ in others:
            assert other_loss == pytest.approx(loss, rel=1e-4, abs=1e-6), objective
            assert other_norm == pytest.approx(norm, rel=1e-4), objective
            assert other_figures == pytest.approx(figures, rel=1e-4, abs=1e-6), objective


def test_options_that_do_not_go_together():
    def check(**options):
        of = {
            ModelArguments: {"model_name_or_path": "x"}, DataArguments: {"train_files": ["x"]}, RolloutArguments: {}, ObjectiveArguments: {},
            ChordArguments: {}, GRPOTrainArguments: {"output_dir": "x"},
        }  # fmt: skip
        for kind, values in of.items():
            values |= {name: value for name, value in options.items() if name in kind.__dataclass_fields__}
        check_arguments(*(kind(**values) for kind, values in of.items()))

    check()
    check(top_p=0.9, rollout_correction="token_tis")
    for options, message in [
        (dict(max_length=512, max_completion_length=512), "max_length 512 must hold"),
        (dict(top_p=0.9), "top_p is 0.9"),
        (dict(over_long="truncate"), "drops and counts"),
        (dict(num_minibatches=40), "at least num_minibatches 40"),
        (dict(num_generations=1), "at least 2"),
        (dict(quantization="nf4", lora_rank=4, rollout_backend="vllm", vllm_servers=["http://s:1"]), "leave rollout_backend at hf"),
        (dict(chord_sft_files=["x"], chord_sft_per_device_train_batch_size=3, per_device_train_batch_size=2), "must be a multiple of"),
        (dict(temperature=0.0), "above 0"),
        (dict(gradient_accumulation_steps=2), "use num_minibatches"),
        (dict(loss_type="sapo", dual_clip=3.0), "does not go with"),
        (dict(rollout_correction="token_tis", rollout_correction_low=0.1), "has no such limit"),
        (dict(rollout_correction="icepop", rollout_correction_high=0.1), "must be below"),
        (dict(use_bias_correction_kl=True), "changes the KL term"),
    ]:
        with pytest.raises(ValueError, match=message):
            check(**options)
    assert ObjectiveArguments(loss_type="gspo").epsilon_high == 4e-4 and ObjectiveArguments().epsilon_high == 0.28


def test_answers_of_older_weights_ask_for_a_correction():
    lagged = RolloutArguments(rollout_lag=1, rollout_backend="vllm", vllm_servers=["http://s:1"])
    dynamic, none, corrected = (
        RolloutArguments(dynamic_sampling=True),
        ObjectiveArguments(),
        ObjectiveArguments(rollout_correction="token_tis"),
    )
    assert off_policy_warning(lagged, none).startswith("rollout_lag: 1 trains on answers of weights one rollout old")
    assert off_policy_warning(dynamic, none).startswith("dynamic_sampling (the groups that are left over)")
    assert (
        off_policy_warning(RolloutArguments(), none)
        is off_policy_warning(dynamic, corrected)
        is off_policy_warning(lagged, corrected)
        is None
    )


def test_wrong_use_is_one_line_before_anything_is_read(monkeypatch, capsys):
    options = ("--model_name_or_path=nowhere", "--train_files=nothing", "--output_dir=nothing")
    for main, more, message in (
        (train.main, ("--top_p=0.9",), "error: top_p is 0.9"),
        (sft_train.main, ("--quantization=nf4", "--lora_rank=4"), "error: quantization: nf4 is for python -m grpo.train."),
        (dpo_train.main, ("--quantization=nf4", "--lora_rank=4"), "error: quantization: nf4 is for python -m grpo.train."),
    ):
        monkeypatch.setattr(sys, "argv", ["train", *options, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(message) and error.count("\n") == 1


# ---- learning

COLOURS = {"red": "a", "green": "b", "blue": "c", "yellow": "d"}
OTHERS = "morning evening small large warm cold water children story box river mountain apple spider one two three four five six".split()


def write_colours(folder: Path, share_right: float) -> None:
    """The rule to learn: the letter of the colour named last. warm.jsonl shows the form of an answer, with a right letter now and then."""
    rng = random.Random(0)
    pairs = [(other, colour) for other in OTHERS for colour in COLOURS]
    rng.shuffle(pairs)

    def row(name: str, other: str, colour: str) -> dict:
        return {"id": name, "prompt": [{"role": "user", "content": f"{other} {colour}"}], "answer": [COLOURS[colour]]}

    rows = [row(f"{i}", *pair) for i, pair in enumerate(pairs)]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:56]))
    (folder / "eval.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[56:]))
    with open(folder / "warm.jsonl", "w") as file:
        for i in range(280):
            question = rows[i % 56]
            letter = question["answer"][0] if rng.random() < share_right else rng.choice("abcd")
            file.write(json.dumps({"messages": [*question["prompt"], {"role": "assistant", "content": f"[ans]{letter}[/ans]"}]}) + "\n")


def test_rewards_teach_held_out_questions(tiny_dir, launch, tmp_path):
    """Exact match on unseen combinations, of sampled answers, rises by at least 0.3 within 24 steps of 128 answers."""
    write_colours(tmp_path, 0.3)
    launch(
        "sft.train", "--config=sft/configs/tiny.yaml", f"--model_name_or_path={tiny_dir('qwen3_moe')}",
        f"--train_files={tmp_path / 'warm.jsonl'}", f"--output_dir={tmp_path / 'sft'}", "--max_length=512", "--max_steps=40", "--save_steps=0",
        "--per_device_train_batch_size=2", ranks=2,
    )  # fmt: skip
    launch(
        "grpo.train", "--config=grpo/configs/tiny.yaml", f"--model_name_or_path={tmp_path / 'sft' / 'final'}",
        f"--train_files={tmp_path / 'train.jsonl'}", f"--eval_files={tmp_path / 'eval.jsonl'}", f"--output_dir={tmp_path / 'grpo'}",
        "--max_steps=24", "--save_steps=0", "--eval_on_start=True", "--eval_num_generations=8", "--export_final=False",
        "--reward_funcs=grpo.rewards:choice_exact", ranks=2, timeout=600,
    )  # fmt: skip
    lines = [line for line in read_metrics(tmp_path / "grpo") if "eval/reward" in line]
    assert [line["step"] for line in lines] == [0, 24]
    before, after = (line["eval/reward/choice_exact"] for line in lines)
    print(f"exact match {before:.3f} -> {after:.3f}")
    assert after >= before + 0.3
