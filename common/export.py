"""A Hugging Face folder from trained weights: one shard a unit, names, form and dtypes of the base checkpoint.

    python -m common.export --checkpoint runs/a/checkpoint-000100 --output runs/a/final

One process, no GPU; one unit in memory at a time. Trained tensors come from the training checkpoint, frozen ones and those that the model
does not use (multi-token prediction, vision tower) from the base; adapters are merged into the base's weights. The folder appears under its
name when it is complete and flushed.
From an FP8 base, what did not train stays the base's bytes; what did is quantised back to FP8 blocks, or kept in bf16
(`--trained_dtype bfloat16`), and config.json says so. Exit codes: 0 good, 1 a check failed, 2 wrong use.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from common import dist, fp8, lora
from common.checkpoint import SavedParameters, fingerprint
from common.skeleton import build_skeleton, cut_config
from common.tensor_files import INDEX_FILE, Checkpoint, Spec, read_header, sha256_of, summary, write_file
from common.weights import Converter

# Left behind in the base folder: weights in any format, the index that names them, and the base's model card, which describes the base.
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}
TEMPLATE_FOLDER = "additional_chat_templates"


class CheckFailed(ValueError):
    """What was written is not what it should be."""


class Exporter:
    """Writes the folder `output`, unit by unit. Construction is collective; each unit is written by any one rank, and so are the untouched
    tensors; when all have been written (a barrier of the caller's), one rank calls `finish`.

    trained: names of the model tensors that trained -> ids of the experts that did, or None for all of the tensor; without it everything is
    given. The rest is copied from the base, byte for byte. trained_dtype: `fp8` or `bfloat16` for trained tensors that are FP8 in the base.

    Raises ValueError when `output` exists and is not empty. A folder `<output>.incomplete` that an earlier attempt left is removed.
    """

    def __init__(
        self,
        converter: Converter,
        checkpoint: Checkpoint,
        output: str | Path,
        *,
        trained: dict[str, tuple[int, ...] | None] | None = None,
        trained_dtype: str = "fp8",
    ):
        self.converter, self.checkpoint, self.output = converter, checkpoint, Path(output)
        self.partial = self.output.with_name(self.output.name + ".incomplete")
        everything = {name: None for unit in converter.units for name in unit.model_names}
        self.trained = everything if trained is None else {converter.tied.get(name, name): ids for name, ids in trained.items()}
        if foreign := sorted(set(self.trained) - set(everything)):
            raise ValueError(f"{checkpoint.path} has no place for these trained tensors:{summary(foreign)}")
        if converted := [name for name, ids in self.trained.items() if ids is not None and not converter.pieces(name)]:
            raise ValueError(f"experts that train in part are not placed but converted, which cannot be exported:{summary(converted)}")
        self.trained_dtype = trained_dtype
        # Checkpoint tensors that are FP8 in the base and bf16 in the export.
        self.widened = {disk for disk in self._trained_places() if disk in converter.scales and trained_dtype == "bfloat16"}
        self.errors: dict[str, float] = {}  # checkpoint name -> relative error of quantising it back
        self.num_files = len(converter.units) + bool(converter.untouched)
        with dist.main_rank_first() as mine:
            if mine:
                self._prepare()

    def _prepare(self) -> None:
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            raise ValueError(f"{self.output} exists and is not empty: choose another output or remove it.")
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)

    def file_name(self, index: int) -> str:
        """Name of the shard of unit `index`; the number after the last unit is the shard of untouched tensors."""
        return f"model-{index + 1:05d}-of-{self.num_files:05d}.safetensors"

    def disk_names(self, index: int) -> list[str]:
        """Checkpoint names in shard `index`, scales of FP8 weights included."""
        if index == len(self.converter.units):
            return self.converter.untouched
        # A conversion of several model tensors lists its checkpoint tensors for each of them.
        names = dict.fromkeys(disk for name in self.converter.units[index].model_names for disk in self.converter.disk_names(name))
        scales = [self.converter.scales[name] for name in names if name in self.converter.scales and name not in self.widened]
        return [*names, *scales]

    def _specs(self, index: int) -> list[Spec]:
        return [
            Spec(name, torch.bfloat16 if name in self.widened else self.checkpoint.dtype(name), self.checkpoint.shape(name))
            for name in self.disk_names(index)
        ]

    def _trained_places(self) -> dict[str, tuple[str, tuple | int | None]]:
        """Checkpoint names that hold something trained -> (model name, place in the trained tensor of what it holds).

        The place is an index; None where a fused checkpoint tensor holds trained and frozen experts."""
        places: dict[str, tuple[str, tuple | None]] = {}
        for name, experts in self.trained.items():
            for disk, index in self.converter.pieces(name).items():
                if experts is None:
                    places[disk] = (name, index)
                elif not index:
                    places[disk] = (name, None)
                elif index[0] in experts:
                    places[disk] = (name, (experts.index(index[0]), *index[1:]))
        return places

    def write_unit(self, index: int, named: dict[str, Tensor]) -> dict[str, str]:
        """Writes all tensors of unit `index`: those that trained are given under model names, in any dtype and on any device (of experts
        that train in part, their rows only), the others are the base's.

        Returns the sha256 of each checkpoint tensor's bytes, so that they can be compared with those of live parameters.
        """
        unit = self.converter.units[index]
        named = {self.converter.tied.get(name, name): tensor for name, tensor in named.items()}
        wanted = {name for name in unit.model_names if name in self.trained}
        if set(named) != wanted:
            absent, foreign = sorted(wanted - set(named)), sorted(set(named) - wanted)
            raise ValueError(f"unit {unit.name or '(root)'}: tensors missing: {absent or 'none'}; not of this unit: {foreign or 'none'}")
        for name, tensor in named.items():
            expected, experts = self.converter.shape(name), self.trained[name]
            if experts is not None:
                expected = torch.Size([len(experts), *expected[1:]])
            if tensor.shape != expected:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model's is {list(expected)}")
        places = {disk: place for disk, place in self._trained_places().items() if place[0] in named}
        converted = self.converter.to_checkpoint({name: tensor for name, tensor in named.items() if self.trained[name] is None})
        scales = {scale: disk for disk, scale in self.converter.scales.items() if disk in places}
        quantised: dict[str, Tensor] = {}  # weights whose scales have been written: wide dtypes come first in a file

        def trained_value(disk: str) -> Tensor:
            name, place = places[disk]
            if self.trained[name] is None:
                return converted[disk]
            if place is not None:
                return named[name][place]
            whole = self.checkpoint.read([disk])[disk]
            if disk in self.converter.scales:
                scale = self.checkpoint.read([self.converter.scales[disk]])[self.converter.scales[disk]]
                whole = fp8.dequantise(whole, scale, self.converter.block, torch.bfloat16)
            whole[list(self.trained[name])] = named[name].to(whole)
            return whole

        def quantise(disk: str) -> tuple[Tensor, Tensor]:
            value = trained_value(disk).to(torch.bfloat16)
            weight, scale = fp8.quantise(value, self.converter.block)
            self.errors[disk] = fp8.relative_error(value, weight, scale, self.converter.block)
            return weight, scale

        def tensor_of(disk: str) -> Tensor:
            if disk in scales:  # comes before its weight
                quantised[scales[disk]], scale = quantise(scales[disk])
                return scale
            if disk in quantised:
                return quantised.pop(disk)
            if disk in converted or disk in places:
                return trained_value(disk).to(torch.bfloat16 if disk in self.widened else self.checkpoint.dtype(disk))
            return self.checkpoint.read([disk])[disk]

        return write_file(self.partial / self.file_name(index), self._specs(index), tensor_of)

    def copy_untouched(self) -> dict[str, str]:
        """Copies the base's tensors that the model has no use for, one in memory at a time. Returns their sha256."""
        if not self.converter.untouched:
            return {}
        index = len(self.converter.units)
        return write_file(self.partial / self.file_name(index), self._specs(index), lambda name: self.checkpoint.read([name])[name])

    def verify(self, hashes: dict[str, str]) -> None:
        """Reads the written tensors named in `hashes` back from the disk and compares their sha256. Raises CheckFailed with the names."""
        wrong = []
        for index in range(self.num_files):
            if hashes.keys().isdisjoint(self.disk_names(index)):
                continue
            written = read_header(self.partial / self.file_name(index))
            wrong += [name for name, entry in written.items() if name in hashes and sha256_of(self.partial, entry) != hashes[name]]
        if wrong:
            raise CheckFailed(f"{self.partial}: bytes on the disk differ from what was written:{summary(wrong)}")

    def finish(self, extra: dict[str, str] | None = None) -> None:
        """Writes the index, config, tokenizer and all else that the base folder holds, checks every shard and renames the folder.

        extra: further files, name -> text. Called by one rank. Raises CheckFailed when a shard is missing or not what it should be.
        """
        self._check_shards()
        self._write_index()
        self._write_config()
        self._copy_files()
        for name, text in (extra or {}).items():
            (self.partial / name).write_text(text, encoding="utf-8")
        flush_folder(self.partial)
        os.rename(self.partial, self.output)
        flush(self.output.parent)

    def _check_shards(self) -> None:
        problems = []
        for index in range(self.num_files):
            file = self.partial / self.file_name(index)
            if not file.is_file():
                problems.append(f"{file.name} was not written")
                continue
            written = {name: (entry.dtype, entry.shape) for name, entry in read_header(file).items()}
            if written != {spec.name: (spec.dtype, spec.shape) for spec in self._specs(index)}:
                problems.append(f"{file.name} does not hold the tensors of its unit")
        if problems:
            raise CheckFailed(f"{self.partial} is not complete:{summary(problems)}")

    def _write_index(self) -> None:
        specs = {self.file_name(index): self._specs(index) for index in range(self.num_files)}
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for shard in specs.values() for spec in shard)},
            "weight_map": {spec.name: file for file, shard in specs.items() for spec in shard},
        }
        (self.partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write_config(self) -> None:
        base, layers = self.checkpoint.config, self.converter.model.config.num_hidden_layers
        uncut = (base.get("text_config") or base)["num_hidden_layers"] == layers
        if uncut and not self.widened:
            shutil.copyfile(self.checkpoint.path / "config.json", self.partial / "config.json")
            return
        content = deepcopy(base) if uncut else cut_config(base, layers)
        if self.widened:
            self._write_quantization(content)
        (self.partial / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _write_quantization(self, content: dict) -> None:
        """Lists the modules that are bf16 now; without an FP8 weight left there is no such section any more."""
        owner = content if "quantization_config" in content else content["text_config"]
        written = {name for index in range(self.num_files) for name in self.disk_names(index)}
        if not any(self.checkpoint.dtype(name) == fp8.DTYPE and name not in self.widened for name in written):
            del owner["quantization_config"]
            return
        section = owner["quantization_config"]
        modules = {name.removesuffix(".weight") for name in self.widened}
        section["modules_to_not_convert"] = sorted({*(section.get("modules_to_not_convert") or ()), *modules})

    def report_errors(self) -> str:
        """What quantising trained weights back has lost, in words; empty where nothing was quantised."""
        if not self.errors:
            return ""
        worst = max(self.errors, key=self.errors.get)
        mean = sum(self.errors.values()) / len(self.errors)
        return (
            f"{len(self.errors)} trained tensors were quantised to FP8: relative error {mean:.2%} on average, at most {self.errors[worst]:.2%} "
            f"({worst})"
        )

    def _copy_files(self) -> None:
        """Tokenizer, chat templates, generation config, licence and remote code, byte for byte."""
        for file in sorted(self.checkpoint.path.iterdir()):
            if file.is_dir():
                if file.name == TEMPLATE_FOLDER:
                    shutil.copytree(file, self.partial / file.name)
            elif not (
                file.name.startswith(".")
                or file.suffix in WEIGHT_SUFFIXES
                or file.name.endswith(".index.json")
                or file.name in ("config.json", "README.md")
            ):
                shutil.copyfile(file, self.partial / file.name)


def flush(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.suffix != ".safetensors":  # shards were flushed when they were written
            flush(path)
    flush(folder)


@torch.no_grad()
def export_checkpoint(
    path: str | Path,
    output: str | Path,
    *,
    base: str | Path | None = None,
    decoder_layer: str | None = None,
    verify: bool = False,
    trained_dtype: str = "fp8",
) -> str:
    """Exports the training checkpoint `path` to `output`; see the module's docstring. Returns what is to be told about it, or "".

    base: the base checkpoint's folder, when it is not where it was in training. verify: read everything back and compare hashes.
    """
    saved = SavedParameters(path)
    if base is None and not Path(saved.base).is_dir():
        raise ValueError(
            f"{path} was trained from {saved.base}, which is not there any more. Give the base checkpoint's folder with --base."
        )
    checkpoint = Checkpoint(base or saved.base)
    if fingerprint(checkpoint.path) != saved.fingerprint:
        raise ValueError(f"the weights in {checkpoint.path} are not those that {path} was trained from. Give the right folder as base.")
    model = build_skeleton(checkpoint.path, attn_implementation="eager", num_layers=saved.num_layers, decoder_layer=decoder_layer)
    converter = Converter(model, checkpoint)
    trained = {lora.weight_name(name) or name: saved.experts(name) for name in saved.names}
    exporter = Exporter(converter, checkpoint, output, trained=trained, trained_dtype=trained_dtype)
    names: dict[str, list[str]] = {}  # what is saved, by the tensor of the model that it changes
    for name in saved.names:
        weight = lora.weight_name(name) or name
        names.setdefault(converter.tied.get(weight, weight), []).append(name)
    hashes = {}
    for index, unit in enumerate(tqdm(converter.units, desc="exporting", unit="unit")):
        inside = [name for name in unit.model_names if name in names]
        tensors = saved.read_many([part for name in inside for part in names[name]])
        if saved.adapters is not None:
            weights = lora.base_weights(converter, inside)
            tensors = {name: lora.merge(weights[name], tensors, name, saved.adapters.scale) for name in inside}
        hashes |= exporter.write_unit(index, tensors)
        del tensors  # before the next unit is read
    hashes |= exporter.copy_untouched()
    if verify:
        exporter.verify(hashes)
    exporter.finish()
    return exporter.report_errors()


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.export", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--checkpoint", required=True, help="a training checkpoint: runs/a/checkpoint-000100")
    parser.add_argument("--output", required=True, help="a folder that is empty or does not exist")
    parser.add_argument("--base", default=None, help="the base checkpoint, when it has moved since training")
    parser.add_argument("--decoder_layer", default=None, help="as in training, for a model that needed it")
    parser.add_argument("--verify", action="store_true", help="read the export back and compare hashes")
    parser.add_argument(
        "--trained_dtype", choices=["fp8", "bfloat16"], default="fp8", help="dtype of trained tensors that are FP8 in the base"
    )
    args = parser.parse_args(arguments)
    try:
        report = export_checkpoint(
            args.checkpoint,
            args.output,
            base=args.base,
            decoder_layer=args.decoder_layer,
            verify=args.verify,
            trained_dtype=args.trained_dtype,
        )
    except CheckFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if report:
        print(report)
    print(f"{args.output}: complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
