"""Models and tokenizers with Python files are always rejected."""

import json
from pathlib import Path

import pytest

from torchmm.common.errors import ConfigError
from torchmm.data.tokenizer import load_tokenizer, read_tokenizer
from torchmm.models.build import build_model
from torchmm.models.hf.config import load_config
from torchmm.recipe.model_section import FreezeConfig, ModelConfig


@pytest.fixture
def foreign(tmp_path, monkeypatch) -> Path:
    """Write a model with a Python file. Importing the file creates a file "ran"."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    directory = tmp_path / "foreign"
    directory.mkdir()
    (directory / "code.py").write_text(
        f"open({str(directory / 'ran')!r}, 'w').close()\n"
        "from transformers import PreTrainedConfig, PreTrainedTokenizerFast\n"
        "class Config(PreTrainedConfig):\n    model_type = 'foreign'\n"
        "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    names = {"AutoConfig": "code.Config", "AutoTokenizer": [None, "code.Tokenizer"]}
    config = {"model_type": "foreign", "auto_map": names}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": names}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def rejection(load, *arguments, match: str) -> str:
    with pytest.raises(ConfigError, match=match) as caught:
        load(*arguments)
    assert "transformers" in str(caught.value) and "torchmm does not run" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ["model", "model.llm", "model.encoders.vision"])
def test_model_with_python_code_is_rejected(foreign, key):
    message = rejection(load_config, key, str(foreign), None, match=rf"\[{key}\] source = ")
    assert str(foreign) in message and "trust_remote_code=True" not in message
    assert not (foreign / "ran").exists()


def test_tokenizer_with_python_code_is_rejected(foreign):
    model = ModelConfig.model_validate({"tokenizer": str(foreign), "llm": {"source": str(foreign)}})
    message = rejection(load_tokenizer, model, match="model.tokenizer = ")
    assert str(foreign) in message and "trust_remote_code=True" not in message
    rejection(read_tokenizer, "tokenizer of the export", foreign, match="of the export")
    assert not (foreign / "ran").exists()


def test_registered_family_ignores_python_code(foreign):
    """Check a checkpoint that has a different version of a registered class."""
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "vocab_size": 99}
    config |= {"num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 2}
    (foreign / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    section = {"llm": {"source": str(foreign)}}
    model = build_model(ModelConfig.model_validate(section), FreezeConfig())
    assert type(model.llm.backbone).__module__.startswith("transformers.")
    assert not (foreign / "ran").exists()
