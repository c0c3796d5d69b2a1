"""common/tiny.py: the tiny checkpoints hold what tests elsewhere rely on, and are the same bytes every time."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common import tiny

MOE_FAMILIES = [family for family in tiny.FAMILIES if family != "llama"]
MTP_FAMILIES = [family for family in MOE_FAMILIES if family != "qwen3_moe"]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}
    return tensors


def load(family: str, folder: Path, **kwargs):
    model_class = getattr(transformers, tiny.ARCHITECTURES[family][1])
    model, info = model_class.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16, **kwargs)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_same_seed_same_bytes(family, tmp_path):
    mtp = family in MTP_FAMILIES
    first = tiny.make(family, tmp_path / "first", mtp=mtp, seed=3)
    command = [sys.executable, "-m", "common.tiny", "--family", family, "--output", str(tmp_path / "second"), "--seed", "3"]
    if family not in ("qwen3_moe", "glm_moe_dsa"):  # starting Python takes seconds: two families show it
        tiny.make(family, tmp_path / "second", mtp=mtp, seed=3)
    else:
        subprocess.run(command + ["--mtp"] * mtp, check=True, cwd=Path(__file__).parent.parent, capture_output=True)
    assert digests(first) == digests(tmp_path / "second")

    other = tiny.make(family, tmp_path / "other", mtp=mtp, seed=4)
    changed = {name for name, digest in digests(first).items() if digests(other)[name] != digest}
    assert changed == {"model.safetensors"}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_loads_with_nothing_missing_or_unexpected_and_both_forms_are_one_model(family, tmp_path):
    mtp = family in MTP_FAMILIES
    per_expert = load(family, tiny.make(family, tmp_path / "per_expert", mtp=mtp))
    fused = load(family, tiny.make(family, tmp_path / "fused", experts="fused", mtp=mtp, max_shard_bytes=200_000))
    expected, found = per_expert.state_dict(), fused.state_dict()
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_shapes_show_mistakes(family, tmp_path):
    tensors = read(tiny.make(family, tmp_path / family))
    layers = "model.language_model.layers" if family == "qwen3_5_moe" else "model.layers"
    experts = f"{layers}.2.mlp.experts"
    assert sorted(name for name in tensors if name.startswith(experts)) == sorted(
        f"{experts}.{expert}.{name}.weight" for expert in range(12) for name in ("gate_proj", "up_proj", "down_proj")
    )
    assert tensors[f"{experts}.11.gate_proj.weight"].shape == (48, 64)
    assert tensors[f"{experts}.11.down_proj.weight"].shape == (64, 48)
    gate_type = torch.float32 if family == "glm_moe_dsa" else torch.bfloat16
    assert tensors[f"{layers}.2.mlp.gate.weight"].dtype == gate_type
    others = {name: tensor.dtype for name, tensor in tensors.items() if ".mlp.gate." not in name}
    assert set(others.values()) == {torch.bfloat16}


def test_gated_delta_net_heads_are_uneven_and_remember(tmp_path):
    tensors = read(tiny.make("qwen3_next", tmp_path / "next"))
    linear = "model.layers.0.linear_attn"
    assert tensors[f"{linear}.conv1d.weight"].shape == (2 * 2 * 32 + 4 * 64, 1, 4)
    decay = -tensors[f"{linear}.A_log"].float().exp() * torch.nn.functional.softplus(tensors[f"{linear}.dt_bias"].float())
    assert decay.shape == (4,) and decay.min() > -1.9 and decay.max() < -0.006


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_mtp_tensors_have_the_names_of_the_hub(family, tmp_path):
    plain = read(tiny.make(family, tmp_path / "plain"))
    folder = tiny.make(family, tmp_path / "mtp", mtp=True)
    tensors = read(folder)
    added = tensors.keys() - plain.keys()
    assert all(torch.equal(tensors[name], plain[name]) for name in plain)
    settings = json.loads((folder / "config.json").read_text())
    if family == "glm_moe_dsa":
        layer, names = "model.layers.78", ["eh_proj", "enorm", "hnorm", "shared_head.norm"]
        expected = {f"{layer}.{name}.weight" for name in names} | {f"{layer}.mlp.gate.e_score_correction_bias"}
        assert settings["num_nextn_predict_layers"] == 1
    else:
        layer, names = "mtp.layers.0", ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
        expected = {f"mtp.{name}.weight" for name in names} | {f"{layer}.self_attn.q_norm.weight", f"{layer}.mlp.shared_expert_gate.weight"}
        key = "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"
        assert settings.get("text_config", settings)[key] == 1
    expected |= {f"{layer}.mlp.experts.{expert}.down_proj.weight" for expert in range(12)} | {f"{layer}.input_layernorm.weight"}
    assert expected <= added
    assert all(name.startswith((f"{layer}.", "mtp.")) for name in added)


def test_vision_tower_is_there_and_the_text_model_loads_from_it(tmp_path):
    folder = tiny.make("qwen3_5_moe", tmp_path / "vl", num_hidden_layers=2)
    tensors = read(folder)
    assert tensors["model.visual.patch_embed.proj.weight"].shape == (32, 3, 2, 4, 4)
    text = transformers.Qwen3_5MoeForCausalLM.from_pretrained(folder)
    assert torch.equal(text.model.layers[1].mlp.gate.weight, tensors["model.language_model.layers.1.mlp.gate.weight"])


def test_shards_hold_the_same_tensors_within_the_limit(tmp_path):
    whole = read(tiny.make("qwen3_moe", tmp_path / "whole"))
    folder = tiny.make("qwen3_moe", tmp_path / "shards", max_shard_bytes=250_000)
    files = sorted(folder.glob("*.safetensors"))
    tensors = read(folder)
    assert len(files) > 3 and not (folder / "model.safetensors").exists()
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert max(sizes) <= 250_000 and min(sizes[:-1]) > 250_000 - 2 * 384 * 64, "full up to the largest tensor, never above"
    assert tensors.keys() == whole.keys() and all(torch.equal(tensors[name], whole[name]) for name in whole)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    files_of_layer = {file for name, file in index["weight_map"].items() if name.startswith("model.layers.1.")}
    assert len(files_of_layer) == 2, "a layer lies in two files, as it does on the hub"


def test_tied_head_is_not_on_disk(tmp_path):
    folder = tiny.make("qwen3_moe", tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in read(folder)
    model = load("qwen3_moe", folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_part_moves_the_output(family, tmp_path):
    """Tests that compare outputs prove nothing about a part that the output does not depend on."""
    model = load(family, tiny.make(family, tmp_path / family)).float()
    input_ids = torch.arange(5, 53)[None]
    parts = ["mlp"] if family == "llama" else ["mlp.experts", "mlp.gate"]
    parts += {"qwen3_next": ["linear_attn", "self_attn"], "qwen3_5_moe": ["linear_attn", "self_attn"]}.get(family, ["self_attn"])
    with torch.no_grad():
        before = model(input_ids).logits
        assert 0.5 < before.std() < 2
        for part in parts:
            changed = [parameter for name, parameter in model.named_parameters() if f".{part}." in name and "indexer" not in name]
            saved = [parameter.clone() for parameter in changed]
            assert changed
            for parameter in changed:
                parameter.zero_()
            assert (model(input_ids).logits - before).abs().mean() > 0.05, part
            for parameter, values in zip(changed, saved, strict=True):
                parameter.copy_(values)
        assert torch.equal(model(input_ids).logits, before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny.make("llama", tmp_path_factory.mktemp("tokenizer") / "llama", num_hidden_layers=1))


def test_tokenizer_round_trip_and_special_tokens(tokenizer):
    text = "Héllo wörld 😀\n\n  你好 <think>12345</think>\t#!"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer("😀")["input_ids"]) == 4  # one character over several tokens
    assert len(tokenizer(" the assistant answers")["input_ids"]) < 8  # it has learnt words
    assert len(tokenizer) == tiny.NUM_TOKENS
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>", "<|im_end|>", None)
    for token in tiny.SPECIAL_TOKENS + tiny.MARKUP_TOKENS:
        assert tokenizer(token)["input_ids"] == [tiny.token_id(token)]
    both = tokenizer("<|im_start|><think>")["input_ids"]
    assert tokenizer.decode(both, skip_special_tokens=True) == "<think>"


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"city": "Oslo"}}}],
    },
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "4 C"},
    {"role": "assistant", "reasoning_content": "Cold.", "content": "Rain, 4 C."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": ""},
]
RENDERED = [
    "<|im_start|>system\nBe brief.<|im_end|>\n",
    "<|im_start|>user\nWeather?<|im_end|>\n",
    '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n',
    "<|im_start|>user\n<tool_response>\nrain\n</tool_response>",
    "\n<tool_response>\n4 C\n</tool_response><|im_end|>\n",
    "<|im_start|>assistant\n<think>\nCold.\n</think>\n\nRain, 4 C.<|im_end|>\n",
    "<|im_start|>user\nThanks<|im_end|>\n",
    "<|im_start|>assistant\n<|im_end|>\n",
]


def test_chat_template_text(tokenizer):
    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False) == "".join(RENDERED)
    assert tokenizer.apply_chat_template(CONVERSATION[1:2], tokenize=False) == RENDERED[1]  # no system turn is made up
    for turn, message in enumerate(CONVERSATION):
        if message["role"] == "assistant":  # what precedes an answer is exactly what generation would be given
            prompt = tokenizer.apply_chat_template(CONVERSATION[:turn], tokenize=False, add_generation_prompt=True)
            assert prompt == "".join(RENDERED[:turn]) + "<|im_start|>assistant\n"


def test_chat_template_tools(tokenizer):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    text = tokenizer.apply_chat_template(CONVERSATION[:2], tools=[tool], tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and json.dumps(tool) in text
    assert text.endswith("</tools><|im_end|>\n" + RENDERED[1])
    assert text.count("<|im_start|>system") == 1


def test_wrong_use(tmp_path, capsys, monkeypatch):
    with pytest.raises(ValueError, match="unknown family 'qwen9'"):
        tiny.config("qwen9")
    with pytest.raises(ValueError, match="no config field hiden_size"):
        tiny.config("qwen3_moe", hiden_size=32)
    with pytest.raises(ValueError, match="llama has no multi-token"):
        tiny.make("llama", tmp_path / "mtp", mtp=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        tiny.make("llama", tmp_path / "full")
    for arguments in (["--family", "qwen9"], ["--family", "llama", "--set", "novalue"], ["--family", "llama", "--set", "layers=2"]):
        monkeypatch.setattr(sys, "argv", ["tiny", "--output", str(tmp_path / "cli"), *arguments])
        with pytest.raises(SystemExit) as exit_:
            tiny.main()
        assert exit_.value.code == 2
    assert not (tmp_path / "cli").exists()
    assert "llama has no config field layers" in capsys.readouterr().err


def test_overrides_reach_the_text_part():
    config = tiny.config("qwen3_5_moe", hidden_size=96, num_hidden_layers=2, tie_word_embeddings=True, vision_config={"depth": 1})
    assert (config.text_config.hidden_size, config.vision_config.out_hidden_size, config.vision_config.depth) == (96, 96, 1)
    assert config.tie_word_embeddings and config.text_config.tie_word_embeddings
    assert config.text_config.layer_types == ["linear_attention", "linear_attention"]
