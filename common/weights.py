"""Names and tensors between a Hugging Face checkpoint and the model in memory, one unit at a time, both ways.

    checkpoint = Checkpoint(path)                          # reads headers only
    model = build_skeleton(path, attn_implementation="sdpa")  # on the meta device
    converter = Converter(model, checkpoint)               # names only; raises when checkpoint and model do not fit
    loader = Loader(converter)
    for unit in converter.units:                           # decoder layers in order, then the root
        loader.load_unit(unit)                             # collective; wrap and shard the unit right after it
    loader.finish()

A unit is what FSDP wraps: a decoder layer, or the root (embeddings, final norm, head). No rank ever holds more than the unit it builds;
the rank that reads holds one more, read ahead.

Names come from transformers' own conversion tables. The common case, experts that are separate on disk and fused in memory, is not
converted but read straight into its place: expert e's gate rows are a contiguous slice of the fused tensor, and so are its up rows.

FP8 weights are model tensors in float8; their scales go beside them under the model name with SCALE_SUFFIX (common/fp8.py).
"""

import ctypes
import dataclasses
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy

import torch
import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from common import dist, fp8
from common.experts import destinations
from common.skeleton import build_skeleton, load_config
from common.tensor_files import Checkpoint, bytes_of, summary

__all__ = ["Checkpoint", "Converter", "Loader", "Unit", "build_skeleton", "load_config"]

# Experts of one layer reach 8 GB; in parts of this size the number of elements of a broadcast stays within 32 bits.
BROADCAST_BYTES = 1 << 30


# ----------------------------------------------------------------------------------------------------------------------------------
# Names


@dataclasses.dataclass(frozen=True)
class Unit:
    """A decoder layer (`name` is its module path), or the root: name and path are empty."""

    name: str
    module_path: str
    model_names: tuple[str, ...]  # parameters and persistent buffers, full names


@dataclasses.dataclass
class Conversion:
    """Checkpoint tensors that become model tensors through an operation of transformers that is not a placement."""

    target: str  # the model name that transformers derives from the checkpoint names
    converter: WeightConverter
    patterns: dict[str, str]  # checkpoint name -> source pattern of the converter
    model_names: tuple[str, ...] = ()


class Converter:
    """The map between checkpoint names and model names. Build it on the meta skeleton, before anything is wrapped.

    Attributes:
        units: decoder layers in order, then the root.
        untouched: checkpoint names that the model has no use for and an export copies (multi-token prediction, vision tower).
        cut: checkpoint names of layers beyond the model's last; they are dropped.
        tied: model name -> name of the model tensor that it shares.
        scales: checkpoint name of an FP8 weight -> checkpoint name of its scales.
        block: rows and columns that share one scale; None without FP8 weights.

    Raises one ValueError that lists everything that is missing, unexpected or of another shape; nothing but headers has been read by then.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint):
        self.model, self.checkpoint = model, checkpoint
        self._meta: dict[str, Tensor] = dict(model.state_dict())
        # Model name -> {checkpoint name: index}: model_tensor[index] is the checkpoint's tensor, always a contiguous slice.
        self._pieces: dict[str, dict[str, tuple]] = {}
        self._conversions: dict[str, Conversion] = {}  # by model name; several names may share one
        self._copies: dict[str, list[str]] = {}  # model name -> further checkpoint tensors with the same content (a tied head)
        self._loaded: dict[str, torch.dtype] = {}  # model name -> dtype after conversion, before any cast
        self.untouched: list[str] = []
        self.cut: list[str] = []
        self._filled: dict[str, set[tuple]] = {}  # model name -> (expert, first row) of what its pieces cover; () is all of it
        self._problems: list[str] = []
        self.block = fp8.block_size(checkpoint.config, checkpoint.path)
        self.scales = self._find_scales()
        self._map_names()
        self._tie()
        self._check()
        if self._problems:
            raise ValueError(f"{checkpoint.path} does not fit {type(model).__name__}:{summary(self._problems, limit=200)}")
        self._model_name = {disk: name for name in self._meta for disk in self.disk_names(name) if name not in self.tied}
        self.units = self._make_units()

    def _find_scales(self) -> dict[str, str]:
        scales = {}
        for disk in self.checkpoint.names:
            dtype, scale = self.checkpoint.dtype(disk), disk + fp8.SCALE_SUFFIX
            if dtype.itemsize > 1 or not dtype.is_floating_point:
                continue
            if dtype != fp8.DTYPE:
                self._problems.append(f"dtype: {disk} is {dtype}, which is not supported")
            elif self.block is None:
                self._problems.append(f"dtype: {disk} is {dtype}, but config.json has no quantization_config")
            elif scale not in self.checkpoint:
                self._problems.append(f"missing: {scale}, the scales of {disk}")
            else:
                scales[disk] = scale
                expected = fp8.grid(self.checkpoint.shape(disk), self.block)
                if self.checkpoint.shape(scale) != expected:
                    self._problems.append(
                        f"shape: {scale} is {list(self.checkpoint.shape(scale))}, {disk} {list(self.checkpoint.shape(disk))} needs {list(expected)}"
                    )
                if self.checkpoint.dtype(scale) != torch.float32:
                    self._problems.append(f"dtype: {scale} is {self.checkpoint.dtype(scale)}, scales are float32")
        return scales

    def _map_names(self) -> None:
        scale_names = set(self.scales.values())
        mapping = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = self.model.base_model_prefix
        for disk in sorted(set(self.checkpoint.names) - scale_names, key=dot_natural_key):
            renamed, _ = rename_source_key(disk, renamings, [])
            name, pattern = rename_source_key(renamed, [], converters, prefix, self._meta)
            if name not in self._meta:
                # Already named as in memory: renaming broke it.
                as_is, _ = rename_source_key(disk, [], [], prefix, self._meta)
                name, pattern = (as_is, None) if as_is in self._meta else (name, pattern)
            if name not in self._meta:
                self._set_aside(disk, renamed)
            elif pattern is None:
                self._add_piece(name, disk, ())
            elif (index := self._expert_index(name, renamed, by_pattern[pattern], pattern)) is not None:
                self._add_piece(name, disk, index)
            elif disk in self.scales:
                self._problems.append(f"conversion: {disk} is FP8 and cannot become {name}, which is no placement")
            else:
                conversion = self._conversions.setdefault(name, Conversion(name, by_pattern[pattern], {}))
                conversion.patterns[disk] = pattern
        for aside in (self.untouched, self.cut):  # scales go where their weights go
            aside.extend([self.scales.pop(disk) for disk in aside if disk in self.scales])
        # Only what matched may be reverted: the table also holds renamings for other forms of the checkpoint, and reverting those adds
        # prefixes that are not on disk.
        self.model._weight_conversions = [entry for entry in mapping if entry.was_used()]
        for conversion in list(self._conversions.values()):
            self._plan_conversion(conversion)

    def _set_aside(self, disk: str, renamed: str) -> None:
        """Sorts a checkpoint name that is no tensor of the model into untouched, cut or unexpected."""
        text = self.checkpoint.config.get("text_config") or self.checkpoint.config
        base_layers, layers = text.get("num_hidden_layers", 0), self.model.config.num_hidden_layers
        prefix = self.model.base_model_prefix + "."
        layers_path = self.model.decoder_layer_paths[0].rpartition(".")[0].removeprefix(prefix)
        match = re.match(rf"(?:{re.escape(prefix)})?{re.escape(layers_path)}\.(\d+)\.", renamed)
        layer = int(match[1]) if match else -1
        if layers <= layer < base_layers:
            self.cut.append(disk)
            return
        ignored = [*(self.model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        extra_layers = range(base_layers, base_layers + (text.get("num_nextn_predict_layers") or 0))
        if not any(re.search(pattern, renamed) for pattern in ignored) and layer not in extra_layers:
            self._problems.append(f"unexpected: {disk} {list(self.checkpoint.shape(disk))}")
        elif layers < base_layers and (layer >= base_layers or re.search(r"(^|\.)mtp\.", renamed)):
            self.cut.append(disk)  # multi-token prediction belongs behind the last layer, which is cut
        else:
            self.untouched.append(disk)

    def _expert_index(self, name: str, renamed: str, converter: WeightConverter, pattern: str) -> tuple | None:
        """Where an expert's tensor lies in the fused one, or None when the converter does something else than placing experts."""
        operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
        sources, targets = converter.source_patterns, converter.target_patterns
        if len(targets) != 1 or pattern.count("*") != 1 or self._meta[name].dim() != 3:
            return None
        before, after = pattern.split("*")
        match = re.search(re.escape(before) + r"(\d+)" + re.escape(after) + "$", renamed)
        if match is None:
            return None
        if operations == [("MergeModulelist", 0)] and len(sources) == 1:
            return (int(match[1]),)
        if operations == [("MergeModulelist", 0), ("Concatenate", 1)]:
            rows = self._meta[name].shape[1] // len(sources)
            first = sources.index(pattern) * rows
            return (int(match[1]), slice(first, first + rows))
        return None

    def _add_piece(self, name: str, disk: str, index: tuple) -> None:
        pieces, filled = self._pieces.setdefault(name, {}), self._filled.setdefault(name, set())
        place = (index[0], index[1].start if len(index) > 1 else 0) if index else ()
        if place in filled or () in filled or (filled and place == ()):
            self._problems.append(f"twice: {name} is in {next(iter(pieces))} and again in {disk}")
            return
        expected = self._meta[name]
        if index and index[0] >= expected.shape[0]:
            self._problems.append(f"unexpected: {disk}, but {name} has {expected.shape[0]} experts")
            return
        shape = self.checkpoint.shape(disk)
        if tuple(expected[index].shape) != shape:
            self._problems.append(f"shape: {disk} is {list(shape)}, {name} needs {list(expected[index].shape)}")
        pieces[disk] = index
        filled.add(place)

    def _plan_conversion(self, conversion: Conversion) -> None:
        """Runs the conversion there and back on meta tensors: that tells the names and shapes it will produce."""
        sources = {disk: self.checkpoint.empty(disk, device="meta") for disk in conversion.patterns}
        del self._conversions[conversion.target]
        what = f"{', '.join(sources)} cannot become {conversion.target}"
        try:
            converted = self._run(conversion, dict(sources))
            restored = revert_weight_conversion(self.model, dict(converted))
        except Exception as error:  # operations raise what they like when a tensor is missing or has another shape
            self._problems.append(f"conversion: {what} and be written back: {error}")
            return
        conversion.model_names = tuple(converted)
        for name, tensor in converted.items():
            if name in self._meta and tensor.shape == self._meta[name].shape:
                self._conversions[name] = conversion
                self._loaded[name] = tensor.dtype
            else:
                self._problems.append(f"conversion: {what}: the result is {name} {list(tensor.shape)}")
        if {disk: tensor.shape for disk, tensor in restored.items()} != {disk: tensor.shape for disk, tensor in sources.items()}:
            self._problems.append(f"conversion: {what}: it would be written back as {', '.join(restored)}")

    def _run(self, conversion: Conversion, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(conversion.converter)  # it collects tensors
        for disk in sorted(tensors, key=dot_natural_key):  # the order decides which expert is which: 10 comes after 9
            converter.add_tensor(conversion.target, disk, conversion.patterns[disk], tensors[disk])
        converted = converter.convert(conversion.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def _tie(self) -> None:
        """Shared tensors are read once. On disk either name may be there, or both with the same content."""
        self.tied: dict[str, str] = dict(self.model.all_tied_weights_keys)
        for name, source in self.tied.items():
            if name not in self._pieces:
                continue
            if source not in self._pieces:
                self._pieces[source] = self._pieces.pop(name)
            else:
                self._copies.setdefault(source, []).extend(self._pieces.pop(name))

    def _check(self) -> None:
        for name, meta in self._meta.items():
            if name in self.tied or name in self._conversions:
                continue
            if not self._pieces.get(name):
                self._problems.append(f"missing: {name} {list(meta.shape)}")
                continue
            pieces = self._pieces[name]
            self._problems.extend(f"missing: {text}" for text in missing_experts(name, meta.shape, pieces))
            dtypes = {self.checkpoint.dtype(disk) for disk in pieces}
            if dtypes == {fp8.DTYPE, torch.bfloat16}:  # some experts were trained and exported in bf16: all are read as bf16
                dtypes = {torch.bfloat16}
            if len(dtypes) > 1:
                self._problems.append(f"mixed: the tensors of {name} have dtypes {', '.join(sorted(map(str, dtypes)))}")
            self._loaded[name] = dtypes.pop()

    def _make_units(self) -> list[Unit]:
        names = [name for name in self._meta if name not in self.tied]
        units = []
        for path in self.model.decoder_layer_paths:
            units.append(Unit(path, path, tuple(name for name in names if name.startswith(path + "."))))
        inside = {name for unit in units for name in unit.model_names}
        return [*units, Unit("", "", tuple(name for name in names if name not in inside))]

    def shape(self, model_name: str) -> torch.Size:
        return self._meta[model_name].shape

    def dtype(self, model_name: str) -> torch.dtype:
        """The dtype that the model declares for this tensor."""
        return self._meta[model_name].dtype

    def loaded_dtype(self, model_name: str) -> torch.dtype:
        """The dtype that the tensor has as it comes from the checkpoint."""
        return self._loaded[model_name]

    def disk_names(self, model_name: str) -> list[str]:
        """Names of the checkpoint tensors that hold this model tensor, experts in order."""
        name = self.tied.get(model_name, model_name)
        if name in self._conversions:
            return list(self._conversions[name].patterns)
        return [*self._pieces[name], *self._copies.get(name, ())]

    def scale_shape(self, model_name: str) -> tuple[int, ...]:
        """Shape of an FP8 model tensor's scales: [m, n], experts [E, m, n], gate and up rows of experts [E, 2, m, n]."""
        pieces = self._pieces[self.tied.get(model_name, model_name)]
        disk, index = next(iter(pieces.items()))
        shape = self.checkpoint.shape(self.scales[disk])
        if not index:
            return shape
        experts = self.shape(model_name)[0]
        return (experts, *shape) if len(index) == 1 else (experts, len(pieces) // experts, *shape)

    def scale_places(self, model_name: str, scale: Tensor) -> dict[str, Tensor]:
        """Checkpoint names of an FP8 model tensor's scales -> the views of `scale` (of `scale_shape`) that hold them."""
        places = {}
        for disk, index in self._pieces[self.tied.get(model_name, model_name)].items():
            if len(index) == 2:
                index = (index[0], index[1].start // (index[1].stop - index[1].start))
            places[self.scales[disk]] = scale[index]
        return places

    def read_scales(self, model_names: Iterable[str], stop: threading.Event | None = None) -> dict[str, Tensor]:
        """Reads the scales of those model tensors that are FP8: {model name + SCALE_SUFFIX: scales}."""
        scales, places = {}, {}
        for name in model_names:
            if self.loaded_dtype(name) == fp8.DTYPE:
                scale = scales[name + fp8.SCALE_SUFFIX] = torch.empty(self.scale_shape(name))
                places |= self.scale_places(name, scale)
        self.checkpoint.read_into(places, stop)
        return scales

    def pieces(self, model_name: str) -> dict[str, tuple]:
        """Checkpoint names -> index: model_tensor[index] is that checkpoint tensor. Empty for what is converted in another way."""
        return self._pieces.get(self.tied.get(model_name, model_name), {})

    def read(self, model_names: Iterable[str], stop: threading.Event | None = None) -> dict[str, Tensor]:
        """Reads these model tensors from the checkpoint, on the CPU, in the checkpoint's dtype."""
        tensors, places, copies, conversions = self._allocate(model_names)
        self.checkpoint.read_into(places, stop)
        return self._complete(tensors, places, copies, conversions)

    def to_model(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Checkpoint tensors -> model tensors (copies), in the checkpoint's dtype. Every tensor of each model tensor must be there."""
        names = dict.fromkeys(self._model_name[disk] for disk in tensors if disk in self._model_name)
        model_tensors, places, copies, conversions = self._allocate(names)
        if absent := [disk for disk in places if disk not in tensors]:
            raise ValueError(f"to make {', '.join(names)}, these are needed as well:{summary(absent)}")
        for disk, place in places.items():
            place.copy_(tensors[disk])
        return self._complete(model_tensors, places, copies, conversions)

    def to_checkpoint(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Model tensors -> checkpoint tensors under the names and in the form (fused or per expert) that the checkpoint has.

        Values are views of the given tensors where the form allows it. A conversion that makes several model tensors needs all of them.
        """
        result: dict[str, Tensor] = {}
        converted: dict[str, Tensor] = {}
        for name, tensor in named.items():
            name = self.tied.get(name, name)
            if name in self._conversions:
                converted[name] = tensor
                continue
            result.update({disk: tensor[index] for disk, index in self._pieces[name].items()})
            result.update(dict.fromkeys(self._copies.get(name, ()), tensor))
        for conversion in {id(self._conversions[name]): self._conversions[name] for name in converted}.values():
            result.update(revert_weight_conversion(self.model, {name: converted[name] for name in conversion.model_names}))
        return result

    def _allocate(self, model_names: Iterable[str]):
        """Empty model tensors and, for each checkpoint tensor they need, the memory it belongs in."""
        tensors: dict[str, Tensor] = {}
        places: dict[str, Tensor] = {}
        copies: dict[str, str] = {}
        conversions: dict[int, Conversion] = {}
        for name in model_names:
            name = self.tied.get(name, name)
            if name in self._conversions:
                conversion = self._conversions[name]
                conversions[id(conversion)] = conversion
                places.update({disk: self.checkpoint.empty(disk) for disk in conversion.patterns})
                continue
            tensors[name] = torch.empty(self._meta[name].shape, dtype=self._loaded[name])
            places.update({disk: tensors[name][index] for disk, index in self._pieces[name].items()})
            for disk in self._quantised_pieces(name):
                places.update({part: self.checkpoint.empty(part) for part in (disk, self.scales[disk])})
            for disk in self._copies.get(name, ()):
                places[disk], copies[disk] = self.checkpoint.empty(disk), name
        return tensors, places, copies, list(conversions.values())

    def _quantised_pieces(self, name: str) -> list[str]:
        """FP8 checkpoint tensors of a model tensor that is bf16, because other tensors of it are."""
        if self._loaded[name] == fp8.DTYPE:
            return []
        return [disk for disk in self._pieces[name] if disk in self.scales]

    def _complete(self, tensors, places, copies, conversions) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            for disk in self._quantised_pieces(name):
                weight, scale = places.pop(disk), places.pop(self.scales[disk])
                tensor[self._pieces[name][disk]] = fp8.dequantise(weight, scale, self.block, tensor.dtype)
        for disk, name in copies.items():
            if not torch.equal(places[disk], tensors[name]):
                raise ValueError(
                    f"{self.checkpoint.path}: the config ties {disk} to {name}, but the checkpoint holds two different tensors. "
                    "Set tie_word_embeddings to false in its config.json."
                )
        for conversion in conversions:
            tensors |= self._run(conversion, {disk: places.pop(disk) for disk in conversion.patterns})
        return tensors


def missing_experts(name: str, shape: torch.Size, pieces: dict[str, tuple]) -> list[str]:
    """Checkpoint names (as far as they can be told) of experts' tensors that `pieces` lacks to fill `name`."""
    present = {(index[0], index[1].start if len(index) > 1 else 0): disk for disk, index in pieces.items() if index}
    if not present:
        return []  # one tensor fills it
    first = next(iter(pieces.values()))
    rows = first[1].stop - first[1].start if len(first) > 1 else shape[1]
    alike = {start: (expert, disk) for (expert, start), disk in present.items()}
    missing = []
    for start in range(0, shape[1], rows):
        for expert in range(shape[0]):
            if (expert, start) in present:
                continue
            if start in alike:
                other, disk = alike[start]
                before, _, after = disk.rpartition(f".{other}.")
                missing.append(f"{before}.{expert}.{after}")
            else:
                missing.append(f"rows {start} to {start + rows} of expert {expert} of {name}")
    return missing


# ----------------------------------------------------------------------------------------------------------------------------------
# Loading


class ReadAhead:
    """One read in a thread. `close` ends it at the next block; a thread that hangs in the file system dies with the process."""

    def __init__(self, read: Callable[[threading.Event], dict[str, Tensor]]):
        self._read, self._stop = read, threading.Event()
        self._result: dict[str, Tensor] | None = None
        self._error: Exception | None = None
        # Waited for instead of the thread: before Python 3.12 an interrupted join() takes a running thread for an ended one.
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._read(self._stop)
        except Exception as error:  # handed to the caller of take
            self._error = error
        finally:
            self._done.set()

    def take(self) -> dict[str, Tensor]:
        """Waits for the read and hands its result over (nothing is kept), or raises what it raised."""
        self._done.wait()
        self._thread.join()
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        self._stop.set()
        if self._done.wait(timeout=10):
            self._thread.join()
        self._result = None


class Loader:
    """Reads, converts and distributes one unit after the other, in the order of `converter.units`.

    Unit i comes from the first rank of node i modulo the number of nodes, so that every node's file-system client works. That rank reads
    its next unit in a thread while the others are being sent. All ranks must make the same calls.

    dtype_of: model name -> dtype of the tensor in memory; without it, the dtype that the parameter has on meta. FP8 weights stay FP8 where
    the module has that form (common/fp8.py) and are dequantised elsewhere. Experts that were split are sent part by part.
    """

    def __init__(self, converter: Converter, *, dtype_of: Callable[[str], torch.dtype] | None = None):
        self.converter, self.model = converter, converter.model
        self.dtype_of = dtype_of
        self._next = 0
        self._reader: ReadAhead | None = None
        # Module path -> its buffers that are computed, not loaded (rotary frequencies).
        self._computed: dict[str, list[str]] = {}
        for name, _ in self.model.named_non_persistent_buffers():
            path, _, leaf = name.rpartition(".")
            self._computed.setdefault(path, []).append(leaf)
        if dist.local_rank() == 0:
            self._start_reading(dist.node())

    def source(self, index: int) -> int:
        """The rank that reads unit `index`."""
        return index % dist.num_nodes() * dist.local_world_size()

    def load_unit(self, unit: Unit) -> None:
        """Gives the unit's modules their parameters and buffers on this rank's device. Collective.

        When the source cannot read, every rank raises RuntimeError with the source's message; there it is caused by the original error.
        """
        assert unit is self.converter.units[self._next], "units are loaded in order"
        try:
            self._load_unit(unit, self._next)
        except BaseException:  # an interrupt too: the reading thread must not outlive it
            self.close()
            raise
        self._next += 1

    def finish(self) -> None:
        """Checks that every unit was loaded and that nothing is left without memory. Calls no collective."""
        self.close()
        assert self._next == len(self.converter.units), f"{self._next} of {len(self.converter.units)} units were loaded"
        left = [
            f"{path}.{leaf}"
            for path, module in self.model.named_modules()
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and tensor.is_meta
        ]
        assert not left, f"still on the meta device: {left}"

    def close(self) -> None:
        """Ends the reading thread. Not needed after `finish` or an error in `load_unit`."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _start_reading(self, index: int) -> None:
        self._reader = None
        if index < len(self.converter.units):
            names = self.converter.units[index].model_names
            self._reader = ReadAhead(lambda stop: self.converter.read(names, stop) | self.converter.read_scales(names, stop))

    def _load_unit(self, unit: Unit, index: int) -> None:
        source = self.source(index)
        tensors: dict[str, Tensor] = {}
        failure: Exception | None = None
        if dist.rank() == source:
            try:
                tensors = self._reader.take()
            except Exception as error:
                failure = error
            else:
                self._start_reading(index + dist.num_nodes())
        # Agreed on before any tensor is sent: ranks that wait in a broadcast cannot be told of an error any more.
        message = dist.broadcast_object(None if failure is None else f"{type(failure).__name__}: {failure}", src=source)
        if message is not None:
            what = f"{unit.name or 'the root unit'} of {self.converter.checkpoint.path}"
            raise RuntimeError(f"rank {source} could not read {what}: {message}") from failure
        for name in unit.model_names:
            self._load_tensor(name, tensors.pop(name, None), tensors.pop(name + fp8.SCALE_SUFFIX, None), source)
        for name, shared in self.converter.tied.items():
            if shared in unit.model_names:
                self._share(name, shared)
        for path, leaves in self._computed.items():
            if self._unit_of(path) is unit:
                self._compute_buffers(path, leaves)
        release_free_memory()

    def _load_tensor(self, name: str, tensor: Tensor | None, scale: Tensor | None, source: int) -> None:
        """Sends one model tensor, with its scales if it is FP8, to wherever it lives. Only the source passes tensors."""
        shape, dtype = self.converter.shape(name), self.converter.loaded_dtype(name)
        scale_shape = self.converter.scale_shape(name) if dtype == fp8.DTYPE else None
        for module, leaf, experts in destinations(self.model, name):
            part = self._distribute(tensor, shape, dtype, experts, source)
            if scale_shape is None:
                self._place(name, module, leaf, part)
                continue
            part_scale = self._distribute(scale, scale_shape, torch.float32, experts, source)
            if leaf + fp8.SCALE_SUFFIX in module._buffers:
                module._buffers[leaf + fp8.SCALE_SUFFIX] = part_scale
                module._parameters[leaf] = nn.Parameter(part, requires_grad=False)
            else:
                wanted = self._dtype(name, module, leaf)
                self._place(name, module, leaf, fp8.dequantise(part, part_scale, self.converter.block, wanted))

    def _distribute(
        self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, experts: tuple[int, ...] | None, source: int
    ) -> Tensor:
        """The tensor, or its rows `experts`, on this rank's device, in the checkpoint's dtype. Only the source passes one."""
        if experts is not None:
            shape = (len(experts), *shape[1:])
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=dist.device())
        else:
            if experts is not None:
                tensor = tensor[list(experts)]
            tensor = tensor.to(dist.device()).contiguous()
        if dist.world_size() > 1:
            for part in bytes_of(tensor).split(BROADCAST_BYTES):  # as bytes: gloo has no float8
                torch.distributed.broadcast(part, src=source)
        return tensor

    def _dtype(self, name: str, module: nn.Module, leaf: str) -> torch.dtype:
        if self.dtype_of is not None:
            return self.dtype_of(name)
        return (module._buffers if leaf in module._buffers else module._parameters)[leaf].dtype

    def _place(self, name: str, module: nn.Module, leaf: str, tensor: Tensor) -> None:
        tensor = tensor.to(self._dtype(name, module, leaf))
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=module._parameters[leaf].requires_grad)

    def _share(self, name: str, shared: str) -> None:
        path, _, leaf = name.rpartition(".")
        source_path, _, source_leaf = shared.rpartition(".")
        self.model.get_submodule(path)._parameters[leaf] = self.model.get_submodule(source_path)._parameters[source_leaf]

    def _unit_of(self, module_path: str) -> Unit:
        *layers, root = self.converter.units
        return next((unit for unit in layers if f"{module_path}.".startswith(f"{unit.module_path}.")), root)

    def _compute_buffers(self, path: str, leaves: list[str]) -> None:
        """Gives buffers that are in no checkpoint their values, by the model's own initialisation of the module that owns them."""
        module = self.model.get_submodule(path)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not tensor.is_meta:
                tensor._is_hf_initialized = True  # initialisation leaves these alone
        for leaf in leaves:
            meta = module._buffers[leaf]
            marker = float("nan") if meta.is_floating_point() else torch.iinfo(meta.dtype).min
            module._buffers[leaf] = torch.full(meta.shape, marker, dtype=meta.dtype, device=dist.device())
        with torch.no_grad():
            self.model._init_weights(module)
        for leaf in leaves:
            value = module._buffers[leaf]
            if (value.isnan() if value.is_floating_point() else value == torch.iinfo(value.dtype).min).any():
                raise ValueError(f"{type(self.model).__name__} has no value for buffer {path}.{leaf}, which is in no checkpoint")


def release_free_memory() -> None:
    """Gives freed heap memory back to the system. glibc keeps it, which adds up to several layers when tensors of many sizes come and go."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
