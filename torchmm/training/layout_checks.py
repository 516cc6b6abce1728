"""What keeps a model from being split as its recipe says, found before any process group.

The recipe's own checks (`torchmm.recipe.check`) know what stands in it. Here is the model: its
heads and experts, the layers of sources, weights that are tied, and the stages that the first
step's samples lead to.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from torchmm.common.errors import ConfigError
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.tensor.apply import tensor_problems
from torchmm.planning.executions import run_executions
from torchmm.planning.step import plan_layout
from torchmm.recipe.placement_sizes import units_of
from torchmm.recipe.read import resolve_layout
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.sizes import replica_groups
from torchmm.training.build import typical_microbatches


def check_layout(
    recipe: Recipe, model: MultimodalModel, tokenizer: PreTrainedTokenizerBase, world_size: int
) -> None:
    """Raises if the model cannot be split over so many ranks.

    Args:
        model: on the meta device, whole.

    Raises:
        ConfigError: with every problem found.
        DataError: the samples whose sizes decide the cut cannot be read.
    """
    if problems := _tensor_problems(recipe, model, world_size):
        raise ConfigError(problems)
    parallel, units = recipe.parallel, units_of(recipe, world_size)
    if parallel.pipeline * parallel.mirrors == 1 and not units:
        return
    llm = resolve_layout(parallel, world_size) if not units else units["llm"]
    shares = replica_groups(units) if units else llm.data_parallel
    microbatches = typical_microbatches(recipe, model, tokenizer, world_size, shares)
    descriptions = [module.describe() for module in model.modality_modules()]
    plan_layout(parallel, descriptions, microbatches, units or None)


def _tensor_problems(recipe: Recipe, model: MultimodalModel, world_size: int) -> list[str]:
    modules = list(model.modality_modules())
    executions = run_executions(recipe, [module.describe() for module in modules], world_size)
    overlaps = recipe.parallel.async_tensor_parallel
    return [
        problem
        for module in modules
        for problem in tensor_problems(module, executions[module.name].tensor, overlaps)
    ]
