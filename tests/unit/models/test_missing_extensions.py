"""Models that require an extension are rejected if the extension is not installed."""

from pathlib import Path

import pytest
from model_cases import ENCODERS, LLMS, problems_of_model
from recipe_problems import problems_of

from torchmm.common import extensions
from torchmm.common.errors import ConfigError
from torchmm.common.generated import GeneratorSpec
from torchmm.data.target_images import make_target_preprocessor

GENERATION = '"generation" is not installed'
AUTO_MODELS = '"auto_models" is not installed'
GENERATOR = {"config": {"_class_name": "PixArtTransformer2DModel"}}
RECIPE = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
[model.generator.config]
_class_name = "PixArtTransformer2DModel"
[[data.sources]]
path = "."
target_image_column = "image"
"""


@pytest.fixture(autouse=True)
def core_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the entries of all extensions."""
    monkeypatch.setattr(extensions, "find_entries", lambda table: ())


def test_generator_without_extension_is_config_error() -> None:
    section = {"llm": {"config": LLMS["llama"]}, "generator": GENERATOR}
    (problem,) = problems_of_model(section)
    assert problem.startswith("model.generator: ") and GENERATION in problem
    with pytest.raises(ConfigError, match=GENERATION):
        make_target_preprocessor(GeneratorSpec(8, 4), seed=0, max_pixels=100)


def test_generator_recipe_without_extension_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    problems = problems_of(file, world_size=1)
    assert any("model.generator: " in p and GENERATION in p for p in problems), problems


def test_unlisted_llm_without_extension_is_config_error() -> None:
    section = {"llm": {"config": {**LLMS["llama"], "model_type": "olmo"}}}
    (problem,) = problems_of_model(section)
    assert "'olmo' is not registered" in problem and AUTO_MODELS in problem


def test_unlisted_encoder_without_extension_is_config_error() -> None:
    encoder = {"config": {**ENCODERS["clip"], "model_type": "vit"}}
    section = {"llm": {"config": LLMS["llama"]}, "encoders": {"eye": encoder}}
    (problem,) = problems_of_model(section)
    assert "'vit' is not supported" in problem and AUTO_MODELS in problem
