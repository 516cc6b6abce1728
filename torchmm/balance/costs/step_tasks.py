"""The tasks of a step with their sizes, module by module.

All stages of a module have the same tasks, so sizes are worked out once per module; which gradients
a task needs differs from stage to stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.costs.sizes import (
    TaskSizes,
    encoder_sizes,
    generator_sizes,
    llm_sizes,
)
from torchmm.common.batch import MicrobatchMeta, ModuleDescription, even_ranges
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.orders import inputs_need_gradient

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ModuleTasks:
    """The tasks of each stage of one module.

    Attributes:
        keys: (microbatch, sub-microbatch) of each of the N tasks.
        sizes: what is computed, padding included.
        useful: without padding.
    """

    module: ModuleDescription
    keys: list[tuple[int, int]]
    sizes: TaskSizes
    useful: TaskSizes

    def gradient_arrives_N(self, graph: StageGraph, stage: int) -> NDArray[np.bool_]:
        """By task: whether a gradient goes back from this stage to the one before."""
        flags = [inputs_need_gradient(graph, stage, i) for i in range(graph.microbatches)]
        return np.array([flags[i] for i, _ in self.keys], bool)


def module_tasks(
    graph: StageGraph,
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int],
) -> ModuleTasks:
    """The tasks of a module's stages.

    Args:
        graph: of the step.
        module: whole.
        microbatches: of the graph.
        targets: positions that count in the loss, by microbatch.

    Raises:
        ValueError: there are not as many microbatches as the graph has, or a microbatch has more
            sub-microbatches than images.
    """
    if not len(microbatches) == len(targets) == graph.microbatches:
        raise ValueError(
            f"metadata of {len(microbatches)} microbatches and {len(targets)} numbers of targets "
            f"for a graph of {graph.microbatches}; give one of each for every microbatch"
        )
    if module.kind == "llm":
        keys = [(i, 0) for i in range(graph.microbatches)]
        sizes = llm_sizes(microbatches, targets, padding=True)
        return ModuleTasks(module, keys, sizes, llm_sizes(microbatches, targets, padding=False))
    parts = graph.sub_microbatches.get(module.name, (1,) * graph.microbatches)
    keys = [(i, part) for i, count in enumerate(parts) for part in range(count)]
    if module.kind == "encoder":
        seen = [meta.images_read_by(module.name) for meta in microbatches]
        sizes = encoder_sizes(module, _groups(module.name, seen, parts))
    else:
        drawn = [meta.generated for meta in microbatches]
        sizes = generator_sizes(_groups(module.name, drawn, parts))
    return ModuleTasks(module, keys, sizes, sizes)


def _groups(name: str, images: Sequence[list[T]], parts: Sequence[int]) -> list[list[T]]:
    """The images of every task; none where one task has a microbatch without images."""
    groups: list[list[T]] = []
    for index, (own, count) in enumerate(zip(images, parts, strict=True)):
        if count == 1 or not own:
            groups += [own] * count
            continue
        if count > len(own):
            raise ValueError(
                f"{name}: {count} sub-microbatches for the {len(own)} images of microbatch "
                f"{index}; plan at most one per image"
            )
        if count:
            groups += [own[r.start : r.stop] for r in even_ranges(len(own), count)]
    return groups
