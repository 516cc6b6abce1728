"""Memory estimates: what a pipeline divides among its ranks and what it does not."""

from dataclasses import replace

import pytest

from torchmm.balance.costs.rough_memory import MemoryEstimate, estimate_memory
from torchmm.common.layers import LayerDescription, ModuleDescription

LAYER = LayerDescription(
    hidden_size=8, heads=2, kv_heads=2, head_dim=4, ffn_size=16, gated_ffn=True, causal=True
)
MODULE = ModuleDescription("llm", "llm", (LAYER,) * 4, 0, 0, parameters=800)


def estimate(module: ModuleDescription = MODULE, **settings: object) -> MemoryEstimate:
    defaults: dict = {"shard": 1, "tensor": 1, "compute_bytes": 2, "microbatches": 8}
    defaults |= {"recompute": {}, **settings}
    return estimate_memory([module], {"llm": 10}, **defaults)


def test_a_pipeline_divides_parameters_but_keeps_as_many_microbatches_as_ranks() -> None:
    alone, cut = estimate(), estimate(pipeline=4)
    assert cut.weight_bytes * 4 == alone.weight_bytes == 4 * 800
    assert cut.gradient_bytes * 4 == alone.gradient_bytes == 4 * 800
    assert cut.optimizer_bytes * 4 == alone.optimizer_bytes == 8 * 800
    assert cut.activation_bytes == alone.activation_bytes


def test_fewer_microbatches_than_ranks_keep_less() -> None:
    few, many = estimate(pipeline=4, microbatches=1), estimate(pipeline=4, microbatches=4)
    assert few.activation_bytes * 4 == many.activation_bytes


def test_the_layer_being_recomputed_is_whole_in_a_pipeline_too() -> None:
    alone = estimate(recompute={"llm": "full"}, microbatches=1)
    cut = estimate(recompute={"llm": "full"}, microbatches=1, pipeline=4)
    kept = 10 * 4 * LAYER.hidden_size * 2  # inputs of four layers
    assert alone.activation_bytes - cut.activation_bytes == kept * 3 // 4


@pytest.mark.parametrize(("pipeline", "gathered"), [(1, 2 * 200), (2, 400)])
def test_a_pipeline_keeps_all_its_weights_gathered(pipeline: int, gathered: int) -> None:
    found = estimate(shard=2, pipeline=pipeline, microbatches=1)
    assert found.weight_bytes == 4 * 800 // pipeline // 2 + 2 * gathered
    assert found.gradient_bytes == 4 * 800 // 2  # sharded, or half of the layers


def test_sequence_parallelism_keeps_less_and_a_generator_is_divided_too() -> None:
    split, sliced = estimate(tensor=2), estimate(tensor=2, sequence_parallel=True)
    assert sliced.activation_bytes < split.activation_bytes < estimate().activation_bytes
    drawing = replace(MODULE, kind="generator")
    assert estimate(module=drawing, tensor=2) == split


def test_on_ranks_of_its_own_a_module_keeps_what_the_others_have_not_used_yet() -> None:
    alone, apart = estimate(shard=2), estimate(shard=2, in_flight=3)
    assert apart.activation_bytes == 3 * alone.activation_bytes
    assert apart.weight_bytes - 4 * 800 // 2 == 2 * 800 > alone.weight_bytes - 4 * 800 // 2
    few = estimate(shard=2, in_flight=3, microbatches=1)
    assert few.activation_bytes == alone.activation_bytes
    assert few.gradient_bytes == 4 * 800  # whole until the end of the step
