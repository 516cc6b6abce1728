"""Range of memory limits for which selective recomputation has a choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.pipeweaver.activation_checkpointing.rank_problems import (
    CandidateTables,
    build_rank_problems,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.plan import PipelinePlan


class MemoryNeeds(NamedTuple):
    """Lowest and highest peak memory of one rank."""

    least_bytes: int
    """Peak if every pair uses its candidate with the lowest memory use."""
    most_bytes: int
    """Peak if every pair uses its fastest candidate."""


def memory_needs(
    plan: PipelinePlan,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    tuning: LayerTuning,
    targets: Sequence[int] | None = None,
) -> list[MemoryNeeds]:
    """Return the lowest and highest peak memory of each rank. Arguments as for `tune_layers`."""
    step = plan.graph, modules, microbatches
    costs = compute_plan_costs(*step, tuning.model, targets=targets, layerwise=tuning.layerwise)
    choices = tuning.choices(*step, targets)
    needs = []
    for each in build_rank_problems(
        plan, costs, CandidateTables(costs, choices, tuning.candidates), 0
    ):
        problem = each.problem
        peaks = [
            int((problem.used_bytes_T(choice_N) - problem.free_bytes_T).max())
            for choice_N in (problem.min_memory_N, problem.fastest_N)
        ]
        needs.append(MemoryNeeds(*peaks))
    return needs
