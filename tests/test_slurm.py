"""Copies of slurm/*.sbatch on a real Slurm of this host: two nodes of one CPU rank each.

One run goes through all that happens to long runs, and must end as one that nothing happened to: a rank hangs, a rank is killed, the time limit
comes. Needs root and Debian's slurm-wlm and munge (tests/slurm_cluster.sh); the GRPO job also the rollout environment.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import read_metrics
from safetensors.torch import load_file
from vllm_server import rollout_python

ROOT = Path(__file__).resolve().parents[1]
MISSING = [program for program in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(program) is None]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian, Ubuntu: apt-get install slurm-wlm munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]

# The method `held` is sft, except that one rank stays away after one step, as HOLD=RANK:STEP:FILE says, until RUN/FILE exists: the tests
# decide by steps, not by seconds, when something happens. STEP counts the steps of this start; a requeued job is not held again.
HELD = """
import os, time
from pathlib import Path

from common import dist, run
from sft.train import main

plain_step = run.StepGuard.step
steps = 0


def stay_away(output_dir, until):
    (output_dir / "HELD").touch()
    while not (output_dir / until).exists():
        time.sleep(0.1)


def step(guard, *arguments):
    global steps
    result = plain_step(guard, *arguments)
    steps += 1
    rank, at, until = os.environ["HOLD"].split(":")
    if (dist.rank(), steps) == (int(rank), int(at)) and "SLURM_RESTART_COUNT" not in os.environ:
        stay_away(Path(guard.args.output_dir), until)
    return result


run.StepGuard.step = step
main()
"""
# A reward that answers of a random model differ in
REWARDS = """
def variety(prompts, completions, **_):
    return [len(set(text)) / 16 for text in completions]
"""


@dataclass
class Job:
    id: str
    log: Path

    def facts(self) -> dict[str, str]:
        """What Slurm knows of it: JobState, ExitCode, Restarts, ..."""
        text = subprocess.run(["scontrol", "show", "job", "--oneliner", self.id], capture_output=True, text=True, check=True).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, seconds: float, what: str, condition) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"job {self.id}: {what}: not within {seconds} s. {self.facts()}\n{self.text()[-5000:]}")
            time.sleep(0.3)

    def wait(self, seconds: float = 240) -> dict[str, str]:
        """Until the job has ended and is not to run again."""
        self.until(seconds, "its end", lambda: self.facts()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"))
        return self.facts()

    def succeed(self, seconds: float = 240) -> None:
        facts = self.wait(seconds)
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), self.text()[-5000:]


@pytest.fixture(scope="module")
def cluster():
    """SLURM_CONF of a Slurm that is up; it is down again afterwards, unless it was up before."""
    script = ROOT / "tests" / "slurm_cluster.sh"
    started = subprocess.run(["bash", script, "up"], capture_output=True, text=True)
    assert started.returncode == 0, started.stdout + started.stderr
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = started.stdout.split("SLURM_CONF=")[1].strip()
    yield
    if "already up" not in started.stdout:
        subprocess.run(["bash", script, "down"], check=True, capture_output=True)
    del os.environ["SLURM_CONF"]
    if before is not None:
        os.environ["SLURM_CONF"] = before


@pytest.fixture(scope="module")
def submit(cluster, tiny_dir, tmp_path_factory):
    """submit("sft_qwen3_235b", {"RUN": folder, ...}, {"time": 5}, options, env={}) -> Job: sbatch of a copy that a user has edited.

    The first dict changes assignments in the script, the second its #SBATCH lines; `options` go to the trainer. Jobs that a failed test left
    behind are cancelled at the end.
    """
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "held").mkdir()
    (folder / "held" / "train.py").write_text(HELD)
    (folder / "held" / "rewards.py").write_text(REWARDS)
    (folder / "site.sh").write_text(
        f"export LOCAL_DIR={folder}/local\nRUN_DIR={folder}/runs\nMODEL_DIR={folder}\nDATA_DIR={folder}\nGPUS_PER_NODE=0\n"
    )
    jobs = []

    def run(source: str, variables: dict, sbatch: dict, *options, env: dict | None = None) -> Job:
        script = folder / f"{source}-{len(jobs)}.sbatch"
        text = (ROOT / "slurm" / f"{source}.sbatch").read_text()
        defaults = {"MODEL": tiny_dir("qwen3_moe"), "TRAIN_FILES": f"({ROOT}/env/demo.jsonl)", "MIN_TRAIN_NODES": 1, "DISK_GB": 1}
        for name, value in (defaults | variables).items():
            text, count = re.subn(rf"^{name}=.*$", lambda _, line=f"{name}={value}": line, text, flags=re.MULTILINE)
            assert count == 1, f"{source}.sbatch sets {name} {count} times"
        for name, value in ({"nodes": 2, "time": 10, "signal": "B:USR1@60", "output": f"{folder}/%j.log"} | sbatch).items():
            text, count = re.subn(rf"^#SBATCH --{name}=.*$", f"#SBATCH --{name}={value}", text, flags=re.MULTILINE)
            assert count == 1, f"{source}.sbatch has --{name} {count} times"
        script.write_text(text)
        variables = {"SITE": f"{folder}/site.sh", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "POLL_SECONDS": "0.5"} | (env or {})
        done = subprocess.run(
            ["sbatch", "--parsable", script, *map(str, options)], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        jobs.append(Job(done.stdout.strip(), folder / f"{done.stdout.strip()}.log"))
        return jobs[-1]

    yield run
    subprocess.run(["scancel", "--quiet", *(job.id for job in jobs)], check=False)


SFT = {"CONFIG": "sft/configs/tiny.yaml", "ARGS": "(--max_length 320 --max_steps 7 --save_steps 2 --logging_steps 1)"}


@pytest.fixture(scope="module")
def uninterrupted(submit, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    job = submit("sft_qwen3_235b", SFT | {"RUN": run}, {})
    job.succeed()
    return run, job


def attempt(run: Path, number: int) -> Path:
    return run / "attempts" / f"{number:02d}"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_two_nodes_train_to_the_end(uninterrupted, tiny_dir):
    run, job = uninterrupted
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 8))
    assert "on 2 ranks of 2 nodes" in (run / "run.log").read_text()
    assert (run / "DONE").exists()
    assert tensors(run / "final").keys() == tensors(tiny_dir("qwen3_moe")).keys()
    first = attempt(run, 1)
    assert (first / "exit_code").read_text() == "0\n"
    names = (first / "nodes.txt").read_text().split()
    assert len(names) == 2
    for number, name in enumerate(names):
        assert (first / f"node-{number:03d}-{name}.log").exists()
        assert (first / "preflight" / f"{name}.txt").read_text().endswith("PASS\n")
        stacks = run / "stacks" / f"{job.id}.0" / f"rank-{number:05d}.txt"
        assert stacks.read_text().startswith(f"rank {number} of 2 on {name}, process ")
    assert "step 7 loss" in (first / f"node-000-{names[0]}.log").read_text()
    assert "torch==" in (first / "packages.txt").read_text()
    assert (first / "job.sbatch").read_text().startswith("#!/usr/bin/env bash")
    assert "sft.train" in (first / "command.txt").read_text()


# One run, attempt by attempt: hung -> killed -> requeued


def held(submit, run: Path, hold: str, sbatch: dict, *options) -> Job:
    (run / "HELD").unlink(missing_ok=True)
    return submit("sft_qwen3_235b", SFT | {"RUN": run, "METHOD": "held"}, sbatch, *options, env={"HOLD": hold, "PREFLIGHT": "0"})


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "troubled"


@pytest.fixture(scope="module")
def hung(submit, troubled):
    """Rank 1 stays away after its third step."""
    job = held(submit, troubled, "1:3:never", {}, "--collective_timeout_minutes", 0.25)
    job.wait()
    return job


@pytest.fixture(scope="module")
def killed(submit, troubled, hung):
    """The second attempt resumes at step 2 and saves step 4; in step 5 rank 1 is killed, as the kernel kills when memory runs out."""
    job = held(submit, troubled, "0:3:never", {})
    job.until(180, "its fifth step", (troubled / "HELD").exists)
    ranks = processes_of(job, RANK="1")
    assert ranks
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    job.wait(60)
    return job


@pytest.fixture(scope="module")
def requeued(submit, troubled, killed):
    """The third attempt resumes at step 4 and waits for Slurm's signal after step 5; the fourth is started by the third."""
    job = held(submit, troubled, "0:1:STOP", {"time": 4, "signal": "B:USR1@160"})
    job.succeed(400)
    return job


def processes_of(job: Job, **variables: str) -> list[int]:
    """Processes on this host with SLURM_JOB_ID of the job and these variables in their environment."""
    wanted = {f"{name}={value}".encode() for name, value in ({"SLURM_JOB_ID": job.id} | variables).items()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_a_rank_that_hangs_is_named(troubled, hung):
    """The job ends by itself and tells who it was, and so does the command."""
    facts, text = hung.facts(), hung.text()
    assert facts["JobState"] == "FAILED" and facts["ExitCode"] != "0:0"
    second = (attempt(troubled, 1) / "nodes.txt").read_text().split()[1]
    (verdict,) = [line for line in text.splitlines() if line.startswith("ODD")]
    assert verdict.startswith(f"ODD: rank 1 on {second} is not in the all_reduce that rank 0 wait")
    assert "stay_away (held/train.py" in verdict
    command = [sys.executable, "-m", "common.hang", troubled, "--attempt", f"{hung.id}.0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, verdict in done.stdout) == (1, True), done.stdout + done.stderr
    assert not processes_of(hung), "the rank that hung outlived its job"
    assert "ended with exit code 1, newest checkpoint: checkpoint-000002" in text


def test_a_killed_rank_ends_the_job_within_a_minute(troubled, killed):
    facts, text = killed.facts(), killed.text()
    assert facts["JobState"] == "FAILED" and facts["ExitCode"] != "0:0"
    second = (attempt(troubled, 2) / "nodes.txt").read_text().split()[1]
    assert f"first to fail: node 001, {second}" in text
    assert "newest checkpoint: checkpoint-000004" in text
    assert not processes_of(killed)


def test_the_time_limit_saves_and_requeues(troubled, requeued, uninterrupted):
    """After a hang, a kill and a time limit the run is the one that nothing happened to."""
    assert requeued.facts()["Restarts"] == "1"
    text = requeued.text()
    assert "USR1: the time limit is near" in text and "requeued" in text
    log = (troubled / "run.log").read_text()
    for step in (2, 4, 5):
        assert f"checkpoint-{step:06d} at step {step}" in log
    codes = [(attempt(troubled, number) / "exit_code").read_text().strip() for number in (1, 2, 3, 4)]
    assert codes[0] != "0" and codes[1] != "0" and codes[2:] == ["0", "0"]
    assert not attempt(troubled, 5).exists()

    plain, _ = uninterrupted
    assert read_metrics(troubled) == read_metrics(plain)
    ours, theirs = tensors(troubled / "final"), tensors(plain / "final")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_wrong_path_fails_in_seconds(submit, tmp_path):
    job = submit("sft_qwen3_235b", SFT | {"RUN": tmp_path / "run", "MODEL": "/nowhere/Qwen3"}, {})
    facts = job.wait(30)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "2:0")
    assert "MODEL=/nowhere/Qwen3: no folder with a config.json" in job.text()
    assert not (tmp_path / "run").exists()
    job = submit("sft_qwen3_235b", SFT | {"RUN": tmp_path / "run", "TRAIN_FILES": "(/nowhere/rows.jsonl)"}, {})
    assert job.wait(30)["ExitCode"] == "2:0"
    assert "/nowhere/rows.jsonl: no such file" in job.text()


@pytest.mark.vllm
@pytest.mark.skipif(rollout_python() is None, reason="no rollout environment: bash env/setup.sh rollout")
def test_grpo_with_a_server_in_the_same_job(submit, tmp_path, tiny_dir):
    """One node trains, the other one serves: two steps, the second on answers of the weights that the first step made."""
    run, prompts = tmp_path / "run", tmp_path / "prompts.jsonl"
    rows = [{"id": f"q{n}", "prompt": [{"role": "user", "content": f"Say {n} words."}]} for n in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--max_steps 2 --max_length 128 --num_prompts_per_step 8 --num_generations 4 --reward_funcs held.rewards:variety"
    options += " --mask_truncated_completions false"  # it never says that it has finished
    variables = {
        "MODEL": tiny_dir("qwen3_moe", num_experts_per_tok=12),  # all experts of a token: vLLM's router and ours cannot differ
        "CONFIG": "grpo/configs/tiny.yaml",
        "TRAIN_FILES": f"({prompts})",
        "RUN": run,
        "ARGS": f"({options} --rollout_correction token_tis)",
        "SERVER_NODES": 1,
        "VLLM_ARGS": "(--max-model-len 256 --enforce-eager --skip-tokenizer-init)",
    }
    job = submit("grpo_qwen3_235b", variables, {}, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    job.succeed(400)
    assert (run / "DONE").exists()
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 and line["skipped_steps"] == 0 and line["grpo/weight_lag"] == 0 for line in lines)
    assert all(0 < line["grpo/logp_diff_mean"] < 0.05 for line in lines), "the server does not follow the trainer"
    for step in (1, 2):
        rollouts = [json.loads(line) for line in (run / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]
        assert len(rollouts) == 32
        assert {version for line in rollouts for version, _, _ in line["weight_versions"]} == {step - 1}
    second = (attempt(run, 1) / "nodes.txt").read_text().split()[1]
    assert (attempt(run, 1) / f"server-0-{second}.log").stat().st_size > 0
    assert not processes_of(job), "the server outlived its job"


SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_slurm_accepts_the_script(script, cluster):
    """On a partition of 16 nodes of 8 GPUs: its options are known and what it asks for can be given."""
    done = subprocess.run(["sbatch", "--test-only", "--partition", "plan", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr
