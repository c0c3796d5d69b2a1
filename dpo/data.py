"""Rows of preferences -> pairs of token sequences; bins of whole pairs -> micro-batches.

A row holds `chosen` and `rejected`, and in one of these forms the prompt that both answer:

    prompt, chosen, rejected      strings (no chat template), or messages; a message list may go with plain-string answers
    chosen, rejected              two conversations: what they share at the beginning is the prompt (a `prompt` column beside whole
                                  conversations is checked against it)

The dataset keeps two examples a pair, 2p the chosen and 2p + 1 the rejected one, and never parts them: both go through the model in one
packed row, so that what else is in the row (routing included) is the same for both. Shapes: P pairs, T tokens of a micro-batch.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from common import dist
from common.chat import BadRow, Chat, Example, Rendered
from common.data import NO_TARGET, Bins, PackedBatch, Part, RowRule, Settings, TokenizedDataset, collate

ANSWERS = ("chosen", "rejected")
ASKERS = ("system", "developer", "user")


class PairRule(RowRule):
    """A row of preferences gives two examples with one prompt, or nothing."""

    group = 2

    def render(self, chat: Chat, row: dict) -> list[Rendered]:
        """The chosen text, then the rejected one; an empty answer gives none."""
        prompt, answers = split_pair(row)
        shared = {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name) is not None}
        rendered = []
        for name, answer in zip(ANSWERS, answers, strict=True):
            try:
                texts = chat.render({"prompt": prompt, "completion": answer, **shared}) if answer else []
            except BadRow as error:
                raise BadRow(f"{name} (as the completion of the prompt): {error}") from error
            if len(texts) > 1:
                raise BadRow(
                    f"{name}: the chat template rewrites earlier turns of an answer once a later one follows, so the answer is not one "
                    "sequence. Let the prompt end with the last user message, so that the answer is one assistant turn"
                )
            rendered += texts
        return rendered

    def keep(self, chat: Chat, renders: list[Rendered], examples: list[Example], settings: Settings, part: Part) -> list[Example]:
        if len(examples) < 2:
            part.dropped["empty_answer"] += 1
            return []
        if prompt_ids(examples[0]) != prompt_ids(examples[1]):  # one answer's first token had merged with the end of the prompt
            examples = chat.encode(renders, apart=True)
        chosen, rejected = examples
        if prompt_ids(chosen) != prompt_ids(rejected):
            part.dropped["prompts_differ"] += 1
            return []
        if chosen.ids == rejected.ids:
            part.dropped["identical_answers"] += 1
            return []
        if len(chosen.ids) + len(rejected.ids) <= settings.max_length:
            return [chosen, rejected]
        if settings.over_long == "drop":
            part.dropped["over_long"] += 1
            return []
        limit = common_limit(len(chosen.ids), len(rejected.ids), settings.max_length)
        chosen, rejected = (Example(ids[:limit], mask[:limit]) for ids, mask in examples)
        if not (any(chosen.mask) and any(rejected.mask)):
            part.dropped["prompt_over_long"] += 1
            return []
        if chosen.ids == rejected.ids:
            part.dropped["identical_once_truncated"] += 1
            return []
        part.truncated += 1
        return [chosen, rejected]


def split_pair(row: dict) -> tuple[str | list, tuple]:
    """(prompt, (chosen, rejected)) of a row, the answers without the prompt. Raises BadRow."""
    missing = [name for name in ANSWERS if row.get(name) is None]
    if missing:
        raise BadRow(f"a row of preferences needs 'chosen' and 'rejected'; columns found: {', '.join(map(str, row)) or 'none'}")
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if type(chosen) is not type(rejected) or not isinstance(chosen, (str, list)):
        raise BadRow("'chosen' and 'rejected' must be both strings, or both lists of messages")
    if isinstance(chosen, list) and (prompt is None or is_conversation(chosen) or is_conversation(rejected)):
        return split_conversations(prompt, chosen, rejected)
    if not prompt:
        raise BadRow("'prompt' is missing or empty: there is nothing that the two strings answer")
    return prompt, (chosen, rejected)


def is_conversation(messages: list) -> bool:
    """Whether a list of messages begins with a question, as a whole conversation does and an answer does not."""
    return bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") in ASKERS


def split_conversations(prompt, chosen: list, rejected: list) -> tuple[list, tuple[list, list]]:
    chosen, rejected = ([_without_nulls(message) for message in messages] for messages in (chosen, rejected))
    if chosen == rejected:  # the last turn stays an answer; the pair is dropped as identical once it is tokenised
        shared = len(chosen) - 1
    else:
        shorter = min(len(chosen), len(rejected))
        shared = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    for name, messages in zip(ANSWERS, (chosen, rejected), strict=True):
        role = messages[shared].get("role") if shared < len(messages) and isinstance(messages[shared], dict) else "assistant"
        if role != "assistant":
            raise BadRow(
                f"the conversations part at message {shared}, which is not an assistant turn in {name} ({role}): they share no prompt"
            )
    if shared < 1:
        raise BadRow("the conversations have no message in common: without a prompt the answers cannot be compared")
    begin = chosen[:shared]
    if isinstance(prompt, list) and prompt and [_without_nulls(message) for message in prompt] != begin:
        raise BadRow("'prompt' is not what the conversations in 'chosen' and 'rejected' begin with")
    if isinstance(prompt, str) and prompt and not any(message.get("content") == prompt for message in begin):
        raise BadRow("no message that 'chosen' and 'rejected' share holds the text of 'prompt'")
    return begin, (chosen[shared:], rejected[shared:])


def _without_nulls(message):
    return {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message


def prompt_ids(example: Example) -> list[int]:
    """The ids before the first one that carries loss."""
    return example.ids[: example.mask.index(True)] if True in example.mask else example.ids


def common_limit(first: int, second: int, room: int) -> int:
    """The largest number of tokens that each of two sequences may keep so that together they fit into `room`; one number for both."""
    return max(room - min(first, second), room // 2)


# ---- micro-batches


@dataclass
class PairBatch:
    """Whole pairs in one packed row: segment 2p is the chosen sequence of pair p, 2p + 1 its rejected one."""

    packed: PackedBatch
    weights: torch.Tensor  # [P] float64, the row's weight; 0 for a rank that only takes part in the forward pass
    lengths: torch.Tensor  # [2 P] int64, tokens of each answer
    reference: torch.Tensor  # [2 P] float64, summed log-probability of each answer under the untrained model

    def to(self, device) -> "PairBatch":
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)[1:]}
        return replace(self, packed=self.packed.to(device), **moved)

    @property
    def chosen_tokens(self) -> float:
        """Weighted number of tokens of the chosen answers."""
        return (self.weights * self.lengths[0::2]).sum().item()


def collate_pairs(
    dataset: TokenizedDataset, bins: Bins, bin_ids, sums: np.ndarray | None, *, pad_to: int | None = None, zero_weight: bool = False
) -> PairBatch:
    """The pairs of some bins as one micro-batch, with the reference `sums` [examples] of `reference.py` (None: while they are computed)."""
    packed = collate(dataset, bins, bin_ids, pad_to=pad_to, zero_weight=zero_weight)
    rows = packed.rows
    assert len(rows) % 2 == 0 and all(a % 2 == 0 and b == a + 1 for a, b in zip(rows[0::2], rows[1::2], strict=True)), rows
    starts = packed.cu_seq_lens[: len(rows)].numpy()
    return PairBatch(
        packed=packed,
        weights=torch.from_numpy(np.asarray(dataset.weights[rows[0::2]], np.float64)) * (not zero_weight),
        lengths=torch.from_numpy(np.add.reduceat((packed.targets[0] != NO_TARGET).numpy().astype(np.int64), starts))[: len(rows)],
        reference=torch.zeros(len(rows), dtype=torch.float64) if sums is None else torch.from_numpy(np.asarray(sums[rows], np.float64)),
    )


def rows_of_rank(bin_ids, size: int) -> list[tuple[np.ndarray, bool]]:
    """[(up to `size` bins, filler)] of this rank, as many on every rank, because every forward is a collective.

    filler: the rank has run out of bins; it takes part with bins that another rank counts.
    """
    groups = [bin_ids[start : start + size] for start in range(0, len(bin_ids), size)]
    places = range(dist.rank(), -(-len(groups) // dist.world_size()) * dist.world_size(), dist.world_size())
    return [(groups[min(place, len(groups) - 1)], place >= len(groups)) for place in places]


def answer_sums(logps: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Summed log-probability [2 P] of each answer from that of each token [T].

    In float64: the loss takes differences of sums over thousands of tokens, and fp32 would lose in them what a step changes.
    """
    lengths = batch.cu_seq_lens.diff().long()
    return torch.segment_reduce(logps.double(), "sum", lengths=lengths, unsafe=True)[: len(batch.rows)]
