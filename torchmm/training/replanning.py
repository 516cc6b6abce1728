"""New plans when measured times have drifted away from those that steps are planned with.

After every step all ranks add up what their actions took; they then know the same and decide the
same, so that the plans of a pipeline's ranks stay one. Losses change by rounding only: another
order adds up the same gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchmm.balance.costs.layer_costs import task_durations
from torchmm.balance.rates import DriftMonitor, Kind, Total, step_totals
from torchmm.common.batch import Microbatch, ModuleDescription
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.training.pipeline import Pipeline
from torchmm.training.step import StepOutcome

SHOWN = 3


class Replanner:
    """Watches a run's steps and tells its pipeline with which times to plan.

    Args:
        drift: as `parallel.replan_drift`; 0: nothing is watched.
        modules: encoders, LLM and generator, whole.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        modules: Sequence[ModuleDescription],
        drift: float,
        logger: logging.Logger,
    ) -> None:
        self._pipeline, self._modules, self._logger = pipeline, modules, logger
        watched = drift > 0 and pipeline.layout.rank_count > 1
        self._monitor = DriftMonitor(drift) if watched else None
        kinds = sorted(COMPUTE, key=lambda kind: kind.value)
        self._kinds: list[Kind] = [(module.name, kind) for module in modules for kind in kinds]

    def observe(self, step: int, outcome: StepOutcome, microbatches: Sequence[Microbatch]) -> None:
        """Takes in a step of training; collective over all ranks."""
        if self._monitor is None:
            return
        graph = outcome.plan.graph
        metas, targets = [m.meta for m in microbatches], [m.target_count for m in microbatches]
        flops = task_durations(graph, self._modules, metas, targets)
        own = step_totals(outcome.result.records or (), graph, flops)
        rows = [own.get(kind, Total(0.0, 0.0)) for kind in self._kinds]
        totals = torch.tensor(rows, dtype=torch.float64, device=self._pipeline.device)
        dist.all_reduce(totals)
        by_kind = {
            kind: Total(*row) for kind, row in zip(self._kinds, totals.tolist(), strict=True)
        }
        if changes := self._monitor.observe(by_kind):
            self._pipeline.factors = self._monitor.factors
            told = ", ".join(
                f"{module} {kind.value} {times:.2f}x" for (module, kind), times in changes[:SHOWN]
            )
            more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
            self._logger.info(
                "step %d: times drifted from those planned with (%s%s): the next steps are planned "
                "anew", step, told, more,
            )  # fmt: skip
