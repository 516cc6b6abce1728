"""Model of a recipe on the meta device."""

from __future__ import annotations

import torch

from torchmm.common.errors import ConfigError
from torchmm.data.tokenizer import read_new_tokens
from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.converters import find_converters
from torchmm.recipe.recipe import Recipe


def recipe_model(recipe: Recipe, dtype: torch.dtype = torch.float32) -> MultimodalModel:
    """Return the model of a recipe on the meta device, with adapters, annotated by its converters.

    Args:
        recipe: Recipe of a run.
        dtype: Data type of the parameters.

    Raises:
        ConfigError: All problems of the sections.
    """
    new_tokens = read_new_tokens(recipe.model)
    model = build_model(recipe.model, recipe.freeze, dtype, recipe.adapters, new_tokens)
    training = recipe.training
    is_chunked = training.dtype == "bfloat16" and training.loss == "cross_entropy"
    if recipe.model.chunked_loss is None and is_chunked:
        model.llm.chunk_sharded_loss()
    validation = recipe.validation
    longest = training.sequence_length
    longest += validation.max_new_tokens if validation.num_samples else 0
    if problem := model.llm.rotary_limits.problem(longest):
        raise ConfigError(f"[model] training.sequence_length is too large: {problem}")
    for converter in find_converters(recipe):
        for module in model.modality_modules():
            converter.annotate(module)
    return model
