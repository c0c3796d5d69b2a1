"""Questions, marks, paired statistics and the commands of common.evaluate."""

import json
import random
import re

import pytest
from conftest import ROOT

from common import evaluate
from common.answers import f1, gold_of, is_right, read_answer
from common.paired_tests import holm, mcnemar_exact, mean_interval, share_interval, wilson
from common.questions import read_items

# ---- statistics: reference values computed with another implementation


@pytest.mark.parametrize(
    "c, b, p",
    [
        (41, 32, 0.349182), (38, 30, 0.396125), (40, 30, 0.281979), (341, 261, 0.001264), (342, 269, 0.003548), (317, 278, 0.119195),
        (8, 1, 0.039062), (5, 5, 1.0), (3, 0, 0.25), (1, 0, 1.0), (0, 0, 1.0),
    ],
)  # fmt: skip
def test_exact_mcnemar(c, b, p):
    assert mcnemar_exact(b, c) == pytest.approx(p, abs=6e-7) and mcnemar_exact(c, b) == mcnemar_exact(b, c)


def test_exact_mcnemar_of_many_questions():
    """Far beyond what binomial coefficients in floating point can hold; the normal approximation agrees."""
    import math

    assert mcnemar_exact(20_000, 20_300) == pytest.approx(math.erfc(299 / math.sqrt(40_300) / math.sqrt(2)), rel=1e-3)


@pytest.mark.parametrize("c, b, n, figures", [(341, 261, 3758, (2.129, 0.851, 3.407)), (41, 32, 1122, (0.802, -0.690, 2.294))])
def test_difference_and_its_interval(c, b, n, figures):
    found = mean_interval([1] * c + [-1] * b + [0] * (n - b - c))
    assert [100 * value for value in found] == pytest.approx(figures, abs=6e-4)

    assert share_interval([1] * c + [-1] * b + [0] * (n - b - c)) == found


@pytest.mark.parametrize(
    "b, c, n, interval",
    [(8, 0, 8, (-1.0, -0.428123)), (0, 2, 4, (-0.263065, 0.929731)), (0, 0, 8, (-0.277181, 0.277181)), (30, 0, 30, (-1.0, -0.816931))],
)
def test_the_interval_of_small_counts(b, c, n, interval):
    """(c - b) / (N + 2) +- 1.96 sqrt(b + c + 2 - (c - b)^2 / (N + 2)) / (N + 2)"""
    mean, *found = share_interval([1] * c + [-1] * b + [0] * (n - b - c))
    assert mean == (c - b) / n and found == pytest.approx(interval, abs=1e-6)


@pytest.mark.parametrize(
    "worse, better, n, least", [(0.1, 0.2, 300, 0.94), (0.02, 0.5, 8, 0.94), (0.02, 0.05, 4, 0.94), (0.1, 0.8, 40, 0.94)]
)
def test_the_interval_covers_the_truth_as_often_as_it_says(worse, better, n, least):
    """Of 4 questions the interval without two more covers it in a quarter of all cases."""
    generator = random.Random(0)
    covered = 0
    for _ in range(2000):
        _, low, high = share_interval(generator.choices([1, -1, 0], [better, worse, 1 - worse - better], k=n))
        covered += low <= better - worse <= high
    assert least < covered / 2000


def test_wilson_and_holm():
    assert wilson(0.5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.161125), abs=1e-6) and wilson(1.0, 20) == pytest.approx((0.838875, 1.0), abs=1e-6)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.001, 0.8]) == pytest.approx([1.0, 0.003, 1.0]) and holm([]) == []


# ---- marks


@pytest.mark.parametrize(
    "answer, said, right, score",
    [
        ("a,c", "[ans]a,c[/ans]", True, 1.0),
        (["c", "a"], "first [ans]b[/ans], no: [ans]Ａ、ｃ[/ans]", True, 1.0),
        ("a,c", "[ans]a[/ans]", False, 2 / 3),
        ("a,c", "[ans]a,b,c[/ans]", False, 0.8),
        ("a", "[ans]a,b,c,d,e[/ans]", False, 1 / 3),
        ("a", "it is a", False, 0.0),
        ("a", "[ans]f[/ans]", False, 0.0),
        ("a or d", "[ans]d[/ans]", True, 1.0),
        ("a or d", "[ans]a,d[/ans]", False, 2 / 3),
    ],
)
def test_marks_of_choices(answer, said, right, score):
    gold = gold_of(answer, 5)
    prediction = read_answer(said, gold, 5)
    assert is_right(prediction, gold) is right and f1(prediction, gold) == pytest.approx(score)
    assert (prediction is None) == (said in ("it is a", "[ans]f[/ans]"))


@pytest.mark.parametrize(
    "said, right",
    [("[ans]1,800[/ans]", True), ("[ans]$1800.0[/ans]", True), ("so\n#### 1800", True), ("[ans]180[/ans]", False), ("1800", False)],
)
def test_marks_of_numbers(said, right):
    gold = gold_of("2 x 900 = 1800\n#### 1,800")
    prediction = read_answer(said, gold)
    assert is_right(prediction, gold) is right and (prediction is None) == (said == "1800")
    assert is_right(read_answer("1800", gold, bare=True), gold)


# ---- files


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


EXAM = [
    {"problem_id": "112A1", "problem_text": "正しいのはどれか。", "choices": ["い", "ろ", "は", "に", "ほ"], "text_only": True, "answer": ["e"], "points": "1"},
    {"problem_id": "112B2", "problem_text": "2つ選べ。", "choices": ["い", "ろ", "は", "に", "ほ"], "text_only": False, "answer": ["a", "c"], "points": "3"},
    {"problem_id": "113C66", "problem_text": "計算せよ。", "choices": [], "text_only": True, "answer": ["7.20"], "points": "0"},
]  # fmt: skip


def test_questions_of_an_exam_as_they_are(tmp_path):
    items, _ = read_items([write(tmp_path / "exam.jsonl", EXAM)])
    [message] = items["112B2"].prompt
    assert message["content"].startswith("2つ選べ。\n\na. い\nb. ろ\n") and message["content"].endswith("[ans]a,c[/ans]の形です。")
    assert items["112B2"].columns | {"section": "B", "year": "2018", "num_answers": "2", "points": "3"} == items["112B2"].columns
    assert items["113C66"].columns["year"] == "2019" and "[ans]12[/ans]" in items["113C66"].prompt[0]["content"]
    kept, left_out = read_items([str(tmp_path / "exam.jsonl")], instruction="Answer.", text_only=True)
    assert [*kept] == ["112A1", "113C66"] and left_out == 1 and kept["112A1"].prompt[0]["content"].endswith("ほ\n\nAnswer.")


def test_plain_questions(tmp_path):
    rows = [
        {"id": 0, "prompt": "Is it a or b?", "answer": "b", "speciality": "eye"},
        {"prompt": [{"role": "user", "content": "?"}], "answer": ["a"]},
        {"question": "1 + 1?", "answer": "#### 2"},
    ]
    items, _ = read_items([write(tmp_path / "plain.jsonl", rows)])
    assert [*items] == ["0", "plain.jsonl:2", "plain.jsonl:3"]
    assert items["0"].prompt == "Is it a or b?" and items["0"].columns["speciality"] == "eye"
    assert items["plain.jsonl:3"].prompt[0]["content"].startswith("1 + 1?\n\nEnd with the number")

    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(EXAM), tmp_path / "exam.parquet")
    assert [*read_items([str(tmp_path / "exam.parquet")])[0]] == ["112A1", "112B2", "113C66"]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "x"}, "q.jsonl:2: the row has no `answer`"),
        ({"answer": "a"}, "q.jsonl:2: a row needs `prompt`, `problem_text` or `question`; columns found: answer"),
        ({"prompt": "x", "answer": "the first"}, "q.jsonl:2: column `answer` holds 'the first'"),
        ({"question": "x", "choices": ["p", "q"], "answer": "c"}, "q.jsonl:2: column `answer` holds 'c', but there are 2 choices"),
        ({"id": 1, "prompt": "x", "answer": "a"}, r"q.jsonl:2: id '1' is that of .*q.jsonl:1 too"),
    ],
)
def test_bad_questions_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read_items([write(tmp_path / "q.jsonl", [{"id": 1, "prompt": "y", "answer": "b"}, row])])


# ---- score and compare


@pytest.fixture
def scored(tmp_path, capsys):
    """scored("score", "--predictions", ...) -> (exit code, JSON or error text)."""

    def call(*arguments):
        code = evaluate.main([*map(str, arguments), *(["--json"] if "--json" not in arguments else [])])
        out, err = capsys.readouterr()
        return code, json.loads(out) if code == 0 else err

    return call


def test_score_of_others_predictions(tmp_path, scored):
    data = write(tmp_path / "exam.jsonl", EXAM)
    theirs = [{"problem_id": i, "prediction": p} for i, p in (("112A1", "E"), ("112B2", "a, b"), ("113C66", "申し訳ありません"))]
    file = write(tmp_path / "theirs.jsonl", theirs)
    code, result = scored("score", "--predictions", file, "--data", data, "--group_by", "year", "num_answers")
    assert code == 0
    whole, *groups = result["groups"]
    assert (whole["questions"], whole["right"], whole["unreadable"]) == (3, 1, 1)
    assert whole["accuracy"] == pytest.approx(1 / 3) and whole["f1"] == pytest.approx(0.5)
    assert (whole["low"], whole["high"]) == wilson(1 / 3, 3)
    found = {(row["column"], row["value"]): (row["questions"], row["right"]) for row in groups}
    assert found == {("year", "2018"): (2, 1), ("year", "2019"): (1, 0), ("num_answers", "1"): (2, 1), ("num_answers", "2"): (1, 0)}

    assert scored("score", "--predictions", file) == (2, f"error: {file} holds no right answers: give the questions with --data\n")
    code, error = scored("score", "--predictions", write(tmp_path / "part.jsonl", theirs[:1]), "--data", data)
    assert code == 2 and "2 ids of the data have no prediction: 112B2, 113C66" in error
    code, error = scored(
        "score", "--predictions", write(tmp_path / "more.jsonl", [*theirs, {"id": "x", "prediction": "a"}]), "--data", data
    )
    assert code == 2 and "1 ids not in the data: x" in error
    code, error = scored("score", "--predictions", write(tmp_path / "twice.jsonl", [*theirs, theirs[1]]), "--data", data)
    assert code == 2 and "id '112B2' has 2 predictions, others have 1" in error
    code, error = scored("score", "--predictions", file, "--data", data, "--group_by", "speciality")
    assert code == 2 and "no question has a column 'speciality'" in error and "points" in error


def own(outcomes, samples=1):
    """Lines as `run` writes them: outcomes[i] = letters given to question i, of which `a` is right; even questions are of group x."""
    return [
        {"id": f"q{i}", "sample": s, "prediction": p, "answer": "a", "num_choices": 5, "columns": {"part": "xy"[i % 2]}, "prompt_hash": "h", "temperature": 0.0}
        for i, given in enumerate(outcomes)
        for s, p in enumerate(given if samples > 1 else [given])
    ]  # fmt: skip


def test_compare(tmp_path, scored):
    """8 better, 1 worse, 31 alike, of 40."""
    base = write(tmp_path / "base.jsonl", own(["b"] * 8 + ["a"] + ["a"] * 21 + [None] * 10))
    new = write(tmp_path / "new.jsonl", reversed(own(["a"] * 8 + ["c"] + ["a"] * 21 + ["b"] * 10)))
    code, result = scored("compare", "--base", base, "--new", new, "--group_by", "part")
    assert code == 0
    whole = result["all"]
    assert (whole["questions"], whole["b"], whole["c"]) == (40, 1, 8) and whole["p"] == pytest.approx(0.0390625)
    assert (whole["base_accuracy"], whole["new_accuracy"], whole["difference"]) == (22 / 40, 29 / 40, pytest.approx(7 / 40))
    assert (whole["low"], whole["high"]) == pytest.approx((0.020331, 0.313002), abs=1e-6)
    x, y = result["groups"]
    assert [(g["value"], g["questions"], g["b"], g["c"], g["p"]) for g in (x, y)] == [("x", 20, 1, 4, 0.375), ("y", 20, 0, 4, 0.125)]
    assert (x["p_holm"], y["p_holm"]) == (0.375, 0.25)

    code, result = scored("compare", "--base", base, "--new", new, "--subset", "base_wrong", "--group_by", "part")
    whole = result["all"]
    assert (whole["questions"], whole["b"], whole["c"], whole["new_accuracy"]) == (18, 0, 8, pytest.approx(8 / 18)) and "p" not in whole
    assert (whole["new_low"], whole["new_high"]) == wilson(8 / 18, 18)


def test_compare_of_samples(tmp_path, scored):
    """b and c by the most frequent answer, the earliest of equally frequent ones; the difference by all samples, questions as the unit."""
    base = write(tmp_path / "base.jsonl", own([["a", "b", "b", None], ["b", "a", "c", "d"]], samples=4))
    new = write(tmp_path / "new.jsonl", own([["b", "a", "a", "c"], ["a", "b", "b", "a"]], samples=4))
    _, result = scored("compare", "--base", base, "--new", new)
    assert (result["all"]["b"], result["all"]["c"]) == (0, 2) and result["all"]["difference"] == pytest.approx(0.25)
    assert (result["all"]["low"], result["all"]["high"]) == pytest.approx((0.125 - 0.703696, 0.125 + 0.703696), abs=1e-6)
    _, result = scored("score", "--predictions", base)
    [whole] = result["groups"]
    assert (result["samples"], whole["right"], whole["accuracy"], whole["majority"], whole["unreadable"]) == (4, 2, 0.25, 0.0, 1)


def test_other_questions_and_other_gold_are_refused(tmp_path, scored):
    base = write(tmp_path / "base.jsonl", own(["a"] * 30))
    code, error = scored("compare", "--base", base, "--new", write(tmp_path / "new.jsonl", own(["a"] * 17)))
    names = ", ".join(f"q{i}" for i in range(17, 27))
    assert code == 2 and error == f"error: a paired test needs the same questions: 13 ids only in {base}: {names} and 3 more\n"
    changed = own(["a"] * 30)
    changed[4]["answer"] = "b"
    code, error = scored("compare", "--base", base, "--new", write(tmp_path / "new.jsonl", changed))
    assert code == 2 and "1 ids have another right answer in the two files: q4" in error
    changed = own(["a"] * 30)
    changed[4]["prompt_hash"] = "other"
    code, result = scored("compare", "--base", base, "--new", write(tmp_path / "new.jsonl", changed))
    assert code == 0 and result["warnings"] == ["1 ids were asked with another prompt: q4: the difference is not the models' alone"]


def test_files_that_are_not_what_they_should_be(tmp_path, scored):
    base = write(tmp_path / "base.jsonl", own(["a"] * 11))
    data = write(tmp_path / "data.jsonl", [{"id": f"q{i}", "prompt": "?", "answer": "a"} for i in range(12)])
    code, error = scored("compare", "--base", base, "--new", base, "--data", data)
    assert code == 2 and f"{base}: 1 ids of the data have no prediction: q11" in error
    two = write(tmp_path / "two.jsonl", own([["a", "b"]] * 11, samples=2))
    code, error = scored("compare", "--base", base, "--new", two)
    assert code == 2 and f"{base} has 1 answers to a question, {two} 2" in error
    for change, message in [
        ({"prediction": [1, 2]}, "bad.jsonl:2: prediction must be text like"),
        ({"prediction": ["a", 1]}, "bad.jsonl:2: prediction must be text like"),
        ({"sample": "1"}, "bad.jsonl:2: sample and num_choices must be whole numbers, not '1' and 5"),
        ({"columns": [1]}, r"bad.jsonl:2: columns must be a JSON object"),
        ({"id": "q0"}, "bad.jsonl:2: sample 0 of id 'q0' is that of .*bad.jsonl:1 too"),
        ({"id": "q0", "sample": None}, "id 'q2' has 1 predictions, others have 2"),
        ({"answer": None}, "bad.jsonl holds no right answers for some: 1 ids without `answer`: q1: give the questions with --data"),
        ({"answer": "x y"}, "bad.jsonl: id 'q1': column `answer` holds 'x y'"),
    ]:
        lines = own(["a", "a", "b"])
        lines[1] |= change
        code, error = scored("score", "--predictions", write(tmp_path / "bad.jsonl", lines))
        assert code == 2 and re.search(message, error), error
    code, error = scored("score", "--predictions", tmp_path)
    assert code == 2 and f"{tmp_path} is a folder" in error
    lines = own(["a", "b"])
    lines[0]["columns"] = None
    code, result = scored("score", "--predictions", write(tmp_path / "null.jsonl", lines), "--group_by", "part")
    assert code == 0 and [row["value"] for row in result["groups"]] == ["", "(none)", "y"]


def test_common_imports_no_trainer():
    for path in (ROOT / "common").glob("*.py"):
        assert not re.search(r"^\s*(from|import) (sft|dpo|grpo)\b", path.read_text(encoding="utf-8"), re.MULTILINE), path


# ---- run


def test_no_output_replaces_an_input(tmp_path, scored):
    rows = [{"id": 1, "prompt": "x", "answer": "a"}]
    data = tmp_path / "q.jsonl"
    for name in ("q.jsonl", "new.answers.jsonl"):
        write(tmp_path / name, rows)
    (tmp_path / "link.jsonl").symlink_to(data)
    (tmp_path / "hard.jsonl").hardlink_to(data)
    for given, output in [("q", "q"), ("q", "link"), ("hard", "q"), ("link", "hard"), ("new.answers", "new")]:
        code, error = scored("run", "--model", "none", "--data", tmp_path / f"{given}.jsonl", "--output", tmp_path / f"{output}.jsonl")
        assert code == 2 and "would be written, but it is what is read as" in error, error
    assert json.loads(data.read_text()) == rows[0] and len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "option, message",
    [
        (["--chat_template_kwargs", "[]"], "chat_template_kwargs must be a JSON object: []"),
        (["--temperature", "nan"], "temperature a number from 0 on"),
        (["--data", "text.jsonl"], "text.jsonl:1: tools must be a list"),
    ],
)
def test_wrong_options(tiny_dir, tmp_path, scored, monkeypatch, option, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "text.jsonl", [{"prompt": "x", "answer": "a", "tools": "{}" if option[0] == "--data" else "[]"}])
    code, error = scored("run", "--model", tiny_dir("llama"), "--data", "text.jsonl", "--output", "new.jsonl", *option)
    assert code == 2 and message in error, error


def test_run_asks_marks_and_goes_on_after_a_kill(tiny_dir, tmp_path, scored):
    model, data = tiny_dir("llama"), write(tmp_path / "exam.jsonl", EXAM)
    command = ("run", "--model", model, "--data", data, "--max_new_tokens", 8, "--batch_size", 1, "--group_by", "year")
    code, result = scored(*command, "--output", tmp_path / "whole.jsonl")
    assert code == 0 and (result["samples"], result["groups"][0]["questions"]) == (1, 3)
    assert [row["value"] for row in result["groups"]] == ["", "2018", "2019"]
    lines = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["112A1", "112B2", "113C66"] and lines[1]["answer"] == ["a", "c"]
    assert all(line["prediction"] is None and line["model"] == str(model) for line in lines)  # a random model writes no tag

    made = (tmp_path / "whole.answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.answers.jsonl").write_text(made[0] + made[1][:20])  # killed while it wrote the second
    (tmp_path / "part.answers.jsonl.meta.json").write_text((tmp_path / "whole.answers.jsonl.meta.json").read_text())
    code, error = scored("score", "--predictions", tmp_path / "part.jsonl")
    assert code == 2 and "part.jsonl does not exist. `common.evaluate run` writes it when all answers are there" in error
    assert scored(*command, "--output", tmp_path / "part.jsonl")[0] == 0
    assert (tmp_path / "part.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert (tmp_path / "part.answers.jsonl").read_text().startswith(made[0])

    code, result = scored("compare", "--base", tmp_path / "whole.jsonl", "--new", tmp_path / "part.jsonl")
    assert code == 0 and (result["all"]["b"], result["all"]["c"], result["all"]["p"]) == (0, 0, 1.0)
    code, error = scored(*command, "--temperature", 0.5, "--output", tmp_path / "whole.jsonl")
    assert code == 2 and "whole.answers.jsonl was made by" in error and "temperature 0.0, now 0.5" in error


def test_servers_that_are_not_there(tmp_path, scored, monkeypatch):
    command = ("run", "--server", "http://127.0.0.1:9", "--data", write(tmp_path / "exam.jsonl", EXAM), "--output", tmp_path / "new.jsonl")
    code, error = scored(*command)
    assert code == 2 and "http://127.0.0.1:9 is no OpenAI-compatible server that answers" in error

    def gone(*_):
        raise RuntimeError("no server has answered for 10 minutes. What was made is kept; start again to go on.")

    monkeypatch.setattr(evaluate.generate, "generate", gone)
    assert scored(*command) == (1, "error: no server has answered for 10 minutes. What was made is kept; start again to go on.\n")
    assert not (tmp_path / "new.jsonl").exists()


def test_tables_for_people(tmp_path, capsys):
    base = write(tmp_path / "base.jsonl", own(["b"] * 8 + ["a"] * 32))
    new = write(tmp_path / "new.jsonl", own(["a"] * 39 + ["b"]))
    assert evaluate.main(["compare", "--base", base, "--new", new, "--group_by", "part"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[3].split() == ["all", "40", "80.00", "%", "97.50", "%", "+17.50", "+2.03", "to", "+31.30", "1", "8", "0.03906"]
    assert evaluate.main(["score", "--predictions", new]) == 0
    figures = ["all", "40", "39", "97.50", "%", "87.1", "to", "99.6", "0.9750", "0", "(0.0", "%)"]
    assert capsys.readouterr().out.splitlines()[-1].split() == figures
