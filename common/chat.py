"""Rows of text -> token ids and loss masks.

A row holds `messages`, or (looked at only without them) `prompt` and `completion`: strings, or lists of messages. What carries loss:

1. Assistant turns only: everything a sampler would have to produce after the generation prompt, up to and including the
   token that ends the turn. White space which the template writes after that token is context, never a target.
2. Templates with generation markers decide themselves what a turn is. Without markers the spans are found by rendering the
   conversation up to each turn. Turns whose prompt is a prefix of one render share one example; a template that rewrites
   earlier turns (Qwen3 drops their thinking) gives one example for each stretch of turns that a sampler would see together,
   so that every turn is trained once, in exactly the context it will meet.
3. Templates that end a turn without any token of their own (GLM): the stop token is what the template writes next if that is
   one of the model's stop ids (`<|user|>`, or `<|observation|>` after a tool call), else the tokenizer's eos.
   Stop ids are the tokenizer's eos and those of generation_config.json beside the tokenizer.
4. Prompt and completion as strings are never put through a template: ids of the prompt + ids of the completion + eos.
5. A turn without text, reasoning and tool calls is context: there is nothing in it to learn.

Prompts are cut where generation starts: if one token would cover both sides of that place, the sides are tokenised apart,
because the sampler never sees the joined token.
"""

import json
import re
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "probe text"


class BadRow(ValueError):
    """A row that cannot be used. The message says why; the caller adds file and line."""


class Example(NamedTuple):
    ids: list[int]
    mask: list[bool]  # True: this token carries loss, predicted from the one before it


class Rendered(NamedTuple):
    text: str
    spans: list[tuple[int, int]]  # characters that carry loss
    stop_id: int | None  # appended after the text, carries loss
    cut: bool  # tokenise the sides of every span apart even where no token covers both


class Chat:
    """Turns rows into examples with one tokenizer and its chat template.

    `stop_ids`: ids that end generation besides the tokenizer's eos and those of generation_config.json in the tokenizer's folder.
    `chat_template_kwargs`: handed to the template (`enable_thinking`); a row's own `chat_template_kwargs` win.
    """

    def __init__(self, tokenizer, *, stop_ids=(), chat_template_kwargs: dict | None = None):
        self.tokenizer = tokenizer
        self.kwargs = dict(chat_template_kwargs or {})
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids = {tokenizer.eos_token_id, *generation_stop_ids(tokenizer), *stop_ids} - {None}
        self.stops = {text: i for i in sorted(ids) if (text := tokenizer.decode([i]))}  # an id beyond the vocabulary has no text
        self.bos = [i for i in tokenizer("")["input_ids"] if i == tokenizer.bos_token_id]
        self.final_stops: dict[str, int] = {}
        self.notes: Counter = Counter()  # what the template did with rows that are used all the same
        if tokenizer.chat_template:
            # The end of a turn may be none of the declared stop ids (a base model's eos beside a ChatML template).
            ending = self._probe([{"role": "assistant", "content": PROBE}]).rpartition(PROBE)[2].lstrip()
            if end := _longest_prefix(ending, added):
                self.stops[end] = added[end]
        self.turn_ends = tuple({**self.stops, **added})

    def examples(self, row: dict) -> list[Example]:
        """All examples of one row; an empty list when there is nothing to learn. Raises BadRow."""
        return self.encode(self.render(row))

    def render(self, row: dict) -> list[Rendered]:
        if row.get("messages") is not None:
            prompt, completion = [], from_json(row["messages"], "messages", list)
        elif row.get("prompt") is not None and row.get("completion") is not None:
            prompt, completion = row["prompt"], row["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return self._plain(prompt, completion)
            prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            completion = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            if not isinstance(prompt, list) or not isinstance(completion, list):
                raise BadRow("'prompt' and 'completion' must be strings or lists of messages")
        else:
            raise BadRow(f"a row needs 'messages', or 'prompt' and 'completion'; columns found: {', '.join(map(str, row)) or 'none'}")
        if not self.tokenizer.chat_template:
            raise BadRow(
                "the tokenizer has no chat template: put one beside it (chat_template.jinja), or give prompt and completion as strings"
            )
        messages = [normalise(message, i, self.stops) for i, message in enumerate([*prompt, *completion])]
        tools, options = template_options(row)
        kwargs = self.kwargs | options
        turns = [i for i in range(len(prompt), len(messages)) if messages[i]["role"] == "assistant" and has_something_to_learn(messages[i])]
        if not turns:
            return []
        messages = messages[: turns[-1] + 1]  # what follows the last turn teaches nothing
        if GENERATION_MARKER.search(self.tokenizer.get_chat_template(None, tools)):
            rendered = [self._marked(messages, len(prompt), tools, kwargs)]
        else:
            rendered = self._by_prefix(messages, turns, tools, kwargs)
        _check_nothing_dropped(messages, turns, rendered)
        learned = _squeeze(_learned(rendered))
        self.notes["reasoning_not_rendered"] += any(_squeeze(messages[i].get("reasoning_content", "")) not in learned for i in turns)
        return rendered

    def encode(self, rendered: list[Rendered], apart: bool = False) -> list[Example]:
        """Tokenises in one batch. The first token of an example has nothing to be predicted from and never carries loss.

        `apart`: tokenise both sides of every span apart, so that equal prompts are equal ids whatever follows them.
        """
        if not rendered:
            return []
        if self.tokenizer.is_fast and not apart:
            batch = self.tokenizer([r.text for r in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            tokens = zip(batch["input_ids"], batch["offset_mapping"], strict=True)
        else:
            tokens = [(None, None)] * len(rendered)
        return [self._example(r, ids, offsets) for r, (ids, offsets) in zip(rendered, tokens, strict=True)]

    def _example(self, rendered: Rendered, ids, offsets) -> Example:
        # A token belongs to the span in which it ends. Overlap would lose white space: several byte-level tokenizers (Llama 3)
        # trim it from the offsets, which leaves a token of spaces with an empty range.
        ends = [] if offsets is None else [end for _, end in offsets]
        cuts = [bisect_right(ends, start) for start, _ in rendered.spans]
        joined = any(k < len(ends) and start > (ends[k - 1] if k else 0) for k, (start, _) in zip(cuts, rendered.spans, strict=True))
        if offsets is None or rendered.cut or joined:
            ids, mask = self._piecewise(rendered)
        else:
            mask = [False] * len(ids)
            for first, (_, end) in zip(cuts, rendered.spans, strict=True):
                last = bisect_right(ends, end)
                mask[first:last] = [True] * (last - first)
        if rendered.stop_id is not None:
            ids, mask = [*ids, rendered.stop_id], [*mask, True]
        if mask:
            mask[0] = False
        return Example(ids, mask)

    def _piecewise(self, rendered: Rendered):
        ids, mask, at = [], [], 0
        for start, end in [*rendered.spans, (len(rendered.text), len(rendered.text))]:
            for text, learned in ((rendered.text[at:start], False), (rendered.text[start:end], True)):
                piece = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
                ids += piece
                mask += [learned] * len(piece)
            at = end
        if rendered.cut:
            ids, mask = [*self.bos, *ids], [False] * len(self.bos) + mask
        return ids, mask

    def _plain(self, prompt: str, completion: str) -> list[Rendered]:
        ended = completion.rstrip()
        if ended.endswith(tuple(self.stops)):
            completion, stop_id = ended, None
        elif self.tokenizer.eos_token_id is None:
            raise BadRow("the tokenizer has no eos token, so the end of a completion cannot be learned")
        else:
            stop_id = self.tokenizer.eos_token_id
        if not strip_stops(completion, self.stops).strip():
            return []
        return [Rendered(prompt + completion, [(len(prompt), len(prompt) + len(completion))], stop_id, cut=True)]

    def _by_prefix(self, messages, turns, tools, kwargs) -> list[Rendered]:
        if turns[0] == 0:
            raise BadRow("message 0 is an assistant turn: there is no prompt before it")
        prompts = {i: self._text(messages[:i], tools, kwargs, add_generation_prompt=True) for i in turns}
        wholes = {i: self._text(messages[: i + 1], tools, kwargs) for i in turns}
        for i in turns:
            if not wholes[i].startswith(prompts[i]):
                raise BadRow(_not_a_prefix(prompts[i], wholes[i], i) + self._advice(messages[: i + 1], tools, kwargs))
        rendered = []
        while turns:
            last, spans, rest, stop_id = turns[-1], [], [], None
            for i in turns:
                span, stop_id = self._span(len(prompts[i]), wholes[i], wholes[last], messages[i])
                spans.append(span) if span else rest.append(i)
            rendered.append(Rendered(wholes[last], spans, stop_id, cut=False))
            turns = rest
        return rendered[::-1]

    def _advice(self, messages, tools, kwargs) -> str:
        """Thinking templates open (or close) the thinking in the prompt: a turn without (or with) reasoning then needs the other mode."""
        for value in (False, True):
            other = {**kwargs, "enable_thinking": value}
            try:
                prompt, whole = self._text(messages[:-1], tools, other, add_generation_prompt=True), self._text(messages, tools, other)
            except BadRow:  # this mode is no advice then
                continue
            if whole.startswith(prompt):
                return f'. With chat_template_kwargs {{"enable_thinking": {json.dumps(value)}}} they agree; it can be a column too'
        return ". A chat template with generation markers would say itself what a turn is"

    def _span(self, start: int, until: str, whole: str, message: dict):
        """Characters of one turn inside `whole` and the stop id to append; no span where `whole` does not contain the turn as sampled."""
        if not whole.startswith(until):
            return None, None
        end = len(until.rstrip())
        if end > start and until[:end].endswith(self.turn_ends):
            return (start, end), None
        if following := _longest_prefix(whole[len(until) :], self.stops):
            return (start, len(until) + len(following)), None
        if len(until) == len(whole):
            return (start, len(whole)), self._final_stop(message)
        return None, None

    def _marked(self, messages, num_prompt, tools, kwargs) -> Rendered:
        template = self.tokenizer.get_chat_template(None, tools)
        variables = {**self.tokenizer.special_tokens_map, **kwargs}
        try:
            texts, spans = render_jinja_template(
                conversations=[messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **variables
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise BadRow(f"the chat template cannot render the conversation: {error}") from error
        text, spans = texts[0], list(spans[0])
        assistants = [message for message in messages if message["role"] == "assistant"]
        if len(spans) == len(assistants):
            spans = [span for span, message in zip(spans, assistants, strict=True) if has_something_to_learn(message)]
        if num_prompt:
            prompt = self._text(messages[:num_prompt], tools, kwargs, add_generation_prompt=True)
            if not text.startswith(prompt):
                raise BadRow(_not_a_prefix(prompt, text, num_prompt))
            spans = [(max(start, len(prompt)), end) for start, end in spans if end > len(prompt)]
        if not spans:
            raise BadRow("the chat template has generation markers but marks nothing of this conversation's assistant turns")
        stop_id, learned = None, []
        for start, end in spans:
            stripped = len(text[:end].rstrip())
            if stripped > start and text[:stripped].endswith(self.turn_ends):
                end = stripped
            elif following := _longest_prefix(text[end:], self.stops):
                end += len(following)
            elif not text[end:].strip():
                end, stop_id = len(text), self._final_stop(messages[-1])
            learned.append((start, end))
        return Rendered(text, learned, stop_id, cut=False)

    def _final_stop(self, message: dict) -> int:
        """The id that ends a turn after which the template writes nothing."""
        role = "tool" if message.get("tool_calls") else "user"
        if role not in self.final_stops:
            call = {"type": "function", "function": {"name": "probe", "arguments": {}}}
            turn = {"role": "assistant", "content": PROBE, **({"tool_calls": [call]} if role == "tool" else {})}
            before, after = self._probe([turn]), self._probe([turn, {"role": role, "content": PROBE}])
            following = _longest_prefix(after[len(before) :], self.stops) if before and after.startswith(before) else None
            stop_id = self.stops[following] if following else self.tokenizer.eos_token_id
            if stop_id is None:
                raise BadRow("the chat template ends a turn without a stop token and the tokenizer has no eos token")
            self.final_stops[role] = stop_id
        return self.final_stops[role]

    def _probe(self, turns: list[dict]) -> str:
        try:
            return self._text([{"role": "user", "content": PROBE}, *turns], None, self.kwargs)
        except BadRow:  # a template that refuses the probe conversation tells nothing about its endings
            return ""

    def _text(self, messages, tools, kwargs, add_generation_prompt=False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise BadRow(f"the chat template cannot render messages 0 to {len(messages) - 1}: {error}") from error


def generation_stop_ids(tokenizer) -> list[int]:
    """eos_token_id of the generation_config.json (else config.json) in the tokenizer's folder: GLM stops at three ids, its tokenizer names one."""
    for name in ("generation_config.json", "config.json"):
        path = Path(tokenizer.name_or_path or "") / name
        if tokenizer.name_or_path and path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if ids is not None:
                return ids if isinstance(ids, list) else [ids]
    return []


def has_something_to_learn(message: dict) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content", "").strip())


def normalise(message: Any, index: int, stops) -> dict:
    """One message as templates expect it: text content, tool call arguments as objects, no nulls, no end-of-turn token of its own.

    Templates print "None" for null content, drop lists of text parts silently (Qwen3) or fail on arguments given as JSON text (GLM, Qwen3.5).
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRow(f"message {index} is not an object with a 'role': {json.dumps(message, default=str)[:120]}")
    if message["role"] not in ROLES:
        raise BadRow(f"message {index} has the unknown role {message['role']!r}; known roles: {', '.join(ROLES)}")
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content", "")
    if message["role"] == "assistant":
        content = strip_stops(_join_parts(content, index), stops)
        reasoning = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if key in message), None)
        if reasoning is not None:
            message["reasoning_content"] = _join_parts(reasoning, index)
        if "tool_calls" in message:
            message["tool_calls"] = [_tool_call(call, index) for call in from_json(message["tool_calls"], "tool_calls", list)]
    elif message["role"] in ("tool", "function") and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    else:
        content = _join_parts(content, index)
    return {**message, "content": content}


def strip_stops(text: str, stops) -> str:
    """Without end-of-turn tokens at its end: the template writes its own, and a second one teaches a turn after the turn."""
    while (ended := text.rstrip()).endswith(tuple(stops)):
        text = ended[: -max(len(stop) for stop in stops if ended.endswith(stop))]
    return text


def _join_parts(content: Any, index: int) -> str:
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    if not isinstance(content, str):
        raise BadRow(f"message {index}: content must be text or a list of text parts, not {json.dumps(content, default=str)[:120]}")
    return content


def _tool_call(call: Any, index: int) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"message {index}: a tool call needs a 'function' with a 'name': {json.dumps(call, default=str)[:120]}")
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else from_json(arguments, "the arguments of a tool call", dict)
    return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}


def template_options(row: dict) -> tuple[list[dict] | None, dict]:
    """A row's `tools` and `chat_template_kwargs`, each of them as it is or as JSON text. Raises BadRow."""
    tools = [from_json(tool, "tools", dict) for tool in from_json(row.get("tools") or [], "tools", list)] or None
    return tools, from_json(row.get("chat_template_kwargs") or {}, "chat_template_kwargs", dict)


def from_json(value: Any, what: str, kind: type):
    """Parquet files often hold nested values as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise BadRow(f"{what} is text that is not JSON: {error}") from error
    if kind is dict and isinstance(value, list) and all(isinstance(pair, tuple) for pair in value):
        value = dict(value)  # a Parquet map
    if not isinstance(value, kind):
        raise BadRow(f"{what} must be a {'list' if kind is list else 'JSON object'}, not {json.dumps(value, default=str)[:120]}")
    return value


def _longest_prefix(text: str, candidates) -> str | None:
    return max((c for c in candidates if text.startswith(c)), key=len, default=None)


def _not_a_prefix(prompt: str, whole: str, turn: int) -> str:
    same = next((k for k, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    return (
        f"turn {turn}: the prompt that the chat template makes for generation is not the beginning of the rendered conversation: "
        f"after {prompt[max(0, same - 30) : same]!r} the prompt has {prompt[same : same + 30]!r}, the conversation {whole[same : same + 30]!r}"
    )


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _learned(rendered: list[Rendered]) -> str:
    return "".join(r.text[start:end] for r in rendered for start, end in r.spans)


def _check_nothing_dropped(messages: list[dict], turns: list[int], rendered: list[Rendered]) -> None:
    """Templates ignore roles and fields they do not know without a word."""
    text, learned = _squeeze(rendered[-1].text), _learned(rendered)
    for i, message in enumerate(messages):
        if message["role"] in ("system", "developer", "user") and _squeeze(message["content"]) not in text:
            raise BadRow(f"message {i}: the chat template does not render the content of role {message['role']!r}")
        if i in turns and any(call["function"]["name"] not in learned for call in message.get("tool_calls") or []):
            raise BadRow(f"message {i}: the chat template does not render tool calls")
