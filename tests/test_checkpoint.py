"""A save survives being killed at any moment; what is restored is what was saved, on any number of ranks; old ones go."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import checkpoint
from common.checkpoint import Base, SavedParameters, TrainState
from common.config import ModelArguments, TrainArguments
from common.optim import AdamW
from tests.conftest import ROOT

BASE = Base("/base", "fingerprint", None)


def prepared(path: str, optim: str = "adamw") -> tuple:
    from tests.test_fsdp import build

    model = build(path, gradient_checkpointing=False)
    return model, AdamW(model.trained_shards(), ModelArguments(path), TrainArguments("o", optim=optim))


def fill(model, optimizer, value: float) -> None:
    """Every element of parameters and moments becomes a function of its place, so that a wrong place shows."""
    for shard in model.trained_shards():
        places = torch.arange(shard.offset, shard.offset + shard.tensor.numel())
        shard.tensor.copy_(value + places % 97)
    optimizer.set_steps(int(value))
    for piece in optimizer.pieces:
        for moment, tensor in optimizer.moments(piece).items():
            start = piece.shard.offset + piece.start
            tensor.copy_(value + torch.arange(start, start + tensor.numel()) % (89 if moment == "exp_avg" else 83))


def wrong_elements(model, optimizer, value: float) -> int:
    wrong = 0
    for shard in model.trained_shards():
        places = torch.arange(shard.offset, shard.offset + shard.tensor.numel())
        wrong += (shard.tensor != value + places % 97).sum().item()
    for piece in optimizer.pieces:
        for moment, tensor in optimizer.moments(piece).items():
            start = piece.shard.offset + piece.start
            wrong += (tensor != value + torch.arange(start, start + tensor.numel()) % (89 if moment == "exp_avg" else 83)).sum().item()
        wrong += int(optimizer.optimizer.state[piece.parameter]["step"].item() != value)
    return wrong


def _save(path: str, folder: str) -> None:
    model, optimizer = prepared(path)
    for step in (3, 6, 9):
        fill(model, optimizer, float(step))
        checkpoint.save(Path(folder), model, optimizer, TrainState(step, 1, 4, 50, 0), BASE, {"bins_per_step": 8}, keep=2)


def _load(path: str, folder: str):
    model, optimizer = prepared(path)
    found = checkpoint.find(Path(folder), "auto")
    state, extra = checkpoint.load(found, model, optimizer, BASE)
    return state, extra["bins_per_step"], wrong_elements(model, optimizer, 9.0)


def test_any_number_of_ranks_restores_what_was_saved(tiny_dir, run_ranks, tmp_path):
    path = str(tiny_dir("qwen3_moe", num_hidden_layers=2))
    for saving, loading in ((2, 3), (3, 1), (1, 2)):
        folder = tmp_path / f"{saving}-{loading}"
        run_ranks(saving, _save, path, str(folder))
        assert [f.name for f in checkpoint.complete_checkpoints(folder)] == ["checkpoint-000006", "checkpoint-000009"]
        assert sorted(f.name for f in folder.iterdir()) == ["checkpoint-000006", "checkpoint-000009"]  # nothing left over
        for result in run_ranks(loading, _load, path, str(folder)):
            assert result == (TrainState(9, 1, 4, 50, 0), 8, 0)
    saved = SavedParameters(folder / "checkpoint-000009")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensor = saved.read(name)
    assert tensor.shape == (12, 96, 64)
    assert torch.equal(tensor.flatten(), 9.0 + torch.arange(tensor.numel()) % 97)


KILLED_SAVE = """
import builtins, os, signal, sys
from pathlib import Path
sys.path[:0] = [{root!r}]
import torch
torch.set_num_threads(1)
from common import dist
from tests import test_checkpoint as test
from common.checkpoint import TrainState, save

def boundary(name, original, counter, limit, only=lambda *a: True):
    # Dies before or after the call, as a machine may: `limit` counts both sides of every write, flush, rename and deletion.
    def call(*args, **kwargs):
        if not only(*args):
            return original(*args, **kwargs)
        step(counter, limit)
        result = original(*args, **kwargs)
        step(counter, limit)
        return result
    return call

def step(counter, limit):
    counter[0] += 1
    if counter[0] == limit:
        os.kill(os.getpid(), signal.SIGKILL)

def child(folder, limit):
    dist.init()
    model, optimizer = test.prepared({path!r})
    for number in (3, 6):
        test.fill(model, optimizer, float(number))
        save(folder, model, optimizer, TrainState(number), test.BASE, {{}}, keep=1)
    counter = [0]
    for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "rmdir"), (os, "unlink"), (os, "write"), (os, "mkdir")):
        setattr(module, name, boundary(name, getattr(module, name), counter, limit))
    builtins.open = boundary("open", open, counter, limit, only=lambda file, *rest: str(file).startswith(str(folder)))
    test.fill(model, optimizer, 9.0)
    save(folder, model, optimizer, TrainState(9), test.BASE, {{}}, keep=1)
    os._exit(0)

def check(folder):
    from common.checkpoint import find, load
    dist.init()
    model, optimizer = test.prepared({path!r})
    state, _ = load(find(folder, "auto"), model, optimizer, test.BASE)
    wrong = test.wrong_elements(model, optimizer, float(state.step))
    # ... and the next save cleans up and succeeds.
    test.fill(model, optimizer, 12.0)
    save(folder, model, optimizer, TrainState(12), test.BASE, {{}}, keep=1)
    left = sorted(f.name for f in folder.iterdir())
    print(state.step, wrong, left == ["checkpoint-000012"], flush=True)
    os._exit(0 if state.step in (6, 9) and wrong == 0 and left == ["checkpoint-000012"] else 1)

def forked(function, *args):
    pid = os.fork()
    if pid == 0:
        function(*args)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

limit, steps = 0, []
while True:
    limit += 1
    folder = Path({folder!r}) / str(limit)
    code = forked(child, folder, limit)
    assert code in (0, -signal.SIGKILL), code
    assert forked(check, folder) == 0, f"boundary {{limit}}"
    if code == 0:
        break
print("BOUNDARIES", limit - 1)
"""


def test_killed_at_any_boundary_loses_only_the_new_save(tiny_dir, tmp_path):
    path = str(tiny_dir("llama", num_hidden_layers=1))
    script = KILLED_SAVE.format(root=str(ROOT), path=path, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert int(lines[-1].split()[1]) >= 20  # as many places to die were tried
    restored = [line.split()[0] for line in lines[:-1]]
    assert set(restored) == {"6", "9"}  # both outcomes were seen
    assert restored == sorted(restored)  # once the new one counts it stays


def _refuse(path: str, folder: str, what: str):
    model, optimizer = prepared(path)
    found = Path(folder) / "checkpoint-000009"
    base = Base("/other", "another", None) if what == "base" else BASE
    try:
        checkpoint.load(found, model, optimizer, base)
    except ValueError as error:
        return str(error)
    return None


def test_what_does_not_belong_together_is_refused(tiny_dir, run_ranks, tmp_path):
    path, other = (str(tiny_dir("qwen3_moe", num_hidden_layers=n)) for n in (2, 1))
    run_ranks(1, _save, path, str(tmp_path))
    assert "whose weights are not those of /other" in run_ranks(1, _refuse, path, str(tmp_path), "base")[0]
    assert "not trained now ['model.layers.1." in run_ranks(1, _refuse, other, str(tmp_path), "layers")[0]
    shard = next((tmp_path / "checkpoint-000009").glob("*.distcp"))
    shard.unlink()
    assert "cannot read" in run_ranks(1, _refuse, path, str(tmp_path), "file")[0]
    (tmp_path / "checkpoint-000009" / "COMPLETE").unlink()
    assert checkpoint.find(tmp_path, "auto").name == "checkpoint-000006"
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.find(tmp_path, str(tmp_path / "checkpoint-000009"))
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        SavedParameters(tmp_path / "checkpoint-000009")
    assert checkpoint.find(tmp_path, "none") is None


def test_fingerprint_sees_a_changed_weight_and_a_changed_header(tiny_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_dir("llama"), folder)
    first = checkpoint.fingerprint(folder)
    assert first == checkpoint.fingerprint(tiny_dir("llama"))
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert checkpoint.fingerprint(folder) != first


def _save_on_full_disk(path: str, folder: str) -> str:
    class Full(checkpoint.dcp.FileSystemWriter):
        def write_data(self, *_):
            raise OSError(28, "No space left on device")

    checkpoint.dcp.FileSystemWriter = Full
    with pytest.raises(RuntimeError) as caught:
        _save(path, folder)
    return str(caught.value)


def test_a_full_disk_is_named_with_the_folder(tiny_dir, run_ranks, tmp_path):
    message = run_ranks(1, _save_on_full_disk, str(tiny_dir("llama", num_hidden_layers=1)), str(tmp_path))[0]
    assert f"cannot write {tmp_path}/.saving-checkpoint-000003" in message and "No space left on device" in message
    assert checkpoint.find(tmp_path, "auto") is None


def test_state_files_are_plain_json(tiny_dir, run_ranks, tmp_path):
    run_ranks(1, _save, str(tiny_dir("llama", num_hidden_layers=1)), str(tmp_path))
    state = json.loads((tmp_path / "checkpoint-000009" / "trainer_state.json").read_text())
    assert state == {
        "step": 9, "epoch": 1, "offset": 4, "tokens": 50, "skipped_steps": 0, "optimizer_steps": 9, "world_size": 1, "bins_per_step": 8,
    }  # fmt: skip
