"""Expert answers out of multiple-choice questions: two steps, checks, a kill in between; and whether they have the form that the reward reads."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from fake_chat import FakeChat

pytest.importorskip("openai", reason="bash env/setup.sh train --with openai")

from common import rows
from common.jsonl import write_lines
from grpo import chord_data, endpoint
from grpo.chord_data import Rejected, check_answer, check_question, format_warnings, read_mcq

JA = {
    "problem_id": "112A1",
    "problem_text": "高アンモニア血症をきたす疾患はどれか。",
    "choices": ["Gaucher病", "von Gierke病", "Hurler症候群", "メープルシロップ尿症", "オルニチントランスカルバミラーゼ欠損症"],
    "text_only": True,
    "answer": ["e"],
}
EN = {
    "id": "en1",
    "question": "Which drugs raise uric acid?",
    "choices": ["Thiazides", "Probenecid", "Cyclosporine"],
    "answer": "a,c",
    "year": 2020,
}
QUESTION = {
    "ja": "新生児の高アンモニア血症の原因として、まず考えるべき先天代謝異常は何ですか。",
    "en": "Which commonly used medicines raise serum uric acid, and why?",
}
MARKERS = chord_data.MARKERS
ANSWER = {
    language: "\n".join(f"{marker}\n{'because of the urea cycle, ' * 3}it holds." for marker in MARKERS[language]) for language in MARKERS
}


def language_of(body) -> str:
    return "ja" if "あなたは" in body["messages"][0]["content"] else "en"


def is_question(body) -> bool:
    return "response_format" in body


def writes(body, number):
    return {"question": QUESTION[language_of(body)]} if is_question(body) else ANSWER[language_of(body)]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(answer, rows, "--limit", 1) -> (exit code, rows made, {id: reason}, bodies that the server got)."""
    monkeypatch.setattr(endpoint, "FIRST_PAUSE", 0.01)

    def run(answer, data, *options):
        write_lines(tmp_path / "data.jsonl", data)
        with FakeChat(answer) as server:
            (tmp_path / "endpoint.yaml").write_text(f"base_url: {server.url}\nmodel: m\nmax_tries: 2\n")
            files = ["--data", tmp_path / "data.jsonl", "--endpoint", tmp_path / "endpoint.yaml", "--output", tmp_path / "sft.jsonl"]
            code = chord_data.main([str(part) for part in (*files, *options)])
        read = {
            name: [row for _, row in rows.read_rows(str(tmp_path / name))] if (tmp_path / name).exists() else []
            for name in ("sft.jsonl", "sft.rejected.jsonl")
        }
        return code, read["sft.jsonl"], {row["id"]: row["reason"] for row in read["sft.rejected.jsonl"]}, server.bodies

    return run


def test_two_steps_in_the_language_of_the_question(make, capsys):
    code, made, rejected, bodies = make(writes, [JA, EN], "--reward_funcs", "grpo.rewards:choice_exact")
    assert code == 0 and not rejected
    assert [row["id"] for row in made] == ["112A1", "en1"] and made[0]["answer"] == ["e"] and made[1]["answer"] == ["a", "c"]
    for row, language in zip(made, ("ja", "en"), strict=True):
        assert row["messages"] == [{"role": "user", "content": QUESTION[language]}, {"role": "assistant", "content": ANSWER[language]}]
    assert [body["temperature"] for body in bodies] == [0.0, 0.0, 0.3, 0.3]
    first = next(body for body in bodies if is_question(body) and language_of(body) == "ja")["messages"][1]["content"]
    assert "e. オルニチントランスカルバミラーゼ欠損症" in first and "<correct>\nオルニチントランスカルバミラーゼ欠損症\n</correct>" in first
    second = next(body for body in bodies if not is_question(body) and language_of(body) == "en")["messages"]
    assert (
        "\n".join(MARKERS["en"]) in second[0]["content"]
        and QUESTION["en"] in second[1]["content"]
        and "Thiazides\nCyclosporine" in second[1]["content"]
    )
    assert "Probenecid" not in second[1]["content"]
    # What it made is not in the form that the run's reward reads.
    assert "warning: 2 of 2 expert answers are not in the form that grpo.rewards:choice_exact reads" in capsys.readouterr().err


def test_answers_that_keep_the_choices_have_the_form_of_the_reward(make, capsys):
    code, made, _, bodies = make(writes, [JA, EN], "--keep_choices", "--reward_funcs", "grpo.rewards:choice_f1")
    assert code == 0 and "warning" not in capsys.readouterr().err
    assert not any(is_question(body) for body in bodies)
    assert made[1]["messages"][1]["content"] == ANSWER["en"] + "\n\n[ans]a,c[/ans]"
    assert (
        "c. Cyclosporine" in made[1]["messages"][0]["content"] and "[ans]a,c[/ans]" in made[1]["messages"][0]["content"]
    )  # asks for the tag


def test_a_text_that_fails_is_drawn_again_and_then_rejected_with_its_reason(make, capsys):
    def answer(body, number):
        if is_question(body):
            again = body["seed"] == 1
            assert body["temperature"] == (0.3 if again else 0.0)
            if "uric acid" in body["messages"][1]["content"]:
                return {"question": QUESTION["en"] if again else "Do Thiazides raise uric acid in plasma?"}
            return {"question": "選択肢のうち高アンモニア血症をきたすものを教えてください。"}
        return ANSWER["en"]

    no_picture, two_right = JA | {"problem_id": "112A2", "text_only": False}, JA | {"problem_id": "112A3", "answer": "a or d"}
    code, made, rejected, _ = make(answer, [JA, EN, no_picture, two_right, {"id": "other", "prompt": "text", "answer": "a"}])
    assert code == 0 and [row["id"] for row in made] == ["en1"]
    assert rejected == {
        "112A1": "question: speaks of choices (選択肢)",
        "112A2": "needs a picture (text_only: false)",
        "112A3": "several answers are right",
        "other": "no multiple-choice question: needs `problem_text` (or `question`), `choices` and `answer`",
    }
    assert "rejected 1: question: speaks of choices" in capsys.readouterr().out


def test_missing_replies_are_told_and_asked_for_again(make):
    def down_for_japanese(body, number):
        return ("status", (500, {})) if language_of(body) == "ja" else writes(body, number)

    code, made, rejected, _ = make(down_for_japanese, [JA, EN])
    assert code == 1 and [row["id"] for row in made] == ["en1"]
    assert rejected["112A1"].startswith("question: no reply (server_error")


def test_a_kill_loses_no_reply(tmp_path):
    """Killed while the second step waits; the same command pays only for what is missing."""
    write_lines(tmp_path / "data.jsonl", [JA, EN])

    def hangs_in_the_second_step(body, number):
        return writes(body, number) if is_question(body) or language_of(body) == "en" else ("hang", None)

    def start(server):
        (tmp_path / "endpoint.yaml").write_text(f"base_url: {server.url}\nmodel: m\n")
        command = [sys.executable, "-m", "grpo.chord_data", "--data", tmp_path / "data.jsonl", "--endpoint", tmp_path / "endpoint.yaml"]
        command += ["--output", tmp_path / "sft.jsonl"]
        return subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
        )

    cache = tmp_path / "sft.cache.jsonl"
    with FakeChat(hangs_in_the_second_step) as server:
        process = start(server)
        while process.poll() is None and not (cache.exists() and cache.read_bytes().count(b"\n") == 3):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not (tmp_path / "sft.jsonl").exists()
        server.bodies.clear()
        server.answer = writes
        assert start(server).wait() == 0
    assert [(is_question(body), language_of(body)) for body in server.bodies] == [(False, "ja")]
    assert len((tmp_path / "sft.jsonl").read_text().splitlines()) == 2


MCQ = chord_data._mcq("q", EN)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("Why?", "4 characters"),
        ("x" * 3001, "3001 characters"),
        ("Which of the following raises uric acid?", "speaks of choices"),
        ("Is option (c) right about uric acid?", "speaks of choices"),
        ("尿酸を上げるのはどれか。", "speaks of choices"),
        ("Why do thia zides raise uric acid?", "gives the answer away"),
    ],
)
def test_questions_that_are_refused(text, reason):
    with pytest.raises(Rejected, match=reason):
        check_question(text, MCQ)
    check_question("Which medicines raise uric acid, and in what order of importance?", MCQ)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda t: t[:60], "60 characters"),
        (lambda t: t * 30, "characters"),
        (lambda t: t.replace("## Reasons", "## Grounds"), "## Reasons is there 0 times"),
        (lambda t: t + "\n## Answer\nagain", "## Answer is there 2 times"),
        (lambda t: t.replace("## Reasons", "X").replace("## Answer", "## Reasons").replace("X", "## Answer"), "another order"),
        (lambda t: "Sure!\n" + t, "text before"),
        (lambda t: t[: t.index("## Differential")] + "## Differential\n", "nothing under ## Differential"),
        (lambda t: t + " so choice b is wrong", "speaks of choices"),
        (lambda t: t + " ［ａｎｓ］b", "tag of its own"),
    ],
)
def test_answers_that_are_refused(change, reason):
    check_answer(ANSWER["en"], MARKERS["en"], 80, 4000)
    with pytest.raises(Rejected, match=reason):
        check_answer(change(ANSWER["en"]), MARKERS["en"], 80, 4000)


def test_wrong_use(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines("data.jsonl", [JA])
    write_lines("twice.jsonl", [JA, JA])
    write_lines("sft.rejected.jsonl", [JA])
    (tmp_path / "link.jsonl").symlink_to("data.jsonl")
    write_lines("text.jsonl", [{"prompt": "x"}])
    (tmp_path / "e.yaml").write_text("base_url: http://127.0.0.1:1/v1\nmodel: m\n")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "question.md").write_text("=== user ===\n{{original}}")
    for options, message in [
        (["--data", "twice.jsonl"], "twice.jsonl:2: the id '112A1' is there twice"),
        (["--data", "text.jsonl"], "no question to use"),
        (["--endpoint", "none.yaml"], "none.yaml"),
        (["--templates", "t"], "question.md: a template has a system part, .* {{correct}}"),
        (["--reward_funcs", "grpo.rewards:none"], "has no function none"),
        (["--min_chars", "9", "--max_chars", "9"], "must be below"),
        (["--output", "sft.json"], "must be named"),
        (["--output", "data.jsonl"], "data.jsonl would be written, but it is what is read as data.jsonl"),
        (["--output", "link.jsonl"], "link.jsonl would be written, but it is what is read as data.jsonl"),
        (["--data", "sft.rejected.jsonl"], "sft.rejected.jsonl would be written"),
    ]:
        given = {"--data": "data.jsonl", "--endpoint": "e.yaml", "--output": "sft.jsonl"}
        given |= dict(zip(options[::2], options[1::2], strict=True))
        assert chord_data.main([part for pair in given.items() for part in pair]) == 2, options
        error = capsys.readouterr().err
        assert re.search(message, error), error
    assert not (tmp_path / "sft.jsonl").exists() and [row for _, row in rows.read_rows("data.jsonl")] == [JA]


def test_form_of_expert_answers_against_the_reward(tmp_path):
    tagged = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "So [ans]a,c[/ans]"}]}
    free = {"prompt": "Q", "completion": "It is thiazides, of course."}
    lists = {"prompt": [{"role": "user", "content": "Q"}], "completion": [{"role": "assistant", "content": r"so \boxed{72}"}]}
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    write_lines(files[0], [tagged, free])
    write_lines(files[1], [lists])
    (text,) = format_warnings(files, ["grpo.rewards:choice_f1"])
    assert text.startswith("2 of 3 expert answers are not in the form that grpo.rewards:choice_f1 reads") and "a.jsonl:2" in text
    (text,) = format_warnings(files, ["grpo.rewards:math_exact"])
    assert text.startswith("2 of 3") and "a.jsonl:1" in text
    write_lines(files[0], [tagged])
    assert format_warnings(files[:1], ["grpo.rewards:choice_f1", "grpo.rewards:choice_exact"]) == []
    assert format_warnings(files, ["statistics:mean"]) == []  # no rule is known
    with pytest.raises(ValueError, match="cannot be read"):
        format_warnings([str(tmp_path / "none.jsonl")], ["grpo.rewards:choice_f1"])


def test_a_reward_function_says_its_own_form(tmp_path, monkeypatch):
    (tmp_path / "own_form.py").write_text(
        "def reward(prompts, completions, **_):\n    return [0.0]\nreward.format_rule = lambda text: 'Answer:' in text\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    write_lines(tmp_path / "a.jsonl", [{"prompt": "Q", "completion": "Answer: 3"}, {"prompt": "Q", "completion": "3"}])
    (text,) = format_warnings([str(tmp_path / "a.jsonl")], ["own_form:reward"])
    assert text.startswith("1 of 2") and "a.jsonl:2" in text


def test_questions_of_the_exam_are_read(tmp_path):
    write_lines(tmp_path / "d.jsonl", [JA, EN])
    items, rejected = read_mcq([str(tmp_path / "d.jsonl")])
    assert not rejected and [(item.id, item.language, item.right) for item in items] == [
        ("112A1", "ja", ["オルニチントランスカルバミラーゼ欠損症"]),
        ("en1", "en", ["Thiazides", "Cyclosporine"]),
    ]
