"""Rows of preferences: what becomes a pair, what is refused or dropped, how pairs are cut, packed and collated."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common import data
from common.chat import BadRow, Chat
from common.data import NO_TARGET
from dpo.data import PairRule, answer_sums, collate_pairs, common_limit, prompt_ids, rows_of_rank, split_pair

USER = {"role": "user", "content": "Name a colour."}
RED, BLUE = {"role": "assistant", "content": "Red."}, {"role": "assistant", "content": "Blue, I think."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return AutoTokenizer.from_pretrained(tiny_dir("qwen3_moe"))


@pytest.fixture
def build(tmp_path, tokenizer):
    def run(rows: list[dict], max_length: int = 512, **options) -> data.TokenizedDataset:
        file = tmp_path / "pairs.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows))
        return data.tokenize_files([str(file)], tokenizer, max_length=max_length, cache_dir=tmp_path / "cache", rule=PairRule(), **options)

    return run


def texts(dataset, tokenizer) -> list[tuple[str, str]]:
    """(context, learned) of every example; what is learned must be one stretch."""
    result = []
    for index in range(len(dataset)):
        ids, mask = dataset.example(index)
        first = int(np.argmax(mask))
        assert mask[first:].all() or tokenizer.decode(ids[first:][~mask[first:]]).strip() == ""
        result.append((tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:][mask[first:]])))
    return result


CONTEXT = "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [RED], "rejected": [BLUE]},
        {"prompt": [USER], "chosen": "Red.", "rejected": "Blue, I think."},
        {"chosen": [USER, RED], "rejected": [USER, BLUE]},
        {"prompt": "Name a colour.", "chosen": [RED], "rejected": [BLUE]},
        {"prompt": "Name a colour.", "chosen": [USER, RED], "rejected": [USER, BLUE]},
        {"prompt": [USER], "chosen": [USER, RED], "rejected": [USER, {**BLUE, "name": None}]},
    ],
    ids=["messages", "string answers", "conversations", "string prompt", "prompt repeated in conversations", "prompt list repeated"],
)
def test_forms_of_a_row(build, tokenizer, row):
    assert texts(build([row]), tokenizer) == [(CONTEXT, "Red.<|im_end|>"), (CONTEXT, "Blue, I think.<|im_end|>")]


def test_strings_are_not_put_through_the_template(build, tokenizer):
    dataset = build([{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}])
    end = tokenizer.eos_token
    assert texts(dataset, tokenizer) == [("2 + 2 =", f" 4{end}"), ("2 + 2 =", f" 5{end}")]


def test_shared_turns_are_the_prompt(build, tokenizer):
    earlier = [SYSTEM, USER, RED, {"role": "user", "content": "Another?"}]
    dataset = build([{"chosen": [*earlier, BLUE], "rejected": [*earlier, RED]}])
    assert [learned for _, learned in texts(dataset, tokenizer)] == ["Blue, I think.<|im_end|>", "Red.<|im_end|>"]
    contexts = {context for context, _ in texts(dataset, tokenizer)}
    assert len(contexts) == 1 and "Be brief." in contexts.pop()


def spaces_tokenizer() -> PreTrainedTokenizerFast:
    """Splits text as Qwen's tokenizers do and joins spaces; its template ends the prompt with three of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "\u0120\u0120", "\u0120\u0120\u0120"])}
    model = Tokenizer(models.BPE(vocab, merges=[("\u0120", "\u0120"), ("\u0120\u0120", "\u0120")]))
    pattern = Regex(r" ?[^\s\p{L}\p{N}]+|\p{L}+|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pattern, "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    template = (
        "{% for m in messages %}{{ m.role + ':   ' + m.content + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:   ' }}{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", chat_template=template)


def test_prompts_stay_equal_where_an_answer_would_merge_with_its_end():
    """The spaces before "\n4" are one token together with it, so that answer is tokenised apart; before "4" they are two tokens."""
    tokenizer = spaces_tokenizer()
    chat, rule = Chat(tokenizer), PairRule()
    renders = rule.render(chat, {"prompt": [USER], "chosen": "4", "rejected": "\n5"})
    examples = chat.encode(renders)
    assert prompt_ids(examples[0]) != prompt_ids(examples[1])
    settings = data.Settings(512, "drop", "error", (), {}, rule)
    chosen, rejected = rule.keep(chat, renders, examples, settings, data.Part(""))
    assert prompt_ids(chosen) == prompt_ids(rejected) == tokenizer("user:   Name a colour.<end>assistant:   ")["input_ids"]
    assert tokenizer.decode([i for i, m in zip(*rejected, strict=True) if m]) == "\n5<end>"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": [USER], "chosen": [RED]}, "needs 'chosen' and 'rejected'; columns found: prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": [RED]}, "both strings, or both lists"),
        ({"chosen": "b", "rejected": "c"}, "'prompt' is missing"),
        ({"chosen": [USER, RED], "rejected": [{"role": "user", "content": "Other"}, BLUE]}, "message 0.*not an assistant turn in chosen"),
        ({"chosen": [USER, RED], "rejected": [USER, RED, USER, BLUE]}, "message 2.*not an assistant turn in rejected"),
        ({"chosen": [RED], "rejected": [BLUE]}, "no message in common"),
        ({"prompt": [SYSTEM], "chosen": [USER, RED], "rejected": [USER, BLUE]}, "'prompt' is not what"),
        ({"prompt": "Name a town.", "chosen": [USER, RED], "rejected": [USER, BLUE]}, "no message .* text of 'prompt'"),
        ({"prompt": [USER], "chosen": [RED], "rejected": [{"role": "robot", "content": "x"}]}, "rejected .*unknown role 'robot'"),
    ],
)
def test_rows_that_are_refused(tokenizer, row, message):
    with pytest.raises(BadRow, match=message):
        PairRule().render(Chat(tokenizer), row)


def test_refused_rows_name_file_and_line(build):
    good = {"prompt": [USER], "chosen": [RED], "rejected": [BLUE]}
    with pytest.raises(ValueError, match=r"pairs.jsonl:2: a row of preferences needs"):
        build([good, {"messages": [USER, RED]}])
    dataset = build([good, {"messages": [USER, RED]}], on_bad_row="skip")
    assert len(dataset) == 2 and dataset.report["dropped"] == {"bad_row": 1}


def test_dropped_pairs_are_counted_by_reason(build):
    rows = [
        {"prompt": [USER], "chosen": [RED], "rejected": [BLUE]},
        {"prompt": [USER], "chosen": [RED], "rejected": [RED]},
        {"chosen": [USER, BLUE], "rejected": [USER, BLUE]},
        {"prompt": [USER], "chosen": "", "rejected": "Red."},
        {"prompt": [USER], "chosen": [RED], "rejected": [{"role": "assistant", "content": " "}]},
        {"chosen": [USER], "rejected": [USER, BLUE]},
        {"prompt": [USER], "chosen": [RED], "rejected": [{"role": "assistant", "content": "word " * 200}]},
    ]
    dataset = build(rows, max_length=200)
    assert dataset.report["dropped"] == {"identical_answers": 2, "empty_answer": 3, "over_long": 1}
    assert len(dataset) == 2 and dataset.where(0).endswith(":1")
    assert "2 identical answers" in dataset.summary()


@pytest.mark.parametrize(
    "first, second, room, limit", [(10, 300, 100, 90), (300, 10, 100, 90), (300, 300, 101, 50), (50, 51, 100, 50), (60, 70, 100, 50)]
)
def test_common_limit(first, second, room, limit):
    assert common_limit(first, second, room) == limit
    kept = min(first, limit) + min(second, limit)
    assert kept <= room and (kept == room or room - kept == room % 2)


def test_truncation_keeps_the_prompt_whole_in_both_answers(build):
    long, longer = {"role": "assistant", "content": "red " * 60}, {"role": "assistant", "content": "blue " * 80}
    dataset = build([{"prompt": [USER], "chosen": [long], "rejected": [longer]}], max_length=120, over_long="truncate")
    (chosen, chosen_mask), (rejected, rejected_mask) = dataset.example(0), dataset.example(1)
    assert (len(chosen), len(rejected)) == (60, 60) and dataset.report["truncated"] == 1
    first = int(np.argmax(chosen_mask))
    assert first == int(np.argmax(rejected_mask)) and chosen[:first].tolist() == rejected[:first].tolist()


def test_truncation_drops_what_it_would_make_senseless(build):
    prompt = [{"role": "user", "content": "word " * 100}]
    same = "the same beginning " * 20
    rows = [
        {"prompt": prompt, "chosen": [RED], "rejected": [BLUE]},
        {"prompt": [USER], "chosen": same + "red", "rejected": same + "blue"},
        {"prompt": [USER], "chosen": [RED], "rejected": [BLUE]},
    ]
    dataset = build(rows, max_length=150, over_long="truncate")
    assert dataset.report["dropped"] == {"prompt_over_long": 1, "identical_once_truncated": 1} and len(dataset) == 2


def many_rows(count: int) -> list[dict]:
    row = {"prompt": [USER], "weight": 1}
    answers = [("red " * (1 + i % 7), "blue " * (2 + i % 5), 1 + i % 3) for i in range(count)]
    return [row | {"chosen": chosen, "rejected": rejected, "weight": weight} for chosen, rejected, weight in answers]


@pytest.mark.parametrize("packing", [True, False])
def test_pairs_are_never_parted(build, packing):
    dataset = build(many_rows(40))
    bins = data.pack(dataset.lengths, 256, packing, group=2)
    assert sorted(bins.rows.tolist()) == list(range(80))
    assert len(bins) == 40 if not packing else len(bins) < 40
    for index in range(len(bins)):
        rows = bins[index]
        assert (rows[0::2] % 2 == 0).all() and (rows[1::2] == rows[0::2] + 1).all()
        assert dataset.lengths[rows].sum() <= 256


def test_collated_pairs(build, tokenizer):
    dataset = build(many_rows(12))
    bins = data.pack(dataset.lengths, 256, group=2)
    sums = np.arange(24) / 10
    batch = collate_pairs(dataset, bins, [0, 1], sums, pad_to=640)
    rows = batch.packed.rows
    assert batch.weights.tolist() == [dataset.weights[row] for row in rows[::2]] and set(batch.weights.tolist()) > {1.0}
    assert batch.lengths.tolist() == [int(dataset.example(row)[1].sum()) for row in rows]
    assert batch.reference.tolist() == [row / 10 for row in rows]
    assert batch.chosen_tokens == sum(dataset.weights[row] * dataset.example(row)[1].sum() for row in rows[::2])

    logps = torch.where(batch.packed.targets[0] != NO_TARGET, batch.packed.targets[0] * -0.001, 0.0).requires_grad_()
    answers = answer_sums(logps, batch.packed)
    ids = [dataset.example(row)[0][dataset.example(row)[1]] for row in rows]
    assert answers.tolist() == pytest.approx([-0.001 * int(answer.sum()) for answer in ids], rel=1e-6)
    answers[3].backward()
    start, end = batch.packed.cu_seq_lens[3:5].tolist()
    inside = torch.zeros_like(logps)
    inside[start:end] = 1
    assert torch.equal(logps.grad, inside)

    filler = collate_pairs(dataset, bins, [0], sums, zero_weight=True)
    assert filler.weights.sum() == 0 and filler.lengths.sum() == 0 and (filler.packed.targets == NO_TARGET).all()


@pytest.mark.parametrize("bins, size, world", [(7, 2, 2), (1, 1, 3), (8, 2, 2), (0, 1, 2)])
def test_every_rank_runs_equally_often_and_every_bin_counts_once(monkeypatch, bins, size, world):
    counted, rounds = [], set()
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        rows = rows_of_rank(np.arange(bins), size)
        rounds.add(len(rows))
        counted += [b for ids, filler in rows if not filler for b in ids]
        assert all(len(ids) for ids, _ in rows)
    assert len(rounds) == 1 and sorted(counted) == list(range(bins))


def test_thinking_that_a_template_rewrites_is_refused(tokenizer, monkeypatch):
    """Qwen3 drops the thinking of earlier turns: an answer of two turns is then not one sequence."""
    template = (
        "{% set last = (messages | rejectattr('role', 'equalto', 'assistant') | list)[-1] %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.reasoning_content is defined and messages.index(m) > messages.index(last) %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    thinking = {**RED, "reasoning_content": "warm"}
    two_turns = [thinking, {"role": "user", "content": "Why?"}, thinking]
    with pytest.raises(BadRow, match="rewrites earlier turns"):
        PairRule().render(Chat(tokenizer), {"prompt": [USER], "chosen": two_turns, "rejected": [BLUE]})
    assert len(PairRule().render(Chat(tokenizer), {"prompt": [USER], "chosen": [thinking], "rejected": [BLUE]})) == 2


def test_split_does_not_change_the_row():
    row = {"chosen": [USER, {**RED, "name": None}], "rejected": [USER, BLUE]}
    before = json.dumps(row)
    assert split_pair(row) == ([USER], ([RED], [BLUE]))
    assert json.dumps(row) == before
