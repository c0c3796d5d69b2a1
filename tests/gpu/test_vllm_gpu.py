"""Weight sync over NCCL: the trainer on the first GPU, a real vLLM server on the second.

    python -m pytest -v -rs -s tests/gpu/test_vllm_gpu.py

Two CUDA GPUs and vLLM, in this environment or in .venv/rollout; about three minutes. The tests share one server, in the order of the file.
"""

import dataclasses
import signal
import time

import pytest
import torch

from common import dist, run
from common.config import ModelArguments
from common.weight_sync import ServersLost, SyncError, Timeouts
from grpo.rollout import Prompt
from grpo.vllm_client import VllmBackend, trainer_logps
from tests.vllm_server import VllmServer, rollout_python

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.skipif(rollout_python() is None, reason="no vLLM: bash env/setup.sh rollout --device cuda"),
]

TIMEOUTS = Timeouts(call=60.0, bucket=15.0, join=60.0, health=5.0)
NOISE = 0.06  # of a token's log-probability between trainer and engine, both in bf16
SHAPES = {
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 16,
    "head_dim": 64,
}
PROMPTS = [Prompt(f"p{i}", [(7 * i + 3 * j) % 300 + 10 for j in range(20 + i)]) for i in range(16)]


@torch.no_grad()
def train(model, seed: int, scale: float = 0.3) -> None:
    generator = torch.Generator(dist.device()).manual_seed(seed)
    for shard in model.sharded.trained_shards():
        noise = torch.randn(shard.tensor.shape, generator=generator, device=shard.tensor.device)
        shard.tensor.add_(noise * scale * shard.tensor.abs().mean())


def rollout(backend, temperature: float = 0.0):
    return backend.generate(PROMPTS, 1, temperature=temperature, top_p=1.0, max_new_tokens=32, seed=1, poll=lambda: False)


def distance(model, completions, temperature: float = 1.0) -> float:
    by_id = {prompt.id: prompt.prompt_ids for prompt in PROMPTS}
    ours = torch.cat(trainer_logps(model.sharded, [(by_id[c.id], c.completion_ids) for c in completions], temperature))
    return (ours - torch.tensor([logp for c in completions for logp in c.logps])).abs().mean().item()


@pytest.fixture(scope="module", params=["all", "attention"])
def setting(request, tiny_dir, tmp_path_factory):
    folder = tiny_dir("qwen3_moe", **SHAPES)
    env = {"CUDA_VISIBLE_DEVICES": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    dist.init(10)
    with VllmServer(folder, log, "--gpu-memory-utilization", "0.3", env=env) as server:
        model = run.build_model(ModelArguments(model_name_or_path=str(folder), trainable=request.param, load_balancing_coef=0.0))
        server.wait(400)
        backend = VllmBackend([server.url], model, timeouts=TIMEOUTS, wait_minutes=0.05)
        backend.start()
        report = backend.sync(0)
        proof = report.checks[f"proof {server.url}"]
        print(proof, report.checks)
        assert proof["equal_base"] and proof["visible"] == proof["parameters"], "on a GPU no parameter hides from the fingerprints"
        yield server, model, backend
        backend.close()
    dist.shutdown()


def test_log_probabilities_follow_the_trainer(setting):
    _, model, backend = setting
    assert distance(model, rollout(backend)) < NOISE
    for version in (1, 2, 3):
        train(model, seed=version)
        stale = distance(model, rollout(backend))
        report = backend.sync(version)
        completions = rollout(backend)
        fresh = distance(model, completions)
        print(
            f"version {version}: {stale:.4f} before, {fresh:.4f} after; {report.bytes / 1e6:.1f} MB in {report.seconds:.3f} s with the probe"
        )
        assert fresh < NOISE < 2 * NOISE < stale
        assert {v for c in completions for v, _, _ in c.weight_versions} == {version}
    assert distance(model, rollout(backend, 0.6), 0.6) < 2 * NOISE


def test_incomplete_update_is_refused_and_healed(setting, monkeypatch):
    _, model, backend = setting
    sync = backend.weights
    with monkeypatch.context() as patch:
        tensors = [t for t in sync._tensors(sync.servers[0]) if "layers.1.self_attn.k_proj" not in t.name]
        patch.setattr(sync, "_tensors", lambda _: tensors)
        with pytest.raises(SyncError, match="layers.1.self_attn.qkv_proj"):
            sync.push(backend.version, full=True)
        tensors = [dataclasses.replace(t, name=t.name.replace("layers.1.mlp.gate.", "layers.1.mlp.gates.")) for t in tensors]
        with pytest.raises(SyncError):
            sync.push(backend.version, full=True)
    backend.sync(backend.version)
    assert distance(model, rollout(backend)) < NOISE


def during(backend, patch, action) -> None:
    gather, calls = backend.weights._gather, []

    def act_once(unit, wanted):
        calls.append(unit)
        if len(calls) == 2:
            action()
        return gather(unit, wanted)

    patch.setattr(backend.weights, "bucket_bytes", 100_000)
    patch.setattr(backend.weights, "_gather", act_once)


def test_hung_server(setting, monkeypatch):
    server, model, backend = setting
    train(model, seed=10)
    with monkeypatch.context() as patch:
        during(backend, patch, lambda: server.signal(signal.SIGSTOP))
        started = time.monotonic()
        with pytest.raises(ServersLost):
            backend.sync(backend.version + 1)
        print(f"hung server left after {time.monotonic() - started:.1f} s")
        assert time.monotonic() - started < 120
    server.signal(signal.SIGCONT)
    backend.weights.wait_seconds = 300
    backend.sync(backend.version + 1)
    assert distance(model, rollout(backend)) < NOISE


def test_killed_server(setting, monkeypatch):
    server, model, backend = setting
    train(model, seed=11)
    backend.weights.wait_seconds = 3
    version = backend.version + 1
    with monkeypatch.context() as patch:
        during(backend, patch, server.kill)
        started = time.monotonic()
        with pytest.raises(ServersLost):
            backend.sync(version)
        print(f"killed server left after {time.monotonic() - started:.1f} s")
    server.start()
    backend.weights.wait_seconds = 400
    started = time.monotonic()
    report = backend.sync(version)
    print(f"restarted and synced after {time.monotonic() - started:.1f} s")
    assert report.checks["restarted"] == [server.url]
    assert distance(model, rollout(backend)) < NOISE
