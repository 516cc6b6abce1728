"""Tests of layer components: all cost functions include a registered component."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from torchmm.balance.costs.model import CostModel, StageCosts
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs import components
from torchmm.costs.components import LayerComponent, TemporaryBytes
from torchmm.costs.devices import Device
from torchmm.costs.execution import Execution
from torchmm.costs.flops import microbatch_flops
from torchmm.costs.operators import KINDS, DeviceProfile, EfficiencyCurve, Operator, PassOperators
from torchmm.costs.sizes import TaskSizes, llm_sizes

STATE = 48
DEVICE = Device("toy", {"float32": 1e12}, 1e11, 1e9, 1e10, 1e9, 4, False, "-")
METAS = [MicrobatchMeta((SampleMeta("s", 0, 100),), 100)]
PLAIN = LayerDescription(64, 4, 2, 16, 160, gated_ffn=True, causal=True)
MIXED = replace(PLAIN, activation="made up")
"""Layer with the additional component."""


class MadeUp(LayerComponent):
    """Recurrence with one linear layer, as an example of a new layer type."""

    is_residual_branch = True

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        return layer.activation == "made up"

    def linears(self) -> dict[str, tuple[int, int]]:
        return {"state": (self.layer.hidden_size, STATE)}

    def pair_flops_N(self, sizes: TaskSizes) -> np.ndarray:
        return 1000 * sizes.units_N

    def operators(self, sizes: TaskSizes, setting: object) -> PassOperators:
        scan = Operator("copy", memory_bytes=1e9 * sizes.units_N)
        return PassOperators([scan], [scan], [], [])

    def saved_bytes(self, sizes: TaskSizes, setting: object, weights: bool) -> np.ndarray:
        return 10_000 * sizes.units_N

    def temporaries(self, sizes: TaskSizes, setting: object) -> TemporaryBytes:
        return TemporaryBytes(1e6 * sizes.units_N, 0.0)


def module(layer: LayerDescription) -> ModuleDescription:
    return ModuleDescription("llm", "llm", (layer,), 0, 0, parameters=0)


def costs(layer: LayerDescription, **execution: object) -> tuple[CostModel, StageCosts]:
    profile = DeviceProfile(DEVICE, dict.fromkeys(KINDS, EfficiencyCurve((1.0,), (0.5,))))
    model = CostModel(profile, "float32", {"llm": Execution(**execution)})  # type: ignore[arg-type]
    sizes = llm_sizes(METAS, [80], padding=True)
    return model, model.stage_costs(module(layer), 0, 1, sizes, True)


def test_registered_component_adds_all_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [*components.LAYER_COMPONENTS, MadeUp]
    _, before = costs(MIXED)
    flops = microbatch_flops([module(MIXED)], METAS[0])["llm"]
    monkeypatch.setattr(components, "LAYER_COMPONENTS", table)
    model, after = costs(MIXED)
    parameters = 64 * STATE
    dense, pairs = 100 * 2 * parameters, 100 * 1000

    assert after.flops.forward_N == before.flops.forward_N + dense + pairs
    increased = microbatch_flops([module(MIXED)], METAS[0])["llm"]
    assert increased.forward == flops.forward + dense + pairs
    assert increased.backward == flops.backward + 2 * (dense + pairs)

    copy_ms = 1e9 * 100 / (0.5 * DEVICE.memory_bytes_per_s) * 1e3
    for name in ("forward", "inputs", "backward"):
        longer = getattr(after, name).total_ms - getattr(before, name).total_ms
        assert copy_ms < longer < copy_ms + 10, name  # plus a norm, a matmul and an addition
    assert after.weights.total_ms > before.weights.total_ms

    # Saved bytes of the component, a norm with two results, and the input of the linear layer.
    norm = 4 * 100 * (2 * 64 + 1)
    assert after.saved_bytes - before.saved_bytes == 100 * 10_000 + norm + 4 * 100 * 64
    # Results of the linear layer and of the norm.
    waiting = after.saved_for_weights_bytes - before.saved_for_weights_bytes
    assert waiting == after.saved_bytes - before.saved_bytes + 4 * 100 * (STATE + 64)
    assert after.workspace_bytes == 4 * 100 * 64 + 1e6 * 100

    plain = model.static_bytes(module(PLAIN), 0, 1)
    assert model.static_bytes(module(MIXED), 0, 1) == plain + 16 * parameters
    for mode in ("selective", "full"):
        recomputed = costs(MIXED, recompute=mode)[1]
        assert recomputed.backward.total_ms > after.backward.total_ms + copy_ms - 1
        assert recomputed.saved_bytes < after.saved_bytes
    assert costs(PLAIN)[1].forward.total_ms < copy_ms  # without the component


def test_layers_consist_of_registered_components() -> None:
    names = [type(c).__name__ for c in components.layer_components(PLAIN)]
    assert names == ["Attention", "HeadTransforms", "FeedForward"]
    experts = replace(PLAIN, experts=8, cross_attention=True)
    names = [type(c).__name__ for c in components.layer_components(experts)]
    assert names == ["Attention", "CrossAttention", "HeadTransforms", "Experts"]
