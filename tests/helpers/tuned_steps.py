"""Memory of tuned steps on a CPU at each allocation, compared with their limits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from support.allocations import CountPeak, held_in_a_step
from support.memory_needs import memory_needs

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning, tune_layers
from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.costs.execution import Execution
from torchmm.costs.flops import module_layers
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import PipelineStage, make_stage
from torchmm.pipelining.schedules.layouts import StageSplit, build_layout
from torchmm.pipelining.schedules.registry import ORDERS
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

SHARES = (1.0, 0.5, 0.0)
"""Positions of limits between the minimum that a plan needs and the maximum that it can use."""


class Peaks(NamedTuple):
    """Peak memory of a step in bytes."""

    limit: int
    predicted: int
    measured: int


class TunedStep:
    """A model in a pipeline of one rank with any order of tasks.

    Args:
        model: Model on the CPU with weights, divided into `stages`, whose layers have modes.
        layout: Layout of the stages.
    """

    def __init__(
        self, model: MultimodalModel, stages: Mapping[int, PipelineStage], layout: StageLayout
    ) -> None:
        self.model, self.stages, self.layout = model, stages, layout
        self.modules = model.modality_modules()
        self.descriptions = [module.describe() for module in self.modules]
        self.names = frozenset(module.name for module in self.modules)
        executions = {name: Execution() for name in self.names}
        self.costs = CostModel(load_profile("cpu"), "float32", executions)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer_bytes = sum(8 * p.numel() for p in self.trained)

    def plan(
        self, schedule: str, batch: Sequence[Microbatch], parts: Mapping[str, tuple[int, ...]]
    ) -> PipelinePlan:
        """Return the plan of a step.

        Args:
            parts: Sub-microbatches of each microbatch, by module.
        """
        graph = StageGraph(self.layout, len(batch), parts)
        metas = [m.meta for m in batch]
        specs = message_specs(graph, {m.name: m for m in self.modules}, metas, torch.float32)
        return lower_plan(ORDERS[schedule](graph), graph, specs)

    def tuned(
        self, plan: PipelinePlan, batch: Sequence[Microbatch], shares: Sequence[float] = SHARES
    ) -> Iterator[Peaks]:
        """Yield the peaks for limits from the highest to the lowest."""
        metas = [m.meta for m in batch]
        targets = [m.target_count for m in batch]
        tuning = LayerTuning(self.costs, self.names, 0)
        (needs,) = memory_needs(plan, self.descriptions, metas, tuning, targets)
        for share in shares:
            limit = round(needs.least_bytes + share * (needs.most_bytes - needs.least_bytes))
            limited = replace(tuning, memory_limit_bytes=limit)
            result = tune_layers(plan, self.descriptions, metas, limited, targets)
            yield Peaks(limit, result.peak_bytes[0], self.peak_bytes(result.plan, batch))

    def peak_bytes(self, plan: PipelinePlan, batch: Sequence[Microbatch]) -> int:
        """Return the peak of a step, including optimizer states."""
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        with CountPeak(held_in_a_step(self.model, batch)) as counter:
            PipelineRuntime(0, self.stages, None).step(plan, batch)
        return counter.peak_bytes + self.optimizer_bytes


def cut_in_two(
    config: Mapping, metas: Sequence[MicrobatchMeta], freeze: Sequence[str] = ()
) -> TunedStep:
    """Return four layers per module in two stages of two layers each.

    Args:
        config: Config of the model section.
        metas: Microbatches that determine the stages.
    """
    model = build_model(ModelConfig.model_validate(config), FreezeConfig(modules=list(freeze)))
    modules = module_layers([m.describe() for m in model.modality_modules()], metas)
    cuts = {module.name: [StageSplit(n, (0,)) for n in (2, 2)] for module in modules}
    layout = build_layout(modules, cuts)
    parts = split_model_for_rank(model, layout, 0)
    for module in parts.values():
        apply_activation_checkpoint(module, "auto")
    materialize(model, "cpu")
    init_weights(model, seed=1)
    return TunedStep(model, {index: make_stage(part) for index, part in parts.items()}, layout)
