"""The endpoint client against a server with every fault: what may pass is tried again, what may not is named, nothing is paid for twice."""

import json
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from fake_chat import FakeChat

pytest.importorskip("openai", reason="bash env/setup.sh train --with openai")

from grpo import endpoint
from grpo.endpoint import Endpoint, EndpointConfig, EndpointError, Reply, Request, from_mapping, retry_after, schema_fault

ASK = [{"role": "user", "content": "ping"}]
SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string", "minLength": 2}, "score": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["reason", "score"],
}
GOOD = {"reason": "because", "score": 4}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_PAUSE", 0.01)


def make(server, **options) -> Endpoint:
    return Endpoint(EndpointConfig(**{"base_url": server.url, "model": "m", "attempt_seconds": 10.0} | options))


def in_turn(*answers):
    """Answers of successive requests; the last one stays."""
    return lambda body, number: answers[min(number, len(answers)) - 1]


def test_structured_reply_and_what_is_sent():
    with FakeChat(in_turn(GOOD)) as server:
        client = make(server, price_per_million=[2.0, 8.0], extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        reply = client.complete([Request(ASK, SCHEMA)])[0]
    assert reply == Reply(json.dumps(GOOD), GOOD)
    sent = server.bodies[0]
    assert (sent["model"], sent["messages"], sent["temperature"], sent["seed"]) == ("m", ASK, 0.0, 0)
    assert sent["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    counters = client.counters
    assert (counters.requests, counters.tries, counters.tokens_in, counters.tokens_out) == (1, 1, 100, 10)
    assert counters.cost == pytest.approx((100 * 2 + 10 * 8) / 1e6)


@pytest.mark.parametrize(
    "fault",
    [("status", (500, {})), ("status", (503, {"Retry-After": "0"})), ("status", (429, {"Retry-After": "0.05"})), ("drop", None), ("raw", b"not json"),
     ("raw", b"{}"), "no JSON at all", {"reason": "because"}, {"reason": "because", "score": 9}, ""],
    ids=["500", "503", "429", "dropped", "garbage", "no choices", "text", "missing", "beyond", "empty"],
)  # fmt: skip
def test_a_fault_that_passes_is_tried_again(fault):
    with FakeChat(in_turn(fault, GOOD)) as server:
        client = make(server)
        assert client.complete([Request(ASK, SCHEMA)])[0].data == GOOD
    assert client.counters.tries == 2 and not client.counters.failures


@pytest.mark.parametrize(
    "fault, reason, tries",
    [
        (("status", (500, {})), "server_error", 3),
        (("status", (429, {"Retry-After": "0"})), "rate_limit", 3),
        (("drop", None), "connection", 3),
        (("status", (400, {})), "refused", 1),
        (("cut", '{"reason": "beca'), "truncated", 1),
        ("no JSON", "invalid_json", 2),
        ({"reason": "x", "score": 3}, "schema", 2),
    ],
)
def test_a_fault_that_stays_has_a_reason_and_no_answer(fault, reason, tries):
    with FakeChat(in_turn(fault)) as server:
        client = make(server, max_tries=3)
        reply = client.complete([Request(ASK, SCHEMA)])[0]
    assert (reply.failure, reply.data, reply.text) == (reason, None, "") and reply.detail
    assert (client.counters.tries, dict(client.counters.failures)) == (tries, {reason: 1})


def test_who_waits_is_told_for_what(caplog):
    with FakeChat(in_turn(("status", (503, {"Retry-After": "0"})))) as server:
        client = make(server, concurrency=1)
        assert [reply.failure for reply in client.complete([Request(ASK)] * 2)] == ["server_error"] * 2
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == endpoint.TOLD == 5 and client.counters.tries == 16
    assert told[0].startswith(f"{server.url}: try 1 of 8 failed (server_error: ") and told[0].endswith("again in 0 s")
    assert "try 5 of 8" in told[4] and told[4].endswith("further ones are counted, not shown")


def test_a_hang_ends_at_the_deadline_and_does_not_stop_the_others():
    def answer(body, number):
        return ("hang", None) if body["messages"][0]["content"] == "hang" else GOOD

    with FakeChat(answer) as server:
        client = make(server, attempt_seconds=0.2, deadline=1.0, max_tries=2)
        replies = client.complete([Request([{"role": "user", "content": text}], SCHEMA) for text in ("hang", "ping")])
    assert [reply.failure for reply in replies] == ["timeout", None] and replies[1].data == GOOD


def test_no_try_begins_after_until():
    with FakeChat(in_turn(GOOD)) as server:
        client = make(server)
        replies = client.complete([Request(ASK, SCHEMA)], until=time.monotonic() - 1)
    assert replies[0].failure == "timeout" and not server.bodies
    with FakeChat(in_turn(("status", (429, {"Retry-After": "3600"})))) as server:
        client = make(server)
        reply = client.complete([Request(ASK, SCHEMA)])[0]
    assert reply.failure == "rate_limit" and "no time for another try" in reply.detail and len(server.bodies) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_wrong_use_is_an_error_without_the_key(status, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret-123")

    class Echo(FakeChat):
        def send(self, request, status, data, headers=None):
            key = request.headers["Authorization"].encode()
            super().send(request, status, data.replace(b"told to fail", b"bad key " + key), headers)

    with Echo(in_turn(("status", (status, {})))) as server:
        with pytest.raises(EndpointError, match="model m") as error:
            make(server, api_key_env="JUDGE_KEY").complete([Request(ASK)] * 3)
    assert "secret" not in str(error.value) and "***" in str(error.value)
    assert server.headers[0]["authorization"] == "Bearer sk-secret-123"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match="JUDGE_KEY .* is empty"):
        make(server, api_key_env="JUDGE_KEY")


def test_requests_in_flight_are_limited():
    def answer(body, number):
        time.sleep(0.02)
        return "pong"

    with FakeChat(answer) as server:
        seen = []
        replies = make(server, concurrency=3).complete([Request(ASK)] * 12, each=lambda index, reply: seen.append(index))
    assert [reply.text for reply in replies] == ["pong"] * 12 and sorted(seen) == list(range(12))
    assert 1 <= server.most <= 3


def test_the_cache_knows_what_could_change_an_answer(tmp_path):
    cache = str(tmp_path / "cache.jsonl")
    with FakeChat(lambda body, number: f"answer {number}") as server:
        first = make(server, cache=cache)
        assert first.complete([Request(ASK)])[0].text == "answer 1"
        again = make(server, cache=cache)  # another process would find the same
        assert again.complete([Request(ASK)])[0] == Reply("answer 1", cached=True)
        assert (again.counters.cached, again.counters.tries, again.counters.cost) == (1, 0, 0.0)
        others = [
            make(server, cache=cache, model="other"), make(server, cache=cache, seed=1), make(server, cache=cache, max_tokens=5),
            make(server, cache=cache, extra_body={"top_k": 1}),
        ]  # fmt: skip
        texts = [client.complete([Request(ASK)])[0].text for client in others]
        texts += [reply.text for reply in again.complete([Request(ASK, temperature=0.3), Request(ASK + ASK)])]
        assert len(set(texts)) == 6 and "answer 1" not in texts
        # What one writes the other reads, although it was open before.
        assert first.complete([Request(ASK, temperature=0.3)])[0].cached


def test_failures_are_not_kept_and_a_torn_line_is_made_again(tmp_path):
    cache = tmp_path / "cache.jsonl"
    with FakeChat(in_turn(("status", (500, {})), "pong", "pong")) as server:
        client = make(server, cache=str(cache), max_tries=1)
        assert client.complete([Request(ASK)])[0].failure == "server_error"
        assert client.complete([Request(ASK)])[0].text == "pong"
        whole = cache.read_text()
        cache.write_text(whole[: len(whole) // 2])  # killed while it wrote
        assert make(server, cache=str(cache)).complete([Request(ASK)])[0] == Reply("pong")
        assert make(server, cache=str(cache)).complete([Request(ASK)])[0].cached
    assert len(server.bodies) == 3 and cache.read_text().count("\n") == 2


ADD = """
import sys
from common.jsonl import AppendLog
log = AppendLog(sys.argv[1])
for number in range(200):
    log.add({"writer": sys.argv[2], "number": number, "text": "x" * 3000}, {"second": True})
"""


def test_several_processes_add_whole_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", ADD, path, name], cwd=ROOT) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 800
    assert sorted((line["writer"], line["number"]) for line in lines if "writer" in line) == [(w, n) for w in "ab" for n in range(200)]


def test_schemas_and_headers():
    assert schema_fault({"reason": "ok", "score": 3, "more": 1}, SCHEMA) is None
    faults = (
        ([], "no object"),
        ({"score": 3}, "no reason"),
        ({"reason": "ok", "score": True}, "score is no integer"),
        (GOOD | {"score": 0}, "score is 0"),
    )
    for value, fault in faults:
        assert fault in schema_fault(value, SCHEMA)
    listed = {"type": "array", "items": {"type": "string", "enum": ["a"]}}
    assert schema_fault(["a"], listed) is None and "[1] is none of" in schema_fault(["a", "b"], listed)
    assert endpoint.parse('<think>{"score": 1}</think> {"reason": "ok", "score": 2}', SCHEMA)["score"] == 2
    assert (retry_after("2.5"), retry_after(None), retry_after("soon"), retry_after("Wed, 21 Oct 2015 07:28:00 GMT")) == (
        2.5,
        None,
        None,
        0.0,
    )


@pytest.mark.parametrize(
    "content, message",
    [
        ({"base_url": "node7:8000", "model": "m"}, "base_url"),
        ({"base_url": "http://n", "model": "m", "temprature": 1}, "did you mean temperature"),
        ({"base_url": "http://n"}, "model"),
        ({"base_url": "http://n", "model": "m", "deadline": "soon"}, "deadline is 'soon'"),
        ({"base_url": "http://n", "model": "m", "concurrency": 0}, "positive"),
        ({"base_url": "http://n", "model": "m", "api_key": "sk-1"}, "did you mean api_key_env"),
    ],
)
def test_a_wrong_configuration_is_named(content, message):
    with pytest.raises(ValueError, match=message) as error:
        from_mapping(EndpointConfig, content, "judge.yaml")
    assert "judge.yaml" in str(error.value) and "sk-1" not in str(error.value)
