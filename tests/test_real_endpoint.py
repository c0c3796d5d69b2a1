"""A real server (vLLM on the CPU, a language model of 135M) as judge, as writer of expert answers, and as what difficulty is measured on.

The model is too small to do any of it well; the server holds it to the schemas all the same.
"""

import json

import pytest
import yaml
from test_real_model import smollm2  # noqa: F401 - a fixture
from vllm_server import VllmServer, rollout_python

pytest.importorskip("openai", reason="bash env/setup.sh train --with openai")

from common import checkpoint
from common.generate import Ask, LocalModel, Sampling, Servers, generate
from common.jsonl import write_lines
from grpo import chord_data, difficulty, judge

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(rollout_python() is None, reason="no rollout environment: bash env/setup.sh rollout"),
]

PROMPT = [{"role": "user", "content": "Which disease raises ammonia in blood?"}]
CHOICES = ["Gaucher disease", "Hurler syndrome", "Ornithine transcarbamylase deficiency"]


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):  # noqa: F811 - the fixture
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with VllmServer(smollm2, log, "--max-model-len", "2048", tokenizer=True, stock=True) as server:
        yield server.wait()


def client(server, model, **options) -> dict:
    return {"base_url": server.url + "/v1", "model": str(model), "attempt_seconds": 120.0, "deadline": 300.0, "max_tokens": 512} | options


def test_judge(server, smollm2, tmp_path, monkeypatch):  # noqa: F811
    """Every verdict is one, and the second time is free."""
    config = {"endpoint": client(server, smollm2, cache=str(tmp_path / "cache.jsonl"), price_per_million=[1, 1]), "seconds": 400}
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("JUDGE_CONFIG", str(tmp_path / "judge.yaml"))
    answers = ["It is c: ornithine transcarbamylase deficiency blocks the urea cycle.", "It is a.", ""]
    columns = {"answer": ["c"] * 3, "choices": [CHOICES] * 3}

    def ask():
        judge._judge.cache_clear()
        verdicts = judge.current().judge([PROMPT] * 3, answers, columns, helpfulness=True)
        return verdicts, judge.current().endpoint.counters

    verdicts, counters = ask()
    assert all(v.accuracy in (0.0, 1.0) or v.failure == "accuracy: truncated" for v in verdicts), verdicts
    assert any(v.failure is None for v in verdicts[:2]) and verdicts[2].accuracy == 0.0
    assert counters.tokens_in > 500 and counters.tokens_out > 10 and counters.cost > 0
    again, counters = ask()
    assert [v for v in again if v.failure is None] == [v for v in verdicts if v.failure is None] and counters.cached >= 1
    judge._judge.cache_clear()


def test_expert_answers(server, smollm2, tmp_path):  # noqa: F811
    """Each question becomes a row or is rejected with a reason that is not a missing reply."""
    write_lines(
        tmp_path / "d.jsonl", [{"id": f"q{i}", "question": PROMPT[0]["content"], "choices": CHOICES, "answer": "c"} for i in range(2)]
    )
    (tmp_path / "endpoint.yaml").write_text(yaml.safe_dump(client(server, smollm2, max_tokens=64)))
    arguments = ["--data", tmp_path / "d.jsonl", "--endpoint", tmp_path / "endpoint.yaml", "--output", tmp_path / "sft.jsonl"]
    assert chord_data.main([*map(str, arguments), "--min_chars", "1"]) in (0, 1)
    rejected = [json.loads(line) for line in (tmp_path / "sft.rejected.jsonl").read_text().splitlines()]
    made = (tmp_path / "sft.jsonl").read_text().splitlines() if (tmp_path / "sft.jsonl").exists() else []
    assert len(made) + len(rejected) == 2
    assert all(row["reason"].startswith(("question: ", "answer: ")) and "no reply" not in row["reason"] for row in rejected)


def test_greedy_answers_are_those_of_the_model_in_process(server, smollm2, tmp_path):  # noqa: F811
    """The server's chat template, ours as ids, and transformers' own generate say the same, and are the same model."""
    asks, sampling = [Ask("a", PROMPT), Ask("b", [{"role": "user", "content": "What is 2 + 2?"}])], Sampling(max_new_tokens=8)
    sources = Servers([server.url]), Servers([server.url + "/v1"], tokenizer=smollm2), LocalModel(smollm2)
    answers = [generate(source, asks, sampling, tmp_path / f"{i}.jsonl", progress=False) for i, source in enumerate(sources)]
    assert {source.identity()["fingerprint"] for source in sources} == {checkpoint.fingerprint(smollm2)}
    texts = [[lines[0]["completion"] for lines in answer.values()] for answer in answers]
    assert texts[0] == texts[1] and all(texts[0])
    # Between two programs bf16 may turn a near tie after some tokens: the beginnings are equal.
    assert [text[:8] for text in texts[2]] == [text[:8] for text in texts[0]]


def test_difficulty(server, smollm2, tmp_path):  # noqa: F811
    write_lines(tmp_path / "p.jsonl", [{"id": f"q{i}", "prompt": f"2 + {i} =", "answer": "a"} for i in range(3)])
    arguments = [
        "measure",
        "--server",
        server.url,
        "--data",
        tmp_path / "p.jsonl",
        "--samples",
        4,
        "--max_new_tokens",
        4,
        "--output",
        tmp_path / "d.jsonl",
    ]
    assert difficulty.main([str(part) for part in arguments]) == 0
    lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert [(line["id"], line["k"], line["n"]) for line in lines] == [("q0", 0, 4), ("q1", 0, 4), ("q2", 0, 4)]
    texts = {json.loads(line)["completion"] for line in (tmp_path / "d.answers.jsonl").read_text().splitlines()}
    assert len(texts) > 3  # sampled, not greedy
