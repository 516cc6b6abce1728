"""Tests of the partitioner: hand-computed sizes, and modules with known costs."""

import pytest
from generator_cases import generator_config
from model_cases import build
from pipeline_cases import KINDS, Case, step_of

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.pipeweaver.partitioner import (
    EFFICIENT_FRACTION,
    MAX_SEGMENTS,
    partition_modules,
    segment_counts,
    smallest_efficient_size,
)
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.costs.flops import module_layers
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.layouts import ModuleLayers, separated_layout

CPU_MODEL = CostModel(load_profile("cpu"), "float32")


def described(name: str = "partitioned"):
    case = Case(name)
    metas = [m.meta for seed in (0, 1, 2) for m in step_of(case, seed)[0]]
    return [m.describe() for m in case.build().modality_modules()], metas


@pytest.mark.parametrize(
    ("times_ms", "size"),
    [
        ([1.0], 1),
        ([1.0, 2.0, 3.0], 1),  # equally efficient
        ([10.0, 11.0, 12.0, 16.0], 3),  # 0.1, 0.18, 0.25, 0.25 images per ms
        ([10.0, 11.0, 12.0, 15.3], 3),  # 0.25 is 95.6 % of 0.261
        ([10.0, 11.0, 12.0, 15.1], 4),  # 0.25 is 94.4 % of 0.265
        ([5.0, 6.0, 12.0], 2),  # a larger size can be slower
    ],
)
def test_smallest_efficient_size_is_chosen(times_ms, size):
    assert smallest_efficient_size(times_ms) == size


@pytest.mark.parametrize("times_ms", [[], [1.0, 0.0]])
def test_times_must_be_positive(times_ms):
    with pytest.raises(ValueError, match="must be positive times"):
        smallest_efficient_size(times_ms)


def test_segments_are_proportional_to_latency():
    max_segments = {"vision": 4, "llm": 6, "generator": 2}
    latency_ms = {"vision": 10.0, "llm": 49.0, "generator": 90.0}
    assert segment_counts(latency_ms, max_segments) == {"vision": 1, "llm": 4, "generator": 2}
    assert segment_counts({"llm": 5.0}, max_segments) == {"llm": 1}
    assert segment_counts({"vision": 30.0, "llm": 10.0}, max_segments) == {"vision": 3, "llm": 1}


def test_segments_follow_cost_model_latency():
    modules, metas = described()
    result = partition_modules(modules, metas, CPU_MODEL, 1)
    fastest = min(result.latency_ms.values())
    for module in modules:
        max_segments = min(len(module.layers), MAX_SEGMENTS)
        assert result.segments[module.name] == min(
            int(result.latency_ms[module.name] / fastest + 1e-9), max_segments
        )
    assert set(result.sub_microbatch_images) == {"vision"}


def test_sub_microbatch_size_is_smallest_efficient():
    """Compute costs of plans with one microbatch each, with the same images."""
    case = Case("efficient", encoder="clip")
    modules, _ = described("efficient")
    metas = [m.meta for seed in range(30) for m in step_of(case, seed)[0]]
    image = KINDS["clip"].grids[0]
    by_count = {
        meta.module_image_count("vision"): meta
        for meta in metas
        if meta.module_image_count("vision")
    }
    assert image and sorted(by_count) == [1, 2, 3, 5]
    layout = separated_layout(
        [ModuleLayers(m.name, m.kind, (1.0,) * len(m.layers), m.kind != "llm") for m in modules], 1
    )
    rates = {}
    for count, meta in by_count.items():
        graph = StageGraph(layout, 1, {"vision": (1,)})
        costs = compute_plan_costs(graph, modules, [meta], CPU_MODEL)
        times_ms = [
            ms for a, ms in costs.compute_ms.items() if a.stage == 0 and a.type.value in "FB"
        ]
        rates[count] = count / sum(times_ms)
    size = partition_modules(modules, metas, CPU_MODEL, 1).sub_microbatch_images["vision"]
    for count, rate in rates.items():
        assert count >= size or rate < EFFICIENT_FRACTION * max(rates.values())


def test_specified_sizes_are_kept():
    modules, metas = described()
    result = partition_modules(
        modules, metas, CPU_MODEL, 2, fixed_images={"vision": 2}, fixed_segments={"llm": 2}
    )
    assert result.sub_microbatch_images == {"vision": 2}
    assert result.segments["llm"] == 2


def test_generated_batch_takes_time_of_largest_image():
    """Check padding of images to the largest image of a batch, with contexts of equal length."""
    pytest.importorskip("diffusers")
    modules = [m.describe() for m in build(generator_config(encoder=None)).modality_modules()]
    small, large = GeneratedMeta((1, 2, 2), 5), GeneratedMeta((1, 8, 8), 5)

    def latency_ms(*generated: GeneratedMeta) -> float:
        meta = MicrobatchMeta((SampleMeta("s", 0, 30, generated=generated),), 30)
        images = {"generator": len(generated)}
        return partition_modules(modules, [meta], CPU_MODEL, 1, fixed_images=images).latency_ms[
            "generator"
        ]

    mixed = latency_ms(small, large, small)
    assert mixed == pytest.approx(latency_ms(large, large, large))
    assert mixed > 1.5 * latency_ms(small, small, small)


def test_modules_without_data_get_one_segment():
    modules, metas = described()
    text_only = [meta for meta in metas if not meta.image_count]
    assert text_only
    result = partition_modules(modules, text_only, CPU_MODEL, 1)
    assert result.segments["vision"] == 1
    assert result.sub_microbatch_images == {}


def test_remaining_layers_are_distributed():
    modules, _ = described()
    layers = module_layers(modules, described()[1])
    uneven = [
        ModuleLayers("vision", "encoder", (1.0,) * 63, True),
        *(module for module in layers if module.name == "llm"),
    ]
    layout = separated_layout(uneven, 4, {"vision": 2, "llm": 1})
    sizes = [s.stop - s.start for s in layout.stages if s.module == "vision"]
    assert sum(sizes) == 63
    assert sorted(sizes) == [7, *[8] * 7]


def test_too_few_layers_are_reported():
    modules, metas = described()
    with pytest.raises(ValueError, match="4 layers for 5 pipeline ranks"):
        partition_modules(modules, metas, CPU_MODEL, 5)
    with pytest.raises(ValueError, match="no microbatches"):
        partition_modules(modules, [], CPU_MODEL, 2)
