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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class VllmServer:
    """One server of `model` on this host. A context manager: whatever happens, its processes are gone afterwards."""

    def __init__(
        self, model, log: Path, *options: str, python: Path | None = None, env: dict | None = None, tokenizer: bool = False, stock=False
    ):
        """stock: vLLM's own weight transfer instead of ours."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log)
        self.command = [
            str(python or rollout_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--max-model-len", "512", "--enforce-eager", "--logprobs-mode", "processed_logprobs",
            "--weight-transfer-config", '{"backend": "nccl"}' if stock else '{"backend": "c10d"}',
            *(() if stock else ("--worker-extension-cls", "common.vllm_worker.WorkerExtension")),
            *(() if tokenizer else ("--skip-tokenizer-init",)), *options,
        ]  # fmt: skip
        self.env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        self.env |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]), "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        } | (env or {})  # fmt: skip
        self.process: subprocess.Popen | None = None

    def start(self) -> "VllmServer":
        with open(self.log, "a") as output:
            self.process = subprocess.Popen(self.command, env=self.env, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        return self

    def wait(self, seconds: float = 240) -> "VllmServer":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return self
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start; {self.log} ends with\n{self.log.read_text()[-3000:]}")

    def signal(self, number: int) -> None:
        """To the server and all its processes."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            try:
                self.signal(signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone already
            self.process.wait()
            self.process = None

    def __enter__(self) -> "VllmServer":
        return self.start()

    def __exit__(self, *_) -> None:
        self.kill()
