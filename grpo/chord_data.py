"""Expert answers for CHORD out of multiple-choice questions, written by a model behind an endpoint in two steps.

    python -m grpo.chord make-data --data questions.jsonl --endpoint endpoint.yaml --output sft.jsonl --reward_funcs grpo.rewards:choice_exact

1. temperature 0.0: the question is rewritten so that it can be answered without its choices.
2. temperature 0.3: an answer in parts with fixed headings (--markers) is written from the right choice.

Each step's text is checked (length, headings, no word of choices or letters, no answer given away), and drawn once more (temperature 0.3)
where it fails. sft.jsonl gets what passed: id, messages, answer, kind. sft.rejected.jsonl gets every other row with its reason. Replies are
cached as they come (sft.cache.jsonl, or the endpoint's `cache`), so the same command after a kill pays for nothing twice.

Such answers hold no [ans]...[/ans]. A reward that reads it gives them nothing, so GRPO and SFT pull apart (`format_warnings` says so). With
--keep_choices the prompt is the question with its choices, as GRPO's is, and the answer ends with the tag.

The endpoint's YAML holds the fields of EndpointConfig (grpo/endpoint.py): base_url, model, api_key_env, ... Exit codes: 0 good, 1 replies are
missing (the same command asks again), 2 wrong use.
"""

import argparse
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common import questions, rows
from common.answers import fold, gold_of
from common.chat import BadRow
from common.jsonl import refuse_overwriting, write_lines
from grpo.endpoint import Endpoint, EndpointConfig, EndpointError, Reply, Request, from_mapping, read_mapping
from grpo.formats import format_rule
from grpo.prompt_files import PromptFile, read_prompt

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).with_name("chord_templates")
MARKERS = {"ja": ["【結論】", "【根拠】", "【鑑別】"], "en": ["## Answer", "## Reasons", "## Differential"]}
QUESTION_TEMPERATURE, ANSWER_TEMPERATURE = 0.0, 0.3
TRIES = 2  # of a text that does not pass its checks
QUESTION_SCHEMA = {
    "type": "object",
    "properties": {"question": {"type": "string"}},
    "required": ["question"],
    "additionalProperties": False,
}
MIN_QUESTION, MAX_QUESTION = 8, 3000  # characters
# What only somebody who sees choices would write.
CHOICES = re.compile(
    r"選択肢|どれか[。？?]?\s*$|のうち(正しい|誤っている|適切)|\b(choices?|options?) ?\(?[a-e]\b|which of the following|the (choices|options)\b",
    re.IGNORECASE,
)


@dataclass
class Mcq:
    """One question with its right choices in words."""

    id: str
    text: str  # stem and choices
    stem: str
    choices: list[str]
    gold: list[str]  # letters
    language: str

    @property
    def right(self) -> list[str]:
        return [self.choices[ord(letter) - ord("a")] for letter in self.gold]


class Rejected(ValueError):
    """A row that does not become training data. The message is the reason."""


# ---- questions -----------------------------------------------------------------------------------------------------------------------


def read_mcq(files: list[str]) -> tuple[list[Mcq], list[dict]]:
    """(questions, rejected rows). ValueError names file and line of what is no row, or an id that was there before."""
    found: dict[str, Mcq] = {}
    rejected = []
    for file in files:
        for line, row in rows.read_rows(file):
            if isinstance(row, BadRow):
                raise ValueError(f"{file}:{line}: {row}")
            name = str(row["problem_id"]) if row.get("id") is None and row.get("problem_id") is not None else rows.row_id(row, file, line)
            if name in found:
                raise ValueError(f"{file}:{line}: the id {name!r} is there twice")
            try:
                found[name] = _mcq(name, row)
            except Rejected as error:
                rejected.append({"id": name, "reason": str(error), "where": f"{file}:{line}"})
    return list(found.values()), rejected


def _mcq(name: str, row: dict) -> Mcq:
    stem, choices = row.get("problem_text") or row.get("question"), row.get("choices")
    if not isinstance(stem, str) or not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) for c in choices):
        raise Rejected("no multiple-choice question: needs `problem_text` (or `question`), `choices` and `answer`")
    if row.get("text_only") is False:
        raise Rejected("needs a picture (text_only: false)")
    try:
        gold = gold_of(row.get("answer"), len(choices))
    except ValueError as error:
        raise Rejected(str(error)) from None
    if len(gold.sets) != 1:
        raise Rejected("several answers are right")
    listed = "\n".join(f"{chr(ord('a') + i)}. {choice}" for i, choice in enumerate(choices))
    language = "ja" if questions.JAPANESE.search(stem) else "en"
    return Mcq(name, f"{stem}\n{listed}", stem, choices, sorted(gold.sets[0]), language)


# ---- checks --------------------------------------------------------------------------------------------------------------------------


def check_question(text: str, mcq: Mcq) -> None:
    """Raises Rejected."""
    if not MIN_QUESTION <= len(text) <= MAX_QUESTION:
        raise Rejected(f"question: {len(text)} characters, wanted {MIN_QUESTION} to {MAX_QUESTION}")
    if mention := CHOICES.search(text):
        raise Rejected(f"question: speaks of choices ({mention[0]})")
    for right in mcq.right:
        if len(right) > 1 and _squeezed(right) in _squeezed(text) and _squeezed(right) not in _squeezed(mcq.stem):
            raise Rejected(f"question: gives the answer away ({right})")


def check_answer(text: str, markers: list[str], min_chars: int, max_chars: int) -> None:
    """Raises Rejected."""
    if not min_chars <= len(text) <= max_chars:
        raise Rejected(f"answer: {len(text)} characters, wanted {min_chars} to {max_chars}")
    places = []
    for marker in markers:
        found = [match.start() for match in re.finditer(rf"^{re.escape(marker)}", text, re.MULTILINE)]
        if len(found) != 1:
            raise Rejected(f"answer: {marker} is there {len(found)} times at the start of a line, wanted once")
        places.append(found[0])
    if places != sorted(places):
        raise Rejected("answer: the headings are in another order")
    if places and places[0] != 0:
        raise Rejected(f"answer: text before {markers[0]}")
    for marker, start, end in zip(markers, places, [*places[1:], len(text)], strict=True):
        if not text[start + len(marker) : end].strip():
            raise Rejected(f"answer: nothing under {marker}")
    if mention := CHOICES.search(text):
        raise Rejected(f"answer: speaks of choices ({mention[0]})")
    if "[ans]" in fold(text):
        raise Rejected("answer: holds an [ans] tag of its own")


def _squeezed(text: str) -> str:
    return "".join(fold(text).split())


# ---- the two steps -------------------------------------------------------------------------------------------------------------------


def ask_and_check(
    endpoint: Endpoint, what: str, items: list[Mcq], request: Callable[[Mcq, int], Request], accept: Callable[[Mcq, Reply], str]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """({id: text that passed}, {id: reason}, ids without a reply). Another seed where the text did not pass."""
    passed, reasons, missing = {}, {}, {}
    waiting = items
    for attempt in range(TRIES):
        with tqdm(total=len(waiting), desc=f"{what}, try {attempt + 1}", unit="row") as bar:
            replies = endpoint.complete([request(mcq, attempt) for mcq in waiting], each=lambda *_: bar.update())
        again = []
        for mcq, reply in zip(waiting, replies, strict=True):
            if reply.failure is not None and reply.failure not in ("truncated", "refused", "empty", "invalid_json", "schema"):
                missing[mcq.id] = f"{what}: no reply ({reply.failure}: {reply.detail})"
                continue
            try:
                if reply.failure is not None:
                    raise Rejected(f"{what}: {reply.failure} ({reply.detail})")
                passed[mcq.id] = accept(mcq, reply)
            except Rejected as error:
                reasons[mcq.id] = str(error)
                again.append(mcq)
        waiting = again
        if not waiting:
            break
    reasons = {name: reason for name, reason in reasons.items() if name not in passed} | missing
    return passed, reasons, list(missing)


@dataclass
class Maker:
    """How rows are made: templates by language, headings, bounds."""

    endpoint: Endpoint
    templates: dict[str, tuple[PromptFile, PromptFile]]
    markers: dict[str, list[str]]
    min_chars: int
    max_chars: int
    keep_choices: bool

    def make(self, items: list[Mcq]) -> tuple[list[dict], list[dict], bool]:
        """(training rows, rejected rows, whether replies are missing)."""
        if self.keep_choices:
            asked, reasons, missing = {mcq.id: mcq.text for mcq in items}, {}, []
        else:
            asked, reasons, missing = ask_and_check(self.endpoint, "question", items, self._ask_question, self._take_question)
        written, more, also = ask_and_check(
            self.endpoint, "answer", [mcq for mcq in items if mcq.id in asked], lambda mcq, attempt: self._ask_answer(mcq, asked[mcq.id], attempt), self._take_answer
        )  # fmt: skip
        reasons |= more
        made = [self._row(mcq, asked[mcq.id], written[mcq.id]) for mcq in items if mcq.id in written]
        rejected = [{"id": mcq.id, "reason": reasons[mcq.id], "question": asked.get(mcq.id)} for mcq in items if mcq.id in reasons]
        return made, rejected, bool(missing or also)

    def _seed(self, attempt: int) -> int | None:
        seed = self.endpoint.config.seed
        return None if seed is None else seed + attempt

    def _ask_question(self, mcq: Mcq, attempt: int) -> Request:
        messages = self.templates[mcq.language][0].messages(original=mcq.text, correct="\n".join(mcq.right))
        # At temperature 0 another seed gives the same text again: the second try is drawn.
        temperature = QUESTION_TEMPERATURE if attempt == 0 else ANSWER_TEMPERATURE
        return Request(messages, QUESTION_SCHEMA, temperature=temperature, seed=self._seed(attempt))

    def _take_question(self, mcq: Mcq, reply: Reply) -> str:
        text = reply.data["question"].strip()
        check_question(text, mcq)
        return text

    def _ask_answer(self, mcq: Mcq, question: str, attempt: int) -> Request:
        texts = {"question": question, "correct": "\n".join(mcq.right), "markers": "\n".join(self.markers[mcq.language])}
        return Request(self.templates[mcq.language][1].messages(**texts), temperature=ANSWER_TEMPERATURE, seed=self._seed(attempt))

    def _take_answer(self, mcq: Mcq, reply: Reply) -> str:
        text = reply.text.rpartition("</think>")[2].strip()
        check_answer(text, self.markers[mcq.language], self.min_chars, self.max_chars)
        return text

    def _row(self, mcq: Mcq, question: str, answer: str) -> dict:
        if self.keep_choices:
            question = questions.ask(mcq.stem, mcq.choices, gold_of(mcq.gold, len(mcq.choices)))
            answer = f"{answer}\n\n[ans]{','.join(mcq.gold)}[/ans]"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"id": mcq.id, "messages": messages, "answer": mcq.gold, "kind": "choices" if self.keep_choices else "question"}


# ---- does the SFT data fit the reward? -----------------------------------------------------------------------------------------------


def expert_answers(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(file:line, text of the last assistant turn) of SFT rows. Rows without one, and bad ones, are for the tokeniser to name."""
    for file in files:
        try:
            for line, row in rows.read_rows(file):
                text = None if isinstance(row, BadRow) else _last_answer(row)
                if text:
                    yield f"{file}:{line}", text
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


def _last_answer(row: dict) -> str | None:
    turns = row.get("messages") or row.get("completion")
    if isinstance(turns, str):
        try:
            turns = json.loads(turns) if row.get("messages") else turns
        except json.JSONDecodeError:
            return None
    if isinstance(turns, str):
        return turns
    texts = [turn.get("content") for turn in turns or [] if isinstance(turn, dict) and turn.get("role") == "assistant"]
    return texts[-1] if texts and isinstance(texts[-1], str) else None


def format_warnings(files: list[str], reward_funcs: list[str]) -> list[str]:
    """Where expert answers have another form than a reward function reads: then SFT teaches what the reward counts as wrong.

    Empty: nothing to say, or no function has a rule of form (grpo/formats.py). ValueError for a file that cannot be read.
    """
    rules = {name: rule for name in reward_funcs if (rule := format_rule(name)) is not None}
    if not rules:
        return []
    total, wrong, examples = 0, Counter(), {}
    for where, text in expert_answers(files):
        total += 1
        for name, (accepts, _) in rules.items():
            if not accepts(text):
                wrong[name] += 1
                examples.setdefault(name, f"{where}, which ends {text[-60:]!r}")
    return [
        f"{wrong[name]} of {total} expert answers are not in the form that {name} reads ({words}), for instance {examples[name]}. "
        "SFT will teach a form that the reward counts as wrong. Add the form to the answers (make-data --keep_choices), or reward theirs."
        for name, (_, words) in rules.items()
        if wrong[name]
    ]


# ---- command line --------------------------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.chord make-data", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True, help="rows with `problem_text` (or `question`), `choices`, `answer`")
    parser.add_argument("--endpoint", required=True, help="YAML file of the endpoint")
    parser.add_argument("--output", required=True, help="sft.jsonl")
    parser.add_argument("--templates", help="folder with question.md and answer.md; default: the shipped ones in the question's language")
    parser.add_argument("--markers", nargs="+", help="headings of the answer's parts, in order; default: three in the question's language")
    parser.add_argument("--min_chars", type=int, default=80, help="least characters of an answer (default 80)")
    parser.add_argument("--max_chars", type=int, default=4000, help="most characters of an answer (default 4000)")
    parser.add_argument(
        "--keep_choices", action="store_true", help="the prompt keeps its choices, the answer ends with [ans]...[/ans]; no first step"
    )
    parser.add_argument("--reward_funcs", nargs="*", default=[], help="the run's reward functions: warn where the data's form is another")
    parser.add_argument("--limit", type=int, help="only the first so many questions")
    args = parser.parse_args(arguments)
    if not args.output.endswith(".jsonl"):
        raise ValueError(f"output must be named *.jsonl, not {args.output}")
    if not 0 <= args.min_chars < args.max_chars:
        raise ValueError(f"min_chars {args.min_chars} must be below max_chars {args.max_chars}")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"limit is {args.limit}; it must be at least 1")
    return args


def make_data(args: argparse.Namespace) -> int:
    config = from_mapping(EndpointConfig, read_mapping(args.endpoint), args.endpoint)
    output = Path(args.output)
    config.cache = config.cache or str(output.with_suffix(".cache.jsonl"))
    refuse_overwriting([output, output.with_suffix(".rejected.jsonl"), config.cache], [*args.data, args.endpoint])
    folders = {language: Path(args.templates or TEMPLATES / language) for language in MARKERS}
    templates = {
        language: (read_prompt(folder / "question.md", {"original", "correct"}), read_prompt(folder / "answer.md", {"question", "correct", "markers"}))
        for language, folder in folders.items()
    }  # fmt: skip
    for name in args.reward_funcs:
        format_rule(name)  # a wrong name is an error before anything is paid for
    items, rejected = read_mcq(args.data)
    if not items:
        raise ValueError(f"{', '.join(args.data)}: no question to use; the first: {rejected[0]['reason'] if rejected else 'no rows'}")
    items = items[: args.limit]
    markers = {language: args.markers or MARKERS[language] for language in MARKERS}
    endpoint = Endpoint(config)
    maker = Maker(endpoint, templates, markers, args.min_chars, args.max_chars, args.keep_choices)
    made, more, missing = maker.make(items)
    rejected += more
    write_lines(output.with_suffix(".rejected.jsonl"), rejected)
    print(endpoint.counters.line())
    for reason, count in Counter(re.split(r" \(|: \d", row["reason"])[0] for row in rejected).most_common():
        print(f"rejected {count}: {reason}")
    if made:
        write_lines(output, made)
        print(f"{output}: {len(made)} rows of {len(items)} questions")
        for text in format_warnings([str(output)], args.reward_funcs):
            print(f"warning: {text}", file=sys.stderr)
    if missing or not made:
        print(f"error: {'replies are missing: the same command asks for them again' if missing else 'no row passed'}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line a request
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return make_data(parse(arguments))
    except EndpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
