"""Time and memory of a step by what trains: all, attention, its upper half, experts, attention with detached experts; bf16 and FP8 weights.

    python tests/bench/parts.py --work /tmp/bench [--gpus 2] [--layers 8] [--compile false] [--out results.json]
    python tests/bench/parts.py --activations        (one CPU process, a tiny model: bytes that autograd keeps in a forward)

The steps train 8 layers of Qwen3-30B-A3B shapes (5.6 B parameters), 4 rows of 4,096 tokens a GPU and step, with activation checkpointing and fp32
masters. FP8 is the same checkpoint in blocks of 128 x 128. Experts: 8 of 128 in each layer. Figures are medians over the last steps.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench")]


def make_fp8(source: Path, output: Path) -> None:
    """The checkpoint with all matrices inside layers as FP8 but routers, one expert a tensor, as such checkpoints are published."""
    import torch
    from safetensors.torch import load_file, save_file

    from common import fp8, tiny
    from common.tensor_files import INDEX_FILE

    if (output / INDEX_FILE).exists():
        return
    shutil.copytree(source, output, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map = {}
    for file in sorted(source.glob("*.safetensors")):
        written = {}
        for name, tensor in load_file(file).items():
            spec = tiny.TensorSpec(name, tuple(tensor.shape), tensor.dtype)
            parts = {name: tensor}
            if tiny.is_fused(name):
                values = tensor.flatten(0, 1).split([part.shape[0] for part in tiny.expert_specs(spec)])
                parts = {part.name: value for part, value in zip(tiny.expert_specs(spec), values, strict=True)}
            for part, value in parts.items():
                if tiny.is_fp8(tiny.TensorSpec(part, tuple(value.shape), value.dtype)):
                    written[part], written[part + fp8.SCALE_SUFFIX] = (t.cpu() for t in fp8.quantise(value.to(device), tiny.FP8_BLOCK))
                else:
                    written[part] = value.clone()
        save_file(written, output / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(written, file.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (output / "config.json").write_text(json.dumps(config))
    (output / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def activations() -> None:
    """Bytes kept for backward in one forward without checkpointing, by what trains."""
    import torch

    from common import dist, tiny
    from tests.test_freeze import _saved_bytes

    with tempfile.TemporaryDirectory() as folder:
        path = tiny.make("qwen3_moe", Path(folder) / "model", num_hidden_layers=8, hidden_size=128, moe_intermediate_size=96)
        dist.init()
        torch.set_num_threads(1)
        sizes = _saved_bytes(str(path), upper={"trainable": "attention", "trainable_layers": "4-"})
        dist.shutdown()
    for name, size in sizes.items():
        print(f"{name} | {size / 2**10:.0f} KiB kept for backward | {size / sizes['all']:.2f} of training everything")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", help="scratch folder, 20 GB")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--compile", nargs="+", choices=["true", "false"], default=["true", "false"])
    parser.add_argument("--only", nargs="+", default=[], help="names of runs")
    parser.add_argument("--activations", action="store_true")
    parser.add_argument("--out", help="file for all figures")
    args = parser.parse_args()
    if args.activations:
        return activations()
    from sft_vs_trl import LENGTH, ROWS, STEPS, run_ours
    from shapes import make_model, make_rows

    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    bf16, quantised = work / "model", work / "model-fp8"
    make_model(bf16, num_hidden_layers=args.layers)
    make_fp8(bf16, quantised)
    make_rows(work / "rows.jsonl", rows=args.gpus * ROWS * (STEPS + 1), words_per_row=3000)
    mask = work / "mask.json"
    mask.write_text(json.dumps({str(layer): list(range(0, 128, 16)) for layer in range(args.layers)}))
    upper = f"{args.layers // 2}-"
    runs = {
        "all": {},
        "attention": {"trainable": "attention"},
        "attention, upper half": {"trainable": "attention", "trainable_layers": upper},
        "experts": {"trainable": "experts", "expert_mask": mask},
        "experts in 4 units": {"trainable": "experts", "expert_mask": mask, "expert_units_per_layer": 4},
        "attention, detached": {"trainable": "attention", "detach_moe_output": "true"},
        "FP8 attention": {"model_name_or_path": quantised, "trainable": "attention"},
        "FP8 attention, detached": {"model_name_or_path": quantised, "trainable": "attention", "detach_moe_output": "true"},
        "FP8 experts": {"model_name_or_path": quantised, "trainable": "experts", "expert_mask": mask},
    }
    results = {}
    for compiled in args.compile:
        for name, options in runs.items():
            if args.only and name not in args.only:
                continue
            result = run_ours(args, "float32", work, compile=compiled, **options)
            results[f"{name} | compile {compiled}"] = result
            whole = results.get(f"all | compile {compiled}", result)
            seconds, memory = statistics.median(result["seconds"][-6:]), max(result["memory"][-6:])
            print(
                f"{name} | compile {compiled} | {1000 * seconds:.0f} ms | {LENGTH * ROWS / seconds:.0f} tokens/s/GPU | {memory:.1f} GiB | "
                f"{statistics.median(whole['seconds'][-6:]) / seconds:.2f} x the speed of training everything | loss {result['losses'][0]:.3f} -> "
                f"{result['losses'][-1]:.3f} | recompiled after step 3: {result['recompiled_after_step_3']}",
                flush=True,
            )
    if args.out:
        Path(args.out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
