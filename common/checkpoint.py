"""Sharded checkpoints: save, resume, retention. What trains is saved, with the optimizer, the position in the data and every rank's RNG.

    checkpoint-000100/  *.distcp .metadata   torch.distributed.checkpoint: parameters and moments, flattened to one dimension
                        parameters.json      {name: [shape, dtype]} of the parameters, and what they are a change of; where only some
                                             experts train, a parameter's rows are those experts'
                        trainer_state.json   step, epoch, data position, batch size, ...
                        adapter/             where adapters train: the same in peft's format, for use elsewhere
                        COMPLETE             written last; a folder without it does not exist for resume

Each rank writes its own flat shards and reads whatever overlaps its own: nothing is gathered, in memory or over the network, and any world size
reads any other's files. A save goes to a hidden temporary folder, is flushed to disk, renamed, then marked COMPLETE: killed at any moment it
costs the steps since the last complete checkpoint and nothing else.
"""

import hashlib
import json
import logging
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from common import dist, lora
from common.fsdp import ShardedModel
from common.lora import Adapters
from common.optim import AdamW

log = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
_DELETING = ".deleting-"


@dataclass
class TrainState:
    """Where a run stands; all of it is in every checkpoint."""

    step: int = 0  # optimizer steps taken, skipped ones included
    epoch: int = 0
    offset: int = 0  # bins of this epoch already used
    tokens: int = 0  # real tokens seen, padding excluded
    skipped_steps: int = 0


@dataclass(frozen=True)
class Base:
    """What the trained parameters belong to. Frozen weights are not saved, so a resume or export must find the same base."""

    path: str
    fingerprint: str
    num_layers: int | None = None  # of a debug run that kept only the first layers


def fingerprint(folder: Path | str, samples: int = 16, block: int = 4096) -> str:
    """Identity of a checkpoint's weights in seconds, also for 800 GB: sizes, safetensors headers and evenly spaced blocks of every file."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header))
            for index in range(samples):
                file.seek(8 + header + (size - 8 - header) * index // samples)
                digest.update(file.read(block))
            file.seek(max(0, size - block))
            digest.update(file.read(block))
    return digest.hexdigest()


class FlatShard(torch.Tensor):
    """Parts of a flattened parameter, as torch.distributed.checkpoint sees them (its `_Checkpointable` protocol, which asks for a tensor).

    A part holds elements offset .. offset + n of a tensor of `total` elements. FSDP1's shards are such parts, so they are saved as they are;
    a rank has several where a layer's experts are cut into units. Shares memory with the tensors [n]: loading fills the shards in place.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, offset: int, total: int):
        shard = tensor.detach().as_subclass(cls)
        shard.parts, shard.total = {offset: tensor.detach()}, total
        return shard

    def add(self, tensor: torch.Tensor, offset: int) -> None:
        assert offset not in self.parts
        self.parts[offset] = tensor.detach()

    def size(self) -> torch.Size:
        return torch.Size([self.total])

    def __create_write_items__(self, name: str, _) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(part), size=self.size()),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([offset]), sizes=part.size()) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[index.offset[0]]


def _add(state: dict, name: str, tensor: torch.Tensor, offset: int, total: int) -> None:
    if name in state:
        state[name].add(tensor, offset)
    else:
        state[name] = FlatShard(tensor, offset, total)


def _model_state(model: ShardedModel) -> dict[str, FlatShard]:
    state = {}
    for shard in model.trained_shards():
        _add(state, f"model.{shard.name}", shard.tensor, shard.offset, shard.shape.numel())
    return state


def _optimizer_state(optimizer: AdamW) -> dict[str, object]:
    """Moments by parameter. 8-bit ones are codes and scales of this rank's blocks and belong to this number of ranks."""
    state = {}
    for piece in optimizer.pieces:
        offset, total = piece.shard.offset + piece.start, piece.shard.shape.numel()
        for moment, tensor in optimizer.moments(piece).items():
            prefix = f"{moment}.{piece.shard.name}"
            if hasattr(tensor, "codes"):
                prefix += f".rank{dist.rank()}.from{offset}"
                state |= {f"{prefix}.codes": tensor.codes, f"{prefix}.scale": tensor.scale}
            elif piece.parameter.numel() != piece.shard.tensor.numel():  # the rest beside a quantised piece
                state[f"{prefix}.rank{dist.rank()}.from{offset}.rest"] = tensor
            else:
                _add(state, prefix, tensor, offset, total)
    return state


def _rng_state() -> dict:
    """Python's, numpy's and torch's generators of this rank."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
        state["cuda_others"] = [torch.cuda.get_rng_state(device) for device in dist.devices()[1:]]
    return state


def _set_rng_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
        for device, other in zip(dist.devices()[1:], state.get("cuda_others", []), strict=True):
            torch.cuda.set_rng_state(other, device)


def save(output_dir: Path, model: ShardedModel, optimizer: AdamW, state: TrainState, base: Base, extra: dict, keep: int) -> Path:
    """Writes `checkpoint-<step>` and removes older ones beyond `keep`. A collective; returns the folder.

    `extra` goes into trainer_state.json (batch size, optimizer's name, ...), compared at resume.
    """
    final = output_dir / f"checkpoint-{state.step:06d}"
    temporary = output_dir / f".saving-{final.name}"
    with dist.main_rank_first() as mine:
        if mine:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    # With copies ahead dcp waits for one device's stream only: parts on other GPUs could be written before they have arrived.
    ahead = {} if len(dist.devices()) == 1 else {"per_thread_copy_ahead": 0}
    try:
        dcp.save(
            _model_state(model) | _optimizer_state(optimizer) | {f"rng.rank{dist.rank()}": _rng_state()},
            storage_writer=dcp.FileSystemWriter(temporary, sync_files=True, single_file_per_rank=True, **ahead),
            process_group=dist.control_group(),
        )
    except (OSError, RuntimeError, CheckpointException) as error:  # torch names neither the file nor what is left of older ones
        raise RuntimeError(
            f"cannot write {temporary} (disk or quota full?); older checkpoints of {output_dir} are as they were: {error}"
        ) from error
    names = {s.name: [list(s.shape), str(s.tensor.dtype).removeprefix("torch.")] for s in model.trained_shards()}
    every = {name: entry for part in dist.gather_objects(names) for name, entry in part.items()}
    trained, adapters = model.trained_parameters(), model.adapters
    content = {
        "base": asdict(base),
        "parameters": every,
        "experts": {name: list(ids) for name, ids in trained.items() if ids is not None},
        "adapters": adapters and adapters.to_dict(),
    }
    named = model.gather_adapters() if adapters else {}
    with dist.main_rank_first() as mine:
        if mine:
            assert set(every) == set(trained)
            _write_json(temporary / "parameters.json", content)
            if adapters:
                lora.write_adapter(temporary / "adapter", named, adapters, base.path)
            counts = {"optimizer_steps": optimizer.steps, "world_size": dist.world_size()}
            _write_json(temporary / "trainer_state.json", asdict(state) | counts | extra)
            _publish(temporary, final)
            _remove_old(output_dir, keep)
    return final


def _write_json(path: Path, value) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """A rename or a new file survives a power cut only when its folder is flushed too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(temporary: Path, final: Path) -> None:
    _sync_folder(temporary)
    if final.exists():  # a save of the same step, e.g. by a run that was resumed from an older checkpoint
        _remove(final)
    os.rename(temporary, final)
    _sync_folder(final.parent)
    _write_json(final / COMPLETE, {})
    _sync_folder(final)


def _remove(folder: Path) -> None:
    """Renames first: a half-deleted folder must not look like a checkpoint."""
    doomed = folder.with_name(f"{_DELETING}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(f for f in output_dir.glob("checkpoint-*") if (f / COMPLETE).exists())


def _remove_old(output_dir: Path, keep: int) -> None:
    complete = complete_checkpoints(output_dir)
    newest = complete[-1]
    for folder in complete[:-keep]:
        _remove(folder)
    for folder in output_dir.glob("checkpoint-*"):  # left by a save that was killed between rename and COMPLETE
        if not (folder / COMPLETE).exists() and folder.name < newest.name:
            _remove(folder)
    for leftover in [*output_dir.glob(f"{_DELETING}*"), *output_dir.glob(".saving-*")]:
        shutil.rmtree(leftover)


def check_named(folder: Path) -> None:
    """ValueError where a checkpoint that was asked for by name is not one."""
    if not (folder / COMPLETE).exists():
        raise ValueError(f"resume: {folder} is not a complete checkpoint (no {COMPLETE} file in it)")


def find(output_dir: Path, resume: str) -> Path | None:
    """The checkpoint to resume from, the same on every rank: `auto` the newest complete one, `none` none, else the path itself.

    ValueError when a named path is no complete checkpoint.
    """
    if resume == "none":
        return None
    with dist.main_rank_first() as mine:
        found = None
        if mine and resume == "auto":
            found = next(reversed(complete_checkpoints(output_dir)), None)
        elif mine:
            found = Path(resume)
            check_named(found)
    return dist.broadcast_object(found)


def read_state(folder: Path) -> tuple[TrainState, dict]:
    """Position and everything else of a checkpoint's trainer_state.json."""
    content = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    fields = TrainState.__dataclass_fields__
    return TrainState(**{name: content.pop(name) for name in fields}), content


def load(folder: Path, model: ShardedModel, optimizer: AdamW, base: Base) -> tuple[TrainState, dict]:
    """Restores parameters, moments, RNG in place from `folder`. A collective; works on any number of ranks.

    Returns the position and the rest of trainer_state.json. ValueError when base model, trained parameters or optimizer differ.
    """
    saved = SavedParameters(folder)
    state, extra = read_state(folder)
    if saved.fingerprint != base.fingerprint:
        raise ValueError(
            f"{folder} was trained from {saved.base}, whose weights are not those of {base.path}. "
            f"Point model_name_or_path at the same base, or start anew with --resume none in another output_dir."
        )
    if saved.adapters != model.adapters:
        raise ValueError(f"{folder} was trained with other adapters: {_other_adapters(saved.adapters, model.adapters)}. Undo the change.")
    trained = model.trained_parameters()
    missing, unknown = sorted(trained.keys() - saved.names), sorted(saved.names - trained.keys())
    if missing or unknown:
        raise ValueError(f"{folder} holds other trained parameters: missing {missing[:10]}, not trained now {unknown[:10]}")
    if other := sorted(name for name, ids in trained.items() if saved.experts(name) != ids):
        raise ValueError(f"{folder} was trained with another expert_mask: other experts of {other[:10]}")
    same_world = extra["world_size"] == dist.world_size()
    optimizer.set_steps(extra["optimizer_steps"])
    tensors = _model_state(model) | _optimizer_state(optimizer)
    rank_bound = [name for name in tensors if f".rank{dist.rank()}." in name]
    if not same_world and any(dist.gather_objects(bool(rank_bound))):
        raise ValueError(
            f"{folder} has 8-bit moments, which belong to {extra['world_size']} ranks; this run has {dist.world_size()}. "
            "Resume on the same number of ranks."
        )
    if same_world:
        tensors[f"rng.rank{dist.rank()}"] = _rng_state()
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), process_group=dist.control_group())
    except dcp.api.CheckpointException as error:  # a BaseException: `except Exception` would let it through unexplained
        raise ValueError(f"cannot read {folder}: {error}") from error
    if same_world:
        _set_rng_state(tensors[f"rng.rank{dist.rank()}"])
    return state, extra


class SavedParameters:
    """Trained parameters of a checkpoint, for one process without a process group: export, evaluation, comparisons."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        if not (self.folder / COMPLETE).exists():
            raise ValueError(f"{folder} is not a complete checkpoint (no {COMPLETE} file in it)")
        content = json.loads((self.folder / "parameters.json").read_text(encoding="utf-8"))
        self.base: str = content["base"]["path"]
        self.fingerprint: str = content["base"]["fingerprint"]
        self.num_layers: int | None = content["base"]["num_layers"]
        self._entries: dict[str, list] = content["parameters"]
        self._experts: dict[str, list[int]] = content.get("experts", {})
        self.adapters = Adapters.from_dict(content.get("adapters"))

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def experts(self, name: str) -> tuple[int, ...] | None:
        """The experts whose rows this parameter holds; None: all of the parameter."""
        return tuple(self._experts[name]) if name in self._experts else None

    def read_many(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Whole parameters {name: tensor}, in their saved shape and dtype."""
        flat = {}
        for name in names:
            shape, dtype = self._entries[name]
            flat[f"model.{name}"] = torch.empty(torch.Size(shape).numel(), dtype=getattr(torch, dtype))
        if flat:
            dcp.load(flat, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        return {name: flat[f"model.{name}"].view(self._entries[name][0]) for name in names}

    def read(self, name: str) -> torch.Tensor:
        return self.read_many([name])[name]


def _other_adapters(saved: Adapters | None, now: Adapters | None) -> str:
    """What of two different ones differs, in the names of the options."""
    if saved is None or now is None:
        return f"lora_rank was {saved.rank if saved else 0}, now it is {now.rank if now else 0}"
    names = {"targets": "lora_target_modules", "layers": "trainable_layers", "quantization": "quantization"}
    differing = [(name, value, now.to_dict()[name]) for name, value in saved.to_dict().items() if value != now.to_dict()[name]]

    def all_if_none(value) -> str:
        return "all" if value is None else str(value)

    return "; ".join(f"{names.get(name, f'lora_{name}')} was {all_if_none(a)}, now it is {all_if_none(b)}" for name, a, b in differing)
