"""Options: YAML and command line through one parser, wrong use named, every option explained and used."""

import re
from dataclasses import fields

import pytest
import yaml

from common import config
from common.config import DataArguments, ModelArguments, TrainArguments
from tests.conftest import ROOT

ALL = (ModelArguments, DataArguments, TrainArguments)
REQUIRED = {"model_name_or_path": "m", "train_files": ["t.jsonl"], "output_dir": "o"}


def parse(tmp_path, content: dict, *argv: str):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(REQUIRED | content))
    return config.parse(*ALL, argv=["--config", str(file), *argv])


def test_yaml_values_have_their_types_and_the_command_line_wins(tmp_path):
    file = tmp_path / "c.yaml"
    # 1e-5 without a dot is a string to PyYAML; `off` is a boolean.
    file.write_text("model_name_or_path: m\ntrain_files: [a.jsonl, b.jsonl]\noutput_dir: o\nlearning_rate: 1e-5\npacking: off\nseed: 3\n")
    model, data, train = config.parse(*ALL, argv=["--config", str(file), "--seed", "4"])
    assert train.learning_rate == 1e-5
    assert data.packing is False
    assert data.train_files == ["a.jsonl", "b.jsonl"]
    assert train.seed == 4
    assert model.master_dtype == "float32"


@pytest.mark.parametrize(
    ("content", "argv", "message"),
    [
        ({"learning_rat": 1}, (), "unknown keys learning_rat: did you mean learning_rate?"),
        ({}, ("--learning_rat", "1"), "unknown option --learning_rat 1: did you mean learning_rate?"),
        ({}, ("--lear", "1"), "--lear"),  # no prefix matching
        ({"learning_rate": "fast"}, (), "invalid float value"),
        ({"lr_scheduler_type": "cosin"}, (), "invalid choice"),
        ({"max_length": 1}, (), "max_length is 1"),
        ({"gradient_accumulation_steps": 0}, (), "gradient_accumulation_steps is 0"),
        ({"max_steps": 0}, (), "max_steps is 0"),
        ({"chat_template_kwargs": "enable_thinking=false"}, (), "chat_template_kwargs is not JSON"),
        ({"chat_template_kwargs": "[1]"}, (), "must be a JSON object"),
        ({"load_balancing_coef": -0.1}, (), "load_balancing_coef is -0.1"),
        ({"weight_decay": {"a": 1}}, (), "`weight_decay` must be a plain value"),
    ],
)
def test_wrong_use_ends_with_code_2_and_the_reason(tmp_path, capsys, content, argv, message):
    with pytest.raises(SystemExit) as error:
        parse(tmp_path, content, *argv)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_duplicate_keys_and_missing_files_are_errors(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 1\nseed: 2\n")
    for argv, message in ((["--config", str(file)], "line 2: key `seed` is given twice"), (["--config", "no.yaml"], "cannot read config no.yaml")):
        with pytest.raises(SystemExit) as error:
            config.parse(*ALL, argv=argv)
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_missing_required_option_is_named(capsys):
    with pytest.raises(SystemExit):
        config.parse(*ALL, argv=["--model_name_or_path", "m", "--output_dir", "o"])
    assert "--train_files" in capsys.readouterr().err


def test_the_resolved_config_reads_back_the_same(tmp_path):
    first = parse(tmp_path, {"eval_files": [], "weight_decay": 0.1, "debug_num_layers": None})
    config.save_resolved(tmp_path / "run" / "config.yaml", *first)
    assert config.parse(*ALL, argv=["--config", str(tmp_path / "run" / "config.yaml")]) == first


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        config.parse(*ALL, argv=["--help"])
    text = capsys.readouterr().out
    for cls in ALL:
        for f in fields(cls):
            assert f"--{f.name} " in text, f.name
            assert len(f.metadata["help"]) > 10, f.name


def test_every_option_is_read_somewhere():
    code = "\n".join(path.read_text() for folder in ("common", "sft", "dpo", "grpo") for path in (ROOT / folder).glob("*.py"))
    for cls in ALL:
        for f in fields(cls):
            assert re.search(rf"args\.{f.name}\b", code), f"option {f.name} is declared and never read"


@pytest.mark.parametrize("path", sorted((ROOT / "sft" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_parse(path):
    argv = ["--config", str(path)]
    content = yaml.safe_load(path.read_text())
    for name, value in REQUIRED.items():
        if name not in content:
            argv += [f"--{name}", *(value if isinstance(value, list) else [value])]
    config.parse(*ALL, argv=argv)
