"""Rollouts in the trainer's own process: the back-end `hf`, which needs no server.

`generate` of transformers cannot run on the sharded model, and its packed attention sees no padding mask, so left-padded prompts would be
silently wrong. So for each rollout every rank fills a plain twin of the model (compute dtype, sdpa attention), one unit at a time, generates
its share of the answers and frees the twin again. The whole model must fit beside the shards on every device.
"""

import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import TopPLogitsWarper

from common import dist, run
from common.config import ModelArguments
from common.fsdp import model_name
from common.skeleton import build_skeleton
from common.weights import release_free_memory
from grpo.rollout import Completion, Prompt, SyncReport

log = logging.getLogger(__name__)


class HfBackend:
    """`RolloutBackend` in process. Each rank returns the answers that it generated itself."""

    def __init__(self, model: run.Model, args: ModelArguments, *, stop_ids: list[int], pad_id: int, batch_size: int):
        """stop_ids: any of them ends an answer. batch_size: answers generated at a time on one rank."""
        self.model, self.stop_ids, self.pad_id, self.batch_size = model, stop_ids, pad_id, batch_size
        self.dtype = getattr(torch, args.compute_dtype)
        self.twin = build_skeleton(
            args.model_name_or_path,
            attn_implementation="sdpa",
            num_layers=args.debug_num_layers,
            decoder_layer=args.decoder_layer,
            dtype=self.dtype,
        ).eval()
        # The checkpoint's own sampling defaults (Qwen3: top_k 20, top_p 0.8) would silently change the distribution.
        self.twin.generation_config = GenerationConfig(eos_token_id=stop_ids, pad_token_id=pad_id)
        self.version = 0

    def start(self) -> None:
        pass

    def sync(self, version: int) -> SyncReport:
        """Nothing to send: the twin is filled from the trainer's shards when it is needed."""
        self.version = version
        return SyncReport()

    def close(self) -> None:
        pass

    def generate(
        self,
        prompts: list[Prompt],
        num_generations: int,
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        poll: Callable[[], bool],
    ) -> list[Completion]:
        # Long prompts first and neighbours of one length together: little padding, and the ranks get equal shares.
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].prompt_ids), i))
        mine = [(prompts[i], sample) for i in order for sample in range(num_generations)][dist.rank() :: dist.world_size()]
        self._check_fit(max(len(prompt.prompt_ids) for prompt in prompts) + max_new_tokens, min(self.batch_size, max(len(mine), 1)))
        self._fill()
        try:
            return sample_all(
                self.twin,
                mine,
                self.batch_size,
                self.stop_ids,
                self.pad_id,
                version=self.version,
                seed=seed,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=max_new_tokens,
                poll=poll,
            )
        finally:
            self._free()

    def _check_fit(self, length: int, batch_size: int) -> None:
        """RuntimeError, with figures, where the twin and its cache have no room beside what is in memory now. The same answer on all ranks."""
        weights = sum(p.numel() * p.element_size() for p in self.twin.parameters())
        config = self.twin.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = (
            getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        layers = sum(kind != "linear_attention" for kind in kinds)
        cache = 2 * layers * heads * width * self.dtype.itemsize * length * batch_size
        free = free_memory()
        short = torch.tensor(float(weights + cache > free), device=dist.device())
        if dist.all_sum(short).item():
            raise RuntimeError(
                f"rollout_backend: hf does not fit: the twin's weights take {weights / 2**30:.1f} GiB on every device and the cache of "
                f"{batch_size} answers of {length} tokens {cache / 2**30:.1f} GiB; rank {dist.rank()} has {free / 2**30:.1f} GiB free. "
                "Lower rollout_batch_size if the cache is what is too large; otherwise the model needs a rollout engine of its own."
            )

    @torch.no_grad()
    def _fill(self) -> None:
        """Copies the trainer's weights into the twin, one unit in flight: a collective."""
        sharded, converter = self.model.sharded, self.model.converter
        for index, unit in enumerate(sharded.units):
            for name, tensor in sharded.gather_unit(index, self.dtype).items():
                assert name in unit.model_names, name
                module, leaf = owner(self.twin, name)
                if leaf in module._buffers:
                    module._buffers[leaf] = tensor.clone()
                else:  # a clone: the gathered tensor is a view of its whole unit
                    module._parameters[leaf] = nn.Parameter(tensor.to(module._parameters[leaf].dtype, copy=True), requires_grad=False)
        for name, source in converter.tied.items():
            module, leaf = owner(self.twin, name)
            module._parameters[leaf] = self.twin.get_parameter(source)
        for name, buffer in sharded.root.named_buffers():  # rotary frequencies, which are in no checkpoint
            module, leaf = owner(self.twin, model_name(name))
            if module is not None and leaf in module._buffers and module._buffers[leaf].is_meta:
                module._buffers[leaf] = buffer.clone()
        left = [name for name, tensor in (*self.twin.named_parameters(), *self.twin.named_buffers()) if tensor.is_meta]
        assert not left, f"the twin has no {left}"

    def _free(self) -> None:
        for module in self.twin.modules():
            for tensors in (module._parameters, module._buffers):
                for leaf, tensor in tensors.items():
                    if tensor is not None:
                        meta = torch.empty_like(tensor, device="meta")
                        tensors[leaf] = nn.Parameter(meta, requires_grad=False) if tensors is module._parameters else meta
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        release_free_memory()


def owner(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """The module that holds a parameter or buffer, and its name there; None where the model has no such module."""
    path, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(path), leaf
    except AttributeError:
        return None, leaf


def free_memory() -> int:
    """Bytes that this rank may still allocate on its device."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dist.local_world_size()
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 // dist.local_world_size()


class SampledLogps(LogitsProcessor):
    """Applies temperature and top_p, and keeps the log-probability of every sampled token.

    The scores of one step are looked up when the next step shows which token was drawn, so only one [B, V] matrix is kept; asking
    `generate` for all scores would keep one a token.
    """

    def __init__(self, temperature: float, top_p: float):
        self.temperature = temperature or 1.0  # greedy: the distribution as it is
        self.top_p = TopPLogitsWarper(top_p) if top_p < 1 else None
        self.logps: list[Tensor] = []  # [B] a step
        self._last: Tensor | None = None  # [B, V]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._last is not None:
            self._look_up(input_ids[:, -1])
        scores = scores.float() / self.temperature
        if self.top_p is not None:
            scores = self.top_p(input_ids, scores)
        self._last = scores.log_softmax(dim=-1)
        return scores

    def _look_up(self, ids: Tensor) -> None:
        self.logps.append(self._last.gather(1, ids[:, None])[:, 0])

    def of(self, answers: Tensor) -> Tensor:
        """Log-probabilities [B, L] of the answers [B, L] that came out."""
        if len(self.logps) < answers.shape[1]:
            self._look_up(answers[:, -1])
        return torch.stack(self.logps[: answers.shape[1]], dim=1)


class PollStop(StoppingCriteria):
    """Ends all answers of the batch when somebody asks for a stop; says once a minute how far they are."""

    def __init__(self, poll: Callable[[], bool], max_new_tokens: int):
        self.poll, self.max_new_tokens = poll, max_new_tokens
        self.tokens, self.reported = 0, time.monotonic()

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        self.tokens += 1
        if time.monotonic() > self.reported + 60:
            self.reported = time.monotonic()
            log.info("rollout: token %d of at most %d of %d answers", self.tokens, self.max_new_tokens, len(input_ids))
        return torch.full((len(input_ids),), self.poll(), dtype=torch.bool, device=input_ids.device)


def sample_all(
    model: PreTrainedModel,
    wanted: list[tuple[Prompt, int]],
    batch_size: int,
    stop_ids: list[int],
    pad_id: int,
    *,
    version: int,
    seed: int,
    poll: Callable[[], bool],
    **sampling,
) -> list[Completion]:
    """One answer for each (prompt, number of the sample), `batch_size` at a time; after a stop those that are there by then. Torch's
    generators are left as they were."""
    completions: list[Completion] = []
    with torch.random.fork_rng(devices=dist.devices() if torch.cuda.is_available() else []):
        torch.manual_seed(random.Random(f"{seed} {dist.rank()}").getrandbits(63))
        reported = time.monotonic()
        for first in range(0, len(wanted), batch_size):
            if poll():
                break
            batch = wanted[first : first + batch_size]
            answers = sample_batch(model, [prompt.prompt_ids for prompt, _ in batch], stop_ids, pad_id, poll=poll, **sampling)
            for (prompt, sample), (ids, logps, reason) in zip(batch, answers, strict=True):
                completions.append(Completion(prompt.id, sample, ids, logps, reason, [(version, 0, len(ids))]))
            if time.monotonic() > reported + 60:
                reported = time.monotonic()
                log.info("rollout: %d of %d answers of this rank", len(completions), len(wanted))
    return completions


@torch.no_grad()
def sample_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    stop_ids: list[int],
    pad_id: int,
    *,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    poll: Callable[[], bool],
) -> list[tuple[list[int], list[float], str]]:
    """(ids, log-probability of each, finish reason) of one answer to each prompt, drawn from torch's generator; temperature 0: greedy."""
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    logps = SampledLogps(temperature, top_p)
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0} if temperature > 0 else {"do_sample": False}
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=stop_ids, pad_token_id=pad_id, **sampling),
        logits_processor=LogitsProcessorList([logps]),
        stopping_criteria=StoppingCriteriaList([PollStop(poll, max_new_tokens)]),
    )
    answers = output[:, width:]
    values = logps.of(answers).tolist()
    stops = set(stop_ids)
    results = []
    for answer, row in zip(answers.tolist(), values, strict=True):
        end = next((i + 1 for i, token in enumerate(answer) if token in stops), None)
        reason = "stop" if end is not None else "length" if len(answer) >= max_new_tokens else "abort"
        end = len(answer) if end is None else end
        results.append((answer[:end], row[:end], reason))
    return results
