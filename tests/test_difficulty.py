"""Difficulty: levels, predicted collapse, filtering; answers that are kept over a kill, from this process and from servers."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from fake_chat import FakeChat

from common import generate, rows
from common.generate import Ask, LocalModel, Sampling, Servers
from common.jsonl import write_json, write_lines
from grpo import difficulty
from grpo.difficulty import fit_prior, level, observed_collapse, parse_levels, predict

# ---- levels and prediction


def test_levels_of_five_are_those_of_the_paper():
    assert [level(k, 5) for k in (5, 4, 3, 2, 1, 0)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 10, 16, 64])
def test_levels_of_any_number_of_answers(n):
    levels = [level(k, n) for k in range(n + 1)]
    assert levels == sorted(levels, reverse=True) and (levels[-1], levels[0]) == (1, 6)
    assert all(2 <= one <= 5 for one in levels[1:-1])


def test_levels_of_eight_and_sixteen():
    assert [level(k, 8) for k in range(9)] == [6, 5, 5, 4, 3, 3, 2, 2, 1]
    assert (level(15, 16), level(1, 16)) == (2, 5)  # the rounded formula alone says 1 and 6


def test_keep():
    assert parse_levels("2-5") == {2, 3, 4, 5} and parse_levels("1, 3-4") == {1, 3, 4}
    for text in ("", "0-3", "2-7", "5-2", "a", "-2"):
        with pytest.raises(ValueError, match="keep is"):
            parse_levels(text)


def test_predicted_collapse_of_five_answers():
    """Posterior mean under a uniform prior, by hand: k of 5 right, groups of 8 and 16."""
    for size, values in ((8, (0.4289, 0.1678, 0.0699, 0.0699, 0.1678, 0.4289)), (16, (0.2727, 0.0652, 0.0150, 0.0150, 0.0652, 0.2727))):
        assert [predict([(k, 5)], size, (1.0, 1.0))["uniform"] for k in range(5, -1, -1)] == pytest.approx(values, abs=5e-5)


def test_prediction_against_a_simulation():
    """Pass rates of a model that knows most answers or does not: the fitted prior finds them, the uniform one does not."""
    draw = random.Random(0)
    probabilities = [draw.betavariate(0.3, 0.2) for _ in range(3000)]
    rates = [(sum(draw.random() < p for _ in range(4)), 4) for p in probabilities]
    a, b = fit_prior(rates)
    assert (a, b) == (pytest.approx(0.3, rel=0.15), pytest.approx(0.2, rel=0.15))
    truth = sum(p**16 + (1 - p) ** 16 for p in probabilities) / len(probabilities)
    found = predict(rates, 16, (a, b))
    assert found["fitted"] == pytest.approx(truth, abs=0.02) and found["observed"] is None
    assert abs(found["uniform"] - truth) > 0.2
    small = predict(rates, 2, (a, b))
    assert small["observed"] == pytest.approx(sum(p**2 + (1 - p) ** 2 for p in probabilities) / len(probabilities), abs=0.02)


def test_what_the_answers_say_without_a_prior():
    assert observed_collapse(3, 4, 2) == pytest.approx(3 / 6) and observed_collapse(4, 4, 2) == 1 and observed_collapse(2, 4, 4) == 0


# ---- filter and report


def measurement(folder, rates, fingerprint="f1"):
    """d.jsonl and prompts.jsonl, one row for each (k, n)."""
    data = [{"id": f"q{i}", "prompt": f"P{i}", "answer": "a", "year": 2000 + i} for i in range(len(rates))]
    write_lines(folder / "prompts.jsonl", data)
    lines = [
        {"id": r["id"], "k": k, "n": n, "model_fingerprint": fingerprint, "row_hash": difficulty.row_hash(r)}
        for r, (k, n) in zip(data, rates, strict=True)
    ]
    write_lines(folder / "d.jsonl", lines)
    sampling = {"samples": 8, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64, "seed": 0}
    write_json(
        folder / "d.jsonl.meta.json",
        {"model": "BASE", "fingerprint": fingerprint, "sampling": sampling, "reward_func": "grpo.rewards:choice_exact"},
    )
    return data


def call(*arguments) -> int:
    return difficulty.main([str(argument) for argument in arguments])


def test_filter_keeps_rows_as_they_are(tmp_path, capsys):
    data = measurement(tmp_path, [(8, 8), (7, 8), (4, 8), (1, 8), (0, 8)])
    files = ("--difficulty", tmp_path / "d.jsonl", "--data", tmp_path / "prompts.jsonl")
    assert call("filter", *files, "--output", tmp_path / "kept.jsonl") == 0
    out = capsys.readouterr()
    assert [row for _, row in rows.read_rows(str(tmp_path / "kept.jsonl"))] == data[1:4]
    assert "L1 1 dropped, L2 1, L3 1, L4 0, L5 1, L6 1 dropped" in out.out and "3 of 5 rows" in out.out and not out.err
    assert call("filter", *files, "--keep", "1,6", "--output", tmp_path / "ends.jsonl") == 0
    assert [row["id"] for _, row in rows.read_rows(str(tmp_path / "ends.jsonl"))] == ["q0", "q4"]
    assert call("filter", *files, "--keep", "4", "--output", tmp_path / "none.jsonl") == 2 and not (tmp_path / "none.jsonl").exists()
    assert call("filter", *files, "--output", tmp_path / "prompts.jsonl") == 2  # would overwrite what it reads


def test_rows_without_an_id_keep_the_one_they_were_measured_under(tmp_path):
    write_lines(tmp_path / "p.jsonl", [{"prompt": "A"}, {"prompt": "B"}])
    write_lines(tmp_path / "d.jsonl", [{"id": "p.jsonl:1", "k": 0, "n": 4}, {"id": "p.jsonl:2", "k": 2, "n": 4}])
    assert call("filter", "--difficulty", tmp_path / "d.jsonl", "--data", tmp_path / "p.jsonl", "--output", tmp_path / "kept.jsonl") == 0
    assert [row for _, row in rows.read_rows(str(tmp_path / "kept.jsonl"))] == [{"prompt": "B", "id": "p.jsonl:2"}]


def test_a_stale_measurement_warns(tmp_path, tiny_dir, capsys):
    data = measurement(tmp_path, [(4, 8)] * 4)
    data[1]["answer"] = "b"
    write_lines(tmp_path / "prompts.jsonl", [*data, {"id": "new", "prompt": "N"}])
    (tmp_path / "run.yaml").write_text("temperature: 0.9\ntop_p: 1\nmax_completion_length: 64\nreward_funcs: [grpo.rewards:math_exact]\n")
    files = ("--difficulty", tmp_path / "d.jsonl", "--data", tmp_path / "prompts.jsonl", "--output", tmp_path / "kept.jsonl")
    assert call("filter", *files, "--model", tiny_dir("qwen3_moe"), "--config", tmp_path / "run.yaml") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 5
    for text in ("1 of 5 prompts were not measured, for instance new", "1 of 5 rows have changed since they were measured, for instance q1",
                 "another model (BASE)", "with temperature 1.0, the run has temperature 0.9", "choice_exact, which is none of the run's"):  # fmt: skip
        assert any(text in warning for warning in warnings), text
    with open(tmp_path / "d.jsonl", "a") as file:
        file.write(json.dumps({"id": "new", "k": 1, "n": 8, "model_fingerprint": "f2"}) + "\n")
    assert call("report", "--difficulty", tmp_path / "d.jsonl", "--plot", "none") == 0
    assert "2 different models" in capsys.readouterr().err


def test_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    measurement(tmp_path, [(8, 8)] * 60 + [(7, 8)] * 10 + [(4, 8)] * 10 + [(0, 8)] * 20)
    assert call("report", "--difficulty", tmp_path / "d.jsonl", "--num_generations", 8) == 0
    out = capsys.readouterr().out
    assert "L1          60   60.0%" in out and "L6          20   20.0%" in out and "mean pass rate 0.738" in out
    assert "from the measured answers alone: 0.8000" in out and "NOT enough" in out
    assert (tmp_path / "d.png").read_bytes()[:4] == b"\x89PNG"
    assert call("report", "--difficulty", tmp_path / "d.jsonl", "--json", "--plot", "none", "--max_resample_times", 5) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bound"] == pytest.approx(0.8) and found["collapse"]["observed"] == pytest.approx(0.8)
    assert found["collapse_kept_2_5"] < 0.25 < found["collapse"]["fitted"] and found["levels"][1]["prompts"] == 10


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["measure", "--data", "none.jsonl", "--output", "d.jsonl"], "give --model FOLDER or --server URL"),
        (["report", "--difficulty", "none.jsonl"], "none.jsonl"),
        (["report", "--difficulty", "bad.jsonl"], "bad.jsonl:2: needs id, k and n"),
        (
            ["filter", "--difficulty", "d.jsonl", "--data", "twice.jsonl", "--output", "o.jsonl"],
            "twice.jsonl:2: the id 'q0' is there twice",
        ),
        (["filter", "--difficulty", "d.jsonl", "--data", "text.jsonl", "--output", "o.jsonl"], "text.jsonl:1: a row needs `prompt`"),
        (["filter", "--difficulty", "d.jsonl", "--data", "other.jsonl", "--output", "o.jsonl"], "has none of the ids"),
        (["report", "--difficulty", "d.jsonl", "--num_generations", "1"], "num_generations must be at least 2"),
        (["report", "--difficulty", "d.jsonl", "--plot", "d.jsonl"], "d.jsonl would be written, but it is what is read as d.jsonl"),
        (
            ["report", "--difficulty", "again.jsonl"],
            "again.jsonl:2: needs id, k and n with 0 <= k <= n (ValueError: id 'a' was there before",
        ),
        (["report", "--difficulty", "binary.jsonl"], "binary.jsonl cannot be read"),
        (["report", "--difficulty", "torn.jsonl"], "torn.jsonl.meta.json is not valid JSON"),
        (["report", "--difficulty", "list.jsonl"], "list.jsonl.meta.json must hold one JSON object, not a list"),
        (["filter", "--difficulty", "d.jsonl", "--data", "prompts.jsonl", "--keep", "1-²", "--output", "o.jsonl"], "keep is '1-²'"),
        (["measure", "--data", "prompts.jsonl", "--output", "prompts.jsonl"], "prompts.jsonl would be written, but it is what is read"),
        (["measure", "--data", "o.answers.jsonl", "--output", "o.jsonl"], "o.answers.jsonl would be written, but it is what is read"),
        (
            ["measure", "--model", "MODEL", "--data", "nogold.jsonl", "--output", "o.jsonl"],
            "prompt b cannot be scored: grpo.rewards:choice_exact: column `answer` must hold letters",
        ),
        (
            ["measure", "--model", "MODEL", "--data", "options.jsonl", "--output", "o.jsonl"],
            "options.jsonl:1: chat_template_kwargs must be",
        ),
        (["measure", "--data", "prompts.jsonl", "--output", "o.jsonl", "--chat_template_kwargs", "[]"], "must be a JSON object: []"),
        (["measure", "--data", "prompts.jsonl", "--output", "o.jsonl", "--right", "nan"], "right is nan"),
        (
            ["measure", "--model", "MODEL", "--data", "prompts.jsonl", "--output", "o.jsonl", "--reward_func", "own_reward:even"],
            "an empty answer was scored: reward function own_reward:even failed on prompt q0",
        ),
    ],
)
def test_wrong_use(arguments, message, tmp_path, tiny_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = measurement(tmp_path, [(1, 2)])
    write_lines("again.jsonl", [{"id": "a", "k": 1, "n": 2}] * 2)
    write_lines("nogold.jsonl", [{"id": "a", "prompt": "A", "answer": "a"}, {"id": "b", "prompt": "B"}])
    write_lines("options.jsonl", [{"id": "a", "prompt": "A", "answer": "a", "chat_template_kwargs": "[1]"}])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\n")
    for name, meta in (("torn", '{"model": '), ("list", "[]")):
        write_lines(f"{name}.jsonl", [{"id": "a", "k": 1, "n": 2}])
        (tmp_path / f"{name}.jsonl.meta.json").write_text(meta)
    if "o.answers.jsonl" in arguments:
        (tmp_path / "o.answers.jsonl").symlink_to("prompts.jsonl")
    arguments = [str(tiny_dir("qwen3_moe")) if argument == "MODEL" else argument for argument in arguments]
    write_lines("bad.jsonl", [{"id": "a", "k": 1, "n": 2}, {"id": "b", "k": 3, "n": 2}])
    write_lines("twice.jsonl", [{"id": "q0", "prompt": "A"}] * 2)
    write_lines("text.jsonl", [{"id": "q0", "text": "A"}])
    write_lines("other.jsonl", [{"id": "z", "prompt": "A"}])
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "on_reward_error" not in error, error
    assert not (tmp_path / "o.jsonl").exists() and [row for _, row in rows.read_rows("prompts.jsonl")] == data


# ---- measuring, in this process

REWARD = """
import collections

def even(prompts, completions, parity, **_):
    return [float(len(c) % 2 == p) for c, p in zip(completions, parity)]
"""


def test_measure_counts_what_the_reward_says_and_goes_on_after_a_kill(tmp_path, tiny_dir, monkeypatch):
    (tmp_path / "own_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    write_lines(
        tmp_path / "p.jsonl",
        [
            {
                "id": f"q{i}",
                "prompt": [{"role": "user", "content": "hi " * (i + 1)}],
                "parity": i % 2,
                "tools": "[]",
                "chat_template_kwargs": '{"x": 1}',
            }
            for i in range(6)
        ],
    )
    model = tiny_dir("qwen3_moe")
    options = ["measure", "--model", model, "--data", tmp_path / "p.jsonl", "--samples", 4, "--max_new_tokens", 5, "--batch_size", 2]
    options += ["--reward_func", "own_reward:even", "--reward_workers", 1, "--output"]
    assert call(*options, tmp_path / "whole.jsonl") == 0

    answers = tmp_path / "d.answers.jsonl"
    command = [sys.executable, "-m", "grpo.difficulty", *map(str, options), str(tmp_path / "d.jsonl")]
    killed = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while killed.poll() is None and not (answers.exists() and answers.stat().st_size):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    before = answers.read_text()
    assert 0 < before.count("\n") < 24 and not (tmp_path / "d.jsonl").exists()
    assert call(*options, tmp_path / "d.jsonl") == 0
    assert answers.read_text().startswith(before)
    # The resumed one drew what the one without a stop drew, and no answer twice.
    assert sorted(answers.read_text().splitlines()) == sorted((tmp_path / "whole.answers.jsonl").read_text().splitlines())
    assert (tmp_path / "d.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()

    made = [json.loads(line) for line in answers.read_text().splitlines()]
    for line in map(json.loads, (tmp_path / "d.jsonl").read_text().splitlines()):
        lengths = [len(answer["completion"]) for answer in made if answer["id"] == line["id"]]
        assert line["n"] == len(lengths) == 4 and line["k"] == sum(length % 2 == int(line["id"][1:]) % 2 for length in lengths)
        assert line["model_fingerprint"] == LocalModel(model).identity()["fingerprint"]


def test_answers_are_tied_to_prompt_model_and_sampling(tmp_path, tiny_dir):
    asks, sampling = [Ask("a", "one"), Ask("b", "two")], Sampling(max_new_tokens=3)
    model = LocalModel(tiny_dir("qwen3_moe"), batch_size=4)
    first = generate.generate(model, asks, sampling, tmp_path / "a.jsonl", progress=False)
    changed = generate.generate(model, [asks[0], Ask("b", "three")], sampling, tmp_path / "a.jsonl", progress=False)
    assert changed["a"] == first["a"] and changed["b"][0]["prompt_hash"] != first["b"][0]["prompt_hash"]
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 3
    with pytest.raises(ValueError, match="max_new_tokens 3, now 4"):
        generate.generate(model, asks, Sampling(max_new_tokens=4), tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="fingerprint"):
        generate.generate(LocalModel(tiny_dir("qwen3_moe", seed=1)), asks, sampling, tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="two questions have the id 'a'"):
        generate.generate(model, [asks[0], asks[0]], sampling, tmp_path / "b.jsonl")
    made = tmp_path / "a.jsonl"
    made.write_text(made.read_text() + '{"completion": "of somebody"}\n')
    assert generate.generate(model, [asks[0]], sampling, made, progress=False)["a"] == first["a"]
    for meta, message in (("{}", "does not say which model"), ('{"model"', "is not valid JSON"), ("[]", "must hold one JSON object")):
        generate.meta_path(made).write_text(meta)
        with pytest.raises(ValueError, match=rf"a\.jsonl\.meta\.json {message}"):
            generate.generate(model, asks, sampling, made)
    with pytest.raises(ValueError, match="temperature a number"):
        Sampling(temperature=float("nan"))
    with pytest.raises(ValueError, match="would all be the same"):
        Sampling(samples=2)


# ---- measuring, with servers


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(Servers, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(Servers, "CALL_SECONDS", 2.0)


def test_servers_share_the_work_and_one_that_fails_is_left_out(tmp_path):
    asks = [
        Ask(f"q{i}", [{"role": "user", "content": f"question {i}"}], chat_template_kwargs={"enable_thinking": False}) for i in range(10)
    ]

    def echo(body, number):
        return f"{body['messages'][0]['content']} seed {body['seed']}"

    def dies(body, number):
        return ("drop", None) if number > 2 else echo(body, number)

    with FakeChat(echo) as good, FakeChat(dies) as bad:
        source = Servers([good.url, bad.url], concurrency=2, wait_minutes=0.1)
        answers = generate.generate(source, asks, Sampling(samples=3, temperature=1.0), tmp_path / "a.jsonl", progress=False)
        again = generate.generate(source, asks, Sampling(samples=3, temperature=1.0), tmp_path / "a.jsonl", progress=False)
    assert answers == again and good.bodies and bad.bodies
    assert [len(lines) for lines in answers.values()] == [3] * 10
    assert all(line["completion"].startswith(f"question {name[1:]} seed") for name, lines in answers.items() for line in lines)
    assert len({line["completion"] for lines in answers.values() for line in lines}) == 30  # each with a seed of its own
    body = good.bodies[0]
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["top_k"] == 0 and body["model"] == "fake"
    # A server alone draws the same: seeds do not depend on who answers.
    with FakeChat(echo) as alone:
        other = generate.generate(Servers([alone.url]), asks, Sampling(samples=3, temperature=1.0), tmp_path / "b.jsonl", progress=False)
    assert other == answers


@pytest.mark.parametrize(
    "fault, error, message",
    [
        (("status", (400, {})), ValueError, "question q0 was refused: .*told to fail with 400"),
        (("status", (500, {})), RuntimeError, "question q0 failed 4 times"),
        (("raw", b'{"choices": []}'), RuntimeError, "failed 4 times, last: .*not the answer of a completion"),
        (("hang", None), RuntimeError, "failed 4 times"),
    ],
)
def test_a_question_that_always_fails_is_named_and_the_rest_is_kept(fault, error, message, tmp_path, monkeypatch):
    asks = [Ask("ok", [{"role": "user", "content": "fine"}]), Ask("q0", [{"role": "user", "content": "bad"}])]
    with FakeChat(lambda body, number: "yes" if body["messages"][0]["content"] == "fine" else fault) as server:
        with pytest.raises(error, match=message):
            generate.generate(Servers([server.url], request_minutes=0.5 / 60), asks, Sampling(), tmp_path / "a.jsonl", progress=False)
    assert [json.loads(line)["id"] for line in (tmp_path / "a.jsonl").read_text().splitlines()] == ["ok"]


def test_servers_that_are_gone_or_differ(tmp_path):
    with FakeChat(lambda body, number: ("drop", None)) as server, FakeChat(lambda body, number: "x", model="other") as other:
        with pytest.raises(ValueError, match="do not serve the same model"):
            Servers([server.url, other.url]).identity()
        source = Servers([server.url], wait_minutes=0.01)
        source.identity()
    with pytest.raises(ValueError, match="no OpenAI-compatible server that answers"):
        source.identity()
    with pytest.raises(RuntimeError, match="no server has answered"):
        list(source.answers([Ask("a", [{"role": "user", "content": "hi"}])], Sampling(), {}))
