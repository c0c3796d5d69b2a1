"""What a run writes about itself: metrics.jsonl always, Weights & Biases when asked; model FLOPs for the utilisation figure."""

import json
import logging
import os
import time
import uuid
from pathlib import Path

import torch
from torch import nn

from common import dist
from common.families import Family
from common.freeze import Selection

log = logging.getLogger(__name__)

# Dense bf16 TFLOP/s of the data sheets. Keys are looked for in the device's name, in this order.
PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "B200": 2250.0, "A100": 312.0, "A800": 312.0}


def peak_flops() -> float | None:
    """FLOP/s in bf16 of this rank's device; None where the data sheet is not known here (a CPU)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((value * 1e12 for key, value in PEAK_TFLOPS.items() if key in name), None)


class ModelFlops:
    """FLOPs of forward and backward, from the shapes of a model that is still on meta.

    A token and active matrix element cost 2 forward, 2 for the gradient that goes on down and 2 for the weight's own: 6 where everything
    trains, 4 for a frozen matrix above something that trains, 2 below the lowest layer that does. The head is included, the embedding
    look-up not; routed experts count top_k / num_experts of their elements. Full attention adds 2 * heads * (qk_dim + v_dim) a pair of
    tokens that see each other, 6 with backward (causal: half the square). Recomputation under gradient checkpointing is not counted (it
    would flatter the figure), nor is the recurrence of Gated DeltaNet (under 2 % of its layer).
    """

    def __init__(self, model: nn.Module, family: Family, selection: Selection | None = None, detach_moe_output: bool = False):
        config = model.config.get_text_config()
        lowest = 0 if selection is None or selection.embeddings else selection.lowest_layer
        paths = model.decoder_layer_paths
        below = paths if lowest is None else paths[:lowest]
        moe = family.experts.rpartition(".")[0]

        def cost(name: str, parameter: nn.Parameter) -> float:
            if lowest is None or name.startswith(tuple(path + "." for path in below)):
                return 2.0
            if (
                detach_moe_output
                and f".{moe}." in name
                and hasattr(model.get_submodule(name.partition(f".{moe}.")[0] + f".{moe}"), "experts")
            ):
                return 2.0
            return 6.0 if selection is None or name in selection.names else 4.0

        self.per_token = 0.0
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or parameter is model.get_input_embeddings().weight:
                continue
            share = 1.0
            if f".{family.experts}." in name:
                share = config.num_experts_per_tok / parameter.shape[0]
            self.per_token += cost(name, parameter) * parameter.numel() * share
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:  # tied: the head still multiplies
            self.per_token += cost("lm_head.weight", None) * model.get_output_embeddings().weight.numel()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        backward = [lowest is not None and number >= lowest for number in range(len(kinds))]
        factor = sum(6.0 if trains else 2.0 for kind, trains in zip(kinds, backward, strict=True) if kind != "linear_attention")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        qk_dim = getattr(config, "qk_head_dim", None) or head_dim
        v_dim = getattr(config, "v_head_dim", None) or head_dim
        self.per_pair = factor * config.num_attention_heads * (qk_dim + v_dim)

    def of(self, tokens: int, squared_lengths: float) -> float:
        """FLOPs of `tokens` tokens whose segments' squared lengths sum to `squared_lengths`."""
        return self.per_token * tokens + self.per_pair * squared_lengths / 2


def squared_lengths(cu_seq_lens: torch.Tensor) -> float:
    """Sum of the squared lengths of a packed row's segments; the work of attention grows with it."""
    return (cu_seq_lens[1:] - cu_seq_lens[:-1]).double().square().sum().item()


def memory_gib(device: torch.device | None = None) -> float:
    """Peak memory of `device` (this rank's) since the last call; on a CPU what the process holds now."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def free_memory(device: torch.device | None = None) -> int:
    """Bytes that this process may still allocate on `device` (this rank's)."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dist.local_world_size()
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 // dist.local_world_size()


def memory_figures() -> dict[str, float]:
    """Peak memory of this process's fullest device, and of each one where it has several."""
    each = [memory_gib(device) for device in dist.devices()]
    figures = {"perf/memory_gib": max(each)}
    return figures if len(each) == 1 else figures | {f"perf/memory_gib_gpu{number}": peak for number, peak in enumerate(each)}


class MetricsLog:
    """Appends one JSON line a call to metrics.jsonl, on rank 0; elsewhere does nothing."""

    def __init__(self, output_dir: Path, report_to: str, run_name: str, config: dict, resumed_step: int):
        self._file = self._wandb = None
        if not dist.is_main():
            return
        path = output_dir / "metrics.jsonl"
        _drop_lines_after(path, resumed_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        if report_to == "wandb":
            self._wandb = _start_wandb(output_dir, run_name, config)

    def log(self, step: int, values: dict[str, float | int | None]) -> None:
        if self._file is None:
            return
        line = {"step": step} | {name: value for name, value in values.items() if value is not None}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(line, step=step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _drop_lines_after(path: Path, step: int) -> None:
    """A killed run has logged steps that its checkpoint does not know; the resumed run does them again."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = []
    for line in lines:
        try:
            logged = json.loads(line)["step"]
        except json.JSONDecodeError:  # only the last line can be cut short, by a kill in mid-write
            log.warning("%s: dropped an incomplete line: %.80s", path, line)
            continue
        if logged <= step:
            kept.append(line)
    if len(kept) != len(lines):
        log.info("%s: %d lines of steps after %d dropped; they are trained again", path, len(lines) - len(kept), step)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)


def _start_wandb(output_dir: Path, run_name: str, config: dict):
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "report_to: wandb needs wandb. Install it: bash env/setup.sh train --with wandb (WANDB_MODE=offline works without network)"
        ) from error
    id_file = output_dir / "wandb_id"  # a requeued job continues the same curve
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
    return wandb.init(name=run_name, id=id_file.read_text(encoding="utf-8"), resume="allow", dir=output_dir, config=config)


class Performance:
    """Figures under perf/ of the steps since the last call, waiting for the device first where one is used."""

    def __init__(self, flops: ModelFlops):
        self.flops = flops
        self.restart()

    def restart(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def of_steps(self, steps: int, tokens: float, squares: float) -> dict[str, float | None]:
        """Mean seconds of `steps` steps; rate and utilisation by the last step's `tokens` and sum of squared segment lengths, over all ranks."""
        seconds = (self._now() - self._start) / steps
        self.restart()
        peak = peak_flops()
        flops = self.flops.of(int(tokens), squares)
        return {
            "perf/seconds": seconds,
            "perf/tokens_per_second": tokens / seconds,
            "perf/mfu": flops / seconds / (peak * dist.world_size() * len(dist.devices())) if peak else None,
        } | memory_figures()


def max_load(load: torch.Tensor) -> float:
    """Load of the busiest expert over the mean of its layer, in the worst layer; 1 is balanced. A collective; load [layers, experts]."""
    load = dist.all_sum(load)
    return (load.max(dim=1).values / load.mean(dim=1)).max().item()
