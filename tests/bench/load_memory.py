"""Host memory of loading: the peak of each rank less what it holds when loading is over, in layers, beside from_pretrained.

    python tests/bench/load_memory.py                       1 GiB, 16 equal layers, 2 ranks on the CPU
    python tests/bench/load_memory.py --model DIR --keep    another checkpoint, or keep the one that was made

On CPUs parameters stay in host memory, so "held" is a rank's share of the model; on GPUs it is little. Exit code 1 when a rank goes
over the limits: 4 layers with bf16 parameters, 6 with fp32 masters. A layer is the mean bytes of a decoder layer on disk.
"""

import argparse
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LIMITS = {"bfloat16": 4.0, "float32": 6.0}
SHAPE = dict(hidden_size=512, moe_intermediate_size=688, num_experts=32, num_hidden_layers=16)  # 64.9 MiB a layer


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (the highest since it was reset) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def load_sharded(model_path: str, dtype: str):
    import torch

    from common.fsdp import Precision, load_and_shard
    from common.logprobs import LogpModel
    from common.weights import Checkpoint, Converter, build_skeleton

    skeleton = build_skeleton(model_path, attn_implementation="sdpa")
    converter = Converter(skeleton, Checkpoint(model_path))
    return load_and_shard(skeleton, converter, Precision(master=getattr(torch, dtype)), wrap_root=LogpModel)


def load_plain(model_path: str, dtype: str):
    import torch

    from common.weights import Checkpoint, Converter, Loader, build_skeleton

    converter = Converter(build_skeleton(model_path, attn_implementation="sdpa"), Checkpoint(model_path))
    loader = Loader(converter, dtype_of=lambda name: getattr(torch, dtype))
    for unit in converter.units:
        loader.load_unit(unit)
    loader.finish()
    return converter.model


def load_from_pretrained(model_path: str, dtype: str):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype), attn_implementation="sdpa")


LOADERS = {"sharded": load_sharded, "unsharded": load_plain, "from_pretrained": load_from_pretrained}


def worker(how: str, model_path: str, dtype: str, output: str) -> None:
    """One rank: loads and writes its figures to `output`/RANK.json."""
    import torch

    from common import dist

    torch.set_num_threads(1)
    dist.init(setup_timeout_minutes=10)
    import common.fsdp  # noqa: F401 - imported before measuring: code is not what is measured

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, started = memory("VmRSS"), time.monotonic()
    model = LOADERS[how](model_path, dtype)
    seconds, peak = time.monotonic() - started, memory("VmHWM")
    gc.collect()
    figures = dict(before=before, peak=peak, held=memory("VmRSS"), seconds=seconds)
    Path(output, f"{dist.rank()}.json").write_text(json.dumps(figures))
    del model
    dist.shutdown()


def measure(how: str, model_path: Path, dtype: str, ranks: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*command, "--worker", how, str(model_path), dtype, output], check=True, env=environment, cwd=ROOT)
        return [json.loads(Path(output, f"{rank}.json").read_text()) for rank in range(ranks)]


def layer_bytes(model_path: Path) -> float:
    """Mean bytes of a decoder layer in the checkpoint."""
    from common.weights import Checkpoint, Converter, build_skeleton

    checkpoint = Checkpoint(model_path)
    converter = Converter(build_skeleton(model_path, attn_implementation="sdpa"), checkpoint)
    layers = [unit for unit in converter.units if unit.name]
    total = sum(converter.shape(name).numel() * converter.loaded_dtype(name).itemsize for unit in layers for name in unit.model_names)
    return total / len(layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder; made when not given")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="do not delete the checkpoint that was made")
    parser.add_argument("--worker", nargs=4, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return 0

    made = None
    if args.model is None:
        from common import tiny

        made = Path(tempfile.mkdtemp(prefix="load-memory-"))
        args.model = tiny.make("qwen3_moe", made / "model", max_shard_bytes=256 << 20, **SHAPE)
    try:
        return compare(args.model, args.ranks)
    finally:
        if made is not None and not args.keep:
            shutil.rmtree(made)


def compare(model_path: Path, ranks: int) -> int:
    layer, failed = layer_bytes(model_path), False
    size = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    print(f"{model_path}: {size / 2**30:.2f} GiB, {layer / 2**20:.1f} MiB a layer, {ranks} ranks")
    print("| loading | dtype | rank | before MiB | peak MiB | held MiB | peak - held, layers | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for how in LOADERS:
        for dtype, limit in LIMITS.items():
            for rank, figures in enumerate(measure(how, model_path, dtype, ranks if how == "sharded" else 1)):
                over = (figures["peak"] - figures["held"]) / layer
                verdict = f" over the limit of {limit:g}" if how == "sharded" and over >= limit else ""
                failed |= bool(verdict)
                mib = {name: f"{figures[name] / 2**20:.0f}" for name in ("before", "peak", "held")}
                print(
                    f"| {how} | {dtype} | {rank} | {mib['before']} | {mib['peak']} | {mib['held']} | {over:.2f}{verdict} "
                    f"| {figures['seconds']:.1f} |",
                    flush=True,
                )
    return int(failed)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
