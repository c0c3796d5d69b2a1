"""The SFT loop on two GPUs: resume to the bit, one GPU against two, compiled against eager.

    python -m pytest -v -rs tests/gpu/test_sft.py

Two CUDA GPUs, a few minutes. Gated DeltaNet's family is skipped where its kernels cannot train (see test_kernels.py).
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, read_metrics

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
SHAPES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with open(file, "w") as stream:
        for i in range(64):
            answer = " ".join(str((i * k) % 97) for k in range(1, 4 + i))
            row = [{"role": "user", "content": f"Multiples of {i}?"}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": row}) + "\n")
    return file


def train(model, rows, output, *options, gpus: int = 2) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m", "sft.train"]
    command += [f"--model_name_or_path={model}", f"--train_files={rows}", f"--output_dir={output}", "--max_length=512"]
    command += ["--learning_rate=1e-3", "--lr_scheduler_type=constant", "--warmup_steps=0", "--data_workers=1", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TORCH_LOGS": "recompiles"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    (output / "stderr.txt").write_text(done.stderr)
    return read_metrics(output)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm_moe_dsa", "llama", "qwen3_5_moe"])
def test_resume_and_number_of_gpus(tiny_dir, rows, tmp_path, family):
    if family == "qwen3_5_moe":
        from test_kernels import gated_delta_problem

        if problem := gated_delta_problem():
            pytest.skip(problem)
    model = tiny_dir(family, **({k: v for k, v in SHAPES.items() if family != "llama" or "moe" not in k}))
    whole = train(model, rows, tmp_path / "run", "--max_steps=10", "--save_steps=5", "--gradient_accumulation_steps=2")
    assert whole[-1]["loss"] < whole[0]["loss"]
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-000010")
    again = train(model, rows, tmp_path / "again", "--max_steps=10", "--save_steps=5", "--gradient_accumulation_steps=2")
    difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, again, strict=True))
    print(f"{family}: largest difference of the loss after a resume {difference:.3g}")
    assert difference < 2e-3 * whole[0]["loss"]  # to the bit where the kernels are deterministic
    one = train(model, rows, tmp_path / "one", "--max_steps=10", "--gradient_accumulation_steps=4", "--export_final=false", gpus=1)
    for a, b in zip(whole, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2), (a, b)


@pytest.mark.parametrize("coefficient", ["0", "0.01"])
def test_compiled_equals_eager_and_compiles_once(tiny_dir, rows, tmp_path, coefficient):
    model = tiny_dir("qwen3_moe", **SHAPES)
    options = ("--max_steps=8", "--export_final=false", f"--load_balancing_coef={coefficient}")
    eager = train(model, rows, tmp_path / "eager", *options)
    compiled = train(model, rows, tmp_path / "compiled", *options, "--compile=true")
    for a, b in zip(eager, compiled, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2), (a, b)
    log = (tmp_path / "compiled" / "stderr.txt").read_text()
    assert "Recompiling" not in log.split(" step 3 loss", 1)[1]


def test_bf16_masters_and_8bit_moments_train(tiny_dir, rows, tmp_path):
    model = tiny_dir("qwen3_moe", **SHAPES)
    for name, options in {"sr": ("--master_dtype=bfloat16",), "8bit": ("--optim=adamw_8bit",)}.items():
        lines = train(model, rows, tmp_path / name, "--max_steps=8", "--export_final=false", *options)
        assert lines[-1]["loss"] < 0.8 * lines[0]["loss"], name
