"""What every method does before and after its loop: start a run, build the sharded model, stop on request, write the final model."""

import fcntl
import json
import logging
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from common import attention, checkpoint, config, data, dist, fp8, freeze, lora
from common.checkpoint import Base, TrainState
from common.config import DataArguments, ModelArguments, TrainArguments
from common.data import Bins, PackedBatch, RowRule, TokenizedDataset
from common.export import Exporter
from common.families import Family, family_of
from common.fsdp import Options, Precision, ShardedModel, load_and_shard
from common.logprobs import NO_TARGET, LogpModel
from common.lora import Adapters
from common.metrics import ModelFlops
from common.optim import AdamW
from common.router import RouterStats
from common.skeleton import build_skeleton, read_config
from common.tensor_files import Checkpoint
from common.weights import Converter

log = logging.getLogger(__name__)

STOP, DONE = "STOP", "DONE"


_lock = None  # the open file whose lock says that this process uses its output_dir


def start(output_dir: Path, args: TrainArguments) -> None:
    """Process group, folder of the run, log, seeds. ValueError where the folder cannot be used or another process uses it.

    A STOP left by the attempt before is removed; nothing else of an earlier run is touched before `begin`.
    """
    dist.init(args.setup_timeout_minutes)
    with dist.main_rank_first() as mine:
        if mine:
            _claim(output_dir)
            if args.resume not in ("auto", "none"):
                checkpoint.check_named(Path(args.resume))  # before a large model is loaded
    dist.watch_stacks(dist.evidence_folder(output_dir), 0.8 * 60 * args.setup_timeout_minutes)
    dist.setup_logging(output_dir / "run.log")
    seed = args.seed * 1_000_003 + dist.rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    log.info("run %s on %d ranks of %d nodes, torch %s", output_dir, dist.world_size(), dist.num_nodes(), torch.__version__)


def _claim(output_dir: Path) -> None:
    """Takes the run's folder for this process, until it ends: two jobs in one folder would overwrite each other's checkpoints."""
    global _lock
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        _lock = open(output_dir / ".lock", "w")  # noqa: SIM115 - held until the process ends
        (output_dir / STOP).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir {output_dir} cannot be used: {error}. Give a folder that can be written.") from error
    try:
        fcntl.flock(_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"output_dir {output_dir} is in use by another run. Wait for it, stop it (touch {output_dir / STOP}), or give another."
        ) from error
    except OSError as error:  # file systems mounted without locks
        log.warning("%s cannot be locked (%s): make sure that no other job uses it", output_dir, error)


def begin(output_dir: Path, *all_arguments) -> None:
    """Called when a run has been accepted, after `resume`: its options become the folder's config.yaml, and it is no longer DONE."""
    with dist.main_rank_first() as mine:
        if mine:
            (output_dir / DONE).unlink(missing_ok=True)
            config.save_resolved(output_dir / "config.yaml", *all_arguments)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer. ValueError where the folder is no checkpoint or has none: transformers would look for its name on the hub."""
    read_config(path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((Path(path) / name).is_file() for name in names):
        raise ValueError(f"{path} holds no tokenizer (none of {', '.join(names)}). Copy it from the model it was trained from.")
    return AutoTokenizer.from_pretrained(path)


def stop_requested(output_dir: Path) -> bool:
    """Whether somebody asked this run to save and stop. Only rank 0's answer counts: all ranks must agree on the step."""
    step_starts()
    return dist.is_main() and (output_dir / STOP).exists()


_step_started = _slowest_step = 0.0  # seconds; what comes after one look for STOP runs to its end before the next


def step_starts() -> None:
    """STOP has just been looked for. Loops whose steps look for it in between call this themselves."""
    global _step_started
    _step_started = time.monotonic()


def check_lead(save_seconds: float) -> float:
    """How many seconds a stop of this run takes. Warns when the batch script's signal leaves less (STOP_LEAD_SECONDS, from #SBATCH --signal)."""
    needed = _slowest_step + 1.5 * save_seconds
    lead = os.environ.get("STOP_LEAD_SECONDS")
    if lead and needed > float(lead):
        dist.warn(
            log,
            "a stop takes up to %.0f s (slowest step %.0f s, 1.5 x %.0f s for the save), but the job is told only %s s before its limit: "
            "raise #SBATCH --signal=B:USR1@SECONDS, or steps since the last checkpoint are lost.",
            needed, _slowest_step, save_seconds, lead,
        )  # fmt: skip
    return needed


def agree(*values: float) -> list[float]:
    """Sums each value over all ranks, in float64."""
    return dist.all_sum(torch.tensor(values, dtype=torch.float64, device=dist.device())).tolist()


def load_data(
    files: list[str], tokenizer: PreTrainedTokenizerBase, args: DataArguments, output_dir: Path, rule: RowRule | None = None
) -> tuple[TokenizedDataset, Bins]:
    """Tokenised rows of `files` and the bins they are packed into. Rank 0 tokenises once, into a cache; the others open it."""
    cache = Path(args.data_cache_dir or output_dir / "data_cache")
    path = None
    with dist.main_rank_first() as mine:
        if mine:
            dataset = data.tokenize_files(
                files,
                tokenizer,
                max_length=args.max_length,
                over_long=args.over_long,
                on_bad_row=args.on_bad_row,
                cache_dir=cache,
                num_workers=args.data_workers,
                chat_template_kwargs=json.loads(args.chat_template_kwargs or "{}"),
                rule=rule,
            )
            path = dataset.path
    dataset = TokenizedDataset.open(dist.broadcast_object(path))
    bins = data.pack(dataset.lengths, args.max_length, args.packing, group=rule.group if rule else 1)
    if not len(dataset):
        raise ValueError(f"{', '.join(files)}: no row carries loss. {dataset.summary()}")
    log.info("%s: %s; %d bins of %d tokens", ", ".join(files), dataset.summary(), len(bins), args.max_length)
    return dataset, bins


@dataclass
class Model:
    """The sharded model with what saving and exporting it needs."""

    sharded: ShardedModel
    converter: Converter
    source: Checkpoint
    base: Base
    flops: ModelFlops
    num_experts_layers: int  # MoE layers; 0 for a dense model
    saved: TrainState | None = None  # of the run's newest checkpoint, if this process wrote or read it


def unit_options(args: ModelArguments, skeleton: PreTrainedModel, family: Family, trainable: str) -> Options:
    """What trains and how the rest is kept, from the options of a run; logged. Adapters are added to the skeleton here."""
    adapters = Adapters.of(args) if trainable != "none" else None
    if adapters is not None:
        adapters, selection = lora.add(skeleton, adapters, args.trainable_layers, skeleton.dtype)
    else:
        selection = freeze.select(
            skeleton,
            family,
            trainable=trainable,
            trainable_layers=args.trainable_layers,
            expert_mask=args.expert_mask,
            freeze_router=args.freeze_router,
        )
    log.info("%s", freeze.describe(selection, skeleton))
    if args.detach_moe_output:
        dist.warn(
            log,
            "detach_moe_output: the gradient is an approximation: what would reach a layer's attention through the mixture of experts of its "
            "own layer, or of any layer above, is left out. The loss is exact.",
        )
    groups = {"world": None, "node": dist.local_world_size()}
    ranks = groups[args.frozen_shard_group] if args.frozen_shard_group in groups else int(args.frozen_shard_group)
    return Options(selection, family, args.detach_moe_output, args.expert_units_per_layer, ranks, adapters)


def check_unquantised(args: ModelArguments) -> None:
    if args.quantization != "none":
        raise ValueError(f"quantization: {args.quantization} is for python -m grpo.train.")


def build_model(args: ModelArguments, trainable: str | None = None) -> Model:
    """Loads the base checkpoint, sharded as it loads. A collective; minutes for a large model.

    trainable: instead of the options' own, e.g. `none` for a model that is only run.
    """
    path = args.model_name_or_path
    check_unquantised(args)
    attention.register()
    skeleton = build_skeleton(
        path, attn_implementation=args.attn_implementation, num_layers=args.debug_num_layers, decoder_layer=args.decoder_layer
    )
    family = family_of(skeleton.config)
    attention.prepare(skeleton)
    source = Checkpoint(path)
    converter = Converter(skeleton, source)
    router_stats = RouterStats(skeleton, family, with_logits=args.load_balancing_coef > 0)
    if args.load_balancing_coef > 0 and not router_stats.routers:
        raise ValueError(f"load_balancing_coef is {args.load_balancing_coef}, but {path} is a dense model without routers. Set it to 0.")
    options = unit_options(args, skeleton, family, trainable or args.trainable)
    flops = ModelFlops(skeleton, family, options.selection, args.detach_moe_output)
    precision = Precision(getattr(torch, args.master_dtype), getattr(torch, args.compute_dtype), getattr(torch, args.reduce_dtype))
    sharded = load_and_shard(
        skeleton,
        converter,
        precision,
        wrap_root=lambda model: LogpModel(model, router_stats=router_stats, compile=args.compile),
        gradient_checkpointing=args.gradient_checkpointing,
        compile_layers=args.compile,
        options=options,
    )
    sharded.remember_frozen()
    with dist.main_rank_first() as mine:
        identity = checkpoint.fingerprint(path) if mine else ""
    base = Base(str(Path(path).resolve()), dist.broadcast_object(identity), args.debug_num_layers)
    return Model(sharded, converter, source, base, flops, len(router_stats.routers))


# Mean |difference| of log-probabilities that rounding explains; a leak between rows moves real models by tenths.
PACKING_TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-3}


@torch.no_grad()
def check_packing(model: ShardedModel, batch: PackedBatch, compute_dtype: str = "bfloat16") -> None:
    """Compares log-probabilities of two rows inside a packed bin with those of each row alone, on the user's own data and model.

    RuntimeError when rows see each other. All ranks pass the same batch: a collective of three forward passes.
    """
    batch = batch.to(dist.device())
    starts = batch.cu_seq_lens.tolist()
    segments = [(a, b) for a, b in zip(starts, starts[1:], strict=False) if b <= batch.num_tokens]
    if len(segments) < 2:
        log.info("packing check: the first bin holds one row only, nothing to compare")
        return
    model.train(False)
    packed = model(batch.model_inputs(), batch.targets, num_tokens=batch.num_tokens).logps
    worst = 0.0
    for a, b in {segments[1], segments[-1]}:
        alone = _only(batch, a, b)
        logps = model(alone.model_inputs(), alone.targets, num_tokens=b - a).logps[: b - a]
        learned = batch.targets[0, a:b] != NO_TARGET
        if learned.any():
            worst = max(worst, (packed[a:b] - logps)[learned].abs().mean().item())
    model.train()
    limit = PACKING_TOLERANCE[getattr(torch, compute_dtype)]
    if not worst <= limit:
        raise RuntimeError(
            f"packed rows differ from the same rows alone: mean |log-probability difference| {worst:.4f}, allowed {limit}. "
            "Rows of a bin see each other; train with another attn_implementation."
        )
    log.info("packing check: rows in a bin equal rows alone to %.2g", worst)


def _only(batch: PackedBatch, start: int, end: int) -> PackedBatch:
    """Tokens start..end as the first segment of a row of the same length (so that a compiled layer is not compiled again), the rest padding."""
    length = batch.input_ids.shape[1]
    rest = length - (end - start)
    boundaries = [0, end - start, length] if rest else [0, length]
    positions = torch.cat([torch.arange(end - start), torch.arange(rest)])[None].to(batch.position_ids)
    return replace(
        batch,
        input_ids=batch.input_ids.roll(-start, dims=1),
        targets=batch.targets.roll(-start, dims=1),
        position_ids=positions,
        seq_idx=(torch.arange(length)[None] >= end - start).to(batch.seq_idx),
        cu_seq_lens=torch.tensor(boundaries).to(batch.cu_seq_lens),
        max_length=max(batch.max_length, rest),
        num_tokens=end - start,
    )


def micro_batches(window: Sequence[int], args: TrainArguments) -> list[Sequence[int]]:
    """The bins of each of this rank's micro-batches in one step's `window`. Micro-batch m of all ranks takes neighbouring bins."""
    size = args.per_device_train_batch_size
    starts = ((m * dist.world_size() + dist.rank()) * size for m in range(args.gradient_accumulation_steps))
    return [window[start : start + size] for start in starts]


def batch_identity(args: TrainArguments) -> dict:
    """What a resumed run must share with its checkpoint for its data position to mean the same."""
    bins = dist.world_size() * args.gradient_accumulation_steps * args.per_device_train_batch_size
    return {"bins_per_step": bins, "seed": args.seed, "optim": args.optim}


def resume(output_dir: Path, args: TrainArguments, model: Model, optimizer: AdamW, data_identity: dict) -> TrainState:
    """The state of the newest complete checkpoint (or the one asked for), loaded; a fresh one when there is none. A collective."""
    folder = checkpoint.find(output_dir, args.resume)
    if folder is None:
        if args.resume == "none" and checkpoint.complete_checkpoints(output_dir):
            raise ValueError(f"{output_dir} has checkpoints of another run. Give another output_dir, or resume them with --resume auto.")
        return TrainState()
    now = batch_identity(args) | data_identity
    _, saved = checkpoint.read_state(folder)
    for name, value in now.items():
        if saved.get(name) == value or (name == "bins_per_step" and args.allow_batch_change):
            continue
        what = f"{folder} was trained with {name} = {saved.get(name)}; now it is {value}"
        if name == "data":
            what = f"{folder} was trained on other data than these files (contents compared by hash), or with another template or tokenizer"
        why = "The position in the data would not mean the same."
        if name in ("reward_funcs", "reward_weights", "accuracy_reward"):
            why = "Answers that this run still has to train on were scored by it."
        advice = "--allow_batch_change resumes anyway." if name == "bins_per_step" else "Undo the change, or give another output_dir."
        raise ValueError(f"{what}. {why} {advice}")
    state, _ = checkpoint.load(folder, model.sharded, optimizer, model.base)
    model.saved = replace(state) if folder.resolve().parent == output_dir.resolve() else None
    log.info("resumed %s at step %d, epoch %d, bin %d", folder, state.step, state.epoch, state.offset)
    return state


class StepGuard:
    """The end of every step: clip, check on all ranks together, update or skip, zero the gradients.

    A step whose loss or gradient is not finite is skipped by all ranks and counted; too many in a row end the run.
    """

    def __init__(self, model: ShardedModel, optimizer: AdamW, args: TrainArguments):
        self.model, self.optimizer, self.args = model, optimizer, args
        self.in_a_row = 0
        self.first = True

    def step(self, loss: float, lr: float, rows: Callable[[], str]) -> tuple[float, bool]:
        """`loss` must be the same on every rank. `rows` names the step's rows for the message. Returns (gradient norm, skipped)."""
        global _slowest_step
        grad_norm = self.model.clip_grad_norm(self.args.max_grad_norm).item()
        skip = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if skip:
            self.in_a_row += 1
            dist.warn(log, "step skipped: loss %s, gradient norm %s. Its rows: %s", loss, grad_norm, rows())
            if self.in_a_row >= self.args.max_skipped_steps:
                raise RuntimeError(f"{self.in_a_row} steps in a row were not finite. Rows of the last one: {rows()}")
        else:
            self.in_a_row = 0
            self.optimizer.step(lr)
        self.optimizer.zero_grad()
        if not self.first:  # the first one compiles
            _slowest_step = max(_slowest_step, time.monotonic() - _step_started)
        if self.first:  # loading, compiling and the first step are over: from now on a long wait is a fault
            self.first = False
            dist.set_timeout(self.args.collective_timeout_minutes)
            dist.watch_stacks(dist.evidence_folder(Path(self.args.output_dir)), 0.8 * 60 * self.args.collective_timeout_minutes)
        dist.beat()
        return grad_norm, skip


def step_line(step: int, values: dict) -> str:
    """One line of the log for one step."""
    shown = {
        "loss": ".4f",
        "grad_norm": ".3f",
        "learning_rate": ".3g",
        "perf/tokens_per_second": ".0f",
        "perf/mfu": ".3f",
        "perf/memory_gib": ".1f",
    }
    return f"step {step} " + " ".join(
        f"{name.removeprefix('perf/')} {values[name]:{form}}" for name, form in shown.items() if values.get(name) is not None
    )


def save(output_dir: Path, args: TrainArguments, model: Model, optimizer: AdamW, state: TrainState, data_identity: dict) -> None:
    """A checkpoint of the run as it stands. A collective.

    Nothing is written when the newest checkpoint is this very state (STOP right after a save): replacing it would leave a moment without it.
    """
    if model.saved == state:
        return
    dist.rest()
    start = time.monotonic()
    folder = checkpoint.save(
        output_dir, model.sharded, optimizer, state, model.base, batch_identity(args) | data_identity, args.save_total_limit
    )
    model.saved = replace(state)
    seconds = time.monotonic() - start
    log.info("saved %s in %.1f s; a stop takes up to %.0f s", folder, seconds, check_lead(seconds))
    dist.beat()


def check_frozen(model: Model) -> None:
    """The end of every run: what does not train is, byte for byte, what was loaded. RuntimeError on every rank where it is not. A collective."""
    dist.rest()
    failure = None
    count = size = 0
    try:
        count, size = model.sharded.check_frozen()
    except RuntimeError as error:
        failure = str(error)
    failures = [text for text in dist.gather_objects(failure) if text]
    if failures:
        raise RuntimeError(failures[0])
    log.info("frozen weights and buffers are unchanged: %d tensors, %.2f GiB on rank 0", count, size / 2**30)
    dist.beat()


def finish(output_dir: Path, args: TrainArguments, model: Model, state: TrainState, *, trained: bool) -> None:
    """What ends a run that reached its last step: frozen bytes checked, final/ written, DONE. `trained`: steps were made, so an older final/ is stale."""
    if state.skipped_steps:
        what = "no weight was trained" if state.skipped_steps == state.step else "their warnings above say why"
        dist.warn(log, "%d of %d steps were skipped: %s", state.skipped_steps, state.step, what)
    check_frozen(model)
    if args.export_final and (trained or not (output_dir / "final").exists()):
        export(output_dir / "final", model)
    with dist.main_rank_first() as mine:
        if mine:
            (output_dir / DONE).touch()


def export(output: Path, model: Model) -> None:
    """Writes the model as a Hugging Face folder, one unit at a time: all ranks gather what trained, one rank of node (unit mod nodes) writes
    it beside the base's bytes of all that did not.

    Every written file is read back and its bytes compared with the live parameters'. A collective.
    """
    dist.rest()
    with dist.main_rank_first() as mine:
        if mine:
            shutil.rmtree(output, ignore_errors=True)  # of the same run, before it was given more steps
    exporter = Exporter(model.converter, model.source, output, trained=model.sharded.trained_experts())
    hashes = {}
    for index, unit in enumerate(model.sharded.units):
        # Masters are cast before the gather, unless the base holds some of the unit's trained tensors in more than bf16.
        trained = [name for name in unit.model_names if name in exporter.trained]
        plain = all(model.converter.loaded_dtype(name) in (torch.bfloat16, fp8.DTYPE) for name in trained)
        named = model.sharded.gather_trained(index, torch.bfloat16 if plain else None)
        if dist.rank() == (index % dist.num_nodes()) * dist.local_world_size():
            hashes |= exporter.write_unit(index, named)
        del named  # before the next unit is gathered
    if dist.is_main():
        hashes |= exporter.copy_untouched()
    exporter.verify(hashes)
    dist.barrier()
    with dist.main_rank_first() as mine:
        if mine:
            exporter.finish()
    log.info("exported %s", output)
    if report := exporter.report_errors():
        log.info("%s", report)
    dist.beat()
