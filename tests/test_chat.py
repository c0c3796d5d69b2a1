"""What carries loss, as text, for every kind of row and template. Oracles: the templates of real models that trl ships, where installed."""

import json
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common import tiny
from common.chat import BadRow, Chat

USER = {"role": "user", "content": "What is 2*3?"}
THINKING = [
    {"role": "user", "content": "héllo 👩‍🚀 2*3?"},
    {"role": "assistant", "reasoning_content": "two times three 🚀", "content": "6 = six ✓"},
    {"role": "user", "content": "And plus 1?"},
    {"role": "assistant", "reasoning_content": "six plus one", "content": "7"},
]
PLAIN = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in THINKING]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}}]
AGENT = [
    {"role": "user", "content": "sum?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
        ],
    },
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Three."},
]
GENERATION_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny.write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def real_template(name: str) -> str:
    """A chat template of a real model, from the installed trl."""
    spec = find_spec("trl")
    path = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja" if spec else None
    if path is None or not path.is_file():
        pytest.skip(f"trl with the chat template {name} is not installed")
    return path.read_text(encoding="utf-8")


def learned(tokenizer, example) -> list[str]:
    """The stretches of text that carry loss."""
    runs = groupby(zip(example.ids, example.mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for on, run in runs if on]


def context(tokenizer, example) -> str:
    """Everything before the last stretch that carries loss."""
    ids, mask = list(example.ids), list(example.mask)
    while mask and mask[-1] is False:
        ids.pop(), mask.pop()
    while mask and mask[-1] is True:
        ids.pop(), mask.pop()
    return tokenizer.decode(ids)


def learned_of(tokenizer, row: dict, **options) -> list[list[str]]:
    return [learned(tokenizer, example) for example in Chat(tokenizer, **options).examples(row)]


def conversation(*turns: str, system: str | None = None) -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


# ---- the ordinary cases


def test_answer_and_end_of_turn_carry_loss_and_the_newline_after_it_does_not(tokenizer):
    row = conversation("What is 2*3?", "It is 6.")
    (example,) = Chat(tokenizer).examples(row)
    assert learned(tokenizer, example) == ["It is 6.<|im_end|>"]
    assert tokenizer.decode(example.ids) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert example.ids == tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
    assert example.mask[-1] is False and tokenizer.decode(example.ids[-1:]) == "\n"


@pytest.mark.parametrize("system", [None, "You count."])
def test_all_turns_of_a_conversation_with_and_without_system_prompt(tokenizer, system):
    (example,) = Chat(tokenizer).examples(conversation("1+1?", "Two.", "And 3+4?", "Seven.", system=system))
    assert learned(tokenizer, example) == ["Two.<|im_end|>", "Seven.<|im_end|>"]
    assert ("You count." in tokenizer.decode(example.ids)) == (system is not None)


def test_messages_after_the_last_answer_are_left_out(tokenizer):
    short, long = conversation("1+1?", "Two."), conversation("1+1?", "Two.", "And then?")
    assert Chat(tokenizer).examples(long) == Chat(tokenizer).examples(short)


def test_nothing_to_learn(tokenizer):
    chat = Chat(tokenizer)
    assert chat.examples({"messages": [USER]}) == []
    assert chat.examples({"messages": [USER, {"role": "assistant", "content": ""}]}) == []
    assert chat.examples({"messages": [USER, {"role": "assistant", "content": None}]}) == []
    assert chat.examples({"messages": [USER, {"role": "assistant", "content": " \n"}]}) == []
    assert chat.examples({"prompt": "a", "completion": ""}) == []


@pytest.mark.parametrize("nothing", ["", None])
def test_an_empty_turn_is_context_and_others_are_learned(tokenizer, nothing):
    messages = [USER, {"role": "assistant", "content": nothing}, USER, {"role": "assistant", "content": "6"}]
    assert learned_of(tokenizer, {"messages": messages}) == [["6<|im_end|>"]]
    tokenizer.chat_template = GENERATION_TEMPLATE
    assert learned_of(tokenizer, {"messages": messages}) == [["6<|im_end|>"]]


def test_content_in_parts_is_text(tokenizer):
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "6."}]
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "2*3?"}]}, {"role": "assistant", "content": parts}]}
    assert Chat(tokenizer).examples(row) == Chat(tokenizer).examples(conversation("2*3?", "It is 6."))


@pytest.mark.parametrize("answer", ["It is 6.<|im_end|>", "It is 6.<|im_end|>\n", "It is 6.<|im_end|><|im_end|>\n"])
def test_an_end_of_turn_in_the_data_is_not_doubled(tokenizer, answer):
    assert Chat(tokenizer).examples(conversation("2*3?", answer)) == Chat(tokenizer).examples(conversation("2*3?", "It is 6."))


def test_pad_that_is_eos_still_ends_the_turn(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    (example,) = Chat(tokenizer).examples(conversation("2*3?", "It is 6."))
    carried = [i for i, on in zip(example.ids, example.mask, strict=True) if on]
    assert carried.count(tokenizer.eos_token_id) == 1 and carried[-1] == tokenizer.pad_token_id


def test_eos_that_is_not_the_end_of_turn(tokenizer):
    tokenizer.eos_token = "<|endoftext|>"  # a base model's eos beside a ChatML template
    assert learned_of(tokenizer, conversation("1+1?", "2", "2+2?", "4<|im_end|>")) == [["2<|im_end|>", "4<|im_end|>"]]


def test_characters_split_over_tokens_are_learned_whole(tokenizer):
    answer = "👩‍🚀ß漢"
    (example,) = Chat(tokenizer).examples(conversation("é🚀?", answer))
    assert learned(tokenizer, example) == [answer + "<|im_end|>"]
    assert sum(example.mask) == len(tokenizer(answer)["input_ids"]) + 1 > len(answer) + 1


# ---- tools


def test_tool_calls_carry_loss_and_their_results_do_not(tokenizer):
    (example,) = Chat(tokenizer).examples({"messages": AGENT, "tools": TOOLS})
    calls = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2))
    assert learned(tokenizer, example) == [calls + "<|im_end|>", "Three.<|im_end|>"]
    text = tokenizer.decode(example.ids)
    assert "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>" in text and '"description": "adds"' in text


def test_tools_and_messages_as_json_text(tokenizer):
    as_text = {"messages": json.dumps(AGENT), "tools": json.dumps(TOOLS)}
    in_list = {"messages": AGENT, "tools": [json.dumps(TOOLS[0])]}
    assert (
        Chat(tokenizer).examples(as_text)
        == Chat(tokenizer).examples({"messages": AGENT, "tools": TOOLS})
        == Chat(tokenizer).examples(in_list)
    )


# ---- prompt and completion


def test_strings_are_joined_as_ids_and_end_with_eos(tokenizer):
    for prompt, completion in (("Hello wor", "ld"), ("The sum", " is 6.")):
        (example,) = Chat(tokenizer).examples({"prompt": prompt, "completion": completion})
        left, right = (tokenizer(text)["input_ids"] for text in (prompt, completion))
        assert example.ids == [*left, *right, tokenizer.eos_token_id]
        assert example.mask == [False] * len(left) + [True] * (len(right) + 1)


def test_a_first_token_is_never_learned(tokenizer):
    (example,) = Chat(tokenizer).examples({"prompt": "", "completion": "67"})
    assert len(example.ids) == 3 and example.mask == [False, True, True]


@pytest.mark.parametrize("completion", ["6<|im_end|>", "6<|im_end|>\n"])
def test_a_completion_that_ends_itself_gets_no_second_eos(tokenizer, completion):
    assert learned_of(tokenizer, {"prompt": "2*3=", "completion": completion}) == [["6<|im_end|>"]]


def test_strings_start_with_bos_where_the_tokenizer_has_one(tokenizer):
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    (example,) = Chat(tokenizer).examples({"prompt": "2*3=", "completion": "6"})
    assert example.ids.count(bos) == 1 and example.ids[0] == bos and not example.mask[0]


def test_messages_of_the_prompt_carry_no_loss(tokenizer):
    row = {"prompt": PLAIN[:3], "completion": PLAIN[3:]}
    assert learned_of(tokenizer, row) == [["7<|im_end|>"]]
    tokenizer.chat_template = GENERATION_TEMPLATE
    assert learned_of(tokenizer, row) == [["7<|im_end|>"]]
    assert learned_of(tokenizer, {"prompt": PLAIN[:3], "completion": "7"}) == [["7<|im_end|>"]]


# ---- templates that rewrite earlier turns


def test_qwen3_drops_thinking_so_each_turn_is_learned_in_its_own_context(tokenizer):
    tokenizer.chat_template = real_template("qwen3")
    first, second = Chat(tokenizer).examples({"messages": THINKING})
    assert learned(tokenizer, first) == ["<think>\ntwo times three 🚀\n</think>\n\n6 = six ✓<|im_end|>"]
    assert learned(tokenizer, second) == ["<think>\nsix plus one\n</think>\n\n7<|im_end|>"]
    for example, turn in ((first, 1), (second, 3)):
        prompt = tokenizer.apply_chat_template(THINKING[:turn], tokenize=False, add_generation_prompt=True)
        assert context(tokenizer, example) == prompt
    assert "two times three" not in tokenizer.decode(second.ids) and "6 = six ✓" in tokenizer.decode(second.ids)


def test_turns_that_a_sampler_sees_together_share_an_example(tokenizer):
    tokenizer.chat_template = real_template("qwen3")
    call = {"role": "assistant", "reasoning_content": "use it", "content": "", "tool_calls": AGENT[1]["tool_calls"][:1]}
    answer = {"role": "assistant", "reasoning_content": "so", "content": "Three."}
    messages = [USER, call, {"role": "tool", "content": "3"}, answer, USER, {**answer, "content": "Four."}]
    texts = learned_of(tokenizer, {"messages": messages, "tools": TOOLS})
    assert texts == [
        [
            '<think>\nuse it\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
            "<think>\nso\n</think>\n\nThree.<|im_end|>",
        ],
        ["<think>\nso\n</think>\n\nFour.<|im_end|>"],
    ]


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6"])
def test_a_prompt_that_opens_the_thinking(tokenizer, name):
    tokenizer.chat_template = real_template(name)
    assert learned_of(tokenizer, {"messages": THINKING}) == [
        ["two times three 🚀\n</think>\n\n6 = six ✓<|im_end|>"],
        ["six plus one\n</think>\n\n7<|im_end|>"],
    ]


def test_the_prompt_is_tokenised_as_the_sampler_sees_it():
    """Prompt "...<think>\\n", answer "\\n</think>": Qwen's vocabulary joins the two newlines into a token that no sampler ever meets."""
    backend = trained_bpe(["\n\n"] * 9)
    backend.add_tokens(["<think>", "</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = real_template("qwen3_5_think")
    joined = tokenizer("\n\n")["input_ids"]
    assert len(joined) == 1 and joined[0] in tokenizer.apply_chat_template(PLAIN[:2], return_dict=True)["input_ids"]
    (example,) = Chat(tokenizer).examples({"messages": PLAIN[:2]})
    assert learned(tokenizer, example) == ["\n</think>\n\n6 = six ✓<|im_end|>"]
    prompt = tokenizer.apply_chat_template(PLAIN[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert example.ids[: len(prompt)] == prompt and example.mask[: len(prompt)] == [False] * len(prompt)


def test_a_prompt_that_cannot_lead_to_the_turn_is_an_error_that_names_it(tokenizer):
    tokenizer.chat_template = real_template("qwen3_5_nothink")
    with pytest.raises(BadRow, match=r"turn 1: the prompt .*'\\n</think>\\n\\n', the conversation 'two times .*\"enable_thinking\": true"):
        Chat(tokenizer).examples({"messages": THINKING})
    assert len(learned_of(tokenizer, {"messages": THINKING}, chat_template_kwargs={"enable_thinking": True})) == 2
    assert learned_of(tokenizer, {"messages": PLAIN}) == [["6 = six ✓<|im_end|>"], ["7<|im_end|>"]]


def test_a_prompt_that_always_opens_the_thinking_says_how_rows_without_it_work(tokenizer):
    """GLM-5 writes "</think>" alone before an answer without reasoning, but its prompt ends in "<think>"."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.role == 'assistant' %}"
        "{{ '<think>' + m.reasoning_content if m.reasoning_content is defined else '' }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}"
    )
    with pytest.raises(BadRow, match='With chat_template_kwargs {"enable_thinking": false} they agree'):
        Chat(tokenizer).examples({"messages": PLAIN})
    assert learned_of(tokenizer, {"messages": PLAIN, "chat_template_kwargs": {"enable_thinking": False}}) == [
        ["6 = six ✓<|im_end|>", "7<|im_end|>"]
    ]
    assert learned_of(tokenizer, {"messages": THINKING}) == [
        ["two times three 🚀</think>6 = six ✓<|im_end|>", "six plus one</think>7<|im_end|>"]
    ]
    empty = [USER, {"role": "assistant", "reasoning_content": "", "content": "6"}]
    assert learned_of(tokenizer, {"messages": empty}) == [["</think>6<|im_end|>"]]


def test_chat_template_kwargs_of_the_run_and_of_the_row(tokenizer):
    tokenizer.chat_template = real_template("qwen3")
    row = {"messages": PLAIN[:2]}
    thinking, quiet = [["<think>\n\n</think>\n\n6 = six ✓<|im_end|>"]], [["6 = six ✓<|im_end|>"]]
    assert learned_of(tokenizer, row) == thinking
    assert learned_of(tokenizer, row, chat_template_kwargs={"enable_thinking": False}) == quiet
    assert learned_of(tokenizer, {**row, "chat_template_kwargs": {"enable_thinking": False}}) == quiet
    assert (
        learned_of(tokenizer, {**row, "chat_template_kwargs": '{"enable_thinking": true}'}, chat_template_kwargs={"enable_thinking": False})
        == thinking
    )


# ---- templates with generation markers


@pytest.mark.parametrize(
    "name", ["qwen3_training", "qwen3_instruct_2507_training", "qwen3_5_think_training", "qwen3_6_training", "qwen3_8_training"]
)
@pytest.mark.parametrize(
    "row", [{"messages": THINKING}, {"messages": PLAIN}, {"messages": AGENT, "tools": TOOLS}], ids=["thinking", "plain", "agent"]
)
def test_generation_markers_give_transformers_mask_less_the_newline_after_a_turn(tokenizer, name, row):
    tokenizer.chat_template = real_template(name)
    (example,) = Chat(tokenizer).examples(row)
    messages = json.loads(json.dumps(row["messages"]))
    for message in messages:
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    oracle = tokenizer.apply_chat_template(messages, tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True)
    assert example.ids == oracle["input_ids"]
    expected = [bool(on) for on in oracle["assistant_masks"]]
    for i in range(1, len(expected)):
        if example.ids[i - 1] == tokenizer.eos_token_id:
            expected[i] = False
    assert example.mask == expected and sum(expected) > 0


def test_spans_without_markers_equal_those_of_the_markers(tokenizer):
    for row in (conversation("é🚀 1+1?", "Two 👩‍🚀.", "And?", "  Four."), {"messages": AGENT, "tools": TOOLS}):
        tokenizer.chat_template = real_template("qwen3_instruct_2507")
        plain = Chat(tokenizer).examples(row)
        tokenizer.chat_template = real_template("qwen3_instruct_2507_training")
        assert plain == Chat(tokenizer).examples(row)


def test_markers_that_leave_out_the_end_of_turn_are_extended_by_it(tokenizer):
    tokenizer.chat_template = GENERATION_TEMPLATE
    assert learned_of(tokenizer, {"messages": PLAIN}) == [["6 = six ✓<|im_end|>", "7<|im_end|>"]]


# ---- templates without an end of turn


@pytest.fixture
def glm(tokenizer, tmp_path):
    """GLM's tokens and stop ids: the assistant's turn ends where the next role begins."""
    tokens = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = real_template("glm4moe")
    tokenizer.save_pretrained(tmp_path / "glm")
    stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    (tmp_path / "glm" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return AutoTokenizer.from_pretrained(tmp_path / "glm")


def test_glm_learns_to_stop_with_the_token_that_comes_next(glm):
    call = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    assert learned_of(glm, {"messages": THINKING}) == [
        ["\n<think>two times three 🚀</think>\n6 = six ✓<|user|>"],
        ["\n<think>six plus one</think>\n7<|user|>"],
    ]
    assert learned_of(glm, {"messages": PLAIN}) == [["\n<think></think>\n6 = six ✓<|user|>", "\n<think></think>\n7<|user|>"]]
    assert learned_of(glm, {"messages": AGENT, "tools": TOOLS}) == [
        [f"\n<think></think>\n{call.format(1)}\n{call.format(2)}<|observation|>", "\n<think></think>\nThree.<|user|>"]
    ]
    assert learned_of(glm, {"messages": AGENT[:2], "tools": TOOLS})[0][0].endswith("</tool_call><|observation|>")


def test_glm_agrees_with_its_training_template(glm):
    """trl's variant marks the stop tokens itself; both must give the same ids and masks."""
    for row in ({"messages": PLAIN}, {"messages": AGENT, "tools": TOOLS}):
        glm.chat_template = real_template("glm4moe")
        ours = Chat(glm).examples(row)
        glm.chat_template = real_template("glm4moe_training")
        assert ours == Chat(glm).examples(row)


def test_without_declared_stops_the_eos_ends_every_turn(glm, tmp_path):
    (tmp_path / "glm" / "generation_config.json").write_text(json.dumps({"eos_token_id": [99999]}))  # not in the vocabulary
    assert learned_of(glm, {"messages": PLAIN[:2]}) == [["\n<think></think>\n6 = six ✓<|endoftext|>"]]
    (tmp_path / "glm" / "generation_config.json").unlink()
    assert learned_of(glm, {"messages": PLAIN}) == [
        ["\n<think></think>\n6 = six ✓<|endoftext|>"],
        ["\n<think></think>\n7<|endoftext|>"],
    ]
    assert learned_of(glm, {"messages": PLAIN[:2]}, stop_ids=[glm.convert_tokens_to_ids("<|user|>")]) == [
        ["\n<think></think>\n6 = six ✓<|user|>"]
    ]


# ---- tokenizers


def trained_bpe(lines: list[str], trim_offsets: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def test_spaces_are_learned_although_the_tokenizer_trims_them_from_offsets():
    """Llama 3's tokenizer reports a token of spaces as an empty range; a mask by overlap loses the indentation of code."""
    backend = trained_bpe(["    a", "a b"] * 9, trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eot_id|>", additional_special_tokens=["<|start|>"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n\n{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
    )
    assert any(start == end for start, end in tokenizer("a    b", return_offsets_mapping=True)["offset_mapping"])
    answer = "   one:\n     two   "
    (example,) = Chat(tokenizer).examples({"messages": [USER, {"role": "assistant", "content": answer}]})
    assert learned(tokenizer, example) == [answer + "<|eot_id|>"]


# ---- rows that cannot be used


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"question": "a", "answer": "b"}, "needs 'messages', or 'prompt' and 'completion'; columns found: question, answer"),
        ({"prompt": "a"}, "columns found: prompt"),
        ({"messages": [{"from": "human", "value": "a"}]}, "message 0 is not an object with a 'role'"),
        ({"messages": [USER, {"role": "gpt", "content": "a"}]}, "message 1 has the unknown role 'gpt'"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, "message 1: content must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0: content must be text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "message 0 is an assistant turn: there is no prompt"),
        ({"messages": "not json"}, "messages is text that is not JSON"),
        ({"messages": {"role": "user"}}, "messages must be a list"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "a tool call needs a 'function' with a 'name'"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "must be a JSON object",
        ),
        ({"prompt": 1, "completion": "a"}, "'prompt' and 'completion' must be strings or lists"),
    ],
)
def test_bad_rows_say_what_is_wrong(tokenizer, row, reason):
    with pytest.raises(BadRow) as error:
        Chat(tokenizer).examples(row)
    assert reason in str(error.value)


def test_what_a_template_drops_is_an_error(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(BadRow, match="message 0: the chat template does not render the content of role 'system'"):
        Chat(tokenizer).examples(conversation("1+1?", "2", system="Count."))
    with pytest.raises(BadRow, match="message 1: the chat template does not render tool calls"):
        Chat(tokenizer).examples({"messages": AGENT, "tools": TOOLS})
    chat = Chat(tokenizer)
    chat.examples({"messages": THINKING})
    chat.examples({"messages": PLAIN})
    assert chat.notes["reasoning_not_rendered"] == 1


def test_a_template_that_refuses_says_so(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('only poems') }}"
    with pytest.raises(BadRow, match="only poems"):
        Chat(tokenizer).examples(conversation("1+1?", "2"))
    tokenizer.chat_template = None
    with pytest.raises(BadRow, match="no chat template"):
        Chat(tokenizer).examples(conversation("1+1?", "2"))
