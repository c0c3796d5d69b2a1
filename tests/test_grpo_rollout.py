"""Rollouts in process: the engine's log-probabilities are the trainer's, left padding, shares of ranks, prompts, lines, stop and kept answers."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common import dist, run
from common.chat import Chat
from common.config import ModelArguments
from common.data import Bins, collate
from common.decode import SampledLogps
from common.jsonl import write_lines
from common.tiny import FAMILIES
from grpo import twin
from grpo.batches import AnswerRows, make_mini_batches, weigh, why_idle
from grpo.experience import trainer_logps
from grpo.objectives import ObjectiveArguments
from grpo.reference import ReferenceWeights
from grpo.rollout import Ahead, Answer, Completion, Question, collect, completion_of, read_lines, read_questions
from grpo.twin import HfBackend

SAMPLING = {"temperature": 0.6, "top_p": 1.0, "max_new_tokens": 12, "seed": 3, "poll": lambda: False}
TEXTS = [
    "red",
    "What is the capital of France? Tell me a story about a river.",
    "one two",
    "Let me think about this step by step: 48 + 24 = 72.",
]


@pytest.fixture(scope="module", autouse=True)
def one_process():
    dist.init(setup_timeout_minutes=3)
    yield
    dist.shutdown()


def questions_of(tokenizer) -> list[Question]:
    rendered = [tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True) for t in TEXTS]
    return [Question(f"q{i}", text, tokenizer(text)["input_ids"], {"answer": "a"}, "") for i, text in enumerate(rendered)]


def built(folder, **options):
    args = ModelArguments(model_name_or_path=str(folder), **options)
    model = run.build_model(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop_ids = sorted(Chat(tokenizer).stops.values())
    return model, tokenizer, HfBackend(model, args, stop_ids=stop_ids, pad_id=tokenizer.pad_token_id, batch_size=5)


def answers_of(questions, completions):
    by_id = {q.id: q for q in questions}
    return [
        Answer(by_id[c.id], c, "", reward=float(i % 2), advantage=float(i % 2) - 0.5, informative=True) for i, c in enumerate(completions)
    ]


def mini_batches_of(answers, count=1, **options):
    settings = dict(max_length=256, bins_per_row=1, packing=True, pad_to=None, mask_truncated=False, with_kl=False) | options
    return make_mini_batches(answers, count, **settings)


def differences(folder, options, temperature=0.6):
    """|log p of the engine - log p of the trainer| of all sampled tokens, and the completions of this rank."""
    model, tokenizer, backend = built(folder, **options)
    questions = questions_of(tokenizer)
    backend.sync(7)
    completions = backend.generate([q.as_prompt() for q in questions], 3, **SAMPLING | {"temperature": temperature})
    everything = [c for part in dist.gather_objects(completions) for c in part]
    mini_batches = mini_batches_of(answers_of(questions, everything))
    logps = trainer_logps(model.sharded, mini_batches, temperature)
    parts = [(values - batch.sampled).abs() for values, batch in zip(logps, mini_batches[0], strict=True)]
    return torch.cat(parts).numpy(), completions


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ratio_is_one_on_policy(tiny_dir, family, dtype):
    """At temperature 0.6, for prompts of very different length in one left-padded batch."""
    found, completions = differences(tiny_dir(family), {"compute_dtype": dtype})
    assert len(found) >= 12 * 8 and len(completions) == 12
    assert {versions for c in completions for versions in c.weight_versions} == {(7, 0, len(c.completion_ids)) for c in completions}
    print(f"{family} {dtype}: mean {found.mean():.2e} max {found.max():.2e}")
    if dtype == "float32":
        assert found.max() < 1e-4
    else:
        assert found.mean() < 0.1  # experts chosen otherwise under rounding move single tokens by more


@pytest.mark.parametrize(
    "family, options, made",
    [
        ("qwen3_moe", {"trainable": "attention", "trainable_layers": "2-"}, {}),
        ("qwen3_moe", {"trainable": "experts", "expert_mask": {"1": [0, 7], "3": [10]}, "expert_units_per_layer": 2}, {}),
        ("glm_moe_dsa", {"trainable": "attention"}, {"fp8": True}),
        ("llama", {}, {"tie_word_embeddings": True}),
    ],
)
def test_ratio_is_one_where_parts_train(tiny_dir, tmp_path, family, options, made):
    """Frozen units, split experts, FP8 weights and tied embeddings reach the twin whole."""
    if "expert_mask" in options:
        (tmp_path / "mask.json").write_text(json.dumps(options["expert_mask"]))
        options = options | {"expert_mask": str(tmp_path / "mask.json")}
    found, _ = differences(tiny_dir(family, **made), options | {"compute_dtype": "float32"})
    print(f"{family} {options} {made}: mean {found.mean():.2e} max {found.max():.2e}")
    assert found.max() < 1e-4


def test_another_temperature_is_seen(tiny_dir):
    """The same check fails by far where trainer and engine do not use one temperature."""
    model, tokenizer, backend = built(tiny_dir("qwen3_moe"), compute_dtype="float32")
    questions = questions_of(tokenizer)
    completions = backend.generate([q.as_prompt() for q in questions], 3, **SAMPLING)
    batches = mini_batches_of(answers_of(questions, completions))
    logps = trainer_logps(model.sharded, batches, 1.0)
    assert torch.cat([(a - b.sampled).abs() for a, b in zip(logps, batches[0], strict=True)]).mean() > 0.2


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "glm_moe_dsa"])
def test_greedy_answers_are_those_of_plain_transformers(tiny_dir, family):
    """Each prompt alone, without padding, through from_pretrained."""
    folder = tiny_dir(family)
    _, tokenizer, backend = built(folder, compute_dtype="float32")
    questions = questions_of(tokenizer)
    completions = backend.generate([q.as_prompt() for q in questions], 1, **SAMPLING | {"temperature": 0.0})
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    plain.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    found = {c.id: c for c in completions}
    for question in questions:
        ids = torch.tensor([question.prompt_ids])
        with torch.no_grad():
            expected = plain.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=backend.stop_ids
            )[0, len(question.prompt_ids) :]
        assert found[question.id].completion_ids == expected.tolist()


def test_answers_end_at_any_stop_token_and_say_so(tiny_dir):
    _, tokenizer, backend = built(tiny_dir("llama"))
    prompt = questions_of(tokenizer)[0].as_prompt()
    [first] = backend.generate([prompt], 1, **SAMPLING | {"temperature": 0.0})
    assert first.finish_reason == "length" and len(first.completion_ids) == len(first.logps) == 12
    backend.stop_ids = [first.completion_ids[4], *backend.stop_ids]
    [second] = backend.generate([prompt], 1, **SAMPLING | {"temperature": 0.0})
    end = first.completion_ids.index(first.completion_ids[4]) + 1
    assert second.finish_reason == "stop" and second.completion_ids == first.completion_ids[:end]
    assert second.logps == pytest.approx(first.logps[:end])


def test_the_same_seed_gives_the_same_answers_and_leaves_the_generator_alone(tiny_dir):
    _, tokenizer, backend = built(tiny_dir("llama"))
    prompts = [q.as_prompt() for q in questions_of(tokenizer)]
    before = torch.get_rng_state()
    one, two = (backend.generate(prompts, 2, **SAMPLING) for _ in range(2))
    other = backend.generate(prompts, 2, **SAMPLING | {"seed": 4})
    assert one == two and one != other and torch.equal(before, torch.get_rng_state())
    assert all(parameter.is_meta for parameter in backend.twin.parameters())  # the twin is gone


def test_the_checkpoints_own_sampling_defaults_are_not_used(tiny_dir, tmp_path):
    """Qwen3 ships top_k 20 and top_p 0.8, which would make the engine's distribution another one."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_dir("llama"), folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"top_k": 1, "do_sample": True, "repetition_penalty": 5.0, "eos_token_id": [377]})
    )
    found, completions = differences(folder, {"compute_dtype": "float32"}, temperature=1.5)
    assert len({tuple(c.completion_ids) for c in completions}) == len(completions)  # top_k 1 would make three and three the same
    assert found.max() < 1e-4


def test_top_p_gives_probabilities_of_the_truncated_distribution():
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    processor = SampledLogps(1.0, 0.7)
    processor(torch.zeros(1, 1, dtype=torch.long), scores)
    logps = processor.of(torch.tensor([[1]]))
    assert logps.exp().item() == pytest.approx(0.3 / 0.8)


def test_refused_with_figures_where_it_does_not_fit(tiny_dir, monkeypatch):
    _, tokenizer, backend = built(tiny_dir("llama"))
    monkeypatch.setattr(twin, "free_memory", lambda: 1000)
    with pytest.raises(RuntimeError, match=r"does not fit: the twin's weights take 0\.0 GiB .* cache of 2 answers of \d+ tokens"):
        backend.generate([questions_of(tokenizer)[0].as_prompt()], 2, **SAMPLING)


def on_two_ranks(folder):
    found, completions = differences(folder, {"compute_dtype": "float32"})
    reference = reference_pass(folder)
    return found, [(c.id, c.sample, c.completion_ids) for c in completions], reference


def reference_pass(folder):
    """Log-probabilities by the untrained weights before, by changed weights, by the swapped-in reference, and after it."""
    model, tokenizer, backend = built(folder)
    questions = questions_of(tokenizer)
    completions = [c for part in dist.gather_objects(backend.generate([q.as_prompt() for q in questions], 2, **SAMPLING)) for c in part]
    batches = mini_batches_of(answers_of(questions, completions))
    reference = ReferenceWeights(model.sharded)

    def logps():
        return torch.cat(trainer_logps(model.sharded, batches, 1.0))

    values = [logps()]
    for shard in model.sharded.trained_shards():
        shard.tensor.mul_(1.05)
    values.append(logps())
    with reference.swapped_in():
        values.append(logps())
    values.append(logps())
    return [value.numpy() for value in values], {str(copy.dtype) for copy in reference.copies}


def test_two_ranks_share_the_answers_and_the_reference_is_the_untrained_model(tiny_dir, run_ranks):
    results = run_ranks(2, on_two_ranks, str(tiny_dir("qwen3_moe")))
    pairs = [{(name, sample) for name, sample, _ in completions} for _, completions, _ in results]
    assert [len(p) for p in pairs] == [6, 6] and len(pairs[0] | pairs[1]) == 12
    assert max(found.max() for found, _, _ in results) < 1e-4
    for _, _, ((untrained, changed, reference, after), dtypes) in results:
        assert np.array_equal(untrained, reference) and np.array_equal(changed, after)
        assert not len(untrained) or np.abs(untrained - changed).max() > 1e-3
        assert dtypes == {"torch.bfloat16"}  # the checkpoint is bf16: half the bytes hold it exactly


# ---- prompts


def test_prompts(tiny_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir("llama"))
    rows = [
        {"id": "m", "prompt": [{"role": "user", "content": "red"}], "answer": ["a"], "nested": {"x": 1}},
        {"prompt": "The capital of", "answer": "b"},
        {"id": 7, "prompt": "x " * 300},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    messages, text = read_questions([str(file)], tokenizer, 100)
    assert messages.id == "m" and messages.columns == {"answer": ["a"], "nested": {"x": 1}}
    assert tokenizer.decode(messages.prompt_ids) == "<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"
    assert text.id == "rows.jsonl:3" and tokenizer.decode(text.prompt_ids) == "The capital of"

    tokenizer.chat_template = "{{ messages[0].content }} {{ style }} {{ mood }}"
    file.write_text(json.dumps(rows[0] | {"chat_template_kwargs": {"mood": "warm"}}))
    [question] = read_questions([str(file)], tokenizer, 100, chat_template_kwargs='{"style": "large", "mood": "cold"}')
    assert tokenizer.decode(question.prompt_ids) == "red large warm"  # the row's own win
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir("llama"))

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([{"id": "p", "prompt": rows[0]["prompt"], "gold": 3}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    [question] = read_questions([str(tmp_path / "rows.parquet")], tokenizer, 100)
    assert question.columns == {"gold": 3} and question.prompt_ids == messages.prompt_ids


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', r"rows.jsonl:2: id '1' is that of .*rows.jsonl:1 too"),
        ('{"question": "a"}', r"rows.jsonl:1: a row needs `prompt`.*question"),
        ('{"prompt": []}', r"rows.jsonl:1: a row needs `prompt`"),
        ('{"prompt": [{"role": "robot", "content": ""}]}', r"rows.jsonl:1: .*unknown role 'robot'"),
        ('{"prompt": "' + "x " * 200 + '"}', r"holds no prompt to use: 0 prompts, 1 too long dropped"),
        ("[1]", r"rows.jsonl:1: "),
        ('{"prompt": [{"role": "user", "content": "a"}], "tools": "notjson"}', r"rows.jsonl:1: tools is text that is not JSON"),
        ('{"prompt": [{"role": "user", "content": "a"}], "tools": "3"}', r"rows.jsonl:1: tools must be a list, not 3"),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "chat_template_kwargs": "[1]"}',
            r"rows.jsonl:1: chat_template_kwargs must be a JSON",
        ),
    ],
)
def test_bad_prompts_are_named(tiny_dir, tmp_path, content, message):
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir("llama"))
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions([str(tmp_path / "rows.jsonl")], tokenizer, 50)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "good", "id": "good"}\n' + content)
    assert [q.id for q in read_questions([str(tmp_path / "rows.jsonl")], tokenizer, 50, "skip")][:1] == ["good"]


# ---- collecting answers by id


class Engine:
    """Gives answers in a shuffled order; stops after `until` of them."""

    def __init__(self, stop_file=None, until=10**9, wrong=()):
        self.stop_file, self.until, self.wrong, self.asked = stop_file, until, wrong, []

    def generate(self, prompts, num_generations, *, poll, seed, **_):
        self.asked.append(([p.id for p in prompts], num_generations))
        made = []
        for sample in reversed(range(num_generations)):
            for prompt in reversed(prompts):
                if len(made) >= self.until:
                    self.stop_file.touch()
                if poll():
                    made.append(Completion(prompt.id, sample, [1], [-0.1], "abort", [(0, 0, 1)]))
                    return made
                made.append(Completion(prompt.id, sample, [int(prompt.id[1:]), sample], [-0.5, -0.5], "stop", [(0, 0, 2)]))
        return made + list(self.wrong)


def plain_questions(count):
    return [Question(f"q{i}", "", [1, 2], {}, "") for i in range(count)]


def test_completions_are_tied_to_prompts_by_id(tmp_path):
    completions, stopped = collect(Engine(), plain_questions(3), 2, tmp_path / "STOP", version=0, seed=0)
    assert [(c.id, c.completion_ids) for c in completions] == [(f"q{i}", [i, s]) for i in range(3) for s in range(2)] and not stopped


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([Completion("q0", 0, [0], [0.0], "stop", [])], "sample 0 of prompt q0 twice"),
        ([Completion("q9", 0, [0], [0.0], "stop", [])], "nobody asked for: id q9"),
        ([Completion("q0", 2, [0], [0.0], "stop", [])], "nobody asked for: id q0, sample 2"),
    ],
)
def test_answers_to_something_else_are_refused(tmp_path, wrong, message):
    with pytest.raises(RuntimeError, match=message):
        collect(Engine(wrong=wrong), plain_questions(2), 2, tmp_path / "STOP", version=0, seed=0)


def test_lost_answers_are_an_error(tmp_path):
    engine = Engine()
    engine.generate = lambda prompts, n, **_: []
    with pytest.raises(RuntimeError, match="without answers to 2 prompts: q0, q1"):
        collect(engine, plain_questions(2), 2, tmp_path / "STOP", version=0, seed=0)


def test_a_stop_keeps_finished_answers_and_only_the_rest_is_generated(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.rollout.StopPoll.__init__.__defaults__", (0.0, False))
    questions, stop = plain_questions(3), tmp_path / "STOP"
    kept, stopped = collect(Engine(stop, until=4), questions, 2, stop, version=0, seed=0)
    assert stopped and len(kept) == 4 and all(c.finish_reason == "stop" for c in kept)
    answers = [Answer(next(q for q in questions if q.id == c.id), c, "text") for c in kept]
    write_lines(tmp_path / "rollouts" / "unfinished.jsonl", (a.line(5) for a in answers))
    stop.unlink()
    engine = Engine()
    again = [completion_of(line) for line in read_lines(tmp_path / "rollouts" / "unfinished.jsonl")]
    assert again == kept
    completions, stopped = collect(engine, questions, 2, stop, again, version=0, seed=0)
    assert not stopped and [(c.id, c.sample) for c in completions] == [(q.id, s) for q in questions for s in range(2)]
    assert sum(len(ids) * count for ids, count in engine.asked) == 2


class Lost(RuntimeError):
    """What a back-end raises that lost all its engines: it carries what was finished."""

    def __init__(self, completions):
        super().__init__("all engines are gone")
        self.completions = completions


class FailingEngine(Engine):
    """Loses its engines in the first `failures` calls, with all but the last answers finished."""

    def __init__(self, failures):
        super().__init__()
        self.failures, self.synced = failures, []

    def sync(self, version):
        self.synced.append(version)

    def generate(self, prompts, num_generations, **options):
        made = super().generate(prompts, num_generations, **options)
        self.failures -= 1
        if self.failures >= 0:
            raise Lost(made[:-3])
        return made


def test_lost_engines_get_the_weights_again_and_only_the_rest_is_generated(tmp_path):
    engine = FailingEngine(1)
    completions, stopped = collect(engine, plain_questions(4), 2, tmp_path / "STOP", version=9, seed=0)
    assert [(c.id, c.sample) for c in completions] == [(f"q{i}", s) for i in range(4) for s in range(2)] and not stopped
    assert engine.synced == [9]
    assert engine.asked == [(["q0", "q1", "q2", "q3"], 2), (["q0", "q1", "q2"], 1)]
    with pytest.raises(RuntimeError, match="without answers to 2 prompts"):
        collect(FailingEngine(9), plain_questions(2), 4, tmp_path / "STOP", version=9, seed=0, max_tries=1)


@pytest.mark.parametrize("waited", [True, False])
def test_engines_that_do_not_come_back_leave_what_was_finished(waited, tmp_path, monkeypatch):
    """Whether the back-end has waited for them itself, or they are still gone when they should get the weights again."""
    engine = FailingEngine(1)

    def sync(version):
        raise RuntimeError("no server came back")

    engine.sync = sync
    monkeypatch.setattr(Lost, "waited", waited, raising=False)
    kept = [Completion("q0", 1, [5], [-1.0], "stop", [(9, 0, 1)])]
    with pytest.raises(RuntimeError, match="all engines are gone" if waited else "no server came back") as caught:
        collect(engine, plain_questions(3), 2, tmp_path / "STOP", kept, version=9, seed=0)
    # one answer is there, one is asked for of q0 and two of the others; of the first call, for q0 alone, nothing is finished
    assert [(c.id, c.sample) for c in caught.value.completions] == [("q0", 1)]
    assert len(engine.asked) == 1


def test_answers_generated_ahead(tmp_path):
    """What was generated ahead is not asked for again; what is missing of it is; another failure of the thread is raised where it is taken."""
    questions, engine = plain_questions(3), FailingEngine(1)
    ahead = Ahead(engine, questions, 2, tmp_path / "STOP", seed=0)
    ahead.wait()
    kept = ahead.take()
    assert len(kept) == 3
    completions, _ = collect(engine, questions, 2, tmp_path / "STOP", kept, version=4, seed=0)
    assert [(c.id, c.sample) for c in completions] == [(f"q{i}", s) for i in range(3) for s in range(2)]
    assert engine.asked[0] == (["q0", "q1", "q2"], 2) and sum(len(ids) * count for ids, count in engine.asked[1:]) == 3

    def broken(*_, **__):
        raise ValueError("no such thing")

    engine.generate = broken
    with pytest.raises(ValueError, match="no such thing"):
        Ahead(engine, questions, 2, tmp_path / "STOP", seed=0).take()


# ---- mini-batches


def many_answers(tokenizer_questions=5, per_question=4):
    answers = []
    for i in range(tokenizer_questions):
        question = Question(f"q{i}", "", [9] * (3 + 5 * i), {}, "")
        for s in range(per_question):
            length = 1 + (7 * i + 3 * s) % 11
            completion = Completion(
                f"q{i}", s, [10 + s] * length, [-0.25 * (s + 1)] * length, "length" if (i, s) == (1, 1) else "stop", [(0, 0, length)]
            )
            answers.append(Answer(question, completion, "", reward=1.0, advantage=float(i * 10 + s), informative=i != 2))
    return answers


def test_mini_batches_hold_every_answer_that_trains_once_with_its_own_numbers():
    answers = many_answers()
    batches = mini_batches_of(answers, 2, max_length=48, mask_truncated=True)
    seen = [index for minis in batches for batch in minis for index in batch.answers]
    expected = [i for i, a in enumerate(answers) if a.question.id != "q2" and (a.question.id, a.completion.sample) != ("q1", 1)]
    assert sorted(seen) == expected  # the group without signal and the answer that was cut off are not computed at all
    groups = [{answers[i].question.id for batch in minis for i in batch.answers} for minis in batches]
    assert not groups[0] & groups[1] and all(groups)
    for batch in (batch for minis in batches for batch in minis):
        assert batch.packed.num_tokens <= 48
        targets = batch.of_targets(batch.packed.targets.flatten())
        for place, index in enumerate(batch.answers):
            mine = batch.row == place
            assert targets[mine].tolist() == answers[index].completion.completion_ids
            assert batch.sampled[mine].tolist() == answers[index].completion.logps
            assert batch.advantages[place] == answers[index].advantage


def test_answers_without_signal_stay_in_the_kl_term_only():
    answers = many_answers()
    batches = mini_batches_of(answers, 1, max_length=64, mask_truncated=True, with_kl=True)
    for batch in batches[0]:
        batch.old = batch.sampled
    [window] = weigh(batches, ObjectiveArguments(beta=0.1), 16)
    tokens = {i: len(a.completion.completion_ids) for i, a in enumerate(answers) if a.completion.finish_reason == "stop"}
    trained = {i: n for i, n in tokens.items() if answers[i].question.id != "q2"}
    assert window.tolist() == [sum(trained.values()), len(trained), sum(tokens.values()), len(tokens)]
    total = sum(batch.policy_scale.sum() for batch in batches[0])
    assert total.item() == pytest.approx(1.0)


def test_tokens_that_the_correction_rejects_are_not_counted():
    answers = many_answers(3)
    batches = mini_batches_of(answers, 1, max_length=64)
    rejected = 0
    for batch in batches[0]:
        far = batch.sampled == -0.5  # all tokens of each group's second answer: engine and trainer disagree by e^3
        batch.old = batch.sampled + 3.0 * far
        rejected += int(far.sum())
    [window] = weigh(batches, ObjectiveArguments(rollout_correction="icepop", beta=0.1), 16)
    tokens = sum(len(a.completion.completion_ids) for a in answers if a.informative)
    assert rejected and window.tolist() == [tokens - rejected, 6, tokens, 8]  # the KL term keeps them
    for batch in batches[0]:
        assert (batch.policy_scale[batch.weights == 0] == 0).all()
        assert batch.kl_scale.tolist() == pytest.approx([1 / tokens] * len(batch.row))
        assert batch.policy_scale[batch.weights > 0].tolist() == pytest.approx([1 / window[0].item()] * int((batch.weights > 0).sum()))


def test_a_mini_batch_without_signal_is_empty():
    answers = many_answers(2)
    for answer in answers:
        answer.informative = answer.question.id == "q1"
    first, second = mini_batches_of(answers, 2)
    assert first == [] and second
    windows = weigh([[]], ObjectiveArguments(), 16)
    assert windows[0].tolist() == [0, 0, 0, 0]
    answers[0].reward = None
    assert why_idle(answers, 2, True) == [
        "of 4 answers 1 not scored, 3 in groups of equal rewards",
        "of 4 answers 3 scored and different, 1 cut off",  # what the correction then rejects
    ]
    assert why_idle([], 1, True) == ["of 0 answers none is there"]


def test_packed_rows_of_answers_have_targets_on_completions_only():
    answers = many_answers(2, 2)
    batch = collate(AnswerRows(answers), Bins(np.arange(4), np.array([0, 4])), [0])
    starts = np.concatenate([[0], np.cumsum(AnswerRows(answers).lengths())])
    expected = sum(len(a.completion.completion_ids) for a in answers)
    assert (batch.targets >= 0).sum() == expected
    for answer, start in zip(answers, starts, strict=False):
        prompt = len(answer.question.prompt_ids)
        assert (batch.targets[0, start : start + prompt - 1] == -100).all() and batch.targets[0, start + prompt - 1] >= 0
