"""A recipe on a number of devices, with resolved parallelism degrees.

    run = resolve(recipe, world_size)
    run.llm, run.units, run.shares

Only this module derives mesh sizes, shares of the global batch and disaggregated modules from a
recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchmm.common.module_names import LLM
from torchmm.recipe.mesh_sizes import MeshSizes, replica_groups
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import encoder_mesh_sizes, resolve_sizes, resolved_unit_sizes
from torchmm.recipe.recipe import Recipe


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe and the parallelism degrees that follow from it.

    Attributes:
        recipe: Recipe of the run.
        world_size: Number of devices of the run.
        llm: Parallelism degrees of the LLM. Without disaggregated modules, those of all ranks.
        units: Parallelism degrees of each disaggregated module, or empty.
        choices: Automatic values and their reasons, as text by key (`choose_data_balancing`).
    """

    recipe: Recipe
    world_size: int
    llm: MeshSizes
    units: Mapping[str, MeshSizes]
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_parallel_size(self) -> int:
        """Number of shares of the global batch.

        It is the number of replica groups of disaggregated modules. Otherwise, it is the number of
        data-parallel ranks, divided by the context-parallel degree.
        """
        if self.units:
            return replica_groups(self.units)
        return self.llm.data_parallel // self.recipe.parallel.context

    @property
    def is_pipelined(self) -> bool:
        """True if the model is split into stages on several ranks of a plan."""
        return self.llm.pipeline * self.recipe.parallel.mirrors > 1 or bool(self.units)

    @property
    def unshards_per_layer(self) -> bool:
        """True if FSDP2 all-gathers parameters per layer in each forward and backward pass."""
        return not self.is_pipelined and self.recipe.parallel.reshard_after_forward != "never"

    @property
    def lockstep_size(self) -> int:
        """Number of consecutive shares of the global batch whose ranks run layers in lockstep.

        The ranks of a shard group wait for each other in the all-gather of every layer, and
        expert-parallel ranks in the exchange of tokens. In a pipeline, FSDP2 all-gathers once per
        step.
        """
        if self.units:
            return 1
        parallel = self.recipe.parallel
        ranks = self.llm.shard if self.unshards_per_layer else parallel.expert
        return -(-ranks // parallel.context)

    def with_parallel(self, parallel: ParallelConfig) -> ResolvedRecipe:
        """Return the same degrees with a different section. The LLM must have as many ranks."""
        return self.with_recipe(self.recipe.model_copy(update={"parallel": parallel}))

    def with_recipe(self, recipe: Recipe) -> ResolvedRecipe:
        """Return the same degrees with a different recipe."""
        return replace(self, recipe=recipe)

    def encoder(self, name: str) -> MeshSizes:
        """Return the parallelism degrees of an encoder. The default is those of the LLM."""
        if self.units:
            return self.units[name]
        if self.recipe.parallel.placement == "colocated":
            return encoder_mesh_sizes(self.recipe.parallel, name, self.llm)
        return self.llm


def resolve_recipe(recipe: Recipe, world_size: int) -> ResolvedRecipe:
    """Resolve the parallelism degrees of a recipe on `world_size` devices.

    Raises:
        ConfigError: The degrees do not match `world_size`.
    """
    units = resolved_unit_sizes(recipe, world_size)
    llm = units[LLM] if units else resolve_sizes(recipe.parallel, world_size)
    return ResolvedRecipe(recipe, world_size, llm, units)
