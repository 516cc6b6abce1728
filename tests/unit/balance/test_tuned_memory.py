"""What tuned steps really use on a CPU, at every single allocation, against the limit they have."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from pipeline_cases import KINDS, LLM, Case, varied_microbatch
from support.allocations import CountPeak, held_in_a_step
from support.memory_needs import memory_needs
from test_model_stages import built

from torchmm.balance.costs.execution import Execution
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recomputation.tuning import LayerTuning, tune_layers
from torchmm.common.batch import Microbatch
from torchmm.models.multimodal import MultimodalModel
from torchmm.models.registry import build_model
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.schedules.layouts import Cut, build_layout
from torchmm.pipelining.schedules.names import ORDERS
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

MODEL = CostModel(load_profile("cpu"), "float32", {"vision": Execution(), "llm": Execution()})
NAMES = frozenset({"vision", "llm"})
WIDE = {"hidden_size": 192, "intermediate_size": 512}
WIDE_TOWERS = {
    "clip": WIDE,
    "siglip, folded": WIDE,
    "siglip2": WIDE,
    "qwen2_5_vl": {**WIDE, "out_hidden_size": 192},
    "whisper": {"d_model": 192, "encoder_ffn_dim": 512},
}
BATCHES = 3


@dataclass(frozen=True)
class WideCase(Case):
    """The same models, with wider layers: constants of a few bytes per token do not matter."""

    def build(self, dtype: torch.dtype = torch.float32) -> MultimodalModel:
        section = KINDS[self.encoder].section
        tower = {**section, "config": {**section["config"], **WIDE_TOWERS[self.encoder]}}
        llm = {"config": {**LLM, **WIDE, "tie_word_embeddings": False}}
        config = ModelConfig.model_validate({"llm": llm, "encoders": {"vision": tower}})
        return build_model(config, FreezeConfig(modules=list(self.freeze)), dtype)


class Step:
    """Stages of two and two layers in a pipeline of one rank, whatever order they run in."""

    def __init__(self, encoder: str, freeze: tuple[str, ...] = ()) -> None:
        self.case = WideCase(
            f"memory {encoder}", encoder=encoder, recompute="tuned", tied=False, freeze=freeze
        )
        cuts = {"vision": [Cut(n, (0,)) for n in (1, 3)], "llm": [Cut(n, (0,)) for n in (2, 2)]}
        self.layout = build_layout(self.case.modules(), cuts)
        self.model, self.stages = built(self.case, self.layout)
        self.modules = self.model.modality_modules()
        self.descriptions = [module.describe() for module in self.modules]
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer_bytes = sum(8 * p.numel() for p in self.trained)

    def batch(self, seed: int) -> list[Microbatch]:
        return [
            varied_microbatch(10 * seed + i, {"vision": (12, 3, 20, 8)[i] + seed}, self.case.kinds)
            for i in range(4)
        ]

    def plan(self, schedule: str, batch: list[Microbatch]) -> PipelinePlan:
        graph = StageGraph(self.layout, len(batch), {"vision": (2, 1, 3, 2)})
        metas = [m.meta for m in batch]
        specs = message_specs(graph, {m.name: m for m in self.modules}, metas, torch.float32)
        return lower_plan(ORDERS[schedule](graph), graph, specs)

    def tuned(self, plan: PipelinePlan, batch: list[Microbatch]) -> Iterator[tuple[int, int, int]]:
        """(limit, predicted peak, measured peak) of limits from the loosest to the tightest."""
        given = [m.meta for m in batch]
        targets = [m.target_count for m in batch]
        tuning = LayerTuning(MODEL, NAMES, 0)
        (needs,) = memory_needs(plan, self.descriptions, given, tuning, targets)
        for share in (1.0, 0.5, 0.0):
            limit = round(needs.least_bytes + share * (needs.most_bytes - needs.least_bytes))
            limited = replace(tuning, memory_limit_bytes=limit)
            found = tune_layers(plan, self.descriptions, given, limited, targets)
            yield limit, found.peak_bytes[0], self.peak_bytes(found.plan, batch)

    def peak_bytes(self, plan: PipelinePlan, batch: list[Microbatch]) -> int:
        """Of a step, with the state of an optimizer."""
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        with CountPeak(held_in_a_step(self.model, batch)) as counter:
            PipelineRuntime(0, self.stages, None).step(plan, batch)
        return counter.peak_bytes + self.optimizer_bytes


@pytest.mark.parametrize(
    ("encoder", "schedule"),
    [
        ("clip", "zero_bubble"),
        ("siglip2", "gpipe"),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("clip", "gpipe"),
                ("siglip, folded", "separated"),
                ("qwen2_5_vl", "separated"),
                ("whisper", "separated"),
            )
        ),
    ],
)
def test_a_step_never_uses_more_than_its_limit(encoder, schedule):
    step = Step(encoder)
    for seed in range(BATCHES):
        batch = step.batch(seed)
        plan = step.plan(schedule, batch)
        for limit, predicted, measured in step.tuned(plan, batch):
            assert measured <= predicted <= limit, (seed, measured / limit)
            assert measured >= 0.93 * predicted, (seed, measured / predicted)


@pytest.mark.parametrize("frozen", ["vision", "llm"])
def test_a_step_with_a_frozen_module_never_uses_more_than_its_limit(frozen):
    step = Step("clip", (frozen,))
    batch = step.batch(0)
    for limit, predicted, measured in step.tuned(step.plan("separated", batch), batch):
        assert 0.85 * predicted <= measured <= predicted <= limit, measured / predicted


def test_most_of_the_activations_can_be_let_go():
    step = Step("clip")
    batch = step.batch(0)
    state = sum(MODEL.static_bytes(m, 0, len(m.layers)) for m in step.descriptions)
    peaks = [peak - state for _, _, peak in step.tuned(step.plan("gpipe", batch), batch)]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0] / 4
