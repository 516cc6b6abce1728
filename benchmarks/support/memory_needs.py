"""Between what memory limits layer tuning has something to choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.pipeweaver.recomputation.rank_problems import Rows, rank_problems
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.plan import PipelinePlan


class MemoryNeeds(NamedTuple):
    """Peaks of one rank, in bytes."""

    least_bytes: int
    """With full recomputation that may be."""
    most_bytes: int
    """With everything kept that may be."""


def memory_needs(
    plan: PipelinePlan,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    tuning: LayerTuning,
    targets: Sequence[int] | None = None,
) -> list[MemoryNeeds]:
    """Between what limits there is something to choose, by rank; arguments as of `tune_layers`."""
    given = plan.graph, modules, microbatches
    costs = plan_costs(*given, tuning.model, targets=targets, layerwise=tuning.layerwise)
    choices = tuning.choices(*given, targets)
    found = []
    for each in rank_problems(plan, costs, Rows(costs, choices, tuning.candidates), 0):
        problem = each.problem
        peaks = [
            int((problem.used_bytes_T(choice_N) - problem.free_bytes_T).max())
            for choice_N in (problem.leanest_N, problem.fastest_N)
        ]
        found.append(MemoryNeeds(*peaks))
    return found
