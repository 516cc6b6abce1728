"""A recipe on a number of devices: open sizes replaced by numbers, once.

    run = resolve(recipe, world_size)
    run.llm, run.units, run.shares

How large a mesh is, how many shares a global batch has and whether modules have ranks of their own
is answered here; nothing computes it from the recipe again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchmm.common.module_names import LLM
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import encoder_mesh_sizes, resolve_sizes, units_of
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.sizes import MeshSizes, replica_groups


@dataclass(frozen=True)
class Resolved:
    """A recipe and the sizes that follow from it.

    Attributes:
        world_size: devices of the run.
        llm: mesh sizes of the LLM; without modules on ranks of their own, those of the whole run.
        units: mesh sizes by module, where modules have ranks of their own (disaggregated); empty
            otherwise.
        choices: Values chosen for "auto" with the reason, as text by key (`choose_arrangement`).
    """

    recipe: Recipe
    world_size: int
    llm: MeshSizes
    units: Mapping[str, MeshSizes]
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def shares(self) -> int:
        """Shares of a global batch: data-parallel ranks, in groups that share rows of the LLM; or
        replica groups of modules apart."""
        if self.units:
            return replica_groups(self.units)
        return self.llm.data_parallel // self.recipe.parallel.context

    @property
    def is_cut(self) -> bool:
        """Whether the model is cut into stages on several ranks of a plan."""
        return self.llm.pipeline * self.recipe.parallel.mirrors > 1 or bool(self.units)

    @property
    def gathers_by_layer(self) -> bool:
        """Whether FSDP2 gathers parameters layer by layer in every forward and backward."""
        return not self.is_cut and self.recipe.parallel.reshard_after_forward != "never"

    @property
    def lockstep_shares(self) -> int:
        """Number of consecutive shares of the global batch whose ranks run layers in lockstep.

        The ranks of a shard group wait for each other in the all-gather of every layer, and
        expert-parallel ranks in the exchange of tokens. In a pipeline, FSDP2 gathers once per step.
        """
        if self.units:
            return 1
        parallel = self.recipe.parallel
        ranks = self.llm.shard if self.gathers_by_layer else parallel.expert
        return -(-ranks // parallel.context)

    def with_parallel(self, parallel: ParallelConfig) -> Resolved:
        """The same sizes with another section, whose LLM has as many ranks."""
        return self.with_recipe(self.recipe.model_copy(update={"parallel": parallel}))

    def with_recipe(self, recipe: Recipe) -> Resolved:
        """Return the same sizes with another recipe."""
        return replace(self, recipe=recipe)

    def encoder(self, name: str) -> MeshSizes:
        """Mesh sizes of an encoder: its own, wherever it has any."""
        if self.units:
            return self.units[name]
        if self.recipe.parallel.placement == "colocated":
            return encoder_mesh_sizes(self.recipe.parallel, name, self.llm)
        return self.llm


def resolve(recipe: Recipe, world_size: int) -> Resolved:
    """Sizes of a recipe on `world_size` devices.

    Raises:
        ConfigError: the sizes cannot make up `world_size`.
    """
    units = units_of(recipe, world_size)
    llm = units[LLM] if units else resolve_sizes(recipe.parallel, world_size)
    return Resolved(recipe, world_size, llm, units)
