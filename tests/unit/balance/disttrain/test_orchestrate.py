"""Tests of orchestration: exhaustive search on small clusters, bounds, baselines, messages."""

from dataclasses import replace
from itertools import product
from math import ceil, inf

import numpy as np
import pytest
from support.papers.baselines import ratio_shares, rigid_plan
from support.papers.relaxed import relaxed_s

from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem, UnitCosts
from torchmm.balance.disttrain.orchestration.search import UnitSizes, evaluate_sizes, orchestrate

GIB = 2.0**30


def unit(name, kind, seconds=1.0, *, layers=4, efficiency=(1.0, 0.9), **options):
    """Return a unit whose tensor-parallel degrees 1, 2, 4, ... have the specified efficiency.

    `seconds` is the time of a forward pass. A backward pass takes twice as long.
    """
    kept, temporary = options.pop("kept", 1 * GIB), options.pop("temporary", 0.0)
    surge = options.pop("surge", 0.0)
    tensor = [2**i for i in range(len(efficiency))]
    sizes = {"replica_bytes": 4 * GIB, "sharded_bytes": 6 * GIB, "flops": 3 * seconds} | options
    return UnitCosts(
        name,
        kind,
        layers,
        {n: 3 * seconds / n / e for n, e in zip(tensor, efficiency, strict=True)},
        {n: kept / n**0.9 for n in tensor},
        activation_margin_bytes={n: surge / n for n in tensor},
        max_activation_bytes={n: (kept + 0.7 * surge) / n**0.9 for n in tensor},
        workspace_bytes={n: temporary / n for n in tensor},
        **sizes,
    )


def problem_of(*units, devices=8, memory=1000.0, batch=8, microbatch=1):
    return OrchestrationProblem(units, devices, memory * GIB, batch, microbatch)


def random_problem(seed):
    rng = np.random.default_rng(seed)
    kinds = [["encoder", "llm"], ["encoder", "llm", "generator"], ["llm"], ["llm", "generator"],
             ["encoder", "encoder", "llm"]][seed % 5]  # fmt: skip

    def one(index, kind):
        layers = int(rng.integers(1, 6))
        return unit(
            f"{kind}{index}",
            kind,
            float(rng.lognormal(0.5 * (kind == "llm"), 0.8)),
            layers=layers,
            efficiency=(1.0, 0.8) if rng.random() < 0.7 else (1.0,),
            replica_bytes=float(rng.lognormal(1, 1)) * GIB,
            kept=float(rng.lognormal(-1, 1)) * GIB,
            surge=float(rng.random() < 0.5) * 0.5 * GIB,
            temporary=float(rng.random() < 0.5) * 0.3 * GIB,
            transfer_s=float(rng.random() < 0.5) * 0.05,
            grad_sync_s=float(rng.random() < 0.5) * 0.8,
            relative_std=float(rng.random() < 0.5) * 0.7,
            virtual_stages=int(rng.integers(1, min(layers, 2) + 1)),
            has_backward=bool(rng.random() < 0.8),
        )

    units = [one(i, kind) for i, kind in enumerate(kinds)]
    devices = int(rng.integers(len(units) + 1, 11 if len(units) < 3 else 9))
    memory = float(rng.choice([3.0, 8.0, 20.0, 1000.0]))
    batch, microbatch = [(4, 1), (6, 1), (8, 2), (12, 2)][int(rng.integers(4))]
    return problem_of(*units, devices=devices, memory=memory, batch=batch, microbatch=microbatch)


def naive_seconds(problem, sizes):
    """Return the step time with the formula of the paper and unsplit layers.

    The time is infinite if memory is exceeded.
    """
    data = sizes[problem.llm].data
    microbatches = problem.global_batch_size // problem.microbatch_size // data
    warmup, slowest, sync = 0.0, 0.0, 0.0
    for i, (u, unit_sizes) in enumerate(zip(problem.units, sizes, strict=True)):
        samples = problem.microbatch_size * data / unit_sizes.data
        seconds = u.seconds[unit_sizes.tensor] * samples
        share = (
            u.virtual_stages * ceil(u.layers / (unit_sizes.pipeline * u.virtual_stages)) / u.layers
        )
        warmup += (seconds + unit_sizes.pipeline * u.transfer_s * samples) / u.virtual_stages
        slowest = max(slowest, seconds * share * (1 + u.relative_std / samples**0.5))
        sync = max(
            sync,
            u.grad_sync_s * share / unit_sizes.tensor * (unit_sizes.data - 1) / unit_sizes.data,
        )
        in_flight = sum(other.pipeline for other in sizes[i:])
        if u.virtual_stages > 1:
            feeds_unit = in_flight > unit_sizes.pipeline
            in_flight += (1 + feeds_unit) * (unit_sizes.pipeline - 1) / u.virtual_stages
        in_flight = min(in_flight, microbatches) if u.has_backward else 1
        used_bytes = (
            (u.replica_bytes + u.sharded_bytes / unit_sizes.data) * share / unit_sizes.tensor
        )
        samples_in_flight = samples * in_flight
        kept = (
            u.activation_bytes[unit_sizes.tensor] * samples_in_flight
            + u.activation_margin_bytes[unit_sizes.tensor] * samples_in_flight**0.5
        )
        used_bytes += (
            min(kept, u.max_activation_bytes[unit_sizes.tensor] * samples_in_flight) * share
        )
        used_bytes += u.workspace_bytes[unit_sizes.tensor] * samples
        if used_bytes > problem.memory_bytes:
            return inf
    return warmup + slowest * (microbatches - 1) + sync


def naive_best_by_layout(problem):
    """Return the minimum time of each LLM layout over all plans, sorted."""
    batch = problem.global_batch_size // problem.microbatch_size
    best = {}
    for data in range(1, batch + 1):
        if batch % data:
            continue
        choices = [
            [
                UnitSizes(tensor, unit_data, pipeline)
                for tensor in u.seconds
                for unit_data in ([data] if u.kind == "llm" else range(1, data + 1))
                for pipeline in range(1, u.layers // u.virtual_stages + 1)
                if data % unit_data == 0 and tensor * unit_data * pipeline <= problem.devices
            ]
            for u in problem.units
        ]
        for sizes in product(*choices):
            if sum(s.devices for s in sizes) <= problem.devices:
                seconds = naive_seconds(problem, sizes)
                layout = sizes[problem.llm]
                best[layout] = min(best.get(layout, inf), seconds)
    return sorted(seconds for seconds in best.values() if seconds < inf)


@pytest.mark.parametrize("seed", range(25))
def test_orchestration_finds_optimum_and_alternatives(seed):
    problem = random_problem(seed)
    expected = naive_best_by_layout(problem)
    if not expected:
        with pytest.raises(ValueError, match="no plan fits"):
            orchestrate(problem)
        return
    plans = orchestrate(problem, alternatives=3)
    # The search skips stages with more ranks but as many layers per rank, so a layout may be
    # missing.
    assert plans[0].step_s == pytest.approx(expected[0], rel=1e-12)
    for plan in plans:
        sizes = [u.sizes for u in plan.units]
        assert plan.fits and plan.devices <= problem.devices
        assert plan.step_s == pytest.approx(naive_seconds(problem, sizes), rel=1e-12)
        assert any(plan.step_s == pytest.approx(e, rel=1e-12) for e in expected)
    assert [p.step_s for p in plans] == sorted(p.step_s for p in plans)
    assert relaxed_s(problem) <= plans[0].step_s * (1 + 1e-12)


def test_random_problems_cover_memory_limits():
    times = [naive_best_by_layout(random_problem(seed)) for seed in range(25)]
    assert 0 < sum(not f for f in times) < 10, "some problems exceed memory"
    assert sum(len(f) > 3 for f in times) > 8


def test_alternatives_are_sorted_by_time():
    problem = problem_of(unit("vision", "encoder", 0.3), unit("llm", "llm", layers=3), devices=6)
    times = [plan.step_s for plan in orchestrate(problem, alternatives=100)]
    assert times == pytest.approx(naive_best_by_layout(problem), rel=1e-12)


def test_devices_are_proportional_to_work():
    # The ratio is 6 : 2 device-seconds and memory is ample: the LLM gets three quarters.
    problem = problem_of(
        unit("vision", "encoder", 2.0, layers=8),
        unit("llm", "llm", 6.0, layers=24),
        devices=8,
        batch=64,
    )
    best = orchestrate(problem)[0]
    assert [u.sizes.devices for u in best.units] == [2, 6]
    assert best.bottleneck.stage_s == best.units[0].stage_s
    assert relaxed_s(problem) <= best.step_s < 1.05 * relaxed_s(problem)


def test_less_memory_requires_more_ranks():
    def needed(memory):
        sizes = orchestrate(
            problem_of(unit("llm", "llm", layers=8, efficiency=(1.0, 0.5)), memory=memory)
        )[0].units[0].sizes  # fmt: skip
        return sizes.tensor * sizes.pipeline

    assert needed(1000) == 1 < needed(5) < needed(3)
    with pytest.raises(ValueError, match=r"8 devices of 0.2 GiB.*llm 1.4 GiB.*more devices"):
        needed(0.2)


def test_weak_scaling_keeps_step_time():
    for seed in range(10):
        one = random_problem(seed)
        two = replace(one, devices=2 * one.devices, global_batch_size=2 * one.global_batch_size)
        one, two = (
            replace(p, memory_bytes=1e15, units=tuple(replace(u, grad_sync_s=0.0) for u in p.units))
            for p in (one, two)
        )
        assert orchestrate(two)[0].step_s <= orchestrate(one)[0].step_s * (1 + 1e-12)


def test_virtual_stages_shorten_warmup():
    plans = [
        evaluate_sizes(problem_of(unit("llm", "llm", virtual_stages=v)), [UnitSizes(1, 2, 2)])
        for v in (1, 2)
    ]
    assert plans[1].warmup_s == plans[0].warmup_s / 2
    assert plans[1].steady_s == plans[0].steady_s
    assert plans[1].units[0].used_bytes > plans[0].units[0].used_bytes


def test_memory_is_computed_on_first_rank():
    vision = unit("vision", "encoder", has_backward=False)
    problem = problem_of(vision, unit("llm", "llm", temporary=GIB), unit("image", "generator"))
    problem = replace(problem, devices=11)
    plan = evaluate_sizes(problem, [UnitSizes(1, 2, 1), UnitSizes(2, 2, 2), UnitSizes(1, 1, 1)])
    vision, llm, image = (u.used_bytes / GIB for u in plan.units)
    assert vision == 4 + 6 / 2 + 1  # no activations are saved for backward
    # Half of the layers, with the activations of all microbatches in flight, and temporaries.
    assert llm == pytest.approx((4 + 6 / 2) / 4 + 3 * 2**-0.9 / 2 + 0.5)
    assert image == 4 + 6 + 2  # two samples per microbatch


def test_uneven_units_get_more_devices():
    def devices(relative_std):
        vision = unit("vision", "encoder", 1.9, layers=12, relative_std=relative_std)
        problem = problem_of(vision, unit("llm", "llm", 6.0, layers=24), devices=16, batch=96)
        return orchestrate(problem)[0].units[0].sizes.devices

    assert devices(0.0) < devices(0.8)


def test_rigid_plan_has_equal_degrees():
    problem = problem_of(
        unit("vision", "encoder", 0.5), unit("llm", "llm", 4.0, layers=4), devices=12, batch=12
    )
    plan = rigid_plan(problem, tensor=2)
    (vision, llm), best = (u.sizes for u in plan.units), orchestrate(problem)[0]
    assert vision.tensor == llm.tensor == 2 and vision.data == llm.data and vision.pipeline == 1
    times = [
        naive_seconds(problem, [UnitSizes(2, d, 1), UnitSizes(2, d, p)])
        for d in (1, 2, 3) for p in range(1, 5) if 2 * d * (1 + p) <= 12
    ]  # fmt: skip
    assert plan.step_s == pytest.approx(min(times)) and plan.step_s >= best.step_s
    assert rigid_plan(problem, tensor=2, pipeline=1).units[1].sizes.pipeline == 1
    with pytest.raises(ValueError, match=r"tensor = 2 and 4 pipeline ranks.*5 devices"):
        rigid_plan(replace(problem, devices=5), tensor=2, pipeline=4)


def test_flop_ratios_ignore_efficiency():
    problem = problem_of(
        unit("vision", "encoder", 2.0, flops=1.0),
        unit("llm", "llm", 6.0, layers=24, flops=9.0),
        devices=10,
        batch=40,
    )
    shares = ratio_shares(problem, node=1)
    assert shares == {"vision": 1, "llm": 9}
    plan, best = (orchestrate(problem, limits=limits)[0] for limits in (shares, None))
    assert plan.units[0].sizes.devices == 1 and plan.units[1].sizes.devices <= 9
    assert plan.step_s > best.step_s
    with pytest.raises(ValueError, match="FLOPs"):
        ratio_shares(replace(problem, units=tuple(replace(u, flops=0.0) for u in problem.units)))


def test_plan_counts_devices_in_use():
    plan = evaluate_sizes(problem_of(unit("llm", "llm"), devices=5), [UnitSizes(1, 4, 1)])
    assert plan.step_s == 6 and plan.devices == 4


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([(1, 2, 1)], "1 sizes for 2 units"),
        ([(1, 1, 1), (1, 3, 1)], "llm: data = 3 .* step, 8"),
        ([(1, 3, 1), (1, 4, 1)], "vision: data = 3 .* LLM data-parallel degree, 4"),
        ([(4, 1, 1), (1, 1, 1)], r"vision: tensor = 4, .*\[1, 2\]"),
        ([(1, 1, 5), (1, 1, 1)], "vision: pipeline = 5.* 1 to 4"),
        ([(2, 2, 1), (2, 2, 2)], "12 devices, but 8 are available"),
    ],
)
def test_invalid_unit_sizes_are_rejected(sizes, words):
    problem = problem_of(unit("vision", "encoder"), unit("llm", "llm"))
    with pytest.raises(ValueError, match=words):
        evaluate_sizes(problem, [UnitSizes(*s) for s in sizes])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"units": ()}, "one LLM"),
        ({"devices": 1}, "1 devices for 2 units"),
        ({"microbatch_size": 3}, "8 samples .* microbatch size 3"),
        ({"memory_bytes": 0}, "memory_bytes = 0"),
    ],
)
def test_invalid_problems_are_rejected(change, words):
    problem = problem_of(unit("vision", "encoder"), unit("llm", "llm"))
    with pytest.raises(ValueError, match=words):
        replace(problem, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": {1: 1.0}}, r"degrees \[1\], but activation_bytes \[1, 2\]"),
        ({"virtual_stages": 5}, "5 virtual stages .* 4 layers"),
        ({"replica_bytes": -1.0}, "llm: .*>= 0"),
        ({"seconds": {1: 0.0, 2: 1.0}}, "llm: seconds .*> 0"),
    ],
)
def test_invalid_unit_costs_are_rejected(change, words):
    with pytest.raises(ValueError, match=words):
        replace(unit("llm", "llm"), **change)
