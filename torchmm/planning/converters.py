"""Interface of model converters, which replace submodules of a model before parallelization.

Extensions add converters with entries of the table "model_converters"
(`torchmm.common.extensions`). A target is a subclass of `ModelConverter`. The argument of `is_used`
is the recipe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from torchmm.common.extensions import find_entries
from torchmm.models.layered import LayeredModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.recipe import Recipe


class ModelConverter(ABC):
    """Replacement of submodules of a model, such as linears by float8 linears.

    Args:
        recipe: Recipe of the run.
    """

    @abstractmethod
    def __init__(self, recipe: Recipe) -> None: ...

    @abstractmethod
    def annotate(self, module: LayeredModule) -> None:
        """Set the attributes of a module that cost models read, such as `rounded`."""

    @abstractmethod
    def find_problems(
        self, modules: Sequence[LayeredModule], device: torch.device, tensor: Mapping[str, int]
    ) -> list[str]:
        """Return why the modules cannot be converted. Called before the process group starts.

        Args:
            modules: All modules of the model, on the meta device.
            device: Device that runs the model.
            tensor: Number of tensor-parallel ranks by module name.
        """

    @abstractmethod
    def convert(self, module: LayeredModule) -> None:
        """Convert a stage in place, on the meta device. Names of parameters do not change."""

    @abstractmethod
    def summary_lines(self, model: MultimodalModel) -> dict[str, str]:
        """Return the lines of the run summary, by title."""


def find_converters(recipe: Recipe) -> list[ModelConverter]:
    """Return the converters that a recipe uses."""
    entries = find_entries("model_converters")
    return [entry.load()(recipe) for entry in entries if entry.is_used(recipe)]
