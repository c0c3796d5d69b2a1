"""Rollouts in the trainer's own process: the back-end `hf`, which needs no server.

`generate` of transformers cannot run on the sharded model, and its packed attention sees no padding mask, so left-padded prompts would be
silently wrong. So for each rollout every rank fills a plain twin of the model (compute dtype, sdpa attention), one unit at a time, generates
its share of the answers and frees the twin again. The whole model must fit beside the shards on every device.
"""

import logging
import random
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from common import dist, run
from common.config import ModelArguments
from common.decode import sample_batch
from common.fsdp import model_name
from common.metrics import free_memory
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
        mine = samples_of_rank(prompts, num_generations)
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


def samples_of_rank(prompts: list[Prompt], num_generations: int) -> list[tuple[Prompt, int]]:
    """(prompt, number of the sample) that this rank draws. Long prompts first and neighbours of one length together: little padding, and the
    ranks get equal shares."""
    order = sorted(prompts, key=lambda prompt: -len(prompt.prompt_ids))
    return [(prompt, sample) for prompt in order for sample in range(num_generations)][dist.rank() :: dist.world_size()]


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
