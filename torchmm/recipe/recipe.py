"""The schema of a recipe: one section class per TOML table, with keys, types and defaults.

The schema is strict (unknown keys and wrong types are errors) and frozen, and does not import
torch. `torchmm.recipe.read` reads TOML files and collects all problems.
`scripts/recipe_reference.py` writes `docs/reference/recipes.md` from the docstrings of sections.
"""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.model_section import (
    AdapterConfig,
    FreezeConfig,
    ModelConfig,
)
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.section import Section, with_extensions
from torchmm.recipe.training_section import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    MetricsConfig,
    OptimizerConfig,
    TrainingConfig,
    ValidationConfig,
)


@with_extensions
class Recipe(Section):
    """A complete training run."""

    name: str = "run"
    """Name of the run. Its files are written to `output_dir`/`name`."""
    output_dir: str = "outputs"
    """Parent directory of all run directories."""
    model: ModelConfig = ModelConfig()
    freeze: FreezeConfig = FreezeConfig()
    adapters: dict[str, AdapterConfig] = Field(default={})
    """Low-rank adapters (LoRA) by name."""
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()

    @property
    def adapted_modules(self) -> set[str]:
        """Names of the modules with adapters, whose weights are frozen."""
        return {module for adapter in self.adapters.values() for module in adapter.modules}

    @property
    def describes_samples(self) -> bool:
        """True if a section describes samples, so that data and tokenizer are optional."""
        sections = (value for value in vars(self).values() if isinstance(value, Section))
        return any(section.describes_samples for section in sections)

    @property
    def tuned_modules(self) -> frozenset[str]:
        """Names of the modules for which plans select the recomputed layers."""
        bounded = self.model.encoder_names if self.parallel.bounds_encoders else []
        modes = {
            name: self.activation_checkpoint.mode_of(
                name, bounded=name in bounded, is_eager_on_cuda=False
            )
            for name in self.model.modality_modules
        }
        return frozenset(name for name, mode in modes.items() if mode == "auto")
