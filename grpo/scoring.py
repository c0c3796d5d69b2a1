"""Calls reward functions in worker processes with a time limit, and adds up what they say.

A function that crashes, returns something else than rewards, or hangs is an error (or, when asked, a None that is counted), never a
silent zero. A worker that hangs is killed and replaced.
"""

import logging
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Literal, NamedTuple

from common.config import option

log = logging.getLogger(__name__)


@dataclass
class RewardArguments:
    """What an answer is worth, and what becomes of it."""

    reward_funcs: list[str] = option(["grpo.rewards:choice_f1"], "Reward functions, module:function each; see grpo/rewards.py.")
    reward_weights: list[float] = option([], "Weight of each function, in their order. Default: 1 each.")
    reward_timeout: float = option(60.0, "Seconds that one call of a reward function (the answers to one prompt) may take.")
    reward_workers: int = option(4, "Processes that score.")
    on_reward_error: Literal["error", "none"] = option(
        "error", "A function that fails or hangs: stop and say why, or count its answers as None."
    )
    accuracy_reward: str | None = option(
        None, "Name of the reward that says whether an answer is right; collapse is judged on it. Default: the first of reward_funcs."
    )
    scale_rewards: Literal["group", "batch", "none", "gdpo"] = option(
        "group", "What a reward's distance from its group's mean is divided by; gdpo normalises each reward, then weighs: grpo/README.md."
    )
    std_floor: float = option(0.0, "Least standard deviation that is divided by: keeps a few hundredths from becoming a full signal.")
    mask_truncated_completions: bool = option(True, "Answers cut off at max_completion_length count in their group but are not trained on.")

    def __post_init__(self):
        self.reward_weights = self.reward_weights or [1.0] * len(self.reward_funcs)
        if not self.reward_funcs or len(set(self.reward_funcs)) != len(self.reward_funcs):
            raise ValueError(f"reward_funcs is {self.reward_funcs}; give each function once, at least one.")
        if len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(f"reward_weights has {len(self.reward_weights)} numbers for {len(self.reward_funcs)} reward_funcs.")
        if not self.reward_timeout > 0 or self.reward_workers < 1 or self.std_floor < 0:
            raise ValueError("reward_timeout and reward_workers must be positive, std_floor at least 0.")
        self.accuracy_reward = self.accuracy_reward or self.names()[0]
        if self.accuracy_reward not in self.names():
            raise ValueError(f"accuracy_reward is {self.accuracy_reward}; it must be one of {', '.join(self.names())}.")

    def names(self) -> list[str]:
        """A short name of each component: the function's, or its whole name where two share one."""
        short = [name.rpartition(":")[2] for name in self.reward_funcs]
        return [s if short.count(s) == 1 else name for s, name in zip(short, self.reward_funcs, strict=True)]


class Score(NamedTuple):
    rewards: dict[str, float | None]  # by component
    reward: float | None  # weighted sum of those that are there; None: no component has one


def combine(components: dict[str, float | None], weights: Sequence[float]) -> Score:
    present = [weight * value for weight, value in zip(weights, components.values(), strict=True) if value is not None]
    return Score(components, sum(present) if present else None)


class Worker:
    """One process that calls reward functions. It owns no GPU and imports no torch unless a function does."""

    def __init__(self, names: list[str], timeout: float):
        self.names = names
        here, there = Pipe()
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo.rewards", str(there.fileno()), *names],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            # REWARD_TIMEOUT: a function that waits for others (a judge) must be done before it is killed.
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "REWARD_TIMEOUT": str(timeout)},
        )
        there.close()
        self.connection = here

    def wait_until_ready(self, timeout: float) -> None:
        """ValueError when a function cannot be imported."""
        try:
            failure = self.connection.recv() if self.connection.poll(timeout) else f"the worker was not ready after {timeout:.0f} s"
        except EOFError:
            failure = "the worker died while it imported the reward functions"
        if failure is not None:
            raise ValueError(failure)

    def call(self, task: tuple, timeout: float) -> tuple[list[float | None] | dict[str, str] | None, str | None]:
        """(scores, or what `check_rows` says; None) or (None, what went wrong). After a hang or a death the worker is of no more use: `alive` is False."""
        try:
            self.connection.send(task)
            if self.connection.poll(timeout):
                return self.connection.recv()
            failure = f"no result after {timeout:g} s"
        except (EOFError, OSError):
            try:
                failure = f"the worker process died (exit code {self.process.wait(timeout=5)})"
            except subprocess.TimeoutExpired:
                failure = "the worker process closed its connection"
        self.close()
        return None, failure

    @property
    def alive(self) -> bool:
        return not self.connection.closed

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class RewardPool:
    """Scores answers with the functions of `args`. Used by one process of a run, as a context manager."""

    START_TIMEOUT = 300.0  # seconds; a function's module may import a lot from a slow disk

    def __init__(self, args: RewardArguments, *, hint: str = "on_reward_error: none would count such answers as not scored and go on"):
        """hint: what to do about a function that failed."""
        self.args, self.hint = args, hint
        self.failures = 0  # calls that failed so far (on_reward_error: none)
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers = [Worker(args.reward_funcs, args.reward_timeout) for _ in range(args.reward_workers)]
        try:
            for worker in self._workers:
                worker.wait_until_ready(self.START_TIMEOUT)
                self._idle.put(worker)
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for worker in self._workers:
            if worker.alive:
                worker.close()

    def score(self, groups: list[tuple[str, object, list[str], dict]]) -> list[list[Score]]:
        """Scores of each answer of each group (id, prompt, answers, columns of the row).

        RuntimeError names the function and the prompt where one failed and on_reward_error is `error`.
        """
        with ThreadPoolExecutor(len(self._workers)) as threads:
            jobs = [[threads.submit(self._call, name, group) for name in self.args.reward_funcs] for group in groups]
            results = []
            for group, futures in zip(groups, jobs, strict=True):
                columns = [future.result() for future in futures]
                rows = zip(*columns, strict=True)
                results.append([combine(dict(zip(self.args.names(), row, strict=True)), self.args.reward_weights) for row in rows])
                assert len(results[-1]) == len(group[2])
        return results

    def check(self, rows: list[tuple[str, dict]]) -> dict[str, str]:
        """{place: what is wrong} of those rows (place, columns) that a function with a `check` says it cannot score."""
        wrong: dict[str, str] = {}
        parts = [rows[first : first + 100] for first in range(0, len(rows), 100)]
        with ThreadPoolExecutor(len(self._workers)) as threads:
            for name in self.args.reward_funcs:

                def ask(part: list, name: str = name) -> dict[str, str] | None:
                    found, failure = self._ask((name, part), self.START_TIMEOUT)
                    if failure:
                        raise ValueError(f"reward function {name} could not check the rows: {failure}")
                    return found

                if ask([]) is not None:
                    for found in threads.map(ask, parts):
                        wrong |= {where: f"{name}: {text}" for where, text in found.items()}
        return wrong

    def _ask(self, task: tuple, timeout: float) -> tuple:
        """What a worker that is free answers; one that does not live through it is replaced."""
        worker = self._idle.get()
        try:
            return worker.call(task, timeout)
        finally:
            if not worker.alive:
                self._workers.remove(worker)
                worker = Worker(self.args.reward_funcs, self.args.reward_timeout)
                self._workers.append(worker)
                worker.wait_until_ready(self.START_TIMEOUT)
            self._idle.put(worker)

    def _call(self, name: str, group: tuple[str, object, list[str], dict]) -> list[float | None]:
        prompt_id, prompt, completions, columns = group
        count = len(completions)
        repeated = {key: [value] * count for key, value in (columns | {"id": prompt_id}).items()}
        scores, failure = self._ask((name, [prompt] * count, completions, repeated), self.args.reward_timeout)
        if failure is None:
            return scores
        message = f"reward function {name} failed on prompt {prompt_id}: {failure}"
        if self.args.on_reward_error == "error":
            raise RuntimeError(f"{message}. {self.hint}.")
        log.warning("%s; its %d answers are not scored by it", message, count)
        self.failures += 1
        return [None] * count
