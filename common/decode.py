"""Answers to a batch of prompts with transformers' `generate`: left padding, stop tokens, sampling that no checkpoint's defaults touch."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import TopPLogitsWarper

log = logging.getLogger(__name__)


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
            log.info("generate: token %d of at most %d of %d answers", self.tokens, self.max_new_tokens, len(input_ids))
        return torch.full((len(input_ids),), self.poll(), dtype=torch.bool, device=input_ids.device)


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
