"""Interface between the training loop and planning: `Planner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.runtime import StepResult

StepMetas = Sequence[Sequence[MicrobatchMeta]]
"""Metadata of a step by data-parallel rank and microbatch."""
NextStepMetas = Callable[[], StepMetas | None]
"""Function that returns the metadata of the next step. None if unknown or at the end of the data.
"""


class StepPlan(NamedTuple):
    """Plan of a step."""

    plan: PipelinePlan
    statistics: Mapping[str, Any] = MappingProxyType({})
    """Planning metrics by their names in `torchmm.training.metrics`. Empty on ranks that did not
    plan the step."""


class Planner:
    """Planner of the steps of a run. All ranks have a planner of the same class.

    By default, all methods except `plan` do nothing. Plans then do not depend on measured times,
    and no background process runs.
    """

    def plan(
        self, step: int, microbatches: Sequence[Microbatch], upcoming: NextStepMetas
    ) -> StepPlan:
        """Return the plan of the next step. Collective over all ranks.

        Args:
            step: Number of the step.
            microbatches: Microbatches of this data-parallel rank.
            upcoming: Function that returns the metadata of the next step.

        Raises:
            PlanError: The schedule does not support the microbatches, they do not fit into memory,
                or ranks of a pipeline have different microbatches.
        """
        raise NotImplementedError

    def plan_ahead(self, upcoming: NextStepMetas) -> None:
        """Plan the next step while the device computes. Not collective.

        Args:
            upcoming: Function that returns the metadata of the next step.
        """

    def observe_step(
        self,
        step: int,
        planned: StepPlan,
        result: StepResult,
        microbatches: Sequence[Microbatch],
        step_ms: float,
    ) -> None:
        """Use the measured times of a finished step to plan later steps. Collective over all ranks.

        Args:
            step: Number of the step.
            planned: Return value of `plan` for this step.
            result: Result of running the plan, with records.
            microbatches: Microbatches of this data-parallel rank.
            step_ms: Duration of the step in ms.
        """

    def close(self) -> None:
        """Stop background planning, also if training fails. Not collective."""
