"""The form in which a reward function can read an answer at all. A reader of a wrong form sees only wrong answers: SFT data that teaches
another form than the reward demands works against it.

A function of your own says its rule with an attribute: `my_reward.format_rule = lambda text: "Answer:" in text`.
"""

import re
from collections.abc import Callable

from grpo import rewards

RESULT = re.compile(r"\\boxed\s*\{|####|\d")  # what math-verify looks for, without needing it


def _readable_choices(text: str) -> bool:
    return rewards.choices(text) is not None


def _has_result(text: str) -> bool:
    return RESULT.search(text) is not None


RULES = {
    "grpo.rewards:choice_f1": (_readable_choices, "letters in [ans]...[/ans], like [ans]a,c[/ans]"),
    "grpo.rewards:choice_exact": (_readable_choices, "letters in [ans]...[/ans], like [ans]a,c[/ans]"),
    "grpo.rewards:math_exact": (_has_result, r"a final result, like \boxed{72}"),
}


def format_rule(name: str) -> tuple[Callable[[str], bool], str] | None:
    """(whether an answer has the form that the reward function `module:function` reads, that form in words); None where none is known.

    ValueError where there is no such function."""
    if name in RULES:
        return RULES[name]
    function = rewards.load_function(name)
    rule = getattr(function, "format_rule", None)
    return (rule, f"what {name}.format_rule accepts") if callable(rule) else None
