"""`revision` pins files from the Hub: configs, processors, weights, tokenizers.

The local cache replaces the Hub. It has two commits of one model.
"""

from __future__ import annotations

import json
import logging
import shutil

import huggingface_hub.constants
import pytest
import transformers.utils.hub
from recipe_problems import problems_of
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_recipe import QUICKSTART
from torch import zeros

from torchmm.common.errors import ConfigError
from torchmm.data.tokenizer import load_tokenizer
from torchmm.models.build import _read_image_processor
from torchmm.models.hf.config import load_config
from torchmm.models.hf.load import open_files
from torchmm.recipe.model_section import LlmConfig, ModelConfig, split_revision

OLD, NEW = "a" * 40, "b" * 40
NAME = "owner/name"


@pytest.fixture
def hub(tmp_path, monkeypatch, real_data) -> None:
    """Write commit OLD of width 32, and commit NEW of width 64, which is the commit of "main"."""
    folder = tmp_path / "models--owner--name"
    for commit, width in ((OLD, 32), (NEW, 64)):
        files = folder / "snapshots" / commit
        files.mkdir(parents=True)
        config = {"model_type": "llama", "hidden_size": width, "num_attention_heads": 4}
        (files / "config.json").write_text(json.dumps(config))
        settings = {"image_processor_type": "CLIPImageProcessor", "size": width}
        (files / "preprocessor_config.json").write_text(json.dumps(settings))
        save_file({"w": zeros(width)}, files / "model.safetensors")
        for file in (real_data / "tokenizer").iterdir():
            shutil.copy(file, files / file.name)
        changed = json.loads((files / "tokenizer_config.json").read_text())
        changed["model_max_length"] = width
        (files / "tokenizer_config.json").write_text(json.dumps(changed))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    for module in (huggingface_hub.constants, transformers.utils.hub.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("revision", "width"), [(OLD, 32), (NEW, 64), (None, 64)])
def test_all_files_are_from_revision(hub, revision, width, caplog):
    section = LlmConfig(source=NAME, revision=revision)
    assert section.source_with_revision is not None
    with caplog.at_level(logging.INFO):
        assert load_config("model.llm", section.source_with_revision, None).hidden_size == width
    is_logged = f'the current revision is "{NEW}"' in caplog.text
    assert is_logged == (revision is None)
    assert _read_image_processor(section.source_with_revision)["size"] == width
    tensor = open_files(section.source_with_revision)["w"]
    with safe_open(tensor.path, "pt") as file:
        assert file.get_slice("w").get_shape() == [width]
    assert load_tokenizer(ModelConfig(llm=section)).model_max_length == width
    separate = ModelConfig(llm=LlmConfig(source="x"), tokenizer=NAME, tokenizer_revision=revision)
    assert load_tokenizer(separate).model_max_length == width


def test_missing_directory_is_distinguished_from_hub_id(hub):
    with pytest.raises(
        ConfigError, match="not a local directory, so requested from the Hugging Face Hub"
    ):
        load_config("model.llm", "dtaa/x", None)


def test_revision_without_hub_source_is_rejected(real_data, tmp_path):
    wrong = "--model.llm.revision=abc", "--model.tokenizer_revision=abc"
    actual = problems_of(QUICKSTART, *wrong, world_size=1)
    assert any(
        "model.llm.revision" in p and "cannot be applied to an inline config" in p for p in actual
    )
    assert any("model.tokenizer_revision" in p and "directory" in p for p in actual)


def test_source_and_revision_are_split(tmp_path):
    assert split_revision("a/b@v1") == ("a/b", "v1")
    assert split_revision("a/b") == ("a/b", None)
    odd = tmp_path / "x@y"
    odd.mkdir()
    assert split_revision(str(odd)) == (str(odd), None)
