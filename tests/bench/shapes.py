"""A checkpoint with the shapes of Qwen3-30B-A3B cut to a few layers, random weights, and rows of one fixed length: what benchmarks train."""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from common import tiny

SHAPES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "num_hidden_layers": 8,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Qwen3MoeDecoderLayer
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
  fsdp_cpu_ram_efficient_loading: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
machine_rank: 0
num_machines: 1
num_processes: {gpus}
mixed_precision: '{mixed}'
"""


def accelerate_launch(work: Path, gpus: int, masters: str) -> list[str]:
    """How TRL runs on several GPUs: options of Python for FSDP2 through accelerate, bf16 autocast over fp32 masters."""
    file = work / "accelerate.yaml"
    file.write_text(ACCELERATE.format(gpus=gpus, mixed="bf16" if masters == "float32" else "no"))
    return ["-m", "accelerate.commands.launch", "--config_file", str(file)]


def make_model(folder: Path, **overrides) -> None:
    """5.6 B parameters in bf16, 11 GB on the disk, one file a layer; generated on the GPU because a CPU takes minutes."""
    if (folder / "model.safetensors.index.json").exists():
        return
    tiny.make("qwen3_moe", folder, num_hidden_layers=1)  # for its tokenizer, template and generation config
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = tiny.config("qwen3_moe", **(SHAPES | overrides))
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    files: dict[str, list[str]] = {}
    for name in shapes:
        layer = name.split(".")[2] if ".layers." in name else "root"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        tensors = {}
        for name in names:
            tensor = torch.empty(shapes[name], dtype=torch.bfloat16, device=device)
            tensors[name] = (tensor.fill_(1.0) if "norm" in name else tensor.normal_(0, 0.02, generator=generator)).cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(count))


def make_rows(file: Path, rows: int, words_per_row: int) -> None:
    """Conversations longer than any max_length here; `over_long: truncate` gives every row the same number of tokens."""
    with open(file, "w", encoding="utf-8") as stream:
        for row in range(rows):
            messages = [{"role": "user", "content": words(8, row)}, {"role": "assistant", "content": words(words_per_row, rows + row)}]
            stream.write(json.dumps({"messages": messages}) + "\n")
