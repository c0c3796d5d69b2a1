"""Answers to many questions, from a model folder in this process or from vLLM servers; what is made is on the disk at once.

    source = Servers(["http://node7:8000"])              # or LocalModel("MODEL")
    answers = generate(source, [Ask("q1", [{"role": "user", "content": "..."}])], Sampling(samples=8, temperature=1.0), "answers.jsonl")
    answers["q1"][0]["completion"]

`answers.jsonl` only grows: id, sample, prompt_hash, completion, tokens, finish_reason (and `reasoning` where a server parts it from the
answer). `answers.jsonl.meta.json` says which model and sampling made it. The same call after a kill makes what is missing, with the same
seeds; a prompt that has changed meanwhile is answered anew; another model or sampling is refused.
"""

import argparse
import hashlib
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from common import checkpoint
from common.chat import Chat, normalise
from common.jsonl import AppendLog, read_json_object, write_json
from common.server_http import Http, ServerError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ask:
    """A question: `prompt` is messages (put through the chat template), text or token ids (both taken as they are)."""

    id: str
    prompt: list[dict] | str | list[int]
    tools: list | None = None
    chat_template_kwargs: dict = field(default_factory=dict)

    @property
    def prompt_hash(self) -> str:
        content = [self.prompt, self.tools, self.chat_template_kwargs]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def is_ids(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], int)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. temperature 0: greedy."""

    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0

    def __post_init__(self):
        if self.samples < 1 or self.max_new_tokens < 1 or not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise ValueError("samples and max_new_tokens must be at least 1, temperature a number from 0 on, top_p above 0 and at most 1")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"{self.samples} samples at temperature 0 would all be the same answer: set a temperature")


Pair = tuple[Ask, int]  # question, number of the sample


def generate(
    source: "LocalModel | Servers", asks: list[Ask], sampling: Sampling, output: str | Path, *, progress: bool = True
) -> dict[str, list[dict]]:
    """{id: its lines, by sample}: `sampling.samples` answers to each question, of which those that `output` holds already are not made again.

    ValueError where `output` was made by another model or sampling, where two questions have one id, or where a question is refused.
    """
    wanted = {ask.id: ask for ask in asks}
    if len(wanted) != len(asks):
        raise ValueError(f"two questions have the id {Counter(ask.id for ask in asks).most_common(1)[0][0]!r}")
    _check_meta(Path(output), source.identity(), sampling)
    with AppendLog(output) as answers:
        done: dict[tuple[str, int], dict] = {}
        changed, useless = set(), 0
        for line in answers.new():
            if not is_answer(line):
                useless += 1
                continue
            ask = wanted.get(line["id"])
            if ask is not None and line["prompt_hash"] != ask.prompt_hash:
                changed.add(ask.id)
            elif ask is not None and line["sample"] < sampling.samples:
                done[ask.id, line["sample"]] = line
        if useless:
            log.warning("%s: skipped %d lines without id, sample, prompt_hash and completion: no answers of this program", output, useless)
        if again := [id for id in changed if any((id, s) not in done for s in range(sampling.samples))]:
            log.warning("%s: the prompts of %d ids have changed since: they are answered anew", output, len(again))
        total = len(asks) * sampling.samples
        if done:
            log.info("%s: %d of %d answers are there already", output, len(done), total)
        with tqdm(total=total, initial=len(done), desc="answers", unit="answer", disable=not progress) as bar:
            for batch in source.answers(asks, sampling, done.keys()) if len(done) < total else ():
                lines = []
                for (ask, sample), answer in batch:
                    lines.append({"id": ask.id, "sample": sample, "prompt_hash": ask.prompt_hash} | answer)
                    done[ask.id, sample] = lines[-1]
                answers.add(*lines)
                bar.update(len(lines))
    return {ask.id: [done[ask.id, sample] for sample in range(sampling.samples)] for ask in asks}


def is_answer(line: dict) -> bool:
    kinds = {"id": str, "sample": int, "prompt_hash": str, "completion": str}
    return all(isinstance(line.get(name), kind) for name, kind in kinds.items())


def outputs(output: str | Path) -> list[Path]:
    """What a measurement or an evaluation with the result `output` (*.jsonl) writes: that, the answers, and who made each."""
    made = Path(output).with_suffix(".answers.jsonl")
    return [Path(output), meta_path(output), made, meta_path(made)]


def meta_path(output: str | Path) -> Path:
    return Path(f"{output}.meta.json")


def read_meta(output: str | Path) -> dict:
    """{model, fingerprint, sampling} of what made `output`. ValueError names the file beside it that does not say so."""
    content = read_json_object(meta_path(output))
    if not isinstance(content.get("model"), str) or not isinstance(content.get("sampling"), dict) or "samples" not in content["sampling"]:
        raise ValueError(f"{meta_path(output)} does not say which model and sampling made {output}: delete both, or give another output")
    return content


def _check_meta(output: Path, identity: dict, sampling: Sampling) -> None:
    """Writes who makes `output`, or compares with who made it. The number of samples may differ: fewer are used, more are added."""
    meta = identity | {"sampling": asdict(sampling)}
    path = meta_path(output)
    if not path.exists():
        if output.exists() and output.stat().st_size:
            raise ValueError(f"{output} is there but not {path.name}, which says what made it: give another output")
        write_json(path, meta)
        return
    before = read_meta(output)
    flat = [{**m, **m["sampling"], "sampling": None, "samples": None, "model": None} for m in (before, meta)]
    if flat[0] != flat[1]:
        different = [
            f"{key} {flat[0].get(key)!r}, now {flat[1].get(key)!r}"
            for key in sorted({*flat[0], *flat[1]})
            if flat[0].get(key) != flat[1].get(key)
        ]
        raise ValueError(
            f"{output} was made by {before['model']} with {'; '.join(different)}. Give another output, or delete {output} and {path.name}."
        )
    if before["sampling"]["samples"] < sampling.samples:
        write_json(path, meta)


def _seed(*parts) -> int:
    """Of one answer: the same whatever else is asked, and after a kill."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:6], "big")


# ---- prompts as ids ------------------------------------------------------------------------------------------------------------------


class Template:
    """Turns questions into ids with a checkpoint's tokenizer and chat template."""

    def __init__(self, model: str | Path):
        from common.run import load_tokenizer

        self.tokenizer = load_tokenizer(str(model))
        self.chat = Chat(self.tokenizer)
        self.stop_ids = sorted(self.chat.stops.values())
        if not self.stop_ids:
            raise ValueError(f"{model}: neither tokenizer nor generation_config.json names a token that ends an answer")
        pad = self.tokenizer.pad_token_id
        self.pad_id = self.stop_ids[0] if pad is None else pad

    def ids(self, ask: Ask) -> list[int]:
        """ValueError names the question."""
        if ask.is_ids:
            return list(ask.prompt)
        if isinstance(ask.prompt, str):
            return [*self.chat.bos, *self.tokenizer(ask.prompt, add_special_tokens=False)["input_ids"]]
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: put one beside it (chat_template.jinja), or give prompts as text")
        try:
            messages = [normalise(message, index, self.chat.stops) for index, message in enumerate(ask.prompt)]
            text = self.tokenizer.apply_chat_template(
                messages, tools=ask.tools or None, tokenize=False, add_generation_prompt=True, **ask.chat_template_kwargs
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"question {ask.id}: the chat template cannot render it: {error}") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


# ---- in this process -----------------------------------------------------------------------------------------------------------------


class LocalModel:
    """A checkpoint folder that transformers' own `generate` runs in this process, over all visible GPUs, else on the CPU."""

    def __init__(self, path: str | Path, *, batch_size: int = 16, dtype: str = "auto"):
        """dtype: auto (the checkpoint's), bfloat16, float32."""
        self.path, self.batch_size, self.dtype = str(path), batch_size, dtype
        self.template = Template(path)

    def identity(self) -> dict:
        return {"model": self.path, "fingerprint": checkpoint.fingerprint(self.path)}

    def _load(self):
        import torch
        from transformers import AutoModelForCausalLM

        place = {"device_map": "auto"} if torch.cuda.is_available() else {}
        return AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype, attn_implementation="sdpa", **place).eval()

    def answers(self, asks: list[Ask], sampling: Sampling, done) -> Iterator[list[tuple[Pair, dict]]]:
        """Batches are the same whatever is there already, and each has its own seed: a resumed run draws what one without a stop draws."""
        import torch

        from common.decode import sample_batch

        prompts = {ask.id: self.template.ids(ask) for ask in asks}
        order = sorted(asks, key=lambda ask: (-len(prompts[ask.id]), ask.id))
        pairs = [(ask, sample) for ask in order for sample in range(sampling.samples)]
        model = self._load()
        for first in range(0, len(pairs), self.batch_size):
            batch = pairs[first : first + self.batch_size]
            if all((ask.id, sample) in done for ask, sample in batch):
                continue
            with torch.random.fork_rng():
                torch.manual_seed(_seed(sampling.seed, *(f"{ask.id}#{sample}" for ask, sample in batch)))
                drawn = sample_batch(
                    model, [prompts[ask.id] for ask, _ in batch], self.template.stop_ids, self.template.pad_id,
                    temperature=sampling.temperature, top_p=sampling.top_p, max_new_tokens=sampling.max_new_tokens, poll=lambda: False,
                )  # fmt: skip
            results = [
                (pair, {"completion": self.template.text(ids), "tokens": len(ids), "finish_reason": reason})
                for pair, (ids, _, reason) in zip(batch, drawn, strict=True)
            ]
            yield [(pair, answer) for pair, answer in results if (pair[0].id, pair[1]) not in done]


# ---- servers -------------------------------------------------------------------------------------------------------------------------


class Servers:
    """vLLM servers of one model. Without `tokenizer` (a checkpoint folder) they put messages through their own chat template."""

    MAX_TRIES = 4  # of one answer
    CALL_SECONDS = 10.0
    LOOK_SECONDS = 20.0  # between looks whether servers that work are still there

    def __init__(
        self,
        urls: list[str],
        *,
        tokenizer: str | Path | None = None,
        concurrency: int = 64,
        request_minutes: float = 60.0,
        wait_minutes: float = 10.0,
    ):
        """concurrency: answers in flight at one server. request_minutes: deadline of one. wait_minutes: how long to wait when no server answers."""
        self.servers = [Http(url.rstrip("/").removesuffix("/v1")) for url in urls]
        if not self.servers:
            raise ValueError("give the URL of a server")
        self.concurrency, self.request_seconds, self.wait_seconds = concurrency, request_minutes * 60, wait_minutes * 60
        self.tokenizer = tokenizer
        self.template = Template(tokenizer) if tokenizer else None
        self._model: str | None = None

    def identity(self) -> dict:
        """Name and fingerprint of the model that all servers serve. ValueError where they differ or do not answer."""
        found = {}
        for server in self.servers:
            try:
                card = server.call("/v1/models", method="GET", timeout=self.CALL_SECONDS)["data"][0]
            except (ServerError, KeyError, IndexError, TypeError) as error:
                raise ValueError(f"{server.url} is no OpenAI-compatible server that answers: {error}") from None
            found[server.url] = (card["id"], card.get("root") or card["id"], _pushed_version(server))
        if len(set(found.values())) != 1:
            raise ValueError(f"the servers do not serve the same model: {', '.join(f'{url} {what[0]}' for url, what in found.items())}")
        self._model, root, pushed = next(iter(found.values()))
        folder = next((str(path) for path in (root, self.tokenizer) if path and (Path(path) / "config.json").is_file()), None)
        fingerprint = checkpoint.fingerprint(folder) if folder else f"served as {root}"
        if pushed is not None:  # weights that a trainer has sent: no folder holds them
            fingerprint = f"{fingerprint} + weights {pushed}"
        return {"model": root, "fingerprint": fingerprint}

    def answers(self, asks: list[Ask], sampling: Sampling, done) -> Iterator[list[tuple[Pair, dict]]]:
        """One answer a request, the least busy server first. RuntimeError when no server has answered for `wait_minutes`."""
        bodies = {ask.id: self._body(ask, sampling) for ask in asks}
        waiting = deque((ask, sample) for ask in asks for sample in range(sampling.samples) if (ask.id, sample) not in done)
        tries: dict[tuple[str, int], int] = {}
        down: dict[Http, float] = {}  # server -> when to try it again
        flights: dict[Future, tuple[Pair, Http]] = {}
        heard = time.monotonic()  # from any server
        looked, silent = time.monotonic(), dict.fromkeys(self.servers, 0)  # a server that hangs keeps its connections open
        end: Exception | None = None  # why to stop when what is in flight is done
        pool = ThreadPoolExecutor(self.concurrency * len(self.servers))
        try:
            while (waiting and end is None) or flights:
                for server in [server for server, when in down.items() if time.monotonic() >= when]:
                    if self._healthy(server):
                        del down[server]
                    else:
                        down[server] = time.monotonic() + 5
                if end is None:
                    self._submit(pool, waiting, flights, down, bodies, sampling)
                if not flights:
                    if time.monotonic() > heard + self.wait_seconds:
                        raise RuntimeError(
                            f"no server has answered for {self.wait_seconds / 60:g} minutes. What was made is kept; start again to go on."
                        )
                    time.sleep(0.5)
                    continue
                if time.monotonic() > looked + self.LOOK_SECONDS:
                    for server in {server for _, server in flights.values()}:
                        silent[server] = 0 if self._healthy(server) else silent[server] + 1
                        if silent[server] >= 3:
                            server.interrupt()
                    looked = time.monotonic()
                finished, _ = wait(flights, timeout=1.0, return_when=FIRST_COMPLETED)
                batch = []
                for future in finished:
                    pair, server = flights.pop(future)
                    try:
                        batch.append((pair, future.result()))
                        heard = time.monotonic()
                    except ServerError as error:
                        end = end or self._failed(error, pair, server, tries, down)
                        waiting.appendleft(pair)
                if batch:
                    yield batch
            if end is not None:
                raise end
        finally:
            for server in self.servers:
                server.interrupt()
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool, waiting, flights, down, bodies, sampling) -> None:
        load = {server: sum(at is server for _, at in flights.values()) for server in self.servers if server not in down}
        while waiting and load:
            server = min(load, key=load.get)
            if load[server] >= self.concurrency:
                return
            ask, sample = pair = waiting.popleft()
            load[server] += 1
            body = bodies[ask.id] | {"seed": _seed(sampling.seed, ask.id, sample)}
            flights[pool.submit(self._ask, server, body)] = (pair, server)

    def _failed(self, error: ServerError, pair: Pair, server: Http, tries: dict, down: dict) -> Exception | None:
        """What ends the whole, where trying again would not help."""
        if error.refused:
            return ValueError(f"question {pair[0].id} was refused: {error}")
        tries[pair[0].id, pair[1]] = tried = tries.get((pair[0].id, pair[1]), 0) + 1
        if tried >= self.MAX_TRIES:
            return RuntimeError(f"question {pair[0].id} failed {tried} times, last: {error}. What was made is kept.")
        if error.status is None and server not in down:
            log.warning("%s is left out until it answers again: %s", server.url, error)
        elif error.status is not None:
            log.warning("question %s, try %d: %s", pair[0].id, tried, error)
        down[server] = time.monotonic() + 1
        return None

    def _healthy(self, server: Http) -> bool:
        try:
            server.call("/health", method="GET", timeout=self.CALL_SECONDS)
        except ServerError as error:
            return error.refused  # a server without that route
        return True

    def _body(self, ask: Ask, sampling: Sampling) -> dict:
        body = {
            "model": self._model, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            # A server fills what is not said from the model's generation_config.json.
            "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        if self.template is not None:
            return body | {"prompt": self.template.ids(ask), "stop_token_ids": self.template.stop_ids, "return_token_ids": True}
        if isinstance(ask.prompt, str) or ask.is_ids:
            return body | {"prompt": ask.prompt}
        return body | {"messages": ask.prompt, "tools": ask.tools or None, "chat_template_kwargs": ask.chat_template_kwargs}

    def _ask(self, server: Http, body: dict) -> dict:
        route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply = server.call(route, body, timeout=self.request_seconds)
        try:
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            reason = choice["finish_reason"]
            if reason not in ("stop", "length", "tool_calls"):
                raise ServerError(f"{server.url}: the answer ended with {reason!r}", 503)  # a pause or an abort: asked again
            answer = {"tokens": usage.get("completion_tokens"), "finish_reason": "length" if reason == "length" else "stop"}
            if "messages" in body:
                message = choice["message"]
                reasoning = message.get("reasoning_content") or message.get("reasoning")
                return {"completion": message.get("content") or ""} | answer | ({"reasoning": reasoning} if reasoning else {})
            ids = choice.get("token_ids")
            return {"completion": choice["text"] if ids is None or self.template is None else self.template.text(ids)} | answer
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(f"{server.url}{route}: not the answer of a completion: {error!r}", 500) from None


def _pushed_version(server: Http) -> int | None:
    """Optimizer steps behind weights that a trainer has sent to this server; None for a server that holds what it loaded."""
    try:
        reply = server.call("/collective_rpc", {"method": "sync_describe"}, timeout=Servers.CALL_SECONDS)
        return reply["results"][0].get("version")
    except (ServerError, KeyError, IndexError, TypeError, AttributeError) as error:
        log.debug("%s takes no weights from trainers: %s", server.url, error)
        return None


# ---- command line --------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, **defaults) -> None:
    """Options of a source and of sampling; `defaults` by name."""
    parser.add_argument(
        "--model", help="checkpoint folder; with --server: whose tokenizer and chat template are used instead of the server's"
    )
    parser.add_argument("--server", nargs="+", default=[], metavar="URL", help="vLLM servers of one model, http://host:8000")
    parser.add_argument("--batch_size", type=int, default=16, help="answers generated at a time without servers")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="weights' dtype without servers")
    parser.add_argument("--concurrency", type=int, default=64, help="answers in flight at one server")
    parser.add_argument("--request_minutes", type=float, default=60.0, help="deadline of one answer of a server")
    parser.add_argument("--wait_minutes", type=float, default=10.0, help="how long to wait for a server when none answers")
    texts = {"samples": "answers to each question", "temperature": "0: greedy", "top_p": "", "max_new_tokens": "", "seed": ""}
    for name, text in texts.items():
        default = defaults.get(name, getattr(Sampling, name))
        parser.add_argument(f"--{name}", type=type(getattr(Sampling, name)), default=default, help=f"{text} (default {default})".strip())


def template_kwargs(text: str | None) -> dict:
    """Option `chat_template_kwargs`. ValueError where it is no JSON object."""
    try:
        kwargs = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"chat_template_kwargs is not JSON ({error}): {text}") from error
    if not isinstance(kwargs, dict):
        raise ValueError(f"chat_template_kwargs must be a JSON object: {text}")
    return kwargs


def source_of(args: argparse.Namespace) -> "LocalModel | Servers":
    if args.batch_size < 1 or args.concurrency < 1 or not args.request_minutes > 0 or not args.wait_minutes >= 0:
        raise ValueError("batch_size, concurrency and request_minutes must be positive, wait_minutes at least 0")
    if args.server:
        return Servers(
            args.server,
            tokenizer=args.model,
            concurrency=args.concurrency,
            request_minutes=args.request_minutes,
            wait_minutes=args.wait_minutes,
        )
    if not args.model:
        raise ValueError("give --model FOLDER or --server URL")
    return LocalModel(args.model, batch_size=args.batch_size, dtype=args.dtype)


def sampling_of(args: argparse.Namespace) -> Sampling:
    return Sampling(args.samples, args.temperature, args.top_p, args.max_new_tokens, args.seed)
