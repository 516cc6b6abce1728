"""Recipes drawn at random are equal to plain Hugging Face modules, or refused with a key.

60 draws; 300 where TEST_ALL is set (`./scripts/test.sh --all`). More by hand: run.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.campaign import Judged, explain, features, write_smallest
from fuzz.draw import STEPS, Draw, Layout, draw_recipe
from fuzz.judge import Judge

SEED = int(os.environ.get("FUZZ_SEED", "6"))
DRAWS = 300 if os.environ.get("TEST_ALL") else 60
TOGETHER = 10
"""Draws of a test, which has a time limit."""
FAILURES = Path("outputs/fuzz")


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as judge:
        yield judge


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, DRAWS, TOGETHER), ids=lambda n: f"seed{SEED}-{n}")
def test_draws_are_equal_or_refused(judge, first):
    for index in range(first, first + TOGETHER):
        draw = draw_recipe(SEED, index)
        found = Judged(draw, judge(draw))
        if found.verdict.kind == "failed":
            pytest.fail(explain(*write_smallest(found, FAILURES, judge, tries=25)))


SMALL: Draw = Draw(
    "small",
    "text",
    {
        "model": {
            "llm": {
                "config": {
                    "model_type": "llama",
                    "vocab_size": 96,
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                }
            }
        },
        "freeze": {"modules": []},
        "training": {"global_batch_size": 4, "sequence_length": 64},
    },
    Layout(2, {"parallel": {"shard": 2}}),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "told"), [("", []), ("gradient", "gradient of"), ("rows", "loss")]
)
def test_what_is_spoiled_is_found(spoil, told):
    with Judge(spoil=spoil) as judge:
        verdict = judge(SMALL)
    if not spoil:
        assert verdict.kind == "equal", verdict
        return
    assert (verdict.kind, verdict.how) == ("failed", "different")
    assert any(told in problem for problem in verdict.problems)


def test_draws_are_a_function_of_seed_and_number():
    assert draw_recipe(7, 3) == draw_recipe(7, 3)
    assert draw_recipe(7, 3) != draw_recipe(8, 3)
    assert STEPS == 2
    assert Draw.from_table(draw_recipe(7, 3).as_table()) == draw_recipe(7, 3)
    assert list(features(SMALL.first.sections)) == ["parallel.shard=2"]
