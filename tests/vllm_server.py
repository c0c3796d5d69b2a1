"""Starts real vLLM servers for tests and benchmarks, in the rollout environment; on GPUs too."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rollout_python() -> Path | None:
    """The interpreter of the rollout environment, or this one where it has vLLM; None without."""
    venv = Path(os.environ.get("ENV_DIR", ROOT / ".venv")) / "rollout"
    if (venv / ".complete").exists():
        return venv / "bin" / "python"
    return Path(sys.executable) if find_spec("vllm") else None


def knows_scale_out(python: Path | str) -> bool:
    """A vLLM that has the option serves prompts of ids only with it; an older one refuses the option. As slurm/server.sh finds out."""
    command = [str(python), "-c", "import importlib.util as u; print(*u.find_spec('vllm').submodule_search_locations)"]
    package = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return any("enable_scale_out" in file.read_text(errors="ignore") for file in (package / "entrypoints").rglob("*.py"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class VllmServer:
    """One server of `model` on this host. A context manager: whatever happens, its processes are gone afterwards."""

    def __init__(
        self,
        model,
        log: Path,
        *options: str,
        python: Path | None = None,
        env: dict | None = None,
        tokenizer: bool = False,
        stock=False,
        workers: int = 1,
        nodes: int = 1,
    ):
        """stock: vLLM's own weight transfer instead of ours. workers: tensor parallel; spread over `nodes`, as many times that vLLM is
        started, each with a log of its own."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log)
        python = str(python or rollout_python())
        options = [
            "--max-model-len", "512", "--enforce-eager", "--logprobs-mode", "processed_logprobs",
            "--weight-transfer-config", '{"backend": "nccl"}' if stock else '{"backend": "c10d"}',
            *(() if stock else ("--worker-extension-cls", "common.vllm_worker.WorkerExtension")),
            *(() if tokenizer else ("--skip-tokenizer-init",)), *(("--enable-scale-out",) if knows_scale_out(python) else ()), *options,
        ]  # fmt: skip
        if workers > 1:
            options += ["--tensor-parallel-size", str(workers)]
        if nodes > 1:
            options += ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
        first = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        other = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--headless"]
        self.commands = [[*(other if node else first), *options, *([str(node)] if nodes > 1 else [])] for node in range(nodes)]
        self.env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        self.env |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1",
        } | (env or {})  # fmt: skip
        self.cores = [""] * nodes
        if workers > 1:  # one core for each worker; by default a CPU server wants a memory node for each
            cores = sorted(os.sched_getaffinity(0))
            each = [str(cores[worker % len(cores)]) for worker in range(workers)]
            self.cores = ["|".join(each[node::nodes]) for node in range(nodes)]
        self.processes: list[subprocess.Popen] = []

    def start(self) -> "VllmServer":
        for node, (command, cores) in enumerate(zip(self.commands, self.cores, strict=True)):
            env = self.env | ({"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {})
            with open(self.log.with_name(self.log.name + (f"-node{node}" if node else "")), "a") as output:
                options = {"stdout": output, "stderr": output, "start_new_session": True}
                self.processes.append(subprocess.Popen(command, env=env, cwd=ROOT, **options))
        return self

    def wait(self, seconds: float = 400) -> "VllmServer":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return self
            except OSError:
                if any(process.poll() is not None for process in self.processes):
                    break
                time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start; {self.log} ends with\n{self.log.read_text()[-3000:]}")

    def signal(self, number: int) -> None:
        """To the server and all its processes."""
        for process in self.processes:
            os.killpg(process.pid, number)

    def kill(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone already
            process.wait()
        self.processes = []

    def answered(self) -> int:
        """Requests for answers that it has served since it was made."""
        return self.log.read_text().count('/inference/v1/generate HTTP/1.1" 200')

    def __enter__(self) -> "VllmServer":
        return self.start()

    def __exit__(self, *_) -> None:
        self.kill()
