"""One vLLM server that gets weights, as rank 0 of the trainer sees it: its control routes, the group with its workers, what it holds."""

import logging
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from common import dist, wire
from common.server_http import Http, ServerError
from common.server_names import WireTensor, some

log = logging.getLogger(__name__)

START = (
    "VLLM_SERVER_DEV_MODE=1 PYTHONPATH=<this repository> python -m vllm.entrypoints.openai.api_server --model <base checkpoint> "
    '--weight-transfer-config \'{"backend": "c10d"}\' --worker-extension-cls common.vllm_worker.WorkerExtension '
    "--logprobs-mode processed_logprobs --enable-scale-out (where that option exists)"
)
# Workers wait longer for a bucket than the trainer does for one server, or a server that hangs would make the others give up as well.
PATIENCE = 3


class SyncError(RuntimeError):
    """A server answers, but its weights are not the trainer's."""


class OtherBase(SyncError):
    """A server's own weights, before anything was sent, were not those that the trainer loaded; `experts_only`: only experts' differ."""

    experts_only = False


class UnusableServer(ValueError):
    """A server that can never be given weights, or is another run's: waiting would not help."""


REFUSED = -1  # version of a server whose proof failed: what it read itself is overwritten, nobody can compare it any more


@dataclass
class Timeouts:
    """Seconds."""

    call: float = 60.0  # a control call
    bucket: float = 120.0  # one bucket, from broadcast to loaded
    join: float = 120.0  # making the group
    health: float = 10.0  # is it there at all


class Server:
    """One vLLM server as rank 0 sees it: its control routes, its group, what it holds."""

    def __init__(self, url: str, timeouts: Timeouts, foreign: set[str] = frozenset(), prefix: str = ""):
        """prefix: begins the labels of this trainer's weights, so that tokens from another trainer's are not taken for its own."""
        self.http, self.timeouts, self.foreign, self.prefix = Http(url), timeouts, foreign, prefix
        self.url = self.http.url
        self.group = self.store = None
        self.group_ids: set[str] = set()  # of all groups that this trainer has made with it
        self.info: dict = {}
        self.boot: list[str] = []
        self.version: int | None = None  # what it provably holds
        self.needs_full = self.needs_proof = True
        self.has_labels = False
        self.modules: dict[str, set[str]] = {}
        self.base: list[dict] | None = None  # fingerprints of the weights that it read itself; None once somebody has sent others
        self.error: Exception | None = None
        self._update: Future | None = None
        self._last_failure: Exception | None = None

    def call(self, path: str, body=None, *, timeout: float | None = None, method: str = "POST"):
        return self.http.call(path, body, timeout=timeout or self.timeouts.call, method=method)

    def rpc(self, method: str, *args, timeout: float | None = None) -> list[dict]:
        """Calls a method of every worker: one answer each.

        The server itself gets no deadline: it would stop reading replies, and take a late one for that of the next call."""
        answer = self.call("/collective_rpc", {"method": method, "args": list(args)}, timeout=timeout)
        results = (answer or {}).get("results")
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise ServerError(f"{self.url}: {method} answered {str(answer)[:300]}")
        return results

    def healthy(self) -> bool:
        try:
            self.call("/health", method="GET", timeout=self.timeouts.health)
        except ServerError as error:
            if error.status == 404:
                raise UnusableServer(f"{error}. vllm_servers takes addresses like http://host:8000, without a path such as /v1") from None
            return False
        return True

    def describe(self) -> None:
        """Asks what it is. UnusableServer when it cannot be synced."""
        try:
            workers = self.rpc("sync_describe")
        except ServerError as error:
            if error.status in (400, 404) or "'sync_describe'" in str(error):  # a method that its workers have not
                raise UnusableServer(f"{error}\nThis server cannot be given weights. Start it with: {START}") from None
            raise
        self.info = workers[0]
        if self.info["engine"] != "C10dEngine":
            raise UnusableServer(f"{self.url} uses the weight-transfer engine {self.info['engine']}. Start it with: {START}")
        if self.info["quantization"]:
            raise UnusableServer(
                f"{self.url} serves {self.info['quantization']} weights; serve a bf16 copy of the base: quantised ones cannot be synced"
            )
        world = self.call("/get_world_size", method="GET")["world_size"]
        if world != len(workers):
            raise UnusableServer(
                f"{self.url} has {world} workers, but only {len(workers)} can be reached: start one server for each data-parallel replica"
            )
        boot = [worker["boot"] for worker in workers]
        if boot != self.boot:
            if self.boot:
                log.warning("%s was restarted: it gets all weights", self.url)
            self.boot, self.version, self.needs_full, self.base = boot, None, True, None
        if self.group_ids and self.info.get("group") not in (None, *self.group_ids):
            raise UnusableServer(f"another trainer has taken {self.url} since the last sync: every run needs servers of its own")
        if self.info["version"] == REFUSED and self.base is None:
            raise UnusableServer(
                f"{self.url}: an earlier run found that the weights it had read were not the base's. Start it again, with --model of this run"
            )
        try:
            self.call("/weight_info", method="GET")
            self.has_labels = True
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            self.has_labels = False

    def join(self, transport: str, address: str) -> None:
        """Makes the group of this trainer and the server's workers anew."""
        self.leave()
        # The workers may still wait for a bucket of a trainer that died.
        self.rpc("sync_reset", timeout=PATIENCE * self.timeouts.bucket + self.timeouts.call)
        members, longest = 1 + len(self.boot), max(self.timeouts.join, PATIENCE * self.timeouts.bucket)
        self.store = TCPStore(address, 0, members, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=longest))
        info = {
            "master_address": address, "master_port": self.store.port, "world_size": members, "group_id": uuid.uuid4().hex,
            "transport": transport, "timeout": longest,
        }  # fmt: skip
        self.group_ids.add(info["group_id"])
        joined = wire.in_background(self.call, "/init_weight_transfer_engine", {"init_info": info}, timeout=longest + 10)
        opened = wire.in_background(wire.open_group, transport, self.store, info["group_id"], 0, members, longest)
        try:
            limit = time.monotonic() + self.timeouts.join
            while not opened.done() and time.monotonic() < limit:
                if joined.done():
                    joined.result()
                time.sleep(0.005)
            self.group = opened.result(0)
            hello = torch.ones(1, dtype=torch.uint8, device=dist.device() if transport == "nccl" else "cpu")
            wire.wait(wire.broadcast(self.group, hello), self.timeouts.join, lambda: joined.result() if joined.done() else None)
            joined.result(self.timeouts.join)
        except ServerError:
            raise
        except Exception as error:  # c10d raises RuntimeErrors of its own kinds
            raise ServerError(
                f"{self.url}: no group with its workers within {self.timeouts.join:.0f} s: {type(error).__name__} {error}"
            ) from error
        self._raise_errors(self.rpc("sync_report"))

    def leave(self) -> None:
        wire.abort(self.group)
        self.group = self.store = None

    def fail(self, error: Exception) -> None:
        """Remembers why, and leaves the server paused: between start and finish its weights are not usable."""
        if str(error) != str(self._last_failure):  # while it is waited for, the same again and again
            log.warning("weight sync with %s failed: %s", self.url, error)
        self.error = self._last_failure = error
        self.needs_full, self.version = True, None
        self.http.interrupt()  # an update that hangs would be waited for until its deadline
        self.leave()

    # -- one update ----------------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        # keep: requests in flight go on afterwards, recomputed under the new weights. Without version labels nobody could tell which token
        # came from which weights, so they are ended there.
        self.call(f"/pause?mode={'keep' if self.has_labels else 'abort'}")
        self.call("/start_weight_update")

    def begin(self, tensors: list[WireTensor], bucket_bytes: int) -> None:
        update = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "bucket_bytes": bucket_bytes,
            "timeout": PATIENCE * self.timeouts.bucket,
        }
        # Lasts as long as the whole update: what hangs is noticed bucket by bucket.
        self._update = wire.in_background(self.call, "/update_weights", {"update_info": update}, timeout=24 * 3600.0)

    def check(self) -> None:
        """Raises when the workers have stopped receiving before everything was sent."""
        if self._update.done():
            self._update.result()
            self._raise_errors(self.rpc("sync_report"))
            raise ServerError(f"{self.url}: the update ended before all weights were sent")

    def finish(self, tensors: list[WireTensor], version: int, full: bool, resume: bool) -> dict:
        """Ends the update, compares every worker's report with what was sent, makes the weights visible. Returns the first report."""
        try:
            self._update.result(self.timeouts.bucket)
        except TimeoutError:
            raise ServerError(f"{self.url}: weights were not loaded {self.timeouts.bucket:.0f} s after they were sent") from None
        self.call("/finish_weight_update", timeout=self.timeouts.bucket)
        reports = self.rpc("sync_report")
        self._verify(reports, tensors, full)
        if full:
            self.modules = {}
            for worker in self.rpc("sync_modules"):
                for name, modules in worker.items():
                    self.modules.setdefault(name, set()).update(modules)
        self.clear_cache()
        self.rpc("sync_set_version", version)
        if self.has_labels:
            self.call("/update_weight_version", {"new_version": f"{self.prefix}{version}"})
        if resume:
            self.call("/resume")
        self.version, self.needs_full = version, False
        return reports[0]

    def clear_cache(self) -> None:
        """Keys and values of the old weights must not answer for the new ones; vLLM does not clear them after an update."""
        answer = self.call("/reset_prefix_cache?reset_running_requests=true")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerError(f"{self.url}: the prefix cache could not be cleared")

    def _raise_errors(self, reports: list[dict]) -> None:
        for rank, report in enumerate(reports):
            if error := report["error"]:
                lost = any(word in error for word in ("_join", "TimeoutError", "closed by peer", "Connection", "NCCL", "Gloo", "gloo"))
                raise (ServerError if lost else SyncError)(f"{self.url}, worker {rank}: {error}")

    def _verify(self, reports: list[dict], tensors: list[WireTensor], full: bool) -> None:
        dropped = set.intersection(*(set(report["dropped"]) for report in reports))  # a pipeline stage drops the other stages' names
        if dropped:
            raise SyncError(f"{self.url} does not know {len(dropped)} of the names sent and dropped them: {some(sorted(dropped))}")
        self._raise_errors(reports)
        expected = {"tensors": len(tensors), "bytes": sum(tensor.size for tensor in tensors), "incomplete": [], "finished": True}
        for rank, report in enumerate(reports):
            if report["boot"] != self.boot[rank]:
                raise ServerError(f"{self.url}, worker {rank} was restarted during the update")
            for name, value in expected.items():
                if report[name] != value:
                    raise SyncError(f"{self.url}, worker {rank}: {name} is {report[name]}, expected {value}")
        untouched = set.union(*(set(report["untouched"]) for report in reports))
        if full and (missing := sorted(name for name in untouched if not set(name.split(".")) & self.foreign)):
            raise SyncError(f"{self.url} has modules that got nothing in a full update: {some(missing)}")
