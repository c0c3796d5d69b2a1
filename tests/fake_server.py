"""A stand-in for a vLLM server with one worker: the same routes, the same group, and any fault on demand. It holds the last weights it got."""

import json
import socket
import threading
import time
import uuid
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore

from common import wire


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_):
        pass  # a client that went away


class FakeServer:
    """faults: {path or rpc method: action}; an action is an HTTP status, "hang", or a function of the answer that changes it."""

    def __init__(self, modules=None, port: int = 0):
        self.modules = modules or (lambda name: [name.rpartition(".")[0]])
        self.faults: dict = {}
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.labels, self.paused, self.boot = "default", False, uuid.uuid4().hex
        self.version = 3  # of an earlier trainer; None: holds the base as it read it itself
        self.report: dict = {}
        self.group = self.store = self.group_id = None
        self.released = threading.Event()
        self.answer_tokens = 6
        self.delay = 0.0
        self.drops: tuple[str, ...] = ()  # ends of names that it does not know
        self.cut_after_buckets: int | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server.handle(self, None)

            def do_POST(self):
                server.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_):
                pass

        self.http = Listener(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()
        wire.abort(self.group)
        self.group = self.store = None

    # -- routes --------------------------------------------------------------------------------------------------------------------

    def handle(self, request, body) -> None:
        path = urlsplit(request.path).path
        name = body["method"] if path == "/collective_rpc" else path
        self.calls.append(name)
        fault = self.faults.get(name)
        if fault == "hang":
            self.released.wait()
            return
        if fault == "die":
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(fault, int):
            self.reply(request, fault, {"error": {"message": f"{name} was told to fail"}})
            return
        action = getattr(self, "on_" + name.strip("/").replace("/", "_"), None)
        if action is None:
            self.reply(request, 404, {"detail": "Not Found"})
            return
        try:
            answer = action(*body.get("args", ())) if path == "/collective_rpc" else action(body) if body is not None else action()
            status = 200
        except Exception as error:
            answer, status = {"error": {"message": f"{type(error).__name__}: {error}"}}, 500
        if callable(fault):
            answer = fault(answer)
        self.reply(request, status, {"results": [answer]} if path == "/collective_rpc" and status == 200 else answer)

    def reply(self, request, status, answer) -> None:
        data = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def on_health(self):
        return {}

    def on_get_world_size(self):
        return {"world_size": 1}

    def on_weight_info(self):
        return {"weight_version": self.labels}

    def on_pause(self, _):
        self.paused = True
        return {"status": "paused"}

    def on_resume(self, _):
        self.paused = False
        return {"status": "resumed"}

    def on_reset_prefix_cache(self, _):
        return {"success": True}

    def on_update_weight_version(self, body):
        self.labels = body["new_version"]
        return {"success": True}

    def on_init_weight_transfer_engine(self, body):
        info = body["init_info"]
        self.group_id = info["group_id"]
        self.store = TCPStore(
            info["master_address"], info["master_port"], info["world_size"], is_master=False,
            timeout=timedelta(seconds=info["timeout"]), wait_for_workers=False,
        )  # fmt: skip
        self.group = wire.open_group(info["transport"], self.store, info["group_id"], 1, info["world_size"], info["timeout"])
        hello = torch.zeros(1, dtype=torch.uint8)
        wire.wait(wire.broadcast(self.group, hello), info["timeout"])
        self.report = {"error": None, "boot": self.boot}
        return {}

    def on_start_weight_update(self, _):
        self.report = {
            "tensors": 0, "bytes": 0, "dropped": [], "incomplete": [], "untouched": [], "receive_seconds": 0.0, "load_seconds": 0.0,
            "finished": False, "error": None, "boot": self.boot,
        }  # fmt: skip
        self.sent = []
        return {}

    def on_update_weights(self, body):
        info = body["update_info"]
        dtypes = [getattr(torch, name) for name in info["dtypes"]]
        sizes = [wire.tensor_bytes(shape, dtype) for shape, dtype in zip(info["shapes"], dtypes, strict=True)]
        for number, bucket in enumerate(wire.plan_buckets(sizes, info["bucket_bytes"])):
            if number == self.cut_after_buckets:
                wire.abort(self.group)
                self.released.wait()
            buffer = torch.empty(sum(sizes[i] for i in bucket), dtype=torch.uint8)
            wire.wait(wire.broadcast(self.group, buffer), info["timeout"])
            offset = 0
            for i in bucket:
                self.weights[info["names"][i]] = buffer[offset : offset + sizes[i]].clone().view(dtypes[i]).view(info["shapes"][i])
                offset += sizes[i]
                self.sent.append(info["names"][i])
                if self.drops and info["names"][i].endswith(self.drops):
                    del self.weights[info["names"][i]]
                    self.report["dropped"].append(info["names"][i])
        self.report |= {"tensors": len(sizes), "bytes": sum(sizes)}
        return {}

    def on_finish_weight_update(self, _):
        self.report["finished"] = True
        return {}

    def on_sync_describe(self):
        return {
            "boot": self.boot, "version": self.version, "device": "cuda", "quantization": None, "logprobs_mode": "processed_logprobs",
            "max_model_len": 512, "engine": "C10dEngine", "group": self.group_id,
        }  # fmt: skip

    def on_sync_reset(self):
        wire.abort(self.group)
        self.group = self.store = None
        return {"was_open": False}

    def on_sync_report(self):
        return self.report

    def on_sync_modules(self):
        return {name: self.modules(name) for name in self.sent}

    def on_sync_set_version(self, version):
        self.version = version
        return {}

    def on_sync_fingerprints(self):
        return {name: wire.fingerprint(tensor) for name, tensor in self.weights.items()}

    def on_sync_zero(self):
        for tensor in self.weights.values():
            tensor.zero_()
        return {"zeroed": len(self.weights)}

    def on_inference_v1_generate(self, body):
        if "token_ids" not in body:
            raise ValueError("token_ids is missing")
        time.sleep(self.delay)
        params, choices = body["sampling_params"], []
        for index in range(params["n"]):
            ids = [(sum(body["token_ids"]) + index + step) % 300 for step in range(min(self.answer_tokens, params["max_tokens"]))]
            choices.append(
                {
                    "index": index, "finish_reason": "stop", "token_ids": ids,
                    "weight_versions": [{"version": self.labels, "start": 0, "end": len(ids)}],
                    "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in ids]},
                }
            )  # fmt: skip
        # Answers that ended earlier are left out when not asked for, as by vLLM 0.26.
        return {"choices": choices if params.get("output_kind") == 2 else choices[-1:]}
