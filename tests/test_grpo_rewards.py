"""Rewards by rule, and reward functions in worker processes: crashes, hangs, wrong results are errors or counted, never a silent zero."""

import importlib.util
import time

import pytest

from grpo import rewards
from grpo.rollout import Question, scorable
from grpo.scoring import RewardArguments, RewardPool, combine

ACE = ["a", "c"]


@pytest.mark.parametrize(
    "answer, gold, f1, exact",
    [
        ("[ans]a,c[/ans]", ACE, 1.05, 1),
        ("[ans]a[/ans]", ACE, 0.716667, 0),
        ("[ans]a,b,c[/ans]", ACE, 0.85, 0),
        ("[ans]b[/ans]", ACE, 0.05, 0),
        ("[ans]a,b,c,d,e[/ans]", ACE, 0.621429, 0),
        ("[ans]a,b,c,d,e[/ans]", "a", 0.383333, 0),
        ("no tag: a", "a", 0, 0),
        ("[ans]C, A[/ans]", "a,c", 1.05, 1),
        ("[ans]a,a[/ans]", "a", 1.05, 1),
        # Full-width letters, brackets and commas; Japanese text around the tag.
        ("正解は次の通りです。［ａｎｓ］Ａ，Ｃ［／ａｎｓ］以上です。", ACE, 1.05, 1),
        ("答え：[ans]ａ、ｃ[/ans]。", ACE, 1.05, 1),
        ("答えは[ANS] c ､ a [/ANS]", ACE, 1.05, 1),
        # The last tag counts, an unclosed one before it does not swallow it.
        ("[ans]b[/ans] いや、[ans]a,c[/ans]", ACE, 1.05, 1),
        ("[ans]a,c[/ans] then [ans]b[/ans]", ACE, 0.05, 0),
        ("[ans]b [ans]a,c[/ans]", ACE, 1.05, 1),
        # What is no letter of a choice is not read: no format reward either.
        ("[ans][/ans]", "a", 0, 0),
        ("[ans]a c[/ans]", ACE, 0, 0),
        ("[ans]a,7[/ans]", "a", 0, 0),
        ("[ans]none[/ans]", "a", 0, 0),
        ("[ans]a,c,[/ans]", ACE, 1.05, 1),
        ("[ans]a\nc[/ans]", ACE, 0, 0),
    ],
)
def test_multiple_choice(answer, gold, f1, exact):
    assert rewards.choice_f1(["p"], [answer], answer=[gold]) == [pytest.approx(f1, abs=1e-6)]
    assert rewards.choice_exact(["p"], [answer], answer=[gold], other_column=["x"]) == [exact]


def test_letters_beyond_the_choices_are_not_read():
    for choices, value in ((["1", "2"], 0.0), (["1", "2", "3"], 1.05)):
        assert rewards.choice_f1(["p"], ["[ans]a,c[/ans]"], answer=[ACE], choices=[choices]) == [pytest.approx(value)]


@pytest.mark.parametrize("gold", ["", [], "12", ["a b"], None, [None], 3])
def test_a_gold_answer_that_is_no_letter_is_an_error(gold):
    with pytest.raises(ValueError, match="column `answer` must hold letters"):
        rewards.choice_exact(["p"], ["[ans]a[/ans]"], answer=[gold])


def test_math_answers():
    if importlib.util.find_spec("math_verify") is None:
        with pytest.raises(ImportError, match="--with math-verify"):
            rewards.math_exact(["p"], ["x"], answer=["1"])
        pytest.skip("math-verify is not installed")
    answers = ["so $\\boxed{72}$", "The answer is 72.", "It is $\\frac{144}{2}$", "It is 71", "no idea"]
    assert rewards.math_exact(["p"] * 5, answers, answer=["48/2 = 24 ... #### 72"] * 5) == [1, 1, 1, 0, 0]
    rewards.math_exact.check({"answer": 72})
    for gold in (None, [], "", "#### "):
        with pytest.raises(ValueError, match="column `answer` (must hold a result|holds '', in which)"):
            rewards.math_exact.check({"answer": gold})


def test_components_without_an_opinion():
    assert combine({"a": 1.0, "b": None}, [2.0, 1.0]).reward == 2.0
    assert combine({"a": None, "b": None}, [2.0, 1.0]).reward is None


# ---- worker processes

FUNCTIONS = """
import os, time

def length(prompts, completions, id, gold, **columns):
    assert prompts == ["P"] * len(completions) and gold == [3] * len(completions) and not columns, (prompts, gold, columns)
    print("printing must not disturb the worker")
    return [float(len(c)) for c in completions]

def some(prompts, completions, **_):
    return [None if c == "none" else 1 for c in completions]

def crash(prompts, completions, **_):
    return [1 / 0]

def short(prompts, completions, **_):
    return [1.0]

def nan(prompts, completions, **_):
    return [float("nan")] * len(completions)

def word(prompts, completions, **_):
    return ["good"] * len(completions)

def hang(prompts, completions, **_):
    if "hang" in completions:
        time.sleep(600)
    return [0.5] * len(completions)

def die(prompts, completions, **_):
    os._exit(3)
"""


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(folder))
    yield
    patch.undo()


def pool(*names, **options):
    return RewardPool(RewardArguments(reward_funcs=[f"my_rewards:{name}" for name in names], **{"reward_workers": 1} | options))


GROUP = ("q1", "P", ["ab", "none", "c"], {"gold": 3})


def test_scores_come_back_in_order_with_columns_and_weights():
    with pool("length", "some", reward_weights=[0.1, 2.0], reward_workers=2) as scorer:
        [first, second] = scorer.score([GROUP, ("q2", "P", ["x"], {"gold": 3})])
    assert [s.reward for s in first] == pytest.approx([2.2, 0.4, 2.1])
    assert first[1].rewards == {"length": 4.0, "some": None}
    assert [s.reward for s in second] == pytest.approx([2.1])


@pytest.mark.parametrize(
    "name, message",
    [
        ("crash", r"ZeroDivisionError: division by zero \(my_rewards.py:\d+\)"),
        ("short", "must return a list of 3 rewards, one an answer; it returned 1 values"),
        ("nan", "returned nan; a reward is a finite number or None"),
        ("word", "returned 'good'; a reward is a finite number or None"),
        ("die", r"the worker process died \(exit code 3\)"),
    ],
)
def test_what_goes_wrong_is_an_error_or_counted(name, message):
    with pool(name) as scorer, pytest.raises(RuntimeError, match=f"reward function my_rewards:{name} failed on prompt q1: .*{message}"):
        scorer.score([GROUP])
    with pool(name, "length", on_reward_error="none") as scorer:
        [scores] = scorer.score([GROUP])
        assert [s.rewards for s in scores] == [{name: None, "length": float(n)} for n in (2, 4, 1)]
        assert scorer.failures == 1


def test_a_hang_ends_at_the_time_limit_and_the_worker_is_replaced():
    with pool("hang", on_reward_error="none", reward_timeout=1.0) as scorer:
        start = time.monotonic()
        first, second = scorer.score([("q1", "P", ["hang", "x"], {}), ("q2", "P", ["y"], {})])
        assert time.monotonic() - start < 30
        assert [s.reward for s in first] == [None, None] and [s.reward for s in second] == [0.5]
        assert scorer.failures == 1
        [third] = scorer.score([("q3", "P", ["z"], {})])
        assert third[0].reward == 0.5
    with pool("hang", reward_timeout=1.0) as scorer, pytest.raises(RuntimeError, match="failed on prompt q1: no result after 1 s"):
        scorer.score([("q1", "P", ["hang"], {})])


def test_rows_that_cannot_be_scored_are_known_before():
    with RewardPool(RewardArguments(["grpo.rewards:choice_f1", "my_rewards:crash"], reward_workers=2)) as scorer:
        rows = [(f"f:{i}", {"answer": "a", "choices": None}) for i in range(1, 250)]
        rows += [("f:250", {"answer": None}), ("f:251", {}), ("f:252", {"answer": ["b"], "choices": "abc"})]
        rows += [("f:253", {"answer": "a,C", "choices": ["1", "2", "3"]}), ("f:254", {"answer": "a,d", "choices": ["1", "2", "3"]})]
        wrong = scorer.check(rows)
    assert set(wrong) == {"f:250", "f:251", "f:252", "f:254"}
    for place, message in (
        ("f:250", "column `answer` must hold letters"),
        ("f:251", "it holds None"),
        ("f:252", "`choices` must be a list"),
        ("f:254", "`answer` holds 'a,d', but there are 3 choices"),
    ):
        assert wrong[place].startswith("grpo.rewards:choice_f1: ") and message in wrong[place]
    questions = [Question(where, "", [1], {}, where) for where, _ in rows]
    message = "f:250: id 'f:250' cannot be scored: grpo.rewards:choice_f1: column `answer` .* 4 of 254 rows are like that .on_bad_row=skip"
    with pytest.raises(ValueError, match=message):
        scorable(questions, wrong, "error")
    assert scorable(questions, wrong, "skip") == [*questions[:249], questions[252]] and scorable(questions[:249], wrong, "error") == questions[:249]
    with pytest.raises(ValueError, match="3 of 3 rows"):
        scorable(questions[249:252], wrong, "skip")


@pytest.mark.parametrize(
    "name, message",
    [
        ("my_rewards", "must be named module:function"),
        ("my_rewards:nothing", "my_rewards has no function nothing"),
        ("no_such_module:f", "cannot import no_such_module"),
    ],
)
def test_unknown_functions_are_refused_at_the_start(name, message):
    with pytest.raises(ValueError, match=message):
        RewardPool(RewardArguments(reward_funcs=[name], reward_workers=1))


def test_arguments():
    with pytest.raises(ValueError, match="reward_weights has 1 numbers for 2"):
        RewardArguments(reward_funcs=["a:f", "b:g"], reward_weights=[1.0])
    assert RewardArguments(reward_funcs=["a:f", "b:f", "c:g"]).names() == ["a:f", "b:f", "g"]
