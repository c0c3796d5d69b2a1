"""Rewards from a language model that judges: first whether an answer is medically right, then, only if it is, how helpful it is.

    export JUDGE_CONFIG=judge.yaml      # grpo/judge.example.yaml; the workers that score read it
    reward_funcs: [grpo.judge:gated]                                                  r = a (1 + alpha h) + 0.05 format
    reward_funcs: [grpo.judge:accuracy, grpo.judge:helpfulness], reward_weights: [1, 0.2]     the same in two components

a is 0 or 1, h between 0 and 1 and asked for only where a is 1: no wording can lift a wrong answer above a right one. What the judge did
not say (an endpoint that fails, an answer that is not what was asked for) is None with a reason, never 0; an empty answer is wrong without
asking. Thinking (up to </think>) is not shown to the judge.

    python -m grpo.judge check --config judge.yaml --answers runs/a/rollouts/step-000001.jsonl      scores saved answers, prints what it finds
    python -m grpo.judge report judge_log.jsonl         share of None by reason, correlation of length and helpfulness, cost
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import rows
from common.chat import BadRow
from common.jsonl import AppendLog, refuse_overwriting
from grpo import rewards
from grpo.endpoint import Endpoint, EndpointConfig, EndpointError, Request, from_mapping, read_mapping
from grpo.formats import format_rule
from grpo.prompt_files import read_prompt

log = logging.getLogger(__name__)

VARIABLE = "JUDGE_CONFIG"
WINDOW, LEAST = 200, 50  # last answers of one worker that max_failures is about, and how many there must be
TEMPLATES = Path(__file__).with_name("judge_templates")
LANGUAGES = ("en", "ja")

ACCURACY = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "correct": {"type": "boolean"}, "harmful": {"type": "boolean"}},
    "required": ["reason", "correct", "harmful"],
    "additionalProperties": False,
}
HELPFULNESS = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "integer", "enum": [1, 2, 3, 4, 5]}},
    "required": ["reason", "score"],
    "additionalProperties": False,
}


@dataclass
class JudgeConfig:
    endpoint: dict
    language: str = "en"
    templates: str | None = None  # folder with accuracy.md and helpfulness.md; default: those shipped for the language
    accuracy: str = "judge"  # or a reward function, module:function: right where it gives at least 1
    reference: list[str] = field(default_factory=lambda: ["answer"])  # columns that hold the right answer
    alpha: float = 0.2  # what full helpfulness adds to a right answer
    format: str | None = None  # a reward function whose form (grpo/formats.py) earns format_reward
    format_reward: float = rewards.FORMAT_REWARD
    seconds: float = 50.0  # for one call of a function; less than reward_timeout
    thinking: bool = False  # the chat template opens <think> itself: an answer without </think> never came to its end
    max_failures: float = 0.5  # share of the last answers without a verdict from which on the run ends
    log: str | None = None  # JSON Lines: what was judged, and why not

    def __post_init__(self):
        if self.language not in LANGUAGES:
            raise ValueError(f"language is {self.language}; templates are shipped for {', '.join(LANGUAGES)}")
        if not 0 <= self.alpha < 1 or not self.seconds > 0:
            raise ValueError(f"alpha is {self.alpha} and seconds {self.seconds}; alpha must lie in [0, 1), seconds must be positive")
        if not 0 < self.max_failures <= 1:
            raise ValueError(f"max_failures is {self.max_failures}; it must be above 0, and at most 1 (never ends the run)")
        if not 0 <= self.format_reward < 1:
            raise ValueError(f"format_reward is {self.format_reward}; from 1 on, the form alone would outweigh a right answer")


@dataclass
class Verdict:
    """What is known about one answer. `failure`: why the rest is not."""

    accuracy: float | None = None
    helpfulness: float | None = None  # 0 where accuracy is 0: nobody was asked
    failure: str | None = None  # "accuracy: timeout"


class Judge:
    """A configuration with its templates, endpoint and log."""

    def __init__(self, path: str):
        content = read_mapping(path)
        self.config = from_mapping(JudgeConfig, content, path)
        if not isinstance(self.config.endpoint, dict):
            raise ValueError(f"{path}: endpoint must hold base_url, model and so on")
        self.endpoint = Endpoint(from_mapping(EndpointConfig, self.config.endpoint, f"{path}: endpoint"))
        folder = Path(self.config.templates or TEMPLATES / self.config.language)
        fields = {"question", "answer"}
        self.templates = {
            name: read_prompt(folder / f"{name}.md", fields, frozenset({"reference"})) for name in ("accuracy", "helpfulness")
        }
        self.rule = None if self.config.accuracy == "judge" else rewards.load_function(self.config.accuracy)
        self.format = None
        if self.config.format is not None:
            self.format = format_rule(self.config.format)
            if self.format is None:
                raise ValueError(f"{path}: no form is known for format: {self.config.format}; give it an attribute format_rule")
        self._recent: deque[str | None] = deque(maxlen=WINDOW)
        self._log = AppendLog(self.config.log) if self.config.log else None
        if self._log is not None:
            digest = hashlib.sha256("".join(map("".join, self.templates.values())).encode()).hexdigest()[:16]
            self._log.add({"config": asdict(self.config), "templates": digest, "process": os.getpid(), "time": int(time.time())})

    def judge(self, prompts, completions: list[str], columns: dict, *, helpfulness: bool) -> list[Verdict]:
        """A verdict on each answer; equal answers are asked about once."""
        until = time.monotonic() + self.config.seconds
        answers = [answer_of(text, self.config.thinking) for text in completions]
        verdicts = [Verdict() for _ in answers]
        with self._turn(prompts, answers):
            self._accuracy(prompts, completions, answers, columns, verdicts, until)
        for verdict in verdicts:
            if verdict.accuracy == 0:
                verdict.helpfulness = 0.0
        if helpfulness:
            asked = {i: answer for i, answer in enumerate(answers) if verdicts[i].accuracy == 1}
            for i, (data, failure) in self._ask("helpfulness", HELPFULNESS, prompts, asked, columns, until).items():
                if failure is None:
                    verdicts[i].helpfulness = (data["score"] - 1) / 4
                else:
                    verdicts[i].failure = f"helpfulness: {failure}"
        return verdicts

    def _accuracy(self, prompts, completions, answers, columns, verdicts, until) -> None:
        if self.rule is not None:
            scores = rewards.check_scores(self.config.accuracy, self.rule(prompts, completions, **columns), len(completions))
            for verdict, score in zip(verdicts, scores, strict=True):
                verdict.accuracy = None if score is None else float(score >= 1)
                verdict.failure = "accuracy: no opinion" if score is None else None
            return
        asked = {i: answer for i, answer in enumerate(answers) if answer}
        for i in set(range(len(answers))) - set(asked):
            verdicts[i].accuracy = 0.0
        for i, (data, failure) in self._ask("accuracy", ACCURACY, prompts, asked, columns, until).items():
            if failure is None:
                verdicts[i].accuracy = float(data["correct"] and not data["harmful"])
            else:
                verdicts[i].failure = f"accuracy: {failure}"

    def _ask(self, stage, schema, prompts, asked: dict[int, str], columns, until) -> dict[int, tuple[dict | None, str | None]]:
        """{index: (data, None) or (None, reason)}."""
        unique = list(dict.fromkeys(asked.values()))
        index_of = {answer: min(i for i in asked if asked[i] == answer) for answer in unique}
        requests = []
        for answer in unique:
            i = index_of[answer]
            texts = {"question": question_text(prompts[i]), "reference": self._reference(columns, i), "answer": answer}
            requests.append(Request(self.templates[stage].messages(**texts), schema))
        replies = dict(zip(unique, self.endpoint.complete(requests, until=until), strict=True))
        return {i: (replies[answer].data, replies[answer].failure) for i, answer in asked.items()}

    def _reference(self, columns: dict, i: int) -> str:
        parts = []
        for name in self.config.reference:
            if name not in columns:
                raise ValueError(f"the judge's `reference` names column {name}; the row has {', '.join(columns) or 'no columns'}")
            value = columns[name][i]
            parts.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        if "choices" in columns and isinstance(columns["choices"][i], list):
            letters = (f"{chr(ord('a') + n)}. {choice}" for n, choice in enumerate(columns["choices"][i]))
            parts.append("\n".join(letters))
        return "\n".join(parts)

    @contextlib.contextmanager
    def _turn(self, prompts, answers) -> Iterator[None]:
        """Two functions that want the same verdicts at the same time pay once: the second finds them in the cache."""
        if self.endpoint.config.cache is None or self.rule is not None:
            yield
            return
        number = int(hashlib.sha256(json.dumps([prompts, answers], default=str).encode()).hexdigest(), 16) % 64
        with open(f"{self.endpoint.config.cache}.lock-{number:02d}", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:  # a file system without locks: at worst a verdict is paid for twice
                log.debug("no lock beside %s: %s", self.endpoint.config.cache, error)
            yield

    def record(self, function: str, columns: dict, completions: list[str], verdicts: list[Verdict]) -> None:
        """What became of one call, in the log; failures in the run's log as well. EndpointError where most answers have no verdict any more."""
        prompt_id = next(iter(columns.get("id", [])), None)
        failures = Counter(verdict.failure for verdict in verdicts if verdict.failure)
        if failures:
            reasons = ", ".join(f"{count} {reason}" for reason, count in failures.most_common())
            log.warning("judge: %d of %d answers to %s have no reward: %s", failures.total(), len(verdicts), prompt_id, reasons)
        if self._log is not None:
            counters = self.endpoint.counters
            self._log.add(
                {
                    "function": function, "id": prompt_id, "process": os.getpid(), "time": int(time.time()),
                    "accuracy": [verdict.accuracy for verdict in verdicts], "helpfulness": [verdict.helpfulness for verdict in verdicts],
                    "chars": [len(answer_of(text, self.config.thinking)) for text in completions], "failures": dict(failures),
                    "total": {"requests": counters.requests, "cached": counters.cached, "tries": counters.tries, "tokens_in": counters.tokens_in,
                              "tokens_out": counters.tokens_out, "cost": counters.cost},
                }
            )  # fmt: skip
        self._recent.extend(verdict.failure for verdict in verdicts)
        failed = [failure for failure in self._recent if failure]
        if len(self._recent) >= LEAST and len(failed) > self.config.max_failures * len(self._recent):
            raise EndpointError(
                f"the judge gave no verdict on {len(failed)} of the last {len(self._recent)} answers (mostly {Counter(failed).most_common(1)[0][0]}); "
                "a run without rewards learns nothing. What is judged is in the cache: the same command goes on when the endpoint answers."
            )


def answer_of(text: str, thinking: bool = False) -> str:
    """An answer without what was thought before it; "" where thinking never ended. thinking: it began in the prompt."""
    if "</think>" in text:
        return text.rpartition("</think>")[2].strip()
    return "" if thinking or text.lstrip().startswith("<think>") else text.strip()


def question_text(prompt) -> str:
    """Text of a prompt: a conversation's turns without the system message, the role named where there are several."""
    if isinstance(prompt, str):
        return prompt
    turns = [(m["role"], m["content"] if isinstance(m["content"], str) else json.dumps(m["content"], ensure_ascii=False)) for m in prompt]
    turns = [turn for turn in turns if turn[0] not in ("system", "developer")] or turns
    return turns[0][1] if len(turns) == 1 else "\n\n".join(f"[{role}]\n{text}" for role, text in turns)


@functools.cache
def _judge(path: str) -> Judge:
    return Judge(path)


def current() -> Judge:
    """The judge of this process, read once. ValueError without a configuration."""
    if not os.environ.get(VARIABLE):
        raise ValueError(f"export {VARIABLE}=judge.yaml before the run (grpo/judge.example.yaml shows one)")
    return _judge(os.environ[VARIABLE])


# ---- reward functions ----------------------------------------------------------------------------------------------------------------


def gated(prompts, completions, **columns) -> list[float | None]:
    """a (1 + alpha h) + format_reward where the form is right; None where a, or h of a right answer, is not known."""
    judge = current()
    verdicts = judge.judge(prompts, completions, columns, helpfulness=True)
    judge.record("gated", columns, completions, verdicts)
    results = []
    for verdict, text in zip(verdicts, completions, strict=True):
        if verdict.accuracy is None or verdict.helpfulness is None:
            results.append(None)
            continue
        form = judge.config.format_reward if judge.format is not None and judge.format[0](text) else 0.0
        results.append(verdict.accuracy * (1 + judge.config.alpha * verdict.helpfulness) + form)
    return results


def accuracy(prompts, completions, **columns) -> list[float | None]:
    """1 for a medically right answer, 0 for another, None where the judge did not say."""
    judge = current()
    verdicts = judge.judge(prompts, completions, columns, helpfulness=False)
    judge.record("accuracy", columns, completions, verdicts)
    return [verdict.accuracy for verdict in verdicts]


def helpfulness(prompts, completions, **columns) -> list[float | None]:
    """(score - 1) / 4 of a right answer, 0 of a wrong one, None where either is not known."""
    judge = current()
    verdicts = judge.judge(prompts, completions, columns, helpfulness=True)
    judge.record("helpfulness", columns, completions, verdicts)
    return [verdict.helpfulness for verdict in verdicts]


def _has_form(text: str) -> bool:
    judge = current()
    return judge.format is None or judge.format[0](text)


def _prepare() -> None:
    """In every worker, before the first rollout: ValueError for a wrong configuration."""
    seconds, timeout = current().config.seconds, float(os.environ.get("REWARD_TIMEOUT", "inf"))
    if seconds >= timeout:
        raise ValueError(
            f"{os.environ[VARIABLE]}: seconds is {seconds:g}, the run's reward_timeout {timeout:g}: the judge would be killed while it waits. Raise reward_timeout."
        )


gated.format_rule = _has_form
for _function in (gated, accuracy, helpfulness):
    _function.prepare = _prepare


# ---- command line --------------------------------------------------------------------------------------------------------------------


def read_answers(path: str, limit: int) -> list[dict]:
    """The first lines of a file of rollouts. ValueError names file and line of one that is no answer."""
    if limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    if not Path(path).is_file():
        raise ValueError(f"answers: {path} is no file")
    lines = []
    for number, row in itertools.islice(rows.read_rows(path), limit):
        if isinstance(row, BadRow):
            raise ValueError(f"{path}:{number}: {row}")
        if missing := [name for name in ("id", "prompt", "completion", "columns") if row.get(name) is None]:
            raise ValueError(f"{path}:{number}: a line has no {', '.join(missing)}")
        if not isinstance(row["completion"], str) or not isinstance(row["columns"], dict):
            raise ValueError(f"{path}:{number}: completion must be text and columns a JSON object")
        lines.append(row)
    if not lines:
        raise ValueError(f"{path}: no answer in it")
    return lines


def check(arguments: list[str]) -> int:
    """`check`: scores answers of a run with `gated`; exit code 1 where the judge did not say anything about some."""
    parser = argparse.ArgumentParser(prog="python -m grpo.judge check", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="the judge's YAML file")
    parser.add_argument("--answers", required=True, help="lines with id, prompt, completion, columns: a file of OUTPUT_DIR/rollouts")
    parser.add_argument("--limit", type=int, default=20, help="answers to score (default 20)")
    args = parser.parse_args(arguments)
    lines = read_answers(args.answers, args.limit)
    config = from_mapping(JudgeConfig, read_mapping(args.config), args.config)
    cache = config.endpoint.get("cache") if isinstance(config.endpoint, dict) else None
    refuse_overwriting(filter(None, [config.log, cache]), [args.answers, args.config])
    os.environ[VARIABLE] = args.config
    judge = current()
    missing = 0
    for line in lines:
        columns = {name: [value] for name, value in line["columns"].items()} | {"id": [line["id"]]}
        verdict = judge.judge([line["prompt"]], [line["completion"]], columns, helpfulness=True)[0]
        judge.record("check", columns, [line["completion"]], [verdict])
        missing += verdict.failure is not None
        print(f"{line['id']}  accuracy {verdict.accuracy}  helpfulness {verdict.helpfulness}  {verdict.failure or ''}".rstrip())
    print(judge.endpoint.counters.line())
    return 1 if missing else 0


def correlation(pairs: list[tuple[float, float]]) -> float | None:
    """Pearson's; None where one side does not vary."""
    if len(pairs) < 2 or min(len({x for x, _ in pairs}), len({y for _, y in pairs})) < 2:
        return None
    return statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])


def report(arguments: list[str]) -> int:
    """`report`: what a judge's log says, over all its processes."""
    parser = argparse.ArgumentParser(prog="python -m grpo.judge report", allow_abbrev=False)
    parser.add_argument("log", help="the file that `log` of the judge's configuration names")
    args = parser.parse_args(arguments)
    if not Path(args.log).is_file():
        raise ValueError(f"{args.log}: no such file")
    with AppendLog(args.log) as file:
        lines = file.new()
    calls = [line for line in lines if "function" in line]
    if not calls:
        raise ValueError(f"{args.log} holds no judged answers")
    names = {"accuracy", "helpfulness", "chars", "failures", "process", "total"}
    if missing := next((sorted(names - set(call)) for call in calls if names - set(call)), None):
        raise ValueError(f"{args.log} is no log of a judge: a line has no {', '.join(missing)}")
    for function in sorted({call["function"] for call in calls}):
        mine = [call for call in calls if call["function"] == function]
        count = sum(len(call["accuracy"]) for call in mine)
        failures = sum((Counter(call["failures"]) for call in mine), Counter())
        right = [value for call in mine for value in call["accuracy"] if value is not None]
        pairs = [
            (chars, h)
            for call in mine
            for chars, h, a in zip(call["chars"], call["helpfulness"], call["accuracy"], strict=True)
            if a == 1 and h is not None
        ]
        reasons = "".join(f", {reason} {number}" for reason, number in failures.most_common())
        print(f"{function}: {count} answers, no reward {failures.total() / count:.1%}{reasons}")
        if right:
            print(f"  right {statistics.mean(right):.3f} of {len(right)}")
        if pairs:
            value = correlation(pairs)
            print(
                f"  helpfulness of right answers {statistics.mean(h for _, h in pairs):.3f}, correlation with length {'-' if value is None else f'{value:+.3f}'}"
            )
    last = {}  # counters only grow within a process, and begin anew with each
    starts = Counter()
    for line in lines:
        starts[line["process"]] += "config" in line
        if "total" in line:
            last[line["process"], starts[line["process"]]] = line["total"]
    total = {name: sum(t[name] for t in last.values()) for name in ("requests", "cached", "tries", "tokens_in", "tokens_out", "cost")}
    print(", ".join(f"{name} {value:.4f}" if name == "cost" else f"{name} {value}" for name, value in total.items()))
    return 0


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m grpo.judge", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("command", choices=["check", "report"])
    command = parser.parse_args(arguments[:1]).command
    try:
        return {"check": check, "report": report}[command](arguments[1:])
    except (ValueError, OSError, KeyError) as error:
        print(f"error: {error if not isinstance(error, KeyError) else f'a line has no {error}'}", file=sys.stderr)
        return 2
    except EndpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
