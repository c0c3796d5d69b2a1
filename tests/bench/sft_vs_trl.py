"""Supervised fine-tuning beside TRL's SFTTrainer: same model, same token ids, same GPUs, one run.

    python tests/bench/sft_vs_trl.py --work /tmp/bench [--gpus 2] [--out results.json]

8 layers of Qwen3-30B-A3B shapes, rows of 4,096 tokens, 4 rows a GPU and step, activation checkpointing on both sides, FSDP over all GPUs.
Two pairs: everything in bf16 (TRL: bf16 model and AdamW; ours: master_dtype bfloat16, which also rounds stochastically), and fp32 masters
(TRL: bf16 autocast over an fp32 model; ours: the default). Figures are medians over the last steps; the ratios are the claim.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench")]
STEPS, LENGTH, ROWS = 12, 4096, 4


def trl_side(args) -> None:
    """Runs inside `accelerate launch`."""
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    ids = json.loads(Path(args.ids).read_text())
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    dtype = torch.float32 if args.masters == "float32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa")
    seconds, peaks = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.start)
            peaks.append(torch.cuda.max_memory_allocated() / 2**30)

    config = SFTConfig(
        output_dir=args.work + "/trl",
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=1e-5,
        bf16=args.masters == "float32",
        max_length=LENGTH,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,  # FSDP's own is on
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        optim="adamw_torch_fused",
        router_aux_loss_coef=0.0,
    )
    trainer = SFTTrainer(
        model, args=config, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(args.model), callbacks=[Clock()]
    )
    trainer.train()
    if int(os.environ["RANK"]) == 0:
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        Path(args.result).write_text(json.dumps({"seconds": seconds, "memory": peaks, "losses": losses}))


def run_trl(args, masters: str, work: Path) -> dict:
    from shapes import accelerate_launch

    result = work / f"trl-{masters}.json"
    command = [sys.executable, *accelerate_launch(work, args.gpus, masters), __file__, "--trl", "--masters", masters]
    command += ["--work", str(work), "--model", str(work / "model"), "--ids", str(work / "ids.json"), "--result", str(result)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"})
    return json.loads(result.read_text())


def run_ours(args, masters: str, work: Path, **options) -> dict:
    name = "-".join(["ours", masters, *map(str, options.values())]).replace("/", "_")
    output = work / name
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus), "-m", "sft.train"]
    options = {
        "model_name_or_path": work / "model",
        "train_files": work / "rows.jsonl",
        "output_dir": output,
        "max_length": LENGTH,
        "over_long": "truncate",
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": 1e-5,
        "master_dtype": masters,
        "compile": "true",
        "export_final": "false",
        "save_steps": 0,
        "data_cache_dir": work / "cache",
    } | options
    command += [f"--{key}={value}" for key, value in options.items()]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TORCH_LOGS": "recompiles"}, capture_output=True, text=True)
    (work / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-5000:]}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    after_third = done.stderr.split(" step 3 loss", 1)[1]
    return {
        "seconds": [line["perf/seconds"] for line in lines],
        "memory": [line["perf/memory_gib"] for line in lines],
        "losses": [line["loss"] for line in lines],
        "mfu": lines[-1].get("perf/mfu"),
        "recompiled_after_step_3": after_third.count("Recompiling function"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="scratch folder, 12 GB")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--masters", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", help="file for all figures")
    for internal in ("--model", "--ids", "--result"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--trl", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl:
        args.masters = args.masters[0]
        return trl_side(args)

    from shapes import make_model, make_rows
    from transformers import AutoTokenizer

    from common import data

    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    make_model(work / "model")
    make_rows(work / "rows.jsonl", rows=args.gpus * ROWS * (STEPS + 1), words_per_row=3000)
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    dataset = data.tokenize_files([str(work / "rows.jsonl")], tokenizer, max_length=LENGTH, over_long="truncate", cache_dir=work / "cache")
    assert set(dataset.lengths) == {LENGTH}
    (work / "ids.json").write_text(json.dumps([dataset.example(i)[0].tolist() for i in range(len(dataset))]))

    results = {}
    for masters in args.masters:
        sides = {
            "plain-fsdp": run_ours(args, masters, work),
            "plain-fsdp, gradients reduced in bf16": run_ours(args, masters, work, reduce_dtype="bfloat16"),
            "TRL SFTTrainer": run_trl(args, masters, work),
        }
        results[masters] = sides
        peer = sides["TRL SFTTrainer"]
        for name, side in sides.items():
            seconds, memory = statistics.median(side["seconds"][-6:]), max(side["memory"][-6:])
            speed = statistics.median(peer["seconds"][-6:]) / seconds
            print(f"{masters} | {name} | {1000 * seconds:.0f} ms | {LENGTH * ROWS / seconds:.0f} tokens/s/GPU | {memory:.1f} GiB | "
                  f"{speed:.2f} x TRL's speed at {100 * memory / max(peer['memory'][-6:]):.0f} % of its memory | loss {side['losses'][0]:.2f} -> "
                  f"{side['losses'][-1]:.2f} | MFU {side.get('mfu')} | recompiled after step 3: {side.get('recompiled_after_step_3')}", flush=True)  # fmt: skip
    if args.out:
        Path(args.out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
