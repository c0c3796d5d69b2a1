"""Letters of multiple-choice answers, read the same way by rewards and by evaluation.

The LAST `[ans]a,c[/ans]` of an answer counts; case and full-width forms of letters, brackets and commas are folded.
"""

import re
import unicodedata

TAG = re.compile(r"\[ans\]((?:(?!\[ans\]).)*?)\[/ans\]", re.DOTALL)


def fold(text: str) -> str:
    """Full-width letters, brackets and commas as ASCII, lower case."""
    return unicodedata.normalize("NFKC", text).replace("、", ",").lower()


def letters(text: str) -> set[str] | None:
    """{"a", "c"} of "a, C"; None unless it is one or more single letters between commas."""
    parts = [part.strip() for part in fold(text).split(",")]
    parts = [part for part in parts if part]
    return set(parts) if parts and all(re.fullmatch("[a-z]", part) for part in parts) else None


def choices(completion: str, num_choices: int | None = None) -> set[str] | None:
    """Letters in the last [ans] tag of an answer; None without a tag, or with anything in it that is no letter of a choice."""
    tags = TAG.findall(fold(completion))
    found = letters(tags[-1]) if tags else None
    if found and num_choices and max(found) > chr(ord("a") + num_choices - 1):
        return None
    return found
