"""Rewards by rule, and the worker process that calls reward functions.

A reward function is `f(prompts, completions, **columns) -> list[float | None]`, named `module:function`. It gets the answers to one prompt at a
time: `prompts` repeats the row's prompt, `completions` are the answers' texts, each other column of the row comes under its own name, repeated.
None means "no opinion": the answer is scored by the other functions, or left out of its group when there is none. A function may have two
attributes: `prepare()`, called once in every worker before the run, and `check(columns)`, called for every row before the model is loaded; it
raises ValueError for a row that cannot be scored. This module imports nothing heavy, because every worker imports it.

The rules here read the column `answer`. Multiple choice: the LAST `[ans]a,c[/ans]` of the answer counts; case and full-width forms of letters,
brackets and commas are folded.
"""

import importlib
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from common.answers import beyond, choices, letters

FORMAT_REWARD = 0.05


def right_letters(answer) -> set[str]:
    parts = answer if isinstance(answer, (list, tuple)) else [answer]
    gold = letters(",".join(parts)) if all(isinstance(part, str) for part in parts) else None
    if gold is None:
        raise ValueError(f"column `answer` must hold letters, like 'a,c' or ['a', 'c']; it holds {answer!r}")
    return gold


def check_letters(columns: dict) -> None:
    gold, listed = right_letters(columns.get("answer")), columns.get("choices")
    if not isinstance(listed, (list, tuple, type(None))):
        raise ValueError(f"column `choices` must be a list; it holds {listed!r}")
    if beyond(gold, len(listed or ())):  # else no answer to it would ever be right
        raise ValueError(f"column `answer` holds {columns['answer']!r}, but there are {len(listed)} choices")


def _choice_pairs(completions, answer, choices_column):
    counts = choices_column or [None] * len(completions)
    return [
        (choices(text, len(listed) if listed else None), right_letters(gold))
        for text, gold, listed in zip(completions, answer, counts, strict=True)
    ]


def choice_f1(prompts, completions, answer, choices=None, **_) -> list[float]:
    """Multiple choice: F1 of the chosen set against the right one, and 0.05 for a readable tag. Column `choices`, if any, bounds the letters."""
    return [
        0.0 if chosen is None else 2 * len(chosen & gold) / (len(chosen) + len(gold)) + FORMAT_REWARD
        for chosen, gold in _choice_pairs(completions, answer, choices)
    ]


def choice_exact(prompts, completions, answer, choices=None, **_) -> list[float]:
    """Multiple choice: 1 when exactly the right letters are chosen, else 0."""
    return [float(chosen == gold) for chosen, gold in _choice_pairs(completions, answer, choices)]


choice_f1.check = choice_exact.check = check_letters


def right_result(answer) -> list:
    """What math-verify reads in column `answer`; ValueError where that is nothing."""
    from math_verify import parse

    if not isinstance(answer, (str, int, float)):
        raise ValueError(f"column `answer` must hold a result, as text or number; it holds {answer!r}")
    gold = str(answer).rpartition("####")[2].strip()
    parsed = parse(f"${gold}$")
    if not parsed:
        raise ValueError(f"column `answer` holds {gold!r}, in which math-verify finds no result")
    return parsed


def import_math_verify() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        command = "bash env/setup.sh train --with math-verify --with antlr4-python3-runtime"
        raise ImportError(f"grpo.rewards:math_exact needs math-verify. Install it: {command}") from error


def math_exact(prompts, completions, answer, **_) -> list[float]:
    """A worked problem: 1 when the answer's final result equals column `answer` (what follows #### in it, if that is there), else 0.

    Needs math-verify, which knows equal forms of numbers, sets, intervals and expressions."""
    import_math_verify()
    from math_verify import parse, verify

    return [float(verify(right_result(gold), parse(completion))) for completion, gold in zip(completions, answer, strict=True)]


math_exact.prepare = import_math_verify
math_exact.check = lambda columns: right_result(columns.get("answer"))


# ---- worker --------------------------------------------------------------------------------------------------------------------------


def load_function(name: str) -> Callable:
    """The function `module:function`; ValueError says what is wrong with the name."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"reward function {name!r} must be named module:function, for instance grpo.rewards:choice_f1")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"reward function {name!r}: cannot import {module}: {error}") from error
    if not callable(found):
        raise ValueError(f"reward function {name!r}: {module} has no function {function}")
    return found


def check_scores(name: str, scores, count: int) -> list[float | None]:
    """What a function returned, as floats. ValueError for anything but `count` finite numbers or None."""
    if not isinstance(scores, (list, tuple)) or len(scores) != count:
        what = f"{len(scores)} values" if isinstance(scores, (list, tuple)) else f"a {type(scores).__name__}"
        raise ValueError(f"{name} must return a list of {count} rewards, one an answer; it returned {what}")
    for score in scores:
        if score is not None and not (hasattr(score, "__float__") and math.isfinite(float(score))):
            raise ValueError(f"{name} returned {score!r}; a reward is a finite number or None")
    return [None if score is None else float(score) for score in scores]


def check_rows(function: Callable, rows: list[tuple[str, dict]]) -> dict[str, str] | None:
    """{place: what is wrong} of rows (place, columns) that a function cannot score; None where it has no `check`."""
    check = getattr(function, "check", None)
    if check is None:
        return None
    wrong = {}
    for where, columns in rows:
        try:
            check(columns)
        except ValueError as error:
            wrong[where] = str(error)
    return wrong


def work(connection: Connection, names: list[str]) -> None:
    """Answers (function name, prompts, completions, columns) with (scores, None) or (None, error), until the other side closes.

    (function name, rows) is answered in the same way with what `check_rows` says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    functions, failure = {}, None
    try:
        functions = {name: load_function(name) for name in names}
        for function in functions.values():  # what would fail at the first answer fails before the run
            getattr(function, "prepare", lambda: None)()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    connection.send(failure)
    while failure is None:
        try:
            name, *task = connection.recv()
        except EOFError:
            return
        try:
            if len(task) == 1:
                connection.send((check_rows(functions[name], *task), None))
                continue
            prompts, completions, columns = task
            connection.send((check_scores(name, functions[name](prompts, completions, **columns), len(completions)), None))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            connection.send((None, f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"))


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])), sys.argv[2:])
