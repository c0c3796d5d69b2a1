"""GRPO as a user runs it with a real vLLM on the CPU: it learns, one rollout ahead too, and stops in a rollout.

Needs the rollout environment (bash env/setup.sh rollout).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_grpo import write_colours
from vllm_server import VllmServer, rollout_python

from common.server_http import Http
from tests.conftest import ROOT, read_metrics

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(rollout_python() is None, reason="no rollout environment: bash env/setup.sh rollout"),
]


def trainer(folder: Path, module: str, *options) -> subprocess.Popen:
    """A trainer of one rank in a process of its own; what it prints is in folder/output."""
    with open(folder / "output", "a") as output:
        command = [sys.executable, "-m", module, *map(str, options)]
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output)


def finish(folder: Path, process: subprocess.Popen) -> str:
    """Waits for a good end; returns what has been printed."""
    try:
        code = process.wait(timeout=600)
    finally:
        process.kill()
    text = (folder / "output").read_text()
    assert code == 0, text[-5000:]
    return text


@pytest.fixture(scope="module")
def base(tiny_dir) -> Path:
    return tiny_dir("qwen3_moe", num_experts_per_tok=12)


@pytest.fixture(scope="module")
def starting(base, tmp_path_factory):
    with VllmServer(base, tmp_path_factory.mktemp("vllm") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def warmed(base, starting, tmp_path_factory) -> Path:
    """A folder with the questions of tests/test_grpo.py and a model in sft/final that knows the form of an answer."""
    folder = tmp_path_factory.mktemp("warmed")
    write_colours(folder, 0.3)
    options = (
        "--config=sft/configs/tiny.yaml", f"--model_name_or_path={base}", f"--train_files={folder / 'warm.jsonl'}",
        f"--output_dir={folder / 'sft'}", "--max_length=512", "--max_steps=40", "--save_steps=0", "--per_device_train_batch_size=4",
    )  # fmt: skip
    finish(folder, trainer(folder, "sft.train", *options))
    return folder


@pytest.fixture(scope="module")
def server(starting, warmed) -> VllmServer:
    """One for all trainings. It is told that it holds another trainer's weights, as after the first of them, so that a base other than its
    own is no error."""
    starting.wait()
    Http(starting.url).call("/collective_rpc", {"method": "sync_set_version", "args": [0]}, timeout=30)
    return starting


def grpo(folder: Path, warmed: Path, server: VllmServer, model: Path, *options) -> subprocess.Popen:
    return trainer(
        folder, "grpo.train", "--config=grpo/configs/tiny.yaml", f"--model_name_or_path={model}", f"--train_files={warmed / 'train.jsonl'}",
        f"--output_dir={folder / 'run'}", "--save_steps=0", "--export_final=False", "--reward_funcs=grpo.rewards:choice_exact",
        "--rollout_backend=vllm", f"--vllm_servers={server.url}", *options,
    )  # fmt: skip


def test_rewards_teach_through_vllm(server, warmed, tmp_path):
    """Exact match on unseen combinations rises by at least 0.3 within 20 steps of 128 answers, sampled at temperature 0.6."""
    process = grpo(
        tmp_path, warmed, server, warmed / "sft" / "final", "--max_steps=20", "--temperature=0.6", f"--eval_files={warmed / 'eval.jsonl'}",
        "--eval_on_start=True", "--eval_num_generations=8",
    )  # fmt: skip
    finish(tmp_path, process)
    lines = read_metrics(tmp_path / "run")
    before, after = (line["eval/reward/choice_exact"] for line in lines if "eval/reward" in line)
    assert after >= before + 0.3, f"exact match {before:.3f} -> {after:.3f}"
    steps = lines[1:]
    assert [line["grpo/weight_version"] for line in steps] == list(range(20)) and not any(line["grpo/weight_lag"] for line in steps)
    trained = [line for line in steps if "grpo/ratio" in line]
    assert len(trained) >= 15 and all(line["grpo/ratio"] == pytest.approx(1.0, abs=1e-5) for line in trained)
    assert all(line["grpo/logp_diff_mean"] < 0.02 and abs(line["grpo/correction_mean"] - 1) < 0.02 for line in trained)


def test_one_rollout_ahead_through_vllm(server, warmed, tmp_path):
    """Each rollout but the first is one version old, and the same seed gives the same run."""
    runs = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        options = ("--rollout_lag=1", "--rollout_correction=token_tis", "--max_steps=4", "--num_prompts_per_step=8")
        finish(folder, grpo(folder, warmed, server, warmed / "sft" / "final", *options))
        runs.append((read_metrics(folder / "run"), [path.read_text() for path in sorted((folder / "run" / "rollouts").iterdir())]))
    metrics, files = runs[0]
    assert [line["grpo/weight_version"] for line in metrics] == [0, 0, 1, 2]
    assert [line["grpo/weight_lag"] for line in metrics] == [0, 1, 1, 1]
    spans = [{v for line in text.splitlines() for v, _, _ in json.loads(line)["weight_versions"]} for text in files]
    assert spans == [{0}, {0}, {1}, {2}]
    assert runs[0] == runs[1]


def test_stop_while_servers_generate(server, warmed, base, tmp_path):
    """What is finished is kept and not generated again. A model that has learnt nothing: its answers are long."""
    options = ("--max_steps=1", "--num_prompts_per_step=56", "--num_generations=4", "--max_length=500", "--max_completion_length=450")
    probe_and_two = server.answered() + 8 + 2
    process = grpo(tmp_path, warmed, server, base, *options)
    while server.answered() < probe_and_two and process.poll() is None:
        time.sleep(0.02)
    server.signal(signal.SIGSTOP)  # or it might be done before the trainer looks for the file
    (tmp_path / "run" / "STOP").touch()
    try:
        assert "STOP found: saved at step 0" in finish(tmp_path, process)
    finally:
        server.signal(signal.SIGCONT)
    rollouts = tmp_path / "run" / "rollouts"
    kept = [json.loads(line) for line in (rollouts / "unfinished-000001.jsonl").read_text().splitlines()]
    assert 8 <= len(kept) < 224 and not (rollouts / "step-000001.jsonl").exists()
    finish(tmp_path, grpo(tmp_path, warmed, server, base, *options))
    answers = [json.loads(line) for line in (rollouts / "step-000001.jsonl").read_text().splitlines()]
    by_place = {(line["id"], line["sample"]): line["completion_ids"] for line in answers}
    assert len(answers) == 224 == len(by_place) and (tmp_path / "run" / "DONE").exists()
    assert all(by_place[line["id"], line["sample"]] == line["completion_ids"] for line in kept)


def test_servers_that_do_not_come_back(server, warmed, tmp_path):
    """The run ends with an error, but keeps what it has trained since the last checkpoint; with a new server the same command goes on."""
    model, run = warmed / "sft" / "final", tmp_path / "run"
    options = ("--max_steps=12", "--num_prompts_per_step=8", "--server_wait_minutes=0.1")
    process = grpo(tmp_path, warmed, server, model, *options)
    while process.poll() is None and not ((run / "metrics.jsonl").exists() and len(read_metrics(run)) >= 2):
        time.sleep(0.02)
    server.kill()
    assert process.wait(timeout=300) == 1
    assert "no server came back within 6 s" in (tmp_path / "output").read_text()
    before = read_metrics(run)
    assert 2 <= len(before) < 12 and (run / f"checkpoint-{len(before):06d}" / "COMPLETE").exists()
    server.start().wait()
    finish(tmp_path, grpo(tmp_path, warmed, server, model, *options))
    after = read_metrics(run)
    assert [line["step"] for line in after] == list(range(1, 13)) and after[: len(before)] == before
    assert [line["grpo/weight_version"] for line in after] == list(range(12))
