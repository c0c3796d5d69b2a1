"""A client for OpenAI-compatible chat endpoints: judges and data generation. Every reply is an answer or says why there is none.

    endpoint = Endpoint(EndpointConfig(base_url="http://node7:8000/v1", model="judge", cache="judge_cache.jsonl"))
    replies = endpoint.complete([Request(messages, schema={"type": "object", ...})])
    replies[0].data, replies[0].failure, endpoint.counters.line()

- At most `concurrency` requests are in flight in this process. What may pass (no connection, 408, 409, 429, 5xx) is tried again, with growing
  pauses or as long as Retry-After says, until the request's `deadline`; the first five such tries are logged with their reason. A wrong key,
  address or model (401, 403, 404) raises EndpointError.
- With a `schema` the server is asked for structured output, and what comes back is checked against it all the same.
- `cache`: a JSON Lines file of replies by a hash of everything that could change them (address, model, messages, sampling, schema, extra
  options). It only grows, survives a kill, and processes may share it. Failures are not kept.
- The key comes from the environment variable that `api_key_env` names, is never written anywhere, and is blanked in error messages.
"""

import asyncio
import difflib
import email.utils
import hashlib
import json
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from common.jsonl import AppendLog

log = logging.getLogger(__name__)

CONTENT_TRIES = 2  # of a reply that is not what the schema says; at temperature 0 more would give the same
CONTENT = ("invalid_json", "schema", "empty")
TOLD = 5  # tries that failed are logged
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds
FATAL = {
    401: "the key is wrong or missing: set the variable that api_key_env names",
    403: "this key may not use it",
    404: "check base_url and model",
}


class EndpointError(RuntimeError):
    """The endpoint cannot be used as it is configured: trying again would not help."""


@dataclass
class EndpointConfig:
    """Where a model answers and how it is asked. A YAML file holds these names."""

    base_url: str  # with /v1
    model: str
    api_key_env: str | None = None  # NAME of the environment variable with the key; none: the server wants no key
    temperature: float = 0.0
    max_tokens: int = 1024
    seed: int | None = 0
    extra_body: dict = field(default_factory=dict)  # e.g. {chat_template_kwargs: {enable_thinking: false}} for vLLM
    concurrency: int = 8
    attempt_seconds: float = 60.0
    deadline: float = 180.0  # seconds for one request with all its tries, from when it gets its turn
    max_tries: int = 8
    cache: str | None = None
    price_per_million: list[float] = field(default_factory=lambda: [0.0, 0.0])  # tokens in, tokens out; any currency

    def __post_init__(self):
        if urlsplit(self.base_url).scheme not in ("http", "https") or not urlsplit(self.base_url).hostname:
            raise ValueError(f"base_url is {self.base_url!r}; it must be an address like http://host:8000/v1")
        if min(self.concurrency, self.max_tries, self.max_tokens) < 1 or not min(self.attempt_seconds, self.deadline) > 0:
            raise ValueError("concurrency, max_tries, max_tokens, attempt_seconds and deadline must be positive")
        if len(self.price_per_million) != 2:
            raise ValueError(f"price_per_million is {self.price_per_million}; give two numbers: a million tokens in, a million tokens out")

    def key(self) -> str:
        if self.api_key_env is None:
            return "none"
        if not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env} (api_key_env) is empty: export the endpoint's key in it")
        return os.environ[self.api_key_env]


def read_mapping(path: str | Path) -> dict:
    """A YAML (or JSON) file that holds one mapping. ValueError names the file."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `key: value` lines")
    return content


def from_mapping(cls: type, content: dict, where: str):
    """An instance of a dataclass from a mapping. ValueError names `where` and the key that is unknown, missing or of a wrong type."""
    known = {f.name: f for f in fields(cls)}
    for name in content:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            raise ValueError(f"{where}: unknown key {name}" + (f": did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"))
    values = {}
    for name, value in content.items():
        if known[name].type in (float, int) and isinstance(value, str):  # YAML reads 1e-5 as text
            try:
                value = known[name].type(value)
            except ValueError:
                raise ValueError(f"{where}: {name} is {value!r}; it must be a number") from None
        values[name] = value
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {str(error).replace(f'{cls.__name__}.__init__() ', '')}") from error


@dataclass(frozen=True)
class Request:
    """One question. `schema`: the JSON schema of an object that the answer must be; see `schema_fault` for what of it is understood."""

    messages: list[dict]
    schema: dict | None = None
    temperature: float | None = None  # default: the endpoint's
    seed: int | None = None
    max_tokens: int | None = None


@dataclass
class Reply:
    """`text` (and with a schema `data`), or `failure`: a short reason, the same for the same kind, with `detail`."""

    text: str = ""
    data: dict | None = None
    failure: str | None = None
    detail: str = ""
    cached: bool = False


@dataclass
class Counters:
    """What the requests of this process have cost."""

    requests: int = 0  # replies asked for
    cached: int = 0
    tries: int = 0  # sent
    failures: Counter = field(default_factory=Counter)  # by reason
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    models: Counter = field(default_factory=Counter)  # by the name that replies carry

    def line(self) -> str:
        failed = ", ".join(f"{count} {reason}" for reason, count in self.failures.most_common()) or "none"
        return (
            f"{self.requests} requests, {self.cached} from the cache, {self.tries} sent, failed: {failed}; "
            f"{self.tokens_in} tokens in, {self.tokens_out} out, cost {self.cost:.4f}"
        )


class Failure(Exception):
    """Why there is no answer yet. `again`: whether another try may help; `wait`: seconds that the server asks for."""

    def __init__(self, reason: str, detail: str, again: bool = False, wait: float | None = None):
        super().__init__(detail)
        self.reason, self.detail, self.again, self.wait = reason, detail, again, wait


class Endpoint:
    """One endpoint with its cache and counters, for the length of a process."""

    def __init__(self, config: EndpointConfig):
        try:
            import openai
        except ImportError as error:
            raise ImportError("an endpoint needs the package openai. Install it: bash env/setup.sh train --with openai") from error
        self.openai, self.config, self.counters = openai, config, Counters()
        self._key = config.key()
        self._log = AppendLog(config.cache) if config.cache else None
        self._cache: dict[str, dict] = {}
        self._told = 0
        self._not_before = 0.0  # monotonic: a server that is overloaded is left alone by all requests

    def complete(
        self, requests: list[Request], *, until: float = math.inf, each: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """One reply a request, in order. `until`: time.monotonic() at which all must be done. `each` is called with every reply as it comes."""
        if not requests:
            return []
        return asyncio.run(self._complete(requests, until, each))

    async def _complete(self, requests, until, each) -> list[Reply]:
        turn = asyncio.Semaphore(self.config.concurrency)
        async with self.openai.AsyncOpenAI(base_url=self.config.base_url, api_key=self._key, max_retries=0) as client:

            async def one(index: int, request: Request) -> Reply:
                async with turn:
                    reply = await self._reply(client, request, until)
                if each is not None:
                    each(index, reply)
                return reply

            # A task group: the first error that means wrong use ends the others.
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(index, request)) for index, request in enumerate(requests)]
            except BaseExceptionGroup as error:
                raise error.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _reply(self, client, request: Request, until: float) -> Reply:
        self.counters.requests += 1
        body = self._body(request)
        key = hashlib.sha256(json.dumps([self.config.base_url, body], sort_keys=True).encode()).hexdigest()
        if (known := self._look_up(key)) is not None:
            self.counters.cached += 1
            return Reply(known["text"], parse(known["text"], request.schema) if request.schema else None, cached=True)
        end = min(until, time.monotonic() + self.config.deadline)
        content_tries, pause = 0, FIRST_PAUSE
        for tried in range(1, self.config.max_tries + 1):
            try:
                text, data = await self._try(client, body, request, key, end)
                return Reply(text, data)
            except Failure as caught:
                failure = caught
            content_tries += failure.reason in CONTENT
            wait = pause * random.uniform(0.75, 1.25) if failure.wait is None else failure.wait
            if not failure.again or tried == self.config.max_tries or content_tries >= CONTENT_TRIES:
                break
            if time.monotonic() + wait >= end:
                failure.detail += f"; the deadline left no time for another try after {tried}"
                break
            self._tell(failure, tried, 0.0 if failure.reason in CONTENT else wait)
            if failure.reason == "rate_limit":
                self._not_before = max(self._not_before, time.monotonic() + wait)
            if failure.reason not in CONTENT:
                await asyncio.sleep(wait)
                pause = min(2 * pause, LONGEST_PAUSE)
        self.counters.failures[failure.reason] += 1
        log.debug("%s: %s", failure.reason, failure.detail)
        return Reply(failure=failure.reason, detail=failure.detail)

    def _tell(self, failure: Failure, tried: int, wait: float) -> None:
        """The first few tries that failed, so that somebody who waits knows for what."""
        self._told += 1
        if self._told > TOLD:
            return
        log.warning(
            "%s: try %d of %d failed (%s: %s); again in %.0f s%s", self.config.base_url, tried, self.config.max_tries, failure.reason,
            failure.detail, wait, "; further ones are counted, not shown" if self._told == TOLD else "",
        )  # fmt: skip

    def _body(self, request: Request) -> dict:
        config = self.config
        body = {
            "model": config.model,
            "messages": request.messages,
            "temperature": config.temperature if request.temperature is None else request.temperature,
            "max_completion_tokens": request.max_tokens or config.max_tokens,
        }
        seed = config.seed if request.seed is None else request.seed
        if seed is not None:
            body["seed"] = seed
        if request.schema is not None:
            form = {"name": "answer", "schema": request.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        if config.extra_body:
            body["extra_body"] = config.extra_body
        return body

    def _look_up(self, key: str) -> dict | None:
        if self._log is None:
            return None
        if key not in self._cache:
            self._cache |= {line["key"]: line for line in self._log.new() if "key" in line and "text" in line}
        return self._cache.get(key)

    async def _try(self, client, body: dict, request: Request, key: str, end: float) -> tuple[str, dict | None]:
        await asyncio.sleep(max(0.0, min(self._not_before, end) - time.monotonic()))
        seconds = min(self.config.attempt_seconds, end - time.monotonic())
        if seconds <= 0:
            raise Failure("timeout", "the deadline passed before it could be sent")
        self.counters.tries += 1
        openai = self.openai
        try:
            async with asyncio.timeout(seconds):
                answer = await client.chat.completions.create(**body, timeout=seconds)
        except (TimeoutError, openai.APITimeoutError):
            raise Failure("timeout", f"no answer after {seconds:.0f} s", again=True) from None
        except openai.APIStatusError as error:
            raise self._status_failure(error) from None
        except openai.APIConnectionError as error:
            raise Failure("connection", self._blank(f"{error} {error.__cause__ or ''}"), again=True) from None
        except (openai.OpenAIError, ValueError) as error:  # the body is not what the package can read
            raise Failure("server_error", self._blank(f"{type(error).__name__}: {error}"), again=True) from None
        return self._accept(answer, request, key)

    def _accept(self, answer, request: Request, key: str) -> tuple[str, dict | None]:
        """Counts what a reply cost, whether it is of use or not, checks it and keeps it."""
        usage, choices = getattr(answer, "usage", None), getattr(answer, "choices", None)
        tokens = [getattr(usage, name, None) or 0 for name in ("prompt_tokens", "completion_tokens")]
        self.counters.tokens_in += tokens[0]
        self.counters.tokens_out += tokens[1]
        self.counters.cost += sum(n * price / 1e6 for n, price in zip(tokens, self.config.price_per_million, strict=True))
        if not choices or getattr(choices[0], "message", None) is None:
            raise Failure("server_error", "the reply holds no answer", again=True)
        model = str(getattr(answer, "model", None))
        if model not in self.counters.models and self.counters.models:
            log.warning(
                "%s answers as %s now, before as %s: another version may judge differently",
                self.config.base_url,
                model,
                ", ".join(self.counters.models),
            )
        self.counters.models[model] += 1
        text = choices[0].message.content or ""
        if choices[0].finish_reason == "length":
            raise Failure("truncated", f"cut off after {tokens[1]} tokens: raise max_tokens")
        if choices[0].finish_reason == "content_filter" or getattr(choices[0].message, "refusal", None):
            raise Failure("refused", "the model refused to answer")
        if not text.strip():
            raise Failure("empty", "the answer is empty", again=True)
        data = parse(text, request.schema) if request.schema is not None else None
        if self._log is not None:
            line = {"key": key, "text": text, "model": model, "tokens": tokens, "time": int(time.time())}
            self._log.add(line)
            self._cache[key] = line
        return text, data

    def _status_failure(self, error) -> Exception:
        status, message = error.status_code, self._blank(str(error))
        if status in FATAL:
            return EndpointError(f"{self.config.base_url}, model {self.config.model}: {message} ({FATAL[status]})")
        if status == 429:
            return Failure("rate_limit", message, again=True, wait=retry_after(error.response.headers.get("retry-after")))
        if status >= 500 or status in (408, 409):
            return Failure("server_error", message, again=True, wait=retry_after(error.response.headers.get("retry-after")))
        return Failure("refused", message)

    def _blank(self, text: str) -> str:
        return text.replace(self._key, "***") if self.config.api_key_env else text


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header (a number or a date); None without one that can be read."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass  # a date
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def parse(text: str, schema: dict) -> dict:
    """The JSON object in an answer. What a reasoning model thought before it is cut off. Failure where there is none, or another one."""
    text = text.rpartition("</think>")[2].strip()
    try:
        data = json.loads(text)
    except ValueError as error:
        raise Failure("invalid_json", f"{error}: {text[:200]!r}", again=True) from None
    if fault := schema_fault(data, schema):
        raise Failure("schema", f"{fault}: {text[:200]!r}", again=True)
    return data


KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def schema_fault(value, schema: dict, where: str = "the answer") -> str | None:
    """What of `value` does not follow the schema; None if it does. Understands type, enum, minimum, maximum, minLength, properties,
    required, items, which is all that the schemas here use."""
    kind = schema["type"]
    if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return f"{where} is no {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} is none of {schema['enum']}"
    if kind in ("integer", "number") and not schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf):
        return f"{where} is {value}"
    if kind == "string" and len(value.strip()) < schema.get("minLength", 0):
        return f"{where} is too short"
    if kind == "array":
        return next((fault for i, item in enumerate(value) if (fault := schema_fault(item, schema["items"], f"{where}[{i}]"))), None)
    if kind == "object":
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{where} has no {', '.join(missing)}"
        parts = ((value[name], part, name) for name, part in schema.get("properties", {}).items() if name in value)
        return next((fault for item, part, name in parts if (fault := schema_fault(item, part, name))), None)
    return None
