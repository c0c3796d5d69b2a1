"""What every back-end of rollouts has in common: prompts in, sampled answers with log-probabilities out, and the record of both.

A back-end generates answers with the current weights: `grpo/twin.py` in the trainer's own process. Prompts and answers are tied by the
prompt's id and the number of the sample, never by their position.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol


class Prompt(NamedTuple):
    """A prompt as a back-end sees it."""

    id: str
    prompt_ids: list[int]


@dataclass
class Completion:
    """One sampled answer."""

    id: str  # of its prompt
    sample: int  # 0 .. num_generations - 1
    completion_ids: list[int]  # the stop token included where one was sampled
    logps: list[float]  # of each id, in the distribution it was drawn from (temperature and top_p applied); greedy: at temperature 1
    finish_reason: Literal["stop", "length", "abort"]  # abort: cut off by a stop request; never trained on
    weight_versions: list[tuple[int, int, int]]  # (version, start, end): ids[start:end] were sampled with these weights


@dataclass
class SyncReport:
    """What one push of weights did."""

    seconds: float = 0.0
    bytes: int = 0
    tensors: int = 0
    checks: dict = field(default_factory=dict)  # what proves that the weights arrived, by name


class RolloutBackend(Protocol):
    """Generates answers with the weights of the last `sync`. Every method is a collective: all ranks call it, with equal arguments."""

    def start(self) -> None:
        """Connects, allocates, checks that the model fits. Called once, before the first `sync`."""

    def sync(self, version: int) -> SyncReport:
        """Makes the trainer's current weights those of the engine and proves it; `version` is the number of optimizer steps behind them.

        Raises RuntimeError, on all ranks, where the proof fails."""

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
        """`num_generations` answers to each prompt. temperature 0: greedy.

        Each rank returns those that it made or fetched: every (id, sample) comes back on exactly one rank, in any order (rank 0 may return
        all of them and the others none); the loop gathers them over the control group. `poll`, called at least every few seconds while
        waiting, says whether this rank has seen a request to stop: then return soon, with what is finished and with what is not as `abort`
        (or left out). No NCCL collective may be pending while a rank generates or waits: ranks do not finish together.
        """

    def close(self) -> None:
        """Ends connections and frees what it holds; engines keep running."""
