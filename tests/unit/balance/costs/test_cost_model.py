"""Costs of stages: what gradients, recomputation, sharding and links change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from torchmm.balance.costs.model import CostModel, StageCosts
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.blocks import Inputs, Projection, stage_blocks
from torchmm.costs.devices import NETWORK, NODE, Device
from torchmm.costs.execution import Execution, Setting, States
from torchmm.costs.layers import layer_parameters, shared_bytes, stage_parameters
from torchmm.costs.operators import KINDS, Curve, Kind, Profile, Times
from torchmm.costs.sizes import generator_sizes, llm_sizes

LAYER = LayerDescription(64, 4, 2, 16, 160, gated_ffn=True, causal=True, parameters=45_000)
LLM = ModuleDescription(
    "llm",
    "llm",
    (LAYER,) * 4,
    0,
    2 * 64 * 500,
    parameters=4 * 45_000 + 2 * 32_000 + 64,
    pre_parameters=32_000,
    post_parameters=32_064,
    post_linears=((64, 500),),
)
DEVICE = Device("toy", {"float32": 1e12, "bfloat16": 2e12}, 1e11, 1e9, 1e10, 1e9, 4, False, "-")
PROFILE = Profile(DEVICE, dict.fromkeys(KINDS, Curve((1.0,), (0.5,))))
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


def test_stages_add_up_to_the_module() -> None:
    whole, stages = costs(), [costs(layers=(0, 1)), costs(layers=(1, 3)), costs(layers=(3, 4))]
    for name in ("forward", "backward", "inputs", "weights"):
        total = sum(getattr(stage, name).total_ms for stage in stages)
        assert getattr(whole, name).total_ms == pytest.approx(total), name
    tables = shared_bytes(LLM, llm_sizes(METAS, [80, 99], padding=True), 4)  # of each stage
    kept = sum(stage.kept_bytes - tables for stage in stages) + tables
    assert whole.kept_bytes == pytest.approx(kept)
    assert whole.flops.forward_N == pytest.approx(sum(stage.flops.forward_N for stage in stages))


def test_a_backward_is_that_for_inputs_and_that_for_weights() -> None:
    found = costs(layers=(1, 3))
    both = found.inputs.total_ms + found.weights.total_ms
    assert found.backward.total_ms == pytest.approx(both)
    frozen = costs(replace(LLM, trainable=False), layers=(1, 3))
    assert frozen.backward.total_ms == pytest.approx(found.inputs.total_ms)
    assert frozen.weights.total_ms == pytest.approx([0, 0])
    assert (frozen.kept_bytes < found.kept_bytes).all()


def test_nothing_trained_and_nothing_before_needs_no_backward() -> None:
    found = costs(replace(LLM, trainable=False), layers=(1, 3), arrives=False)
    assert found.backward.total_ms == pytest.approx([0, 0])
    assert found.kept_bytes == pytest.approx([0, 0])
    assert (found.workspace_bytes > 0).all()  # a forward still has temporaries


def test_padding_takes_time_but_is_no_model_flop() -> None:
    found = costs()
    # Attention within two shorter samples takes less.
    assert found.forward.total_ms[0] > 0.85 * found.forward.total_ms[1]
    assert found.flops.forward_N[0] < 0.85 * found.flops.forward_N[1]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_costs_time_and_saves_memory_but_is_no_model_flop(mode: str) -> None:
    plain, found = costs(layers=(1, 3)), costs(layers=(1, 3), recompute=mode)
    assert (found.kept_bytes < 0.7 * plain.kept_bytes).all()
    assert found.flops.inputs_N == pytest.approx(plain.flops.inputs_N)
    extra = found.backward.total_ms - plain.backward.total_ms
    # All but the last product, which backward does not need; or all but products.
    low, high = (0.75, 0.99) if mode == "full" else (0.1, 0.9)
    assert (extra > low * plain.forward.total_ms).all()
    assert (extra < high * plain.forward.total_ms).all()
    # A backward that recomputes is not split: all of it is in I.
    assert found.inputs.total_ms == pytest.approx(found.backward.total_ms)
    assert found.weights.total_ms == pytest.approx([0, 0])
    assert (found.workspace_bytes > plain.workspace_bytes).all()


def test_tensor_parallel_ranks_are_faster_by_less_than_their_number() -> None:
    one, two = costs(layers=(1, 3)), costs(layers=(1, 3), tensor=2)
    assert one.forward.tensor_ms == pytest.approx([0, 0])
    compute = two.forward.total_ms - two.forward.tensor_ms
    assert (compute < one.forward.total_ms).all()
    assert (compute > one.forward.total_ms / 2).all()  # norms are not divided
    # Two sums of 100 x 64 float32 values in each of two layers at 5 GB/s.
    assert two.forward.tensor_ms == pytest.approx([4 * 100 * 64 * 4 / 5e9 * 1e3] * 2)
    hidden = costs(layers=(1, 3), tensor=2, async_tensor=True)
    assert hidden.forward.tensor_ms == pytest.approx(two.forward.tensor_ms / 2)


def test_a_generators_layers_are_divided_and_what_stands_around_them_is_not() -> None:
    drawing = replace(LLM, kind="generator")
    for execution in ({"tensor": 2}, {"tensor": 4, "sequence_parallel": True}):
        layers = costs(LLM, layers=(1, 3), **execution), costs(drawing, layers=(1, 3), **execution)
        for text, drawn in zip(*layers, strict=True):
            if isinstance(text, Times):
                assert drawn.total_ms == pytest.approx(text.total_ms)
                assert drawn.tensor_ms == pytest.approx(text.tensor_ms)
    around = replace(drawing, post_linears=((64, 48),), pre_linears=((48, 64),))
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


def test_a_generators_communication_does_not_overlap() -> None:
    split = {"layers": (1, 3), "tensor": 2, "sequence_parallel": True}
    drawing = replace(LLM, kind="generator")
    plain, overlapped = costs(drawing, **split), costs(drawing, **split, async_tensor=True)
    assert overlapped.forward.tensor_ms == pytest.approx(plain.forward.tensor_ms)
    assert (overlapped.forward.tensor_ms > 0).all()


def test_a_context_whose_gradient_is_in_parts_is_summed() -> None:
    """Keys and values of a rank's heads give a part of it."""
    drawn = generator_sizes([[GeneratedMeta((1, 4, 4), 8)]])
    layer = replace(LLM.layers[0], cross_attention=True)
    drawing = replace(LLM, kind="generator", layers=(layer,) * 3)
    model = CostModel(PROFILE, "float32", {"llm": Execution(tensor=2)})
    found = model.stage_costs(drawing, 1, 2, drawn, True)
    # In forward a sum for each of three sublayers; in backward the same, and that of 8 tokens.
    rate = 5e9
    assert found.forward.tensor_ms == pytest.approx([3 * 16 * 64 * 4 / rate * 1e3])
    assert found.inputs.tensor_ms == pytest.approx([(3 * 16 + 8) * 64 * 4 / rate * 1e3])


def test_async_tensor_parallelism_gathers_again_what_it_does_not_keep() -> None:
    split = {"layers": (1, 3), "tensor": 2, "sequence_parallel": True}
    plain, hidden = costs(**split), costs(**split, async_tensor=True)
    assert plain.backward.tensor_ms == pytest.approx(plain.forward.tensor_ms)
    # Half is hidden; backward gathers inputs a second time: six transfers instead of four.
    assert hidden.forward.tensor_ms == pytest.approx(plain.forward.tensor_ms / 2)
    assert hidden.backward.tensor_ms == pytest.approx(plain.backward.tensor_ms * 6 / 4 / 2)
    # Half of the inputs of two groups of products in two layers: 100 x 64 float32 values each.
    assert plain.kept_bytes - hidden.kept_bytes == pytest.approx([2 * 2 * 100 * 64 * 4 / 2] * 2)
    frozen = costs(replace(LLM, trainable=False), **split, async_tensor=True)
    assert frozen.backward.tensor_ms == pytest.approx(plain.backward.tensor_ms / 2)


def test_bfloat16_moves_half_the_bytes() -> None:
    model = CostModel(PROFILE, "bfloat16")
    assert model.element_bytes == 2
    wide, narrow = costs(layers=(1, 3)), costs(layers=(1, 3), dtype="bfloat16")
    assert (narrow.forward.total_ms < 0.8 * wide.forward.total_ms).all()
    assert (narrow.kept_bytes < 0.7 * wide.kept_bytes).all()


def test_learned_factors_scale_actions() -> None:
    learned = CostModel(replace(PROFILE, factors={"llm": {"F": 1.5}}), "float32")
    sizes = llm_sizes(METAS, [80, 99], padding=True)
    found = learned.stage_costs(LLM, 0, 4, sizes, True)
    assert found.forward.total_ms == pytest.approx(1.5 * costs().forward.total_ms)
    assert found.backward.total_ms == pytest.approx(costs().backward.total_ms)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="FLOP/s only for bfloat16, float32"):
        CostModel(PROFILE, "float64")


def test_parameters_of_stages_and_ranks() -> None:
    assert stage_parameters(LLM, 0, 4).all == LLM.parameters
    stages = [stage_parameters(LLM, a, b).all for a, b in ((0, 1), (1, 3), (3, 4))]
    assert sum(stages) == LLM.parameters
    assert stages[1] == 2 * 45_000
    products = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160
    assert layer_parameters(LAYER, 2) == products / 2 + 45_000 - products
    frozen = replace(LLM, trainable=False)
    assert stage_parameters(frozen, 0, 4).trained == 0
    tied = replace(LLM, tied=True, parameters=LLM.parameters - 32_000)
    assert stage_parameters(tied, 0, 4).all == tied.parameters
    assert stage_parameters(tied, 0, 2).all == 32_000 + 90_000  # both ends have a copy


def test_memory_of_a_stage() -> None:
    count = 2 * 45_000
    assert CostModel(PROFILE, "float32").static_bytes(LLM, 1, 3) == 16 * count
    sharded = CostModel(PROFILE, "bfloat16", {"llm": Execution(shard=4)})
    # float32 weights and two moments in four shards, gradients whole, gathered bfloat16 weights.
    assert sharded.static_bytes(LLM, 1, 3) == 12 * count / 4 + 4 * count + 2 * count
    assert sharded.static_bytes(LLM, 0, 4, layerwise=True) < sharded.static_bytes(LLM, 0, 4)
    frozen = sharded.static_bytes(replace(LLM, trainable=False), 1, 3)
    assert frozen == 4 * count / 4 + 2 * count


def test_gradients_reduced_per_microbatch_are_sharded() -> None:
    count, outside = 4 * 45_000, 2 * 32_000 + 64
    runs = (Execution(shard=4, reduces_each=each) for each in (False, True))
    once, each = (CostModel(PROFILE, "bfloat16", {"llm": run}) for run in runs)
    assert once.gradient_bytes(LLM, 0, 4, layerwise=True) == 4 * (count + outside)
    # float32 shards; a layer's bfloat16 gradients and the float32 buffer of the one before; those
    # of the embedding and the head in bfloat16.
    expected = (count + outside) + (4 + 2) * 45_000 + 2 * outside
    assert each.gradient_bytes(LLM, 0, 4, layerwise=True) == expected
    saved = 4 * (count + outside) - expected
    sizes = [model.static_bytes(LLM, 0, 4, layerwise=True) for model in (once, each)]
    assert sizes[0] - sizes[1] == saved
    assert each.static_bytes(LLM, 0, 4) == once.static_bytes(LLM, 0, 4)  # gathered once per step
    assert each.setting(LLM, 4).accumulated == 0 < once.setting(LLM, 4).accumulated


def test_gathering_and_reducing_by_hand() -> None:
    count = 2 * 45_000
    model = CostModel(PROFILE, "float32", {"llm": Execution(shard=4, replicate=2)})
    # Four neighbours share a node (5 GB/s reached), eight do not (0.5 GB/s).
    copies = count * (4 / 4 + 12) / 5e10
    assert model.gather_ms(LLM, 1, 3) == pytest.approx((4 * count * 3 / 4 / 5e9 + copies) * 1e3)
    reduced = 4 * count * 3 / 4 / 5e9 + 2 * (4 * count / 4) / 2 / 5e8 + 3 * 4 * count / 5e10
    assert model.reduce_ms(LLM, 1, 3) == pytest.approx(reduced * 1e3)
    assert model.reduce_ms(replace(LLM, trainable=False), 1, 3) == 0


def test_python_takes_its_time_for_linears_slices_and_units_of_several_ranks() -> None:
    def forward_ms(asynchronous: bool, call_us: dict[Kind, float], **execution: object) -> float:
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
        # Where the host only queues work, whoever takes longer sets the time.
        assert forward_ms(True, more_us, **execution) == pytest.approx(calls)
    assert forward_ms(False, {"tensor_linear": 1000.0}) == forward_ms(False, {})
    waiting = replace(PROFILE, call_us={"shard_unit": 1000.0})
    gathers_ms = [
        CostModel(profile, "float32", {"llm": Execution(shard=4)}).gather_ms(LLM, 1, 3)
        for profile in (PROFILE, waiting)
    ]
    assert gathers_ms[1] - gathers_ms[0] == pytest.approx(3)  # two layers and the root


def test_the_update_by_hand() -> None:
    count = 2 * 45_000
    model = CostModel(PROFILE, "float32", {"llm": Execution(shard=4)})
    assert model.update_ms(LLM, 1, 3) == pytest.approx(48 * count / 4 / 5e10 * 1e3)
    assert model.update_ms(replace(LLM, trainable=False), 1, 3) == 0


def test_links_between_pipeline_ranks() -> None:
    model = CostModel(PROFILE, "float32", {"llm": Execution(tensor=2)})  # two ranks to a node
    assert model.pipeline_link(0, 1) == NODE
    assert model.pipeline_link(1, 2) == NETWORK
    assert model.transfers_ms([5e9, 5e9], [NODE, NETWORK]) == pytest.approx([1e3, 1e4])


def test_embedding_blocks_follow_the_listed_linears() -> None:
    def embedding(flops: int, *linears: tuple[int, int]) -> list[object]:
        encoder = replace(LLM, kind="encoder", pre_flops_per_unit=flops, pre_linears=linears)
        blocks = [b for b in stage_blocks(encoder, 0, 1) if isinstance(b, Inputs | Projection)]
        return [b.linear if isinstance(b, Projection) else None for b in blocks]

    assert embedding(9728, (12, 64), (64, 64)) == [(12, 64), (64, 64)]
    assert embedding(8192) == [(64, 64)]  # one square linear with these FLOPs
    assert embedding(0) == [None]


def test_kept_bytes_of_the_ends_by_hand() -> None:
    sizes = llm_sizes(METAS[1:], [99], padding=True)
    head = stage_blocks(LLM, 4, 4)[-1]
    found = head.kept_bytes(sizes, Setting(Execution(), 4), True)
    # Norm's input and result before the weight, the picked rows, float32 log-probabilities.
    assert found == pytest.approx([4 * (2 * 100 * 64 + 99 * 64 + 99 * 500)])


def test_states_count_as_they_rest_and_muon_takes_products():
    count = sum(layer_parameters(layer) for layer in LLM.layers[1:3])

    def model(**states: object) -> CostModel:
        return CostModel(PROFILE, "float32", {"llm": Execution(states=States(**states))})

    narrow = model(weight=2.0, moments=4.0, layer_moments=2.0)
    assert narrow.static_bytes(LLM, 1, 3) == (2 + 4 + 2) * count
    whole = stage_parameters(LLM, 0, 4)
    elsewhere = whole.all - sum(layer_parameters(layer) for layer in LLM.layers)
    assert narrow.static_bytes(LLM, 0, 4) == 8 * whole.all + 2 * elsewhere
    plain_ms = model().update_ms(LLM, 1, 3)
    assert model(orthogonal=True).update_ms(LLM, 1, 3) > plain_ms
    assert model(updated=56.0).update_ms(LLM, 1, 3) > plain_ms


def test_states_on_the_host_come_over_its_link_during_the_update():
    device = replace(PROFILE.device, host_bytes_per_s=1e6)
    profile = replace(PROFILE, device=device)

    def update_ms(visiting: float) -> float:
        execution = Execution(states=States(visiting=visiting))
        return CostModel(profile, "float32", {"llm": execution}).update_ms(LLM, 1, 3)

    trained = stage_parameters(LLM, 1, 3).trained
    assert update_ms(8.0) >= 8 * trained / 1e6 * 1e3 > update_ms(0.0)
    assert update_ms(1e-9) == update_ms(0.0)  # hidden


def test_room_for_the_update_by_hand():
    count = sum(layer_parameters(layer) for layer in LLM.layers[1:3])

    def found(element_bytes: int = 4, **states: object) -> tuple[int, int]:
        dtype = "bfloat16" if element_bytes == 2 else "float32"
        execution = Execution(shard=4, states=States(**states))
        return CostModel(PROFILE, dtype, {"llm": execution}).update_bytes(LLM, 1, 3)

    assert found() == (16 * count / 4, 0)  # in place
    small = {"portion": 1000, "copy": 4.0, "moment_copy": 4.0, "rounding": 8.0}
    assert found(weight=2.0, moments=4.0, layer_moments=4.0, **small) == (
        8 * count / 4,
        1000 * (4 + 8 + 8),
    )
    # Moments that visit have three places.
    assert found(portion=1000, visiting=8.0) == (16 * count / 4, 3 * 1000 * 8)
    # The largest round has three matrices of 64 x 160 and the next layer's first one: parts of the
    # updates, all of them gathered, four of the largest and a square.
    together = 3 * 64 * 160 + 64 * 64
    room = found(orthogonal=True, layer_moments=4.0)[1]
    assert room == 4 * (together / 4 + together + 4 * 64 * 160 + 64**2)


def test_a_task_needs_no_room_beside_what_blocks_behind_have_let_go_of():
    sizes = llm_sizes(METAS[1:], [99], padding=True)
    layers, head = stage_blocks(LLM, 1, 2)[0], stage_blocks(LLM, 4, 4)[-1]

    def room(recompute: str) -> tuple[float, float]:
        """(of a stage with the head, of its layers)."""
        execution = Execution(recompute=recompute)
        model = CostModel(PROFILE, "float32", {"llm": execution})
        whole = model.stage_costs(LLM, 1, 4, sizes, False).workspace_bytes
        own = layers.temporary_bytes(sizes, Setting(execution, 4), np.ones(1))
        return float(whole[0]), float(own[0])

    found, own = room("full")
    kept = float(head.kept_bytes(sizes, Setting(Execution(), 4), True)[0])
    of_head = float(head.temporary_bytes(sizes, Setting(Execution(), 4), np.ones(1))[0])
    assert found == pytest.approx(max(own - kept, of_head)) and found < own
    found, own = room("none")  # where backwards may be split, W still needs it
    assert found == pytest.approx(max(own, of_head))
