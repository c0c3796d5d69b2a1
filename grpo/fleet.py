"""Requests to many vLLM servers: each goes to the server with the fewest tokens in flight; what a server that dies has not answered goes to
the others. One process, no collectives: `grpo/vllm_client.py` shares the prompts out over ranks and brings the answers together.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from common.server_http import Http, ServerError
from common.sync_server import Timeouts
from common.weight_sync import ServersLost
from grpo.rollout import Completion

log = logging.getLogger(__name__)


@dataclass
class Request:
    """One prompt with all its samples."""

    id: str
    prompt_ids: list[int]
    num_generations: int
    max_new_tokens: int
    params: dict
    tries: int = 0

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + self.num_generations * self.max_new_tokens


@dataclass
class Choice:
    """One sample as a server returned it."""

    index: int
    ids: list[int]
    logps: list[float]
    finish_reason: str
    versions: list[tuple[str, int, int]] | None  # None: the server does not say


class GenerationLost(ServersLost):
    """No server is left; nobody has waited for one yet."""

    waited = False

    def __init__(self, message: str, completions: list[Completion]):
        super().__init__(message)
        self.completions = completions


@dataclass
class Endpoint:
    """A server as one fetching rank sees it."""

    http: Http
    boot: list[str]
    labels: str | None  # how the labels of this trainer's weights begin; None: it does not say which weights a token came from
    tokens_route: bool  # has /inference/v1/generate
    in_flight: dict[str, int] = field(default_factory=dict)  # request id -> tokens
    usable: bool = True  # until the next sync
    why: str = ""

    @property
    def load(self) -> int:
        return sum(self.in_flight.values())

    def give_up(self, why: str) -> None:
        if self.usable:
            log.warning("%s is not used until the next sync: %s", self.http.url, why)
            self.usable, self.why = False, why
            self.http.interrupt()

    def sample(self, request: Request, timeout: float) -> list[Choice]:
        if self.tokens_route:
            # vLLM up to 0.26 takes output_kind from here, and by default leaves out answers that ended before the last one did.
            params = request.params | {"n": request.num_generations, "logprobs": 0, "output_kind": FINAL_ONLY}
            body = {"token_ids": request.prompt_ids, "sampling_params": params}
            answer = self.http.call("/inference/v1/generate", body, timeout=timeout)
            choices = [_token_choice(choice) for choice in answer["choices"]]
        else:
            body = {"prompt": request.prompt_ids, "n": request.num_generations, "logprobs": 1, "return_token_ids": True} | request.params
            answer = self.http.call("/v1/completions", body, timeout=timeout)
            choices = [_text_choice(choice) for choice in answer["choices"]]
        if sorted(choice.index for choice in choices) != list(range(request.num_generations)):
            raise ServerError(
                f"{self.http.url}: {len(choices)} answers to prompt {request.id}, {request.num_generations} were asked for", 500
            )
        if any(len(choice.ids) != len(choice.logps) for choice in choices):
            raise ServerError(f"{self.http.url}: an answer to prompt {request.id} has not one log-probability for each token", 500)
        return choices


FINAL_ONLY = 2  # of vLLM's RequestOutputKind
NO_LOGP = -9000.0  # vLLM writes -9999 where it has none


def _token_choice(choice: dict) -> Choice:
    spans = choice.get("weight_versions")
    content = (choice.get("logprobs") or {}).get("content") or []
    # Older versions write "token": "token_id:17".
    named = [entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:")) for entry in content]
    logps = [entry["logprob"] for entry in content]
    if named != choice["token_ids"] or any(logp is None or logp < NO_LOGP for logp in logps):
        raise ServerError("a server's log-probabilities are not those of the tokens that it sampled", 500)
    versions = None if spans is None else [(span["version"], span["start"], span["end"]) for span in spans]
    return Choice(choice["index"], choice["token_ids"], logps, choice["finish_reason"], versions)


def _text_choice(choice: dict) -> Choice:
    return Choice(choice["index"], choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"], None)


class Fleet:
    """Spreads requests over servers and collects the answers."""

    def __init__(self, endpoints: list[Endpoint], *, concurrency: int, request_seconds: float, timeouts: Timeouts, max_tries: int = 4):
        """concurrency: requests in flight at one server; request_seconds: deadline of one request."""
        self.endpoints, self.concurrency, self.max_tries = endpoints, concurrency, max_tries
        self.request_seconds, self.timeouts = request_seconds, timeouts
        self._flights: dict[Future, tuple[Request, Endpoint, int]] = {}
        self._pool = ThreadPoolExecutor(max(1, concurrency * len(endpoints)))

    def run(
        self, requests: list[Request], version: Callable[[], int], oldest: int, poll: Callable[[], bool]
    ) -> tuple[list[Completion], list[Request]]:
        """(completions, requests without an answer). `version()`: the weights that were pushed last; tokens may come from `oldest` up to it.

        ValueError when a server refuses a request as such (a prompt that is too long)."""
        pending, completions, stopped = deque(requests), [], False
        watch = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(watch,), daemon=True)
        watcher.start()
        try:
            while pending or self._flights:
                if not stopped and poll():
                    stopped = True
                    for endpoint in self.endpoints:
                        endpoint.http.interrupt()
                if not stopped:
                    self._submit(pending, version)
                if not self._flights:
                    break  # no server left, or stopped
                finished, _ = wait(self._flights, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in finished:
                    request, endpoint, asked = self._flights.pop(future)
                    del endpoint.in_flight[request.id]
                    answer = self._judge(future, request, endpoint, asked, version(), oldest, stopped)
                    if answer is None:
                        pending.appendleft(request)
                    else:
                        completions += answer
        finally:
            watch.set()
            for endpoint in self.endpoints if self._flights else ():
                endpoint.http.interrupt()
            self._pool.shutdown(wait=not self._flights, cancel_futures=True)
            watcher.join()
        return completions, list(pending)

    def _submit(self, pending: deque, version: Callable[[], int]) -> None:
        while pending:
            free = [endpoint for endpoint in self.endpoints if endpoint.usable and len(endpoint.in_flight) < self.concurrency]
            if not free:
                return
            endpoint = min(free, key=lambda endpoint: endpoint.load)
            request = pending.popleft()
            endpoint.in_flight[request.id] = request.tokens
            self._flights[self._pool.submit(endpoint.sample, request, self.request_seconds)] = (request, endpoint, version())

    def _judge(self, future, request, endpoint, asked, version, oldest, stopped) -> list[Completion] | None:
        """The completions of an answer that may be used, else None."""
        try:
            choices = future.result()
        except ServerError as error:
            if stopped:
                return None
            if error.status is None:  # whoever answers at this address later may hold other weights
                endpoint.give_up(str(error))
            elif error.refused:
                raise ValueError(f"prompt {request.id} was refused: {error}") from None
            elif endpoint.usable:
                log.warning("prompt %s: %s", request.id, error)
                request.tries += 1
            if request.tries >= self.max_tries:
                raise RuntimeError(f"prompt {request.id} failed {request.tries} times, last: {error}") from None
            return None
        completions = []
        for choice in choices:
            if choice.finish_reason == "abort" or choice.finish_reason not in ("stop", "length"):
                return None  # ended by a pause: sampled again from the start
            spans = _spans(choice, endpoint, asked, version)
            if spans is None:
                return None
            if any(not oldest <= number <= version for number, _, _ in spans):
                labels = ", ".join(sorted({label for label, _, _ in choice.versions}))
                endpoint.give_up(
                    f"tokens came from weights {labels}, expected {oldest} to {version}: it was restarted, or another trainer uses it"
                )
                return None
            completions.append(Completion(request.id, choice.index, choice.ids, choice.logps, choice.finish_reason, spans))
        return completions

    def _watch(self, done: threading.Event) -> None:
        """Gives a server up that does not answer: a hung one keeps its connections open, and requests would wait for their deadline."""
        failures: dict[str, int] = {}
        while not done.wait(self.timeouts.health):
            for endpoint in self.endpoints:
                if not (endpoint.usable and endpoint.in_flight):
                    continue
                try:
                    Http(endpoint.http.url).call("/health", method="GET", timeout=self.timeouts.health)
                    failures[endpoint.http.url] = 0
                except ServerError as error:
                    failures[endpoint.http.url] = failures.get(endpoint.http.url, 0) + 1
                    if failures[endpoint.http.url] >= 3 or error.status is not None:
                        endpoint.give_up(f"health: {error}")


def _spans(choice: Choice, endpoint: Endpoint, asked: int, version: int) -> list[tuple[int, int, int]] | None:
    """(version, start, end) over all tokens; None where nobody can tell."""
    if choice.versions is None or endpoint.labels is None:
        # Such a server ends what is in flight when it is paused: with no sync in between, all tokens are of one version.
        return [(version, 0, len(choice.ids))] if asked == version else None
    prefix = endpoint.labels

    def number(label: str) -> int:
        digits = label.removeprefix(prefix)
        return int(digits) if label.startswith(prefix) and digits.isascii() and digits.isdigit() else -1

    return [(number(label), start, end) for label, start, end in choice.versions]
