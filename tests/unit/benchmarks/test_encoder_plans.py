"""Parallel plans of encoders: sizes, memory of the peak device, and memory limits."""

from dataclasses import replace

import numpy as np
import pytest
from support.models.encoder_sizes import (
    ParallelSizes,
    colocated_plans,
    encoder_plans,
    state_bytes,
)

from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.layers import StageParameters, stage_parameters
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.pipelining.schedules.layouts import ModuleLayers

GB = 10**9
MODELS = {  # Optimus, tables 3, 8, 9 and 11: encoder width, LLM width and depth, LLM sizes
    "A": (4096, 8192, 80, ParallelSizes(2, 4, 8)),
    "B": (6144, 8192, 80, ParallelSizes(4, 4, 8)),
    "C": (4096, 12288, 96, ParallelSizes(4, 8, 8)),
    "D": (6144, 12288, 96, ParallelSizes(8, 8, 8)),
}


def transformer(name: str, kind: str, width: int, depth: int, **fields) -> ModuleDescription:
    heads, causal = width // 128, kind == "llm"
    layer = LayerDescription(
        width, heads, heads, 128, 4 * width, False, causal, parameters=12 * width**2
    )
    ends = {"embedding_parameters": 100 * width, "head_parameters": 2 * width**2}
    parameters = depth * layer.parameters + sum(ends.values())
    return ModuleDescription(name, kind, (layer,) * depth, 1, 1, parameters, **ends, **fields)  # type: ignore[arg-type]


def test_encoder_sizes_divide_llm_sizes():
    llm = ParallelSizes(8, 8, 8)
    plans = encoder_plans(transformer("vision", "encoder", 6144, 48), llm)
    assert len(plans) == 16
    for plan in plans:
        data, pipeline, tensor = plan.sizes
        assert 8 % pipeline == 0 and 8 % tensor == 0
        assert data * pipeline * tensor == llm.ranks
        assert plan.pipelines == (8 // pipeline) * (8 // tensor)
        assert sum(plan.layers) == 48 and len(plan.layers) == pipeline
        devices = plan.devices_MS
        assert devices.shape == (plan.pipelines, pipeline)
        assert sorted(devices.flatten().tolist()) == list(range(8 * plan.devices_per_rank))
        assert (np.diff(devices, axis=1) == plan.devices_per_rank).all(), "consecutive ranks"
    # Five heads cannot be split, and three layers cannot form four stages.
    small = transformer("vision", "encoder", 5 * 128, 3)
    assert {p.sizes[1:] for p in encoder_plans(small, llm)} == {(1, 1), (2, 1)}


def mean_overhead_bytes(plan, parameters, bytes_per_parameter=6):
    """Return the mean memory of encoder copies per device beyond 3D parallelism with LLM sizes.

    §4.5: k (DP_enc - DP_llm) phi_enc / GPUs.
    """
    return bytes_per_parameter * (plan.sizes.data - plan.llm.data) * parameters / plan.llm.ranks


def test_memory_of_encoder_copies_matches_formula():
    encoder = transformer("vision", "encoder", 6144, 48)
    for width, _, _, llm in MODELS.values():
        encoder = transformer("vision", "encoder", width, 48)
        for plan in encoder_plans(encoder, llm):
            mean = mean_overhead_bytes(plan, encoder.parameters)
            if plan.sizes == llm:
                assert plan.pipelines == 1 and mean == 0
            # Without optimizer state, all devices together store DP_enc times the encoder.
            per_device = [
                6 * stage_parameters(encoder, s, e, plan.sizes.tensor).total
                for s, e in _ranges(plan.layers)
            ]
            copies = llm.ranks / len(per_device)
            total_bytes = sum(per_device) * copies
            base_bytes = 6 * llm.data * encoder.parameters
            assert total_bytes == pytest.approx(base_bytes + mean * llm.ranks, rel=1e-3)


def _ranges(layers):
    stops = np.cumsum(layers).tolist()
    return [(stop - size, stop) for size, stop in zip(layers, stops, strict=True)]


def test_optimizer_state_is_included_except_if_frozen():
    count = StageParameters(1000, 1000)
    assert state_bytes(count, 1) == 18_000  # 2 weights, 4 gradients, 4 + 8 optimizer
    assert state_bytes(count, 4) == 6000 + 3000
    assert state_bytes(StageParameters(1000, 0), 4) == 2000 + 1000
    assert state_bytes(count, 4, compute_bytes=4) == 8000 + 3000
    llm = ParallelSizes(2, 2, 1)
    trained = transformer("vision", "encoder", 256, 4)
    connector = replace(trained, trainable=False)
    frozen = replace(connector, connector_trainable=False)
    needs = [encoder_plans(m, llm)[0].stage_bytes[0] for m in (trained, connector, frozen)]
    assert needs[0] > needs[1] > needs[2]
    # Gradients and moments of the connector only.
    moments = trained.head_parameters * (4 + 8 / 4)
    assert needs[1] - needs[2] == moments


def test_peak_device_determines_fit():
    encoder = transformer("vision", "encoder", 4096, 48, dummy_patches=1)
    llm = ParallelSizes(2, 4, 8)
    # The mean over ranks fits, but rank 3 does not.
    llm_bytes = [20 * GB, 20 * GB, 20 * GB, 76 * GB]
    with pytest.raises(ValueError, match=r"no encoder plan fits.* GiB on pipeline rank 3 of"):
        colocated_plans([encoder], llm, llm_bytes, 76 * GB)
    plans = colocated_plans([encoder], llm, llm_bytes, 80 * GB)
    all_plans = encoder_plans(encoder, llm)
    assert 0 < len(plans) < len(all_plans)
    for plan in plans:
        (encoder_plan,) = plan.encoders
        assert plan.rank_bytes == tuple(
            a + b for a, b in zip(llm_bytes, encoder_plan.rank_bytes, strict=True)
        )
        assert plan.worst_bytes <= 80 * GB
    rejected = {p.sizes for p in all_plans} - {p.encoders[0].sizes for p in plans}
    assert all(size.pipeline * size.tensor < 32 for size in rejected)


def test_every_encoder_has_separate_plan():
    encoders = [transformer(n, "encoder", 4096, 48) for n in ("vision", "audio")]
    llm = ParallelSizes(2, 4, 8)
    plans = colocated_plans(encoders, llm, [10 * GB] * 4, 1000 * GB)
    assert len(plans) == 12 * 12
    assert any(p.encoders[0].sizes != p.encoders[1].sizes for p in plans)
    tight = colocated_plans(encoders, llm, [10 * GB] * 4, 20 * GB)
    assert 0 < len(tight) < len(plans)


def test_models_of_paper_have_plans_within_overhead():
    for name, (width, llm_width, depth, llm) in MODELS.items():
        encoder = transformer("vision", "encoder", width, 48)
        backbone = transformer("llm", "llm", llm_width, depth)
        layers = ModuleLayers("llm", "llm", (1.0,) * depth)
        layout = colocated_layout([layers], llm.pipeline, 1)
        llm_bytes = [
            state_bytes(stage_parameters(backbone, s.start, s.stop, llm.tensor), llm.data)
            for s in layout.stages
        ]
        assert len(llm_bytes) == llm.pipeline and llm_bytes[0] != llm_bytes[1]
        plans = colocated_plans([encoder], llm, llm_bytes, 80 * GB)
        # Figure 17: at most 12 % of the memory, with full tensor-parallel groups and two stages.
        two_stage_plans = [p.encoders[0] for p in plans if p.encoders[0].sizes[1:] == (2, 8)]
        assert two_stage_plans, name
        assert mean_overhead_bytes(two_stage_plans[0], encoder.parameters) < 0.12 * 80 * GB, name


def test_invalid_sizes_are_rejected():
    encoder = transformer("vision", "encoder", 256, 4)
    with pytest.raises(ValueError, match="all sizes must be at least 1"):
        encoder_plans(encoder, ParallelSizes(1, 0, 1))
    with pytest.raises(ValueError, match="bytes of 1 ranks for a pipeline of 2"):
        colocated_plans([encoder], ParallelSizes(1, 2, 1), [0], 10)
