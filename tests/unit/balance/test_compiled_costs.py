"""Costs of compiled layers against the kernels that Inductor plans for real layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counting import CountFused
from test_part_operators import RealLayer, traffic

from torchmm.balance.costs.devices import DEVICES
from torchmm.balance.costs.execution import Execution, Setting
from torchmm.balance.costs.layers import layer_kept_bytes, layer_operators
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.operators import ASSUMED_LAUNCHES, HOST_KINDS, Operator, Work
from torchmm.balance.costs.profiles import assumed_profile
from torchmm.balance.costs.sizes import llm_sizes
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation

FEW = ["llama", "qwen3", "qwen2_5_vl"]
OTHERS = [
    "qwen2", "granite", "starcoder2", "olmo2", "gemma", "phi3", "gemma2", "gemma3_text", "glm",
    "glm4", "cohere2", "ministral3", "lfm2, attention", "qwen3_5, attention", "deepseek_v3",
    "minicpm3", "qwen3_moe", "mixtral", "qwen3_5", "lfm2", "clip", "siglip", "siglip2",
]  # fmt: skip
FAMILIES = [*FEW, *(pytest.param(name, marks=pytest.mark.campaign) for name in OTHERS)]
QWEN3_1_7B = LayerDescription(
    hidden_size=2048, heads=16, kv_heads=8, head_dim=128, ffn_size=6144, gated_ffn=True,
    causal=True, norm="rms", activation="silu", rotary=True, qk_norm=True, parameters=50_336_000,
)  # fmt: skip


def fused_bytes(operators: list[Operator]) -> float:
    return traffic([o for o in operators if o.in_layer and o.kind not in HOST_KINDS], False)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layer_traffic_matches_inductor(family: str) -> None:
    torch.compiler.reset()
    real = RealLayer(family, torch.bfloat16)
    layer = real.description.layers[0]
    found = layer_operators(layer, real.sizes, Setting(Execution(compiled=True), 2))
    eager = layer_operators(layer, real.sizes, Setting(Execution(), 2))
    apply_activation_checkpoint(real.module, "none", Compilation("inductor"))
    with CountFused() as count:
        out = real.run()
        out.backward(torch.ones_like(out))
    for operators, uncompiled, kernels in (
        (found.forward, eager.forward, count.forward),
        (found.inputs + found.weights, eager.inputs + eager.weights, count.backward),
    ):
        assert fused_bytes(operators) == pytest.approx(kernels.nbytes, rel=0.2)
        assert fused_bytes(uncompiled) > 1.05 * kernels.nbytes
        named = [o for o in operators if o.in_layer and o.kind not in (*HOST_KINDS, "matmul")]
        calls = sum(np.sum(o.calls) for o in named if not o.kind.startswith("attention"))
        assert calls == pytest.approx(kernels.calls, rel=0.5, abs=3)


def test_compiled_qwen3_layer_moves_a_fifth() -> None:
    module = ModuleDescription("llm", "llm", (QWEN3_1_7B,), trainable=True)
    meta = MicrobatchMeta(tuple(SampleMeta("s", i, 2048) for i in range(4)), 8192)
    sizes = llm_sizes([meta], [8192], padding=True)
    compiled, eager = (
        layer_operators(module.layers[0], sizes, Setting(Execution(compiled=own), 2))
        for own in (True, False)
    )
    # Gigabytes counted on the meta device, eager, and from the tensors that fused kernels touch.
    assert fused_bytes(compiled.forward) / 1e9 == pytest.approx(0.7, abs=0.1)
    assert fused_bytes(compiled.inputs + compiled.weights) / 1e9 == pytest.approx(1.6, abs=0.2)
    assert fused_bytes(eager.forward) / 1e9 == pytest.approx(3.3, abs=0.4)
    assert fused_bytes(eager.inputs + eager.weights) / 1e9 == pytest.approx(7.8, abs=0.8)


def test_compiled_layer_costs_calls_and_launches() -> None:
    profile = assumed_profile(DEVICES["h100"])
    module = ModuleDescription("llm", "llm", (QWEN3_1_7B,), trainable=True)
    sizes = llm_sizes([MicrobatchMeta((SampleMeta("s", 0, 8),), 8)], [8], padding=True)
    by_mode = {
        compiled: CostModel(profile, "bfloat16", {"llm": Execution(compiled=compiled)})
        for compiled in (False, True)
    }
    eager_ms, compiled_ms = (
        float(model.stage_costs(module, 0, 1, sizes, True).forward.host_ms[0])
        - float(model.stage_costs(module, 1, 1, sizes, True).forward.host_ms[0])
        for model in by_mode.values()
    )
    kernels = 7 + 1 + 8  # matmuls, attention, fused kernels
    launches = kernels + ASSUMED_LAUNCHES["compiled_call"]
    head_ms = eager_ms - 54 * profile.launch_us / 1e3  # 54 kernels: counted on the meta device
    assert compiled_ms - head_ms == pytest.approx(launches * profile.launch_us / 1e3, rel=0.1)


def test_compiled_launches_use_measured_host_time() -> None:
    profile = assumed_profile(DEVICES["h100"])
    call_us = {**profile.call_us, "compiled_launch": 7.0}
    measured = type(profile)(**{**vars(profile), "call_us": call_us, "host_us": {"copy": 9.0}})
    operators = [Operator("copy", calls=2.0), Operator("copy", calls=3.0, in_layer=False)]
    assert Work.of(operators, measured, "bfloat16", 1).host_ms == pytest.approx(5 * 9e-3)
    found = Work.of(operators, measured, "bfloat16", 1, compiled=True)
    assert found.host_ms == pytest.approx(2 * 7e-3 + 3 * 9e-3)


def test_selective_recomputation_compiled_repeats_fused_kernels() -> None:
    sizes = llm_sizes([MicrobatchMeta((SampleMeta("s", 0, 64),), 64)], [8], padding=True)
    found = layer_operators(
        QWEN3_1_7B, sizes, Setting(Execution(recompute="selective", compiled=True), 2)
    )
    kinds = {o.kind for o in found.again}
    assert not kinds & {"matmul", "attention", "compiled_call"}
    assert fused_bytes(found.again) == pytest.approx(fused_bytes(found.forward))
    kept = [
        layer_kept_bytes(
            QWEN3_1_7B, sizes, Setting(Execution(recompute=mode, compiled=True), 2), weights=True
        )[0]
        for mode in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2]
