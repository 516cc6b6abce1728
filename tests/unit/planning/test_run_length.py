"""Tests of steps per epoch, and of warnings about lost results and repeated data."""

from itertools import islice
from pathlib import Path

import pytest
import tomli_w
from fuzz.data import make_data
from fuzz.draw import Table, merged
from fuzz.recipes import complete
from installed import needs_extension

from torchmm.common.errors import ConfigError
from torchmm.common.extensions import find_entry
from torchmm.data.build import build_loader
from torchmm.planning.first_step import training_samples
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.planning.run_length import (
    checkpoint_bytes,
    estimate_pass_steps,
    lost_steps_warning,
    resolve_epochs,
    run_length_lines,
)
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.model_build import build_meta_model

LLM = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    make_data(directory)
    return directory


def read(files: Path, run_dir: Path, **sections: Table) -> Recipe:
    """Write and load a tiny recipe with the specified sections."""
    model = {
        "llm": {"config": LLM},
        "encoders": {"vision": {"config": VISION, "connector": "mlp"}},
    }
    content = complete({"model": model}, "images", files, run_dir, steps=1)
    content["training"] = {"sequence_length": 64, "device": "cpu", "global_batch_size": 4}
    if find_entry("sections", "Recipe.simulation") is not None:
        content["simulation"] = {"device": "cpu"}
    (run_dir / "recipe.toml").write_text(tomli_w.dumps(merged(content, sections)))
    return load_recipe(run_dir / "recipe.toml", [], 1).recipe


@needs_extension("extensions.reports")
@pytest.mark.parametrize("epochs", [0.5, 1.0, 3.0])
def test_epochs_are_converted_to_steps(data, tmp_path, monkeypatch, epochs):
    recipe = read(data, tmp_path, training={"epochs": epochs}, metrics={"profile_step": 1})
    model, tokenizer = build_meta_model(resolve_recipe(recipe, 1))
    counted = resolve_epochs(recipe, model, tokenizer).training
    loader = build_loader(
        recipe.data,
        recipe.training,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        **model.sample_specs(tokenizer),
    )
    passes = [batch.epoch for batch in islice(loader, counted.steps)]
    assert counted.epochs is None and passes[-1] >= epochs > max([0.0, *passes[:-1]])
    # Longer runs are extrapolated from the first steps.
    monkeypatch.setattr("torchmm.planning.run_length.EXACT_STEPS", max(1, counted.steps // 2))
    estimated = resolve_epochs(recipe, model, tokenizer).training.steps
    assert abs(estimated - counted.steps) <= max(1, 0.2 * counted.steps)


def test_keys_are_checked_against_steps_of_epochs(data, tmp_path):
    recipe = read(data, tmp_path, training={"epochs": 0.01}, optimizer={"warmup_steps": 50})
    parts = build_meta_model(resolve_recipe(recipe, 1))
    with pytest.raises(ConfigError, match=r"epochs = 0.01 is 1 steps: optimizer.warmup_steps"):
        resolve_epochs(recipe, *parts)


def test_long_run_without_checkpoints_warns() -> None:
    recipe = Recipe()
    assert "checkpoint.interval = 0: a run of about 2.0 hours" in lost_steps_warning(recipe, 2.0)
    assert not lost_steps_warning(recipe, 0.5)
    saved = recipe.checkpoint.model_copy(update={"interval": 500})
    assert not lost_steps_warning(recipe.model_copy(update={"checkpoint": saved}), 2.0)


def test_checkpoint_size_includes_trained_states(data, tmp_path):
    recipe = read(data, tmp_path, training={"steps": 10}, freeze={"modules": ["vision"]})
    model, tokenizer = build_meta_model(resolve_recipe(recipe, 1))
    counts = model.parameter_counts().values()
    trained = sum(part for _, part in counts)
    assert checkpoint_bytes(recipe, model) == 4 * sum(all_ for all_, _ in counts) + 8 * trained
    samples = training_samples(recipe, model, tokenizer)
    assert samples is not None
    assert (
        "at most 3 of"
        in run_length_lines(recipe, model, estimate_pass_steps(samples, recipe), 1.0)["checkpoints"]
    )
