"""A stand-in for an OpenAI-compatible chat server that answers as a test says, faults included."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler

from fake_server import Listener


class FakeChat:
    """answer(body, number of the request) -> a string or object (content of the reply), or one of `status`, `hang`, `drop`, `cut`, `raw` below.

    It serves one model, as vLLM does. A context manager. `bodies` and `headers` of what was asked; `most` requests that were in flight at a time.
    """

    def __init__(self, answer, model: str = "fake"):
        self.model = model
        self.answer, self.bodies, self.headers, self.most = answer, [], [], 0
        self._in_flight, self._lock, self._released = 0, threading.Lock(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                known = {"/health": {}, "/v1/models": {"data": [{"id": server.model, "root": server.model}]}}
                server.send(self, 200 if self.path in known else 404, json.dumps(known.get(self.path)).encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/chat/completions":
                    server.send(self, 404, b"{}")
                    return
                with server._lock:
                    server.bodies.append(body)
                    server.headers.append({name.lower(): value for name, value in self.headers.items()})
                    number = len(server.bodies)
                    server._in_flight += 1
                    server.most = max(server.most, server._in_flight)
                try:
                    server.reply(self, body, server.answer(body, number))
                finally:
                    with server._lock:
                        server._in_flight -= 1

            def log_message(self, *_):
                pass

        self.http = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> "FakeChat":
        return self

    def __exit__(self, *_) -> None:
        self._released.set()
        self.http.shutdown()
        self.http.server_close()

    def reply(self, request, body, answer) -> None:
        kind, value = answer if isinstance(answer, tuple) else ("content", answer)
        if kind == "hang":
            self._released.wait()
        elif kind == "drop":
            request.connection.shutdown(socket.SHUT_RDWR)
        elif kind == "status":
            status, headers = value
            self.send(request, status, json.dumps({"error": {"message": f"told to fail with {status}"}}).encode(), headers)
        elif kind == "raw":
            self.send(request, 200, value)
        else:
            content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            choice = {
                "index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "length" if kind == "cut" else "stop",
            }  # fmt: skip
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            reply = {"id": "r", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice], "usage": usage}
            self.send(request, 200, json.dumps(reply).encode())

    def send(self, request, status: int, data: bytes, headers=None) -> None:
        request.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(data))} | (headers or {})).items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)
