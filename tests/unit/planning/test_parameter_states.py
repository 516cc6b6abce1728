"""Tests of the bytes of parameters and optimizer states against hand-computed values."""

import pytest

from torchmm.costs.execution import ParameterStates
from torchmm.planning.executions import parameter_states
from torchmm.recipe.recipe import Recipe


def states(training: dict, **optimizer: object) -> ParameterStates:
    recipe = Recipe.model_validate({"optimizer": optimizer, "training": training})
    return parameter_states(recipe)


BFLOAT16 = {"parameter_dtype": "bfloat16"}


def test_float32_parameters_are_updated_in_place():
    plain = states({})
    assert plain == ParameterStates()
    # Parameter and moments are read and written, the gradient is read, and written after clipping.
    assert plain.fused_update_traffic == 2 * (4 + 4 + 4) + 4 + 4


def test_bfloat16_parameters_have_float32_copies():
    narrow = states(BFLOAT16)
    assert (narrow.weight, narrow.moments) == (2, 8)
    assert narrow.fused_update_traffic == 2 * (2 + 4 + 4) + 4
    assert narrow.update_chunk > 0
    assert (narrow.float32_copy, narrow.rounding_buffer) == (4, 8)


def test_moving_average_is_read_and_written():
    for training in ({}, BFLOAT16):
        plain, averaged = states(training), states({**training, "ema_decay": 0.99})
        assert averaged.moving_average == 4
        assert averaged.fused_update_traffic - plain.fused_update_traffic == 2 * 4
        assert averaged.update_traffic - plain.update_traffic == (18 if training else 12)


def test_offloaded_moments_are_not_on_the_device():
    offloaded = states({}, offload=True)
    assert (offloaded.moments, offloaded.offloaded_moments) == (0, 8)
    assert offloaded.update_chunk > 0


def test_muon_has_one_moment_in_layers():
    muon = states({}, name="muon")
    assert (muon.moments, muon.layer_moments) == (8, 4)
    assert muon.uses_muon and muon.fused_update_traffic == muon.update_traffic


@pytest.mark.parametrize(
    ("dtype", "moment", "conversion"), [("bfloat16", 2, 92), ("int8", 1 + 4 / 64, 70)]
)
def test_compact_moments_use_less_memory(dtype, moment, conversion):
    compact = states({}, state_dtype=dtype)
    assert compact.moments == pytest.approx(2 * moment)
    assert compact.fused_update_traffic == pytest.approx(2 * (4 + 2 * moment) + 4)
    assert compact.update_chunk > 0 and compact.float32_moment_copy == 4
    # Without fused kernels, each operator of the conversion of both moments moves bytes.
    assert compact.update_traffic - states({}).update_traffic == 2 * conversion
