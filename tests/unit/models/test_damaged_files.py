"""Damaged files of a model directory are rejected with their names."""

import json
import os
from pathlib import Path

import pytest
from model_cases import LLMS
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.data.tokenizer import read_tokenizer
from torchmm.models.build import build_model
from torchmm.models.hf.load import open_files
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000


@pytest.fixture
def source(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Return the directory of a tiny causal LM with several weight files and a tokenizer."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLMS["llama"]))
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def build(source: Path) -> None:
    section = {"llm": {"source": str(source)}}
    build_model(ModelConfig.model_validate(section), FreezeConfig())


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "preprocessor_config.json"]
)
@pytest.mark.parametrize("content", [b"", b'{"a": [', b"[1]", b"null", b"\xff{}", DEEP.encode()])
def test_damaged_config_file_is_reported(source, name, content):
    (source / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"\[model\.llm\] source: .*/{name} "):
        build(source)


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_config_that_is_not_regular_file_is_reported(source, kind):
    file = source / "config.json"
    file.unlink()
    os.mkfifo(file) if kind == "fifo" else file.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json is not a regular file"):
        build(source)


@pytest.mark.parametrize("model_type", [7, None, ["llama"], {}, "nope"])
def test_config_with_wrong_model_type_is_rejected(source, model_type):
    (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        build(source)


def test_generation_config_that_stops_exports_is_rejected(source):
    (source / "generation_config.json").write_text('{"max_new_tokens": "x"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json has a value of a wrong type"):
        build(source)


@pytest.mark.parametrize("name", ["config.json", "torchmm.json"])
@pytest.mark.parametrize("kind", ["deep", "fifo"])
def test_unreadable_model_json_does_not_block(tmp_path, name, kind):
    file = tmp_path / name
    file.write_text(DEEP) if kind == "deep" else os.mkfifo(file)
    if name == "config.json":
        section = ModelConfig.model_validate({"source": str(tmp_path)})
        assert section.encoder_names == ["vision"]
        return
    with pytest.raises(ValueError, match=r"torchmm\.json"):
        ModelConfig.model_validate({"source": str(tmp_path)})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"a": [', "[1]", "7", DEEP])
def test_damaged_tokenizer_file_is_reported(source, name, content):
    (source / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"model\.tokenizer.*/{name} "):
        read_tokenizer("model.tokenizer", source)


@pytest.mark.parametrize("table", [{}, {"version": []}, {"added_tokens": 3}])
def test_tokenizer_with_wrong_values_is_config_error(source, table):
    (source / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"check tokenizer\.json"):
        read_tokenizer("model.tokenizer", source)


@pytest.mark.parametrize("template", [b"{% for x in %}", b"{{ m | nope }}", b"{{ x }}\xff"])
def test_invalid_chat_template_is_config_error(source, template):
    (source / "chat_template.jinja").write_bytes(template)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        read_tokenizer("model.tokenizer", source)


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"weight_map": {"a": ',
        "{}",
        "[]",
        "7",
        DEEP,
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 7}}',
        '{"weight_map": {"a": ["model.safetensors"]}}',
        '{"weight_map": {"a": "../other/x.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "missing.safetensors"}}',
        '{"weight_map": {"a": "' + "x" * 5000 + '"}}',
    ],
)
def test_damaged_weight_index_is_reported(source, content):
    (source / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX):
        open_files(str(source))


def test_weight_files_can_be_links(source, tmp_path):
    expected = set(open_files(str(source)))
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(source.glob("*.safetensors*"))):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    assert set(open_files(str(source))) == expected
