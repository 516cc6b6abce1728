"""Packs of several global batches, dealt to as many steps: what no single batch can balance.

A step lasts as long as its slowest group. Where packs are few, or one takes longer than a group's
fair share, no deal within a step is even (`groups.py`), and every step with such a pack waits for
it. Over the packs of W steps:

1. All packs are dealt to W x P groups of equal count and, as far as possible, equal work, for P
   pipelines: `balance_groups`, as within a step.
2. Groups that are still heavier than others go to the same step: the P heaviest to one, the next P
   to another. Who waits anyway then waits for one long group per step, not for one in every step.
3. Steps as dealt and steps as they came are arranged like any others (`step.py`), and those whose
   slowest groups end sooner, added up over the window, are taken: no window is dealt to take longer
   in the plan that runs, as far as `step.py` knows it.

Steps and groups come out even wherever that is possible, so batches stay alike: a step has more of
one kind of pack only where one group alone has too much for all. Rejected: packs sorted by size,
step after step, which makes groups as even and every batch another distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchmm.balance.compiled import Int64s
from torchmm.balance.reordering.groups import balance_groups
from torchmm.balance.reordering.step import PackTimes, StepReorder
from torchmm.common.batch import MicrobatchMeta


class WindowReorder:
    """Deals the packs of one window after the other.

    Args:
        reorder: arranges its steps.
    """

    def __init__(self, reorder: StepReorder) -> None:
        self._reorder = reorder

    def __call__(self, packs: Sequence[MicrobatchMeta], steps: int) -> list[list[int]]:
        """Indices of packs by step.

        Args:
            packs: of so many global batches, one after the other, each as a microbatch of its own.
        """
        times = self._reorder.stage_times(packs)
        natural = np.arange(len(packs)).reshape(steps, -1)
        dealt = self.dealt(times, steps)
        best: Int64s = min((natural, dealt), key=lambda each: self.lasts_ns(times, each))
        return best.tolist()

    def dealt(self, times: PackTimes, steps: int) -> Int64s:
        """(steps, packs): as even as they can be."""
        sizes_N = self._reorder.sizes_of(times)
        groups = balance_groups(sizes_N, steps * self._reorder.pipelines)
        heaviest_first = np.argsort(-sizes_N[groups].sum(axis=1), kind="stable")
        return groups[heaviest_first].reshape(steps, -1)

    def lasts_ns(self, times: PackTimes, steps: Int64s) -> float:
        """How long all steps take together.

        Args:
            steps: packs by step.
        """
        return sum(self._reorder.arranged(times.part(own)).ends_ns for own in steps)
