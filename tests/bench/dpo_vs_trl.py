"""Preference optimisation beside TRL's DPOTrainer: same model, same token ids, same GPUs, one run.

    python tests/bench/dpo_vs_trl.py --work /tmp/bench [--gpus 2] [--length 1024] [--pairs 8] [--out results.json]

8 layers of Qwen3-30B-A3B shapes (vocabulary 151,936), pairs of two sequences of --length tokens, --pairs of them a GPU and step, activation
checkpointing on both sides. Several GPUs: TRL under FSDP2 through accelerate, its reference model in memory (sharded too), because its
precomputed reference fails there; one GPU: either (--trl_reference precomputed). Ours computes its reference before the first step, which
is not in the step time on either side; the seconds it took are printed. Figures are medians over the last steps; the ratios are the claim.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench")]
STEPS = 12


def trl_side(args) -> None:
    """One rank: a process of its own on one GPU, or one of `accelerate launch`."""
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    dtype = torch.float32 if args.masters == "float32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa")
    seconds, peaks = [], []

    class Tokenised(DPOTrainer):
        """Takes the ids as they are: both sides must train on the same tokens."""

        def _prepare_dataset(self, dataset, *_):
            return dataset

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.start)
            peaks.append(torch.cuda.max_memory_allocated() / 2**30)

    config = DPOConfig(
        output_dir=args.work + "/trl",
        per_device_train_batch_size=args.pairs,
        max_steps=STEPS,
        learning_rate=1e-6,
        beta=0.1,
        bf16=args.masters == "float32",
        max_length=args.length,
        precompute_ref_log_probs=args.trl_reference == "precomputed",
        gradient_checkpointing=args.gpus == 1,  # FSDP's own is on where there are several
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        optim="adamw_torch_fused",
        router_aux_loss_coef=0.0,
    )
    trainer = Tokenised(
        model,
        args=config,
        train_dataset=Dataset.from_list(json.loads(Path(args.ids).read_text())),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Clock()],
    )
    trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        Path(args.result).write_text(json.dumps({"seconds": seconds, "memory": peaks, "losses": losses}))


def run_trl(args, masters: str, work: Path) -> dict:
    result = work / f"trl-{masters}.json"
    command = [__file__, "--trl", "--masters", masters, "--gpus", str(args.gpus), "--work", str(work), "--model", str(work / "model")]
    command += ["--ids", str(work / "pairs.json"), "--result", str(result), "--trl_reference", args.trl_reference]
    command += ["--length", str(args.length), "--pairs", str(args.pairs)]
    launcher = []
    if args.gpus > 1:
        from shapes import accelerate_launch

        launcher = accelerate_launch(work, args.gpus, masters)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if args.gpus == 1:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    subprocess.run([sys.executable, *launcher, *command], check=True, env=environment)
    return json.loads(result.read_text())


def run_ours(args, masters: str, work: Path) -> dict:
    output = work / f"ours-{masters}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus), "-m", "dpo.train"]
    options = {
        "model_name_or_path": work / "model",
        "train_files": work / "pairs.jsonl",
        "output_dir": output,
        "max_length": 2 * args.length,  # a bin is one pair
        "over_long": "truncate",
        "per_device_train_batch_size": args.pairs,
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "beta": 0.1,
        "master_dtype": masters,
        "compile": str(not args.eager).lower(),
        "export_final": "false",
        "save_steps": 0,
        "data_cache_dir": work / "cache",
    }
    command += [f"--{key}={value}" for key, value in options.items()]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TORCH_LOGS": "recompiles"}, capture_output=True, text=True)
    (work / f"{output.name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{output.name} failed:\n{done.stderr[-5000:]}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    times = re.findall(r"^\S+ (\d+):(\d+):(\d+),(\d+) .*reference log-probabilities", done.stderr, re.M)
    begin, end = (int(h) * 3600 + int(m) * 60 + int(s) + int(ms) / 1000 for h, m, s, ms in (times[0], times[-1]))
    return {
        "seconds": [line["perf/seconds"] for line in lines],
        "memory": [line["perf/memory_gib"] for line in lines],
        "losses": [line["loss"] for line in lines],
        "mfu": lines[-1].get("perf/mfu"),
        "reference_seconds": (end - begin) % 86400,
        "recompiled_after_step_3": done.stderr.split(" step 3 loss", 1)[1].count("Recompiling function"),
    }


def make_pairs(work: Path, args) -> None:
    """pairs.jsonl for ours and pairs.json for TRL: the same ids, every sequence of exactly --length tokens."""
    from shapes import words
    from transformers import AutoTokenizer

    from common import data
    from dpo.data import PairRule, prompt_ids

    count = args.gpus * args.pairs * (STEPS + 1)
    with open(work / "pairs.jsonl", "w", encoding="utf-8") as stream:
        for row in range(count):
            prompt, chosen, rejected = words(8, row), words(args.length, count + row), words(args.length, 2 * count + row)
            stream.write(json.dumps({"prompt": [{"role": "user", "content": prompt}], "chosen": chosen, "rejected": rejected}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    options = {"max_length": 2 * args.length, "over_long": "truncate", "cache_dir": work / "cache", "rule": PairRule()}
    dataset = data.tokenize_files([str(work / "pairs.jsonl")], tokenizer, **options)
    assert set(dataset.lengths) == {args.length}, set(dataset.lengths)
    pairs = []
    for row in range(0, len(dataset), 2):
        chosen, rejected = (data.Example(ids.tolist(), mask.tolist()) for ids, mask in (dataset.example(row), dataset.example(row + 1)))
        prompt = prompt_ids(chosen)
        pairs.append({"prompt_ids": prompt, "chosen_ids": chosen.ids[len(prompt) :], "rejected_ids": rejected.ids[len(prompt) :]})
    (work / "pairs.json").write_text(json.dumps(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="scratch folder, 12 GB")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence; a pair has twice as many")
    parser.add_argument("--pairs", type=int, default=8, help="pairs a GPU and step")
    parser.add_argument("--masters", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--trl_reference", choices=["model", "precomputed"], default="model")
    parser.add_argument("--eager", action="store_true", help="ours without compile")
    parser.add_argument("--out", help="file for all figures")
    for internal in ("--model", "--ids", "--result"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--trl", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl:
        args.masters = args.masters[0]
        return trl_side(args)
    if args.gpus > 1 and args.trl_reference == "precomputed":
        parser.error("TRL's precomputed reference fails on several GPUs; compare it on one")

    from shapes import make_model

    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    make_model(work / "model")
    make_pairs(work, args)

    results = {"length": args.length, "pairs": args.pairs, "gpus": args.gpus, "trl_reference": args.trl_reference}
    for masters in args.masters:
        ours, peer = run_ours(args, masters, work), run_trl(args, masters, work)
        results[masters] = {"ours": ours, "trl": peer}
        for name, side in (("plain-fsdp", ours), (f"TRL DPOTrainer ({args.trl_reference})", peer)):
            seconds = statistics.median(side["seconds"][-6:])
            rate = 2 * args.length * args.pairs / seconds
            figures = f"{1000 * seconds:.0f} ms | {rate:.0f} tokens/s/GPU | {max(side['memory'][-6:]):.1f} GiB"
            print(f"{masters} | {name} | {figures} | first loss {side['losses'][0]:.6f}", flush=True)
        speed = statistics.median(peer["seconds"][-6:]) / statistics.median(ours["seconds"][-6:])
        memory = max(ours["memory"][-6:]) / max(peer["memory"][-6:])
        print(f"{masters} | {speed:.2f} x the tokens/s at {100 * memory:.0f} % of the memory; MFU {ours['mfu']}", flush=True)
        print(f"{masters} | our reference took {ours['reference_seconds']:.1f} s for the pairs of {STEPS + 1} steps, compilation included; "
              f"recompilations after step 3: {ours['recompiled_after_step_3']}", flush=True)  # fmt: skip
    if args.out:
        Path(args.out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
