"""Answers to multiple-choice questions, read the same way by rewards and by evaluation.

The LAST `[ans]a,c[/ans]` of an answer counts; case and full-width forms of letters, brackets and commas are folded.
"""

import re
import unicodedata
from decimal import Decimal
from typing import NamedTuple

TAG = re.compile(r"\[ans\]((?:(?!\[ans\]).)*?)\[/ans\]", re.DOTALL)


def fold(text: str) -> str:
    """Full-width letters, brackets and commas as ASCII, lower case."""
    return unicodedata.normalize("NFKC", text).replace("、", ",").lower()


def letters(text: str) -> set[str] | None:
    """{"a", "c"} of "a, C"; None unless it is one or more single letters between commas."""
    parts = [part.strip() for part in fold(text).split(",")]
    parts = [part for part in parts if part]
    return set(parts) if parts and all(re.fullmatch("[a-z]", part) for part in parts) else None


def beyond(found: set[str], num_choices: int | None) -> bool:
    """Whether a letter names none of the choices; never where their number is not known."""
    return bool(num_choices) and max(found) > chr(ord("a") + num_choices - 1)


def choices(completion: str, num_choices: int | None = None) -> set[str] | None:
    """Letters in the last [ans] tag of an answer; None without a tag, or with anything in it that is no letter of a choice."""
    tags = TAG.findall(fold(completion))
    found = letters(tags[-1]) if tags else None
    if found and beyond(found, num_choices):
        return None
    return found


class Gold(NamedTuple):
    """What counts as right: one of several sets of letters, or (a question without choices) a number."""

    sets: tuple[frozenset[str], ...]
    number: Decimal | None = None

    @property
    def num_answers(self) -> int:
        return 1 if self.number is not None else min(map(len, self.sets))


def gold_of(answer, num_choices: int | None = None) -> Gold:
    """Column `answer`: "a,c", ["a", "c"], "a or d" (either is right), or a number ("26", "... #### 18"). ValueError for anything else."""
    parts = answer if isinstance(answer, (list, tuple)) else [answer]
    text = ",".join(map(str, parts))
    sets = [letters(part) for part in re.split(r"\s+or\s+", fold(text))]
    if all(sets):
        if beyond(set.union(*sets), num_choices):
            raise ValueError(f"column `answer` holds {answer!r}, but there are {num_choices} choices")
        return Gold(tuple(map(frozenset, sets)))
    value = number(text.rpartition("####")[2])
    if value is None or num_choices:
        raise ValueError(
            f"column `answer` holds {answer!r}; it must hold letters of choices ('a,c', ['a', 'c'], 'a or d'), or without choices a number"
        )
    return Gold((), value)


def number(text: str) -> Decimal | None:
    """Decimal("1234.5") of "$1,234.50"; None unless it is one number."""
    text = fold(text).strip().strip("$%.").replace(",", "")
    return Decimal(text).normalize() if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", text) else None


def read_answer(text: str, gold: Gold, num_choices: int | None = None, bare: bool = False) -> str | None:
    """What an answer says, in one spelling ("a,c" or "18"); None where it cannot be read.

    The last [ans] tag counts; for a number also what follows the last ####. `bare`: text without a tag is the answer itself, as in
    prediction files.
    """
    if gold.number is not None:
        tags = TAG.findall(fold(text))
        value = number(tags[-1] if tags else text.rpartition("####")[2] if bare or "####" in text else "")
        return None if value is None else f"{value:f}"
    if bare and not TAG.search(fold(text)):
        text = f"[ans]{text}[/ans]"
    found = choices(text, num_choices)
    return None if found is None else ",".join(sorted(found))


def is_right(prediction: str | None, gold: Gold) -> bool:
    """Exactly the right letters (or the right number), in read_answer's spelling."""
    if prediction is None:
        return False
    if gold.number is not None:
        return Decimal(prediction) == gold.number
    return set(prediction.split(",")) in gold.sets


def f1(prediction: str | None, gold: Gold) -> float:
    """2 |P and G| / (|P| + |G|), of the alternative that fits best; a number is 1 or 0, and so is what cannot be read."""
    if prediction is None or gold.number is not None:
        return float(is_right(prediction, gold))
    chosen = set(prediction.split(","))
    return max(2 * len(chosen & right) / (len(chosen) + len(right)) for right in gold.sets)
