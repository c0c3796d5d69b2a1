"""Configuration: flat dataclasses, one YAML file, the command line on top.

    torchrun ... -m sft.train --config sft/configs/qwen3_235b.yaml --output_dir runs/a --learning_rate 1e-5

The YAML file becomes `--key=value` tokens in front of the command line's own, so both go through one parser: `1e-5` is a float, a typo is an
error, a wrong type is an error, and the command line wins. Wrong use ends with exit code 2 and the reason.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import yaml
from transformers import HfArgumentParser


def option(default, text: str):
    """A field with its help text. Lists get a fresh default each."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """What is trained, in which precision, with which kernels."""

    model_name_or_path: str = field(metadata={"help": "Folder of the base checkpoint: config.json, safetensors, tokenizer."})
    decoder_layer: str | None = option(None, "Class name of the decoder layer, for a model whose `_no_split_modules` does not tell.")
    attn_implementation: Literal["packed", "flash_attention_2", "sdpa"] = option(
        "packed", "packed: torch's own variable-length kernels. sdpa builds a full mask and is refused where it would leak between rows."
    )
    gradient_checkpointing: bool = option(True, "Keep one activation a layer and recompute the rest in backward.")
    compile: bool = option(
        False, "Compile each decoder layer. Rows are padded to one length so that nothing recompiles after the first steps."
    )
    master_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Parameters that the optimizer updates. bfloat16 rounds stochastically and takes half the memory."
    )
    compute_dtype: Literal["bfloat16", "float32"] = option("bfloat16", "Dtype of forward and backward. float32 is for finding faults.")
    reduce_dtype: Literal["float32", "bfloat16"] = option("float32", "Dtype in which gradients are summed over ranks.")
    trainable: Literal["all", "attention", "experts"] = option(
        "all", "attention: everything in self_attn / linear_attn but GLM's indexer; experts: routed experts only."
    )
    trainable_layers: str = option(
        "all", "Layers that train, e.g. 0-9,40-. With fewer than all, embeddings, final norm and head are frozen."
    )
    expert_mask: str | None = option(
        None, 'JSON {"layer": [expert, ...]}: of routed experts only these train. python -m common.experts makes it.'
    )
    freeze_router: bool = option(False, "Routers do not train (with trainable: all; the other two never train them).")
    detach_moe_output: bool = option(
        False, "With trainable: attention, backward skips mixtures of experts: faster, but the gradient is an approximation."
    )
    frozen_shard_group: str = option("world", "Ranks that share frozen weights: world, node, or a number of neighbouring ranks.")
    expert_units_per_layer: int = option(1, "Gather the experts of a layer in so many units, one at a time, where one layer is too large.")
    load_balancing_coef: float = option(0.0, "Weight of the MoE load-balancing term (Qwen3-MoE was pre-trained with 0.001). 0: off.")
    debug_num_layers: int | None = option(None, "Train only the first N layers, at full width, to prove a job in a short queue.")
    lora_rank: int = option(0, "Rank of low-rank adapters, which then are all that trains. 0: no adapters.")
    lora_alpha: float = option(16.0, "Adapters add lora_alpha / lora_rank times their product.")
    lora_dropout: float = option(0.05, "Share of an adapter's inputs that is dropped in the passes that train.")
    lora_target_modules: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj"], "Linear layers, by name, that get adapters, in all trainable_layers."
    )
    quantization: Literal["none", "nf4"] = option(
        "none", "nf4: the frozen base in 4 bits, its layers spread over the GPUs of one process; with lora_rank, grpo only."
    )

    def __post_init__(self):
        if self.load_balancing_coef < 0:
            raise ValueError(f"load_balancing_coef is {self.load_balancing_coef}; it cannot be negative.")
        if self.detach_moe_output and self.trainable != "attention":
            raise ValueError(f"detach_moe_output goes with trainable: attention only; trainable is {self.trainable}.")
        group = self.frozen_shard_group
        if group not in ("world", "node") and not (group.isascii() and group.isdigit() and int(group) > 0):
            raise ValueError(f"frozen_shard_group is {group}; it must be world, node or a number of ranks.")
        if self.expert_units_per_layer < 1:
            raise ValueError(f"expert_units_per_layer is {self.expert_units_per_layer}; it must be at least 1.")
        if self.debug_num_layers is not None and self.debug_num_layers < 1:
            raise ValueError(f"debug_num_layers is {self.debug_num_layers}; it must be at least 1.")
        self._check_adapters()

    def _check_adapters(self):
        if self.lora_rank < 0 or not self.lora_alpha > 0 or not 0 <= self.lora_dropout < 1 or not self.lora_target_modules:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, lora_alpha {self.lora_alpha}, lora_dropout {self.lora_dropout}, lora_target_modules "
                f"{self.lora_target_modules}: rank at least 0, alpha above 0, dropout at least 0 and below 1, at least one module."
            )
        if self.lora_rank and (self.trainable != "all" or self.expert_mask or self.freeze_router):
            raise ValueError("lora_rank: adapters are all that trains; it does not go with trainable, expert_mask or freeze_router.")
        if self.quantization != "none":
            if not self.lora_rank:
                raise ValueError("quantization: nf4 is for a frozen base; set lora_rank.")
            if self.load_balancing_coef or not self.gradient_checkpointing or self.compile or self.attn_implementation != "packed":
                raise ValueError(
                    "quantization: nf4 goes with gradient_checkpointing: true (weights are dequantised layer by layer), attn_implementation: "
                    "packed, compile: false and load_balancing_coef: 0."
                )

    @property
    def drops_out(self) -> bool:
        """Whether a pass that trains differs from one that does not."""
        return self.lora_rank > 0 and self.lora_dropout > 0


@dataclass
class DataArguments:
    """Which rows, and how they become bins of tokens."""

    train_files: list[str] = field(metadata={"help": "JSON Lines or Parquet files to train on."})
    eval_files: list[str] = option([], "Held-out files, evaluated every eval_steps and at the end.")
    max_length: int = option(4096, "Tokens of one bin; a longer row is dropped or truncated (over_long).")
    packing: bool = option(True, "Fill bins with several rows. Off: a bin is one row; the rows of a micro-batch are still concatenated.")
    over_long: Literal["drop", "truncate"] = option("drop", "What to do with rows longer than max_length. Dropped rows are counted.")
    on_bad_row: Literal["error", "skip"] = option("error", "A row that cannot be used: stop and name it, or skip and count it.")
    chat_template_kwargs: str | None = option(
        None, """Arguments of the chat template as JSON, e.g. '{"enable_thinking": false}'; a row's own column of this name wins."""
    )
    data_workers: int = option(8, "Most processes that tokenise; small files are tokenised by one.")
    data_cache_dir: str | None = option(None, "Where tokenised data is kept. Default: data_cache inside output_dir.")

    def __post_init__(self):
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; a row needs at least two tokens to learn one.")
        if self.chat_template_kwargs is not None:
            try:
                arguments = json.loads(self.chat_template_kwargs)
            except json.JSONDecodeError as error:
                raise ValueError(f"chat_template_kwargs is not JSON ({error}): {self.chat_template_kwargs}") from error
            if not isinstance(arguments, dict):
                raise ValueError(f"chat_template_kwargs must be a JSON object: {self.chat_template_kwargs}")
        if self.data_workers < 1:
            raise ValueError(f"data_workers is {self.data_workers}; at least one process must tokenise.")


@dataclass
class TrainArguments:
    """The loop: how long, how fast, what is written."""

    output_dir: str = field(metadata={"help": "Folder of the run: config, metrics, log, checkpoints, final model."})
    run_name: str | None = option(None, "Name shown by trackers. Default: the folder's name.")
    seed: int = option(0, "Seed of the data order and of everything random.")
    max_steps: int = option(-1, "Optimizer steps; overrides num_train_epochs when positive.")
    num_train_epochs: float = option(1.0, "Passes over the training bins.")
    per_device_train_batch_size: int = option(1, "Bins of one micro-batch on one rank, concatenated into one row.")
    gradient_accumulation_steps: int = option(1, "Micro-batches of one optimizer step on one rank.")
    learning_rate: float = option(1e-5, "Peak learning rate.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = option("cosine", "Shape after the warm-up; cosine and linear end at 0.")
    warmup_steps: float = option(0.03, "Steps of linear warm-up; below 1 a share of all steps.")
    weight_decay: float = option(0.0, "Decoupled weight decay on matrices; vectors (norms, biases) never decay.")
    adam_beta1: float = option(0.9, "AdamW's first decay.")
    adam_beta2: float = option(0.95, "AdamW's second decay.")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.")
    optim: Literal["adamw", "adamw_8bit"] = option("adamw", "adamw_8bit keeps both moments in 8 bits (torchao).")
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this global norm; 0: never.")
    max_skipped_steps: int = option(5, "Stop after so many steps in a row whose loss or gradient is not finite.")
    logging_steps: int = option(1, "A line in metrics.jsonl every so many steps.")
    eval_steps: int | None = option(None, "Evaluate every so many steps. Default: only at the end.")
    save_steps: int = option(100, "Save a checkpoint every so many steps, and one at the end. 0: never (benchmarks).")
    save_total_limit: int = option(2, "Complete checkpoints to keep.")
    export_final: bool = option(True, "Write final/ in Hugging Face format when training is done.")
    resume: str = option("auto", "auto: newest complete checkpoint of output_dir; none: start anew; or a checkpoint's path.")
    allow_batch_change: bool = option(False, "Resume although ranks x accumulation x bins differs from the checkpoint's.")
    report_to: Literal["none", "wandb"] = option("none", "Tracker beside metrics.jsonl.")
    setup_timeout_minutes: float = option(60.0, "How long ranks wait for each other while loading, tokenising and compiling.")
    collective_timeout_minutes: float = option(5.0, "How long ranks wait for each other in the loop before the job ends with stacks.")

    def __post_init__(self):
        positive = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_skipped_steps", "logging_steps")
        for name in (*positive, "save_total_limit", "setup_timeout_minutes", "collective_timeout_minutes", "num_train_epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive.")
        if self.eval_steps is not None and self.eval_steps < 1:
            raise ValueError(f"eval_steps is {self.eval_steps}; it must be positive.")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(f"max_steps is {self.max_steps}; give a positive number, or leave it out to use num_train_epochs.")
        for name in ("learning_rate", "save_steps", "warmup_steps", "weight_decay", "max_grad_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it cannot be negative.")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML without silent duplicates: PyYAML keeps the last of two equal keys and says nothing."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: key `{key.value}` is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def yaml_tokens(path: str, known: set[str]) -> list[str]:
    """A flat YAML file as command-line tokens. ValueError names the file and the key that is unknown or not flat."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeyLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"cannot read config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `key: value` lines, found a {type(content).__name__}")
    unknown = sorted(str(key) for key in content if key not in known)
    if unknown:
        raise ValueError(f"{path}: unknown keys {', '.join(unknown)}{_suggestion(unknown[0], known)}")
    tokens = []
    for key, value in content.items():
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)):
            raise ValueError(f"{path}: key `{key}` must be a plain value or a list of plain values")
        if isinstance(value, list) and value:
            tokens += [f"--{key}", *map(str, value)]
        elif value is not None and not isinstance(value, list):
            tokens.append(f"--{key}={value}")
    return tokens


def _suggestion(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else ""


def say_and_exit(message: str) -> None:
    """argparse would print every option first, once a rank: the reason would scroll away."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message} (--help lists all options)", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def wrong_use() -> Iterator[None]:
    """Around checks of options that do not go together: a ValueError ends the process like one of `parse`, code 2 and one line."""
    try:
        yield
    except ValueError as error:
        say_and_exit(str(error))


def parse(*classes: type, argv: list[str] | None = None) -> tuple:
    """Parses `--config FILE` and the command line into one instance of each dataclass.

    Ends the process with code 2 and the reason on wrong use; `--help` lists every option.
    """
    argv = sys.argv[1:] if argv is None else argv
    known = {f.name for cls in classes for f in fields(cls)}
    parser = HfArgumentParser(classes, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = say_and_exit
    parser.add_argument("--config", help="YAML file of options; the command line wins over it.")
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config")
    config_file = config_parser.parse_known_args(argv)[0].config
    try:
        tokens = yaml_tokens(config_file, known) if config_file else []
        *instances, rest, unknown = parser.parse_args_into_dataclasses(
            args=[*tokens, *argv], look_for_args_file=False, return_remaining_strings=True
        )
        if unknown:
            raise ValueError(f"unknown option {' '.join(unknown)}{_suggestion(unknown[0].lstrip('-').split('=')[0], known)}")
    except ValueError as error:
        parser.error(str(error))
    assert [*vars(rest)] == ["config"], vars(rest)
    return tuple(instances)


def resolved(*instances) -> dict:
    """All options of a run by name, as they came out of YAML and command line."""
    return {f.name: getattr(instance, f.name) for instance in instances for f in fields(instance)}


def save_resolved(path: Path, *instances) -> None:
    """Writes the run's `config.yaml`; `--config` reads it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(resolved(*instances), sort_keys=False, allow_unicode=True), encoding="utf-8")
