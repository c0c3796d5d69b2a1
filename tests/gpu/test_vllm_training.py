"""GRPO as a user runs it: two trainers on two GPUs, and a vLLM server that shares the second of them.

    python -m pytest -v -rs -s tests/gpu/test_vllm_training.py

Two CUDA GPUs and vLLM, in this environment or in .venv/rollout; about four minutes. Only trainer rank 0 is in a group with the server, so that no
group holds one GPU twice.
"""

import json

import pytest
import torch

from tests.conftest import read_metrics
from tests.gpu.test_vllm_gpu import NOISE, SHAPES
from tests.vllm_server import VllmServer, rollout_python

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.skipif(rollout_python() is None, reason="no vLLM: bash env/setup.sh rollout --device cuda"),
]
REWARDS = """
def vowels(prompts, completions, **_):
    return [sum(character in "aeiou" for character in text) / (len(text) + 1) for text in completions]
"""


@pytest.fixture(scope="module")
def setting(tiny_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    (folder / "my_rewards.py").write_text(REWARDS)
    with open(folder / "train.jsonl", "w") as stream:
        for row in range(64):
            stream.write(json.dumps({"id": f"q{row}", "prompt": [{"role": "user", "content": f"Question {row}?"}]}) + "\n")
    model = tiny_dir("qwen3_moe", **SHAPES)
    env = {"CUDA_VISIBLE_DEVICES": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    with VllmServer(model, folder / "vllm.log", "--gpu-memory-utilization", "0.3", env=env) as server:
        server.wait(400)
        yield folder, model, server


@pytest.mark.parametrize("trainable, lag", [("all", 0), ("attention", 0), ("all", 1)])
def test_two_trainers_and_a_server(setting, launch, tmp_path, trainable, lag):
    """The engine's log-probabilities stay with the trainer's while training moves them; one rollout ahead they are one version behind."""
    folder, model, server = setting
    options = (
        "--config=grpo/configs/tiny.yaml", f"--model_name_or_path={model}", f"--train_files={folder / 'train.jsonl'}", "--max_steps=6",
        f"--output_dir={tmp_path / 'run'}", f"--trainable={trainable}", f"--rollout_lag={lag}", "--reward_funcs=my_rewards:vowels",
        "--mask_truncated_completions=False", "--rollout_backend=vllm", f"--vllm_servers={server.url}", "--save_steps=0",
        "--export_final=False", "--learning_rate=2e-3", "--rollout_correction=token_tis",
    )  # fmt: skip
    launch("grpo.train", *options, ranks=2, env={"PYTHONPATH": str(folder)})
    lines = read_metrics(tmp_path / "run")
    differences = [line["grpo/logp_diff_mean"] for line in lines if "grpo/logp_diff_mean" in line]  # where something trained
    assert len(differences) >= 3
    print(f"{trainable}, lag {lag}: distance of engine and trainer " + " ".join(f"{value:.4f}" for value in differences))
    assert [line["grpo/weight_version"] for line in lines] == ([0, 1, 2, 3, 4, 5] if not lag else [0, 0, 1, 2, 3, 4])
    assert [line["grpo/weight_lag"] for line in lines] == [0] + [lag] * 5
    if lag:
        assert differences[0] < NOISE < 2 * NOISE < max(differences[1:])  # a step of this size shows: the check below could fail
    else:
        assert max(differences) < NOISE
