"""Tests of stage costs: effects of gradients, recomputation, sharding and links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from torchmm.balance.costs.model import CostModel, StageCosts
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.blocks import InputBlock, ProjectionBlock, stage_blocks
from torchmm.costs.devices import BETWEEN_NODES, WITHIN_NODE, Device
from torchmm.costs.execution import CostSetting, Execution, ParameterStates
from torchmm.costs.layers import layer_parameters, shared_bytes, stage_parameters
from torchmm.costs.operators import (
    KINDS,
    DeviceProfile,
    EfficiencyCurve,
    OperatorKind,
    OperatorTimes,
)
from torchmm.costs.sizes import generator_sizes, llm_sizes

LAYER = LayerDescription(64, 4, 2, 16, 160, gated_ffn=True, causal=True, parameters=45_000)
LLM = ModuleDescription(
    "llm",
    "llm",
    (LAYER,) * 4,
    0,
    2 * 64 * 500,
    parameters=4 * 45_000 + 2 * 32_000 + 64,
    embedding_parameters=32_000,
    head_parameters=32_064,
    head_linears=((64, 500),),
)
DEVICE = Device("toy", {"float32": 1e12, "bfloat16": 2e12}, 1e11, 1e9, 1e10, 1e9, 4, False, "-")
PROFILE = DeviceProfile(DEVICE, dict.fromkeys(KINDS, EfficiencyCurve((1.0,), (0.5,))))
METAS = [
    MicrobatchMeta((SampleMeta("s", 0, 30), SampleMeta("s", 1, 50)), 100),
    MicrobatchMeta((SampleMeta("s", 2, 100),), 100),
]


def costs(
    module: ModuleDescription = LLM,
    layers: tuple[int, int] = (0, 4),
    arrives: bool = True,
    dtype: str = "float32",
    **execution: object,
) -> StageCosts:
    model = CostModel(PROFILE, dtype, {"llm": Execution(**execution)})  # type: ignore[arg-type]
    sizes = [llm_sizes(METAS, [80, 99], padding=padding) for padding in (True, False)]
    return model.stage_costs(module, *layers, sizes[0], arrives, sizes[1])


def test_stage_costs_sum_to_module() -> None:
    full, stages = costs(), [costs(layers=(0, 1)), costs(layers=(1, 3)), costs(layers=(3, 4))]
    for name in ("forward", "backward", "inputs", "weights"):
        total = sum(getattr(stage, name).total_ms for stage in stages)
        assert getattr(full, name).total_ms == pytest.approx(total), name
    tables = shared_bytes(
        LLM, llm_sizes(METAS, [80, 99], padding=True), 4
    )  # shared by all layers of a stage
    kept = sum(stage.saved_bytes - tables for stage in stages) + tables
    assert full.saved_bytes == pytest.approx(kept)
    assert full.flops.forward_N == pytest.approx(sum(stage.flops.forward_N for stage in stages))


def test_backward_splits_into_inputs_and_weights() -> None:
    trained = costs(layers=(1, 3))
    both = trained.inputs.total_ms + trained.weights.total_ms
    assert trained.backward.total_ms == pytest.approx(both)
    frozen = costs(replace(LLM, trainable=False), layers=(1, 3))
    assert frozen.backward.total_ms == pytest.approx(trained.inputs.total_ms)
    assert frozen.weights.total_ms == pytest.approx([0, 0])
    assert (frozen.saved_bytes < trained.saved_bytes).all()


def test_frozen_first_stage_has_no_backward() -> None:
    frozen = costs(replace(LLM, trainable=False), layers=(1, 3), arrives=False)
    assert frozen.backward.total_ms == pytest.approx([0, 0])
    assert frozen.saved_bytes == pytest.approx([0, 0])
    assert (frozen.workspace_bytes > 0).all()  # a forward pass still has temporaries


def test_padding_adds_time_without_model_flops() -> None:
    padded = costs()
    # Attention within two shorter samples has fewer FLOPs.
    assert padded.forward.total_ms[0] > 0.85 * padded.forward.total_ms[1]
    assert padded.flops.forward_N[0] < 0.85 * padded.flops.forward_N[1]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_adds_time_and_saves_memory(mode: str) -> None:
    plain, recomputed = costs(layers=(1, 3)), costs(layers=(1, 3), recompute=mode)
    assert (recomputed.saved_bytes < 0.7 * plain.saved_bytes).all()
    assert recomputed.flops.inputs_N == pytest.approx(plain.flops.inputs_N)
    extra = recomputed.backward.total_ms - plain.backward.total_ms
    # "full" repeats all but the last matmul, "selective" repeats all but matmuls.
    low, high = (0.75, 0.99) if mode == "full" else (0.1, 0.9)
    assert (extra > low * plain.forward.total_ms).all()
    assert (extra < high * plain.forward.total_ms).all()
    # A backward pass with recomputation is not split: the I action has its full time.
    assert recomputed.inputs.total_ms == pytest.approx(recomputed.backward.total_ms)
    assert recomputed.weights.total_ms == pytest.approx([0, 0])
    assert (recomputed.workspace_bytes > plain.workspace_bytes).all()


def test_tensor_parallel_speedup_is_sublinear() -> None:
    one, two = costs(layers=(1, 3)), costs(layers=(1, 3), tensor=2)
    assert one.forward.tp_comm_ms == pytest.approx([0, 0])
    compute = two.forward.total_ms - two.forward.tp_comm_ms
    assert (compute < one.forward.total_ms).all()
    assert (compute > one.forward.total_ms / 2).all()  # norms are not sharded
    # Two all-reduces of 100 x 64 float32 values in each of two layers at 5 GB/s.
    assert two.forward.tp_comm_ms == pytest.approx([4 * 100 * 64 * 4 / 5e9 * 1e3] * 2)
    hidden = costs(layers=(1, 3), tensor=2, async_tensor=True)
    assert hidden.forward.tp_comm_ms == pytest.approx(two.forward.tp_comm_ms / 2)


def test_generator_shards_layers_without_ends() -> None:
    generator = replace(LLM, kind="generator")
    for execution in ({"tensor": 2}, {"tensor": 4, "sequence_parallel": True}):
        layers = (
            costs(LLM, layers=(1, 3), **execution),
            costs(generator, layers=(1, 3), **execution),
        )
        for text, generated in zip(*layers, strict=True):
            if isinstance(text, OperatorTimes):
                assert generated.total_ms == pytest.approx(text.total_ms)
                assert generated.tp_comm_ms == pytest.approx(text.tp_comm_ms)
    around = replace(generator, head_linears=((64, 48),), embedding_linears=((48, 64),))
    ends = [
        [
            costs(around, layers=(start, stop), tensor=n).forward.total_ms
            - costs(around, layers=(1, 2), tensor=n).forward.total_ms
            for n in (1, 2)
        ]
        for start, stop in ((0, 1), (len(LLM.layers) - 1, len(LLM.layers)))
    ]
    for alone, split in ends:
        assert split == pytest.approx(alone)


def test_generator_communication_does_not_overlap() -> None:
    split = {"layers": (1, 3), "tensor": 2, "sequence_parallel": True}
    generator = replace(LLM, kind="generator")
    plain, overlapped = costs(generator, **split), costs(generator, **split, async_tensor=True)
    assert overlapped.forward.tp_comm_ms == pytest.approx(plain.forward.tp_comm_ms)
    assert (overlapped.forward.tp_comm_ms > 0).all()


def test_cross_attention_context_gradient_is_reduced() -> None:
    """Check the reduction of context gradients, which the heads of each rank contribute to."""
    sizes = generator_sizes([[GeneratedMeta((1, 4, 4), 8)]])
    layer = replace(LLM.layers[0], cross_attention=True)
    generator = replace(LLM, kind="generator", layers=(layer,) * 3)
    model = CostModel(PROFILE, "float32", {"llm": Execution(tensor=2)})
    times = model.stage_costs(generator, 1, 2, sizes, True)
    # Forward has an all-reduce for each of three sublayers. Backward also reduces 8 context tokens.
    rate = 5e9
    assert times.forward.tp_comm_ms == pytest.approx([3 * 16 * 64 * 4 / rate * 1e3])
    assert times.inputs.tp_comm_ms == pytest.approx([(3 * 16 + 8) * 64 * 4 / rate * 1e3])


def test_async_tensor_parallelism_repeats_all_gathers() -> None:
    split = {"layers": (1, 3), "tensor": 2, "sequence_parallel": True}
    plain, hidden = costs(**split), costs(**split, async_tensor=True)
    assert plain.backward.tp_comm_ms == pytest.approx(plain.forward.tp_comm_ms)
    # Half of the time overlaps. Backward repeats all-gathers: six transfers instead of four.
    assert hidden.forward.tp_comm_ms == pytest.approx(plain.forward.tp_comm_ms / 2)
    assert hidden.backward.tp_comm_ms == pytest.approx(plain.backward.tp_comm_ms * 6 / 4 / 2)
    # Half of the inputs of two matmul groups in two layers: 100 x 64 float32 values each.
    assert plain.saved_bytes - hidden.saved_bytes == pytest.approx([2 * 2 * 100 * 64 * 4 / 2] * 2)
    frozen = costs(replace(LLM, trainable=False), **split, async_tensor=True)
    assert frozen.backward.tp_comm_ms == pytest.approx(plain.backward.tp_comm_ms / 2)


def test_bfloat16_moves_half_the_bytes() -> None:
    model = CostModel(PROFILE, "bfloat16")
    assert model.element_bytes == 2
    wide, narrow = costs(layers=(1, 3)), costs(layers=(1, 3), dtype="bfloat16")
    assert (narrow.forward.total_ms < 0.8 * wide.forward.total_ms).all()
    assert (narrow.saved_bytes < 0.7 * wide.saved_bytes).all()


def test_learned_factors_scale_actions() -> None:
    learned = CostModel(replace(PROFILE, factors={"llm": {"F": 1.5}}), "float32")
    sizes = llm_sizes(METAS, [80, 99], padding=True)
    scaled = learned.stage_costs(LLM, 0, 4, sizes, True)
    assert scaled.forward.total_ms == pytest.approx(1.5 * costs().forward.total_ms)
    assert scaled.backward.total_ms == pytest.approx(costs().backward.total_ms)


def test_unsupported_dtype_is_rejected() -> None:
    with pytest.raises(ValueError, match="FLOP/s only for bfloat16, float32"):
        CostModel(PROFILE, "float64")


def test_parameters_by_stage_and_rank() -> None:
    assert stage_parameters(LLM, 0, 4).total == LLM.parameters
    stages = [stage_parameters(LLM, a, b).total for a, b in ((0, 1), (1, 3), (3, 4))]
    assert sum(stages) == LLM.parameters
    assert stages[1] == 2 * 45_000
    products = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160
    assert layer_parameters(LAYER, 2) == products / 2 + 45_000 - products
    frozen = replace(LLM, trainable=False)
    assert stage_parameters(frozen, 0, 4).trained == 0
    tied = replace(LLM, tied=True, parameters=LLM.parameters - 32_000)
    assert stage_parameters(tied, 0, 4).total == tied.parameters
    assert stage_parameters(tied, 0, 2).total == 32_000 + 90_000  # both ends have a replica


def test_static_bytes_of_stage() -> None:
    count = 2 * 45_000
    assert CostModel(PROFILE, "float32").static_bytes(LLM, 1, 3) == 16 * count
    sharded = CostModel(PROFILE, "bfloat16", {"llm": Execution(shard=4)})
    # float32 weights and two moments in four shards, full gradients, and bfloat16 weights.
    assert sharded.static_bytes(LLM, 1, 3) == 12 * count / 4 + 4 * count + 2 * count
    assert sharded.static_bytes(LLM, 0, 4, layerwise=True) < sharded.static_bytes(LLM, 0, 4)
    frozen = sharded.static_bytes(replace(LLM, trainable=False), 1, 3)
    assert frozen == 4 * count / 4 + 2 * count


def test_gradients_reduced_per_microbatch_are_sharded() -> None:
    count, outside = 4 * 45_000, 2 * 32_000 + 64
    runs = (Execution(shard=4, reduces_every_microbatch=each) for each in (False, True))
    once, each = (CostModel(PROFILE, "bfloat16", {"llm": run}) for run in runs)
    assert once.gradient_bytes(LLM, 0, 4, layerwise=True) == 4 * (count + outside)
    # float32 shards, bfloat16 gradients of a layer, the float32 buffer of the previous layer, and
    # the bfloat16 gradients of the embedding and the head.
    expected = (count + outside) + (4 + 2) * 45_000 + 2 * outside
    assert each.gradient_bytes(LLM, 0, 4, layerwise=True) == expected
    saved = 4 * (count + outside) - expected
    sizes = [model.static_bytes(LLM, 0, 4, layerwise=True) for model in (once, each)]
    assert sizes[0] - sizes[1] == saved
    assert each.static_bytes(LLM, 0, 4) == once.static_bytes(LLM, 0, 4)  # gathered once per step
    assert (
        each.setting(LLM, 4).accumulated_fraction == 0 < once.setting(LLM, 4).accumulated_fraction
    )


def test_gather_and_reduce_times() -> None:
    count = 2 * 45_000
    model = CostModel(PROFILE, "float32", {"llm": Execution(shard=4, replicate=2)})
    # Four adjacent ranks share a node (5 GB/s achieved), eight do not (0.5 GB/s).
    copies = count * (4 / 4 + 12) / 5e10
    assert model.gather_ms(LLM, 1, 3) == pytest.approx((4 * count * 3 / 4 / 5e9 + copies) * 1e3)
    reduced = 4 * count * 3 / 4 / 5e9 + 2 * (4 * count / 4) / 2 / 5e8 + 3 * 4 * count / 5e10
    assert model.reduce_ms(LLM, 1, 3) == pytest.approx(reduced * 1e3)
    assert model.reduce_ms(replace(LLM, trainable=False), 1, 3) == 0


def test_python_overhead_of_parallel_execution() -> None:
    def forward_ms(
        asynchronous: bool, call_us: dict[OperatorKind, float], **execution: object
    ) -> float:
        device = replace(DEVICE, asynchronous=asynchronous)
        profile = replace(PROFILE, device=device, call_us=call_us)
        model = CostModel(profile, "float32", {"llm": Execution(**execution)})  # type: ignore[arg-type]
        sizes = llm_sizes(METAS[1:], [99], padding=True)
        return float(model.stage_costs(LLM, 1, 3, sizes, True).forward.total_ms[0])

    for more_us, calls, execution in (
        ({"tensor_linear": 1000.0}, 2 * 7, {"tensor": 2}),
        ({"sequence_exchange": 1000.0}, 2 * 4, {"tensor": 2, "sequence_parallel": True}),
    ):
        without_ms = forward_ms(False, {}, **execution)
        assert forward_ms(False, more_us, **execution) == pytest.approx(without_ms + calls)
        # On asynchronous devices, the slower of host and device determines the time.
        assert forward_ms(True, more_us, **execution) == pytest.approx(calls)
    assert forward_ms(False, {"tensor_linear": 1000.0}) == forward_ms(False, {})
    waiting = replace(PROFILE, call_us={"shard_unit": 1000.0})
    gathers_ms = [
        CostModel(profile, "float32", {"llm": Execution(shard=4)}).gather_ms(LLM, 1, 3)
        for profile in (PROFILE, waiting)
    ]
    assert gathers_ms[1] - gathers_ms[0] == pytest.approx(3)  # two layers and the root


def test_update_time() -> None:
    count = 2 * 45_000
    model = CostModel(PROFILE, "float32", {"llm": Execution(shard=4)})
    assert model.update_ms(LLM, 1, 3) == pytest.approx(48 * count / 4 / 5e10 * 1e3)
    assert model.update_ms(replace(LLM, trainable=False), 1, 3) == 0


def test_pipeline_links() -> None:
    model = CostModel(
        PROFILE, "float32", {"llm": Execution(tensor=2)}
    )  # two pipeline ranks per node
    assert model.pipeline_link(0, 1) == WITHIN_NODE
    assert model.pipeline_link(1, 2) == BETWEEN_NODES
    assert model.transfer_times_ms([5e9, 5e9], [WITHIN_NODE, BETWEEN_NODES]) == pytest.approx(
        [1e3, 1e4]
    )


def test_projection_blocks_match_linear_layers() -> None:
    def embedding(flops: int, *linears: tuple[int, int]) -> list[object]:
        encoder = replace(
            LLM, kind="encoder", embedding_flops_per_unit=flops, embedding_linears=linears
        )
        blocks = [
            b for b in stage_blocks(encoder, 0, 1) if isinstance(b, InputBlock | ProjectionBlock)
        ]
        return [b.linear if isinstance(b, ProjectionBlock) else None for b in blocks]

    assert embedding(9728, (12, 64), (64, 64)) == [(12, 64), (64, 64)]
    assert embedding(8192) == [(64, 64)]  # one square linear with these FLOPs
    assert embedding(0) == [None]


def test_head_saved_bytes() -> None:
    sizes = llm_sizes(METAS[1:], [99], padding=True)
    head = stage_blocks(LLM, 4, 4)[-1]
    saved = head.saved_bytes(sizes, CostSetting(Execution(), 4), True)
    # Norm input, norm result before the weight, selected rows, float32 log-probabilities.
    assert saved == pytest.approx([4 * (2 * 100 * 64 + 99 * 64 + 99 * 500)])


def test_optimizer_states_use_storage_dtype():
    count = sum(layer_parameters(layer) for layer in LLM.layers[1:3])

    def model(**states: object) -> CostModel:
        return CostModel(PROFILE, "float32", {"llm": Execution(states=ParameterStates(**states))})

    narrow = model(weight=2.0, moments=4.0, layer_moments=2.0)
    assert narrow.static_bytes(LLM, 1, 3) == (2 + 4 + 2) * count
    full = stage_parameters(LLM, 0, 4)
    outside = full.total - sum(layer_parameters(layer) for layer in LLM.layers)
    assert narrow.static_bytes(LLM, 0, 4) == 8 * full.total + 2 * outside
    plain_ms = model().update_ms(LLM, 1, 3)
    assert model(uses_muon=True).update_ms(LLM, 1, 3) > plain_ms
    assert model(update_traffic=56.0).update_ms(LLM, 1, 3) > plain_ms


def test_offloaded_states_add_transfer_time():
    device = replace(PROFILE.device, host_bytes_per_s=1e6)
    profile = replace(PROFILE, device=device)

    def update_ms(visiting: float) -> float:
        execution = Execution(states=ParameterStates(offloaded_moments=visiting))
        return CostModel(profile, "float32", {"llm": execution}).update_ms(LLM, 1, 3)

    trained = stage_parameters(LLM, 1, 3).trained
    assert update_ms(8.0) >= 8 * trained / 1e6 * 1e3 > update_ms(0.0)
    assert update_ms(1e-9) == update_ms(0.0)  # overlapped


def test_update_memory():
    count = sum(layer_parameters(layer) for layer in LLM.layers[1:3])

    def update_bytes(element_bytes: int = 4, **states: object) -> tuple[int, int]:
        dtype = "bfloat16" if element_bytes == 2 else "float32"
        execution = Execution(shard=4, states=ParameterStates(**states))
        return CostModel(PROFILE, dtype, {"llm": execution}).update_bytes(LLM, 1, 3)

    assert update_bytes() == (16 * count / 4, 0)  # in place
    small = {
        "update_chunk": 1000,
        "float32_copy": 4.0,
        "float32_moment_copy": 4.0,
        "rounding_buffer": 8.0,
    }
    assert update_bytes(weight=2.0, moments=4.0, layer_moments=4.0, **small) == (
        8 * count / 4,
        1000 * (4 + 8 + 8),
    )
    # Offloaded moments have three buffers.
    assert update_bytes(update_chunk=1000, offloaded_moments=8.0) == (16 * count / 4, 3 * 1000 * 8)
    # The largest round has three matrices of 64 x 160 and the first matrix of the next layer:
    # shards of the updates, the gathered updates, four of the largest matrix, and a square.
    together = 3 * 64 * 160 + 64 * 64
    workspace = update_bytes(uses_muon=True, layer_moments=4.0)[1]
    assert workspace == 4 * (together / 4 + together + 4 * 64 * 160 + 64**2)


def test_workspace_excludes_freed_head_activations():
    sizes = llm_sizes(METAS[1:], [99], padding=True)
    layers, head = stage_blocks(LLM, 1, 2)[0], stage_blocks(LLM, 4, 4)[-1]

    def workspace(recompute: str) -> tuple[float, float]:
        """Return workspace bytes of a stage with the head, and temporary bytes of a layer."""
        execution = Execution(recompute=recompute)
        model = CostModel(PROFILE, "float32", {"llm": execution})
        stage = model.stage_costs(LLM, 1, 4, sizes, False).workspace_bytes
        layer_bytes = layers.temporary_bytes(sizes, CostSetting(execution, 4), np.ones(1))
        return float(stage[0]), float(layer_bytes[0])

    stage_bytes, layer_bytes = workspace("full")
    kept = float(head.saved_bytes(sizes, CostSetting(Execution(), 4), True)[0])
    of_head = float(head.temporary_bytes(sizes, CostSetting(Execution(), 4), np.ones(1))[0])
    assert (
        stage_bytes == pytest.approx(max(layer_bytes - kept, of_head)) and stage_bytes < layer_bytes
    )
    stage_bytes, layer_bytes = workspace(
        "none"
    )  # with split backward passes, W needs the workspace
    assert stage_bytes == pytest.approx(max(layer_bytes, of_head))
