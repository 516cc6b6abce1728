"""Tests of compiled layer costs against the kernels that Inductor generates for real layers."""

from __future__ import annotations

from dataclasses import replace

import model_cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from counting import CountFused, CountTraffic
from test_layer_operators import RealLayer, traffic
from torch.distributed.device_mesh import init_device_mesh

from torchmm.balance.costs.model import UPDATE_CALLS, CostModel, ShardLinks, all_gather_operators
from torchmm.balance.costs.profiles import assumed_profile
from torchmm.common.batch import Microbatch, MicrobatchMeta, SampleMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs import blocks
from torchmm.costs.blocks import HeadBlock
from torchmm.costs.devices import DEVICES, WITHIN_NODE
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.layers import layer_operators, layer_saved_bytes
from torchmm.costs.operators import (
    ASSUMED_LAUNCHES,
    HOST_KINDS,
    KINDS,
    DeviceProfile,
    EfficiencyCurve,
    Operator,
    OperatorTotals,
    operator_time_ms,
)
from torchmm.costs.sizes import llm_sizes
from torchmm.models.layers import loss
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.fsdp import LayerSharding, apply_fsdp
from torchmm.recipe.model_section import LlmConfig, ModelConfig

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


def llm(layers: int) -> ModuleDescription:
    return ModuleDescription(
        name="llm",
        kind="llm",
        layers=(QWEN3_1_7B,) * layers,
        embedding_flops_per_unit=0,
        head_flops_per_unit=0,
        parameters=layers * QWEN3_1_7B.parameters,
        trainable=True,
    )


def fused_bytes(operators: list[Operator]) -> float:
    return traffic([o for o in operators if o.in_layer and o.kind not in HOST_KINDS], False)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layer_traffic_matches_inductor(family: str) -> None:
    torch.compiler.reset()
    real = RealLayer(family, torch.bfloat16)
    layer = real.description.layers[0]
    fused = layer_operators(layer, real.sizes, CostSetting(Execution(compiled=True), 2))
    eager = layer_operators(layer, real.sizes, CostSetting(Execution(), 2))
    apply_activation_checkpoint(real.module, "none", Compilation("inductor"))
    with CountFused() as count:
        out = real.run()
        out.backward(torch.ones_like(out))
    for operators, uncompiled, kernels in (
        (fused.forward, eager.forward, count.forward),
        (fused.inputs + fused.weights, eager.inputs + eager.weights, count.backward),
    ):
        assert fused_bytes(operators) == pytest.approx(kernels.nbytes, rel=0.2)
        assert fused_bytes(uncompiled) > 1.05 * kernels.nbytes
        named = [o for o in operators if o.in_layer and o.kind not in (*HOST_KINDS, "matmul")]
        calls = sum(np.sum(o.calls) for o in named if not o.kind.startswith("attention"))
        assert calls == pytest.approx(kernels.calls, rel=0.5, abs=3)


def test_compiled_layer_memory_traffic() -> None:
    module = llm(1)
    meta = MicrobatchMeta(tuple(SampleMeta("s", i, 2048) for i in range(4)), 8192)
    sizes = llm_sizes([meta], [8192], padding=True)
    compiled, eager = (
        layer_operators(module.layers[0], sizes, CostSetting(Execution(compiled=mode), 2))
        for mode in (True, False)
    )
    # Expected GB: eager counted on the meta device, compiled from the tensors of fused kernels.
    assert fused_bytes(compiled.forward) / 1e9 == pytest.approx(0.7, abs=0.1)
    assert fused_bytes(compiled.inputs + compiled.weights) / 1e9 == pytest.approx(1.6, abs=0.2)
    assert fused_bytes(eager.forward) / 1e9 == pytest.approx(3.3, abs=0.4)
    assert fused_bytes(eager.inputs + eager.weights) / 1e9 == pytest.approx(7.8, abs=0.8)


def test_compiled_layer_launch_time() -> None:
    profile = assumed_profile(DEVICES["h100"])
    module = llm(1)
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
    head_ms = eager_ms - 54 * profile.launch_us / 1e3  # 54 kernels, counted on the meta device
    assert compiled_ms - head_ms == pytest.approx(launches * profile.launch_us / 1e3, rel=0.1)


def test_compiled_launches_use_measured_host_time() -> None:
    profile = replace(assumed_profile(DEVICES["h100"]), host_us={"copy": 9.0})
    operators = [Operator("copy", calls=2.0), Operator("copy", calls=3.0, in_layer=False)]
    eager = OperatorTotals.from_operators(operators, profile, "bfloat16", 1)
    assert eager.host_ms == pytest.approx(5 * profile.launch_us * 1e-3)
    compiled = OperatorTotals.from_operators(operators, profile, "bfloat16", 1, compiled=True)
    assert compiled.host_ms == pytest.approx((2 * 9.0 + 3 * profile.launch_us) * 1e-3)


def test_fsdp_copies_add_device_and_host_time() -> None:
    profile = assumed_profile(DEVICES["h100"])
    module = llm(4)
    model = CostModel(profile, "bfloat16", {"llm": Execution(shard=2)})
    gathered = model.gather_work(module, 1, 3)
    units = 3  # two layers, and the root
    per_unit_us = profile.launch_time_us("shard_unit") + 3 * profile.launch_us
    assert gathered.host_ms[0] == pytest.approx(units * per_unit_us * 1e-3)
    # Each shard is read in float32 and written in bfloat16. All parameters are copied twice.
    moved = 2 * QWEN3_1_7B.parameters * (4 / 2 + 6)
    alone = operator_time_ms(Operator("copy", memory_bytes=moved, calls=6.0), profile, "bfloat16")
    assert gathered.compute_ms[0] == pytest.approx(float(alone))


def test_loss_on_gpu_moves_twelve_bytes_per_logit() -> None:
    sizes = llm_sizes([MicrobatchMeta((SampleMeta("s", 0, 4096),), 4096)], [4096], padding=True)

    def nbytes(vocabulary: int, is_gpu: bool, rows: int) -> float:
        head = HeadBlock(True, linear=(64, vocabulary), norm="rms", chunk_targets=rows)
        operators = head.operators(sizes, CostSetting(Execution(), 2, calls_per_segment=not is_gpu))
        in_layer = [o for group in operators for o in group if o.in_layer]
        return float(sum(np.sum(o.memory_bytes) for o in in_layer))

    for rows in (0, 331):
        # Exclude the weight, which is read twice and whose gradient is written once.
        weight = 3 * 2 * 64 * 1000
        gpu = nbytes(2000, True, rows) - nbytes(1000, True, rows) - weight
        cpu = nbytes(2000, False, rows) - nbytes(1000, False, rows) - weight
        assert gpu == pytest.approx(12 * 4096 * 1000, rel=0.01)
        assert cpu > 3.4 * gpu


def test_update_on_gpu_reads_and_writes_states_once() -> None:
    module = llm(4)
    device = replace(DEVICES["h100"], name="toy", memory_bytes_per_s=1e12)
    flat = dict.fromkeys(KINDS, EfficiencyCurve((1.0,), (1.0,)))
    model = CostModel(DeviceProfile(device, flat, {}, launch_us=0.0), "bfloat16", {})
    count = 2 * QWEN3_1_7B.parameters
    # The norm, AdamW with clipping, and bfloat16 copies for computation on one rank.
    assert model.update_ms(module, 1, 3) == pytest.approx((4 + 32 + 6) * count / 1e12 * 1e3)
    sharded = replace(model, executions={"llm": Execution(shard=2)})
    assert sharded.update_ms(module, 1, 3) == pytest.approx((4 + 32) * count / 2 / 1e12 * 1e3)
    # The host launches the norm, and updates of 7 weights and 4 norms per layer, and of the root.
    slow = replace(model, profile=DeviceProfile(device, flat, {}, launch_us=1e6))
    launches = UPDATE_CALLS * (2 * (7 + 2 + 2) + 1) + 1
    assert slow.update_ms(module, 1, 3) == pytest.approx(1e3 * launches)


def test_compiled_selective_recomputation_repeats_fused_kernels() -> None:
    sizes = llm_sizes([MicrobatchMeta((SampleMeta("s", 0, 64),), 64)], [8], padding=True)
    operators = layer_operators(
        QWEN3_1_7B, sizes, CostSetting(Execution(recompute="selective", compiled=True), 2)
    )
    kinds = {o.kind for o in operators.recomputed}
    assert not kinds & {"matmul", "attention", "compiled_call"}
    assert fused_bytes(operators.recomputed) == pytest.approx(fused_bytes(operators.forward))
    kept = [
        layer_saved_bytes(
            QWEN3_1_7B,
            sizes,
            CostSetting(Execution(recompute=mode, compiled=True), 2),
            weights=True,
        )[0]
        for mode in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2]


def test_fsdp_copies_match_counted_traffic() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = {**model_cases.LLMS["llama"], "hidden_size": 128}
        model = model_cases.build(ModelConfig(llm=LlmConfig(config=config)))
        apply_fsdp(model.llm, init_device_mesh("cpu", (1,)), torch.bfloat16)
        sharding = LayerSharding(model.llm)
        sharding.begin_step(2)  # the first microbatch does not reduce gradients
        ids = torch.ones(8, dtype=torch.int64)
        meta = MicrobatchMeta((SampleMeta("s", 0, 8),), 8)
        with CountTraffic() as count:
            model(Microbatch(ids, ids, torch.arange(8), [0, 8], {}, meta))
    finally:
        dist.destroy_process_group()
    parameters = sum(p.numel() for p in model.parameters())
    # The counter counts each write of `copy_` twice, as argument and as result.
    copied = count.nbytes["_to_copy"] + count.nbytes["copy_"] * 2 / 3
    operators = all_gather_operators(
        model.llm.describe(), 0, len(model.llm.layers), Execution(), 2, ShardLinks(WITHIN_NODE)
    )
    predicted = sum(float(o.memory_bytes) for o in operators)
    assert predicted == pytest.approx(10 * parameters, rel=0.02)
    assert copied == pytest.approx(predicted, rel=0.05)


def test_loss_chunks_match_loss() -> None:
    assert blocks.LOSS_CHUNK == loss.CHUNK_TARGETS
    assert blocks.LOGIT_BYTES == loss._LOGIT_BYTES
