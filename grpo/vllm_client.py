"""Rollouts through vLLM servers: prompts as ids in, sampled ids with log-probabilities and weight versions out.

    backend = VllmBackend(["http://node7:8000"], model)     # on every rank
    backend.start(); backend.sync(0)
    completions = backend.generate(prompts, 8, temperature=1.0, ...)

One rank of each node fetches its share of the prompts. A request goes to the server with the fewest tokens in flight. What a server that dies
has not answered goes to the others; an answer is taken once, and only if every token of it was sampled with the weights that were asked
for. `sync` pushes the weights (common/weight_sync.py) and tests them: a fixed probe is sampled again and compared with what it was before,
and with the trainer's own log-probabilities.
"""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from common import dist
from common.data import PackedBatch
from common.fsdp import ShardedModel
from common.logprobs import NO_TARGET
from common.run import Model
from common.server_http import Http, ServerError
from common.sync_server import START, SyncError, Timeouts, UnusableServer
from common.weight_sync import Push, ServersLost, WeightSync
from grpo.fleet import Choice, Endpoint, Fleet, GenerationLost, Request
from grpo.rollout import Completion, Prompt, SyncReport

log = logging.getLogger(__name__)

PROBE_PROMPTS, PROBE_PROMPT_TOKENS, PROBE_TOKENS = 8, 24, 16  # a server takes PROMPTS x TOKENS steps, of which nothing hides the time
# Mean |difference| of log-probabilities on sampled tokens between server and trainer. bf16 noise is 0.001 to 0.09, wrong weights 0.2 to 5.
START_LIMIT = 0.25
NOISE_FACTOR, NOISE_FLOOR = 3.0, 0.015  # below the floor the noise of the first sync says little about later ones
# Above this share of changed bf16 elements (experts left out, which few tokens reach) an unchanged probe is wrong, not only unlucky.
SURELY_VISIBLE = 0.01


# ----------------------------------------------------------------------------------------------------------------------------------
# The back-end


def stop_token_ids(model: Model) -> list[int]:
    """What ends an answer, from the model's own generation_config.json, else its config.json."""
    path = Path(model.source.path) / "generation_config.json"
    ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    if ids is None:
        ids = model.sharded.config.get_text_config().eos_token_id
    if ids is None:
        raise ValueError(f"{path.parent}: neither generation_config.json nor config.json has eos_token_id: no answer would ever end")
    return sorted(ids) if isinstance(ids, list) else [ids]


class VllmBackend:
    """The RolloutBackend of grpo/rollout.py over vLLM servers."""

    def __init__(
        self,
        servers: list[str],
        model: Model,
        *,
        rollout_lag: int = 0,
        probe_prompts: list[list[int]] | None = None,
        address: str | None = None,
        concurrency: int = 64,
        request_minutes: float = 60.0,
        wait_minutes: float = 10.0,
        timeouts: Timeouts | None = None,
    ):
        """probe_prompts: prompts like those of the run (ids); random ones are used without. address: of rank 0's host, as servers see it.
        wait_minutes: how long to wait for a server when none is left. concurrency: requests of one node in flight at one server."""
        self.model, self.rollout_lag = model, rollout_lag
        self.urls, self.timeouts = list(servers), timeouts or Timeouts()
        self.address, self.concurrency, self.request_seconds, self.wait_seconds = (
            address,
            concurrency,
            request_minutes * 60,
            wait_minutes * 60,
        )
        self.stop_ids = stop_token_ids(model)
        self.probe = Probe(model.sharded, probe_prompts)
        self.weights: WeightSync | None = None
        self.version = -1
        self.oldest = 0  # weights that a token in flight may still come from
        self._push = Push()
        self._routes: dict[str, bool] = {}
        self._baseline: float | None = None
        self._probed: dict[str, list[Choice]] = {}

    def start(self) -> None:
        self.weights = WeightSync(
            self.model.sharded, self.urls, address=self.address, timeouts=self.timeouts, wait_seconds=self.wait_seconds
        )

    def close(self) -> None:
        if self.weights is not None:
            self.weights.close()

    # -- weights -------------------------------------------------------------------------------------------------------------------

    def sync(self, version: int) -> SyncReport:
        """See RolloutBackend. Also raises ServersLost when no server answered for wait_minutes: save and stop then."""
        started = time.perf_counter()
        push = self.weights.push(version)
        self._accept(push, version)
        checks, problem = self._check(push)
        if problem is not None:
            log.warning("%s. Everything is sent once more.", problem)
            first, push = push, self.weights.push(version, full=True)
            push.changed, push.changed_any = first.changed, first.changed_any  # since the last version, not since the first try
            self._accept(push, version)
            checks, problem = self._check(push, again=True)
            if problem is not None:
                self._probed = {}  # nobody knows what the servers hold now
                raise SyncError(f"{problem}, also after everything was sent again")
        checks |= push.checks | {"changed_share": push.changed, "lost": push.lost, "restarted": push.restarted}
        log.info(
            "weights %d: %.3f GB to %d servers in %.2f s; %s", version, push.bytes / 1e9, len(push.servers), push.seconds, _figures(checks)
        )
        return SyncReport(time.perf_counter() - started, push.bytes, push.tensors, checks)

    def _accept(self, push: Push, version: int) -> None:
        self.oldest = max(0, self.version) if self.rollout_lag else version
        self.version, self._push = version, push
        problem = None
        if dist.is_main():
            for url, info in push.info.items():
                if info["logprobs_mode"] != "processed_logprobs":
                    problem = f"{url} gives {info['logprobs_mode']}: log-probabilities before temperature. Start it with: {START}"
                if url not in self._routes:
                    self._routes[url] = self._has_tokens_route(url)
        problem, self._routes = dist.broadcast_object((problem, self._routes))
        if problem:
            raise UnusableServer(problem)

    def _has_tokens_route(self, url: str) -> bool:
        try:
            Http(url).call("/inference/v1/generate", {}, timeout=self.timeouts.call)
        except ServerError as error:
            if error.status is None:
                raise
            return error.status in (400, 422)  # it knows the route and misses the fields
        return True

    def _endpoints(self) -> list[Endpoint]:
        push = self._push
        return [Endpoint(Http(url), push.boots[url], push.info[url]["labels"], self._routes[url]) for url in push.servers]

    def _check(self, push: Push, again: bool = False) -> tuple[dict, str | None]:
        """The probe on every server: (figures, what is wrong or None). A collective."""
        sampled, failures, refusal = {}, {}, None
        if dist.is_main():
            with ThreadPoolExecutor(len(push.servers)) as pool:
                asked = {e.http.url: pool.submit(self.probe.sample, e, self.timeouts.call) for e in self._endpoints()}
            for url, future in asked.items():
                try:
                    sampled[url] = future.result()
                except ServerError as error:  # gone since the push: its prompts go to the others, the next sync sees to it
                    failures[url] = str(error)
                    if error.refused:  # then it would refuse every prompt, and no weights mend that
                        refusal = f"{error}\nThis server refuses prompts of ids. Start it with: {START}"
        sampled, failures, refusal = dist.broadcast_object((sampled, failures, refusal))
        if refusal:
            raise UnusableServer(refusal)
        push.servers = [url for url in push.servers if url in sampled]  # prompts go to those whose weights were tested
        if not sampled:
            return {}, f"no server answered the probe: {'; '.join(failures.values())}"
        figures, problem = {}, None
        for url, mean, largest, count in self.probe.compare(sampled):
            before = None if url in push.restarted else self._probed.get(url)
            same = before is not None and [(c.ids, c.logps) for c in before] == [(c.ids, c.logps) for c in sampled[url]]
            limit = START_LIMIT if self._baseline is None else NOISE_FACTOR * max(self._baseline, NOISE_FLOOR)
            figures[f"probe {url}"] = {"logp_diff_mean": mean, "logp_diff_max": largest, "limit": limit, "tokens": count, "unchanged": same}
            if not mean <= limit:
                problem = f"{url}: log-probabilities of {count} sampled tokens differ from the trainer's by {mean:.4f} on average, allowed {limit:.4f}"
            if same and push.changed_any:
                text = f"{url} answers the probe exactly as before, although {100 * push.changed:.2g} % of the weights sent (experts left out) changed"
                if not again or push.changed > SURELY_VISIBLE:
                    problem = problem or text
                else:
                    log.warning("%s; so few that it may be true", text)
        if problem is None:
            means = [figure["logp_diff_mean"] for figure in figures.values()]
            self._baseline = statistics.mean(means) if self._baseline is None else self._baseline
            self._probed = sampled
        return figures | {f"probe {url}": why for url, why in failures.items()}, problem

    # -- generation ----------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[Prompt],
        num_generations: int,
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        poll: Callable[[], bool],
    ) -> list[Completion]:
        """See RolloutBackend. Rank 0 of each node returns its node's share, other ranks nothing.

        With rollout_lag 0 a rollout that lost its last server waits for one, gives it the weights and goes on; with 1 (called from a thread,
        no collective may run) GenerationLost carries what was finished: sync, then ask for the rest.
        """
        self._check_lengths(prompts, max_new_tokens)
        share = prompts[dist.node() :: dist.num_nodes()] if dist.local_rank() == 0 else []
        params = {
            "max_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "stop_token_ids": self.stop_ids,
            # A server fills what is not said from the model's generation_config.json, whose top_k, for one, would bend the distribution.
            "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        requests = [
            Request(prompt.id, list(prompt.prompt_ids), num_generations, max_new_tokens, params | {"seed": _seed(seed, prompt.id)})
            for prompt in share
        ]
        completions: list[Completion] = []
        while True:
            stopped = False

            def asked_to_stop() -> bool:
                nonlocal stopped
                stopped = stopped or poll()
                return stopped

            endpoints = self._endpoints()
            fleet = Fleet(endpoints, concurrency=self.concurrency, request_seconds=self.request_seconds, timeouts=self.timeouts)
            finished, missing = fleet.run(requests, lambda: self.version, self.oldest, asked_to_stop)
            completions += finished
            lost = bool(missing) and not stopped
            if self.rollout_lag:
                if lost:
                    raise GenerationLost(_losses(endpoints), completions)
                return completions
            if not any(dist.gather_objects(lost)):
                return completions
            log.warning("%d prompts are unanswered: %s", len(missing), _losses(endpoints))
            requests = missing
            try:
                self.sync(self.version)
            except ServersLost as error:
                error.completions = completions
                raise

    def _check_lengths(self, prompts: list[Prompt], max_new_tokens: int) -> None:
        limits = [info["max_model_len"] for info in self._push.info.values()]
        longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids), default=None)
        if longest is not None and limits and len(longest.prompt_ids) + max_new_tokens > min(limits):
            raise ValueError(
                f"prompt {longest.id} has {len(longest.prompt_ids)} tokens; with {max_new_tokens} new ones that is more than a server's "
                f"max_model_len {min(limits)}. Raise --max-model-len there, or drop long prompts."
            )


def _figures(checks: dict) -> str:
    means = [check["logp_diff_mean"] for name, check in checks.items() if name.startswith("probe ") and isinstance(check, dict)]
    return f"log-probabilities differ from the trainer's by {max(means):.4f} on average" if means else "no probe"


def _losses(endpoints: list[Endpoint]) -> str:
    return "; ".join(f"{endpoint.http.url}: {endpoint.why}" for endpoint in endpoints if endpoint.why) or "no server holds the weights"


def _seed(seed: int, prompt_id: str) -> int:
    """Of one request: the same for the same prompt and seed, whatever else is asked and whichever server answers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {prompt_id}".encode()).digest()[:6], "big")


# ----------------------------------------------------------------------------------------------------------------------------------
# The probe


class Probe:
    """Fixed prompts, sampled with fixed seeds after every sync."""

    def __init__(self, model: ShardedModel, prompts: list[list[int]] | None = None):
        self.model = model
        if prompts is None:
            generator = torch.Generator().manual_seed(0)
            vocabulary = model.config.get_text_config().vocab_size
            prompts = torch.randint(vocabulary, (PROBE_PROMPTS, PROBE_PROMPT_TOKENS), generator=generator).tolist()
        # Repeated where there are few: more samples of the same prompt.
        self.prompts = [list(prompts[i % len(prompts)]) for i in range(PROBE_PROMPTS)]

    def sample(self, endpoint: Endpoint, timeout: float) -> list[Choice]:
        params = {
            "max_tokens": PROBE_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "ignore_eos": True,
        }  # fmt: skip
        choices = []
        for number, prompt in enumerate(self.prompts):  # one at a time: a batch of another shape rounds differently
            choices += endpoint.sample(Request(str(number), prompt, 1, PROBE_TOKENS, params | {"seed": number}), timeout)
        return choices

    def compare(self, sampled: dict[str, list[Choice]]) -> list[tuple[str, float, float, int]]:
        """(url, mean |difference|, largest, tokens) between servers and trainer. A collective: every rank passes the same samples."""
        results = []
        for url, choices in sampled.items():
            ours = trainer_logps(self.model, [(prompt, choice.ids) for prompt, choice in zip(self.prompts, choices, strict=True)])
            theirs = torch.tensor([logp for choice in choices for logp in choice.logps])
            difference = (torch.cat(ours) - theirs).abs()
            results.append((url, difference.mean().item(), difference.max().item(), len(difference)))
        return results


@torch.no_grad()
def trainer_logps(model: ShardedModel, rows: list[tuple[list[int], list[int]]], temperature: float = 1.0) -> list[torch.Tensor]:
    """The trainer's log-probability of every completion token of (prompt ids, completion ids), [n] fp32 on the CPU for each row.

    A collective of one forward pass: every rank passes the same rows."""
    batch = _pack(rows).to(dist.device())
    model.train(False)
    logps = model(batch.model_inputs(), batch.targets, temperature=temperature, num_tokens=batch.num_tokens).logps.cpu()
    model.train()
    result, start = [], 0
    for prompt, completion in rows:
        first = start + len(prompt) - 1
        result.append(logps[first : first + len(completion)])
        start += len(prompt) + len(completion)
    return result


def _pack(rows: list[tuple[list[int], list[int]]]) -> PackedBatch:
    lengths = [len(prompt) + len(completion) for prompt, completion in rows]
    ids = torch.tensor([token for prompt, completion in rows for token in (*prompt, *completion)])
    targets = torch.full_like(ids, NO_TARGET)
    start = 0
    for (prompt, completion), length in zip(rows, lengths, strict=True):
        first = start + len(prompt) - 1
        targets[first : first + len(completion)] = torch.tensor(completion)
        start += length
    return PackedBatch(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        seq_idx=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))[None].int(),
        cu_seq_lens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_length=max(lengths),
        targets=targets[None],
        weights=(targets != NO_TARGET).float()[None],
        num_tokens=len(ids),
        rows=list(range(len(rows))),
    )
