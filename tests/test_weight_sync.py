"""Weight sync and rollouts against stand-in servers: what arrives is the trainer's, every fault is seen and named, nothing hangs."""

import itertools
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from fake_server import FakeServer

from common import dist, run, wire
from common.config import ModelArguments
from common.server_http import Http
from common.server_names import closure, wire_tensors
from common.sync_server import SyncError, Timeouts, UnusableServer
from common.weight_sync import ServersLost, WeightSync
from grpo.fleet import Endpoint, Fleet, Request
from grpo.rollout import Prompt, RolloutArguments
from grpo.vllm_client import trainer_logps
from tests.conftest import ROOT

FAST = Timeouts(call=2.0, bucket=2.0, join=5.0, health=0.5)


@pytest.fixture(scope="module")
def model(tiny_dir):
    """One trainer rank, attention trains."""
    dist.init(2)
    yield run.build_model(ModelArguments(model_name_or_path=str(tiny_dir("qwen3_moe")), trainable="attention", load_balancing_coef=0.0))
    dist.shutdown()


def fused_modules(name: str) -> list[str]:
    """Of vLLM's Qwen3-MoE."""
    if ".experts." in name:
        return [name.split(".experts.")[0] + ".experts"]
    for part in (".q_proj", ".k_proj", ".v_proj"):
        name = name.replace(part, ".qkv_proj")
    return [name.rpartition(".")[0]]


@contextmanager
def servers(count: int = 1):
    started = [FakeServer(fused_modules) for _ in range(count)]
    try:
        yield started
    finally:
        for server in started:
            server.close()


@contextmanager
def syncing(model, started, **options):
    sync = WeightSync(model.sharded, [server.url for server in started], timeouts=FAST, wait_seconds=1.0, **options)
    try:
        yield sync
    finally:
        sync.close()


@torch.no_grad()
def train(model, scale: float = 1.5) -> None:
    for shard in model.sharded.trained_shards():
        shard.tensor.mul_(scale)


def expected(model) -> dict[str, torch.Tensor]:
    named = {}
    for index in range(len(model.sharded.units)):
        named |= model.sharded.gather_unit(index, torch.bfloat16)
    return named


def assert_holds(server: FakeServer, model) -> None:
    ours = expected(model)
    assert set(server.weights) == set(ours)  # fused names are the model's own for this family
    wrong = [name for name, tensor in ours.items() if not torch.equal(server.weights[name], tensor)]
    assert not wrong


# ----------------------------------------------------------------------------------------------------------------------------------
# Names and buckets


def test_buckets_keep_the_order_and_the_limit():
    assert wire.plan_buckets([4, 4, 9, 1, 8, 8], 8) == [[0, 1], [2], [3], [4], [5]]
    assert wire.plan_buckets([], 8) == []


def test_fingerprint_sees_a_swap_a_sign_and_the_last_byte():
    tensor = torch.arange(1001, dtype=torch.bfloat16)
    swapped, signed, last = tensor.clone(), tensor.clone(), tensor.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    signed[5] *= -1
    last[-1] += 8
    marks = [wire.fingerprint(t) for t in (tensor, swapped, signed, last, tensor.view(7, 143), tensor[:-1])]
    assert len(set(marks)) == 5 and marks[0] == marks[4]
    assert wire.fingerprint(torch.randn(4, 6).t()) and wire.fingerprint(tensor[::2]) == wire.fingerprint(tensor[::2].contiguous())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "llama"])
@pytest.mark.parametrize("fused", [True, False])
def test_every_tensor_is_sent_once_under_a_checkpoint_name(tiny_dir, family, fused):
    from common.skeleton import build_skeleton
    from common.tensor_files import Checkpoint
    from common.weights import Converter

    checkpoint = Checkpoint(tiny_dir(family))
    converter = Converter(build_skeleton(tiny_dir(family), attn_implementation="sdpa"), checkpoint)
    tensors = wire_tensors(converter, fused_experts=fused)
    names = [tensor.name for tensor in tensors]
    assert len(set(names)) == len(names)
    sent, held = sum(torch.Size(tensor.shape).numel() for tensor in tensors), set(checkpoint.names) - set(converter.untouched)
    assert sent == sum(torch.Size(checkpoint.shape(name)).numel() for name in held)
    if fused:
        fused_names = [name for name in names if ".experts." in name]
        assert set(names) - set(fused_names) <= held and all(name.endswith(("gate_up_proj", "down_proj")) for name in fused_names)
    else:
        assert set(names) == held


def test_closure_is_whole_modules(model):
    tensors = wire_tensors(model.converter)
    modules = {tensor.name: set(fused_modules(tensor.name)) for tensor in tensors}
    trained = {"model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.experts.down_proj", "model.norm.weight"}
    sent = {tensors[i].name for i in closure(tensors, modules, trained)}
    layer = "model.layers.1.self_attn."
    assert sent == {layer + f"{p}_proj.weight" for p in "qkv"} | {
        "model.layers.2.mlp.experts.down_proj", "model.layers.2.mlp.experts.gate_up_proj", "model.norm.weight",
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------------------
# What arrives


def test_everything_first_then_what_trains(model):
    with servers(2) as (one, two), syncing(model, [one, two], bucket_bytes=40_000) as sync:
        report = sync.push(0)
        assert report.servers == [one.url, two.url] and not report.lost
        assert_holds(one, model)
        assert_holds(two, model)
        assert report.checks[f"proof {one.url}"] == {"parameters": len(one.weights), "visible": len(one.weights), "equal_base": False}
        assert not one.paused and one.labels.endswith(".0") and one.version == 0
        train(model)
        report = sync.push(1)
        assert report.changed > 0.5 and report.changed_any
        assert all(".self_attn." in name for name in one.sent) and len(one.sent) == 4 * 6 == report.tensors
        assert_holds(one, model)
        assert_holds(two, model)
        report = sync.push(2)
        assert report.changed == 0 and not report.changed_any
        order = [call for call in one.calls if call.startswith("/") and call != "/weight_info" and call != "/health"]
        assert order[-7:] == [
            "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/update_weight_version", "/resume",
        ]  # fmt: skip


def push_on_rank(folder, url):
    model = run.build_model(ModelArguments(model_name_or_path=folder, load_balancing_coef=0.0))
    sync = WeightSync(model.sharded, [url], timeouts=FAST, bucket_bytes=50_000)
    first = sync.push(0)
    train(model, 0.75)
    report = sync.push(1)
    sync.close()
    weights = expected(model)
    return (first.servers, report.tensors, report.changed), weights if dist.is_main() else None


def test_two_trainer_ranks_push_their_shards(tiny_dir, run_ranks):
    with servers() as (server,):
        results = run_ranks(2, push_on_rank, str(tiny_dir("qwen3_next")), server.url)
        assert results[0][0] == results[1][0]
        wrong = [name for name, tensor in results[0][1].items() if not torch.equal(server.weights[name], tensor)]
        assert not wrong and len(server.weights) == len(results[0][1])


# ----------------------------------------------------------------------------------------------------------------------------------
# Faults


def changed(**values):
    return lambda report: report | values


REFUSED = {
    "dropped": (changed(dropped=["model.layers.0.mlp.gate.weight"]), "does not know 1 of the names.*model.layers.0.mlp.gate.weight"),
    "incomplete": (
        changed(error="finish: RuntimeError: modules of which only a part came: model.layers.2.self_attn.qkv_proj"),
        "layers.2.*qkv_proj",
    ),
    "fewer": (changed(tensors=3), "tensors is 3, expected 47"),
    "bytes": (changed(bytes=11), "bytes is 11, expected"),
    "unfinished": (changed(finished=False), "finished is False"),
    "untouched": (changed(untouched=["model.layers.3.mlp.gate"]), "got nothing.*model.layers.3.mlp.gate"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_report_stops_after_one_full_resync(model, kind):
    fault, message = REFUSED[kind]
    with servers() as (server,), syncing(model, [server]) as sync:
        server.faults["sync_report"] = lambda report: fault(report) if report.get("tensors") else report
        with pytest.raises(SyncError, match=message):
            sync.push(0)
        assert server.calls.count("/start_weight_update") == 2, "once, and once more"
        assert server.paused and server.labels == "default", "a server with wrong weights stays paused, without a version"


def test_one_bad_report_is_healed_by_a_full_resync(model):
    with servers() as (server,), syncing(model, [server]) as sync:
        sync.push(0)
        train(model)
        reports = iter([changed(dropped=["x"])])
        server.faults["sync_report"] = lambda report: next(reports, dict)(report) if report.get("tensors") else report
        report = sync.push(1)
        assert report.servers == [server.url] and report.checks[f"report {server.url}"]["full"]
        assert_holds(server, model)


def test_experts_go_one_by_one_to_a_server_that_does_not_take_them_fused(model):
    with servers() as (server,), syncing(model, [server]) as sync:
        server.drops = ("experts.gate_up_proj", "experts.down_proj")
        assert sync.push(0).servers == [server.url]
        ours = expected(model)
        assert len(server.sent) == len(model.source.names) and not server.report["dropped"]
        half = ours["model.layers.2.mlp.experts.gate_up_proj"].shape[1] // 2
        assert torch.equal(
            server.weights["model.layers.2.mlp.experts.11.up_proj.weight"], ours["model.layers.2.mlp.experts.gate_up_proj"][11, half:]
        )
        assert torch.equal(
            server.weights["model.layers.0.mlp.experts.10.down_proj.weight"], ours["model.layers.0.mlp.experts.down_proj"][10]
        )


def test_weights_that_do_not_come_back_after_zeroing_are_named(model):
    with servers() as (server,), syncing(model, [server]) as sync:
        answers = []

        def blind(fingerprints):
            answers.append(fingerprints)
            return fingerprints | ({"model.norm.weight": "0"} if len(answers) % 2 == 0 else {})

        server.faults["sync_fingerprints"] = blind
        with pytest.raises(SyncError, match="not restored.*model.norm.weight"):
            sync.push(0)


def test_fresh_weights_must_be_those_that_the_server_read_itself(model):
    with servers() as (server,), syncing(model, [server]) as sync:
        server.version, server.weights = None, expected(model)
        report = sync.push(0)
        assert report.checks[f"proof {server.url}"]["equal_base"]
    with servers() as (server,), syncing(model, [server]) as sync:
        server.version, server.weights = None, expected(model)
        for name in ("mlp.experts.down_proj", "self_attn.o_proj.weight"):
            server.weights[f"model.layers.0.{name}"] = server.weights[f"model.layers.0.{name}"] + 1
        message = "was it started with another checkpoint.*changed parameters: model.layers.0.mlp.experts.down_proj .*o_proj.weight"
        with pytest.raises(SyncError, match=message):
            sync.push(0)
        assert server.calls.count("sync_zero") == 2 and sync.fused_experts, "once more, not expert by expert"
        with syncing(model, [server]) as again, pytest.raises(UnusableServer, match="an earlier run found .* Start it again"):
            again.push(0)
        server.version, server.boot = None, "restarted"
        with syncing(model, [server]) as again:
            assert again.push(0).checks[f"proof {server.url}"]["equal_base"]


ROUTES = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "sync_set_version",
    "sync_report",
]
FAILURES = [(route, fault) for route in ROUTES for fault in (500, "hang")] + [("/update_weights", "die"), ("sync_report", "die")]


@pytest.mark.parametrize("route, fault", FAILURES)
def test_a_failing_route_leaves_the_other_server_working(model, route, fault):
    with servers(2) as (good, bad), syncing(model, [good, bad]) as sync:
        bad.faults[route] = fault
        started = time.monotonic()
        report = sync.push(0)
        assert time.monotonic() - started < 40
        assert report.servers == [good.url] and list(report.lost) == [bad.url]
        assert_holds(good, model)
        assert bad.labels == "default"
        assert (500 != fault) or "was told to fail" in report.lost[bad.url]
        # and when it works again it gets everything
        del bad.faults[route]
        bad.released.set()
        report = sync.push(1)
        assert report.servers == [good.url, bad.url]
        assert_holds(bad, model)


def test_prefix_cache_that_is_not_cleared_is_a_failure(model):
    with servers() as (server,), syncing(model, [server]) as sync:
        server.faults["/reset_prefix_cache"] = lambda _: {"success": False}
        with pytest.raises(ServersLost, match="prefix cache"):
            sync.push(0)


def test_group_that_breaks_between_buckets(model):
    with servers(2) as (good, bad), syncing(model, [good, bad], bucket_bytes=40_000) as sync:
        bad.cut_after_buckets = 3
        report = sync.push(0)
        assert report.servers == [good.url] and list(report.lost) == [bad.url]
        assert_holds(good, model)


def test_dead_server_comes_back_restarted(model):
    with servers() as (server,), syncing(model, [server]) as sync:
        sync.push(0)
        train(model)
        server.close()
        with pytest.raises(ServersLost, match="no server came back within 1 s.*does not answer"):
            sync.push(1)
        again = FakeServer(fused_modules, port=server.port)
        try:
            report = sync.push(1)
            assert report.restarted == [again.url] and report.checks[f"report {again.url}"]["full"]
            assert_holds(again, model)
        finally:
            again.close()


def test_trainer_that_restarts_takes_over(model):
    with servers() as (server,):
        with syncing(model, [server]) as sync:
            sync.push(4)
        with syncing(model, [server]) as sync:
            assert sync.push(5).servers == [server.url]
            assert_holds(server, model)


def test_servers_that_cannot_be_synced_say_how_to_start(model):
    with servers() as (server,), syncing(model, [server]) as sync:
        how_to_start = "--worker-extension-cls common.vllm_worker.WorkerExtension"
        server.faults["sync_describe"] = 404  # no development mode
        with pytest.raises(ValueError, match=how_to_start):
            sync.push(0)
        server.faults["sync_describe"] = 500  # an engine that has died: it may be restarted
        with pytest.raises(ServersLost, match="told to fail"):
            sync.push(0)
        del server.faults["sync_describe"]
        server.on_sync_describe = lambda: object().sync_describe  # workers without the extension
        with pytest.raises(ValueError, match=how_to_start):
            sync.push(0)
        del server.on_sync_describe
        server.faults["sync_describe"] = changed(quantization="fp8")
        with pytest.raises(ValueError, match="serves fp8 weights"):
            sync.push(0)
        del server.faults["sync_describe"]
        server.faults["/get_world_size"] = lambda _: {"world_size": 4}
        with pytest.raises(ValueError, match="has 4 workers, but only 1 .* one server for each data-parallel replica"):
            sync.push(0)
    for url in ("localhost:8000", "http://a:810I", "http://a:8101,http://b:8102"):
        with pytest.raises(ValueError, match=f"^vllm_servers: {url!r} is no address like http://host:8000 .several .*separated by spaces"):
            RolloutArguments(rollout_backend="vllm", vllm_servers=[url])
    with servers() as (server,):
        server.faults["/health"] = 404  # what the path /v1 in an address leads to
        with syncing(model, [server]) as sync, pytest.raises(UnusableServer, match="without a path such as /v1"):
            sync.push(0)


def test_one_server_under_two_names(model):
    with servers() as (server,):
        urls = [server.url, server.url + "/"]
        assert [s.url for s in WeightSync(model.sharded, urls, timeouts=FAST).servers] == [server.url]
        sync = WeightSync(model.sharded, [server.url, server.url.replace("127.0.0.1", "localhost")], timeouts=FAST)
        with pytest.raises(UnusableServer, match=rf"{server.url} and http://localhost:{server.port} are one server"):
            sync.push(0)
        sync.close()


def test_a_server_that_another_trainer_has_taken(model):
    """It would hold the other's weights at its next answer: neither its tokens nor another turn of it are wanted."""
    with servers() as (server,), syncing(model, [server]) as first, syncing(model, [server]) as second:
        mine = first.push(0).info[server.url]["labels"]
        assert server.labels == mine + "0"
        assert second.push(0).info[server.url]["labels"] != mine and not server.labels.startswith(mine)
        with pytest.raises(UnusableServer, match=f"another trainer has taken {server.url} since the last sync"):
            first.push(1)
        assert second.push(1).servers == [server.url]


# ----------------------------------------------------------------------------------------------------------------------------------
# Rollouts


def fleet(started, **options) -> tuple[Fleet, list[Endpoint]]:
    endpoints = [Endpoint(Http(server.url), [server.boot], "", True) for server in started]
    return Fleet(endpoints, concurrency=options.pop("concurrency", 4), request_seconds=5.0, timeouts=FAST, **options), endpoints


def requests(count: int, generations: int = 3) -> list[Request]:
    return [Request(f"p{i}", [i, i + 1], generations, 10, {"max_tokens": 10}) for i in range(count)]


def run_fleet(crew: Fleet, wanted, version: int = 0, oldest: int = 0, poll=lambda: False):
    return crew.run(wanted, lambda: version, oldest, poll)


def assert_each_once(completions, count: int, generations: int = 3) -> None:
    assert sorted((c.id, c.sample) for c in completions) == sorted((f"p{i}", s) for i in range(count) for s in range(generations))
    for c in completions:
        number = int(c.id[1:])
        assert c.completion_ids == [(2 * number + 1 + c.sample + step) % 300 for step in range(6)] and len(c.logps) == 6


def labelled(started, label: str = "0"):
    for server in started:
        server.labels = label
    return started


def test_requests_are_spread_by_tokens_in_flight():
    with servers(2) as (one, two):
        labelled([one, two])
        one.delay, two.delay = 0.05, 0.2
        crew, _ = fleet([one, two], concurrency=3)
        completions, missing = run_fleet(crew, requests(30))
        assert not missing
        assert_each_once(completions, 30)
        counts = [server.calls.count("/inference/v1/generate") for server in (one, two)]
        assert counts[0] > 1.5 * counts[1] > 0, counts


def test_prompts_of_a_server_that_dies_go_to_the_others():
    with servers(2) as (one, two):
        labelled([one, two])
        asked, handle = itertools.count(), two.handle

        def dies_at_the_third(request, body):
            if request.path == "/inference/v1/generate" and next(asked) == 2:
                two.faults["/inference/v1/generate"] = "die"
            handle(request, body)

        two.handle = dies_at_the_third
        crew, endpoints = fleet([one, two])  # four requests go to each at first
        completions, missing = run_fleet(crew, requests(24))
        assert not missing and [endpoint.usable for endpoint in endpoints] == [True, False]
        assert_each_once(completions, 24)


def test_hung_server_is_given_up_long_before_the_request_deadline():
    with servers(2) as (one, two):
        labelled([one, two])
        two.faults |= {"/inference/v1/generate": "hang", "/health": "hang"}
        endpoints = [Endpoint(Http(server.url), [], "", True) for server in (one, two)]
        crew = Fleet(endpoints, concurrency=4, request_seconds=3600.0, timeouts=FAST)
        started = time.monotonic()
        completions, missing = run_fleet(crew, requests(12))
        assert time.monotonic() - started < 15 and not missing
        assert_each_once(completions, 12)


def test_nothing_of_a_lost_rollout_is_lost():
    with servers() as (server,):
        labelled([server])
        crew, _ = fleet([server], concurrency=1)
        answered = []

        def poll():
            if len(answered) >= 5:
                server.faults["/inference/v1/generate"] = "die"
            answered.append(1)
            return False

        completions, missing = run_fleet(crew, requests(20), poll=poll)
        done, left = {c.id for c in completions}, {request.id for request in missing}
        assert done and left and not done & left and done | left == {f"p{i}" for i in range(20)}


def test_answers_of_other_weights_are_not_taken():
    with servers(2) as (one, two):
        labelled([one, two], "7")
        two.labels = "default"  # restarted: the base's weights
        crew, endpoints = fleet([one, two])
        completions, missing = run_fleet(crew, requests(8), version=7, oldest=7)
        assert not missing and {tuple(c.weight_versions) for c in completions} == {((7, 0, 6),)}
        assert "restarted" in endpoints[1].why and not endpoints[1].usable
        labelled([two], "ab12.7")  # another trainer's version 7
        crew, endpoints = fleet([one, two])
        completions, missing = run_fleet(crew, requests(8), version=7, oldest=7)
        assert_each_once(completions, 8)
        assert "weights ab12.7, expected 7 to 7: it was restarted, or another trainer uses it" in endpoints[1].why
        crew, _ = fleet([one])
        completions, missing = run_fleet(crew, requests(8), version=8, oldest=8)
        assert not completions and len(missing) == 8
        crew, _ = fleet([one])
        completions, missing = run_fleet(crew, requests(8), version=8, oldest=7)
        assert len(completions) == 24 and not missing


def test_server_errors_are_tried_again_and_then_named():
    with servers() as (server,):
        labelled([server])
        failures = iter([500, 500])
        server.faults["/inference/v1/generate"] = lambda answer: answer
        original = server.handle

        def flaky(request, body):
            if request.path == "/inference/v1/generate" and (status := next(failures, None)):
                server.reply(request, status, {"error": {"message": "out of luck"}})
            else:
                original(request, body)

        server.handle = flaky
        completions, missing = run_fleet(fleet([server])[0], requests(4))
        assert not missing
        assert_each_once(completions, 4)
        server.handle = original
        server.faults["/inference/v1/generate"] = 500
        with pytest.raises(RuntimeError, match="prompt p0 failed 4 times.*was told to fail"):
            run_fleet(fleet([server], concurrency=1)[0], requests(1))
        server.faults["/inference/v1/generate"] = 400
        with pytest.raises(ValueError, match="prompt p0 was refused"):
            run_fleet(fleet([server])[0], requests(1))


def test_aborted_answers_are_sampled_again():
    with servers() as (server,):
        labelled([server])
        cuts = iter(range(2))

        def cut(answer):
            if next(cuts, None) is not None:
                answer["choices"][1] |= {
                    "finish_reason": "abort",
                    "token_ids": [1],
                    "logprobs": {"content": [{"token_id": 1, "logprob": -1.0}]},
                }
            return answer

        server.faults["/inference/v1/generate"] = cut
        completions, missing = run_fleet(fleet([server])[0], requests(3))
        assert not missing
        assert_each_once(completions, 3)


def test_a_stop_request_ends_a_rollout_soon():
    with servers() as (server,):
        labelled([server])
        server.delay = 0.4
        started = time.monotonic()
        completions, missing = run_fleet(fleet([server], concurrency=2)[0], requests(400), poll=lambda: time.monotonic() - started > 2)
        assert time.monotonic() - started < 6
        assert 0 < len(completions) < 400 * 3 and {c.id for c in completions} | {r.id for r in missing} == {f"p{i}" for i in range(400)}


def test_trainer_logps_of_packed_rows_equal_each_row_alone(model):
    rows = [([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15]), ([3], [4])]
    together = trainer_logps(model.sharded, rows)
    assert [len(logps) for logps in together] == [2, 4, 1]
    for row, logps in zip(rows, together, strict=True):
        assert torch.allclose(logps, trainer_logps(model.sharded, [row])[0], atol=0.05)
    assert Prompt("a", [1]).id == "a"


ABORT_AT_THE_END = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
from common import wire

store = TCPStore("127.0.0.1", 0, 1, is_master=True)

class Group:
    def abort(self):
        store.wait(["never"], timedelta(seconds=1))  # comes back from C++ after the program's last line

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # while the interpreter ends

wire.abort(Group())
slow = Slow()
"""


def test_a_group_that_is_still_being_aborted_does_not_spoil_the_exit_code():
    done = subprocess.run([sys.executable, "-c", ABORT_AT_THE_END], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr
