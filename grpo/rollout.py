"""What every back-end of rollouts has in common: prompts in, sampled answers with log-probabilities out, and the record of both.

A back-end generates answers with the current weights: `grpo/twin.py` in the trainer's own process. Prompts and answers are tied by the
prompt's id and the number of the sample, never by their position.

    OUTPUT_DIR/rollouts/step-000012.jsonl   one line an answer, written before step 12 trains on it; answers of a stopped run, not yet
                                            all there: unfinished-000012.jsonl; of an evaluation after step 12: eval-000012.jsonl
"""

import hashlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from common import dist, rows
from common.chat import BadRow, Chat, normalise, template_options
from common.config import option
from common.server_http import Http

log = logging.getLogger(__name__)


@dataclass
class RolloutArguments:
    """How answers are drawn."""

    num_prompts_per_step: int = option(32, "Prompts of one rollout, over all ranks.")
    num_generations: int = option(8, "Answers to each prompt.")
    max_completion_length: int = option(512, "Tokens of one answer; a longer one is cut off. max_length holds prompt and answer.")
    temperature: float = option(1.0, "Sampling temperature; the trainer's log-probabilities use it too.")
    top_p: float = option(
        1.0,
        "Sample from the smallest set of tokens with this probability. Below 1 the engine's log-probabilities differ from the trainer's.",
    )
    rollout_backend: Literal["hf", "vllm"] = option("hf", "hf: in the trainer's own process; vllm: servers that vllm_servers names.")
    vllm_servers: list[str] = option([], "vllm: addresses of the servers, like http://node7:8000. Keep them inside the job's network.")
    rollout_lag: int = option(
        0, "vllm: 1 generates the next rollout while this one trains, one rollout off policy. Use a rollout_correction."
    )
    dynamic_sampling: bool = option(
        False, "Draw prompts until num_prompts_per_step groups carry signal; what is left over trains next time."
    )
    max_resample_times: int = option(3, "dynamic_sampling: most batches of num_prompts_per_step prompts that one rollout draws.")
    difficulty_file: str | None = option(
        None, "Pass rates of the prompts (lines with id, k, n, from python -m grpo.difficulty), for the collapse rate to be expected."
    )
    server_wait_minutes: float = option(
        10.0, "vllm: how long to wait when no server answers; then the run is saved and ends with an error."
    )
    rollout_batch_size: int = option(64, "hf: answers generated at a time on one rank.")
    eval_num_generations: int = option(1, "Evaluation. 1: greedy; more: so many samples at the training temperature.")
    eval_on_start: bool = option(False, "Evaluate before the first step too.")
    baseline_prompts: int = option(
        0, "Before the first step: answers of the untrained model to so many of the run's prompts, for python -m grpo.audit."
    )

    def __post_init__(self):
        for name in ("num_prompts_per_step", "max_completion_length", "max_resample_times", "rollout_batch_size", "eval_num_generations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.baseline_prompts < 0:
            raise ValueError(f"baseline_prompts is {self.baseline_prompts}; it cannot be negative.")
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations is {self.num_generations}; an answer is compared with others to the same prompt: at least 2."
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0, greedy answers to a prompt are all the same.")
        if not self.server_wait_minutes > 0:
            raise ValueError(f"server_wait_minutes is {self.server_wait_minutes}; it must be above 0.")
        if self.rollout_lag not in (0, 1):
            raise ValueError(f"rollout_lag is {self.rollout_lag}; it must be 0 or 1.")
        if (self.rollout_backend == "vllm") != bool(self.vllm_servers):
            raise ValueError(f"rollout_backend is {self.rollout_backend}, vllm_servers {self.vllm_servers or 'empty'}: they go together.")
        for url in self.vllm_servers:
            try:
                Http(url)
            except ValueError as error:
                raise ValueError(f"vllm_servers: {error}") from None
        if self.rollout_lag and self.rollout_backend != "vllm":
            raise ValueError(
                "rollout_lag: 1 needs rollout_backend: vllm; generation in the trainer's own process cannot overlap with training."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")


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


# ---- prompts -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Question:
    """One row of the data."""

    id: str
    prompt: str | list[dict]
    prompt_ids: list[int]
    columns: dict  # everything else in the row, handed to the reward functions
    where: str  # file:line

    def as_prompt(self) -> Prompt:
        return Prompt(self.id, self.prompt_ids)


NOT_COLUMNS = ("id", "prompt", "tools", "chat_template_kwargs")


def read_questions(
    files: list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    on_bad_row: str = "error",
    chat_template_kwargs: str | None = None,
) -> list[Question]:
    """The rows of JSON Lines or Parquet files: `prompt` (messages, or text that is taken as it is), `id` (else file:line), any columns.

    A prompt longer than `max_prompt_tokens` is dropped and counted. ValueError names file and line of a row that cannot be used, or of two
    rows with one id, unless `on_bad_row` is skip; and a file with no usable row.
    """
    chat = Chat(tokenizer, chat_template_kwargs=json.loads(chat_template_kwargs or "{}"))
    questions: dict[str, Question] = {}
    for file in files:
        dropped: Counter = Counter()
        before = len(questions)
        for line, row in rows.read_rows(file):
            try:
                if isinstance(row, BadRow):
                    raise row
                question = _question(row, rows.row_id(row, file, line), f"{file}:{line}", chat)
                if question.id in questions:
                    raise BadRow(f"id {question.id!r} is that of {questions[question.id].where} too")
            except BadRow as error:
                if on_bad_row == "error":
                    raise ValueError(f"{file}:{line}: {error} (on_bad_row=skip drops and counts such rows)") from error
                dropped["bad"] += 1
                continue
            if len(question.prompt_ids) > max_prompt_tokens:
                dropped["too long"] += 1
                continue
            questions[question.id] = question
        what = f"{len(questions) - before} prompts" + "".join(f", {count} {reason} dropped" for reason, count in dropped.items())
        if len(questions) == before:
            raise ValueError(
                f"{file} holds no prompt to use: {what}. A row needs `prompt`; a prompt may have {max_prompt_tokens} tokens "
                "(max_length less max_completion_length)."
            )
        log.info("%s: %s", file, what)
    return list(questions.values())


def scorable(questions: list[Question], wrong: dict[str, str], on_bad_row: str) -> list[Question]:
    """The questions without those of `wrong`, {file:line: what is wrong}; ValueError names the first unless `on_bad_row` is skip."""
    bad = [question for question in questions if question.where in wrong]
    if not bad:
        return questions
    first = f"{bad[0].where}: id {bad[0].id!r} cannot be scored: {wrong[bad[0].where]}"
    if on_bad_row == "error" or len(bad) == len(questions):
        raise ValueError(f"{first}. {len(bad)} of {len(questions)} rows are like that (on_bad_row=skip drops and counts such rows)")
    log.info("%d rows dropped that cannot be scored, the first: %s", len(bad), first)
    return [question for question in questions if question.where not in wrong]


def _question(row: dict, name: str, where: str, chat: Chat) -> Question:
    tokenizer, prompt = chat.tokenizer, row.get("prompt")
    if isinstance(prompt, str) and prompt:
        ids = [*chat.bos, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    elif isinstance(prompt, list) and prompt:
        if not tokenizer.chat_template:
            raise BadRow("the tokenizer has no chat template: put one beside it (chat_template.jinja), or give the prompt as text")
        messages = [normalise(message, index, chat.stops) for index, message in enumerate(prompt)]
        tools, options = template_options(row)
        try:
            text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **chat.kwargs | options)
        except Exception as error:  # a template raises what it likes
            raise BadRow(f"the chat template cannot render the prompt: {error}") from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        raise BadRow(f"a row needs `prompt`: messages or text; columns found: {', '.join(map(str, row)) or 'none'}")
    if not ids:
        raise BadRow("the prompt has no tokens")
    columns = {name: value for name, value in row.items() if name not in NOT_COLUMNS}
    return Question(name, prompt, ids, columns, where)


def fingerprint(questions: list[Question]) -> str:
    """Identity of the prompts in their order, for a resumed run."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(json.dumps([question.id, question.prompt_ids]).encode())
    return digest.hexdigest()[:16]


# ---- answers -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """One answer and all that is known about it."""

    question: Question
    completion: Completion
    text: str
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float = 0.0
    informative: bool = False  # scored, in a group whose rewards differ

    def line(self, step: int) -> dict:
        c = asdict(self.completion)
        return {
            "step": step,
            "id": self.question.id,
            "sample": self.completion.sample,
            "prompt": self.question.prompt,
            "prompt_ids": self.question.prompt_ids,
            "completion": self.text,
            **{name: c[name] for name in ("completion_ids", "logps")},
            "columns": self.question.columns,
            "rewards": self.rewards,
            "reward": self.reward,
            "advantage": self.advantage,
            **{name: c[name] for name in ("weight_versions", "finish_reason")},
        }


def rollout_path(output_dir: Path, kind: str, step: int) -> Path:
    return output_dir / "rollouts" / f"{kind}-{step:06d}.jsonl"


def read_lines(path: Path) -> list[dict]:
    """The answers in a file of rollouts/. ValueError names file and line of one that is torn."""
    lines = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error}). Restore the file, or resume an earlier checkpoint.") from error
    return lines


def completion_of(line: dict) -> Completion:
    versions = [tuple(span) for span in line["weight_versions"]]
    return Completion(line["id"], line["sample"], line["completion_ids"], line["logps"], line["finish_reason"], versions)


class StopPoll:
    """Says whether somebody asked for a stop, looking at the file system at most every few seconds."""

    def __init__(self, stop_file: Path, seconds: float = 2.0, in_training: bool = False):
        self.stop_file, self.seconds, self.in_training = stop_file, seconds, in_training
        self.seen, self._next = False, 0.0

    def __call__(self) -> bool:
        if not self.seen and time.monotonic() >= self._next:
            self.seen = self.stop_file.exists()
            self._next = time.monotonic() + self.seconds
            if not self.in_training:
                dist.rest()  # a rollout may take longer than a collective is allowed to
        return self.seen


class Ahead:
    """Answers to the next rollout's questions, generated in a thread with the weights of now while this process trains (rollout_lag: 1)."""

    def __init__(self, backend: RolloutBackend, questions: list[Question], num_generations: int, stop_file: Path, *, seed: int, **sampling):
        self.questions = questions
        poll = StopPoll(stop_file, in_training=True)
        prompts = [question.as_prompt() for question in questions]
        self.seconds = 0.0  # of generation, once it is over

        def generate() -> list[Completion]:
            start = time.perf_counter()
            try:
                return backend.generate(prompts, num_generations, seed=seed, poll=poll, **sampling)
            finally:
                self.seconds = time.perf_counter() - start

        self._executor = ThreadPoolExecutor(1)
        self._future = self._executor.submit(generate)

    def wait(self) -> None:
        """Until nothing is in flight any more; nothing else may use the back-end before."""
        wait([self._future])

    def take(self) -> list[Completion]:
        """What came back finished, on every rank. A collective; the back-end's error is raised here."""
        dist.rest()
        made, _ = finished_of(self._future.result)
        self._executor.shutdown()
        everything = [completion for part in dist.gather_objects(made) for completion in part if completion.finish_reason != "abort"]
        dist.beat()
        return everything


def finished_of(generate: Callable[[], list[Completion]]) -> tuple[list[Completion], RuntimeError | None]:
    """(completions, None), or (those that were finished, the error) where the back-end lost its engines and says so by carrying them."""
    try:
        return generate(), None
    except RuntimeError as error:
        if not hasattr(error, "completions"):
            raise
        log.warning("%s; %d answers are finished", error, len(error.completions))
        return error.completions, error


def collect(
    backend: RolloutBackend,
    questions: list[Question],
    num_generations: int,
    stop_file: Path,
    kept: Iterable[Completion] = (),
    *,
    version: int,
    seed: int,
    max_tries: int = 3,
    **sampling,
) -> tuple[list[Completion], bool]:
    """(`num_generations` completions to each question, in the questions' order, on every rank; stopped). A collective.

    `kept`: completions that are there already. When STOP appears meanwhile: the finished ones only, True. `version`: the engines' weights;
    where all engines are lost on the way they get them again, and the rest is asked for, `max_tries` times in all. Where none comes back
    the back-end's error is raised, with `completions`: all that were finished.
    """
    done = {(c.id, c.sample): c for c in kept}
    poll, stopped = StopPoll(stop_file), False
    dist.rest()
    for attempt in range(max_tries):
        missing: dict[int, list[Prompt]] = {}  # number of samples wanted -> prompts
        for question in questions:
            if count := sum((question.id, sample) not in done for sample in range(num_generations)):
                missing.setdefault(count, []).append(question.as_prompt())
        if stopped or not missing:
            break
        if attempt:
            try:
                backend.sync(version)
            except RuntimeError as error:
                error.completions = list(done.values())
                raise
        for count, prompts in sorted(missing.items()):
            call_seed = random.Random(f"{seed} {count} {attempt}").getrandbits(53)
            made, lost = finished_of(lambda: backend.generate(prompts, count, seed=call_seed, poll=poll, **sampling))  # noqa: B023 - called at once
            everything = dist.gather_objects((made, lost is not None, poll.seen))
            _add(done, [c for part, _, _ in everything for c in part], prompts, count, num_generations)
            if getattr(lost, "waited", False):  # on all ranks
                lost.completions = list(done.values())
                raise lost
            stopped = any(seen for _, _, seen in everything)
            if stopped or any(lost for _, lost, _ in everything):
                break
        else:
            break
    dist.beat()
    completions = [done[q.id, s] for q in questions for s in range(num_generations) if (q.id, s) in done]
    if not stopped and len(completions) != len(questions) * num_generations:
        without = [q.id for q in questions if any((q.id, s) not in done for s in range(num_generations))]
        raise RuntimeError(f"the rollout came back without answers to {len(without)} prompts: {', '.join(without[:10])}")
    return completions, stopped


def _add(done: dict[tuple[str, int], Completion], made: list[Completion], prompts: list[Prompt], count: int, num_generations: int) -> None:
    """Puts new answers, `count` to each prompt, in the places that are still free."""
    free = {p.id: [s for s in range(num_generations) if (p.id, s) not in done] for p in prompts}
    for completion in made:
        if completion.id not in free or not 0 <= completion.sample < count:
            raise RuntimeError(f"the rollout returned an answer nobody asked for: id {completion.id}, sample {completion.sample}")
        sample = free[completion.id][completion.sample]
        if (completion.id, sample) in done:
            raise RuntimeError(f"the rollout returned sample {completion.sample} of prompt {completion.id} twice")
        if completion.finish_reason != "abort":
            done[completion.id, sample] = replace(completion, sample=sample)
