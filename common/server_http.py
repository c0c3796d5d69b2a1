"""JSON over HTTP to a vLLM server: one try, with a deadline on every call."""

import http.client
import json
import logging
import socket
import threading
from urllib.parse import urlsplit

log = logging.getLogger(__name__)


class ServerError(RuntimeError):
    """A server does not answer, or answers with an error; it may be gone."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """The server is well, but takes no such request: another try would end alike. 429 is no refusal: too many requests at present."""
        return self.status is not None and self.status < 500 and self.status != 429


class Http:
    """JSON over HTTP to one server. No retries, no proxies, no redirects; a deadline on every call."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ValueError(f"{url!r} is no address like http://host:8000 (several servers: separated by spaces)")
        self.url, self.host = url.rstrip("/"), parts.hostname
        self.prefix = parts.path.rstrip("/")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect = lambda timeout: kind(parts.hostname, port, timeout=timeout)
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
