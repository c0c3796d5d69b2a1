"""Preference optimisation from rows to exported model: first loss of every family, reference, invariance, stop and resume, learning."""

import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import config, dist, run
from common.config import DataArguments, ModelArguments
from common.fsdp import ShardedModel
from common.optim import AdamW
from common.tiny import FAMILIES
from dpo import reference as reference_module
from dpo.data import PairRule
from dpo.loss import FIGURES, LossArguments, loss_scales
from dpo.reference import RECORD, check_key, compute_reference, key_of, open_sums, part_path, read_parts
from dpo.train import DPOTrainArguments, PairData, check_reference, evaluate, forward_backward
from tests.conftest import ROOT, read_metrics

WORDS = "river stone cedar meadow lantern harvest engine rubber cable static bolt gravel".split()


def write_pairs(file: Path, count: int, seed: int) -> Path:
    """The rule to learn: the preferred answer repeats the word of the question, the other one says another word."""
    draw = random.Random(seed)
    with open(file, "w") as stream:
        for _ in range(count):
            right, wrong = draw.sample(WORDS, 2)
            prompt = [{"role": "user", "content": f"{right} {right}"}]
            stream.write(json.dumps({"prompt": prompt, "chosen": right, "rejected": wrong}) + "\n")
    return file


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 48, seed=0)


def built(model_dir, file, output, packing: bool = True, max_length: int = 256, **model_options) -> tuple[run.Model, PairData, dict]:
    """Model, pairs and the key of their reference, as the loop makes them."""
    options = {"compute_dtype": "float32", "attn_implementation": "packed"} | model_options
    model_args = ModelArguments(model_name_or_path=str(model_dir), **options)
    data_args = DataArguments(train_files=[str(file)], max_length=max_length, packing=packing, data_workers=1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    data = PairData(*run.load_data(data_args.train_files, tokenizer, data_args, Path(output), PairRule()))
    model = run.build_model(model_args)
    return model, data, key_of(data.dataset, data.bins, model, model_args, data_args)


def with_reference(model: run.Model, data: PairData, key: dict, output) -> PairData:
    folder = Path(output) / "reference"
    data.reference = compute_reference(folder, model, data.dataset, data.bins, key, bins_per_row=1, pad_to=None, stop_dir=Path(output))
    return data


def window_gradients(model: run.Model, data: PairData, loss_args: LossArguments, window, accumulation: int, size: int = 1):
    """(losses, figures) of one window of bins, gradients left in the shards; the denominators are those of all ranks."""
    args = DPOTrainArguments(output_dir="unused", gradient_accumulation_steps=accumulation, per_device_train_batch_size=size)
    batches = [data.batch(bins, None) for bins in run.micro_batches(window, args)]
    pair_weight, chosen_tokens = run.agree(sum(b.weights.sum().item() for b in batches), sum(b.chosen_tokens for b in batches))
    scales = loss_scales(loss_args, pair_weight, chosen_tokens, dist.device())
    losses, figures, _, _ = forward_backward(model.sharded, batches, scales, loss_args, 0.0)
    return losses.tolist(), figures


def whole_gradients(model: ShardedModel) -> dict[str, torch.Tensor]:
    """Every trained parameter's gradient, flattened, from the shards of all ranks."""
    parts = [(s.name, s.offset, s.shape.numel(), s.parameter.grad.reshape(-1)[: s.tensor.numel()].clone()) for s in model.trained_shards()]
    gradients = {}
    for name, offset, total, part in (part for rank in dist.gather_objects(parts) for part in rank):
        gradients.setdefault(name, torch.zeros(total))[offset : offset + len(part)] = part
    return gradients


# ---- step 0 of every family


# Beside every family in fp32: bf16, and parts of a model, FP8 weights included.
CASES = {family: (family, {}) for family in FAMILIES} | {
    "bfloat16": ("qwen3_moe", {"compute_dtype": "bfloat16"}),
    "attention": ("qwen3_next", {"trainable": "attention", "trainable_layers": "1-"}),
    "experts": ("qwen3_moe", {"trainable": "experts", "expert_mask": {"1": [0, 3, 11], "3": [2, 5, 7]}}),
    "fp8": ("glm_moe_dsa", {"trainable": "attention", "compute_dtype": "bfloat16"}),
}


def first_steps(folders: dict[str, str], file: str, output: str) -> dict:
    """{case: (losses of three steps on one window, figures of each, reference sums before and after)}."""
    results = {}
    for family, folder in folders.items():
        options = dict(CASES[family][1])
        if mask := options.get("expert_mask"):
            options["expert_mask"] = f"{output}/mask-{dist.rank()}.json"
            Path(options["expert_mask"]).write_text(json.dumps(mask))
        model, data, key = built(folder, file, f"{output}/{family}", **options)
        data = with_reference(model, data, key, f"{output}/{family}")
        before = np.array(data.reference)
        args = DPOTrainArguments(output_dir=output, learning_rate=1e-3)
        optimizer = AdamW(model.sharded.trained_shards(), ModelArguments(model_name_or_path=folder), args)
        losses, figures = [], []
        for _ in range(3):
            loss, means = window_gradients(model, data, LossArguments(), range(2), 1)
            losses.append(loss[0])
            figures.append(means)
            optimizer.step(1e-3)
            optimizer.zero_grad()
        run.check_frozen(model)
        results[family] = losses, figures, before, np.array(np.load(f"{output}/{family}/reference/sums.npy"))
    return results


@pytest.fixture(scope="module")
def steps_of_families(tiny_dir, run_ranks, pairs_file, tmp_path_factory):
    folders = {case: str(tiny_dir(family, **({"fp8": True} if case == "fp8" else {}))) for case, (family, _) in CASES.items()}
    return run_ranks(2, first_steps, folders, str(pairs_file), str(tmp_path_factory.mktemp("families")))[0]


@pytest.mark.parametrize("case", CASES)
def test_first_loss_is_ln_2_and_then_it_learns(steps_of_families, case):
    losses, figures, _, _ = steps_of_families[case]
    rounded = CASES[case][1].get("compute_dtype") == "bfloat16"
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3 if rounded else 1e-6)
    assert abs(figures[0]["margin"]) < (5e-3 if rounded else 1e-5)
    assert losses[2] < losses[1] < losses[0] - 1e-3
    assert figures[2]["margin"] > 0.01 and figures[2]["accuracy"] > figures[0]["accuracy"]


def answer_logps(model_dir, dataset) -> np.ndarray:
    """Summed log-probability of every example's answer by plain transformers, one sequence at a time, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    sums = []
    with torch.no_grad():
        for index in range(len(dataset)):
            ids, mask = (torch.from_numpy(np.array(part)) for part in dataset.example(index))
            logps = model(input_ids=ids.long()[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids.long()[1:, None])[:, 0]
            sums.append(logps[mask[1:]].sum().item())
    return np.array(sums)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "glm_moe_dsa"])
def test_reference_is_that_of_plain_transformers(steps_of_families, tiny_dir, pairs_file, tmp_path, family):
    _, _, before, after = steps_of_families[family]
    data_args = DataArguments(train_files=[str(pairs_file)], max_length=256, data_workers=1)
    dataset, _ = run.load_data([str(pairs_file)], AutoTokenizer.from_pretrained(tiny_dir(family)), data_args, tmp_path, PairRule())
    assert before == pytest.approx(answer_logps(tiny_dir(family), dataset), abs=2e-3)
    assert np.array_equal(before, after)


# ---- gradients do not depend on ranks, accumulation and packing


LOSSES = LossArguments(loss_type=["sigmoid", "ipo", "sft"], loss_weights=[1.0, 1e-4, 0.3])


def gradients_of_layouts(folder: str, file: str, output: str) -> dict:
    """{layout: (losses, figures, gradients)} of the same pairs."""
    results = {}
    model, data, key = built(folder, file, output, max_length=512)
    data = with_reference(model, data, key, output)
    # The loss of an untrained policy is flat in places; another reference moves every pair off the start.
    offsets = np.random.default_rng(0).normal(0, 5, len(data.dataset))
    data.reference = np.array(data.reference) + offsets
    bins = len(data.bins)
    assert bins % 4 == 0, bins
    for size in (1, 2):
        gradients = window_gradients(model, data, LOSSES, range(bins), bins // size // dist.world_size(), size)
        results[f"packed, {size} bins a row"] = *gradients, whole_gradients(model.sharded)
        for parameter in model.sharded.root.parameters():
            parameter.grad = None
    single = PairData(data.dataset, type(data.bins)(np.arange(len(data.dataset)), np.arange(0, len(data.dataset) + 1, 2)), data.reference)
    gradients = window_gradients(model, single, LOSSES, range(len(single.bins)), len(single.bins) // dist.world_size())
    results["a pair a row"] = *gradients, whole_gradients(model.sharded)
    # Three bins for evaluation: with two ranks one of them runs out of bins.
    three = PairData(data.dataset, type(data.bins)(data.bins.rows[: data.bins.offsets[3]], data.bins.offsets[:4]), data.reference)
    results["evaluation"] = evaluate(model.sharded, three, LOSSES, 1, None), evaluate(model.sharded, three, LOSSES, 2, None)
    if dist.world_size() == 1:
        results["training"] = window_gradients(model, three, LOSSES, range(3), 3)
    return results


def test_gradients_do_not_depend_on_ranks_accumulation_and_packing(tiny_dir, run_ranks, tmp_path):
    folder, file = str(tiny_dir("qwen3_moe")), str(write_pairs(tmp_path / "pairs.jsonl", 72, seed=5))
    layouts, evaluations = {}, []
    for ranks in (1, 2):
        results = run_ranks(ranks, gradients_of_layouts, folder, file, str(tmp_path / str(ranks)))[0]
        evaluations += results.pop("evaluation")
        if ranks == 1:
            losses, figures = results.pop("training")
        layouts |= {f"{ranks} ranks, {name}": value for name, value in results.items()}
    for evaluation in evaluations:
        assert evaluation["eval/loss"] == pytest.approx(sum(losses), rel=1e-5)
        assert [evaluation[f"eval/loss_{name}"] for name in LOSSES.loss_type] == pytest.approx(losses, rel=1e-5)
        assert {name: evaluation[f"eval/{name}"] for name in FIGURES} == pytest.approx({name: figures[name] for name in FIGURES}, rel=1e-4)
    expected_losses, expected_figures, expected = layouts["1 ranks, a pair a row"]
    assert len(layouts) == 6 and all(gradient.abs().max() > 0 for name, gradient in expected.items() if "embed" in name)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, (losses, figures, gradients) in layouts.items():
        assert losses == pytest.approx(expected_losses, rel=1e-5), name
        assert figures == pytest.approx(expected_figures, rel=1e-4, abs=1e-5), name
        assert gradients.keys() == expected.keys()
        worst = max((gradients[key] - expected[key]).abs().max().item() for key in expected)
        assert worst < 1e-4 * largest, (name, worst, largest)


# ---- nothing of the size tokens x vocabulary


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_tensor_of_a_step(folder: str, file: str, output: str) -> tuple[int, int]:
    model, data, key = built(folder, file, output, max_length=2048)
    data = with_reference(model, data, key, output)
    tokens = data.batch([0], None).packed.num_tokens
    window_gradients(model, data, LossArguments(), [0], 1)  # FSDP sets up its storage in the first pass
    with LargestTensor() as largest:
        window_gradients(model, data, LossArguments(loss_type=["sigmoid", "sft"]), [0], 1)
    return largest.elements, tokens


def test_no_tensor_of_tokens_times_vocabulary(tiny_dir, run_ranks, tmp_path):
    vocabulary = 8192  # large beside everything else in the model
    folder = tiny_dir("qwen3_moe", vocab_size=vocabulary, num_hidden_layers=1)
    file = write_pairs(tmp_path / "pairs.jsonl", 60, seed=2)
    elements, tokens = run_ranks(1, largest_tensor_of_a_step, str(folder), str(file), str(tmp_path / "run"))[0]
    assert tokens > 1900 and vocabulary * 64 <= elements < tokens * vocabulary / 4


# ---- the reference on disk


def interrupted_reference(folder: str, file: str, output: str) -> tuple:
    """Two ranks: the whole reference; then one that is stopped after three rows of each rank."""
    model, data, key = built(folder, file, output)
    whole = np.array(with_reference(model, data, key, f"{output}/whole").reference)
    asked = []
    reference_module.run.stop_requested = lambda _: dist.is_main() and (asked.append(1) or len(asked) > 3)
    options = {"bins_per_row": 1, "pad_to": None, "stop_dir": Path(output)}
    stopped = compute_reference(Path(output) / "cut", model, data.dataset, data.bins, key, **options)
    return whole, stopped, len(data.bins)


def finished_reference(folder: str, file: str, output: str) -> tuple:
    """One rank goes on with what two have left, one of whose files a kill cut short."""
    model, data, key = built(folder, file, output)
    cut = Path(output) / "cut"
    damaged = np.fromfile(part_path(cut, 0), RECORD, count=1)  # of an answer that is done: must not count instead of the whole record
    damaged["tokens"], damaged["logps"] = 0, 0
    with open(part_path(cut, 0), "ab") as stream:
        stream.write(damaged.tobytes() + b"torn")
    left = read_parts(cut, data.dataset)
    other = DataArguments(train_files=[file], max_length=512, data_workers=1)
    changed = key_of(data.dataset, data.bins, model, ModelArguments(model_name_or_path=folder, attn_implementation="sdpa"), other)
    differing = sorted(name for name in key if key[name] != changed[name])
    passes = []
    model.sharded.root.register_forward_hook(lambda *_: passes.append(1))
    sums = compute_reference(cut, model, data.dataset, data.bins, key, bins_per_row=1, pad_to=None, stop_dir=Path(output))
    again = compute_reference(cut, model, data.dataset, data.bins, key, bins_per_row=1, pad_to=None, stop_dir=Path(output))
    assert isinstance(again, np.memmap)
    return np.isfinite(left).sum(), len(passes), np.array(sums), differing, sorted(p.name for p in cut.iterdir())


def test_reference_survives_a_kill_and_other_ranks(tiny_dir, run_ranks, pairs_file, tmp_path):
    folder = str(tiny_dir("qwen3_moe"))
    whole, stopped, bins = run_ranks(2, interrupted_reference, folder, str(pairs_file), str(tmp_path))[0]
    assert stopped is None and bins > 8 and np.isfinite(whole).all()
    kept, passes, sums, differing, names = run_ranks(1, finished_reference, folder, str(pairs_file), str(tmp_path))[0]
    assert kept > 0 and passes == bins - 6  # two ranks had done three rows each; the second call does none
    assert sums == pytest.approx(whole, abs=1e-4)
    assert differing == ["attn_implementation", "compute_dtype", "max_length"]
    assert names == ["key.json", "sums.npy"]


def test_a_stale_reference_is_refused_with_the_reason(tmp_path):
    key = {"data": "a", "max_length": 128, "model": "m"}
    check_key(tmp_path / "reference", key)
    check_key(tmp_path / "reference", key)
    with pytest.raises(ValueError, match=r"max_length was 128, now 256.*delete .*reference"):
        check_key(tmp_path / "reference", key | {"max_length": 256})
    with pytest.raises(ValueError, match="code was None, now c"):
        check_key(tmp_path / "reference", key | {"code": "c"})
    assert json.loads((tmp_path / "reference" / "key.json").read_text()) == key


def test_a_damaged_reference_is_named(tmp_path):
    path = tmp_path / "sums.npy"
    np.save(path, np.arange(12.0))
    assert open_sums(path, range(12)).tolist() == list(range(12))
    with pytest.raises(ValueError, match=r"sums.npy cannot be used: it holds \(12,\) values of float64, the data has 10 answers. Delete"):
        open_sums(path, range(10))
    for size in (path.stat().st_size - 8, 20, 0):  # a copy that broke off
        os.truncate(path, size)
        with pytest.raises(ValueError, match="sums.npy cannot be used.*Delete"):
            open_sums(path, range(12))
    check_key(tmp_path, {"data": "a"})
    os.truncate(tmp_path / "key.json", 5)
    with pytest.raises(ValueError, match="key.json cannot be read.*Delete"):
        check_key(tmp_path, {"data": "a"})


def test_a_reference_that_does_not_fit_the_model_ends_the_run():
    check_reference(0.0009, "float32")
    with pytest.raises(RuntimeError, match="differs from its own reference"):
        check_reference(0.002, "float32")
    with pytest.raises(RuntimeError, match="differs from its own reference"):
        check_reference(float("nan"), "bfloat16")


# ---- the command


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "dpo" / "configs").glob("*.yaml")))
def test_configs_are_understood(file):
    argv = ["--config", str(ROOT / "dpo" / "configs" / file), "--model_name_or_path", "m", "--train_files", "a", "--output_dir", "o"]
    *_, loss_args, args = config.parse(ModelArguments, DataArguments, LossArguments, DPOTrainArguments, argv=argv)
    assert loss_args.loss_type == ["sigmoid"] and args.learning_rate < 1e-5 or file == "tiny.yaml"


def test_options_of_its_own_have_defaults_of_their_own():
    *_, loss_args, args = config.parse(LossArguments, DPOTrainArguments, argv=["--output_dir", "o"])
    assert (loss_args.loss_type, loss_args.loss_weights, loss_args.beta, args.learning_rate) == (["sigmoid"], [1.0], 0.1, 1e-6)


def options_of(model, train, output, *more) -> list:
    return [
        "--config", "dpo/configs/tiny.yaml", "--model_name_or_path", model, "--train_files", train, "--output_dir", output,
        "--compute_dtype", "float32", "--save_steps", 1000, *more,
    ]  # fmt: skip


def stop_after(lines: int, output: Path, options: list) -> str:
    """Runs the command, touches STOP once so many steps are logged; returns its log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dpo.train"]
    command += map(str, options)
    with open(output.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
        metrics = output / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= lines:
                (output / run.STOP).touch()
                break
            time.sleep(0.02)
        process.wait(timeout=120)
    text = output.with_suffix(".log").read_text()
    assert process.returncode == 0, text[-3000:]
    return text


def test_a_stopped_and_resumed_run_equals_one_that_was_never_stopped(tiny_dir, launch, tmp_path):
    model, train = tiny_dir("qwen3_moe"), write_pairs(tmp_path / "train.jsonl", 64, seed=0)
    held_out = write_pairs(tmp_path / "eval.jsonl", 17, seed=1)
    more = ["--max_steps", 16, "--eval_files", held_out]
    launch("dpo.train", *options_of(model, train, tmp_path / "whole", *more), ranks=2)

    stopped = tmp_path / "stopped"
    log = stop_after(4, stopped, options_of(model, train, stopped, "--max_steps", 16))
    assert "STOP found: saved at step" in log and not (stopped / run.DONE).exists()
    # The held-out file is new to the resumed run: its reference must be the untrained model's, not the checkpoint's.
    resumed = launch("dpo.train", *options_of(model, train, stopped, *more), ranks=2)
    assert "resumed" in resumed.stderr
    assert [line.rpartition("/")[2] for line in resumed.stderr.splitlines() if "to compute" in line] == ["eval"]
    for name in ("train", "eval"):
        path = Path("reference") / name / "sums.npy"
        assert (stopped / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()

    whole, both = read_metrics(tmp_path / "whole"), read_metrics(stopped)
    assert [line["step"] for line in both] == list(range(1, 17)) and both == whole
    assert whole[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and whole[-1]["loss"] < 0.6
    for file in sorted((tmp_path / "whole" / "final").glob("*.safetensors")):
        assert file.read_bytes() == (stopped / "final" / file.name).read_bytes()
    assert (stopped / run.DONE).exists()


def test_learns_a_preference_that_holds_on_pairs_it_has_not_seen(tiny_dir, launch, tmp_path):
    """From a coin's toss to over 0.9 within 60 steps of about twenty pairs."""
    model = tiny_dir("qwen3_moe")
    train, held_out = write_pairs(tmp_path / "train.jsonl", 1200, seed=0), write_pairs(tmp_path / "eval.jsonl", 101, seed=1)
    output = tmp_path / "run"
    more = ["--eval_files", held_out, "--max_length", 1024, "--max_steps", 60, "--learning_rate", 3e-3, "--eval_steps", 20]
    launch("dpo.train", *options_of(model, train, output, *more))
    sums = np.load(output / "reference" / "eval" / "sums.npy")
    before = (sums[0::2] > sums[1::2]).mean()
    lines = read_metrics(output)
    evaluations = [line for line in lines if "eval/accuracy" in line]
    assert 0.35 < before < 0.65
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and lines[0]["dpo/margin"] == pytest.approx(0, abs=1e-5)
    assert [line["step"] for line in evaluations] == [20, 40, 60] and evaluations[-1]["eval/accuracy"] > 0.9

    # The exported model beside the base, in plain transformers: what evaluation said, and its reference is the untrained model.
    data_args = DataArguments(train_files=[str(train)], max_length=1024, data_workers=1)
    dataset, _ = run.load_data([str(held_out)], AutoTokenizer.from_pretrained(model), data_args, tmp_path, PairRule())
    base, final = answer_logps(model, dataset), answer_logps(output / "final", dataset)
    assert sums == pytest.approx(base, abs=2e-3)
    last = evaluations[-1]
    assert 0.1 * (final - base)[0::2].mean() == pytest.approx(last["eval/chosen"], rel=0.05, abs=0.02)
    assert 0.1 * (final - base)[1::2].mean() == pytest.approx(last["eval/rejected"], rel=0.05, abs=0.02)
    assert final[0::2].mean() == pytest.approx(last["eval/logps_chosen"], rel=0.05, abs=0.1)
    assert last["eval/length_chosen"] == pytest.approx(np.mean([dataset.example(i)[1].sum() for i in range(0, len(dataset), 2)]))
