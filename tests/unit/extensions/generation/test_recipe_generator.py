"""Recipe keys of the generator: mistakes are reported with a fix before anything is built."""

from pathlib import Path

import pytest
import tomli
import tomli_w
from recipe_problems import problems_of

from torchmm.common.errors import ConfigError
from torchmm.recipe.read import dump_recipe, load_recipe

ROOT = Path(__file__).parents[4]
MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_hidden_layers = 6
[model.generator.config]
_class_name = "PixArtTransformer2DModel"
num_layers = 4
[training]
global_batch_size = 8
[validation]
interval = 1
[[data.sources]]
path = "."
target_image_column = "image"
[[data.validation]]
path = "."
target_image_column = "image"
"""


def test_generator_accepts_module_settings(recipe: Path) -> None:
    arguments = [
        "--parallel.pipeline=4",
        "--parallel.generator.sub_microbatch_images=3",
        '--freeze.modules=["generator", "llm"]',
        "--optimizer.module_lr.generator.connector=1e-3",
        "--validation.generated_images=4",
    ]
    loaded = load_recipe(recipe, arguments, 4).recipe
    assert loaded.parallel.sub_microbatch_images("generator") == 3
    assert loaded.parallel.segments("generator") == 1
    (recipe.parent / "again.toml").write_text(dump_recipe(loaded))
    assert load_recipe(recipe.parent / "again.toml").recipe == loaded


@pytest.mark.parametrize(
    ("argument", "key", "words"),
    [
        ("--model.generator.source=./nowhere", "source", "no such directory"),
        ("--model.generator.context_tokens=0", "context_tokens", ">= 1"),
        ("--data.sources=[{path = '.'}]", "data.sources", 'target_image_column = "COLUMN"'),
        ("--parallel.generator.segments=2", "segments", "parallel.pipeline > 1"),
        ("--parallel.pipeline=8", "parallel", "is not equal to 4 ranks"),
        (
            '--freeze.modules=["llm", "generator", "generator.connector"]',
            "freeze",
            "no module to train",
        ),
        ('--freeze.modules=["generators"]', "freeze", 'did you mean "generator"'),
    ],
)
def test_invalid_generator_settings_are_rejected(
    recipe: Path, argument: str, key: str, words: str
) -> None:
    problems = problems_of(recipe, argument, world_size=4)
    assert any(key in problem and words in problem for problem in problems), problems


def test_generator_config_requires_class_name(recipe: Path) -> None:
    recipe.write_text(MODEL.replace("_class_name", "patch_size = 2  #"))
    assert "_class_name: is missing" in problems_of(recipe, world_size=4)[0]


def test_two_zero_loss_weights_are_rejected(recipe: Path) -> None:
    weights = [f"--model.generator.{name}=0" for name in ("loss_weight", "text_loss_weight")]
    assert "there is no loss" in problems_of(recipe, *weights, world_size=4)[0]


def test_generator_stages_require_layers(recipe: Path) -> None:
    problems = problems_of(
        recipe, "--parallel.pipeline=4", "--parallel.generator.segments=2", world_size=4
    )
    assert any(
        "generator has 4 layers, but 4 pipeline ranks x 2" in problem for problem in problems
    )


def test_generated_images_require_validation(recipe: Path) -> None:
    for argument in ("--validation.interval=0", "--data.validation=[{path = '.'}]"):
        problems = problems_of(recipe, "--validation.generated_images=2", argument, world_size=4)
        assert any("validation.generated_images" in problem for problem in problems), problems


def test_target_images_require_generator(recipe: Path) -> None:
    text = MODEL.replace("[model.generator.config]", "[model.encoders.generator.config]")
    recipe.write_text(text.replace("_class_name", "model_type"))
    problems = problems_of(recipe, "--validation.generated_images=2", world_size=4)
    for key in (
        "data.sources[0].target_image_column",
        "data.validation[0].target_image_column",
        "validation.generated_images",
    ):
        assert any(key in problem and "no generator" in problem for problem in problems), key
    assert any("model.encoders.generator" in problem for problem in problems)


def test_heads_of_inline_generator_must_be_divisible(monkeypatch, tmp_path) -> None:
    recipe = ROOT / "recipes" / "papers" / "pipeweaver_t2v_s.toml"
    load_recipe(recipe, ["--parallel.tensor=4"], 16)
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, ["--parallel.tensor=8"], 32)
    (problem,) = caught.value.problems
    assert "model.generator.config.num_attention_heads = 28: cannot be split over" in problem


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("vae={}", "model.generator.vae", "neither source nor config"),
        ('vae={source="nowhere"}', "model.generator.vae.source", "no such directory"),
        ('vae={config={},latent_mode="both"}', "model.generator.vae.latent_mode", "mean, sampled"),
        ("vae={config={},encode_batch_size=0}", "model.generator.vae.encode_batch_size", ">= 1"),
    ],
)
def test_autoencoder_settings_are_checked(recipe, override, key, text):
    problems = problems_of(recipe, f"--model.generator.{override}", world_size=1)
    assert any(key in problem and text in problem for problem in problems), problems


def test_stored_recipe_with_removed_key_loads_equal(recipe: Path, tmp_path: Path) -> None:
    tables = tomli.loads(dump_recipe(load_recipe(recipe).recipe))
    tables["model"]["generator"]["connector"] = "mlp"
    stored = tmp_path / "stored" / "recipe.toml"
    stored.parent.mkdir()
    stored.write_text(tomli_w.dumps(tables))
    assert load_recipe(stored).recipe == load_recipe(recipe).recipe
    (problem,) = problems_of(recipe, "--model.generator.connector=7")
    assert "model.generator.connector = 7: is no longer supported" in problem


def test_quickstart_generation_recipes_are_valid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "validation"):
        (tmp_path / "data" / "tuxpaint_stamps" / name).mkdir(parents=True)
    (tmp_path / "data" / "tokenizer").mkdir()
    loaded = load_recipe(ROOT / "recipes" / "quickstart_generation.toml", [], 2)
    assert loaded.recipe.model.generator is not None
    (tmp_path / "data" / "stamp_vae").mkdir()
    section = load_recipe(ROOT / "recipes" / "quickstart_latents.toml", [], 2).recipe.model
    assert section.generator is not None and section.generator.vae is not None
    assert section.generator.config["num_layers"] == 4
