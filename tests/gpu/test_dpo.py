"""The DPO loop on CUDA GPUs: first loss in bf16, compiled and not, one GPU beside two, resume.

    python -m pytest -v -rs tests/gpu/test_dpo.py

Two CUDA GPUs, a few minutes.
"""

import json
import math
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, read_metrics

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
SHAPES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3}
WORDS = "river stone cedar meadow lantern harvest engine rubber cable static bolt gravel".split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pairs to train on and held-out ones; the preferred answer repeats the word of the question."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(0)
    for name, count in (("train", 512), ("held_out", 65)):
        with open(folder / f"{name}.jsonl", "w") as stream:
            for _ in range(count):
                right, wrong = draw.sample(WORDS, 2)
                prompt = [{"role": "user", "content": f"{right} {right}"}]
                stream.write(json.dumps({"prompt": prompt, "chosen": right, "rejected": wrong}) + "\n")
    return folder / "train.jsonl", folder / "held_out.jsonl"


def train(model, files, output, *options, gpus: int = 2) -> tuple[list[dict], str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m", "dpo.train"]
    command += [f"--model_name_or_path={model}", f"--train_files={files[0]}", f"--eval_files={files[1]}", f"--output_dir={output}"]
    command += ["--max_length=512", "--learning_rate=1e-3", "--lr_scheduler_type=constant", "--warmup_steps=0", "--data_workers=1", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TORCH_LOGS": "recompiles"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return read_metrics(output), done.stderr


@pytest.mark.parametrize("family", ["qwen3_moe", "glm_moe_dsa"])
def test_first_loss_resume_and_number_of_gpus(tiny_dir, files, tmp_path, family):
    model = tiny_dir(family, **SHAPES)
    options = ("--max_steps=10", "--save_steps=5", "--gradient_accumulation_steps=2")
    whole, _ = train(model, files, tmp_path / "run", *options)
    assert whole[0]["loss"] == pytest.approx(math.log(2), abs=2e-3) and abs(whole[0]["dpo/margin"]) < 5e-3
    assert whole[-1]["loss"] < 0.9 * whole[0]["loss"] and whole[-1]["eval/accuracy"] > 0.7
    print(f"{family}: first loss {whole[0]['loss']:.6f}, margin {whole[0]['dpo/margin']:.2g}")

    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-000010")
    again, log = train(model, files, tmp_path / "again", *options)
    assert "to compute" not in log
    difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, again, strict=True))
    print(f"{family}: largest difference of the loss after a resume {difference:.3g}")
    assert difference < 5e-3

    one, _ = train(model, files, tmp_path / "one", "--max_steps=10", "--gradient_accumulation_steps=4", "--export_final=false", gpus=1)
    for a, b in zip(whole[:3], one[:3], strict=True):
        assert a["tokens"] == b["tokens"] and a["loss"] == pytest.approx(b["loss"], abs=1e-2)


def test_compiled_layers_compile_once_and_start_at_ln_2(tiny_dir, files, tmp_path):
    lines, log = train(tiny_dir("qwen3_moe", **SHAPES), files, tmp_path / "run", "--max_steps=8", "--compile=true", "--export_final=false")
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=2e-3)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert log.split(" step 3 loss", 1)[1].count("Recompiling function") == 0
