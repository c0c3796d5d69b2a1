"""The trainer's side of weight sync: pushes the sharded model's weights into running vLLM servers and proves that they arrived.

    sync = WeightSync(model, ["http://node7:8000", ...])
    report = sync.push(version)        # a collective of all trainer ranks; rank 0 talks to the servers

How to start a server: START in common/sync_server.py. A server's control routes have no authentication: keep them inside the job's network.

One push: pause each server -> start -> for each unit all ranks gather, rank 0 copies what is sent into buckets and broadcasts each bucket over
one c10d group per server (gloo or NCCL) -> finish -> every worker's own report is compared with what was sent -> prefix cache cleared ->
version set -> resume. Only what trains is sent, closed over vLLM's fused modules (vLLM fills a module that comes in part with
uninitialised memory); which names share a module the workers report themselves. vLLM is never imported here.

No call is repeated by itself and each has a deadline. A server that fails is left paused; it is joined again and gets everything once more.
If that fails too: wrong weights raise SyncError, a server that is gone is left out until it answers again.
"""

import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from common import dist, wire
from common.fsdp import ShardedModel
from common.server_http import Http, ServerError
from common.server_names import WireTensor, closure, foreign_parts, some, wire_tensors
from common.sync_server import REFUSED, OtherBase, Server, SyncError, Timeouts, UnusableServer

log = logging.getLogger(__name__)

SAMPLED_ELEMENTS = 4096  # of each tensor, to estimate how many bf16 elements a step has changed


class ServersLost(RuntimeError):
    """No server is left, and none came back in time. `completions`: answers of the rollout at hand that were finished before."""

    waited = True  # asking again would be of no use

    def __init__(self, message: str):
        super().__init__(message)
        self.completions: list = []


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
        prefix = uuid.uuid4().hex[:8] + "."
        urls = dict.fromkeys(Http(url).url for url in urls)
        self.servers = [Server(url, self.timeouts, foreign_parts(self.converter), prefix) for url in urls]
        if not self.servers:
            raise ValueError("vllm_servers is empty: give the address of at least one server, e.g. http://localhost:8000")
        self.address = address or _address_towards(self.servers[0].http.host)
        self.trained = model.trained_experts()
        self.fused_experts = True
        self._samples: dict[str, torch.Tensor] = {}

    def push(self, version: int, full: bool = False) -> Push:
        """Makes every reachable server hold the current weights as `version`; `full`: sends also what does not train. A collective.

        SyncError: a server's weights are not the trainer's even after everything was sent again. ServersLost: none came back in time.
        UnusableServer: one that no wait would mend.
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
            holding = [server for server in self.servers if server.version == version]
            report.servers = [server.url for server in holding]
            report.lost = {server.url: str(server.error) for server in self.servers if server not in holding}
            report.boots = {server.url: server.boot for server in holding}
            report.info = {server.url: server.info | {"labels": server.prefix if server.has_labels else None} for server in holding}
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
                if twin := next((other for other in self.servers if other is not server and other.boot == server.boot), None):
                    raise UnusableServer(f"vllm_servers: {twin.url} and {server.url} are one server")
                if before and server.boot != before:
                    report.restarted.append(server.url)
                if server.group is None or server.boot != before:
                    server.join(self._transport(server), self.address)
                server.error = None
                ready.append(server)
            except ServerError as error:
                server.fail(error)
            except (UnusableServer, SyncError) as error:
                self._failure = error
        return ready

    def _transport(self, server: Server) -> str:
        return "nccl" if server.info["device"] == "cuda" and dist.device().type == "cuda" else "gloo"

    def _outcome(self, version: int, attempt: int, deadline: float) -> tuple[bool, Exception | None]:
        """(finished, error to raise) after an attempt."""
        refused = [server for server in self.servers if isinstance(server.error, SyncError)]
        about_experts = any(
            server.error.experts_only if isinstance(server.error, OtherBase) else ".experts." in str(server.error) for server in refused
        )
        if self.fused_experts and about_experts:
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
            raise SyncError(f"{server.url}: not restored by a full update after they were set to zero: {some(changed)}")
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
                error = OtherBase(
                    f"{server.url}: was it started with another checkpoint than {self.converter.checkpoint.path}? A full update with the base's "
                    f"weights changed parameters: {some(wrong)}"
                )
                error.experts_only = all(".experts." in name for name in wrong)
                server.rpc("sync_set_version", REFUSED)  # or the next run would find the base's weights there, and nothing to compare
                raise error
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
