"""Tests of the checks of stages under context parallelism."""

from types import SimpleNamespace

import pytest

from torchmm.parallel.context import stage_boundary_problems

LLM = SimpleNamespace(name="llm", deepstack_layers=(0, 1, 2))


def test_stage_that_ends_before_deepstack_layers_is_rejected():
    (problem,) = stage_boundary_problems(LLM, 2, [5, 2])
    assert "context = 2: 'llm' adds image features after its first 3 layers" in problem
    assert "its first stage ends with layer 2" in problem


@pytest.mark.parametrize(("ranks", "stops"), [(1, [2]), (2, []), (2, [3])])
def test_other_stages_are_accepted(ranks, stops):
    assert not stage_boundary_problems(LLM, ranks, stops)
    plain = SimpleNamespace(name="llm", deepstack_layers=())
    assert not stage_boundary_problems(plain, 2, [2])
