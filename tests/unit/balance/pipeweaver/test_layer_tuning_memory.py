"""Tests of memory that tuned steps allocate on the CPU, against their limits."""

from dataclasses import dataclass

import pytest
import torch
from pipeline_cases import KINDS, LLM, Case, varied_microbatch
from test_model_stages import built
from tuned_steps import TunedStep

from torchmm.common.batch import Microbatch
from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.schedules.layouts import StageSplit, build_layout
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

WIDE = {"hidden_size": 192, "intermediate_size": 512}
WIDE_ENCODERS = {
    "clip": WIDE,
    "siglip, folded": WIDE,
    "siglip2": WIDE,
    "qwen2_5_vl": {**WIDE, "out_hidden_size": 192},
    "whisper": {"d_model": 192, "encoder_ffn_dim": 512},
}
BATCHES = 3


@dataclass(frozen=True)
class WideCase(Case):
    """Models with wider layers, in which a few constant bytes per token are negligible."""

    def build(self, dtype: torch.dtype = torch.float32) -> MultimodalModel:
        section = KINDS[self.encoder].section
        encoder = {**section, "config": {**section["config"], **WIDE_ENCODERS[self.encoder]}}
        llm = {"config": {**LLM, **WIDE, "tie_word_embeddings": False}}
        config = ModelConfig.model_validate({"llm": llm, "encoders": {"vision": encoder}})
        return build_model(config, FreezeConfig(modules=list(self.freeze)), dtype)


class Step(TunedStep):
    """Step with LLM stages of two and two layers, and encoder stages of one and three layers."""

    def __init__(self, encoder: str, freeze: tuple[str, ...] = ()) -> None:
        self.case = WideCase(
            f"memory {encoder}", encoder=encoder, recompute="auto", tied=False, freeze=freeze
        )
        cuts = {
            "vision": [StageSplit(n, (0,)) for n in (1, 3)],
            "llm": [StageSplit(n, (0,)) for n in (2, 2)],
        }
        layout = build_layout(self.case.modules(), cuts)
        super().__init__(*built(self.case, layout), layout)

    def batch(self, seed: int) -> list[Microbatch]:
        return [
            varied_microbatch(10 * seed + i, {"vision": (12, 3, 20, 8)[i] + seed}, self.case.kinds)
            for i in range(4)
        ]


PARTS = {"vision": (2, 1, 3, 2)}


@pytest.mark.parametrize(
    ("encoder", "schedule"),
    [
        ("siglip2", "gpipe"),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("clip", "zero_bubble"),
                ("clip", "gpipe"),
                ("siglip, folded", "separated"),
                ("qwen2_5_vl", "separated"),
                ("whisper", "separated"),
            )
        ),
    ],
)
def test_tuned_step_stays_within_limit(encoder, schedule):
    step = Step(encoder)
    for seed in range(BATCHES):
        batch = step.batch(seed)
        plan = step.plan(schedule, batch, PARTS)
        for limit, predicted, measured in step.tuned(plan, batch):
            assert measured <= predicted <= limit, (seed, measured / limit)
            assert measured >= 0.93 * predicted, (seed, measured / predicted)


@pytest.mark.parametrize("frozen", ["vision", "llm"])
def test_tuned_step_with_frozen_module_stays_within_limit(frozen):
    step = Step("clip", (frozen,))
    batch = step.batch(0)
    for limit, predicted, measured in step.tuned(step.plan("separated", batch, PARTS), batch):
        assert 0.85 * predicted <= measured <= predicted <= limit, measured / predicted


def test_tuning_frees_most_activations():
    step = Step("clip")
    batch = step.batch(0)
    state = sum(step.costs.static_bytes(m, 0, len(m.layers)) for m in step.descriptions)
    peaks = [peak - state for _, _, peak in step.tuned(step.plan("gpipe", batch, PARTS), batch)]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0] / 4
