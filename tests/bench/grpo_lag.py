"""Seconds of a GRPO step with `rollout_lag: 0` and `1`: the trainer on the first GPU, a vLLM server on the second.

    python tests/bench/grpo_lag.py --work /tmp/bench [--layers 8] [--out results.json]

8 layers of Qwen3-30B-A3B shapes, random weights; 32 prompts of about 500 tokens, 8 answers of 128 tokens to each, so that a rollout and the training
on it take about as long; one optimizer step a rollout, everything trains and is sent after each step. The reward is a stand-in (a share of letters),
so that groups carry signal. Medians over the last steps.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "bench")]
STEPS, PROMPT_WORDS, ANSWER = 6, 90, 128
PARTS = ("rollout", "old_logps", "train", "sync")


def text_share(prompts, completions, **columns) -> list[float]:
    """Differs between random answers, and costs nothing."""
    return [sum(character in "aeiou" for character in text) / (len(text) + 1) for text in completions]


def train(work: Path, model: Path, url: str, lag: int) -> list[dict]:
    output = work / f"lag-{lag}"
    options = {
        "model_name_or_path": model,
        "train_files": work / "prompts.jsonl",
        "output_dir": output,
        "max_length": 1024,
        "max_completion_length": ANSWER,
        "num_prompts_per_step": 32,
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "mask_truncated_completions": "false",
        "rollout_backend": "vllm",
        "vllm_servers": url,
        "rollout_lag": lag,
        "reward_funcs": "grpo_lag:text_share",
        "max_steps": STEPS,
        "save_steps": 0,
        "export_final": "false",
        "resume": "none",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "grpo.train"]
    command += [f"--{name}={value}" for name, value in options.items()]
    path = os.pathsep.join([str(ROOT / "tests" / "bench"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0"}, capture_output=True, text=True
    )
    (work / f"lag-{lag}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"lag {lag} failed:\n{done.stderr[-5000:]}")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="folder for the model, 11 GB, and logs")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", help="JSON file for the figures")
    args = parser.parse_args()
    from shapes import make_model, words
    from vllm_server import VllmServer

    work = Path(args.work)
    model = work / "qwen3_30b_shapes"
    make_model(model, num_hidden_layers=args.layers)
    with open(work / "prompts.jsonl", "w", encoding="utf-8") as stream:
        for row in range(400):
            stream.write(json.dumps({"id": f"q{row}", "prompt": words(PROMPT_WORDS, row)}) + "\n")
    env = {"CUDA_VISIBLE_DEVICES": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    results = {}
    with VllmServer(model, work / "lag-server.log", "--gpu-memory-utilization", "0.6", "--max-model-len", "1024", env=env) as server:
        server.wait(600)
        for lag in (0, 1):
            lines = train(work, model, server.url, lag)[2:]
            figures = {"step": statistics.median(line["perf/seconds"] for line in lines)}
            figures |= {part: statistics.median(line[f"perf/{part}_seconds"] for line in lines) for part in PARTS}
            results[f"lag {lag}"] = figures | {
                "rollout tokens/s": statistics.median(line["perf/rollout_tokens_per_second"] for line in lines),
                "weight_lag": lines[-1]["grpo/weight_lag"],
                "logp_diff_mean": lines[-1].get("grpo/logp_diff_mean", math.nan),
            }
            print(f"lag {lag} | " + " | ".join(f"{name} {value:.3g}" for name, value in results[f"lag {lag}"].items()), flush=True)
    print(f"lag 1 takes {results['lag 1']['step'] / results['lag 0']['step']:.2f} of the time of lag 0")
    if args.out:
        Path(args.out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
