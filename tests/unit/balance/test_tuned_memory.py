"""What a tuned step really keeps on a CPU, against the limit it was tuned to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from counting import CountLive
from pipeline_cases import KINDS, LLM, Case, varied_microbatch
from test_model_stages import built

from torchmm.balance.cost_model import CostModel
from torchmm.balance.execution import Execution
from torchmm.balance.layer_tuning import LayerTuning, memory_needs, tune_layers
from torchmm.balance.profiles import load_profile
from torchmm.batch import Microbatch
from torchmm.config import FreezeConfig, ModelConfig
from torchmm.models.multimodal import MultimodalModel
from torchmm.models.registry import build_model
from torchmm.pipelining import runtime
from torchmm.pipelining.graph import StageGraph, StageLayout
from torchmm.pipelining.layouts import Cut, build_layout
from torchmm.pipelining.lowering import lower_plan
from torchmm.pipelining.messages import message_specs
from torchmm.pipelining.plan import PipelinePlan
from torchmm.pipelining.runtime import PipelineRuntime
from torchmm.pipelining.schedules import SCHEDULES

MODEL = CostModel(load_profile("cpu"), "float32", {"vision": Execution(), "llm": Execution()})
NAMES = frozenset({"vision", "llm"})
WIDE = {"hidden_size": 192, "intermediate_size": 512}
"""So that what is left out is small: rotary tables, positions, states of random generators."""


class WideCase(Case):
    """The same model, with wider layers."""

    def build(self, dtype: torch.dtype = torch.float32) -> MultimodalModel:
        tower = {"config": {**KINDS["clip"].section["config"], **WIDE}}
        llm = {"config": {**LLM, **WIDE, "tie_word_embeddings": False}}
        config = ModelConfig.model_validate({"llm": llm, "encoders": {"vision": tower}})
        return build_model(config, FreezeConfig(), dtype)


CASE = WideCase("memory", encoder="clip", recompute="tuned", tied=False)


def image_batch(case: Case) -> list[Microbatch]:
    return [varied_microbatch(i, {"vision": 12 + 3 * i}, case.kinds) for i in range(4)]


def gpipe_plan(layout: StageLayout, batch: list[Microbatch]) -> PipelinePlan:
    graph = StageGraph(layout, len(batch), {"vision": (2,) * len(batch)})
    modules = {module.name: module for module in CASE.build().modality_modules()}
    specs = message_specs(graph, modules, [m.meta for m in batch], torch.float32)
    return lower_plan(SCHEDULES["gpipe"].order(graph), graph, specs)


def left_out_bytes(batch: list[Microbatch]) -> int:
    """What the cost model does not count: embedded patches before the tower's first norm, encoder
    outputs until they have their gradients, masks of where they go, tables of positions."""
    width, total = WIDE["hidden_size"], 0
    for microbatch in batch:
        tokens = microbatch.input_ids_T.numel()
        images = [image for sample in microbatch.meta.samples for image in sample.images]
        embedded = sum(image.patches + 1 for image in images)
        features = sum(image.tokens for image in images)
        total += 4 * width * (embedded + features) + 2 * width * tokens + 200 * tokens
    return total


@pytest.fixture
def most_kept(monkeypatch):
    """Runs a step; the most bytes alive behind any action, beside parameters and gradients."""

    def measure(model, stages, plan, batch) -> int:
        kept, counter = [], CountLive()

        @contextmanager
        def sampling(_: str) -> Iterator[None]:
            yield
            own = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
            kept.append(counter.live_bytes(own))

        monkeypatch.setattr(runtime, "record_function", sampling)
        model.zero_grad()
        with counter:
            PipelineRuntime(0, stages, None).step(plan, batch, annotate=True)
        return max(kept)

    return measure


def test_a_step_keeps_what_was_predicted_and_no_more_than_the_limit(most_kept):
    cuts = {"vision": [Cut(n, (0,)) for n in (1, 3)], "llm": [Cut(n, (0,)) for n in (2, 2)]}
    layout = build_layout(CASE.modules(), cuts)
    model, stages = built(CASE, layout)
    modules = [module.describe() for module in model.modality_modules()]
    batch = image_batch(CASE)
    metas, targets = [m.meta for m in batch], [m.target_count for m in batch]
    plan = gpipe_plan(layout, batch)
    tuning = LayerTuning(MODEL, NAMES, 0)
    (needs,) = memory_needs(plan, modules, metas, tuning, targets)
    peaks: list[int] = []
    for share in (1.0, 0.7, 0.4, 0.1, 0.0):
        limit = round(needs.least_bytes + share * (needs.most_bytes - needs.least_bytes))
        tuned = tune_layers(
            plan, modules, metas, replace(tuning, memory_limit_bytes=limit), targets
        )
        static = tuned.costs.static_bytes[0]
        measured = most_kept(model, stages, tuned.plan, batch)
        assert measured <= limit - static + left_out_bytes(batch), share
        assert measured >= 0.9 * (tuned.peak_bytes[0] - static), share
        peaks.append(measured)
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0] / 5
