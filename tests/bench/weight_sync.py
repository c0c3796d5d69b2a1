"""Weight sync beside TRL's VLLMClient: same model, same two GPUs (trainer on the first, vLLM on the second), one run after the other.

    python tests/bench/weight_sync.py --work /tmp/bench [--out results.json]

8 layers of Qwen3-30B-A3B shapes, 11 GB in bf16. Ours: `push` of everything and of attention only, gather, reports and prefix cache included;
the probe and the proof of the first sync are timed apart. TRL: `update_named_params` of the same tensors under the checkpoint's names, already
whole on the GPU, then `reset_prefix_cache`: it does nothing else. Figures are medians of 5; the first of each kind is left out.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "bench")]
REPEATS = 6
GPU = {"CUDA_VISIBLE_DEVICES": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
OPTIONS = ("--gpu-memory-utilization", "0.6")


def ours(args) -> dict:
    import torch
    from vllm_server import VllmServer

    from common import dist, run
    from common.config import ModelArguments
    from grpo.vllm_client import VllmBackend

    dist.init(30)
    figures = {}
    for trainable in ("all", "attention"):
        with VllmServer(args.model, Path(args.work) / f"ours-{trainable}.log", *OPTIONS, env=GPU, tokenizer=True) as server:
            model = run.build_model(ModelArguments(model_name_or_path=str(args.model), trainable=trainable, load_balancing_coef=0.0))
            server.wait(600)
            backend = VllmBackend([server.url], model)
            backend.start()
            started = time.perf_counter()
            report = backend.sync(0)
            figures[f"{trainable} first sync with proof, s"] = time.perf_counter() - started
            figures[f"{trainable} noise"] = report.checks[f"probe {server.url}"]["logp_diff_mean"]
            pushes = []
            for version in range(1, REPEATS + 1):
                with torch.no_grad():
                    for shard in model.sharded.trained_shards():
                        shard.tensor.mul_(1.001)
                torch.cuda.synchronize()
                pushes.append(backend.weights.push(version))
            seconds = statistics.median(push.seconds for push in pushes[1:])
            figures |= {
                f"{trainable} s": seconds,
                f"{trainable} GB": pushes[-1].bytes / 1e9,
                f"{trainable} GB/s": pushes[-1].bytes / 1e9 / seconds,
                f"{trainable} worker": pushes[-1].checks[f"report {server.url}"],
            }
            print(json.dumps(figures), flush=True)
            backend.close()
            del model, backend
            torch.cuda.empty_cache()
    dist.shutdown()
    return figures


def trl_side(args) -> dict:
    import torch
    from safetensors.torch import load_file
    from trl.generation.vllm_client import VLLMClient
    from vllm_server import VllmServer

    with VllmServer(args.model, Path(args.work) / "trl.log", *OPTIONS, env=GPU, tokenizer=True, stock=True) as server:
        server.wait(600)
        client = VLLMClient(base_url=server.url, connection_timeout=60)
        client.init_communicator(device=torch.device("cuda", 0))
        fused: dict = {}
        for file in sorted(Path(args.model).glob("*.safetensors")):
            fused |= load_file(file, device="cuda:0")
        tensors = {}
        for name, tensor in fused.items():  # TRL sends checkpoint names: one tensor for each expert
            stem = name.rpartition(".")[0]
            if name.endswith("experts.gate_up_proj"):
                half = tensor.shape[1] // 2
                for expert in range(len(tensor)):
                    tensors[f"{stem}.{expert}.gate_proj.weight"] = tensor[expert, :half]
                    tensors[f"{stem}.{expert}.up_proj.weight"] = tensor[expert, half:]
            elif name.endswith("experts.down_proj"):
                tensors |= {f"{stem}.{expert}.down_proj.weight": tensor[expert] for expert in range(len(tensor))}
            else:
                tensors[name] = tensor
        figures = {}
        for kind, chosen in (("all", tensors), ("attention", {n: t for n, t in tensors.items() if ".self_attn." in n})):
            metadata = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in chosen.items()]
            size, seconds = sum(tensor.numel() * tensor.element_size() for tensor in chosen.values()), []
            for _ in range(REPEATS):
                torch.cuda.synchronize()
                started = time.perf_counter()
                client.update_named_params(metadata, iter(chosen.items()))
                client.reset_prefix_cache()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            median = statistics.median(seconds[1:])
            figures |= {f"{kind} s": median, f"{kind} GB": size / 1e9, f"{kind} GB/s": size / 1e9 / median}
        client.close_communicator()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="folder for the model, 11 GB, and logs")
    parser.add_argument("--out", help="JSON file for the figures")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = Path(args.work) / "qwen3_30b_shapes"
    if args.side:
        logging.basicConfig(level=logging.INFO)
        figures = ours(args) if args.side == "ours" else trl_side(args)
        (Path(args.work) / f"{args.side}.json").write_text(json.dumps(figures))
        return
    from shapes import make_model

    make_model(args.model, num_hidden_layers=args.layers)
    results = {}
    for side in ("ours", "trl"):
        command = [sys.executable, __file__, "--work", args.work, "--side", side]
        if subprocess.run(command, cwd=ROOT).returncode == 0:
            results[side] = json.loads((Path(args.work) / f"{side}.json").read_text())
    if len(results) == 2:
        for kind in ("all", "attention"):
            results[f"ours over trl, {kind}, GB/s"] = results["ours"][f"{kind} GB/s"] / results["trl"][f"{kind} GB/s"]
    print(json.dumps(results, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=2))
    sys.exit(len(results) < 2)


if __name__ == "__main__":
    main()
