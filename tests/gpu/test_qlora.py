"""A 4-bit base on GPUs, its layers on two of them: against dense weights, and memory against the plan.

    python -m pytest -v -rs tests/gpu/test_qlora.py

Two CUDA GPUs, a minute. The same functions run on a CPU in tests/test_qlora.py, in fp32 and with tight limits.
"""

from types import SimpleNamespace

import pytest
import torch

from common import attention, dist, lora, metrics, nf4, one_node
from common.config import ModelArguments
from common.logprobs import LogpModel
from common.lora import Adapters
from common.one_node import OneNodeModel, Work, plan_memory
from common.skeleton import build_skeleton
from common.weights import Unit
from grpo.one_node import OneNodeBackend
from grpo.rollout import Prompt
from tests.test_qlora import ATTENTION, inputs_of, moe_config

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
WIDE = dict(
    hidden_size=4096, num_hidden_layers=4, num_attention_heads=64, head_dim=128, num_key_value_heads=4, intermediate_size=12288,
    moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
)  # fmt: skip


@pytest.fixture
def one_process():
    dist.init(setup_timeout_minutes=3)
    yield
    dist.shutdown()


def on_gpus(inputs: tuple) -> tuple[dict, torch.Tensor]:
    named, targets = inputs
    return {k: v.cuda() if torch.is_tensor(v) else v for k, v in named.items()}, targets.cuda()


def test_layers_on_two_gpus_equal_dense_weights(tiny_dir, one_process):
    """Log-probabilities and gradients of adapters; and greedy answers get the log-probabilities that the training pass computes."""
    folder = str(tiny_dir("qwen3_moe"))
    model = one_node.build_model(ModelArguments(folder, lora_rank=4, lora_dropout=0.0, quantization="nf4"), Work(64, 4, 16, 16)).sharded
    layers = model.root.model.model.layers
    assert [next(layer.buffers()).device.index for layer in layers] == [0, 0, 1, 1]
    for shard in model.trained_shards():
        shard.tensor.copy_(0.1 * torch.sin(torch.arange(shard.tensor.numel(), device=shard.tensor.device) * 1.7))
    inputs, targets = on_gpus(inputs_of([5, 80, 200, 13, 7, 99, 301]))
    model.train()
    output = model(inputs, targets)
    output.logps.sum().backward()
    assert output.logps.device == torch.device("cuda", 0)

    dense = build_skeleton(folder, attn_implementation="sdpa").to_empty(device="cuda:0")
    named = {
        name: tensor.to("cuda:0") for name, tensor in model.root.model.state_dict().items() if "lora" not in name and "nf4" not in name
    }
    for path, module in model.root.model.named_modules():
        for leaf, stored in module.named_children():
            if isinstance(stored, nf4.Nf4Tensor):
                weight = stored.dequantise(torch.float32).to("cuda:0")
                if leaf == "nf4_weight":
                    weight = weight + 4 * module.lora.B.to("cuda:0") @ module.lora.A.to("cuda:0")
                named[f"{path}.{leaf.removeprefix('nf4_')}"] = weight.bfloat16()
    dense.load_state_dict(named)
    for name, buffer in model.root.model.named_buffers():
        if "inv_freq" in name:
            dense.get_buffer(name).copy_(buffer)
    with torch.no_grad():
        expected = dense(inputs["input_ids"]).logits.float().log_softmax(-1)[0, :-1].gather(1, targets[0, :-1, None])[:, 0]
    assert (output.logps[:-1] - expected).abs().max() < 0.15 and (output.logps[:-1] - expected).abs().mean() < 0.05
    assert all(shard.parameter.grad is not None and shard.parameter.grad.abs().max() > 0 for shard in model.trained_shards())
    assert {shard.parameter.grad.device.index for shard in model.trained_shards()} == {0, 1}
    norm = model.clip_grad_norm(1.0)
    assert norm.device.index == 0 and model.clip_grad_norm(0).item() == pytest.approx(min(1.0, norm.item()), rel=1e-3)

    backend = OneNodeBackend(SimpleNamespace(sharded=model), stop_ids=[379], pad_id=377, batch_size=4)
    prompts = [Prompt("a", [5, 80, 200, 13]), Prompt("b", [7, 99])]
    answers = backend.generate(prompts, 2, seed=1, poll=lambda: False, temperature=1.0, top_p=1.0, max_new_tokens=12)
    assert len(answers) == 4
    for answer in answers:
        prompt = dict(prompts)[answer.id]
        row, wanted = on_gpus(inputs_of([*prompt, *answer.completion_ids]))
        with torch.no_grad():
            logps = model(row, wanted).logps[len(prompt) - 1 : -1]
        assert (logps.cpu() - torch.tensor(answer.logps)).abs().mean() < 0.05


class RandomLoader:
    """Stands in for the one that reads a checkpoint: a model of full width, drawn where it lies."""

    def __init__(self, converter):
        self.model = converter.model

    def load_unit(self, unit) -> None:
        inside = (lambda name: name.startswith(unit.name + ".")) if unit.name else (lambda name: ".layers." not in name)
        for name, parameter in list(self.model.named_parameters()):
            if inside(name) and ".lora." not in name:
                path, _, leaf = name.rpartition(".")
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda:0").normal_(std=0.02)
                self.model.get_submodule(path)._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
        if not unit.name:
            with torch.device("cuda:0"):
                self.model.model.rotary_emb.__init__(self.model.config)  # its frequencies are in no checkpoint

    def finish(self) -> None:
        pass


def test_memory_stays_within_the_plan(one_process, monkeypatch):
    """Four layers of Qwen3-235B-A22B's width on two GPUs: loading, answers, training. Prints what was planned and what was used."""
    import time

    monkeypatch.setattr(one_node, "Loader", RandomLoader)
    devices = dist.use_all_devices()
    attention.register()
    model = build_skeleton(moe_config(**WIDE), attn_implementation="packed")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters, selection = lora.add(model, Adapters(8, 16.0, 0.05, ATTENTION), "all", torch.float32)
    work = Work(row_tokens=8192, answers=32, prompt_tokens=2048, completion_tokens=32)
    plan = plan_memory(model, work, [metrics.free_memory(device) for device in devices])
    print("\n" + "\n".join(plan.lines()))
    units = [Unit(path, path, ()) for path in model.decoder_layer_paths] + [Unit("", "", ())]

    def peaks(name: str, start: float) -> list[float]:
        torch.cuda.synchronize()
        used = [torch.cuda.max_memory_allocated(device) / 2**30 for device in devices]
        print(f"{name}: {time.perf_counter() - start:.1f} s, peak GiB {' '.join(f'{size:.1f}' for size in used)}")
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        return used

    start = time.perf_counter()
    errors = one_node._load(model, SimpleNamespace(model=model, units=units), [devices[n] for n in plan.device_of], 0, True)
    used = [peaks("loading", start)]
    assert max(errors.values()) < 0.11 and len(errors) == 4 * 6
    held = [torch.cuda.memory_allocated(device) for device in devices]
    print("weights GiB", *(f"{size / 2**30:.2f}" for size in held))
    for size, parts in zip(held, plan.parts, strict=True):
        assert size == pytest.approx(parts["weights"], rel=0.02)
    split = OneNodeModel(LogpModel(model), SimpleNamespace(units=units), adapters)

    backend = OneNodeBackend(SimpleNamespace(sharded=split), stop_ids=[2], pad_id=1, batch_size=work.answers)
    prompts = [Prompt(str(i), torch.randint(5, 150000, (2048,)).tolist()) for i in range(32)]
    for tokens in (1, work.completion_tokens):
        start = time.perf_counter()
        backend.generate(prompts, 1, seed=1, poll=lambda: False, temperature=1.0, top_p=1.0, max_new_tokens=tokens)
        used.append(peaks(f"prompts and {tokens} tokens of 32 answers", start))

    inputs, targets = on_gpus(inputs_of(torch.randint(5, 150000, (8192,)).tolist()))
    split.train()
    for _ in range(2):
        start = time.perf_counter()
        split(inputs, targets, with_entropy=True).logps.sum().backward()
        used.append(peaks("forward and backward of 8192 tokens", start))
    for device, (needed, capacity) in enumerate(zip(plan.needed, plan.capacities, strict=True)):
        assert max(peak[device] for peak in used) * 2**30 <= needed < capacity
