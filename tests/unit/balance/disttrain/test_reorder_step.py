"""Tests of reordering of a global batch: completeness, balance and step time."""

from __future__ import annotations

import numpy as np
import pytest

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.disttrain.arrangement import layout_with_schedule
from torchmm.balance.disttrain.reordering.group_balancing import balance_groups
from torchmm.balance.disttrain.reordering.microbatch_order import makespans_ms
from torchmm.balance.disttrain.reordering.step_reorder import PipelinePositions, StepReorder
from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.flops import module_layers
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.pipelining.schedules.disaggregated import ModuleGroupSize, disaggregated_layout
from torchmm.pipelining.schedules.registry import schedule_layout
from torchmm.recipe.parallel_section import ParallelConfig

MODEL = CostModel(load_profile("a800"), "bfloat16")
LENGTH = 4096


def layer(hidden: int, *, cross: bool = False) -> LayerDescription:
    heads = hidden // 128
    sizes = (hidden, heads, heads, 128, 4 * hidden)
    return LayerDescription(*sizes, False, False, cross_attention=cross)


VISION = ModuleDescription("vision", "encoder", (layer(1024),) * 8, 1_000_000, 4_000_000, 10**8)
LLM = ModuleDescription("llm", "llm", (layer(2048),) * 8, 0, 10**8, 10**9)
GENERATOR = ModuleDescription(
    "generator", "generator", (layer(1024, cross=True),) * 8, 10**6, 10**6, 10**8
)
MODULES = [VISION, LLM, GENERATOR]


def pack(images: int, generated: int = 0, samples: int = 1) -> MicrobatchMeta:
    """Return a sequence of equally long samples, with all images in the first sample."""
    images_meta = (ImageMeta(0, 0, 1024, 64),) * images
    targets = (GeneratedMeta((1, 16, 16), 32),) * generated
    first = SampleMeta(
        "a", 0, LENGTH // samples, images_meta, "vision" if images_meta else None, targets
    )
    others = tuple(SampleMeta("a", i, LENGTH // samples) for i in range(1, samples))
    return MicrobatchMeta((first, *others), LENGTH)


def packs(count: int, seed: int = 0) -> list[MicrobatchMeta]:
    rng = np.random.default_rng(seed)
    return [pack(int(a), int(b)) for a, b in rng.integers(0, (25, 5), (count, 2))]


def layouts() -> dict[str, tuple[StageLayout, str]]:
    layers = module_layers(MODULES, packs(8))
    schedules = {
        name: (schedule_layout(name, layers, ranks, virtual, None), name)
        for name, ranks, virtual in (
            ("megatron", 2, 1),
            ("megatron_balanced", 4, 1),
            ("interleaved_1f1b", 2, 2),
        )
    }
    units = {
        "vision": ModuleGroupSize(1, 3),
        "llm": ModuleGroupSize(2, 2),
        "generator": ModuleGroupSize(1, 1),
    }
    degrees = dict.fromkeys(("vision", "llm", "generator"), 1)
    return {
        **schedules,
        "separated": (schedule_layout("separated", layers, 2, 1, degrees), "separated"),
        "one rank": (schedule_layout("separated", layers, 1, 1, degrees), "separated"),
        "disaggregated": (disaggregated_layout(layers, units), "1f1b"),
        "colocated": (
            colocated_layout(layers[:2], 2, 1, pipelines={"vision": 1}, slices={"vision": 2}),
            "optimus",
        ),
    }


LAYOUTS = layouts()


def reorder(name: str, groups: int, *, balance: bool, order: bool, size: int = 1) -> StepReorder:
    layout, schedule = LAYOUTS[name]
    return reorder_on(layout, schedule, groups, balance=balance, order=order, size=size)


def reorder_on(
    layout: StageLayout, schedule: str, groups: int, *, balance: bool, order: bool, size: int = 1
) -> StepReorder:
    modules = [m for m in MODULES if m.name in {s.module for s in layout.stages}]
    owners = {rank: {s.module for s in layout.stages if rank in s.ranks} for rank in range(2)}
    is_disaggregated = all(len(names) == 1 for names in owners.values())
    placement = "disaggregated" if is_disaggregated else "interleaved"
    parallel = ParallelConfig.model_validate({"schedule": schedule, "placement": placement})
    runs = layout_with_schedule(parallel, layout)
    return StepReorder(modules, MODEL, runs, groups, size, balance=balance, order=order)


def costs(reordering: StepReorder, batch: list[MicrobatchMeta]) -> np.ndarray:
    return sum(reordering.pack_times_ms(batch)).sum(axis=0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2])
def test_reordering_balances_and_keeps_all_sequences(name: str, size: int) -> None:
    batch = packs(48)
    reordering = reorder(name, 2, balance=True, order=True, size=size)
    places = reordering(batch).places
    assert [len(group) for group in places] == [48 // size // 2] * 2
    assert all(len(microbatch) == size for group in places for microbatch in group)
    assert sorted(i for group in places for m in group for i in m) == list(range(48))
    sizes = costs(reordering, batch)
    if (
        name != "disaggregated"
    ):  # disaggregated modules run concurrently, so the sum is not the bound
        loads = [sum(sizes[i] for m in group for i in m) for group in places]
        natural = [sizes[:24].sum(), sizes[24:].sum()]
        assert max(loads) < 1.002 * sizes.sum() / 2 < max(natural)
    again = reorder(name, 2, balance=True, order=True, size=size)(batch)
    assert places == again.places, "reordering is not deterministic"
    assert again.imbalance is not None
    assert 1 <= again.imbalance.after <= again.imbalance.before


@pytest.mark.parametrize("name", ["megatron_balanced", "separated", "interleaved_1f1b"])
def test_reordering_shortens_pipelines_within_groups(name: str) -> None:
    batch = packs(32, seed=1)
    reordering = reorder(name, 2, balance=False, order=True)
    places = np.array(reordering(batch).places)[:, :, 0]
    assert [sorted(group) for group in places.tolist()] == [[*range(16)], [*range(16, 32)]]
    layout, schedule = LAYOUTS[name]
    program = PipelinePositions.from_layout(layout, schedule).compile(16)
    assert program is not None
    forward, backward = reordering.pack_times_ms(batch)
    for group, order in enumerate(places):
        default = slice(16 * group, 16 * group + 16)
        default_order_ms, reordered_ms = (
            makespans_ms(program, forward[None, :, at], backward[None, :, at]).item()
            for at in (default, order)
        )
        assert reordered_ms < 0.995 * default_order_ms


@pytest.mark.parametrize("name", ["megatron", "megatron_balanced", "interleaved_1f1b"])
def test_balancing_never_lengthens_steps(name: str) -> None:
    """Check that batches keep their order if balanced sums would take longer."""
    program = reorder(name, 2, balance=True, order=False).compile_step(4)
    assert program is not None
    longer = 0
    for seed in range(60):
        batch = packs(8, seed=seed)
        reordering = reorder(name, 2, balance=True, order=False)
        forward_SN, backward_SN = reordering.stage_times(batch)

        def slowest(groups: object, both: tuple = (forward_SN, backward_SN)) -> float:
            at = np.reshape(groups, (2, 4))
            times = (np.stack([of_SN[:, indices] for indices in at]) for of_SN in both)
            return makespans_ms(program, *times).max()

        natural, reordered = slowest(np.arange(8)), slowest(reordering(batch).places)
        assert reordered <= natural
        balanced = slowest(balance_groups((forward_SN + backward_SN).sum(axis=0), 2))
        longer += balanced > natural
        assert reordered == min(natural, balanced)
    assert longer > 2, "balanced sums are never slower in these cases"


def test_disaggregated_reordering_uses_executed_schedule() -> None:
    """Include replicas and several LLM stages per rank."""
    layers = module_layers(MODULES, packs(8))
    units = {
        "vision": ModuleGroupSize(1, 1),
        "llm": ModuleGroupSize(2, 1),
        "generator": ModuleGroupSize(1, 1),
    }
    several = disaggregated_layout(layers, units, {"llm": 2})
    for layout, schedule in (LAYOUTS["disaggregated"], (several, "interleaved_1f1b")):
        reordering = reorder_on(layout, schedule, 2, balance=True, order=True)
        program = reordering.compile_step(8)
        assert program is not None
        for seed in range(6):
            batch = packs(16, seed=seed)
            forward_SN, backward_SN = reordering.stage_times(batch)

            natural = np.arange(16).reshape(2, reordering._llm_replicas, -1)
            default_order_ms, reordered_ms = (
                makespans_ms(
                    program, forward_SN[:, at].swapaxes(0, 1), backward_SN[:, at].swapaxes(0, 1)
                )
                for at in (
                    np.swapaxes(natural, 1, 2).reshape(2, 8),
                    np.reshape(reordering(batch).places, (2, 8)),
                )
            )
            assert reordered_ms.max() <= default_order_ms.max()


def test_replicas_of_plan_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check balance between two LLM replicas per plan, which receive alternating microbatches."""
    batch = packs(48, seed=2)
    reordering = reorder("disaggregated", 2, balance=True, order=True)
    ranks = iter(range(0, -4, -1))
    monkeypatch.setattr(
        reordering, "_slowest_group_ns", lambda *_: next(ranks)
    )  # no simulation of further candidates
    places, sizes = reordering(batch).places, costs(reordering, batch)
    loads = [
        sum(sizes[i] for m in group[replica::2] for i in m)
        for group in places
        for replica in (0, 1)
    ]
    assert max(loads) < 1.002 * sizes.sum() / 4


def test_shared_replica_multiplies_stage_time() -> None:
    batch = packs(4)
    layout = LAYOUTS["disaggregated"][0]
    forward, _ = reorder("disaggregated", 1, balance=True, order=True).pack_times_ms(batch)
    alone = disaggregated_layout(
        module_layers(MODULES, batch),
        {
            "vision": ModuleGroupSize(1, 1),
            "llm": ModuleGroupSize(2, 1),
            "generator": ModuleGroupSize(1, 1),
        },
    )
    single = reorder_on(alone, "1f1b", 1, balance=True, order=True)
    expected, _ = single.pack_times_ms(batch)
    assert len({s.ranks for s in layout.stages}) == len(forward) == 4
    np.testing.assert_allclose(
        forward[0], expected[0] * 2 / 3, rtol=1e-6
    )  # three encoders for two LLMs
    np.testing.assert_allclose(forward[1:3], expected[1:3], rtol=1e-6)
    np.testing.assert_allclose(forward[3], expected[3] * 2, rtol=1e-6)  # one generator for two


def test_pack_time_includes_all_modalities() -> None:
    batch = [pack(0, 0, 16), pack(0), pack(8), pack(8, 2)]
    sizes = costs(reorder("one rank", 1, balance=True, order=False), batch)
    assert (np.diff(sizes) > 0).all()


def test_disabled_reordering_keeps_order() -> None:
    batch = packs(16)
    for name in ("separated", "one rank"):
        natural = reorder(name, 2, balance=False, order=False)(batch).places
        assert natural == [[[i] for i in range(8)], [[i] for i in range(8, 16)]]
    assert reorder("colocated", 2, balance=False, order=True)(batch).places == natural, (
        "the Optimus planner orders microbatches"
    )
    assert reorder("one rank", 2, balance=False, order=True)(batch).places == natural
