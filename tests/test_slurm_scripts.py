"""The Slurm scripts without a Slurm: stand-ins for srun, scontrol, sbatch and for the environments' Python write down how they are called.

What they do on a real Slurm: tests/test_slurm.py. That they parse, and shellcheck: tests/test_env.py.
"""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
JOBS = sorted(path for path in (ROOT / "slurm").glob("*.sbatch") if path.name != "servers.sbatch")

# Runs the command for every task on this host, as srun does on the nodes. Ends with the first exit code that is not 0; TERM ends the tasks.
SRUN = """
import json, os, signal, subprocess, sys, time
options, command = {}, sys.argv[1:]
while command and command[0].startswith("--"):
    name, _, value = command.pop(0)[2:].partition("=")
    options[name] = value
with open(os.environ["FAKE"] + "/srun", "a") as log:
    log.write(json.dumps([options, command]) + "\\n")
nodes = options["nodelist"].split(",")
assert len(nodes) == int(options["ntasks"]) == int(options["nodes"]) and options["ntasks-per-node"] == "1"
tasks = [
    subprocess.Popen(command, env=os.environ | {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": node}, start_new_session=True)
    for rank, node in enumerate(nodes)
]
with open(os.environ["FAKE"] + "/tasks", "a") as log:
    log.writelines(f"{task.pid}\\n" for task in tasks)
def end(*_):
    for task in tasks:
        try:
            os.killpg(task.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
signal.signal(signal.SIGTERM, end)
status = 0
while None in [task.poll() for task in tasks]:
    time.sleep(0.02)
    bad = [task.returncode for task in tasks if task.returncode]
    if bad and options.get("kill-on-bad-exit") == "1":
        status = status or bad[0]
        end()
sys.exit(status or max(abs(task.returncode) for task in tasks))
"""

SCONTROL = """#!/bin/bash
echo "$*" >>"$FAKE/scontrol"
case $1 in
show) case $2 in
    hostnames) tr , '\\n' <<<"$3" ;;
    node) echo "NodeName=$3 NodeAddr=127.0.0.1" ;;
    esac ;;
requeue) exit ${FAKE_REQUEUE:-0} ;;
esac
"""

# The environments' Python: what the scripts run with it, played by shell.
PYTHON = """#!/bin/bash
printf '%q ' "$@" >>"$FAKE/python-$SLURMD_NODENAME"; echo >>"$FAKE/python-$SLURMD_NODENAME"
case "$*" in
--version) echo "Python 3.12.0" ;;
env/check.py*) [[ ",$FAKE_BAD," != *",$SLURMD_NODENAME,"* ]] || { echo "FAIL  7 usable GPUs, not 8"; exit 1; } ;;
slurm/check_nodes.py*)
    while [ $# -gt 0 ]; do case $1 in --packages) echo "torch==2.13.0" >"$2" ;; --good) good=$2 ;; esac; shift; done
    echo "ok    all-reduce over all nodes: 1.0 GB/s"
    exit $((1 - good)) ;;
*common.hang*) echo "nothing odd" ;;
*torch.distributed.run*) source "$FAKE/trainer" ;;
*vllm.entrypoints*) source "$FAKE/server" ;;
*) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""

# A trainer that removes an old STOP when it starts, like the real one; then what the test says.
FINISHES = 'touch "$RUN/DONE"'
WAITS_FOR_STOP = 'while [ ! -e "$RUN/STOP" ]; do sleep 0.05; done; {save}'
SAVES = 'mkdir -p "$RUN/checkpoint-0000{step}"; touch "$RUN/checkpoint-0000{step}/COMPLETE"'

SERVER = """
echo "$$" >>"$FAKE/server-pids-$SLURMD_NODENAME"
[[ "$*" == *--headless* ]] && exec sleep 600
exec "$FAKE_PYTHON" -c '
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer((sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
' "$@"
"""


class Cluster:
    """Stand-ins for a cluster in one folder, and a job script to run on it."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.scratch = folder, folder / "bin", folder / "scratch"
        self.bin.mkdir()
        self.jobs: list[subprocess.Popen] = []
        self.run = self.scratch / "runs" / "a"
        self.program("srun", f"#!{sys.executable}\n{SRUN}")
        self.program("scontrol", SCONTROL)
        self.program("sbatch", '#!/bin/bash\nprintf "%q " "$@" >>"$FAKE/sbatch"; echo >>"$FAKE/sbatch"\n')
        self.program("squeue", "#!/bin/bash\necho 1-00:00:00\n")
        for name in ("train", "rollout"):
            self.program("python", PYTHON, folder / "envs" / name / "bin")
        (self.scratch / "models" / "m").mkdir(parents=True)
        (self.scratch / "models" / "m" / "config.json").write_text("{}")
        (self.scratch / "data").mkdir()
        (self.scratch / "data" / "train.jsonl").write_text("{}\n")
        (folder / "site.sh").write_text(f"MODEL_DIR={self.scratch}/models DATA_DIR={self.scratch}/data RUN_DIR={self.scratch}/runs\n")
        self.trainer(FINISHES)
        self.server(SERVER)

    def program(self, name: str, text: str, folder: Path | None = None) -> None:
        folder = folder or self.bin
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def trainer(self, text: str) -> None:
        (self.folder / "trainer").write_text('[ "$SLURM_PROCID" != 0 ] || rm -f "$RUN/STOP"\n' + text)

    def server(self, text: str) -> None:
        (self.folder / "server").write_text(text)

    def environment(self, nodes: int = 2, **variables) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "VLLM_SERVERS"))}
        names = ",".join(f"node{number}" for number in range(1, nodes + 1))
        return kept | {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "FAKE": str(self.folder), "FAKE_PYTHON": sys.executable, "SITE": str(self.folder / "site.sh"),
            "ENV_DIR": str(self.folder / "envs"), "LOCAL_DIR": str(self.folder / "local"), "SLURM_JOB_ID": str(self.job_id()),
            "SLURM_JOB_NODELIST": names, "SLURM_JOB_NAME": "a", "SLURM_JOB_PARTITION": "h100", "POLL_SECONDS": "0.05",
        } | {name: str(value) for name, value in variables.items()}  # fmt: skip

    def job_id(self) -> int:
        return 4_000_000 + os.getpid() % 500  # tests that run side by side get ports of their own

    def script(self, *lines: str) -> Path:
        """A job script: the EDIT block of most tests, then `lines`."""
        text = f"""#!/usr/bin/env bash
#SBATCH --signal=B:USR1@60
set -euo pipefail
source slurm/lib.sh
MODEL=$MODEL_DIR/m
TRAIN_FILES=("$DATA_DIR/train.jsonl")
RUN=$RUN_DIR/a
METHOD=sft CONFIG=sft/configs/tiny.yaml GPUS_PER_NODE=0
{chr(10).join(lines)}
run_job "$@"
"""
        path = self.folder / "job.sbatch"
        path.write_text(text)
        return path

    def start(self, script: Path | None = None, *arguments: str, **variables) -> subprocess.Popen:
        command = ["bash", str(script or self.script()), *arguments]
        self.log = self.folder / f"job-{len(self.jobs)}.log"
        with open(self.log, "w") as log:
            job = subprocess.Popen(command, cwd=ROOT, env=self.environment(**variables), stdout=log, stderr=log, start_new_session=True)
        self.jobs.append(job)
        return job

    def end(self, job: subprocess.Popen, expect: int | None = 0) -> str:
        """Waits for the end of the job that was started last; what it printed."""
        try:
            job.wait(timeout=60)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running:\n{self.log.read_text()}")
        output = self.log.read_text()
        assert expect is None or job.returncode == expect, f"ended with {job.returncode}\n{output}"
        return output

    def kill(self) -> None:
        """All that jobs of a failed test have left."""
        for pid in [job.pid for job in self.jobs if job.poll() is None] + [int(pid) for pid in self.calls("tasks")]:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # as it should be

    def __call__(self, script: Path | None = None, *arguments: str, expect: int = 0, **variables) -> str:
        """Runs a job to its end; its output."""
        return self.end(self.start(script, *arguments, **variables), expect)

    def calls(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def steps(self) -> list[tuple[dict, list[str]]]:
        return [tuple(json.loads(line)) for line in self.calls("srun")]

    def requeues(self) -> int:
        return sum(line.startswith("requeue") for line in self.calls("scontrol"))

    def until(self, condition, job: subprocess.Popen) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline and job.poll() is None, self.log.read_text()
            time.sleep(0.02)


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.kill()


def training(cluster: Cluster) -> bool:
    return any(command[0] == "slurm/node.sh" for _, command in cluster.steps())


# ----------------------------------------------------------------------------------------------------------------------------------
# The shipped jobs


def options_of(script: Path) -> dict[str, str]:
    return dict(
        line.removeprefix("#SBATCH --").split("=", 1) for line in script.read_text().splitlines() if re.match(r"#SBATCH --\S+=", line)
    )


def settings_of(module: str, argv: list[str], monkeypatch) -> dict:
    """What the main() of `module` makes of a command line: all options by name."""
    from common import config

    class Parsed(Exception):
        pass

    def parse(*classes: type):
        raise Parsed(config.resolved(*real(*classes, argv=argv)))

    real = config.parse
    monkeypatch.setattr(config, "parse", parse)
    with pytest.raises(Parsed) as settings:
        importlib.import_module(module).main.__wrapped__()  # without torchrun's recording of errors
    return settings.value.args[0]


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.stem)
def test_shipped_job_starts_its_trainer_with_options_that_exist(cluster, script, monkeypatch):
    """Run as it is, with models and data of the names it has, and as many nodes as it asks for."""
    options, text = options_of(script), script.read_text()
    assert options["job-name"] == script.stem and f"RUN=$RUN_DIR/{script.stem}" in text
    assert "#SBATCH --requeue" in text and "#SBATCH --exclusive" in text
    assert re.fullmatch(r"B:USR1@\d{3,}", options["signal"]) and options["open-mode"] == "append" and "%j" in options["output"]
    model = re.search(r"^MODEL=\$MODEL_DIR/(\S+)", text, re.M)[1]
    (cluster.scratch / "models" / "m").rename(cluster.scratch / "models" / model)
    for name in re.findall(r"\$DATA_DIR/([\w.]+)", text):
        (cluster.scratch / "data" / name).write_text("{}\n")
    cluster.program("df", "#!/bin/bash\necho header\necho x x x 99999999999999 x x\n")  # the test's disk is small

    cluster(script, nodes=int(options["nodes"]))
    command = next(command for _, command in cluster.steps() if command[0] == "slurm/node.sh")[1:]
    module, argv = command[0], command[1:]
    settings = settings_of(module, argv, monkeypatch)
    assert (
        settings["model_name_or_path"] == f"{cluster.scratch}/models/{model}"
        and settings["output_dir"] == f"{cluster.scratch}/runs/{script.stem}"
    )
    step = next(options for options, command in cluster.steps() if command[0] == "slurm/node.sh")
    servers = [options for options, command in cluster.steps() if command[0] == "slurm/server.sh"]
    assert int(step["nodes"]) + sum(int(server["nodes"]) for server in servers) == int(options["nodes"])
    assert len(settings.get("vllm_servers") or []) == len(servers)
    assert step["kill-on-bad-exit"] == "1" and step["wait"] == "60"
    attempt = cluster.scratch / "runs" / script.stem / "attempts" / "01"
    assert (attempt / Path(argv[argv.index("--config") + 1]).name).exists()


def test_every_model_and_method_has_its_job():
    wanted = {f"{method}_{model}" for method in ("sft", "dpo") for model in ("qwen3_235b", "qwen3_5_397b", "glm5_fp8", "qwen3_next_80b")}
    wanted |= {f"grpo_{model}" for model in ("qwen3_235b", "qwen3_5_397b", "qwen3_next_80b")}
    assert wanted <= {script.stem for script in JOBS}


# ----------------------------------------------------------------------------------------------------------------------------------
# Ports


def port(job: int, offset: int, low: int, high: int, folder: Path, cluster: Cluster) -> subprocess.CompletedProcess:
    (folder / "range").write_text(f"{low}\t{high}\n")
    environment = cluster.environment(SLURM_JOB_ID=job, PORT_RANGE_FILE=folder / "range")
    return subprocess.run(
        ["bash", "-c", f"source slurm/lib.sh; port {offset}"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20
    )


@pytest.mark.parametrize("low, high", [(32768, 60999), (20000, 60999), (25000, 29000), (10000, 50000), (1024, 54999)])
def test_ports_lie_outside_what_the_kernel_hands_out(cluster, tmp_path, low, high):
    taken = {}
    for job in (1, 2, 499, 500, 123456789):
        for offset in (0, 19):
            number = int(port(job, offset, low, high, tmp_path, cluster).stdout)
            assert 1024 < number < 65536 and not low <= number <= high
            taken[job % 500, offset] = number
    assert len(set(taken.values())) == 10
    assert taken[2, 0] - taken[1, 0] == 20 and taken[1, 19] - taken[1, 0] == 19


def test_no_port_left_is_said(cluster, tmp_path):
    result = port(1, 0, 1024, 65535, tmp_path, cluster)
    assert result.returncode == 2 and "set MASTER_PORT" in result.stderr


# ----------------------------------------------------------------------------------------------------------------------------------
# Wrong inputs


@pytest.mark.parametrize(
    "line, variables, named",
    [
        ("MODEL=/no/such/model", {}, "MODEL=/no/such/model"),
        ("TRAIN_FILES=($DATA_DIR/train.jsonl $DATA_DIR/other.jsonl)", {}, "other.jsonl: no such file"),
        ("TRAIN_FILES=()", {}, "TRAIN_FILES is empty"),
        ("EVAL_FILES=(/no/eval.jsonl)", {}, "/no/eval.jsonl: no such file"),
        ("CONFIG=sft/configs/none.yaml", {}, "CONFIG=sft/configs/none.yaml"),
        ("RUN=/dev/null/a", {}, "RUN=/dev/null/a cannot be written"),
        ("MIN_TRAIN_NODES=3", {}, "needs 3"),
        ("SERVER_NODES=2", {}, "leave 0 for training"),
        ("SERVER_NODES=1 NODES_PER_SERVER=2", {}, "no multiple of NODES_PER_SERVER"),
        ("DISK_GB=99999999", {}, "need about 99999999 GB"),
        ("", {"ENV_DIR": "/no/environment"}, "/no/environment/train has no Python"),
        ("", {"ENV_ARCHIVE": "/no/archive.tar"}, "ENV_ARCHIVE=/no/archive.tar"),
        ("", {"SITE": "/no/site.sh"}, "/no/site.sh is missing"),
        ("", {"SLURM_JOB_NODELIST": ""}, "not inside a Slurm job"),
    ],
)
def test_wrong_input_ends_the_job_at_once_and_is_named(cluster, line, variables, named):
    output = cluster(cluster.script(line), expect=2, **variables)
    assert named in output and len([text for text in output.splitlines() if "error:" in text]) == 1
    assert not cluster.steps() and not (cluster.run / "attempts").exists()


def test_file_that_one_node_cannot_see_is_named(cluster):
    """A path can exist on the first node only, on a disk that is not shared."""
    local = cluster.scratch / "data" / "train.jsonl"
    cluster.program("scontrol", SCONTROL + f'[ "$2" != job ] || rm -f {local}\n')  # gone after the check on the first node
    output = cluster(expect=1)
    assert f"BAD node1: FAIL  {local} cannot be read" in output and "rather the environment, a path or the network" in output
    assert not training(cluster) and not cluster.calls("sbatch")


# ----------------------------------------------------------------------------------------------------------------------------------
# A run, its stop, its failures


def test_attempt_keeps_what_was_run_and_no_key_is_shown(cluster):
    output = cluster(None, "--max_steps", "3", WANDB_API_KEY="very-secret", HF_TOKEN="very-secret")
    attempt = cluster.run / "attempts" / "01"
    assert "done: " in output and (attempt / "exit_code").read_text() == "0\n"
    assert (attempt / "nodes.txt").read_text().split() == ["node1", "node2"]
    assert (attempt / "packages.txt").read_text() == "torch==2.13.0\n"
    assert re.match(r"[0-9a-f]{40}\n|.*no git here", (attempt / "commit.txt").read_text(), re.S)
    assert (attempt / "tiny.yaml").read_text() == (ROOT / "sft/configs/tiny.yaml").read_text()
    assert "source slurm/lib.sh" in (attempt / "job.sbatch").read_text()
    assert shlex.split((attempt / "command.txt").read_text())[-2:] == ["--max_steps", "3"]
    assert (attempt / "node-000-node1.log").exists() and (attempt / "node-001-node2.log").exists()
    ranks = [shlex.split(line) for node in ("node1", "node2") for line in cluster.calls(f"python-{node}") if "distributed.run" in line]
    assert [argv[argv.index("--node-rank") + 1] for argv in ranks] == ["0", "1"]
    assert len({argv[argv.index("--master-port") + 1] for argv in ranks}) == 1
    seen = [path for path in [*cluster.folder.glob("*"), *attempt.rglob("*")] if path.is_file() and "very-secret" in path.read_text()]
    assert not seen and "very-secret" not in output


def test_stopped_before_the_limit_saved_requeued_and_finished(cluster):
    cluster.trainer('echo "$STOP_LEAD_SECONDS" >"$FAKE/lead"; ' + WAITS_FOR_STOP.format(save=SAVES.format(step="10")))
    job = cluster.start()
    cluster.until(lambda: training(cluster), job)
    job.send_signal(signal.SIGUSR1)
    output = cluster.end(job)
    assert cluster.requeues() == 1, output
    assert "newest checkpoint: checkpoint-000010" in output and "requeued" in output
    assert cluster.calls("lead") == ["60"]  # read from the script's own #SBATCH --signal

    cluster.trainer(FINISHES)  # the next attempt
    output = cluster(SLURM_RESTART_COUNT=1)
    assert "restart 1, attempt 02" in output and "newest checkpoint: checkpoint-000010" in output
    assert cluster.requeues() == 1 and "done: " in output


def test_signal_while_the_trainer_starts_is_not_lost(cluster):
    """The trainer removes the STOP of the attempt before: one that came in its first seconds would go with it."""
    cluster.trainer('touch "$FAKE/starting"; sleep 1; rm -f "$RUN/STOP"; ' + WAITS_FOR_STOP.format(save=SAVES.format(step="10")))
    job = cluster.start()
    cluster.until(lambda: (cluster.folder / "starting").exists(), job)
    job.send_signal(signal.SIGUSR1)
    output = cluster.end(job)
    assert cluster.requeues() == 1, output


def test_resubmitted_where_requeue_is_off(cluster):
    cluster.trainer(WAITS_FOR_STOP.format(save=SAVES.format(step="10")))
    job = cluster.start(None, "--learning_rate", "1e-6", FAKE_REQUEUE=1, EXCLUDE="node7")
    cluster.until(lambda: training(cluster), job)
    job.send_signal(signal.SIGUSR1)
    cluster.end(job)
    (call,) = cluster.calls("sbatch")
    argv = shlex.split(call)
    assert (
        f"--dependency=afterany:{cluster.job_id()}" in argv
        and "--nodes=2" in argv
        and "--exclude=node7" in argv
        and "--time=1-00:00:00" in argv
    )
    assert argv[-3:] == [str(cluster.run / "attempts/01/job.sbatch"), "--learning_rate", "1e-6"]


def test_stop_by_hand_ends_the_job(cluster):
    cluster.trainer(WAITS_FOR_STOP.format(save=SAVES.format(step="10")))
    job = cluster.start()
    cluster.until(lambda: training(cluster), job)
    while job.poll() is None:  # again: the trainer removes one that is there when it starts
        (cluster.run / "STOP").touch()
        time.sleep(0.1)
    assert "stopped on request" in cluster.end(job)
    assert cluster.requeues() == 0 and not cluster.calls("sbatch")


def test_job_without_progress_is_not_started_for_ever(cluster):
    """A time limit shorter than loading: every attempt is stopped before its first step, and saves step 0."""
    cluster.trainer(WAITS_FOR_STOP.format(save=SAVES.format(step="00")))
    for attempt in (1, 2, 3):
        (cluster.folder / "srun").unlink(missing_ok=True)
        job = cluster.start(PREFLIGHT=0)
        cluster.until(lambda: training(cluster), job)
        job.send_signal(signal.SIGUSR1)
        output = cluster.end(job, expect=1 if attempt == 3 else 0)
        assert cluster.requeues() == min(attempt, 2), output
    assert "3 attempts in a row without a new checkpoint" in output


def test_failure_keeps_its_exit_code_and_names_the_first_node(cluster):
    cluster.trainer('[ "$SLURM_PROCID" = 1 ] || exec sleep 60\necho "CUDA error: uncorrectable ECC"; exit 7')
    output = cluster(expect=7)
    assert "first to fail: node 001, node2, exit code 7" in output and "node2: CUDA error: uncorrectable ECC" in output
    assert cluster.requeues() == 0 and not cluster.calls("sbatch")
    assert (cluster.run / "attempts/01/exit_code").read_text() == "7\n"


def test_restarts_are_counted_between_checkpoints(cluster):
    cluster.trainer("exit 7")
    variables = {"RESTARTS": 1, "PREFLIGHT": 0}
    cluster(expect=7, **variables)
    assert cluster.requeues() == 1
    cluster(expect=7, **variables)  # the second one in a row
    assert cluster.requeues() == 1
    cluster.trainer(SAVES.format(step="10") + "; exit 7")
    cluster(expect=7, **variables)  # it got further: counted anew
    assert cluster.requeues() == 2


def test_cancelled_job_stays_cancelled(cluster):
    cluster.trainer("exec sleep 60")
    job = cluster.start(RESTARTS=5)
    cluster.until(lambda: training(cluster), job)
    job.send_signal(signal.SIGTERM)
    output = cluster.end(job, expect=None)
    assert job.returncode != 0 and "cancelled: not started again" in output
    assert cluster.requeues() == 0 and not cluster.calls("sbatch")


def test_bad_node_is_named_and_left_out(cluster):
    output = cluster(nodes=3, FAKE_BAD="node2", expect=1)
    assert "BAD node2: FAIL  7 usable GPUs, not 8" in output and not training(cluster)
    assert (cluster.run / "bad_nodes").read_text() == "node2\n"
    (call,) = cluster.calls("sbatch")
    assert "--exclude=node2" in shlex.split(call) and cluster.requeues() == 0  # a requeued job could get the same node again

    # and a job that was given it nevertheless does not start on it
    output = cluster(nodes=3, expect=1)
    assert "BAD node2: it is in EXCLUDE" in output and len(cluster.calls("sbatch")) == 2
    output = cluster(nodes=1, EXCLUDE="node1", MAX_IDLE=9, expect=1)
    assert "--exclude=node1,node2" in cluster.calls("sbatch")[-1].replace("\\", "") and "rather the environment" not in output


def test_where_most_nodes_fail_none_is_blamed(cluster):
    output = cluster(nodes=3, FAKE_BAD="node2,node3", expect=1)
    assert "2 of 3 nodes" in output and not (cluster.run / "bad_nodes").exists() and not cluster.calls("sbatch")


# ----------------------------------------------------------------------------------------------------------------------------------
# vLLM servers


def server_job(cluster: Cluster, *lines: str) -> Path:
    return cluster.script("METHOD=grpo CONFIG=grpo/configs/tiny.yaml SERVER_NODES=2 SERVER_MINUTES=1", *lines)


def servers_gone(cluster: Cluster) -> bool:
    pids = [int(pid) for path in cluster.folder.glob("server-pids-*") for pid in path.read_text().split()]
    return bool(pids) and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_servers_are_started_before_the_trainer_and_ended_after_it(cluster):
    output = cluster(server_job(cluster, "VLLM_ARGS=(--max-model-len 512)"), nodes=3)
    (command,) = [command for _, command in cluster.steps() if command[0] == "slurm/node.sh"]
    urls = command[command.index("--vllm_servers") + 1 :]
    assert len(urls) == 2 and all(url in output for url in urls) and len({url.rsplit(":", 1)[1] for url in urls}) == 2
    assert command[command.index("--rollout_backend") + 1] == "vllm"
    calls = [shlex.split(line) for node in ("node2", "node3") for line in cluster.calls(f"python-{node}") if "vllm.entrypoints" in line]
    for argv in calls:
        assert argv[argv.index("--worker-extension-cls") + 1] == "common.vllm_worker.WorkerExtension" and "--nnodes" not in argv
        assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == {"backend": "c10d"} and argv[-2:] == [
            "--max-model-len",
            "512",
        ]
    assert len(calls) == 2 and servers_gone(cluster)
    assert not any("distributed.run" in line for node in ("node2", "node3") for line in cluster.calls(f"python-{node}"))


def test_dead_server_over_two_nodes_restarts_with_both(cluster):
    cluster.trainer('while [ ! -e "$FAKE/go" ]; do sleep 0.05; done; touch "$RUN/DONE"')
    job = cluster.start(server_job(cluster, "NODES_PER_SERVER=2"), nodes=3)
    cluster.until(lambda: training(cluster), job)
    os.kill(int(cluster.calls("server-pids-node3")[0]), signal.SIGKILL)  # the part without the routes
    cluster.until(lambda: len(cluster.calls("server-pids-node2")) == 2 and len(cluster.calls("server-pids-node3")) == 2, job)
    (cluster.folder / "go").touch()
    output = cluster.end(job)
    assert "restart 1 of 3" in output and servers_gone(cluster), output
    calls = {
        node: [shlex.split(line) for line in cluster.calls(f"python-{node}") if "vllm.entrypoints" in line] for node in ("node2", "node3")
    }
    for rank, node in enumerate(("node2", "node3")):
        for argv in calls[node]:
            assert argv[argv.index("--node-rank") + 1] == str(rank) and argv[argv.index("--nnodes") + 1] == "2"
            assert ("--headless" in argv) == (rank == 1) and argv[argv.index("--tensor-parallel-size") + 1] == "2"
    (step, _), *_ = [(options, command) for options, command in cluster.steps() if command[0] == "slurm/server.sh"]
    assert step["nodelist"] == "node2,node3" and step["kill-on-bad-exit"] == "1"


def test_server_that_never_comes_up_ends_the_job_with_its_log(cluster):
    cluster.server('echo "no kernel image is available"; exit 3')
    output = cluster(server_job(cluster, "SERVER_RESTARTS=1"), nodes=3, expect=1)
    assert "ended with exit code 3 for the last time" in output and "no kernel image is available" in output and not training(cluster)


def test_trainer_saves_when_the_last_server_is_lost(cluster):
    cluster.trainer(WAITS_FOR_STOP.format(save=SAVES.format(step="10")))
    job = cluster.start(server_job(cluster, "SERVER_RESTARTS=0 NODES_PER_SERVER=2"), nodes=3)
    cluster.until(lambda: training(cluster), job)
    os.kill(int(cluster.calls("server-pids-node2")[0]), signal.SIGKILL)
    assert "no server is left" in cluster.end(job, expect=1)
    assert (cluster.run / "checkpoint-000010").exists() and cluster.requeues() == 0


def test_servers_of_another_job(cluster):
    script = (ROOT / "slurm/servers.sbatch").read_text()
    model = re.search(r"^MODEL=\$MODEL_DIR/(\S+)", script, re.M)[1]
    (cluster.scratch / "models" / model).symlink_to(cluster.scratch / "models" / "m")
    path = cluster.folder / "servers.sbatch"
    path.write_text(script.replace("# ---- end of EDIT", "GPUS_PER_NODE=0\n# ---- end of EDIT"))
    servers = cluster.start(path, nodes=2)
    urls = cluster.scratch / "runs" / "servers" / "urls"
    cluster.until(urls.exists, servers)
    given = urls.read_text().strip()

    (cluster.folder / "srun").unlink()
    cluster(server_job(cluster), nodes=2, VLLM_SERVERS=given, SLURM_JOB_ID=77)
    (step, command) = next(step for step in cluster.steps() if step[1][0] == "slurm/node.sh")
    assert step["nodes"] == "2" and command[command.index("--vllm_servers") + 1 :] == given.split()
    assert not any(command[0] == "slurm/server.sh" for _, command in cluster.steps())
    assert servers.poll() is None  # they outlive the trainer's job

    servers.send_signal(signal.SIGTERM)
    cluster.end(servers, expect=None)
    assert servers_gone(cluster) and not urls.exists()


def test_run_warns_when_the_signal_comes_too_late(monkeypatch, caplog):
    from common import run

    monkeypatch.setattr(run, "_slowest_step", 100.0)
    monkeypatch.setenv("STOP_LEAD_SECONDS", "600")  # what lib.sh exports
    assert run.check_lead(300.0) == 550.0 and not caplog.text
    assert run.check_lead(400.0) == 700.0 and "told only 600 s before its limit" in caplog.text


# ----------------------------------------------------------------------------------------------------------------------------------
# One node


def run_node(cluster: Cluster, attempt: Path, **variables) -> subprocess.CompletedProcess:
    """slurm/node.sh as another scheduler calls it."""
    environment = {name: value for name, value in cluster.environment().items() if not name.startswith("SLURM")}
    environment |= {
        "NUM_NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20000", "PROCS_PER_NODE": "2", "ATTEMPT": str(attempt),
        "RUN": str(cluster.run),
    } | {name: str(value) for name, value in variables.items()}  # fmt: skip
    return subprocess.run(
        ["bash", "slurm/node.sh", "sft.train", "--seed", "1"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


def test_node_script_needs_no_slurm_unpacks_once_and_keeps_kernels(cluster, tmp_path):
    archive = tmp_path / "env.tar"
    subprocess.run(["tar", "-cf", archive, "-C", cluster.folder / "envs", "train"], check=True)
    cluster.run.mkdir(parents=True)
    cluster.trainer(
        'mkdir -p "$TRITON_CACHE_DIR"; [ -e "$TRITON_CACHE_DIR/kernel" ] && echo "found a kernel" || touch "$TRITON_CACHE_DIR/kernel"'
    )
    variables = {"ENV_ARCHIVE": archive, "ENV_DIR": "/no/environment", "CACHE_STORE": tmp_path / "store", "SLURM_PROCID": "0"}
    first = run_node(cluster, tmp_path / "attempt", **variables)
    assert first.returncode == 0 and "found a kernel" not in first.stdout, first.stderr
    (unpacked,) = (tmp_path / "local").glob("env-*/train/bin/python")
    assert (tmp_path / "attempt" / "python").read_text().strip() == str(unpacked)
    (stored,) = (tmp_path / "store").glob("train-*.tar")

    unpacked.write_text(unpacked.read_text() + "# the one that was unpacked\n")
    second = run_node(cluster, tmp_path / "attempt", **variables)
    assert "found a kernel" in second.stdout and "the one that was unpacked" in unpacked.read_text()

    # another node, with an empty disk of its own, takes the kernels from the store
    third = run_node(cluster, tmp_path / "attempt", **variables, LOCAL_DIR=tmp_path / "other")
    assert third.returncode == 0 and "found a kernel" in third.stdout, third.stderr


def test_node_script_says_what_is_missing(cluster, tmp_path):
    result = run_node(cluster, tmp_path / "attempt", ENV_DIR="/no/environment")
    assert result.returncode == 2 and "no Python at /no/environment/train/bin/python" in result.stderr
    result = run_node(cluster, tmp_path / "attempt", LOCAL_DIR="/dev/null/x")
    assert result.returncode == 2 and "LOCAL_DIR=/dev/null/x" in result.stderr
