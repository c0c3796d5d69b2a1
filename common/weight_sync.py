"""The trainer's side of weight sync: pushes the sharded model's weights into running vLLM servers and proves that they arrived.

    sync = WeightSync(model, ["http://node7:8000", ...])
    report = sync.push(version)        # a collective of all trainer ranks; rank 0 talks to the servers

What the servers need to be started with: START. Their control routes have no authentication: keep them inside the job's network.

One push: pause each server -> start -> for each unit all ranks gather, rank 0 copies what is sent into buckets and broadcasts each bucket over
one c10d group per server (gloo or NCCL) -> finish -> every worker's own report is compared with what was sent -> prefix cache cleared ->
version set -> resume. Only what trains is sent, closed over vLLM's fused modules (vLLM fills a module that comes in part with
uninitialised memory); which names share a module the workers report themselves. vLLM is never imported here.

No call is repeated by itself and each has a deadline. A server that fails is left paused; it is joined again and gets everything once more.
If that fails too: wrong weights raise SyncError, a server that is gone is left out until it answers again.
"""

import http.client
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore

from common import dist, fp8, wire
from common.fsdp import ShardedModel
from common.weights import Converter

log = logging.getLogger(__name__)

START = (
    "VLLM_SERVER_DEV_MODE=1 PYTHONPATH=<this repository> python -m vllm.entrypoints.openai.api_server --model <base checkpoint> "
    '--weight-transfer-config \'{"backend": "c10d"}\' --worker-extension-cls common.vllm_worker.WorkerExtension '
    "--logprobs-mode processed_logprobs --enable-scale-out (where that option exists)"
)
# Workers wait longer for a bucket than the trainer does for one server, or a server that hangs would make the others give up as well.
PATIENCE = 3
SAMPLED_ELEMENTS = 4096  # of each tensor, to estimate how many bf16 elements a step has changed


class ServerError(RuntimeError):
    """A server does not answer, or answers with an error; it may be gone."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class SyncError(RuntimeError):
    """A server answers, but its weights are not the trainer's."""


class ServersLost(RuntimeError):
    """No server is left."""


# ----------------------------------------------------------------------------------------------------------------------------------
# HTTP


class Http:
    """JSON over HTTP to one server. No retries, no proxies, no redirects; a deadline on every call."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"vllm_servers: {url!r} is no address like http://host:8000")
        self.url, self.host = url.rstrip("/"), parts.hostname
        self.prefix = parts.path.rstrip("/")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect = lambda timeout: kind(parts.hostname, parts.port, timeout=timeout)
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def call(self, path: str, body=None, *, timeout: float, method: str = "POST"):
        """The parsed answer, or None for an empty one. ServerError with the server's own message otherwise."""
        connection = self._connect(timeout)
        with self._lock:
            self._open.add(connection)
        try:
            data = None if method == "GET" else json.dumps({} if body is None else body)
            connection.request(method, self.prefix + path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError:
            raise ServerError(f"{self.url}{path}: no answer within {timeout:.0f} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: closed by `interrupt` while in use
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if response.status >= 400:
            raise ServerError(f"{self.url}{path}: HTTP {response.status}: {_message(raw)}", response.status)
        try:
            return json.loads(raw) if raw else None
        except ValueError:
            raise ServerError(f"{self.url}{path}: the answer is no JSON: {raw[:200]!r}") from None

    def interrupt(self) -> None:
        """Ends all calls in progress: each raises ServerError, and the server stops working on them."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    log.debug("connection to %s was closed already", self.url)


def _message(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    try:
        error = json.loads(text)
        while isinstance(error, dict) and ("error" in error or "message" in error):
            error = error.get("error", error.get("message"))
        text = error if isinstance(error, str) else text
    except ValueError:
        pass  # not JSON: shown as it is
    return text[:2000] or "(no message)"


# ----------------------------------------------------------------------------------------------------------------------------------
# Names


@dataclass(frozen=True)
class WireTensor:
    """One tensor as it is sent: `model tensor[index]` under `name`, in `dtype`."""

    name: str
    model_name: str
    unit: int
    index: tuple
    shape: tuple[int, ...]
    dtype: torch.dtype
    narrowed: bool  # the checkpoint holds more than `dtype` keeps
    converted: bool = False  # comes out of Converter.to_checkpoint

    @property
    def size(self) -> int:
        return wire.tensor_bytes(self.shape, self.dtype)


def wire_tensors(converter: Converter, *, fused_experts: bool = True, tied_copies: bool = False) -> list[WireTensor]:
    """Everything the model has, unit by unit, under the checkpoint's names: vLLM reads those for every model it serves.

    fused_experts: the experts of a layer as one [E, ., .] tensor under transformers' name, which vLLM takes as well, much faster than three
    names for each expert. tied_copies: also send tied tensors under their second name (a CPU server keeps a copy of its own of the head).
    """
    tensors = []
    for number, unit in enumerate(converter.units):
        for name in unit.model_names:
            tensors += _wire_tensor(converter, name, name, number, fused_experts)
        if tied_copies:
            for name, source in converter.tied.items():
                if source in unit.model_names:
                    tensors += [WireTensor(_twin_name(converter, name, source), source, number, *_form(converter, source))]
    return tensors


def _form(converter: Converter, name: str) -> tuple:
    dtype, loaded = converter.dtype(name), converter.loaded_dtype(name)
    return (), tuple(converter.shape(name)), dtype, loaded.itemsize > dtype.itemsize


def _twin_name(converter: Converter, name: str, source: str) -> str:
    """A tied tensor has one name on disk; the head's is the same in every checkpoint."""
    return name if name.startswith("lm_head") else name.replace(source, converter.disk_names(source)[0])


def _wire_tensor(converter: Converter, name: str, model_name: str, unit: int, fused_experts: bool) -> list[WireTensor]:
    pieces = converter.pieces(name)
    index, shape, dtype, narrowed = _form(converter, name)
    if dtype == fp8.DTYPE:
        dtype = torch.bfloat16
    if not pieces:  # made by a conversion of transformers that is no placement: undone when it is sent
        names = converter.disk_names(name)
        checkpoint = converter.checkpoint
        return [WireTensor(disk, model_name, unit, (), tuple(checkpoint.shape(disk)), dtype, narrowed, True) for disk in names]
    if len(pieces) == 1:
        return [WireTensor(next(iter(pieces)), model_name, unit, (), shape, dtype, narrowed)]
    first = next(iter(pieces))
    if fused_experts:
        stem = first[: first.index(".experts.") + len(".experts.")]
        return [WireTensor(stem + name.rpartition(".")[2], model_name, unit, (), shape, dtype, narrowed)]
    empty = torch.empty(shape, device="meta")
    return [WireTensor(disk, model_name, unit, index, tuple(empty[index].shape), dtype, narrowed) for disk, index in pieces.items()]


def closure(tensors: list[WireTensor], modules: dict[str, set[str]], trained: set[str]) -> list[int]:
    """Indices of what must be sent when the model tensors `trained` have changed: all of every server module of which a part has.

    modules: name sent -> the server's modules that it is loaded into, as its workers reported.
    """
    touched = {module for tensor in tensors if tensor.model_name in trained for module in modules.get(tensor.name, ())}
    return [i for i, tensor in enumerate(tensors) if tensor.model_name in trained or touched & modules.get(tensor.name, set())]


# ----------------------------------------------------------------------------------------------------------------------------------
# One server


@dataclass
class Timeouts:
    """Seconds."""

    call: float = 60.0  # a control call
    bucket: float = 120.0  # one bucket, from broadcast to loaded
    join: float = 120.0  # making the group
    health: float = 10.0  # is it there at all


class Server:
    """One vLLM server as rank 0 sees it: its control routes, its group, what it holds."""

    def __init__(self, url: str, timeouts: Timeouts, foreign: set[str] = frozenset()):
        self.http, self.timeouts, self.foreign = Http(url), timeouts, foreign
        self.url = self.http.url
        self.group = self.store = None
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
        self._last_failure: Exception | None = None

    def call(self, path: str, body=None, *, timeout: float | None = None, method: str = "POST"):
        return self.http.call(path, body, timeout=timeout or self.timeouts.call, method=method)

    def rpc(self, method: str, *args, timeout: float | None = None) -> list[dict]:
        """Calls a method of every worker: one answer each."""
        timeout = timeout or self.timeouts.call
        answer = self.call("/collective_rpc", {"method": method, "args": list(args), "timeout": timeout}, timeout=1.1 * timeout)
        results = (answer or {}).get("results")
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise ServerError(f"{self.url}: {method} answered {str(answer)[:300]}")
        return results

    def healthy(self) -> bool:
        try:
            self.call("/health", method="GET", timeout=self.timeouts.health)
        except ServerError:
            return False
        return True

    def describe(self) -> None:
        """Asks what it is. ValueError when it is no server that can be synced: a longer wait would not help."""
        try:
            workers = self.rpc("sync_describe")
        except ServerError as error:
            if error.status in (400, 404, 500):
                raise ValueError(f"{error}\nThis server cannot be given weights. Start it with: {START}") from None
            raise
        self.info = workers[0]
        if self.info["engine"] != "C10dEngine":
            raise ValueError(f"{self.url} uses the weight-transfer engine {self.info['engine']}. Start it with: {START}")
        if self.info["quantization"]:
            raise ValueError(
                f"{self.url} serves {self.info['quantization']} weights; serve a bf16 copy of the base: quantised ones cannot be synced"
            )
        world = self.call("/get_world_size", method="GET")["world_size"]
        if world != len(workers):
            raise ValueError(
                f"{self.url} has {world} workers, but only {len(workers)} can be reached: start one server for each data-parallel replica"
            )
        boot = [worker["boot"] for worker in workers]
        if boot != self.boot:
            if self.boot:
                log.warning("%s was restarted: it gets all weights", self.url)
            self.boot, self.version, self.needs_full, self.base = boot, None, True, None
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
            self.call("/update_weight_version", {"new_version": str(version)})
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
            raise SyncError(f"{self.url} does not know {len(dropped)} of the names sent and dropped them: {_some(sorted(dropped))}")
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
            raise SyncError(f"{self.url} has modules that got nothing in a full update: {_some(missing)}")


def foreign_parts(converter: Converter) -> set[str]:
    """Parts of a server's model that the trainer has not and never sends: towers of other media, multi-token prediction; a head that is tied
    to the embeddings."""
    parts = {name.removeprefix("model.").split(".")[0] for name in converter.untouched} - {"layers"}
    return parts | {"lm_head" for name in converter.tied if name.startswith("lm_head")}


def _some(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# ----------------------------------------------------------------------------------------------------------------------------------
# All servers


class Lane:
    """The stream of one list of tensors to the servers that get exactly it."""

    def __init__(self, tensors: list[WireTensor], servers: list[Server], bucket_bytes: int, device: torch.device):
        self.tensors, self.servers, self.device = tensors, servers, device
        self._buckets = wire.plan_buckets([tensor.size for tensor in tensors], bucket_bytes)
        self._bucket, self._next, self._offset = 0, 0, 0
        self._buffer: torch.Tensor | None = None
        self._in_flight: torch.Tensor | None = None
        self._started = 0.0
        self._works: list = []

    @property
    def active(self) -> list[Server]:
        return [server for server in self.servers if server.error is None]

    def each(self, action: Callable[[Server], None]) -> None:
        """Does it for all servers at once: one that hangs must not keep the others waiting."""
        for server, result in [(server, wire.in_background(action, server)) for server in self.active]:
            self._settle(server, result.result)

    def _settle(self, server: Server, action: Callable[[], None]) -> None:
        try:
            action()
        except (ServerError, SyncError) as error:
            server.fail(error)
        except Exception as error:  # c10d raises RuntimeErrors of its own kinds; one server's must not take the others down
            log.debug("%s", server.url, exc_info=True)
            server.fail(ServerError(f"{server.url}: {type(error).__name__}: {error}"))

    def feed(self, tensor: WireTensor, value: torch.Tensor) -> None:
        """Copies the next tensor of the list; a full bucket goes out. The value may be freed afterwards."""
        assert self.tensors[self._next] is tensor, "tensors are fed in the order of the list"
        if self._buffer is None:
            size = sum(self.tensors[i].size for i in self._buckets[self._bucket])
            self._buffer, self._offset = torch.empty(size, dtype=torch.uint8, device=self.device), 0
        assert tuple(value.shape) == tensor.shape, f"{tensor.name} is {list(value.shape)}, {list(tensor.shape)} was announced"
        data = value.detach().to(tensor.dtype).contiguous().reshape(-1).view(torch.uint8)
        self._buffer[self._offset : self._offset + tensor.size].copy_(data)
        self._offset, self._next = self._offset + tensor.size, self._next + 1
        if self._offset == len(self._buffer):
            self.wait()  # for the bucket before: at most two exist
            self._started, self._in_flight, self._buffer = time.monotonic(), self._buffer, None
            for server in self.active:
                self._settle(server, lambda server=server: self._works.append((server, wire.broadcast(server.group, self._in_flight))))
            self._bucket += 1

    def wait(self) -> None:
        works, self._works = self._works, []
        for server, work in works:
            if server.error is None:
                left = max(0.0, self._started + server.timeouts.bucket - time.monotonic())
                self._settle(server, lambda server=server, work=work, left=left: wire.wait(work, left, server.check))
        self._in_flight = None


@dataclass
class Push:
    """What one push did; the same on every rank."""

    seconds: float = 0.0
    bytes: int = 0
    tensors: int = 0
    changed: float = 1.0  # share of the bf16 elements sent, experts left out, that differ from the last push; estimated
    changed_any: bool = True
    servers: list[str] = field(default_factory=list)  # that hold the weights now
    lost: dict[str, str] = field(default_factory=dict)  # url -> why
    restarted: list[str] = field(default_factory=list)
    boots: dict[str, list[str]] = field(default_factory=dict)  # url -> an id of each worker's process
    info: dict[str, dict] = field(default_factory=dict)  # url -> what its first worker says of itself
    checks: dict = field(default_factory=dict)


class WeightSync:
    """Pushes the weights of a sharded model to servers. `push` is a collective; everything about servers happens on rank 0."""

    def __init__(
        self,
        model: ShardedModel,
        urls: Iterable[str],
        *,
        address: str | None = None,
        bucket_bytes: int | None = None,
        timeouts: Timeouts | None = None,
        wait_seconds: float = 600.0,
    ):
        """address: this host's name as the servers reach it; by default that of the interface towards the first server.

        wait_seconds: how long to wait for a server when none is left."""
        self.model, self.converter = model, model.converter
        self.timeouts = timeouts or Timeouts()
        self.wait_seconds = wait_seconds
        self.bucket_bytes = bucket_bytes or (1 << 30 if torch.cuda.is_available() else 64 << 20)
        self.servers = [Server(url, self.timeouts, foreign_parts(self.converter)) for url in dict.fromkeys(urls)]
        if not self.servers:
            raise ValueError("vllm_servers is empty: give the address of at least one server, e.g. http://localhost:8000")
        self.address = address or _address_towards(self.servers[0].http.host)
        self.trained = model.trained_experts()
        self.fused_experts = True
        self._samples: dict[str, torch.Tensor] = {}

    def push(self, version: int, full: bool = False) -> Push:
        """Makes every reachable server hold the current weights as `version`; `full`: sends also what does not train. A collective.

        SyncError: a server's weights are not the trainer's even after everything was sent again. ServersLost: none came back in time.
        """
        dist.rest()
        started, report, failure = time.perf_counter(), Push(), None
        deadline = time.monotonic() + self.wait_seconds
        self._reset_statistics()
        for server in self.servers:
            server.needs_full |= full
        attempt = 0
        while True:
            ready = self._connect(report) if dist.is_main() else []
            failure = dist.broadcast_object(self._failure if dist.is_main() else None)
            if failure is not None:
                raise failure
            self._send(ready, version, report)
            done, failure = dist.broadcast_object(self._outcome(version, attempt, deadline) if dist.is_main() else None)
            if failure is not None:
                raise failure
            if done:
                break
            attempt += 1
        report.seconds = time.perf_counter() - started
        if dist.is_main():
            self._finish_statistics(report)
            report.servers = [server.url for server in self.servers if server.version == version]
            report.lost = {server.url: str(server.error) for server in self.servers if server.version != version}
            report.boots = {server.url: server.boot for server in self.servers if server.version == version}
            report.info = {server.url: server.info | {"labels": server.has_labels} for server in self.servers if server.version == version}
        dist.beat()
        return dist.broadcast_object(report)

    # -- rank 0 --------------------------------------------------------------------------------------------------------------------

    _failure: Exception | None = None

    def _connect(self, report: Push) -> list[Server]:
        """Servers that do not hold the weights yet and can be reached, joined."""
        self._failure = None
        ready = []
        for server in self.servers:
            if server in self._done:
                continue
            try:
                before = server.boot
                if not server.healthy():
                    raise ServerError(f"{server.url} does not answer")
                server.describe()
                if before and server.boot != before:
                    report.restarted.append(server.url)
                if server.group is None or server.boot != before:
                    server.join(self._transport(server), self.address)
                server.error = None
                ready.append(server)
            except ServerError as error:
                server.fail(error)
            except (ValueError, SyncError) as error:
                self._failure = error
        return ready

    def _transport(self, server: Server) -> str:
        return "nccl" if server.info["device"] == "cuda" and dist.device().type == "cuda" else "gloo"

    def _outcome(self, version: int, attempt: int, deadline: float) -> tuple[bool, Exception | None]:
        """(finished, error to raise) after an attempt."""
        refused = [server for server in self.servers if isinstance(server.error, SyncError)]
        if refused and self.fused_experts and any(".experts." in str(server.error) for server in refused):
            log.warning(
                "a server does not take the experts of a layer as one tensor: they are sent one by one from now on. %s", refused[0].error
            )
            self.fused_experts = False
            return False, None
        if refused and attempt >= 1:
            return True, SyncError(f"weights are wrong also after everything was sent again: {refused[0].error}")
        self._done = [server for server in self.servers if server.version == version and server.error is None and not server.needs_proof]
        pending = [server for server in self.servers if server not in self._done]
        if not pending:
            return True, None
        if attempt >= 1 and self._done:
            log.warning("going on without %s", ", ".join(f"{server.url} ({server.error})" for server in pending))
            return True, None
        if attempt >= 1:
            if time.monotonic() > deadline:
                return True, ServersLost(
                    f"no server came back within {self.wait_seconds:.0f} s: {'; '.join(str(s.error) for s in pending)}"
                )
            time.sleep(min(5.0, self.wait_seconds / 20))
        return False, None

    def _send(self, ready: list[Server], version: int, report: Push) -> None:
        """Everything one attempt sends: what a server needs, and for one that was never proven the proof."""
        proofs = [server for server in ready if server.needs_proof]
        for server in proofs:
            if version == 0 and server.info.get("version") is None:
                server.base = self._fingerprints(server)
        self._stream(ready, version, report)
        proofs = [server for server in proofs if server.error is None]
        if not dist.broadcast_object(bool(proofs)):
            return
        first = {}
        for server in proofs:
            first[server] = self._fingerprints(server)
            self._guard(server, lambda server=server: server.rpc("sync_zero"))
        self._stream([server for server in proofs if server.error is None], version, report)
        for server in proofs:
            second = self._fingerprints(server) if server.error is None else []
            if server.error is None:
                self._guard(server, lambda server=server, second=second: self._prove(server, first[server], second, report))

    def _guard(self, server: Server, action: Callable[[], object]):
        try:
            return action()
        except (ServerError, SyncError) as error:
            server.fail(error)
            return None

    def _fingerprints(self, server: Server) -> list[dict]:
        return self._guard(server, lambda: server.rpc("sync_fingerprints", timeout=10 * self.timeouts.call)) or []

    def _prove(self, server: Server, first: list[dict], second: list[dict], report: Push) -> None:
        """Fingerprints after a full update, and after everything was set to zero and sent once more: being equal shows that what is sent
        covers every parameter. With the base's weights on both sides they must also be those that the server had at first: that shows that
        each tensor arrives where vLLM's own loading of the checkpoint puts it."""
        changed = [
            f"{name} (worker {rank})" for rank, worker in enumerate(first) for name in worker if worker[name] != second[rank].get(name)
        ]
        if changed:
            raise SyncError(f"{server.url}: not restored by a full update after they were set to zero: {_some(changed)}")
        narrowed = {module for tensor in self._tensors(server) if tensor.narrowed for module in server.modules.get(tensor.name, ())}
        exact = server.base is not None and self.converter.block is None
        if exact:
            wrong = [
                f"{name} (worker {rank})"
                for rank, worker in enumerate(first)
                for name in worker
                if worker[name] != server.base[rank].get(name) and name.rpartition(".")[0] not in narrowed
            ]
            if wrong:
                raise SyncError(f"{server.url}: a full update with the base's weights changed parameters: {_some(wrong)}")
        visible = sum(bool(value) for worker in first for value in worker.values())
        report.checks[f"proof {server.url}"] = {
            "parameters": sum(len(worker) for worker in first), "visible": visible, "equal_base": exact,
        }  # fmt: skip
        server.needs_proof = False
        self._guard(server, lambda: server.call("/resume"))

    # -- all ranks -----------------------------------------------------------------------------------------------------------------

    def _tensors(self, server: Server) -> list[WireTensor]:
        return wire_tensors(self.converter, fused_experts=self.fused_experts, tied_copies=server.info["device"] == "cpu")

    def _lanes(self, servers: list[Server]) -> list[Lane]:
        lanes: dict[tuple, tuple[list[WireTensor], list[Server]]] = {}
        for server in servers:
            tensors = self._tensors(server)
            full = server.needs_full or server.needs_proof
            picked = range(len(tensors)) if full else closure(tensors, server.modules, set(self.trained))
            key = (tuple(tensors[i].name for i in picked), self._transport(server))
            lanes.setdefault(key, ([tensors[i] for i in picked], []))[1].append(server)
        devices = {"nccl": dist.device(), "gloo": torch.device("cpu")}
        return [Lane(tensors, group, self.bucket_bytes, devices[key[1]]) for key, (tensors, group) in lanes.items()]

    def _stream(self, servers: list[Server], version: int, report: Push) -> None:
        """One update of `servers` (empty on other ranks). A collective that raises on no rank: failures are kept with the server."""
        lanes = self._lanes(servers) if dist.is_main() else []
        needed: dict[int, list[str]] = {}
        for lane in lanes:
            lane.each(Server.prepare)
            for tensor in lane.tensors:
                needed.setdefault(tensor.unit, []).append(tensor.model_name)
        for lane in lanes:  # only now: from here on the workers wait for buckets
            lane.each(lambda server, lane=lane: server.begin(lane.tensors, self.bucket_bytes))
        needed = dist.broadcast_object({unit: sorted(set(names)) for unit, names in sorted(needed.items())})
        for unit, names in needed.items():
            # On the control group: other ranks wait here while rank 0 waits for servers, not inside a gather.
            if not dist.broadcast_object(any(lane.active for lane in lanes)):
                break
            named = self._gather(unit, names)
            if dist.is_main():
                self._feed(lanes, unit, named)
            del named
        for lane in lanes:
            lane.wait()
            full = len(lane.tensors) == len(self._tensors(lane.servers[0]))
            lane.each(lambda server, lane=lane, full=full: self._finish(server, lane, version, full, report))

    def _finish(self, server: Server, lane: Lane, version: int, full: bool, report: Push) -> None:
        worker = server.finish(lane.tensors, version, full, resume=not server.needs_proof)
        report.tensors, report.bytes = worker["tensors"], worker["bytes"]
        report.checks[f"report {server.url}"] = {
            "workers": len(server.boot), "tensors": worker["tensors"], "bytes": worker["bytes"], "untouched": len(worker["untouched"]),
            "receive_seconds": worker["receive_seconds"], "load_seconds": worker["load_seconds"], "full": full,
        }  # fmt: skip

    def _gather(self, unit: int, names: list[str]) -> dict[str, torch.Tensor]:
        """Whole tensors of one unit on this rank's device, in the dtype that the forward pass computes in."""
        dtype = self.model.config.dtype
        dtype = dtype if dtype in (torch.bfloat16, torch.float16) else None
        replicated = self.model.replicated
        if all(self.trained.get(name, ()) is None or name in replicated for name in names):
            named = self.model.gather_trained(unit, dtype)
            return named | {name: replicated[name].detach() for name in names if name in replicated}
        return self.model.gather_unit(unit, dtype)

    def _feed(self, lanes: list[Lane], unit: int, named: dict[str, torch.Tensor]) -> None:
        converted: dict[str, torch.Tensor] = {}
        seen = set()
        for lane in lanes:
            for tensor in lane.tensors:
                if tensor.unit != unit or not lane.active:
                    continue
                if tensor.converted:
                    if tensor.name not in converted:
                        converted |= self.converter.to_checkpoint(named)
                    value = converted[tensor.name]
                else:
                    value = named[tensor.model_name][tensor.index] if tensor.index else named[tensor.model_name]
                if tensor.model_name not in seen:
                    seen.add(tensor.model_name)
                    self._sample(tensor.model_name, named[tensor.model_name], tensor.dtype)
                lane.feed(tensor, value)

    # -- how much has changed ------------------------------------------------------------------------------------------------------

    def _reset_statistics(self) -> None:
        self._done: list[Server] = []
        self._counts: dict[str, tuple[torch.Tensor, int]] = {}
        self._new_samples: dict[str, torch.Tensor] = {}

    def _sample(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> None:
        """Compares every n-th element, as it is sent, with the push before."""
        if name in self._new_samples:
            return
        flat = value.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)].to(dtype)
        before = self._samples.get(name)
        if before is not None:
            self._counts[name] = ((sample != before).sum(), flat.numel())
        self._new_samples[name] = sample.clone()

    def _finish_statistics(self, report: Push) -> None:
        self._samples |= self._new_samples
        if not self._counts:
            return  # the first push: everything is new
        changed = elements = 0.0
        report.changed_any = False
        for name, (count, numel) in self._counts.items():
            share = count.item() / len(self._samples[name])
            report.changed_any |= share > 0
            if ".experts." not in name:
                changed, elements = changed + share * numel, elements + numel
        report.changed = changed / elements if elements else 0.0

    def close(self) -> None:
        """Leaves the groups; the servers go on with the weights they have."""
        for server in self.servers:
            server.leave()


def _address_towards(host: str) -> str:
    """This machine's address on the interface that leads to `host`."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise ValueError(f"vllm_servers: {host} cannot be resolved ({error})") from None
