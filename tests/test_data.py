"""Files to datasets, datasets to bins, bins to micro-batches; every number is worked out by hand or by a plainer way."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from common import data, rows, tiny
from common.data import Bins, Order, TokenizedDataset, collate, describe, pack, tokenize_files

ROOT = Path(__file__).resolve().parents[1]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def row(question="1+1?", answer="2", **columns) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **columns}


def write(path: Path, lines: list) -> str:
    """JSON Lines; a line given as bytes is written as it is."""
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n")
    return str(path)


def tokenized(files, tokenizer, tmp_path, **options) -> TokenizedDataset:
    options = {"max_length": 256, "cache_dir": tmp_path / "cache", "progress": False, **options}
    return tokenize_files([files] if isinstance(files, str) else files, tokenizer, **options)


def texts(dataset: TokenizedDataset, tokenizer) -> list[str]:
    return [tokenizer.decode(ids[mask]) for ids, mask in map(dataset.example, range(len(dataset)))]


def bytes_of(dataset: TokenizedDataset) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in dataset.path.iterdir()}


# ---- files


def test_a_misspelt_column_is_named(tokenizer, tmp_path, caplog):
    file = write(tmp_path / "a.jsonl", [row(answer="one", wieght=2.0, source="web"), row(answer="two")])
    with caplog.at_level("WARNING"):
        dataset = tokenized(file, tokenizer, tmp_path)
    assert dataset.weights.tolist() == [1, 1]
    (message,) = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert message == f"{file}: column 'wieght' is not used; did you mean 'weight'?"


def test_several_files_lines_and_weights(tokenizer, tmp_path):
    first = write(tmp_path / "a.jsonl", [row(answer="one"), b"", row(answer="two", weight=0.5), b"  ", row(answer="three", other=[1])])
    second = write(tmp_path / "b.json", [{"prompt": "1+1=", "completion": "2", "weight": 3}])
    dataset = tokenized([first, second], tokenizer, tmp_path)
    assert texts(dataset, tokenizer) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>", "2<|im_end|>"]
    assert dataset.weights.tolist() == [1, 0.5, 1, 3]
    assert [dataset.where(i) for i in range(4)] == [f"{first}:1", f"{first}:3", f"{first}:5", f"{second}:1"]
    assert dataset.report["rows"] == 4 and dataset.report["tokens"] == len(dataset.ids) == sum(dataset.lengths)
    assert dataset.report["loss_tokens"] == dataset.mask.sum()
    assert "4 rows -> 4 examples" in dataset.summary() and "dropped: none" in dataset.summary()


def test_windows_line_ends_byte_order_mark_and_no_final_newline(tokenizer, tmp_path):
    plain = write(tmp_path / "plain.jsonl", [row("é🚀"), row("b")])
    odd = tmp_path / "odd.jsonl"
    odd.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(r, ensure_ascii=False).encode() for r in (row("é🚀"), row("b"))))
    assert tokenized(str(odd), tokenizer, tmp_path).key == tokenized(plain, tokenizer, tmp_path).key


def test_parquet_equals_json_lines(tokenizer, tmp_path):
    """Nested columns: Arrow gives every message all fields of the type, absent ones as null; tools and arguments come as JSON text."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    agent = [{"role": "user", "content": "sum?"}, call, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "Three."}]
    lines = [{"messages": agent, "weight": 2.0}] + [{**row(f"{i}?", f"{i}!"), "weight": 1.0} for i in range(5)]
    for line in lines:
        line["tools"] = json.dumps(TOOLS)
    table = pyarrow.Table.from_pylist([{**line, "unused": 1} for line in lines])
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    dataset = tokenized(str(tmp_path / "a.parquet"), tokenizer, tmp_path)
    same = tokenized(write(tmp_path / "a.jsonl", lines), tokenizer, tmp_path)
    assert dataset.key == same.key
    assert texts(dataset, tokenizer)[0] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>Three.<|im_end|>'
    assert dataset.where(5).endswith("a.parquet:6")
    parquet.write_table(pyarrow.table({"question": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet:1: .*columns found: question"):
        tokenized(str(tmp_path / "b.parquet"), tokenizer, tmp_path)
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"c\.parquet cannot be read as Parquet"):
        tokenized(str(tmp_path / "c.parquet"), tokenizer, tmp_path)


BAD_ROWS = [
    (b'{"messages": [', "not valid JSON"),
    (b"[1, 2]", "one JSON object, not a list"),
    (b"[", "write one object a line"),
    (b'{"prompt": "caf\xe9", "completion": "a"}', "not valid UTF-8"),
    (b'{"prompt": "\\ud83d", "completion": "a"}', "half of a surrogate pair"),
    (b'{"prompt": "a", "completion": "b", "weight": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ({"text": "a", "id": 1}, "columns found: text, id"),
    (row(weight=0), "weight is 0"),
    (row(weight=-1.5), "weight is -1.5"),
    (row(weight=float("nan")), "weight is nan"),
    (row(weight=float("inf")), "weight is inf"),
    (row(weight=1e39), "weight is 1e+39"),
    (row(weight=1e-60), "weight is 1e-60"),
    (row(weight=10**400), "weight is 1000"),
    (row(weight=None), "weight is None"),
    (row(weight="1"), "weight is '1'"),
    (row(weight=True), "weight is True"),
    ({"messages": [{"role": "human", "content": "a"}]}, "message 0 has the unknown role 'human'"),
]


@pytest.mark.parametrize("line, reason", BAD_ROWS, ids=[reason[:30] for _, reason in BAD_ROWS])
def test_a_bad_row_is_named_or_counted(tokenizer, tmp_path, line, reason):
    good = [row(answer="one"), b"", row(answer="two")]
    file = write(tmp_path / "a.jsonl", [*good, line, row(answer="three")])
    with pytest.raises(ValueError) as error:
        tokenized(file, tokenizer, tmp_path)
    assert f"{file}:4: " in str(error.value) and reason in str(error.value)
    assert not list((tmp_path / "cache").iterdir())
    dataset = tokenized(file, tokenizer, tmp_path, on_bad_row="skip")
    assert texts(dataset, tokenizer) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert dataset.report["dropped"] == {"bad_row": 1} and "1 bad row" in dataset.summary()
    assert dataset.report["bad_rows"][0].startswith(f"{file}:4: ") and reason in dataset.report["bad_rows"][0]
    assert dataset.where(2) == f"{file}:5"


@pytest.mark.parametrize("lines", [[], [b""], [{"messages": [{"role": "user", "content": "a"}]}], [row(answer="")], [row("long " * 200)]])
def test_a_file_with_nothing_to_learn_is_an_error(tokenizer, tmp_path, lines):
    good, empty = write(tmp_path / "good.jsonl", [row()]), write(tmp_path / "empty.jsonl", lines)
    if not lines:
        Path(empty).write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds nothing to learn from"):
        tokenized([good, empty], tokenizer, tmp_path)


def test_rows_with_nothing_to_learn_are_counted(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", [row(), {"messages": [{"role": "user", "content": "a"}]}, row(answer=None)])
    dataset = tokenized(file, tokenizer, tmp_path)
    assert len(dataset) == 1 and dataset.report["dropped"] == {"nothing_to_learn": 2} and dataset.report["rows"] == 3


def test_wrong_use(tokenizer, tmp_path):
    good = write(tmp_path / "a.jsonl", [row()])
    for files, options, reason in (
        ([], {}, "no data files"),
        ([str(tmp_path / "none.jsonl")], {}, "none.jsonl does not exist"),
        ([write(tmp_path / "a.csv", [row()])], {}, r"a\.csv: data files are JSON Lines"),
        ([good], {"over_long": "cut"}, "over_long is 'cut'"),
        ([good], {"on_bad_row": "ignore"}, "on_bad_row is 'ignore'"),
    ):
        with pytest.raises(ValueError, match=reason):
            tokenized(files, tokenizer, tmp_path, **options)


# ---- length


def completion_row(tokens: int) -> dict:
    """2 tokens of prompt, tokens - 3 of completion, eos: digits are tokens of their own."""
    return {"prompt": "12", "completion": ("3456789" * tokens)[: tokens - 3]}


def test_rows_of_max_one_more_and_twice_as_much(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", [completion_row(n) for n in (16, 17, 32)])
    dropped = tokenized(file, tokenizer, tmp_path, max_length=16)
    assert dropped.lengths.tolist() == [16] and dropped.report["dropped"] == {"over_long": 2}
    cut = tokenized(file, tokenizer, tmp_path, max_length=16, over_long="truncate")
    assert cut.lengths.tolist() == [16, 16, 16] and cut.report["truncated"] == 2 and cut.report["dropped"] == {}
    whole = tokenized(file, tokenizer, tmp_path, max_length=32)
    assert whole.lengths.tolist() == [16, 17, 32]
    for i in range(3):
        for kept, full in zip(cut.example(i), whole.example(i), strict=True):
            assert kept.tolist() == full[:16].tolist()
        assert cut.example(i)[1].tolist() == [False] * 2 + [True] * 14
    assert cut.ids[15] == tokenizer.eos_token_id != cut.ids[31]


def test_a_cut_that_leaves_nothing_to_learn_drops_the_row(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": "1" * 8, "completion": "2"}, {"prompt": "1" * 7, "completion": "2"}])
    dataset = tokenized(file, tokenizer, tmp_path, max_length=8, over_long="truncate")
    assert dataset.report["dropped"] == {"nothing_to_learn": 1} and dataset.where(0).endswith(":2")
    assert dataset.example(0)[1].tolist() == [False] * 7 + [True]


# ---- workers


def many_lines() -> list:
    letters = random.Random(0)
    lines = [row("é🚀" * letters.randrange(9), f"answer {i} " * letters.randrange(1, 9), weight=1 + i % 3) for i in range(400)]
    lines[50:50] = [b"", b"  "]
    return lines


def test_the_result_does_not_depend_on_units_or_workers(tokenizer, tmp_path, monkeypatch):
    files = [write(tmp_path / "a.jsonl", many_lines()), write(tmp_path / "b.jsonl", many_lines()[:7])]
    alone = tokenized(files, tokenizer, tmp_path, cache_dir=tmp_path / "one")
    monkeypatch.setattr(data, "WORKERS_FROM_BYTES", 0)
    monkeypatch.setattr(rows, "UNIT_BYTES", 4099)  # cuts inside lines and characters
    assert len(rows.split_into_units(files)) > 10
    pools, pool = [], data.ProcessPoolExecutor
    monkeypatch.setattr(data, "ProcessPoolExecutor", lambda *args: pools.append(args[0]) or pool(*args))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    shared = tokenized(files, tokenizer, tmp_path, cache_dir=tmp_path / "many", num_workers=2)
    assert pools == [2] and bytes_of(alone) == bytes_of(shared)
    assert len(alone) == 407 and alone.where(399).endswith("a.jsonl:402") and alone.where(400).endswith("b.jsonl:1")


@pytest.mark.parametrize("unit_bytes", [1, 7, 64, 97])
def test_every_line_belongs_to_one_unit(tmp_path, monkeypatch, unit_bytes):
    monkeypatch.setattr(rows, "UNIT_BYTES", unit_bytes)
    lines = [{"n": i, "x": "é" * (i % 11)} for i in range(40)]
    file = write(tmp_path / "a.jsonl", [*lines[:20], b"", *lines[20:]])
    units = rows.split_into_units([file])
    found = [[line for _, line in rows.read_unit(unit)] for unit in units]
    assert [line for part in found for line in part if line is not None] == lines
    assert sum(map(len, found)) == 41


def test_a_bad_line_in_a_late_unit_is_named_by_its_line_in_the_file(tokenizer, tmp_path, monkeypatch):
    lines = many_lines()
    lines[301] = b"{"
    lines[350] = b"{"
    file = write(tmp_path / "a.jsonl", lines)
    monkeypatch.setattr(data, "WORKERS_FROM_BYTES", 0)
    monkeypatch.setattr(rows, "UNIT_BYTES", 4099)
    for workers in (1, 2):
        with pytest.raises(ValueError, match=r"a\.jsonl:302: not valid JSON"):
            tokenized(file, tokenizer, tmp_path, num_workers=workers)
        assert not list((tmp_path / "cache").iterdir())
    skipped = tokenized(file, tokenizer, tmp_path, on_bad_row="skip")
    assert [message.split(": ")[0] for message in skipped.report["bad_rows"]] == [f"{file}:302", f"{file}:351"]


# ---- the cache


def test_the_cache_is_used_and_changes_with_what_decides_its_content(tokenizer, tmp_path, monkeypatch):
    file = write(tmp_path / "a.jsonl", [row("ab", "cd"), row("ab " * 30, "cd")])
    calls = []
    build = data._build
    monkeypatch.setattr(data, "_build", lambda *args: (calls.append(args[0]), build(*args)))
    options = {"max_length": 48, "over_long": "truncate"}

    def count(**changed) -> int:
        before = len(calls)
        tokenized(file, changed.pop("tokenizer", tokenizer), tmp_path, **{**options, **changed})
        return len(calls) - before

    assert count() == 1 and count() == 0
    tokenizer("a", padding="max_length", max_length=8)  # the state of a call is not part of the tokenizer
    assert count() == 0
    assert count(max_length=47) == 1 and count(over_long="drop") == 1 and count(on_bad_row="skip") == 1
    assert count(chat_template_kwargs={"enable_thinking": False}) == 1 and count(stop_ids=[5]) == 1
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    assert count(tokenizer=other) == 0
    template = other.chat_template
    other.chat_template = template.replace("<|im_start|>assistant", "<|im_start|>model")
    assert count(tokenizer=other) == 1
    other.chat_template = template
    other.eos_token = "<|endoftext|>"
    assert count(tokenizer=other) == 1
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.add_tokens(["cd"])
    assert count(tokenizer=other) == 1
    assert count() == 0
    stat = os.stat(file)
    Path(file).write_text(Path(file).read_text().replace("cd", "ef"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time, other text
    assert count() == 1
    monkeypatch.setattr(data, "code_fingerprint", lambda: ["other code"])
    assert count() == 1


def test_a_changed_template_gives_other_ids(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", [row()])
    before = tokenized(file, tokenizer, tmp_path)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>assistant\\n", "<|im_start|>assistant: ")
    after = tokenized(file, tokenizer, tmp_path)
    assert "assistant: 2" in tokenizer.decode(after.ids) and "assistant\n2" in tokenizer.decode(before.ids) and before.key != after.key


def test_a_build_that_was_killed_never_looks_complete(tokenizer, tmp_path):
    """SIGKILL while the joined arrays are being written."""
    file = write(tmp_path / "a.jsonl", [row()])
    killer = (
        "import os, signal, sys; import numpy as np; from transformers import AutoTokenizer; from common import data\n"
        "np.save = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "data.tokenize_files([sys.argv[1]], AutoTokenizer.from_pretrained(sys.argv[2]), max_length=256, cache_dir=sys.argv[3], progress=False)"
    )
    arguments = [sys.executable, "-c", killer, file, tokenizer.name_or_path, str(tmp_path / "cache")]
    assert subprocess.run(arguments, cwd=ROOT, capture_output=True).returncode == -9
    (left,) = (tmp_path / "cache").iterdir()
    assert ".building-" in left.name and (left / "ids.bin").stat().st_size > 0
    with pytest.raises(ValueError, match="not a tokenised dataset"):
        TokenizedDataset.open(left)
    assert texts(tokenized(file, tokenizer, tmp_path), tokenizer) == ["2<|im_end|>"]


def test_two_builds_of_the_same_data_at_once(tokenizer, tmp_path, monkeypatch):
    file = write(tmp_path / "a.jsonl", [row()])
    rename = os.rename

    def late(source, target):
        if not Path(target).exists():  # the other run is done first
            monkeypatch.setattr(os, "rename", rename)
            tokenized(file, tokenizer, tmp_path)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert texts(tokenized(file, tokenizer, tmp_path), tokenizer) == ["2<|im_end|>"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_opening_needs_neither_the_files_nor_the_tokenizer(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", many_lines())
    dataset = tokenized(file, tokenizer, tmp_path)
    os.remove(file)
    again = TokenizedDataset.open(dataset.path)
    assert again.key == dataset.key and again.where(0) == f"{file}:1" and isinstance(again.ids, np.memmap)
    assert np.array_equal(again.ids, dataset.ids) and np.array_equal(again.mask, dataset.mask)


# ---- bins


def naive_best_fit(lengths, max_length) -> list[list[int]]:
    bins, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[i]]
        if not fitting:
            bins.append([]), room.append(max_length)
            fitting = [len(bins) - 1]
        best = min(fitting, key=lambda b: room[b])
        bins[best].append(i)
        room[best] -= lengths[i]
    return bins


@pytest.mark.parametrize("seed", range(6))
def test_packing_is_best_fit_decreasing(seed):
    generator = np.random.default_rng(seed)
    max_length = int(generator.integers(8, 200))
    lengths = generator.integers(1, max_length + 1, 300) if seed % 2 else generator.integers(1, max_length // 3 + 2, 300)
    bins = pack(lengths, max_length)
    packed = [bins[b] for b in range(len(bins))]
    assert sorted(np.concatenate(packed).tolist()) == list(range(300))
    fills = [int(lengths[b].sum()) for b in packed]
    assert max(fills) <= max_length
    assert sorted(fills) == sorted(int(lengths[b].sum()) for b in naive_best_fit(lengths.tolist(), max_length))
    again = pack(lengths.tolist(), max_length)
    assert np.array_equal(bins.rows, again.rows) and np.array_equal(bins.offsets, again.offsets)


def test_packing_by_hand_off_and_refused():
    bins = pack([3, 8, 5, 2, 4], 8)
    assert [bins[b].tolist() for b in range(len(bins))] == [[1], [2, 0], [4, 3]]
    bins = pack([3, 8, 5], 8, packing=False)
    assert [bins[b].tolist() for b in range(len(bins))] == [[0], [1], [2]]
    assert len(pack([], 8)) == 0
    with pytest.raises(ValueError, match="9 tokens does not fit a bin of max_length 8"):
        pack([9], 8)


def test_a_million_rows_pack_in_seconds():
    lengths = np.random.default_rng(0).integers(10, 400, 1_000_000)
    start = time.perf_counter()
    bins = pack(lengths, 4096)
    assert time.perf_counter() - start < 20
    assert len(bins) <= lengths.sum() / 4096 * 1.001 + 1
    assert np.add.reduceat(lengths[bins.rows], bins.offsets[:-1]).max() <= 4096


# ---- order


def test_windows_are_a_pure_function_of_the_position():
    count, seen = 4, []
    position = (0, 0)
    for _ in range(7):
        ids, *after = Order(10, seed=3).next(*position, count)  # a new object each time: nothing is remembered
        seen.append((position, ids.tolist()))
        position = tuple(after)
    assert [at for at, _ in seen] == [(0, 0), (0, 4), (1, 0), (1, 4), (2, 0), (2, 4), (3, 0)]
    order = Order(10, seed=3)
    assert [order.next(*at, count)[0].tolist() for at, _ in seen] == [ids for _, ids in seen]
    for epoch in range(3):
        used = seen[2 * epoch][1] + seen[2 * epoch + 1][1]
        assert len(set(used)) == 8 and set(used) < set(range(10))
    assert seen[0][1] + seen[1][1] != seen[2][1] + seen[3][1]
    assert Order(10, seed=4).next(0, 0, 10)[0].tolist() != order.next(0, 0, 10)[0].tolist()
    assert sorted(order.next(0, 0, 10)[0].tolist()) == list(range(10)) and order.next(0, 0, 10)[1:] == (1, 0)
    assert order.steps_per_epoch(4) == 2


def test_windows_of_another_size_continue_at_the_same_bins():
    order = Order(100, seed=0)
    whole = order.next(2, 0, 24)[0].tolist()
    first, epoch, offset = order.next(2, 0, 12)
    second = order.next(epoch, offset, 4)[0]
    assert [*first.tolist(), *second.tolist()] == whole[:16]
    assert order.next(0, 98, 4)[1:] == (1, 4)  # a position that another window size has left behind


def test_what_an_epoch_drops_is_logged(caplog):
    with caplog.at_level("INFO"):
        Order(10, seed=0).next(0, 4, 4)
    assert "end of epoch 0: the last 2 of 10 bins" in caplog.text


def test_too_few_bins_for_one_step():
    with pytest.raises(ValueError, match=r"gives 3 bins but one optimizer step needs 8 .*add rows, lower max_length"):
        Order(3, seed=0).next(0, 0, 8)


# ---- micro-batches


@pytest.fixture
def dataset(tokenizer, tmp_path):
    """Lengths 5, 4, 3: prompt of 2 digits (1 in the last), then digits, then eos. Weights 1, 0.5, 4."""
    lines = [
        {"prompt": "12", "completion": "34"},
        {"prompt": "56", "completion": "7", "weight": 0.5},
        {"prompt": "8", "completion": "9", "weight": 4},
    ]
    return tokenized(write(tmp_path / "a.jsonl", lines), tokenizer, tmp_path)


BINS = Bins(np.array([1, 0, 2]), np.array([0, 2, 3]))  # bin 0: examples 1 and 0, bin 1: example 2


def test_collate_by_hand(dataset, tokenizer):
    digit = {d: tokenizer(d)["input_ids"][0] for d in "123456789"}
    eos = tokenizer.eos_token_id
    batch = collate(dataset, BINS, [1, 0], pad_to=15)
    d = digit
    assert batch.input_ids.tolist() == [[d["8"], d["9"], eos, d["5"], d["6"], d["7"], eos, d["1"], d["2"], d["3"], d["4"], eos, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.seq_idx.tolist() == [[0] * 3 + [1] * 4 + [2] * 5 + [3] * 3]
    assert batch.cu_seq_lens.tolist() == [0, 3, 7, 12, 15]
    n = -100
    assert batch.targets.tolist() == [[d["9"], eos, n, n, d["7"], eos, n, n, d["3"], d["4"], eos, n, n, n, n]]
    assert batch.weights.tolist() == [[4, 4, 0, 0, 0.5, 0.5, 0, 0, 1, 1, 1, 0, 0, 0, 0]]
    assert (batch.num_tokens, batch.max_length, batch.rows) == (12, 15, [2, 1, 0])
    assert batch.squared_lengths() == 9 + 16 + 25
    kinds = {"input_ids": torch.int64, "position_ids": torch.int64, "seq_idx": torch.int32, "cu_seq_lens": torch.int32}
    for name, dtype in (*kinds.items(), ("targets", torch.int64), ("weights", torch.float32)):
        assert getattr(batch, name).dtype == dtype, name
    assert batch.model_inputs().keys() == {
        *("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "use_cache")
    }
    assert batch.model_inputs()["max_length_k"] == 15 and batch.model_inputs()["use_cache"] is False


def test_collate_without_padding(dataset):
    batch = collate(dataset, BINS, [0])
    assert batch.input_ids.shape == (1, 9) and batch.max_length == 5 and batch.cu_seq_lens.tolist() == [0, 4, 9]
    padded = collate(dataset, BINS, [0], pad_to=9)
    assert padded.cu_seq_lens.tolist() == [0, 4, 9] and padded.max_length == 9
    moved = batch.to("cpu")
    assert moved.rows == batch.rows and torch.equal(moved.targets, batch.targets)
    with pytest.raises(ValueError, match="9 tokens do not fit into pad_to=8"):
        collate(dataset, BINS, [0], pad_to=8)
    with pytest.raises(ValueError, match="at least one bin"):
        collate(dataset, BINS, [])


def test_a_first_token_is_not_predicted_from_the_segment_before(dataset):
    """Even where a dataset marks it."""
    dataset.mask = np.ones(len(dataset.ids), bool)
    assert (collate(dataset, BINS, [0, 1]).targets[0] == -100).nonzero().flatten().tolist() == [3, 8, 11]


def test_zero_weight_rows_have_no_targets(dataset):
    batch, silent = collate(dataset, BINS, [0, 1]), collate(dataset, BINS, [0, 1], zero_weight=True)
    assert torch.equal(silent.input_ids, batch.input_ids) and silent.num_tokens == 12
    assert (silent.targets == -100).all() and (silent.weights == 0).all() and (batch.weights > 0).sum() == 7


def test_weighted_loss_is_the_sum_over_the_weights(dataset):
    """sum(w m NLL) / sum(w m) against the rows one by one."""
    torch.manual_seed(0)
    batch = collate(dataset, BINS, [0, 1], pad_to=16)
    logps = torch.randn(400, 400).log_softmax(-1)[batch.input_ids[0]]  # a bigram model: the current token decides
    picked = logps.gather(1, batch.targets[0].clamp(min=0)[:, None])[:, 0]
    loss = -(picked * batch.weights[0]).sum() / batch.weights.sum()
    total, weight = 0.0, 0.0
    torch.manual_seed(0)
    table = torch.randn(400, 400).log_softmax(-1)
    for i in range(len(dataset)):
        ids, mask = dataset.example(i)
        for t in range(1, len(ids)):
            if mask[t]:
                total -= float(dataset.weights[i]) * table[int(ids[t - 1]), int(ids[t])].item()
                weight += float(dataset.weights[i])
    assert loss.item() == pytest.approx(total / weight, rel=1e-6)


# ---- the sample in the log


def test_describe_marks_what_carries_loss(dataset, tokenizer):
    text = describe(collate(dataset, BINS, [0, 1], pad_to=20), tokenizer, max_segments=9)
    assert "56{+7<|im_end|>+}" in text and "12{+34<|im_end|>+}" in text and "8{+9<|im_end|>+}" in text
    assert text.count("example ") == 3 and "example 1 (4 tokens, 2 carry loss)" in text


def test_describe_shows_the_answer_behind_a_long_prompt(tokenizer, tmp_path):
    dataset = tokenized(
        write(tmp_path / "a.jsonl", [row("start " + "word " * 1000 + "end", "short answer")]), tokenizer, tmp_path, max_length=9000
    )
    text = describe(collate(dataset, pack(dataset.lengths, 9000), [0]), tokenizer)
    assert "start word" in text and "word end" in text and "{+short answer<|im_end|>+}" in text and len(text) < 1000


@pytest.mark.parametrize("encoding, shown", [("ascii", "\\xe9\\U0001f680"), ("latin-1", "é\\U0001f680")])
def test_the_sample_prints_on_any_terminal(tokenizer, tmp_path, encoding, shown):
    dataset = tokenized(write(tmp_path / "a.jsonl", [row("\x1b[2Jhi", "é🚀")]), tokenizer, tmp_path)
    script = (
        "import sys; from transformers import AutoTokenizer; from common.data import *\n"
        "d = TokenizedDataset.open(sys.argv[1]); print(describe(collate(d, pack(d.lengths, 256), [0]), AutoTokenizer.from_pretrained(sys.argv[2])))"
    )
    arguments = [sys.executable, "-c", script, str(dataset.path), tokenizer.name_or_path]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode(encoding)
    assert f"{{+{shown}<|im_end|>+}}" in text and "\x1b" not in text and "\\x1b[2Jhi" in text
