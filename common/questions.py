"""Questions with right answers, predictions for them, and what they are worth: what `common.evaluate` reads.

A question is a row of JSON Lines or Parquet with `answer` and one of:

    prompt         messages, or text that is taken as it is (as in GRPO's data): the prompt itself asks for [ans]...[/ans]
    problem_text   (or `question`) with `choices`, a list: IgakuQA's files as they are. Choices get letters, an instruction is added.
    question       without choices: a word problem; the answer is a number

`id` or `problem_id` names a row (else file:line). All other columns can be grouped by, and these, which are made here: `num_answers` (letters
in the right answer), `num_choices`, `file`, and for IgakuQA's ids (112A1) `year` (112 is 2018) and `section` (A), unless the row has them.

A prediction file holds lines with `id` (or `problem_id`) and `prediction` ("a,c"); those by `common.evaluate run` hold `answer` and columns
too, so nothing else is needed to mark them. Several lines with one id are samples of it; where they have numbers (`sample`), each comes once.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common import rows
from common.answers import Gold, f1, gold_of, is_right, read_answer
from common.chat import BadRow, template_options

TEXT_COLUMNS = ("id", "problem_id", "prompt", "problem_text", "question", "choices", "answer", "tools", "chat_template_kwargs")
JAPANESE = re.compile("[\u3040-\u30ff\u3400-\u9fff]")
INSTRUCTIONS = {
    ("ja", "choice"): "正しい選択肢の記号を、最後に[ans]a[/ans]の形で答えてください。複数選ぶ場合は[ans]a,c[/ans]の形です。",
    ("ja", "number"): "答えの数値だけを、最後に[ans]12[/ans]の形で答えてください。",
    ("en", "choice"): "End with the letter of the right choice in this form: [ans]a[/ans]. Several right choices: [ans]a,c[/ans].",
    ("en", "number"): "End with the number that is the answer, in this form: [ans]12[/ans].",
}


@dataclass
class Item:
    """One question."""

    id: str
    prompt: str | list[dict]  # messages, or text that no chat template touches
    answer: object  # as it is in the row
    gold: Gold
    num_choices: int | None
    columns: dict[str, str]  # what can be grouped by
    tools: list[dict] | None
    chat_template_kwargs: dict


def read_items(files: list[str], instruction: str | None = None, text_only: bool = False) -> tuple[dict[str, Item], int]:
    """(questions by id in the files' order, how many were left out because they need a picture). ValueError names file and line.

    instruction: instead of the shipped ones, which ask for [ans]a,c[/ans] in the question's language. text_only: leave out rows whose
    column `text_only` is false.
    """
    items: dict[str, Item] = {}
    places: dict[str, str] = {}
    left_out = 0
    for file in files:
        for line, row in rows.read_rows(file):
            where = f"{file}:{line}"
            try:
                if isinstance(row, BadRow):
                    raise row
                if text_only and row.get("text_only") is False:
                    left_out += 1
                    continue
                item = _item(row, file, line, instruction)
                if item.id in items:
                    raise ValueError(f"id {item.id!r} is that of {places[item.id]} too")
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            items[item.id], places[item.id] = item, where
    if not items:
        raise ValueError(f"{', '.join(files)}: no question to ask" + (f"; {left_out} need a picture" if left_out else ""))
    return items, left_out


def _item(row: dict, file: str, line: int, instruction: str | None) -> Item:
    name = str(row["problem_id"]) if row.get("id") is None and row.get("problem_id") is not None else rows.row_id(row, file, line)
    choices = row.get("choices")
    choices = json.loads(choices) if isinstance(choices, str) else choices
    if choices is not None and not isinstance(choices, list):
        raise ValueError(f"column `choices` must be a list; it holds {choices!r}")
    if row.get("answer") in (None, "", []):
        raise ValueError("the row has no `answer`")
    num_choices = len(choices) if choices else None
    gold = gold_of(row["answer"], num_choices)
    prompt = row.get("prompt")
    if not prompt:
        text = row.get("problem_text") or row.get("question")
        if not isinstance(text, str) or not text:
            raise ValueError(f"a row needs `prompt`, `problem_text` or `question`; columns found: {', '.join(map(str, row))}")
        prompt = [{"role": "user", "content": ask(text, choices or [], gold, instruction)}]
    columns = {key: shown(value) for key, value in row.items() if key not in TEXT_COLUMNS and shown(value) is not None}
    columns = {"num_answers": str(gold.num_answers), "num_choices": str(num_choices or 0), "file": Path(file).name} | columns
    if exam := re.fullmatch(r"(1\d\d)([A-I])\d+", name) if "problem_text" in row else None:
        columns = {"year": str(1906 + int(exam[1])), "section": exam[2]} | columns
    return Item(name, prompt, row["answer"], gold, num_choices, columns, *template_options(row))


def ask(text: str, choices: list[str], gold: Gold, instruction: str | None = None) -> str:
    """The question, its choices with letters, and how to answer."""
    kind = ("ja" if JAPANESE.search(text) else "en", "choice" if gold.number is None else "number")
    listed = "\n".join(f"{chr(ord('a') + index)}. {choice}" for index, choice in enumerate(choices))
    return "\n\n".join(filter(None, [text, listed, INSTRUCTIONS[kind] if instruction is None else instruction]))


def shown(value) -> str | None:
    """A value that can be a group's name; None for long text and nested values."""
    if isinstance(value, list) and all(isinstance(part, (str, int, float)) for part in value):
        value = ",".join(map(str, value))
    if value is None or isinstance(value, (list, dict)) or len(str(value)) > 80:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- predictions -------------------------------------------------------------------------------------------------------------------------


@dataclass
class Predictions:
    """The lines of one or several prediction files."""

    files: list[str]
    lines: dict[str, list[dict]] = field(default_factory=dict)  # by id, samples in order

    @property
    def name(self) -> str:
        return self.files[0] + (f" and {len(self.files) - 1} more" if len(self.files) > 1 else "")

    @property
    def has_gold(self) -> bool:
        return not self.without_gold

    @property
    def without_gold(self) -> list[str]:
        return [name for name, lines in self.lines.items() if any(line.get("answer") is None for line in lines)]


def read_predictions(files: list[str]) -> Predictions:
    """ValueError names file and line of what is no prediction, and an id that has not as many samples as the others."""
    predictions = Predictions(list(files))
    places: dict[tuple[str, int | None], str] = {}
    for file in files:
        if Path(file).is_dir():
            raise ValueError(f"{file} is a folder: give the prediction files in it")
        if not Path(file).is_file():
            raise ValueError(
                f"{file} does not exist. `common.evaluate run` writes it when all answers are there; the same command goes on."
            )
        for line, row in rows.read_rows(file):
            if isinstance(row, BadRow):
                raise ValueError(f"{file}:{line}: {row}")
            if fault := _fault(row):
                raise ValueError(f"{file}:{line}: {fault}")
            name, sample = _name(row), row.get("sample")
            if sample is not None and (name, sample) in places:
                raise ValueError(f"{file}:{line}: sample {sample} of id {name!r} is that of {places[name, sample]} too")
            places[name, sample] = f"{file}:{line}"
            predictions.lines.setdefault(name, []).append(row)
    if not predictions.lines:
        raise ValueError(f"{', '.join(files)}: no prediction in it")
    counts = Counter(map(len, predictions.lines.values()))
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        odd = next(name for name, lines in predictions.lines.items() if len(lines) != usual)
        raise ValueError(f"{predictions.name}: id {odd!r} has {len(predictions.lines[odd])} predictions, others have {usual}")
    for name, lines in predictions.lines.items():
        numbered = [row.get("sample") is not None for row in lines]
        if all(numbered):
            lines.sort(key=lambda row: row["sample"])
        elif any(numbered):
            raise ValueError(f"{predictions.name}: some predictions of id {name!r} have a `sample`, others have none")
    return predictions


def _name(row: dict) -> str:
    return str(row["problem_id"] if row.get("id") is None else row["id"])


def _fault(row: dict) -> str | None:
    """What keeps a line from being a prediction."""
    if (row.get("id") is None and row.get("problem_id") is None) or "prediction" not in row:
        return f"a prediction needs `id` (or `problem_id`) and `prediction`; found: {', '.join(row)}"
    given, sample, columns, count = (row.get(name) for name in ("prediction", "sample", "columns", "num_choices"))
    if not isinstance(given, (str, type(None))) and not (isinstance(given, list) and all(isinstance(part, str) for part in given)):
        return f"prediction must be text like 'a,c', a list of letters or null, not {given!r}"
    if not _is_whole(sample) or not _is_whole(count):
        return f"sample and num_choices must be whole numbers, not {sample!r} and {count!r}"
    if columns is not None and not isinstance(columns, dict):
        return f"columns must be a JSON object, not {columns!r}"
    return None


def _is_whole(value) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


@dataclass
class Marked:
    """What the answers to one question are worth."""

    right: list[bool]  # of each sample
    f1: list[float]
    unreadable: list[bool]
    majority: bool  # whether the prediction that most samples give is right; the earliest of those with equal votes
    columns: dict[str, str]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


def mark(predictions: Predictions, items: dict[str, Item] | None) -> dict[str, Marked]:
    """Marks by id. Gold comes from `items`, else from the prediction file itself where `common.evaluate run` wrote it.

    ValueError where questions of the data have no prediction: what is left could be the easy ones.
    """
    if items is None and (without := predictions.without_gold):
        some = "" if len(without) == len(predictions.lines) else f" for some: {difference(without, 'without `answer`')}"
        raise ValueError(f"{predictions.name} holds no right answers{some}: give the questions with --data")
    if items is not None and (unknown := [name for name in predictions.lines if name not in items]):
        raise ValueError(f"{predictions.name}: {difference(unknown, 'not in the data')}")
    if items is not None and (missing := [name for name in items if name not in predictions.lines]):
        raise ValueError(f"{predictions.name}: {difference(missing, 'of the data have no prediction')}. Give the data that was asked only")
    result = {}
    for name, lines in predictions.lines.items():
        if items is None:
            num_choices, columns = lines[0].get("num_choices"), {k: str(v) for k, v in (lines[0].get("columns") or {}).items()}
            try:
                gold = gold_of(lines[0]["answer"], num_choices)
            except ValueError as error:
                raise ValueError(f"{predictions.name}: id {name!r}: {error}") from error
        else:
            gold, num_choices, columns = items[name].gold, items[name].num_choices, items[name].columns
        given = [",".join(p) if isinstance(p, list) else p for p in (line["prediction"] for line in lines)]
        read = [None if p is None else read_answer(p, gold, num_choices, bare=True) for p in given]
        votes = Counter(p for p in read if p is not None)
        most = max(votes, key=votes.get) if votes else None  # insertion order breaks ties
        right = [is_right(p, gold) for p in read]
        result[name] = Marked(right, [f1(p, gold) for p in read], [p is None for p in read], is_right(most, gold), columns)
    return result


def difference(ids: list[str], what: str) -> str:
    more = f" and {len(ids) - 10} more" if len(ids) > 10 else ""
    return f"{len(ids)} ids {what}: {', '.join(ids[:10])}{more}"


def group_values(marked: dict[str, Marked], column: str) -> dict[str, list[str]]:
    """Ids by their value of a column, values in order. ValueError, with the columns that there are, where no question has it."""
    groups: dict[str, list[str]] = {}
    for name, mark in marked.items():
        groups.setdefault(mark.columns.get(column, "(none)"), []).append(name)
    if set(groups) == {"(none)"}:
        known = sorted({key for mark in marked.values() for key in mark.columns})
        raise ValueError(f"no question has a column {column!r}; columns: {', '.join(known)}")
    return dict(
        sorted(groups.items(), key=lambda pair: [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", pair[0])])
    )
