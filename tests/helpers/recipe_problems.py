"""Problems of a recipe."""

from pathlib import Path

import pytest

from torchmm.common.errors import ConfigError
from torchmm.recipe.read import load_recipe

UNITS_MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_hidden_layers = 6
num_attention_heads = 4
hidden_size = 64
intermediate_size = 64
[model.encoders.vision.config]
model_type = "siglip_vision_model"
num_hidden_layers = 5
num_attention_heads = 4
hidden_size = 64
intermediate_size = 64
[training]
global_batch_size = 8
sequence_length = 256
"""
"""An encoder of 5 layers and an LLM of 6, for recipes of disaggregated modules."""


def problems_of(path: Path, *overrides: str, world_size: int | None = None) -> list[str]:
    """Return the problems that `load_recipe` reports; fail if it reports none."""
    with pytest.raises(ConfigError) as error:
        load_recipe(path, list(overrides), world_size)
    return error.value.problems
