"""The vLLM side of weight sync: a weight-transfer engine for vLLM's own routes, and worker methods that tell what happened.

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=<this repository> python -m vllm.entrypoints.openai.api_server --model BASE \\
        --weight-transfer-config '{"backend": "c10d"}' --worker-extension-cls common.vllm_worker.WorkerExtension ...

vLLM imports this module in every worker before it makes the engine; importing registers the backend `c10d`. The trainer's side is
common/weight_sync.py.

Nothing here raises inside a remote call. With several workers vLLM stops reading replies at the first worker that raised, and from then on
every reply is taken for that of the next call. So errors are kept and read by `sync_report`; a worker whose load failed goes on receiving,
so that the group stays in step.

vLLM fills a module of which only a part arrived with uninitialised memory, and drops names that it does not know, both without an error
(its layerwise reload). The engine therefore counts: names that reached no parameter, modules that are incomplete. With either, the update
is not finished, and the server must stay paused until a full one succeeds.
"""

import functools
import logging
import time
import traceback
import uuid
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from common import wire

log = logging.getLogger("vllm.plain_fsdp")

BACKEND = "c10d"
BOOT = uuid.uuid4().hex  # another one after a restart: then the weights are those of the base again


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """How to join the trainer's group. The trainer is rank 0."""

    master_address: str
    master_port: int
    world_size: int
    group_id: str
    transport: str  # gloo or nccl
    timeout: float  # seconds


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Everything that one update sends, in order; cut into buckets by the same rule on both sides."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket_bytes: int
    timeout: float  # seconds for one bucket


@dataclass
class Report:
    """What one update did on this worker."""

    tensors: int = 0
    bytes: int = 0
    dropped: list[str] = field(default_factory=list)  # names that reached no parameter here
    incomplete: list[str] = field(default_factory=list)  # modules of which only a part came
    untouched: list[str] = field(default_factory=list)  # modules with parameters of which nothing came
    modules: dict[str, list[str]] = field(default_factory=dict)  # name sent -> modules that it was loaded into
    receive_seconds: float = 0.0
    load_seconds: float = 0.0
    finished: bool = False
    error: str | None = None


def kept(method):
    """Keeps an exception in the report instead of raising it; does nothing after one, until the next start."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        if self.report.error is not None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            log.exception("weight sync: %s", method.__name__)
            self.report.error = f"{method.__name__}: {type(error).__name__}: {error or traceback.format_exc(limit=-2)}"

    return run


class C10dEngine(WeightTransferEngine):
    """Receives weights in checkpoint form over a c10d group and loads them through vLLM's layerwise reload."""

    init_info_cls = GroupInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.group = self.store = None
        self.group_id: str | None = None  # of the last group, also after it was left: whose weights these are
        self.report = Report()
        self.touched: set[str] = set()  # modules of the last update
        self._loads = 0  # into parameters, in this update
        self._loading = ""  # name of the tensor at hand
        self._current: set[str] = set()  # modules that it went into
        self._count_loads = None
        self._kernels: list = []

    # A malformed request must not raise either: it is read inside the methods that keep errors.
    def parse_init_info(self, init_dict):
        return init_dict

    def parse_update_info(self, update_dict):
        return update_dict

    def trainer_send_weights(self, *_):  # older versions want it defined
        raise NotImplementedError("the trainer's side is common/weight_sync.py")

    def init_transfer_engine(self, init_info) -> None:
        self.report = Report()
        self._join(init_info)

    @kept
    def _join(self, init_info) -> None:
        info = GroupInfo(**init_info) if isinstance(init_info, dict) else init_info
        self.shutdown()
        self.group_id = info.group_id
        parallel = self.parallel_config
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        rank = 1 + replica * parallel.world_size + parallel.rank
        self.store = TCPStore(
            info.master_address, info.master_port, info.world_size, is_master=False,
            timeout=timedelta(seconds=info.timeout), wait_for_workers=False,
        )  # fmt: skip
        self.group = wire.open_group(info.transport, self.store, info.group_id, rank, info.world_size, info.timeout)
        # The first collective of NCCL makes its connections: here, where every member is known to be waiting.
        hello = torch.zeros(1, dtype=torch.uint8, device="cpu" if info.transport == "gloo" else self.device)
        wire.wait(wire.broadcast(self.group, hello), info.timeout)
        if hello.item() != 1:
            raise RuntimeError(f"the trainer's greeting did not arrive: got {hello.item()}")
        log.info("weight sync: joined group %s as rank %d of %d", info.group_id, rank, info.world_size)

    def shutdown(self) -> None:
        wire.abort(self.group)
        self.group = self.store = None

    # -- one update ----------------------------------------------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        self.report = Report()
        self._start()

    @kept
    def _start(self) -> None:
        self.touched = set()
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            # What an update that failed half way has buffered: vLLM would mix it into this one.
            if info.can_load() and info.kernel_tensors is not None:
                info.loaded_weights.clear()
                info.load_numel = 0
            # On a CPU experts are packed at the first load only, when this is None; without it a second load leaves garbage.
            method = getattr(layer, "quant_method", None)
            if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None
        layerwise.initialize_layerwise_reload(self.model)
        self._watch_loads()

    def _watch_loads(self) -> None:
        """From now on `_loads` counts what vLLM loads into parameters, and `_current` gets the modules. vLLM asks this function for
        the number of elements of each load, as the only place that all loads pass."""
        self._unwatch_loads()
        self._owners = {
            id(parameter): name
            for name, layer in self.model.named_modules()
            for parameter in layer._parameters.values()
            if parameter is not None
        }
        original = layerwise.get_numel_loaded

        def counting(loader, arguments):
            self._loads += 1
            owner = self._owners.get(id(arguments.arguments.get("param")))
            if owner is not None:
                self._current.add(owner)
            return original(loader, arguments)

        self._count_loads, layerwise.get_numel_loaded = original, counting

    def _unwatch_loads(self) -> None:
        if self._count_loads is not None:
            layerwise.get_numel_loaded, self._count_loads = self._count_loads, None

    def update_weights(self, update_info) -> None:
        self.receive_weights(update_info)

    @kept
    def receive_weights(self, update_info, *_, **__) -> None:
        info = UpdateInfo(**update_info) if isinstance(update_info, dict) else update_info
        if self.group is None:
            raise RuntimeError("no group: init_weight_transfer_engine comes first")
        dtypes = [getattr(torch, name) for name in info.dtypes]
        sizes = [wire.tensor_bytes(shape, dtype) for shape, dtype in zip(info.shapes, dtypes, strict=True)]
        buckets = wire.plan_buckets(sizes, info.bucket_bytes)
        failure = None
        following = self._receive(sizes, buckets[0]) if buckets else None
        for number, bucket in enumerate(buckets):
            started = time.perf_counter()
            buffer, work = following
            wire.wait(work, info.timeout)
            received = time.perf_counter()
            # The next bucket travels while this one is loaded.
            following = self._receive(sizes, buckets[number + 1]) if number + 1 < len(buckets) else None
            self.report.receive_seconds += received - started
            if failure is None:
                try:
                    pairs = [(info.names[i], info.shapes[i], dtypes[i], sizes[i]) for i in bucket]
                    self._load(buffer, pairs)
                except Exception as error:  # received but not loaded: the other workers' buckets must still arrive
                    log.exception("weight sync: load_weights")
                    failure = RuntimeError(f"loading failed at {self._loading}: {type(error).__name__}: {error or 'no message'}")
            self.report.load_seconds += time.perf_counter() - received
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        if failure is not None:
            raise failure

    def _receive(self, sizes: list[int], bucket: list[int]):
        # A new buffer each time: vLLM keeps views of it until the module that they belong to is complete.
        buffer = torch.empty(sum(sizes[i] for i in bucket), dtype=torch.uint8, device=self.device)
        return buffer, wire.broadcast(self.group, buffer)

    def _load(self, buffer: torch.Tensor, specs: list[tuple]) -> None:
        suspects = []

        def stream():
            offset = 0
            for name, shape, dtype, size in specs:
                before, self._current, self._loading = self._loads, set(), name
                data = buffer[offset : offset + size]
                if offset % dtype.itemsize:
                    data = data.clone()
                yield name, data.view(dtype).view(shape)
                offset += size
                # The loader asks for the next tensor when it is done with this one.
                self.report.modules.setdefault(name, []).extend(sorted(self._current))
                if self._loads == before and name.rpartition(".")[2] not in SELF_LOADED:
                    suspects.append(name)

        before = self._loads
        self.model.load_weights(stream())
        if len(suspects) == len(specs) > 1 and self._loads - before >= len(specs):
            raise RuntimeError(
                "this model's load_weights reads ahead, so that dropped names cannot be told; load_weights must be called alone"
            )
        self.report.dropped += suspects
        self.report.tensors += len(specs)
        self.report.bytes += buffer.numel()

    @kept
    def finish_weight_update(self) -> None:
        report = self.report
        self._unwatch_loads()
        for name, layer in self.model.named_modules():
            info = layerwise.get_layerwise_info(layer)
            if not any(parameter is not None for parameter in layer._parameters.values()):
                continue
            if not info.can_load():
                self.touched.add(name)
            elif info.load_numel_total and info.load_numel == 0:
                report.untouched.append(name)
            elif info.load_numel_total and info.load_numel < info.load_numel_total - padding(layer):
                report.incomplete.append(f"{name} ({info.load_numel} of {info.load_numel_total} elements)")
            elif info.load_numel_total:
                self.touched.add(name)
        if report.incomplete:
            raise RuntimeError(f"modules of which only a part came: {', '.join(report.incomplete[:20])}")
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels:  # of layers that this update left alone
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels = []
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        report.finished = True


# Parameters that vLLM's layerwise reload leaves to the model's own loader: they are written in place, and not counted.
SELF_LOADED = {"e_score_correction_bias"}


def padding(layer: torch.nn.Module) -> int:
    """Elements of an embedding or head that no checkpoint fills: rows that pad the vocabulary; the loader sets them to zero."""
    shard = getattr(layer, "shard_indices", None)
    if shard is None or not hasattr(layer, "weight"):
        return 0
    rows = shard.num_org_elements_padded - shard.num_org_elements + shard.num_added_elements_padded
    return rows * layer.weight.shape[1]


class WorkerExtension:
    """Methods of every vLLM worker, called through collective_rpc. Each returns a dict, also when something failed."""

    def sync_describe(self) -> dict:
        config = self.vllm_config
        model, parallel = config.model_config, config.parallel_config
        return {
            "boot": BOOT,
            "version": getattr(self, "sync_version", None),
            "device": self.device.type,
            "quantization": model.quantization,
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "max_model_len": model.max_model_len,
            "max_logprobs": model.max_logprobs,
            "vocab_size": model.get_vocab_size(),
            "tensor_parallel": parallel.tensor_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "architecture": list(model.architectures),
            "engine": type(self.weight_transfer_engine).__name__,
            "group": getattr(self.weight_transfer_engine, "group_id", None),
        }

    def sync_reset(self) -> dict:
        """Closes an update that a trainer left open, and leaves its group: vLLM's own start would raise."""
        was_open = getattr(self, "_weight_update_active", False)
        self._weight_update_active = False
        engine = self.weight_transfer_engine
        if hasattr(engine, "reset_weight_update_target"):
            engine.reset_weight_update_target()
        engine._unwatch_loads()
        engine.shutdown()
        engine.report = Report()
        return {"was_open": was_open}

    def sync_report(self) -> dict:
        report = dict(vars(self.weight_transfer_engine.report))
        del report["modules"]
        return report | {"boot": BOOT}

    def sync_modules(self) -> dict:
        """The modules that each name of the last update was loaded into."""
        return self.weight_transfer_engine.report.modules

    def sync_set_version(self, version: int) -> dict:
        self.sync_version = version
        return {"boot": BOOT}

    def sync_fingerprints(self) -> dict:
        """Fingerprint of every parameter that can be seen. Linear layers of a CPU server are packed elsewhere: their entry is empty."""
        model = self.model_runner.get_model()
        return {name: wire.fingerprint(tensor) if tensor.numel() else "" for name, tensor in model.named_parameters()}

    def sync_zero(self) -> dict:
        """Sets to zero what the last update loaded, so that the next one must bring it back."""
        engine = self.weight_transfer_engine
        zeroed = 0
        for name, layer in self.model_runner.get_model().named_modules():
            if name in engine.touched:
                for parameter in layer._parameters.values():
                    if parameter is not None and parameter.numel():
                        parameter.data.zero_()
                        zeroed += 1
        return {"zeroed": zeroed}


def keep_seeds_on_cpu() -> None:
    """A long queue of prompts is cut over two steps, and of a request that is not complete yet vLLM takes back what its random generator has
    drawn: in a way that generators of a CPU do not know, which ends the whole server. Here such a request draws nothing."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # its CPU runner is one of these

    original = GPUModelRunner.sample_tokens

    @functools.wraps(original)
    def sample_tokens(self, *args, **kwargs):
        generators = self.input_batch.generators
        cut = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        aside = {index: generators.pop(index) for index in cut if index in generators}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(aside)

    GPUModelRunner.sample_tokens = sample_tokens


if current_platform.is_cpu():
    keep_seeds_on_cpu()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, __name__, C10dEngine.__name__)
