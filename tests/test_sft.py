"""Supervised fine-tuning as a user runs it: torchrun, two gloo ranks, real files."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.checkpoint import SavedParameters
from tests.conftest import ROOT, read_metrics

FAMILIES = ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "glm_moe_dsa", "llama"]
CONSTANT = ("--learning_rate=1e-3", "--lr_scheduler_type=constant", "--warmup_steps=0", "--data_workers=1")


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    """Conversations of very uneven length; every one can be learned."""
    with open(path, "w", encoding="utf-8") as file:
        for i in range(first, first + count):
            answer = " ".join(str((i * k) % 13) for k in range(1, 2 + (i * 7) % 40))
            messages = [{"role": "user", "content": f"Multiples of {i} modulo 13?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages, "weight": 1.0 + i % 2}) + "\n")
    return path


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(folder / "train.jsonl", 40), write_rows(folder / "eval.jsonl", 7, first=100)


@pytest.fixture
def sft(launch, rows):
    """sft(model, output, "--max_steps=3", ranks=2) trains and returns metrics.jsonl without wall-clock figures."""

    def run(model, output, *options, ranks: int = 2, train=None, **kwargs):
        files = (f"--model_name_or_path={model}", f"--train_files={train or rows[0]}", f"--output_dir={output}", "--max_length=160")
        done = launch("sft.train", *files, *CONSTANT, *options, ranks=ranks, **kwargs)
        return read_metrics(output) if done.returncode == 0 else done

    return run


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_exports_what_it_learned(tiny_dir, sft, rows, tmp_path, family):
    mtp = family not in ("qwen3_moe", "llama")
    model = tiny_dir(family, mtp=mtp, max_shard_bytes=200_000)
    metrics = sft(model, tmp_path / "run", "--max_steps=4", f"--eval_files={rows[1]}", "--gradient_accumulation_steps=2")
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["skipped_steps"] == 0

    # The exported folder is the live model: the held-out loss by plain transformers is the run's.
    final = tmp_path / "run" / "final"
    exported = AutoModelForCausalLM.from_pretrained(final, dtype=torch.bfloat16, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(final)
    nll = total = 0.0
    for line in rows[1].read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = tokenizer(row["messages"][1]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = exported(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        nll += row["weight"] * torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        total += row["weight"] * len(answer)
    assert metrics[-1]["eval/loss"] == pytest.approx(nll / total, rel=5e-3)

    # Names, shapes and dtypes are the base's; what did not train is the base's to the byte (the vision tower, MTP, GLM's indexer).
    base, new = tensors_of(model), tensors_of(final)
    assert {n: (t.shape, t.dtype) for n, t in base.items()} == {n: (t.shape, t.dtype) for n, t in new.items()}
    untouched = [n for n in base if n.startswith(("mtp.", "model.visual.", "model.layers.78.")) or ".indexer." in n or n.endswith("correction_bias")]
    assert bool(untouched) == (family not in ("qwen3_moe", "llama"))
    assert all(torch.equal(base[n], new[n]) for n in untouched)
    moved = [n for n in base if n not in untouched and not torch.equal(base[n], new[n])]
    assert len(moved) > 0.9 * (len(base) - len(untouched))

    if family == "qwen3_5_moe":  # the checkpoint's own export: the same bytes
        command = [sys.executable, "-m", "common.export", "--checkpoint", tmp_path / "run" / "checkpoint-000004", "--output", tmp_path / "cli"]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        cli = tensors_of(tmp_path / "cli")
        assert all(torch.equal(cli[n], new[n]) for n in new) and set(cli) == set(new)


def parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    saved = SavedParameters(checkpoint)
    return saved.read_many(sorted(saved.names))


def resumed_from(source: Path, step: int, target: Path) -> Path:
    """A copy of a run as it was when it was killed some steps after `step`: later checkpoints are gone, later metrics are not."""
    shutil.copytree(source, target)
    for folder in target.glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    shutil.rmtree(target / "final", ignore_errors=True)
    return target


def test_ten_steps_are_ten_steps_however_they_are_cut(tiny_dir, sft, rows, tmp_path):
    model = tiny_dir("qwen3_moe", num_hidden_layers=2)
    options = ("--gradient_accumulation_steps=2", "--save_steps=5", "--save_total_limit=9", "--load_balancing_coef=0.01", "--weight_decay=0.1")
    ten = sft(model, tmp_path / "ten", "--max_steps=10", *options)
    epochs = {int(line["epoch"]) for line in ten}
    assert len(epochs) >= 2, "the test must cross an epoch's end"
    weights = parameters(tmp_path / "ten" / "checkpoint-000010")

    five = resumed_from(tmp_path / "ten", 5, tmp_path / "five")
    with open(five / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "lo')  # killed in mid-write
    assert sft(model, five, "--max_steps=10", *options) == ten

    # Evaluation in between changes nothing, nor does a second resume.
    for steps in (3, 6, 10):
        cut = sft(model, tmp_path / "cut", f"--max_steps={steps}", f"--eval_files={rows[1]}", "--eval_steps=2", *options)
    assert [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in cut] == ten

    for run in (five, tmp_path / "cut"):
        again = parameters(run / "checkpoint-000010")
        assert set(again) == set(weights)
        assert all(torch.equal(again[name], weights[name]) for name in weights), run

    # Another number of ranks, same bins a step: equal up to the order of sums, and the load-balancing term, which belongs to a micro-batch.
    plain = (*(option for option in options if "load_balancing" not in option), "--compute_dtype=float32")
    two = sft(model, tmp_path / "two", "--max_steps=10", *plain)
    one = resumed_from(tmp_path / "two", 5, tmp_path / "one")
    plain_one = tuple(option if "accumulation" not in option else "--gradient_accumulation_steps=4" for option in plain)
    for a, b in zip(sft(model, one, "--max_steps=10", *plain_one, ranks=1), two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert a["tokens"] == b["tokens"]

    # Another number of bins a step is refused unless it is asked for.
    other = resumed_from(tmp_path / "two", 5, tmp_path / "other")
    refused = sft(model, other, "--max_steps=6", *plain, ranks=1, check=False)
    assert refused.returncode != 0
    assert "bins_per_step = 4; now it is 2" in refused.stderr
    assert sft(model, other, "--max_steps=6", "--allow_batch_change", *plain, ranks=1)[-1]["step"] == 6


def test_schedules_do_not_step_twice_on_resume(tiny_dir, sft, tmp_path):
    model = tiny_dir("llama", num_hidden_layers=1)
    options = ("--max_steps=8", "--save_steps=4", "--lr_scheduler_type=cosine", "--warmup_steps=0.25", "--export_final=false")
    whole = sft(model, tmp_path / "whole", *options)
    assert [line["learning_rate"] for line in whole][:3] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert sft(model, resumed_from(tmp_path / "whole", 4, tmp_path / "again"), *options) == whole


def test_stop_saves_and_the_same_command_goes_on(tiny_dir, sft, rows, tmp_path):
    model, run = tiny_dir("llama", num_hidden_layers=1), tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sft.train"]
    command += [f"--model_name_or_path={model}", f"--train_files={rows[0]}", f"--output_dir={run}", "--max_length=160", "--max_steps=100000"]
    process = subprocess.Popen([*command, *CONSTANT], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < 3:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        (run / "STOP").touch()
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, stderr[-3000:]
    steps = read_metrics(run)[-1]["step"]
    assert (run / f"checkpoint-{steps:06d}" / "COMPLETE").exists()
    assert not (run / "DONE").exists()
    metrics = sft(model, run, f"--max_steps={steps + 2}")
    assert [line["step"] for line in metrics] == list(range(1, steps + 3))
    assert (run / "DONE").exists()
    assert not (run / "STOP").exists()


STOP_AT_ONCE = """
import sys
from pathlib import Path
from common import run
from sft import train
start = run.start
def start_and_stop(output_dir, *rest):
    start(output_dir, *rest)
    (Path(output_dir) / "STOP").touch()
run.start = start_and_stop
sys.argv += ["--max_length=160", "--max_steps=4", "--data_workers=1", "--save_total_limit=1", "--learning_rate=1e-3", "--warmup_steps=0",
             "--lr_scheduler_type=constant"]
train.main()
"""


def test_stop_right_after_a_save_does_not_replace_the_checkpoint(tiny_dir, sft, tmp_path):
    """One moment between removing the old and naming the new would be one too many, with save_total_limit 1."""
    model, run = tiny_dir("llama", num_hidden_layers=1), tmp_path / "run"
    rows = write_rows(tmp_path / "rows.jsonl", 40)
    sft(model, run, "--max_steps=2", "--save_total_limit=1", "--export_final=false", train=rows, ranks=1)
    marker = run / "checkpoint-000002" / "COMPLETE"
    before = marker.stat().st_mtime_ns
    process = subprocess.Popen(
        [sys.executable, "-c", STOP_AT_ONCE, *(f"--model_name_or_path={model}", f"--train_files={rows}", f"--output_dir={run}")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr[-3000:]
    assert "STOP found: saved at step 2" in stderr
    assert marker.stat().st_mtime_ns == before


def poison(model: Path, target: Path, token: str) -> Path:
    """A copy of `model` whose embedding of one token is not a number."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    tokenizer = AutoTokenizer.from_pretrained(model)
    (index,) = tokenizer(token, add_special_tokens=False)["input_ids"]
    file = target / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][index] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks_and_many_end_the_run(tiny_dir, sft, tmp_path):
    model = poison(tiny_dir("llama", num_hidden_layers=1), tmp_path / "model", "~")
    train = tmp_path / "rows.jsonl"
    with open(train, "w") as file:
        for i in range(24):
            text = "~ poison" if i == 5 else f"fine {i}"
            file.write(json.dumps({"prompt": f"say {i}", "completion": text}) + "\n")
    metrics = sft(model, tmp_path / "run", "--max_steps=12", "--packing=false", train=train)
    assert metrics[-1]["skipped_steps"] == 1
    assert sum(line["loss"] != line["loss"] for line in metrics) == 1
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    log = (tmp_path / "run" / "run.log").read_text()
    assert f"{train}:6" in log and "1 of 12 steps were skipped: their warnings above say why" in log  # the row is named

    train.write_text("".join(json.dumps({"prompt": "~", "completion": f"bad {i}"}) + "\n" for i in range(24)))
    ended = sft(model, tmp_path / "bad", "--max_steps=12", "--packing=false", "--max_skipped_steps=3", train=train, check=False)
    assert ended.returncode != 0
    assert "3 steps in a row were not finite" in ended.stderr
    assert f"{train}:" in ended.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "completion": "b"}\n', "gives 1 bins but one optimizer step needs 2"),
        ('{"prompt": "a", "completion": "b"}\n{"messages": 3}\n', "rows.jsonl:2"),
        ("", "rows.jsonl"),
    ],
    ids=["too small", "bad row", "empty"],
)
def test_data_that_cannot_be_trained_on_ends_all_ranks_at_once(tiny_dir, sft, tmp_path, content, message):
    train = tmp_path / "rows.jsonl"
    train.write_text(content)
    ended = sft(tiny_dir("llama", num_hidden_layers=1), tmp_path / "run", train=train, check=False, timeout=90)
    assert ended.returncode != 0
    assert message in ended.stderr


def test_evaluation_drops_nothing_and_does_not_depend_on_ranks(tiny_dir, sft, rows, tmp_path):
    """Seven rows in bins of one on two ranks: one rank runs a row of zero weight."""
    model = tiny_dir("qwen3_moe", num_hidden_layers=1)
    options = ("--max_steps=1", "--packing=false", f"--eval_files={rows[1]}", "--export_final=false", "--compute_dtype=float32")
    two = sft(model, tmp_path / "two", *options, "--collective_timeout_minutes=0.3")
    one = sft(model, tmp_path / "one", *options, "--gradient_accumulation_steps=2", ranks=1)
    assert two[-1]["eval/loss"] == pytest.approx(one[-1]["eval/loss"], rel=1e-5)


def test_the_first_layers_of_a_checkpoint_go_the_whole_way(tiny_dir, sft, tmp_path):
    model = tiny_dir("qwen3_next", mtp=True)
    options = ("--debug_num_layers=2", "--save_steps=2", "--max_steps=4")
    whole = sft(model, tmp_path / "run", *options)
    assert sft(model, resumed_from(tmp_path / "run", 2, tmp_path / "again"), *options) == whole
    final = tmp_path / "run" / "final"
    assert json.loads((final / "config.json").read_text())["num_hidden_layers"] == 2
    exported = AutoModelForCausalLM.from_pretrained(final, dtype=torch.bfloat16)
    assert exported(torch.tensor([[5, 6, 7]]), use_cache=False).logits.isfinite().all()
    assert not any(name.startswith("mtp.") or ".layers.2." in name for name in tensors_of(final))


def test_a_refused_run_touches_nothing_and_two_runs_cannot_share_a_folder(tiny_dir, sft, rows, tmp_path):
    model, run = tiny_dir("llama", num_hidden_layers=1), tmp_path / "run"
    sft(model, run, "--max_steps=2", "--export_final=false", ranks=1)
    before = {f.name: f.read_bytes() for f in (run / "config.yaml", run / "DONE", run / "metrics.jsonl")}
    other = write_rows(tmp_path / "other.jsonl", 30, first=500)
    refused = sft(model, run, "--max_steps=4", train=other, check=False, ranks=1)
    assert refused.returncode != 0
    assert "was trained on other data than these files" in refused.stderr
    assert {name: (run / name).read_bytes() for name in before} == before
    assert "ended by ValueError" in (run / "run.log").read_text().splitlines()[-1]

    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = sft(model, run, "--max_steps=4", check=False, ranks=1)
    assert second.returncode != 0
    assert "is in use by another run" in second.stderr

    for wrong, message in ((tmp_path / "nowhere", "is not a folder"), (tmp_path, "has no config.json")):
        ended = sft(wrong, tmp_path / "new", check=False, ranks=1, timeout=60)
        assert ended.returncode != 0
        assert message in ended.stderr


def test_a_dead_rank_ends_the_job(tiny_dir, rows, tmp_path):
    model = tiny_dir("llama", num_hidden_layers=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sft.train"]
    command += [f"--model_name_or_path={model}", f"--train_files={rows[0]}", f"--output_dir={tmp_path / 'run'}", "--max_length=160"]
    process = subprocess.Popen([*command, "--max_steps=100000", *CONSTANT], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
