"""Tests of unit profiles: exact interpolation, and costs of the cost model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_reorder_step import LLM, MODULES, pack, packs

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.disttrain.orchestration.bounds import SampleSeconds, UnitBounds
from torchmm.balance.disttrain.orchestration.problem import UnitCosts
from torchmm.balance.disttrain.orchestration.unit_costs import (
    ModuleCosts,
    fitting_tensor_sizes,
    module_cost_function,
    profile_units,
)
from torchmm.costs.devices import BETWEEN_NODES
from torchmm.costs.execution import Execution
from torchmm.costs.sizes import sequence_sizes

PROFILE = load_profile("a800")


def resolved_unit_sizes(modules=MODULES, batch=None, run=None, **options) -> tuple[UnitCosts, ...]:
    run = run or module_cost_function(PROFILE, "bfloat16", modules)
    return profile_units(modules, batch or packs(64), PROFILE, "bfloat16", run, **options)


def linear(module, tensor, batch) -> ModuleCosts:
    """Return 2 s per sequence plus 1 s per 1000 units, divided by the tensor-parallel degree."""
    units_N = sequence_sizes(module, batch)[1].units_N
    zeros_N = units_N * 0
    return ModuleCosts((2 + units_N / 1000) / tensor, units_N, 3 * units_N, zeros_N + 7)


def test_linear_costs_are_profiled_exactly() -> None:
    batch = packs(50, seed=3)
    for unit in resolved_unit_sizes(batch=batch, run=linear, tensor_sizes=(1, 2)):
        module = next(m for m in MODULES if m.name == unit.name)
        at, sizes = sequence_sizes(module, batch)
        expected = (2 * len(at) + sizes.units_N.sum() / 1000) / len(batch)
        assert unit.seconds == pytest.approx({1: expected, 2: expected / 2})
        assert unit.workspace_bytes == {1: 7, 2: 7}


def test_messages_contain_deepstack_features() -> None:
    """Check that an encoder sends features of 2 layers and its output, in bfloat16."""
    batch = packs(50, seed=3)
    modules = [replace(module, deepstack_layers=(0, 1)) for module in MODULES]
    model = CostModel(PROFILE, "bfloat16", {})
    for unit, module in zip(resolved_unit_sizes(modules, batch, linear), modules, strict=True):
        units = sequence_sizes(module, batch)[1].units_N.sum() / len(batch)
        tensors = 3 if module.kind == "encoder" else 1
        sent_bytes = 2 * tensors * module.layers[0].hidden_size * units
        (expected_ms,) = model.transfer_times_ms([sent_bytes], [BETWEEN_NODES])
        assert unit.transfer_s == pytest.approx(expected_ms / 1e3)


def test_profiles_match_cost_model() -> None:
    batch = packs(300, seed=5)
    for unit in resolved_unit_sizes(batch=batch):
        module = next(m for m in MODULES if m.name == unit.name)
        _, sizes = sequence_sizes(module, batch)
        for tensor, seconds in unit.seconds.items():
            model = CostModel(PROFILE, "bfloat16", {unit.name: Execution(tensor=tensor)})
            costs = model.stage_costs(module, 0, 8, sizes, module.kind != "encoder")
            exact = (costs.forward.total_ms + costs.backward.total_ms).sum() / 1e3 / len(batch)
            assert seconds == pytest.approx(exact, rel=0.01)
        assert list(unit.seconds) == [1, 2, 4, 8]
        assert sorted(unit.seconds.values(), reverse=True) == list(unit.seconds.values())


def frozen(names: str) -> list:
    return [
        replace(
            module,
            trainable=module.name in names,
            connector_trainable="connectors" in names,
        )
        for module in MODULES
    ]


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ("vision llm generator connectors", (3, 3, 3)),
        ("connectors", (1, 2, 2)),
        ("vision connectors", (3, 2, 2)),
        ("llm connectors", (1, 3, 2)),
        ("generator connectors", (1, 2, 3)),
        ("generator", (1, 1, 3)),
        ("", (1, 1, 1)),
    ],
)
def test_frozen_modules_skip_backward(trained, expected) -> None:
    """Check that input and weight gradients cost about one forward pass each."""
    batch = [pack(8, 2)] * 4
    units = resolved_unit_sizes(frozen(trained), batch=batch)
    for unit, full, passes in zip(units, resolved_unit_sizes(batch=batch), expected, strict=True):
        share = unit.seconds[1] / full.seconds[1]
        # Attention has no weights, so skipping weight gradients saves less than a third.
        minimum, maximum = {1: (0.25, 0.4), 2: (0.6, 0.85), 3: (0.999, 1.001)}[passes]
        assert minimum < share < maximum, (unit.name, trained)
        assert unit.has_backward == (passes > 1 or (unit.name == "vision" and "conn" in trained))
        assert (unit.replica_bytes < 0.5 * full.replica_bytes) == (unit.name not in trained)


def test_memory_bounds_cover_sample_variance() -> None:
    batch = packs(400, seed=7)
    rng = np.random.default_rng(0)
    for unit, module in zip(resolved_unit_sizes(batch=batch), MODULES, strict=True):
        kept_N = np.zeros(len(batch))
        at, _ = sequence_sizes(module, batch)
        run = module_cost_function(PROFILE, "bfloat16", MODULES)
        kept_N[at] = run(module, 2, [batch[i] for i in at]).kept_bytes_N
        assert unit.activation_bytes[2] == pytest.approx(kept_N.mean(), rel=0.03)
        for in_flight in (1, 4, 16):
            windows = rng.choice(kept_N, (2000, in_flight)).sum(axis=1)
            margin_bytes = in_flight**0.5 * unit.activation_margin_bytes[2]
            bound = in_flight * unit.activation_bytes[2] + margin_bytes
            assert windows.max() <= 1.05 * min(bound, in_flight * unit.max_activation_bytes[2])


def test_minimum_chain_includes_unsplit_backward() -> None:
    seconds = SampleSeconds(9.0, min_forward_s=2.0, min_backward_s=3.0, min_layer_fraction=0.5)
    bounds = UnitBounds([1.0], {2: seconds}, 0.0, 0.0, {2: 0.0}, 1.0)
    assert bounds.chain_s(2, unsplit_backward=True) == 5.0
    assert bounds.chain_s(2, unsplit_backward=False) == 2.0


def test_tensor_sizes_follow_heads() -> None:
    few = replace(LLM.layers[0], heads=12, kv_heads=2)
    assert fitting_tensor_sizes(replace(LLM, layers=(few,)), (1, 2, 4, 8)) == [1, 2, 4]
    with pytest.raises(
        ValueError, match="none of 3 sampled sequences contains data for 'generator'"
    ):
        resolved_unit_sizes(batch=[pack(2)] * 3)
